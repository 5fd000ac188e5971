"""`flashtile check`: what it draws, that it finds backends that are wrong, how small it makes a failure, and its
reproducers."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import os
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from flashtile import families
from flashtile.backends import dropout, registry
from flashtile.backends.tiled import BLOCK_N, TiledBackend
from flashtile.cli import check as command
from flashtile.cli.main import app
from flashtile.lab.bench.terminal import INTERRUPTED
from flashtile.lab.check import mutants, runner, workers
from flashtile.lab.check.decode import DecodeDrawer
from flashtile.lab.check.draw import MAX_SCORES, Drawer
from flashtile.lab.check.judge import judge
from flashtile.lab.check.mutants import Hunt
from flashtile.lab.check.report import Report, Settings
from flashtile.lab.check.runner import check, check_trials, judge_all
from flashtile.lab.check.shrink import candidates
from flashtile.lab.check.trial import Trial
from flashtile.plans.mutation import Mutation, mutations
from flashtile.problem import Problem, shape_of
from flashtile.testing import DOUT_MEMORIES, FORWARD_ONLY, KINDS, MEMORIES, VALUES, Case

EDGES = (64, 128)


HANGS_S = 600  # more than any machine takes for a test


@dataclasses.dataclass(frozen=True)
class Clock:
    """A clock that all processes of a check share. It goes on where a test says so, on a busy machine as on any."""

    path: Path

    def __call__(self) -> float:
        return float(self.path.stat().st_size)

    def advance(self, seconds: int) -> None:
        with self.path.open("ab") as file:
            file.write(bytes(seconds))


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    (tmp_path / "clock").touch()
    return Clock(tmp_path / "clock")


def draw(count: int, seed: int = 3, direction: str = "both", **options) -> list[Trial]:
    return list(itertools.islice(Drawer(seed, "cpu", direction, EDGES, **options), count))


# What is drawn


def test_the_same_seed_draws_the_same_problems() -> None:
    assert draw(50) == draw(50)
    assert draw(50) != draw(50, seed=4)


def test_everything_is_drawn() -> None:
    drawn = draw(3000)
    cases = [trial.case for trial in drawn]
    assert {case.values for case in cases} == set(VALUES)
    assert {case.kind for case in cases} == set(KINDS)
    assert {case.memory for case in cases} == set(MEMORIES)
    assert {case.dout for case in cases} == set(DOUT_MEMORIES)
    assert max(case.heads // case.heads_kv for case in cases) > 64
    assert {edge + step for edge in EDGES for step in (-1, 0, 1)} <= {case.seqlen_k for case in cases}
    assert {trial.has_backward for trial in drawn} == {True, False}
    for name in (
        "causal",
        "layout",
        "mask",
        "bias",
        "alibi",
        "has_sinks",
        "dropout_p",
        "softcap",
        "deterministic",
        "num_splits",
        "is_out_float32",
    ):
        assert len({getattr(case, name) for case in cases}) > 1, name
    assert all(case.batch * case.heads * case.seqlen_q * case.seqlen_k <= MAX_SCORES["cpu"] for case in cases)
    assert not any(trial.has_backward and trial.case.values in FORWARD_ONLY for trial in drawn)


def test_long_keys_and_crowds_are_drawn() -> None:
    drawn = itertools.islice(Drawer(3, "cuda", "forward", EDGES), 1000)
    cases = [trial.case for trial in drawn if trial.case.dtype == torch.bfloat16]
    # The Hopper forward splits keys of more than 512; its blocks, one to a multiprocessor, have three orders before
    # they write over one
    assert any(case.seqlen_k > 1024 and case.num_splits > 1 for case in cases)
    for is_grouped in (False, True):
        assert any(case.batch * case.heads_kv > 3 * 132 for case in cases if (case.heads > case.heads_kv) == is_grouped)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_passes(direction: str) -> None:
    assert {trial.has_backward for trial in draw(50, direction=direction)} == {direction == "backward"}


def test_options_are_kept_for_some_problems() -> None:
    drawn = draw(60, reuse=20)
    shared = [
        {
            (trial.case.dtype, trial.case.head_dim, trial.case.kind, trial.case.softcap > 0)
            for trial in drawn[i : i + 20]
        }
        for i in (0, 20, 40)
    ]
    assert [len(some) for some in shared] == [1, 1, 1]
    assert len(set(drawn)) == 60


def test_edges_come_from_the_kernels() -> None:
    sizes = frozenset().union(*(backend.tile_sizes() for backend in registry.BACKENDS))
    assert sizes >= families.tile_sizes() | {BLOCK_N}
    assert {8, 64, 128} <= families.tile_sizes()


# Adversarial values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("values", VALUES)
def test_values_are_what_they_say(values: str, dtype: torch.dtype, seed: int) -> None:
    case = Case(
        dtype=dtype, values=values, mask="bk", bias="bhqk" if values == "masked" else None, head_dim=16, head_dim_v=16
    )
    if values == "wide" and dtype != torch.float32:
        with pytest.raises(ValueError, match="values: got 'wide' in torch"):
            case.make(seed)
        return
    args = case.make(seed).args
    q, k, v = (tensor.double() for tensor in (args.q, args.k, args.v))
    logits = q @ k.transpose(-1, -2) / 4
    limits = torch.finfo(dtype)
    if values == "tiny":
        assert logits.abs().max() < 1e-5
    elif values == "huge":
        assert logits.max() - logits.min() > 200
    elif values == "rising":
        # All columns are the same, so no sum of a matrix product needs to be trusted
        assert all(torch.equal(tensor, tensor[..., :1].expand(tensor.shape)) for tensor in (q, k))
        steps = (4 * q[..., :1] * k[..., None, :, 0]).diff(dim=-1) * q[..., :1].sign()
        assert 0 <= steps.min() < steps.max() < 0.2
        assert 2 < steps.sum(-1).min() <= steps.sum(-1).max() < 5
    elif values == "ties":
        assert torch.equal(k, k[..., :1, :].expand(k.shape))
    elif values == "dominant":
        assert k.norm(dim=-1).amax(-1).min() > 3 * k.norm(dim=-1).median()
    elif values == "constant":
        assert all(torch.equal(tensor.amax(-1), tensor.amin(-1)) for tensor in (q, k, v))
    elif values == "wide":
        assert 0 < logits.abs().max() < 64 * 2**0.5
    elif values == "denormal":
        assert 0 < v.abs().max() < limits.smallest_normal
    elif values == "overflow":
        # A kernel in 16 bits may keep 2^8 times a value for each key
        most_sums = 1 if dtype == torch.float16 else case.seqlen_k * (2 if dtype == torch.float32 else 2**8)
        assert limits.max / 8 / most_sums < v.abs().max() <= limits.max / 4 / most_sums * (1 + limits.eps)
    elif values == "masked":
        assert args.mask is not None
        assert args.bias is not None
        assert not args.bias[(~args.mask).expand(args.bias.shape)].isfinite().any()
        assert args.bias.isnan().any()
    elif values == "masked_keys":
        assert args.mask is not None
        hidden = (~args.mask)[:, 0, 0]
        assert not k.transpose(1, 2)[hidden].isfinite().any()
        assert k.transpose(1, 2)[~hidden].isfinite().all()


# Text


def test_text_brings_a_problem_back() -> None:
    for trial in draw(500):
        assert Trial.parse(str(trial)) == trial
    assert Trial.parse("") == Trial(Case(), 0, False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seqlen=3", "'seqlen=3'; accepted: name=value, the name one of dtype, "),
        ("causal", "'causal'; accepted: name=value"),
        ("dtype=int8", "'dtype=int8'; accepted: fp32, bf16, fp16, fp64, float32, bfloat16, float16, float64, half"),
        ("seqlen_q=many", "'seqlen_q=many'; accepted: int"),
        ("has_sinks=1", "'has_sinks=1'; accepted: bool"),
        ("window=3", "'window=3'; accepted: tuple[int, int]"),
        ("seed=x", "'seed=x'; accepted: an integer"),
        ("pass=both", "'pass=both'; accepted: forward or backward"),
        ("bias=x", "'bias=x'; accepted: axes out of b, h, q and k, or 1"),
        ("mask=", "'mask='; accepted: axes"),
        ("alibi=x", "'alibi=x'; accepted: h, bh"),
        ("kind=sparse", "'kind=sparse'; accepted: dense, varlen"),
        ("memory=lost", "'memory=lost'; accepted: contiguous"),
        ("values=odd", "'values=odd'; accepted: normal"),
        ("layout=bshx", "'layout=bshx'; accepted: bhsd, bshd"),
        ("causal=True", "'causal=True'; accepted: none, top_left, bottom_right"),
        ("batch=-1", "'batch=-1'; accepted: an integer of 0 or more"),
        ("heads=0", "'heads=0'; accepted: an integer of 1 or more"),
        ("head_dim=513", "'head_dim=513'; accepted: 1 to 512"),
        ("page_size=0", "'page_size=0'; accepted: an integer of 1 or more"),
        ("window=-2:3", "'window=-2:3'; accepted: left:right, each -1 or more"),
        ("scale=nan", "'scale=nan'; accepted: a finite number"),
        ("softcap=inf", "'softcap=inf'; accepted: a finite number"),
        ("dropout_p=1", "'dropout_p=1'; accepted: a number from 0"),
        ("seed=99999999999999999999", "accepted: an integer from 0 to 2**63 - 1"),
        ("values=overflow,pass=backward", "accepted: pass=forward"),
    ],
)
def test_bad_text(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="--case: got ") as refused:
        Trial.parse(text)
    assert words in str(refused.value)


# Backends that are wrong


class Wrong(TiledBackend):
    """The tiled backend, but for one mistake."""

    name = "wrong"

    def __init__(self, mistake: str) -> None:
        self.mistake, self.calls = mistake, 0

    def forward(self, args, out, lse):
        self.calls += 1
        if self.mistake == "window" and args.window_left > 0:
            args = args._replace(window_left=args.window_left - 1)
        if self.mistake == "dropout bits" and args.rng_state is not None:
            args = args._replace(rng_state=args.rng_state + 1)
        if self.mistake == "pages" and args.block_table is not None:
            args = args._replace(block_table=args.block_table.flip(0))
        super().forward(args, out, lse)
        if self.mistake == "tail" and shape_of(args).seqlen_k > BLOCK_N:
            out.mul_(1.1)
        if self.mistake == "unwritten" and args.layout == "bhsd" and out.numel():
            out[..., -1:, :] = torch.empty_like(out[..., -1:, :])
        if self.mistake == "noise":
            lse.add_(self.calls % 2 * 1e-6)
        if self.mistake == "raises" and args.softcap:
            raise RuntimeError("no softcap today")
        if self.mistake == "lse":
            lse.mul_(1.4427)

    def backward(self, args, dout, dlse, out, lse, grads):
        super().backward(args, dout, None if self.mistake == "dlse" else dlse, out, lse, grads)
        if self.mistake == "heads" and shape_of(args).heads != shape_of(args).heads_kv and grads.dk is not None:
            grads.dk.mul_(0.5)


SMALLEST = {
    # mistake: what the smallest problem must and need not have
    "window": lambda case: case.window[0] > 0 and case.seqlen_q <= 2 and case.kind == "dense" and case.head_dim == 1,
    "dropout bits": lambda case: case.dropout_p > 0 and case.seqlen_q <= 4 and case.bias is None,
    "pages": lambda case: case.kind in ("paged", "cache") and case.batch >= 2 and case.softcap == 0,
    "tail": lambda case: BLOCK_N < case.seqlen_k <= BLOCK_N + 8 and case.seqlen_q == 1 and case.heads == 1,
    "unwritten": lambda case: case.layout == "bhsd" and case.seqlen_k == 1 and case.seqlen_q == 1 and case.batch == 1,
    "noise": lambda case: (case.deterministic or case.kind == "paged") and case.seqlen_q <= 2 and case.mask is None,
    "raises": lambda case: case.softcap > 0 and case.batch == case.heads == case.seqlen_q == case.seqlen_k == 1,
    "lse": lambda case: case.seqlen_q == 1 and case.batch == 1 and case.bias is None,
    "dlse": lambda case: case.seqlen_q <= 4 and case.batch == 1 and case.kind == "dense",
    "heads": lambda case: case.heads == 2 and case.heads_kv == 1,
}


@pytest.fixture
def put_in(monkeypatch: pytest.MonkeyPatch):
    def put(mistake: str) -> Wrong:
        backend = Wrong(mistake)
        monkeypatch.setattr(registry, "BACKENDS", [backend, *registry.BACKENDS])
        return backend

    return put


@pytest.mark.parametrize("mistake", SMALLEST)
def test_a_wrong_backend_is_found_and_the_failure_made_small(mistake: str, put_in) -> None:
    settings = Settings([put_in(mistake)], "cpu", seed=15, stops_at_failure=True)
    found = check(settings)
    assert found.failed["wrong"] == 1
    settings = dataclasses.replace(settings, stops_at_failure=False)
    (failure,) = check_trials([found.failures[0].trial], settings).failures
    assert SMALLEST[mistake](failure.smallest.case), failure.smallest
    assert failure.smallest_complaints
    # The reproducer is the command that shows it again
    program, *arguments = shlex.split(failure.reproducer)
    assert program == "flashtile"
    again = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert again.exit_code == 1
    assert "wrong: " in again.output


def test_a_right_backend_is_not_complained_about() -> None:
    for trial in draw(25, seed=5):
        verdict = judge(trial, [registry.find("tiled"), registry.find("reference")], "cpu")
        assert verdict.failed == [], (verdict, str(trial))


def test_candidates_are_smaller() -> None:
    trial = draw(1, seed=8)[0]
    assert all(len(str(smaller)) > 0 and smaller != trial for smaller in candidates(trial))
    assert (
        list(
            candidates(
                Trial(Case(batch=1, heads=1, heads_kv=1, seqlen_q=1, seqlen_k=1, head_dim=1, head_dim_v=1), 0, False)
            )
        )
        == []
    )


# The command


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["check", "--device", "cpu", *arguments])


def test_command(tmp_path) -> None:
    result = invoke("--problems", "6", "--seed", "2", "--json", "--out", str(tmp_path))
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["problems"] == 6
    assert report["ran"]["tiled"] == report["ran"]["reference"] == 6
    assert report["failures"] == []
    assert report["environment"]["torch"] == torch.__version__
    assert json.loads((tmp_path / "check.json").read_text()) == report


def test_only_a_whole_check_replaces_the_last_one(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--problems", "2", "--backends", "reference", "--out", str(tmp_path))
    assert invoke(*arguments).exit_code == 0
    whole = (tmp_path / "check.json").read_text()
    for number in ("", "2"):
        interrupted = Report(num_problems=1, is_interrupted=True)
        monkeypatch.setattr(command, "check", lambda *_, report=interrupted: report)
        result = invoke(*arguments)
        assert result.exit_code == 130
        assert f"Written: {tmp_path / f'check_unfinished{number}.json'}" in result.output.replace("\n", "")
    monkeypatch.setattr(command, "check", lambda *_: Report(is_time_over=True))
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "the time was over before a first problem was judged" in result.output
    assert (tmp_path / "check.json").read_text() == whole
    assert not list(tmp_path.glob(".*"))


def test_command_reports_failures(put_in) -> None:
    put_in("lse")
    result = invoke("--problems", "3", "--seed", "1", "--backends", "wrong", "--json", "--pass", "forward")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["failed"] == {"wrong": len(report["failures"])}
    assert report["failures"][0]["reproducer"].startswith("flashtile check --case '")


class Slow(Wrong):
    """It takes a second to say whether it takes a problem. Its name is that of one that workers have, too."""

    name = "tiled"

    def __init__(self, mistake: str, clock: Clock) -> None:
        super().__init__(mistake)
        self.clock = clock

    def refuse(self, problem: Problem, op: str = "forward") -> str | None:
        self.clock.advance(1)
        return super().refuse(problem, op)


def test_command_stops_in_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BACKENDS", [Slow("none", clock)])
    monkeypatch.setattr(command, "Settings", functools.partial(Settings, clock=clock))
    report = json.loads(invoke("--seconds", "20", "--json").stdout)
    assert 0 < report["problems"] <= 21
    assert 20 < report["total_s"] < 30


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backends", "cuda"], "those for cpu here: "),
        (["--backends", "fast"], "--backends: got 'fast'; accepted: those for cpu here: "),
        (["--backends", ","], "separated by commas"),
        (["--pass", "fwd"], "--pass: got 'fwd'; accepted: forward, backward, both"),
        (["--problems", "0"], "--problems: got 0"),
        (["--mutate", "all"], "--mutate: got it on cpu; accepted: a GPU"),
        (["--case", "window=3"], "--case: got 'window=3'"),
        (["--case", "heads=3"], "--case: got 'heads=3', which makes no problem (k: got 2 heads"),
        (["--case", "seqlen_q=10000000,seqlen_k=10000000"], "GiB are free; accepted: smaller lengths"),
        (["--case", "seqlen_q=1000000000000,seqlen_k=0"], "GiB are free; accepted: smaller lengths"),
        (["--problems", str(10**20)], f"--problems: got {10**20}; accepted: 1 to"),
        (["--seconds", "nan"], "--seconds: got nan; accepted: a number of seconds above 0"),
        (["--seconds", "inf"], "--seconds: got inf"),
        (["--seconds", "0"], "--seconds: got 0"),
        (["--jobs", "100000"], "--jobs: got 100000; accepted: 1 to"),
        (["--jobs", "0"], "--jobs: got 0"),
    ],
)
def test_command_refuses(arguments: list[str], words: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_nothing_to_check_is_not_a_success(put_in, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(put_in("lse"), "refuse", lambda problem, op: "it is closed today")
    result = invoke("--problems", "2", "--backends", "wrong")
    assert result.exit_code == 2
    assert "Nothing was checked: wrong: it is closed today" in result.output


class Deadly(TiledBackend):
    """It kills its process where scores are capped. Where the cap is high it hangs, or takes 12 s by a clock."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock

    def refuse(self, problem: Problem, op: str = "forward") -> str | None:
        if problem.softcap > 10.0:
            time.sleep(HANGS_S) if self.clock is None else self.clock.advance(12)
        elif problem.softcap > 0.0:
            os.kill(os.getpid(), signal.SIGKILL)
        return None


