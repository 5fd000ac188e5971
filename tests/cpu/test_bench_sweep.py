"""The sweep: what is measured, what is refused and why, and what remains after an interrupt."""

from __future__ import annotations

import dataclasses
import io
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from bench_fakes import ENV, SETTINGS, Clock, provider, right, rows, sweep
from rich.console import Console

from flashtile.lab.bench import cold, compare, load, memory, overhead, plots, tables, timing
from flashtile.lab.bench.command import run_sweep
from flashtile.lab.bench.points import Plan, Point
from flashtile.lab.bench.providers import Attend, Provider, by_name, choose, providers
from flashtile.lab.bench.rows import Row, read
from flashtile.lab.bench.sweep import Sweep, num_copies


def test_quantiles_interpolate():
    assert timing.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert timing.quantile([1.0, 2.0], 0.5) == 1.5
    assert timing.quantile([0.0, 10.0, 20.0, 30.0, 40.0, 50.0], 0.2) == 10.0
    assert timing.quantile([7.0], 0.8) == 7.0


def test_rounds_interleave_and_a_slow_contender_takes_fewer():
    order = []
    slow = timing.Contender("slow", [lambda: order.append("slow")], call_s=1.0)
    fast = timing.Contender("fast", [lambda: order.append("fast")], call_s=0.05)
    timing.interleave([slow, fast], "cpu", budget_s=0.5)
    assert len(slow.seconds) == timing.MIN_ROUNDS
    assert len(fast.seconds) == 10
    assert order.count("slow") == timing.MIN_ROUNDS
    gaps = [index for index, name in enumerate(order) if name == "slow"]
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(gaps))


def test_copies_are_used_in_turn():
    seen = []
    contender = timing.Contender(
        "one", [lambda: seen.append(0), lambda: seen.append(1), lambda: seen.append(2)], call_s=0.05
    )
    timing.interleave([contender], "cpu", budget_s=0.3)
    assert seen == [0, 1, 2, 0, 1, 2]


def test_copies_together_exceed_the_cache():
    point = Point(seqlen_q=512, seqlen_k=512)
    assert num_copies(point, 10 * sum(point.sizes())) == 15
    assert num_copies(point, 0) == 1


def test_the_meter_sees_known_allocations_exactly():
    def thunk():
        one = torch.empty(1_000_000, dtype=torch.uint8)
        two = torch.empty(300_000, dtype=torch.uint8)
        del one
        return two, torch.empty(500_000, dtype=torch.uint8)

    assert memory.peak_bytes(thunk, "cpu") == 1_300_000
    assert memory.peak_bytes(lambda: torch.empty(77, dtype=torch.uint8), "cpu") == 77


def test_the_meter_agrees_with_the_resident_peak(tmp_path: Path):
    """Two score matrices of 256 MiB: the profiler here and the resident peak of a child process agree on them."""
    point = Point(seqlen_q=8192, seqlen_k=8192)
    inputs = point.make("cpu", 0)
    call = by_name("eager").build(point, inputs).call
    metered = memory.peak_bytes(lambda: call(inputs.q, inputs.k, inputs.v), "cpu")
    report = cold.in_child("eager", point, "cpu", str(tmp_path))
    assert report["status"] == "ok"
    assert report["import_torch_s"] > 0.05
    assert metered > 2 * 8192 * 8192 * 4
    assert abs(report["resident_bytes"] / metered - 1) < 0.15


def test_a_row_holds_time_memory_and_accuracy():
    (row,) = rows([provider("one")], 64)
    assert row.status == "ok"
    assert row.p20_ms <= row.median_ms <= row.p80_ms
    assert row.num_rounds >= timing.MIN_ROUNDS
    assert row.tflops == pytest.approx(4 * 64 * 64 * 16 / row.median_ms / 1e9)
    assert row.memory_bytes >= 64 * 16 * 4
    assert 0 < row.max_error < 1e-5
    assert row.is_accurate is True
    assert row.checked == "out: all rows, 1 of 1 heads"


