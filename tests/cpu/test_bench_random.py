"""Random calls: what is drawn, `--grid wild`, `--regret`, and how a run goes on behind a call that ended it."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import fake_gpu
import pytest
import torch
from bench_fakes import ENV, provider, right
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import CausalBias
from typer.testing import CliRunner

from flashtile import families
from flashtile.cli.main import app
from flashtile.families import assemble
from flashtile.lab.bench import calls, providers, random_runs, regret, timing, wild
from flashtile.lab.bench.accuracy import Check
from flashtile.lab.bench.calls import KINDS, Call, FirstSequence, draw_call, make_inputs
from flashtile.lab.bench.options import PACKED
from flashtile.lab.bench.points import Point
from flashtile.lab.bench.providers import AUTOMATIC, Attend, Provider, by_name
from flashtile.lab.bench.regret import RegretRow
from flashtile.lab.bench.rows import columns, read
from flashtile.lab.bench.wild import WildRow

SMALL = Point(2, 2, 2, 24, 24, 16, 16)


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of a tenth of a millisecond."""
    for name in ("ROUNDS", "AGAIN"):
        short = dataclasses.replace(getattr(wild, name), batch_s=1e-4)
        monkeypatch.setattr(wild, name, short)
        monkeypatch.setattr(regret, name, short)