def with_softcap(trial: Trial, softcap: float) -> Trial:
    return dataclasses.replace(trial, case=dataclasses.replace(trial.case, softcap=softcap))


def test_a_process_that_dies_takes_nothing_with_it() -> None:
    harmless = [with_softcap(trial, 0.0) for trial in draw(24, seed=4, direction="forward")]
    deadly = with_softcap(harmless[7], 2.0)
    settings = Settings([Deadly()], "cpu", seed=4, jobs=2)
    report = check_trials([*harmless[:12], deadly, *harmless[12:]], settings)
    assert report.num_problems == sum(report.values.values()) == 25
    assert report.ran == {"tiled": 25}
    assert report.failed == {"tiled": 1}
    assert report.num_deaths == 3  # among others, alone, and alone in a fresh process
    (failure,) = report.failures
    assert failure.trial == failure.smallest == deadly
    assert failure.complaints == ("the process that judged it died",)
    assert failure.reproducer.endswith("--backends tiled")


def test_the_time_is_kept_after_a_death(clock: Clock) -> None:
    drawn = draw(60, seed=4, direction="forward")
    trials = [with_softcap(trial, 2.0 if place == 0 else 20.0) for place, trial in enumerate(drawn)]
    report = check_trials(trials, Settings([Deadly(clock)], "cpu", seed=4, jobs=2, seconds=1.0, clock=clock))
    assert report.is_time_over
    assert report.num_problems < 10