def test_a_refusal_keeps_its_reason_and_the_sweep_goes_on():
    def build(point, inputs):
        raise NotImplementedError("only on Tuesdays")

    def no_room(q, k, v):
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")

    def no_room_on_the_cpu(q, k, v):
        return torch.empty(2**62, dtype=torch.uint8)

    found = rows(
        [
            Provider("never", True, build),
            provider("large", no_room),
            provider("larger", no_room_on_the_cpu),
            provider("fine"),
        ]
    )
    assert [(row.provider, row.status) for row in found] == [
        ("never", "refused"),
        ("large", "oom"),
        ("larger", "oom"),
        ("fine", "ok"),
    ]
    assert found[0].reason == "only on Tuesdays"
    assert "1 TiB" in found[1].reason
    assert found[1].median_ms is None


def test_a_missing_package_is_refused_once():
    absent = Provider("absent", True, lambda point, inputs: Attend(right), requires=("no_such_package", "nor_this_one"))
    found = rows([absent, provider("fine")], 32, 48)
    assert [row.provider for row in found] == ["fine", "absent", "fine"]
    assert "no_such_package cannot be imported" in found[1].reason
    assert "nor_this_one cannot be imported" in found[1].reason


def test_a_warning_before_an_error_becomes_part_of_the_reason():
    def call(q, k, v):
        torch.warnings.warn("the head is too large", stacklevel=2)
        raise RuntimeError("no kernel")

    (row,) = rows([provider("one", call)])
    assert row.reason == "no kernel; the head is too large"


def test_a_wrong_result_is_marked_and_left_out_of_the_ratios():
    found = rows([provider("ours", lambda q, k, v: right(q, k, v) * 1.001, is_baseline=False), provider("peer")])
    assert [row.status for row in found] == ["inaccurate", "ok"]
    assert found[0].is_accurate is False
    assert "out: off by" in found[0].reason
    assert found[0].median_ms is not None
    assert compare.ratios(found) == []


class _WrongGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.5


@pytest.mark.parametrize("direction", ["bwd", "fwd+bwd"])
def test_a_wrong_gradient_is_marked(direction: str):
    found = rows(
        [provider("wrong", lambda q, k, v: right(q, _WrongGrad.apply(k), v)), provider("fine")], direction=direction
    )
    assert [row.status for row in found] == ["inaccurate", "ok"]
    assert found[0].reason.startswith("dk: off by")
    assert found[1].checked == "out dq dk dv: all rows, 1 of 1 heads"