@pytest.fixture
def tiny(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of one kind that take next to no time; each number has a length of its own."""

    def draw(seed: int, number: int, device: str) -> Call:
        point = dataclasses.replace(SMALL, seqlen_q=16 + number, seqlen_k=16 + number)
        return Call(seed, number, "vision" if number % 2 else "speech", point, is_trained=number == 0)

    monkeypatch.setattr(random_runs, "draw_call", draw)


# What is drawn


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_call_follows_from_its_seed_and_number(device: str):
    drawn = [draw_call(5, number, device) for number in range(40)]
    assert drawn == [draw_call(5, number, device) for number in range(40)]
    assert [draw_call(5, number, device) for number in (17, 3)] == [drawn[17], drawn[3]]
    others = [draw_call(6, number, device) for number in range(40)]
    assert sum(one.point == other.point for one, other in zip(drawn, others, strict=True)) < 3


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_draws_have_every_kind_within_bounds(device: str, seed: int):
    drawn = [draw_call(seed, number, device) for number in range(600)]
    assert {call.kind for call in drawn} == set(KINDS)
    for call in drawn:
        point = call.point
        assert point.heads % point.heads_kv == 0
        assert point.batch * point.heads * point.seqlen_q * point.seqlen_k * point.head_dim <= calls._MAX_WORK[device]
        assert max(*point.sizes()) <= 4 * calls._MAX_ELEMENTS[device]
        assert call.words()
        assert call.is_trained == KINDS[call.kind][1]
        if point.lengths:
            assert len(point.lengths) == point.batch
            assert max(point.lengths) == point.lengths[0] == point.seqlen_k
            assert min(point.lengths) >= (point.seqlen_q if point.option != PACKED else 1)
    powers = sum(call.point.seqlen_q & (call.point.seqlen_q - 1) == 0 for call in drawn)
    assert powers < 300
    assert {call.point.dtype for call in drawn} == ({"bf16", "fp16", "fp32"} if device == "cuda" else {"bf16", "fp32"})


def test_draws_for_a_gpu_are_calls_that_ours_take(seed: int):
    """By shapes alone: dense ones as meta tensors."""
    for number in range(200):
        point = draw_call(seed, number, "cuda").point
        if not point.option:
            providers.explained(None, point, point.make_empty("meta"))


def test_draws_for_a_cpu_are_calls_that_the_reference_takes(seed: int):
    for number in range(60):
        point = draw_call(seed, number, "cpu").point
        (inputs,) = make_inputs(point, "cpu", 1)
        assert by_name("reference").build(point, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_of_each_kind_runs_and_is_right(kind: str, seed: int):
    number = next(number for number in range(10**4) if draw_call(seed, number, "cpu").kind == kind)
    call = draw_call(seed, number, "cpu")
    point = call.in_pass("fwd+bwd" if call.is_trained else "fwd")
    copies = make_inputs(point, "cpu", 1)
    made = wild.prepare_call(by_name("cpu"), point, copies, FirstSequence(point, copies[0]), "cpu", has_graph=False)
    assert made.complaint == ""
    assert "instructions" in made.attend.detail
    if call.is_trained:
        grads = wild.run(made.attend, copies[0].leaves("bhsd", needs_grad=True), has_grad=True)[1]
        assert [grad.shape for grad in grads] == [tensor.shape for tensor in (copies[0].q, copies[0].k, copies[0].v)]


def test_heads_of_a_row_lie_side_by_side():
    (inputs,) = make_inputs(SMALL, "cpu", 1)
    assert inputs.q.shape == (2, 2, 24, 16)
    assert inputs.q.transpose(1, 2).is_contiguous()
    assert inputs.dout.transpose(1, 2).is_contiguous()
    assert inputs.leaves("bhsd", True, is_own=True).q.stride() == inputs.q.stride()


def test_wrong_packed_rows_are_seen():
    point = dataclasses.replace(SMALL, option=PACKED, lengths=(24, 5), direction="fwd+bwd", is_causal=True, heads_kv=1)
    (inputs,) = make_inputs(point, "cpu", 1)
    assert inputs.k.shape == (29, 1, 16)
    check = FirstSequence(point, inputs)
    attend = by_name("cpu").build(point, inputs)
    out, grads = wild.run(attend, inputs.leaves("bhsd", needs_grad=True), has_grad=True)
    assert check.complaint(out, grads, None) == ""
    wrong = out.clone()
    wrong[3, 1] += 0.1
    assert check.complaint(wrong, grads, None).startswith("out: off by")
    assert check.complaint(out, [grads[0], grads[1] * 1.01, grads[2]], None).startswith("dk: off by")


@pytest.mark.parametrize("option", ["random mask (B,H,S,S)", "bias (B,H,S,S)"])
def test_masks_and_biases_of_each_sequence_and_head_are_checked(option: str):
    point = dataclasses.replace(SMALL, option=option)
    inputs = dataclasses.replace(point.make("cpu", 0), extras=point.make_extras("cpu"))
    (extra,) = inputs.extras.tensors()
    assert extra.shape == (2, 2, 24, 24)
    attend = by_name("cpu").build(point, inputs)
    out = attend.call(inputs.q, inputs.k, inputs.v)
    assert Check(point, inputs).verdict(out, None).complaint == ""
    plain = by_name("cpu").build(SMALL, inputs).call(inputs.q, inputs.k, inputs.v)
    assert Check(point, inputs).verdict(plain, None).complaint
    expected = by_name("sdpa-math").build(point, inputs).call(inputs.q, inputs.k, inputs.v)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_cudnn_gets_the_causal_mask_of_fewer_queries_ready_made():
    point = dataclasses.replace(SMALL, seqlen_q=3, is_causal=True)
    inputs = point.make("cpu", 0)
    for name, kind in (("sdpa-cudnn", Tensor), ("sdpa-flash", CausalBias)):
        call = by_name(name).build(point, inputs).call
        (options,) = (cell.cell_contents for cell in call.__closure__ if isinstance(cell.cell_contents, dict))
        assert type(options["attn_mask"]) is kind
    mask = providers._lower_right(SDPBackend.CUDNN_ATTENTION, point, inputs)
    assert mask.sum(1).tolist() == [22, 23, 24]


# --grid wild


def bench_of(*some: Provider) -> wild.Bench:
    return wild.Bench("cpu", 0, some, ENV, 1, random.Random(1), {})


def call_of(point: Point = SMALL, is_trained: bool = False) -> Call:
    return Call(1, 0, "vision", point, is_trained)


def slow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for _ in range(50):
        right(q, k, v)
    return right(q, k, v)


def test_rows_of_a_call_and_its_ratio(quick: None):
    def refusing(point: Point, inputs: object) -> Attend:
        raise NotImplementedError("only on Tuesdays")

    some = [
        provider("ours", is_baseline=False),
        provider("peer", slow),
        Provider("never", True, refusing),
        provider("wrong", lambda q, k, v: right(q, k, v) * 1.1),
    ]
    found = bench_of(*some).measure(call_of(is_trained=True), lambda what: None)
    assert [(row.provider, row.direction, row.status) for row in found] == [
        (name, direction, status)
        for direction in ("fwd", "fwd+bwd")
        for name, status in (("never", "refused"), ("ours", "ok"), ("peer", "ok"), ("wrong", "inaccurate"))
    ]
    first = wild.outcomes(found)[0]
    assert (first.row.provider, first.peer.provider) == ("ours", "peer")
    assert first.ratio > 3
    assert found[1].num_rounds == 5
    assert wild.summary(found)[0].lines[0][:2] == ("vision", "1")
    assert wild.alarms(str, found) == []


def test_a_call_that_is_close_is_timed_again(quick: None, monkeypatch: pytest.MonkeyPatch):
    found = bench_of(provider("ours", slow, is_baseline=False), provider("peer")).measure(call_of(), print)
    assert [row.num_rounds for row in found] == [20, 20]
    (line,) = wild.alarms(lambda number: f"again {number}", found)
    assert line.startswith(f"{wild.outcomes(found)[0].ratio:.2f} fwd eager vision fp32 B2 H2 24 x 24 d16 ()")
    assert line.endswith(": again 0")
    assert "behind" not in line
    assert wild.closing(found).startswith("flashtile, the best peer's time over ours: fwd eager 0.0")
    assert "(1 of 1 behind, worst 0.0" in wild.closing(found)


class NoGpu:
    """Streams and graphs that are none: thunks run where they stand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_for: str = "") -> None:
        def capture(thunks: list[Callable[[], object]], stream: object) -> Callable[[], None]:
            if fails_for in str(thunks[0]):
                raise RuntimeError("operation not permitted when stream is capturing")
            return lambda: [thunk() for thunk in thunks][:0] and None

        monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        monkeypatch.setattr(wild, "calling", lambda attend, has_grad, stream: torch.set_grad_enabled(has_grad))
        monkeypatch.setattr(wild, "torch", SimpleNamespace(cuda=SimpleNamespace(Stream=object)))
        monkeypatch.setattr(timing, "capture", capture)
        monkeypatch.setattr(wild.Bench, "modes", ("kernel", "eager"))