def test_starting_the_workers_takes_nothing_of_the_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: object) -> Iterator[object]:
        yield from as_done(*arguments)
        clock.advance(100)

    as_done = workers.as_done
    monkeypatch.setattr(workers, "as_done", slow)
    settings = Settings([Slow("none", clock)], "cpu", seed=4, jobs=2, seconds=20.0, clock=clock)
    report = check_trials(draw(4, seed=4, direction="forward"), settings)
    assert report.num_problems == 4
    assert not report.is_time_over


def test_a_check_of_nothing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "check", lambda *_: Report(is_time_over=True))
    result = invoke("--problems", "1", "--backends", "tiled")
    assert result.exit_code == 2
    assert "Nothing was checked: the time was over before a first problem was judged" in " ".join(result.output.split())


def test_a_worker_says_that_no_time_was_left() -> None:
    """Problems may be given to workers in time and not be judged in time."""
    report = Report()
    report.add(judge_all(draw(2, seed=4), Settings([registry.find("tiled")], "cpu", seed=4), end=0.0))
    assert report.num_problems == 0
    assert report.is_time_over


class Hanging(TiledBackend):
    """It hangs where scores are capped, when it judges or is called to compile, or when a job compiles for it. A judge
    that hangs does so for 5 s by the clock, and goes on hanging."""

    def __init__(self, where: str, clock: Clock) -> None:
        self.where, self.clock = where, clock
        self.is_compiled = where in ("call", "job")
        self.has_compile_jobs = where == "job"

    def refuse(self, problem: Problem, op: str = "forward") -> str | None:
        if problem.softcap > 0.0 and self.where in ("judge", "call"):
            self.clock.advance(5 if self.where == "judge" else 0)
            time.sleep(HANGS_S)
        return None

    def compile_jobs(self, *_: object):
        return {"kernel": functools.partial(time.sleep, HANGS_S)}