def test_a_large_problem_is_checked_on_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flashtile.lab.bench.accuracy.FULL_SCORES", {"cpu": 0})
    monkeypatch.setattr("flashtile.lab.bench.accuracy.MAX_ROWS", 7)
    point = Point(
        batch=2,
        heads=4,
        heads_kv=2,
        seqlen_q=40,
        seqlen_k=40,
        head_dim=16,
        head_dim_v=16,
        is_causal=True,
        direction="bwd",
    )
    everyone = [by_name("tiled"), by_name("sdpa-math"), by_name("eager")]
    found = next(Sweep(Plan("Lsweep", "x", (point,)), everyone, SETTINGS, ENV).rows())
    assert [row.status for row in found] == ["ok", "ok", "ok"]
    assert {row.checked for row in found} == {"out dq: 7 of 40 rows, 4 of 8 heads"}

    def not_causal(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    (row,) = next(Sweep(Plan("Lsweep", "x", (point,)), [provider("full", not_causal)], SETTINGS, ENV).rows())
    assert row.status == "inaccurate"


def test_all_providers_agree_on_grouped_heads_and_one_query():
    point = Point(batch=2, heads=4, heads_kv=2, seqlen_q=1, seqlen_k=33, head_dim=16, head_dim_v=16, dtype="bf16")
    everyone = [by_name(name) for name in ("tiled", "reference", "sdpa", "sdpa-math", "eager")]
    found = next(Sweep(Plan("decode", "x", (point,)), everyone, SETTINGS, ENV).rows())
    assert {row.provider: row.status for row in found} == dict.fromkeys((one.name for one in everyone), "ok")
    assert next(row for row in found if row.provider == "sdpa").detail.startswith("takes ")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(timing, "time", found)
    return found


def test_a_call_expected_to_take_too_long_is_not_made(clock: Clock):
    calls = []

    def slow(q, k, v):
        calls.append(q.shape[2])
        clock.sleep(0.03)
        return right(q, k, v)

    found = rows([provider("slow", slow)], 32, 64, 96, settings=dataclasses.replace(SETTINGS, call_limit_s=0.06))
    assert [row.status for row in found] == ["ok", "slow", "slow"]
    assert set(calls) == {32}
    assert "over 0.06 s; raise --call-limit" in found[1].reason


def test_a_call_that_would_exhaust_the_memory_is_not_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flashtile.lab.bench.sweep.free_bytes", lambda: 400_000)

    def large(q, k, v):
        return right(q, k, v) + torch.zeros(q.shape[2], q.shape[2] * 32).sum()

    found = rows([provider("large", large), provider("small")], 32, 64)
    assert [(row.provider, row.seqlen_k, row.status) for row in found] == [
        ("large", 32, "ok"),
        ("small", 32, "ok"),
        ("large", 64, "oom"),
        ("small", 64, "ok"),
    ]
    assert "0.0 GiB are free" in found[2].reason


def test_compile_time_has_a_limit_too(clock: Clock):
    seen = set()

    def compiling(q, k, v):
        if q.shape not in seen:
            seen.add(q.shape)
            clock.sleep(0.1)
        return right(q, k, v)

    found = rows(
        [provider("compiling", compiling)], 32, 64, settings=dataclasses.replace(SETTINGS, compile_limit_s=0.05)
    )
    assert [row.status for row in found] == ["ok", "slow"]
    assert "raise --compile-limit" in found[1].reason


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path):
    def call(q, k, v):
        if q.shape[2] == 64:
            raise KeyboardInterrupt
        return right(q, k, v)

    # A finished run is there: it is not replaced
    assert run_sweep(sweep([provider("one")], 32), tmp_path, Console(quiet=True)) == 0
    finished = {path: path.read_bytes() for path in tmp_path.iterdir()}
    output = io.StringIO()
    status = run_sweep(sweep([provider("one", call), provider("two")], 32, 48, 64, 80), tmp_path, Console(file=output))
    assert status == 130
    assert {path: path.read_bytes() for path in finished} == finished
    (path,) = tmp_path.glob("*_unfinished.csv")
    assert [(row.provider, row.seqlen_k) for row in read(path, Row)] == [
        ("one", 32),
        ("two", 32),
        ("one", 48),
        ("two", 48),
    ]
    assert len(list(tmp_path.glob("*_vs_L*_unfinished.png"))) == 3
    assert "Interrupted: 4 rows were kept" in output.getvalue()


def test_an_interrupt_keeps_the_providers_of_a_point_that_are_done(tmp_path: Path):
    """The fourth is interrupted: two are prepared and get their rounds, and one has refused. What would be compared
    is chance, so that no closing line says it."""

    def refusing(q, k, v):
        raise NotImplementedError("not today")

    def interrupted(q, k, v):
        raise KeyboardInterrupt

    output = io.StringIO()
    ours, torch_math = provider("cpu", is_baseline=False), provider("sdpa-math")
    chosen = [ours, torch_math, provider("two", refusing), provider("three", interrupted), provider("four")]
    assert run_sweep(sweep(chosen, 32, 48), tmp_path, Console(file=output)) == 130
    (path,) = tmp_path.glob("*_unfinished.csv")
    assert [(row.provider, row.status, row.num_rounds) for row in read(path, Row)] == [
        ("cpu", "ok", 3),
        ("sdpa-math", "ok", 3),
        ("two", "refused", None),
    ]
    assert "Interrupted: 3 rows were kept" in output.getvalue()
    assert "times the speed" not in output.getvalue()