def test_a_gpu_has_kernel_times_and_eager_ones(quick: None, monkeypatch: pytest.MonkeyPatch):
    NoGpu(monkeypatch, fails_for="slow")
    some = [provider("ours", is_baseline=False), provider("peer", right), provider("uncaptured", slow)]
    found = bench_of(*some).measure(call_of(is_trained=True), print)
    assert [(row.direction, row.mode, row.provider, row.status) for row in found] == [
        (direction, mode, name, "refused" if (mode, name) == ("kernel", "uncaptured") else "ok")
        for direction in ("fwd", "fwd+bwd")
        for mode in ("kernel", "eager")
        for name in ("ours", "peer", "uncaptured")
    ]
    assert "not permitted when stream is capturing" in found[2].reason
    titles = [table.title for table in wild.summary(found)[:-1]]
    assert titles == [
        f"The best peer's time over ours: {direction}, {mode}"
        for direction in ("fwd", "fwd+bwd")
        for mode in ("kernel", "eager")
    ]


def test_what_fails_while_it_is_timed_does_not_end_the_run(quick: None):
    calls_left = [6]

    def tiring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls_left[0] -= 1
        if calls_left[0] < 0:
            raise torch.OutOfMemoryError("tried to allocate 1 GiB")
        return right(q, k, v)

    found = bench_of(provider("ours", is_baseline=False), provider("peer", tiring)).measure(call_of(), print)
    assert [(row.provider, row.status) for row in found] == [("ours", "oom"), ("peer", "oom")]
    assert "1 GiB" in found[0].reason


def test_what_of_ours_fails_is_an_alarm(quick: None):
    some = [provider("ours", lambda q, k, v: right(q, k, v) * 2, is_baseline=False), provider("peer")]
    found = bench_of(*some).measure(call_of(), print)
    (line,) = wild.alarms(lambda number: f"again {number}", found)
    assert line.startswith("inaccurate fwd vision fp32 B2 H2 24 x 24 d16: out: off by")
    assert wild.outcomes(found) == []


def test_a_run_writes_its_rows_and_says_what_is_behind(tiny: None, tmp_path: Path):
    arguments = ("bench", "--grid", "wild", "--device", "cpu", "--backends", "flashtile,sdpa-math", "--out", tmp_path)
    result = invoke(*arguments, "--seed", "7", "--points", "3")
    assert result.exit_code == 0, result.output
    assert "Random calls, providers in random order: --seed 7." in result.output
    assert result.output.splitlines()[-1].startswith("flashtile, the best peer's time over ours: fwd eager ")
    rows = read(tmp_path / "wild_seed7.csv", WildRow)
    assert {(row.seed, row.call, row.direction) for row in rows} == {
        (7, 0, "fwd"), (7, 0, "fwd+bwd"), (7, 1, "fwd"), (7, 2, "fwd"),
    }  # fmt: skip
    behind = [one for one in wild.outcomes(rows) if one.ratio < wild.BEHIND]
    for one in behind:
        again = f"flashtile bench --grid wild --seed 7 --calls {one.row.call} --device cpu --backends"
        assert again in result.output
    result = invoke(*arguments, "--seed", "7", "--calls", "2", "--json")
    payload = json.loads(result.stdout)
    assert {(row["call"], row["words"]) for row in payload["rows"]} == {(2, "speech fp32 B2 H2 18 x 18 d16")}
    assert {path.name for path in tmp_path.iterdir()} == {"wild_seed7.csv", "wild_seed7_some.csv"}