def capped_from_the_sixth() -> list[Trial]:
    small = Case(batch=1, heads=1, heads_kv=1, seqlen_q=4, seqlen_k=4)
    return [with_softcap(Trial(small, place, False), 2.0 if place >= 5 else 0.0) for place in range(20)]


def test_the_time_is_kept_where_judges_hang(clock: Clock) -> None:
    trials = capped_from_the_sixth()
    settings = Settings([Hanging("judge", clock)], "cpu", seed=4, jobs=2, seconds=6.0, clock=clock)
    report = check_trials(trials, settings)
    assert report.is_time_over
    # Those before the one that hangs: one for each worker, and some of a batch. The other batch begins with one
    assert report.num_problems == 5
    assert sorted(report.unfinished) == sorted([str(trials[5]), str(trials[12])])
    assert report.failures == []


@pytest.mark.parametrize("where", ["call", "job"])
def test_the_first_problems_wait_for_no_compiler(where: str, clock: Clock) -> None:
    def end_after_the_first(_: str, done: int) -> None:
        if done:
            clock.advance(10)

    settings = Settings([Hanging(where, clock)], "cpu", seed=4, jobs=2, seconds=6.0, clock=clock)
    report = check_trials(capped_from_the_sixth(), settings, end_after_the_first)
    assert report.is_time_over
    assert 0 < report.num_problems <= 2  # one for each worker