def test_an_interrupt_during_the_rounds_keeps_all(monkeypatch: pytest.MonkeyPatch):
    """A slow call is not repeated after the interrupt: it has the time of its last call."""
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    interleave, calls = timing.interleave, []

    def slow(q, k, v):
        clock.sleep(0.5)
        calls.append("slow")
        return right(q, k, v)

    def interrupting(contenders, device, budget_s, order):
        monkeypatch.setattr(timing, "interleave", interleave)
        contenders[0].seconds.append(1e-3)
        calls.clear()
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "interleave", interrupting)
    points = sweep([provider("one"), provider("slow", slow)], 32).rows()
    found = next(points)
    with pytest.raises(KeyboardInterrupt):
        next(points)
    assert [(row.provider, row.status, row.num_rounds) for row in found] == [("one", "ok", 4), ("slow", "ok", 1)]
    assert found[1].median_ms == pytest.approx(500, rel=0.01)
    assert not calls


def test_an_interrupt_before_the_first_row_leaves_nothing(tmp_path: Path):
    def call(q, k, v):
        raise KeyboardInterrupt

    (tmp_path / "sdpa_Lsweep_B1_H1_d16_fp32_unfinished.csv").write_text("of an earlier run")
    assert run_sweep(sweep([provider("one", call)], 32), tmp_path, Console(quiet=True)) == 130
    (path,) = tmp_path.iterdir()
    assert path.read_text() == "of an earlier run"


def test_inputs_that_do_not_fit_are_not_made():
    found = rows([provider("one"), provider("two")], 32, 10**9)
    assert [(row.provider, row.status) for row in found] == [
        ("one", "ok"), ("two", "ok"), ("one", "oom"), ("two", "oom"),
    ]  # fmt: skip
    assert "the inputs need" in found[2].reason


def test_a_busy_machine_is_remarked_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    times = iter([load._Times(1.0, 0.0, 100.0, 0.0), load._Times(2.0, 0.5, 200.0, 30.0)])
    monkeypatch.setattr(load, "_times", lambda: next(times))
    output = io.StringIO()
    assert run_sweep(sweep([provider("one")], 32), tmp_path, Console(file=output, width=400)) == 0
    assert "waited for a core 33% of the time in which they could run; the host took 30%" in output.getvalue()


def test_a_calm_machine_is_not_remarked_on(monkeypatch: pytest.MonkeyPatch):
    times = iter([load._Times(1.0, 0.0, 100.0, 0.0), load._Times(2.0, 0.01, 200.0, 1.0)])
    monkeypatch.setattr(load, "_times", lambda: next(times))
    assert load.Load("cpu").remark() == ""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux says how long a thread waits")