def test_a_run_without_a_seed_draws_one(tiny: None, tmp_path: Path):
    arguments = ("bench", "--grid", "wild", "--device", "cpu", "--backends", "sdpa-math", "--points", "1")
    seeds = {invoke(*arguments, "--out", tmp_path).output.partition("--seed ")[2].split(".")[0] for _ in range(2)}
    assert len(seeds) == 2
    assert {path.stem for path in tmp_path.iterdir()} == {f"wild_seed{seed}" for seed in seeds}
    assert {row.provider for path in tmp_path.iterdir() for row in read(path, WildRow)} == {"flashtile", "sdpa-math"}


class Faulty:
    """A peer that poisons the GPU, as a kernel does that reads where nothing is, at the call of that length."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
        self.rows, self.is_lost = rows, False
        monkeypatch.setattr(timing, "synchronize", self.synchronize)
        monkeypatch.setattr(wild, "is_alive", lambda device: not self.is_lost)
        monkeypatch.setattr(regret, "is_alive", lambda device: not self.is_lost)

    def synchronize(self, device: str) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def build(self, point: Point, inputs: object) -> Attend:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.is_lost = self.is_lost or q.shape[2] == self.rows
            return right(q, k, v)

        return Attend(call)


def test_a_poisoned_gpu_stops_the_run_which_goes_on_behind_it(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    faulty = Faulty(monkeypatch, rows=18)
    baselines = [Provider("sdpa-math", True, by_name("sdpa-math").build), Provider("eager", True, faulty.build)]
    monkeypatch.setattr(providers, "BASELINES", baselines)
    arguments = ("bench", "--grid", "wild", "--device", "cpu", "--backends", "flashtile,sdpa-math,eager", "--seed", "7")
    arguments = (*arguments, "--points", "4", "--out", tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == random_runs.STOPPED, result.output
    assert "Call 2 (fwd speech fp32 B2 H2 18 x 18 d16), eager, left the GPU unusable: CUDA error" in result.output
    again = "Go on with flashtile bench --grid wild --points 4 --seed 7 --from 3 --device cpu --backends"
    assert again in result.output
    kept = read(tmp_path / "wild_seed7_unfinished.csv", WildRow)
    assert [(row.call, row.provider, row.status) for row in kept if row.status != "ok"] == [(2, "eager", "crashed")]
    assert {row.call for row in kept} == {0, 1, 2}
    faulty.is_lost = False
    result = invoke(*arguments, "--from", "3")
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["wild_seed7.csv"]
    found = read(tmp_path / "wild_seed7.csv", WildRow)
    assert found[: len(kept)] == kept
    assert {row.call for row in found} == {0, 1, 2, 3}


def test_an_interrupt_keeps_complete_calls(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measure = wild.Bench.measure

    def interrupted(self: wild.Bench, call: Call, on_step: object) -> list[WildRow]:
        if call.number == 1:
            raise KeyboardInterrupt
        return measure(self, call, on_step)

    arguments = ("bench", "--grid", "wild", "--device", "cpu", "--backends", "sdpa-math", "--seed", "7")
    with monkeypatch.context() as patch:
        patch.setattr(wild.Bench, "measure", interrupted)
        result = invoke(*arguments, "--points", "2", "--out", tmp_path)
    assert result.exit_code == 130
    assert "Interrupted. Go on with flashtile bench --grid wild --points 2 --seed 7 --from 1" in result.output
    result = invoke(*arguments, "--points", "2", "--from", "2", "--out", tmp_path)
    assert "Calls before --from that the unfinished file does not have: 1." in result.output
    (tmp_path / "wild_seed7.csv").rename(tmp_path / "wild_seed7_unfinished.csv")
    result = invoke(*arguments, "--points", "2", "--from", "1", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "does not have" not in result.output
    assert {row.call for row in read(tmp_path / "wild_seed7.csv", WildRow)} == {0, 1}


def test_rows_that_a_new_start_does_not_take_stay_where_they_are(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    faulty = Faulty(monkeypatch, rows=18)
    monkeypatch.setattr(providers, "BASELINES", [Provider("eager", True, faulty.build)])
    arguments = ("bench", "--grid", "wild", "--device", "cpu", "--backends", "eager", "--seed", "7", "--points", "3")
    invoke(*arguments, "--out", tmp_path)
    faulty.is_lost, faulty.rows = False, 0
    result = invoke(*arguments, "--from", "1", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {"wild_seed7.csv", "wild_seed7_unfinished.csv"}
    found = read(tmp_path / "wild_seed7.csv", WildRow)
    assert {row.status for row in found} == {"ok"}
    assert len({(row.call, row.direction, row.provider) for row in found}) == len(found)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--grid", "wild", "--points", "0"], "--points: got 0"),
        (["--grid", "wild", "--points", "4", "--from", "5"], "--from: got 5 (int); accepted: the number of the first"),
        (["--grid", "wild", "--points", "4", "--from", "2", "--seed", "1"], "--from: got 2 without wild_seed1_unfini"),
        (["--grid", "wild", "--calls", "a"], "--calls: got 'a'; accepted: numbers of random calls"),
        (["--grid", "wild", "--calls", "1", "--points", "3"], "--points: got it with --calls"),
        (["--grid", "wild", "--dtype", "bf16"], "--dtype: got it with --grid wild"),
        (["--grid", "wild", "--pass", "bwd"], "--pass: got it with --grid wild"),
        (["--grid", "wild", "--protocol", "short"], "--protocol: got it with --grid wild"),
        (["--regret", "5", "--grid", "wild"], "--grid: got it with --regret"),
        (["--regret", "0"], "--regret: got 0 (int); accepted: an integer >= 1"),
        (["--regret", "5", "--points", "3"], "--points: got it with --regret"),
        (["--regret", "5", "--backends", "cpu"], "--backends: got it with --regret"),
        (["--points", "3"], "--points: got it without random calls (3)"),
        (["--grid", "paper", "--from", "3"], "--from: got it without random calls (3)"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments: list[str], complaint: str, tmp_path: Path):
    result = invoke("bench", "--device", "cpu", "--out", tmp_path, *arguments)
    assert result.exit_code == 2
    assert complaint in result.output
    assert list(tmp_path.iterdir()) == []


# --regret


def regret_bench(monkeypatch: pytest.MonkeyPatch, chosen: str, **backends: Attend) -> regret.Bench:
    """Backends of the test's own, one of which is chosen."""

    def named(name: str) -> Provider:
        return Provider(name, False, lambda point, inputs: backends[name])

    known = [regret.Candidate(name, named(name)) for name in backends]
    monkeypatch.setattr(regret, "candidates", lambda device, op: known)
    monkeypatch.setattr(regret, "AUTOMATIC", named(chosen))
    monkeypatch.setattr(regret, "chosen_name", lambda point, inputs: chosen)
    return regret.Bench("cpu", 0, ENV, random.Random(1))