def test_failures_are_made_smaller_within_the_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Slow("lse", clock)
    monkeypatch.setattr(registry, "BACKENDS", [backend, *registry.BACKENDS])
    report = check(Settings([backend], "cpu", seed=15, direction="forward", seconds=60.0, clock=clock))
    assert clock() < 70
    assert report.failures[0].smallest != report.failures[0].trial


def test_a_single_worker_is_this_process_unless_the_time_is_limited() -> None:
    assert command._num_workers(command.Options(), "cpu") == 0
    assert command._num_workers(command.Options(jobs=1), "cpu") == 0
    assert command._num_workers(command.Options(seconds=3.0), "cpu") == 1
    assert command._num_workers(command.Options(jobs=4), "cpu") == 4


def test_faults_share_the_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that cannot be looked for in time does not come; one that was looked for in vain is not missed."""
    faults = mutations()[:2]
    monkeypatch.setattr(mutants, "hunt_one", _hunt_too_long)
    hunts = list[Hunt]()
    for found in mutants.hunt(faults, Settings([], "cpu", seed=3, seconds=1.0, jobs=2, clock=clock)):
        hunts.append(found)
        clock.advance(10)
    assert [found.mutation for found in hunts] == faults[:1]

    monkeypatch.setattr(command, "hunt", lambda *_: iter(hunts))
    output = io.StringIO()
    settings = Settings(backends=[], device="cpu", seed=3)
    assert command.Command(settings, Console(file=output), False, None, {}).hunt(faults) == command.NOTHING_CHECKED
    assert f"0 of 2 faults found; not finished: {faults[0].name}, {faults[1].name}" in output.getvalue()


def _hunt_too_long(fault: Mutation, _: Settings, end: float) -> Hunt:
    if fault != mutations()[0]:
        time.sleep(HANGS_S)
    return Hunt(fault, False, 5, Report(is_time_over=True))


def test_processes_that_cannot_start_are_no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_ON_INTERRUPT", "no handler")  # what each process begins with
    result = invoke("--problems", "3", "--device", "cpu", "--jobs", "2")
    assert result.exit_code == 2
    assert "Worker processes died. Pass --jobs 1, or fewer jobs if memory is short." in result.output


def test_an_interrupt_ends_a_check_and_keeps_what_it_found() -> None:
    def interrupt(_: str, done: int) -> None:
        if done:
            raise KeyboardInterrupt

    drawn = draw(20, seed=4, direction="forward")
    trials = [with_softcap(trial, 0.0 if place < 10 else 20.0) for place, trial in enumerate(drawn)]
    report = check_trials(trials, Settings([Deadly()], "cpu", seed=4, jobs=2, chunk=20), interrupt)
    assert report.is_interrupted
    assert report.num_problems == 10


def test_an_interrupt_keeps_what_was_not_yet_asked_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: str, done: int) -> None:
        if done:
            end = time.monotonic() + HANGS_S
            while clock() < 2 and time.monotonic() < end:  # until the other process is done, too
                time.sleep(0.05)
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_judge_with_journal", _judge_and_say_so)
    trials = [with_softcap(trial, 0.0) for trial in draw(20, seed=4, direction="forward")]
    report = check_trials(trials, Settings([Deadly()], "cpu", seed=4, jobs=2, clock=clock), interrupt)
    assert report.is_interrupted
    assert report.num_problems == 20


def _judge_and_say_so(journal: Path, trials: Sequence[Trial], settings: Settings, end: float) -> Report:
    report = runner._judge_with_journal(journal, trials, settings, end)
    settings.clock.advance(1)
    return report


def test_an_interrupt_ends_what_runs() -> None:
    running = list[BaseProcess]()

    def interrupted() -> None:
        with workers.processes(1, "cpu") as pool:
            pool.submit(time.sleep, HANGS_S)
            running.extend(pool._processes.values())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [process.exitcode for process in running] == [-signal.SIGKILL]


@pytest.mark.parametrize("ending", [KeyboardInterrupt, RuntimeError])
def test_faults_that_were_found_are_kept_whatever_becomes_of_the_others(
    ending: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = mutations()[:2]

    def hunt(*_: object):
        yield Hunt(faults[0], False, 5, Report())
        raise ending

    (tmp_path / "mutations.json").write_text("of a finished run")
    monkeypatch.setattr(command, "hunt", hunt)
    settings = Settings(backends=[], device="cpu", seed=3)
    hunting = command.Command(settings, Console(quiet=True), False, tmp_path, {})
    if ending is KeyboardInterrupt:
        assert hunting.hunt(faults) == INTERRUPTED
    else:
        with pytest.raises(RuntimeError):
            hunting.hunt(faults)
    kept = json.loads((tmp_path / "mutations_unfinished.json").read_text())
    assert [found["mutation"] for found in kept["mutations"]] == [faults[0].name]
    assert (tmp_path / "mutations.json").read_text() == "of a finished run"


def test_dropout_bits_are_probed_where_the_output_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """One lane wrong in one place: too little for the error rule over a long row of equal weights."""
    real = dropout.keep_mask

    def swapped(rng_state, dropout_p, batch_heads, rows, columns):
        kept = real(rng_state, dropout_p, batch_heads, rows, columns)
        return kept.roll(1, -1) if len(columns) == 129 else kept

    trial = Trial(Case(seqlen_q=4, seqlen_k=BLOCK_N + 129, dropout_p=0.5, values="ties", head_dim_v=512), 1, False)
    monkeypatch.setattr("flashtile.backends.tiled.dropout.keep_mask", swapped)
    assert any("bits" in text for text in judge(trial, [registry.find("tiled")], "cpu").complaints["tiled"])


# Steps over a cache


def test_decode_problems_are_drawn_with_every_option() -> None:
    cases = [trial.case for trial in itertools.islice(DecodeDrawer(3, "cpu", "forward", EDGES), 4000)]
    assert not any(trial.has_backward for trial in itertools.islice(DecodeDrawer(3, "cpu"), 100))
    assert {case.kind for case in cases} == {"cache", "padded", "paged"}
    paged = [case for case in cases if case.kind == "cache"]
    assert {1, 7, 16, 64, 256} <= {case.page_size for case in paged}
    assert any(case.page_size >= case.seqlen_k > 1 for case in paged)  # by batch index
    assert {1, 4, 8, 64} <= {case.heads // case.heads_kv for case in cases}
    assert {1, 2, 4, 8} <= {case.seqlen_q for case in cases}
    for name in ("has_junk_pages", "has_leftpad", "has_sinks", "softcap", "alibi", "window", "causal", "num_splits"):
        assert len({getattr(case, name) for case in paged}) > 1, name
    assert all(case.batch * case.heads * case.seqlen_q * case.seqlen_k <= MAX_SCORES["cpu"] for case in cases)


def test_decode_problems_are_soon_drawn() -> None:
    """Their keys are: on a GPU, where more scores are allowed, they would be up to 240 million numbers."""
    cases = [trial.case for trial in itertools.islice(DecodeDrawer(3, "cuda", "forward", EDGES), 4000)]
    elements = [case.batch * case.heads_kv * case.seqlen_k * (case.head_dim + case.head_dim_v) for case in cases]
    assert 3_000_000 < max(elements) <= 1 << 22
    assert all(case.heads % case.heads_kv == 0 for case in cases)
    assert {1, 8, 33} <= {case.batch for case in cases}
    assert max(case.seqlen_k for case in cases) > 4000


@pytest.mark.parametrize("kind", ["cache", "paged"])
def test_junk_stands_where_a_table_holds_no_key(kind: str) -> None:
    case = Case(kind=kind, page_size=4, seqlen_k=40, batch=5, has_junk_pages=True)
    args = case.make(3).args
    table = args.block_table
    assert table is not None
    num_pages = args.k.shape[0]
    ends = args.cu_seqlens_k.diff() if args.seqused_k is None else args.seqused_k
    starts = torch.zeros(5, dtype=torch.int32) if args.leftpad_k is None else args.leftpad_k
    for entries, start, end in zip(table, starts.tolist(), ends.tolist(), strict=True):
        for slot, page in enumerate(entries.tolist()):
            is_held = start < end and start // 4 <= slot <= (end - 1) // 4
            assert (0 <= page < num_pages) == is_held
    assert ((table < 0) | (table >= num_pages)).any()


def test_a_cache_may_have_no_left_padding() -> None:
    for kind in ("cache", "padded"):
        assert Case(kind=kind, has_leftpad=False).make(1).args.leftpad_k is None
        assert Case(kind=kind).make(1).args.leftpad_k is not None


def test_decode_problems_are_checked(put_in) -> None:
    """The backends of this machine pass, and a backend that reads the pages of another sequence does not."""
    backends = [registry.find("cpu"), registry.find("tiled")]
    report = check(Settings(backends, "cpu", seed=11, problems=30, kind="decode"))
    assert report.num_problems == report.ran["tiled"] == 30
    assert not report.failures, report.failures
    found = check(Settings([put_in("pages")], "cpu", seed=11, problems=30, kind="decode", stops_at_failure=True))
    assert found.failures


def test_decode_has_no_backward_pass() -> None:
    for options in (["--pass", "backward"], ["--mutate", "all"]):
        result = CliRunner().invoke(app, ["check", "--decode", "--device", "cpu", *options])
        assert result.exit_code == 2
        assert "--decode" in result.output