def test_waiting_for_a_core_is_measured():
    """Two threads on one core: each waits half of the time."""
    script = (
        "import os, threading, torch; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from flashtile.lab.bench.load import Load\n"
        "torch.set_num_threads(1); a = torch.randn(500, 500); load = Load('cpu')\n"
        "def work():\n    for _ in range(20): a @ a\n"
        "threads = [threading.Thread(target=work) for _ in range(2)]\n"
        "[t.start() for t in threads]; work(); print(load.remark()); [t.join() for t in threads]"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "too busy to trust these times: threads of this run waited for a core" in done.stdout


def test_overhead_of_decode_steps(monkeypatch):
    """Ours in every case; torch without pages; others not at all."""
    monkeypatch.setattr(overhead, "NUM_ROUNDS", 3)
    monkeypatch.setattr(overhead, "COLUMNS", [column for column in overhead.COLUMNS if column[0] == "decode"])
    compared = [by_name("cpu"), by_name("sdpa"), provider("one")]
    found = [row for some in overhead.rows(compared, Point(), "cpu", ENV) for row in some]
    status = {(row.provider, row.case): row.status for row in found}
    assert all(status["cpu", case] == "ok" for case in overhead.STEPS)
    assert [status["sdpa", case] for case in overhead.STEPS] == ["ok", "refused", "ok", "refused"]
    assert {status["one", case] for case in overhead.STEPS} == {"refused"}
    assert tables.overhead_table(found).header == ("", *(f"decode, {case}" for case in overhead.STEPS))


def test_overhead_has_six_cases_for_each_provider(monkeypatch):
    def no_grad_only(q, k, v):
        if torch.is_grad_enabled():
            raise NotImplementedError("inference only")
        return right(q, k, v)

    lengths = []

    def growing(q, k, v):
        lengths.append(k.shape[2])
        return right(q, k, v)

    monkeypatch.setattr(overhead, "NUM_ROUNDS", 3)
    found = [
        row
        for some in overhead.rows([provider("one", growing), provider("two", no_grad_only)], Point(), "cpu", ENV)
        for row in some
    ]
    assert [(row.provider, row.mode, row.case, row.status) for row in found[:6]] == [
        ("one", "no_grad", "repeated", "ok"),
        ("two", "no_grad", "repeated", "ok"),
        ("one", "no_grad", "growing", "ok"),
        ("two", "no_grad", "growing", "ok"),
        ("one", "grad", "repeated", "ok"),
        ("two", "grad", "repeated", "refused"),
    ]
    assert [(row.mode, row.case) for row in found[::2]] == list(overhead.COLUMNS)
    assert found[5].reason == "inference only"
    assert all(row.p20_us <= row.median_us <= row.p80_us for row in found if row.status == "ok")
    assert all(row.status == "refused" for row in found if row.mode == "decode")
    # Each mode: first one length repeatedly, then a new length in every call
    num_calls = (3 + overhead.NUM_WARM) * overhead.NUM_CALLS
    assert len(lengths) == 6 * num_calls
    for mode in range(3):
        repeated, grown = lengths[2 * mode * num_calls :][:num_calls], lengths[(2 * mode + 1) * num_calls :][:num_calls]
        assert set(repeated) == {64}
        assert grown == list(range(65, 65 + num_calls))


def test_overhead_keeps_to_its_budget(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(overhead, "time", clock)
    calls = {"one": 0, "two": 0}

    def slow(seconds: float, name: str):
        def call(q, k, v):
            clock.sleep(seconds)
            calls[name] += 1
            return right(q, k, v)

        return call

    monkeypatch.setattr(overhead, "COLUMNS", [("no_grad", "repeated"), ("no_grad", "growing")])
    compared = [provider("one", slow(0.01, "one")), provider("two", slow(1.0, "two"))]
    found = [
        row for some in overhead.rows(compared, Point(), "cpu", ENV, limits=overhead.Limits(0.45, 1.5)) for row in some
    ]
    assert [row.status for row in found] == ["ok", "ok", "ok", "ok"]
    # In both cases: 1 and 2 calls first, then 20 rounds of 2, or one round that is longer than the budget
    assert calls == {"one": 2 * (3 + 40), "two": 2 * (3 + 1)}
    found = [
        row for some in overhead.rows(compared, Point(), "cpu", ENV, limits=overhead.Limits(0.45, 0.5)) for row in some
    ]
    assert [row.status for row in found] == ["ok", "ok", "ok", "slow"]
    assert found[3].reason == "its first calls took 1 s of this run already; raise --compile-limit"


def test_the_default_set_of_a_grid_leaves_the_slow_ones_out():
    names = {one.name for one in choose(None, is_grid=True)}
    assert names.isdisjoint({"tiled", "reference", "sdpa-math", "eager"})
    assert names >= {"sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flex", "compiled", "flash-attn-4"}
    assert [one.name for one in choose("eager, ours", is_grid=True)] == [
        "cuda",
        "triton",
        "cpu",
        "tiled",
        "numba",
        "reference",
        "eager",
    ]
    assert len({one.name for one in providers()}) == len(providers())
    with pytest.raises(ValueError, match="--backends: got 'nobody'; accepted: ours, baselines, cuda"):
        choose("nobody", is_grid=False)


def test_labels_are_spread_and_keep_their_middle():
    assert plots.spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    places = plots.spread([0.30, 0.30, 0.32, 0.9], 0.1)
    assert all(high - low >= 0.1 - 1e-9 for low, high in itertools.pairwise(places))
    assert sum(places[:3]) == pytest.approx(0.92)
    assert places[3] == 0.9