def test_regret_is_the_time_of_the_choice_over_that_of_the_fastest(quick: None, monkeypatch: pytest.MonkeyPatch):
    bench = regret_bench(monkeypatch, "slow", fast=Attend(right), slow=Attend(slow), wrong=Attend(lambda q, k, v: q))
    (row,) = bench.measure(call_of(), print)
    assert (row.status, row.chosen, row.best) == ("ok", "slow", "fast")
    assert row.regret == pytest.approx(row.chosen_us / row.best_us)
    assert row.regret > 3
    assert row.others.startswith("wrong inaccurate: out: off by")
    (line,) = regret.alarms(lambda number: f"again {number}", [row])
    assert line.startswith(f"{row.regret:.2f} fwd vision fp32 B2 H2 24 x 24 d16: slow ")
    assert ", better fast " in line
    assert line.endswith(": again 0")
    assert regret.closing([row]).startswith("Regret, time of the choice over that of the fastest: fwd ")
    assert "(1 of 1 over 1.15, worst " in regret.closing([row])
    assert regret.summary([row])[0].lines[-1][:2] == ("all", "1")


def test_the_fastest_choice_has_no_regret(quick: None, monkeypatch: pytest.MonkeyPatch):
    bench = regret_bench(monkeypatch, "fast", fast=Attend(right), slow=Attend(slow))
    forward, backward = bench.measure(call_of(is_trained=True), print)
    assert (forward.direction, forward.chosen, forward.best, forward.regret) == ("fwd", "fast", "fast", 1.0)
    assert forward.others.startswith("slow ")
    assert (backward.direction, backward.status) == ("bwd", "ok")  # the gradients of both take as long
    assert regret.alarms(str, [forward]) == []


def test_a_candidate_that_poisons_the_gpu_is_named(quick: None, monkeypatch: pytest.MonkeyPatch):
    faulty = Faulty(monkeypatch, rows=24)
    bench = regret_bench(monkeypatch, "fine", fine=Attend(right), faulty=faulty.build(SMALL, None))
    with pytest.raises(random_runs.Lost, match="left the GPU unusable: faulty: CUDA error") as lost:
        bench.measure(call_of(), print)
    (row,) = lost.value.rows
    assert (row.status, row.reason.partition(":")[0]) == ("crashed", "faulty")


def test_a_cpu_compares_all_backends_and_knows_its_choice():
    assert [one.name for one in regret.candidates("cpu", "forward")] == ["cpu", "tiled", "reference"]
    for point in (SMALL, dataclasses.replace(SMALL, direction="bwd")):
        assert regret.chosen_name(point, point.make("cpu", 0)) == "cpu"


def test_a_run_of_regrets_is_written(tiny: None, tmp_path: Path):
    result = invoke("bench", "--regret", "2", "--seed", "3", "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    rows = read(tmp_path / "regret_seed3.csv", RegretRow)
    assert [(row.call, row.direction, row.chosen) for row in rows] == [
        (0, "fwd", "cpu"), (0, "bwd", "cpu"), (1, "fwd", "cpu"),
    ]  # fmt: skip
    assert all(row.regret >= 1.0 for row in rows)
    assert set(columns(RegretRow)) >= {"seed", "call", "chosen", "best", "regret", "commit"}
    assert result.output.splitlines()[-1].startswith("Regret, time of the choice over that of the fastest: fwd ")


def test_a_gpu_compares_all_families_and_knows_its_choice(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    for op in ("forward", "backward"):
        named = [one for one in regret.candidates("cuda", op) if one.family is not None]
        assert [one.name for one in named] == [family.name for family in families.all_families(op)]
        assert {one.provider.name for one in named} == {"cuda"}
    torch.use_deterministic_algorithms(False)  # bwd_sm80 would refuse
    try:
        fake_gpu.plug_in(fake_gpu.build(tmp_path_factory.mktemp("driver")), monkeypatch.setattr)
        point = Point(2, 4, 4, 512, 512, 64, 64, "bf16", is_causal=True)
        taken = []
        for direction, op in (("fwd", "forward"), ("bwd", "backward")):
            inputs = point.make("cpu", 0)
            name = regret.chosen_name(dataclasses.replace(point, direction=direction), inputs)
            assert name in {family.name for family in families.all_families(op)}
            taken.append(name)
            leaves = inputs.leaves("bhsd", needs_grad=direction != "fwd")
            detail = providers.AUTOMATIC.build(point, leaves).detail
            assert f"{name}_kernel tile" in detail
            assert ", not " not in detail
            with regret.forced("fwd_sm80" if op == "forward" else "bwd_sm80"):
                forced = regret.chosen_name(dataclasses.replace(point, direction=direction), inputs)
            assert forced == ("fwd_sm80" if op == "forward" else "bwd_sm80")
            assert regret.chosen_name(dataclasses.replace(point, direction=direction), inputs) == name
        assert not {"fwd_sm80", "bwd_sm80"} & set(taken)
    finally:
        fake_gpu.unplug()


def test_no_plan_survives_a_forced_family(monkeypatch: pytest.MonkeyPatch):
    cleared = []
    monkeypatch.setattr(assemble, "clear_plans", lambda: cleared.append(families.forced_names()))
    with regret.forced("fwd_sm80"):
        assert cleared == [("fwd_sm80",)]
    assert cleared == [("fwd_sm80",), ()]
    with regret.forced(None):
        assert families.forced_names() == ()
    assert len(cleared) == 2


def test_flashtile_is_measured_where_only_peers_are_named():
    selection = random_runs.Selection(1, (0,), 0)
    made = wild.job(selection, [by_name("sdpa-math")], "cpu", 0, ENV, "")
    assert made.measure.__self__.providers[0] is AUTOMATIC
