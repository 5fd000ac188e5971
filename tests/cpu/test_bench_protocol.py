"""The protocols of timing: random order, batches of the right length by a clock of the test's own, sensors."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
import threading
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from bench_fakes import SETTINGS, Clock, provider, rows
from typer.testing import CliRunner

from flashtile.cli.main import app
from flashtile.lab.bench import nvml, protocol, providers, standing, tables, timing
from flashtile.lab.bench.command import Options, prepare
from flashtile.lab.bench.points import Point
from flashtile.lab.bench.protocol import ALONE, SHORT, SUSTAINED
from flashtile.lab.bench.providers import by_name, missing
from flashtile.lab.bench.rows import Row, Writer, columns, read
from flashtile.lab.bench.timing import Contender


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(timing, "time", found)
    return found


def planted(clock: Clock, log: list[tuple[str, int]], name: str, seconds: float) -> Contender:
    """A contender whose calls take that long and write down when they begin."""

    def call() -> None:
        log.append((name, clock.now_ns))
        clock.sleep(seconds)

    return Contender(name, [call], call_s=3 * seconds)  # a first estimate is too long: it includes the host


def turns_of(log: list[tuple[str, int]]) -> list[str]:
    return [name for name, _ in itertools.groupby(name for name, _ in log)]


def test_every_round_has_all_contenders_in_an_order_of_its_own():
    wanted = dict.fromkeys("abcd", 40)
    found = list(timing.turns(wanted, random.Random(1)))
    rounds = [tuple(found[start : start + 4]) for start in range(0, 160, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert len(set(rounds)) > 10  # of 24
    assert all({one[place] for one in rounds} == set("abcd") for place in range(4))
    assert found == list(timing.turns(wanted, random.Random(1)))
    assert found != list(timing.turns(wanted, random.Random(2)))
    assert list(timing.turns(wanted)) == list("abcd") * 40


def test_a_key_that_is_wanted_less_is_spread_over_the_rounds():
    found = list(timing.turns({"slow": 3, "fast": 30}, random.Random(3)))
    assert (found.count("slow"), found.count("fast")) == (3, 30)
    places = [index for index, name in enumerate(found) if name == "slow"]
    assert all(later - earlier >= 9 for earlier, later in itertools.pairwise(places))


def test_medians_are_those_of_the_planted_calls(clock: Clock):
    log: list[tuple[str, int]] = []
    contenders = [planted(clock, log, name, ms / 1e3) for name, ms in (("a", 0.5), ("b", 2.0), ("c", 40.0))]
    protocol.measure(contenders, "cpu", (SHORT, SUSTAINED), random.Random(0), 0.0, nvml.Probe())
    for contender, ms in zip(contenders, (0.5, 2.0, 40.0), strict=True):
        for one in (ALONE, SHORT, SUSTAINED):
            timed = contender.timed[one.name]
            assert timed.median_s * 1e3 == pytest.approx(ms, rel=0.01)
            assert timed.num_calls * timed.median_s >= one.batch_s * (0.3 if one is ALONE else 0.98)
        assert len(contender.timed["sustained"].seconds) == 3
    assert [len(one.timed["short"].seconds) for one in contenders] == [10, 10, timing.MIN_ROUNDS]
    assert [one.timed["sustained"].num_calls for one in contenders] == [400, 100, 5]


def test_each_is_alone_first_then_short_with_rests_then_sustained_without(clock: Clock):
    log: list[tuple[str, int]] = []
    contenders = [planted(clock, log, name, 0.002) for name in "ab"]
    for one in contenders:
        one.call_s = 0.002
    protocol.measure(contenders, "cpu", (SHORT, SUSTAINED), random.Random(5), 0.0, nvml.Probe())
    begun = [begin for _, begin in log]
    gaps = [later - earlier - 2_000_000 for earlier, later in itertools.pairwise(begun)]
    rests = [gap for gap in gaps if gap > 10_000_000]
    # One rest before each batch of the alone and the short ones; that before the first is not between calls
    assert len(rests) == 2 * ALONE.num_batches + 2 * SHORT.num_batches - 1
    assert all(gap == pytest.approx(15e6, rel=0.01) for gap in rests)
    last_rest = max(index for index, gap in enumerate(gaps) if gap > 10_000_000)
    sustained = turns_of(log[last_rest + 1 :])
    assert 4 <= len(sustained) <= 7  # six batches; neighbours of one provider count as one
    assert max(gaps[last_rest + 1 :]) < 100_000


def test_a_budget_asks_for_more_batches(clock: Clock):
    log: list[tuple[str, int]] = []
    one = planted(clock, log, "a", 0.002)
    protocol.run(SUSTAINED, [one], "cpu", random.Random(0), budget_s=2.0)
    assert len(one.timed["sustained"].seconds) == 10


def test_short_bursts_do_not_fill_the_launch_queue(clock: Clock):
    log: list[tuple[str, int]] = []
    one = planted(clock, log, "a", 1e-6)
    protocol.run(SHORT, [one], "cpu", random.Random(0))
    assert one.timed["short"].num_calls == timing.MAX_CALLS


class FakeNvml(types.ModuleType):
    """Sensors that rise by a MHz and a W at each look."""

    NVML_SUCCESS, NVML_CLOCK_SM, NVML_FI_DEV_POWER_INSTANT = 0, 1, 186

    def __init__(self, has_momentary: bool = True, fails_after: int = 10**9):
        super().__init__("pynvml")
        self.has_momentary, self.fails_after, self.looks, self.uuid = has_momentary, fails_after, 0, ""
        self.looked = threading.Condition()

    def nvmlInit(self) -> None:  # noqa: N802, the names are NVML's
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:  # noqa: N802
        self.uuid = uuid
        return object()

    def nvmlDeviceGetFieldValues(self, handle: object, fields: list[int]) -> list[types.SimpleNamespace]:  # noqa: N802
        value = types.SimpleNamespace(uiVal=(600 + self.looks) * 1000)
        return [types.SimpleNamespace(nvmlReturn=0 if self.has_momentary else 3, value=value)]

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:  # noqa: N802
        return (300 + self.looks) * 1000

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:  # noqa: N802
        with self.looked:
            self.looks += 1
            self.looked.notify_all()
            if self.looks > self.fails_after:
                raise RuntimeError("GPU is lost")
            return 1500 + self.looks

    def wait_for(self, looks: int) -> None:
        with self.looked:
            assert self.looked.wait_for(lambda: self.looks >= looks, timeout=300)


def test_sensors_are_read_while_calls_run():
    fake = FakeNvml()
    probe = nvml.Probe(nvml.reader(fake, "GPU-1234"))
    assert fake.uuid == "GPU-1234"
    before = fake.looks
    with probe.during(0.0001) as samples:
        fake.wait_for(before + 3)
    assert len(samples) >= 3
    assert samples[:2] == [nvml.Sample(1502.0, 601.0), nvml.Sample(1503.0, 602.0)]
    assert nvml.clock_mhz([nvml.Sample(1.0, 9.0), nvml.Sample(5.0, 1.0), nvml.Sample(2.0, 2.0)]) == 2.0
    assert nvml.power_w([nvml.Sample(1.0, 9.0), nvml.Sample(5.0, 1.0), nvml.Sample(2.0, 2.0)]) == 4.0
    assert nvml.clock_mhz([]) is nvml.power_w([]) is None


def test_a_look_that_is_under_way_at_the_end_still_counts():
    is_reading = threading.Event()

    def read() -> nvml.Sample:
        is_reading.set()
        threading.Event().wait(0.1)
        return nvml.Sample(1.0, 2.0)

    with nvml.Probe(read).during(0.0001) as samples:
        assert is_reading.wait(300)
    assert samples == [nvml.Sample(1.0, 2.0)]


def test_without_momentary_power_the_average_is_read():
    assert nvml.reader(FakeNvml(has_momentary=False), "GPU-1")() == nvml.Sample(1502.0, 301.0)


def test_sensors_that_stop_answering_are_said_and_asked_no_more():
    fake = FakeNvml(fails_after=2)
    probe = nvml.Probe(nvml.reader(fake, "GPU-1"))
    with probe.during(0.0001) as samples:
        fake.wait_for(3)
    assert len(samples) == 1
    assert probe.complaint == "NVML stopped answering: GPU is lost"
    with probe.during(0.0001) as samples:
        pass
    assert (samples, fake.looks) == ([], 3)


def test_a_probe_is_of_torchs_gpu_or_says_why_there_is_none(monkeypatch: pytest.MonkeyPatch):
    assert nvml.open_probe("cpu") == nvml.Probe(None, "")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.open_probe("cuda").complaint.endswith("pip install nvidia-ml-py to read them")
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=f"0a-{index}"))
    probe = nvml.open_probe("cuda")
    assert probe.read is not None
    assert fake.uuid == "GPU-0a-1"
    fake.fails_after = 0
    assert nvml.open_probe("cuda").complaint == "clock and power are empty: NVML does not answer (GPU is lost)"


def quick(one: protocol.Protocol) -> protocol.Protocol:
    return dataclasses.replace(one, batch_s=1e-4, rest_s=0.0, sample_s=1e-5)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    monkeypatch.setattr(protocol, "ALONE", quick(ALONE))

    class Constant(nvml.Probe):
        def during(self, period_s: float):
            return nullcontext([nvml.Sample(1700.0, 500.0)])

    settings = dataclasses.replace(SETTINGS, protocols=(quick(SHORT), quick(SUSTAINED)), seed=11, probe=Constant())
    return rows([provider("ours", is_baseline=False), provider("peer"), provider("other")], 32, 48, settings=settings)


def test_rows_rest_on_sustained_load_and_hold_all_columns(measured: list[Row]):
    for row in measured:
        assert (row.protocol, row.seed, row.status) == ("sustained", 11, "ok")
        assert row.median_ms == row.sustained_ms
        assert row.tflops == pytest.approx(row.point.flops() / row.sustained_ms / 1e9)
        assert (row.sustained_clock_mhz, row.sustained_power_w) == (1700.0, 500.0)
        assert row.sustained_joules == pytest.approx(0.5 * row.sustained_ms)
        assert row.short_joules == pytest.approx(0.5 * row.short_ms)
        assert row.alone_ms > 0


def test_short_bursts_alone_leave_the_columns_of_load_empty():
    settings = dataclasses.replace(SETTINGS, protocols=(quick(SHORT),), seed=4)
    (row,) = rows([provider("one")], settings=settings)
    assert (row.protocol, row.median_ms) == ("short", row.short_ms)
    assert row.sustained_ms is row.sustained_joules is row.short_power_w is None
    (row,) = rows([provider("one")])
    assert (row.protocol, row.short_ms, row.alone_ms, row.seed) == ("rounds", None, None, 0)


def test_an_interrupt_keeps_the_protocols_that_are_complete(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    run = protocol.run

    def interrupted(one: protocol.Protocol, *rest: object) -> None:
        if one.name == "sustained":
            raise KeyboardInterrupt
        run(one, *rest)

    monkeypatch.setattr(protocol, "run", interrupted)
    settings = dataclasses.replace(SETTINGS, protocols=(SHORT, SUSTAINED))
    kept: list[Row] = []
    sweep = rows_until_interrupt(settings, kept)
    assert sweep is KeyboardInterrupt
    assert [(row.protocol, row.short_ms is not None, row.sustained_ms) for row in kept] == [("short", True, None)] * 2


def rows_until_interrupt(settings: object, kept: list[Row]) -> type[BaseException] | None:
    from bench_fakes import sweep

    try:
        for found in sweep([provider("a"), provider("b")], settings=settings).rows():
            kept += found
    except KeyboardInterrupt:
        return KeyboardInterrupt
    return None


def with_times(measured: list[Row], times: dict[tuple[str, int], tuple[float, float]]) -> list[Row]:
    found = []
    for row in measured:
        short, sustained = times[row.provider, row.seqlen_k]
        found.append(dataclasses.replace(row, short_ms=short, sustained_ms=sustained, median_ms=sustained))
    return found


def test_standings_are_over_the_best_peer_and_name_the_worst_point(measured: list[Row]):
    times = {
        ("ours", 32): (1.0, 1.0), ("peer", 32): (2.0, 0.5), ("other", 32): (4.0, 9.0),
        ("ours", 48): (1.0, 1.0), ("peer", 48): (9.0, 9.0), ("other", 48): (8.0, 2.0),
    }  # fmt: skip
    timed = with_times(measured, times)
    short, sustained = standing.standings(timed)
    assert (short.protocol, short.num_points, short.num_behind) == ("short", 2, 0)
    assert short.geometric_mean == pytest.approx(4.0)
    assert (sustained.protocol, sustained.geometric_mean, sustained.num_behind) == ("sustained", pytest.approx(1.0), 1)
    assert (sustained.worst.ratio, sustained.worst.peer.provider, sustained.worst.ours.seqlen_k) == (0.5, "peer", 32)
    assert tables.of(timed, "standings").lines[1][1:] == ("fwd", "sustained", "2", "1.000", "1", "0.500", "S=32, peer")
    places = tables.of(timed, "places")
    assert places.header == ("", "short", "best peer", "sustained", "best peer")
    assert places.lines == (("S=32", "2.000", "peer", "0.500", "peer"), ("S=48", "8.000", "other", "2.000", "other"))
    assert tables.of(timed, "power").lines[0] == ("S=32", *["1700 MHz 500 W"] * 0, *power_cells(timed[:3]))
    assert tables.closing_line(timed) == (
        "ours, speed over the best of all peers under sustained load: fwd 1 (2 points, worst 0.5: S=32, peer)"
    )


def power_cells(some: list[Row]) -> list[str]:
    return [f"1700 MHz 500 W {tables.number(row.sustained_joules)} J" for row in some]


def test_an_inaccurate_peer_is_no_peer(measured: list[Row]):
    times = {(row.provider, row.seqlen_k): (1.0, 1.0 if row.provider == "ours" else 0.1) for row in measured}
    timed = [
        dataclasses.replace(row, status="inaccurate" if row.provider == "peer" else row.status)
        for row in with_times(measured, times)
    ]
    assert {one.worst.peer.provider for one in standing.standings(timed)} == {"other"}


def test_rows_without_a_protocol_have_no_such_tables():
    plain = rows([provider("ours", is_baseline=False), provider("peer")])
    assert [tables.of(plain, kind).lines for kind in ("standings", "places", "power")] == [(), (), ()]


def test_files_from_before_the_protocols_are_read():
    for path in sorted((Path(__file__).resolve().parents[2] / "results").glob("*/sdpa_*.csv")):
        header = path.read_text().split("\n", 1)[0].split(",")
        if "protocol" in header:
            continue
        assert {(row.protocol, row.seed, row.sustained_ms, row.alone_ms) for row in read(path, Row)} == {
            ("", None, None, None)
        }
        break
    else:
        pytest.fail("every file has the new columns: drop this test")
    assert {"short_ms", "sustained_ms", "sustained_joules", "alone_ms"} <= set(columns(Row))


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_line_takes_a_protocol_and_a_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "ALONE", quick(ALONE))
    monkeypatch.setitem(protocol.PROTOCOLS, "both", (quick(SHORT), quick(SUSTAINED)))
    small = ("bench", "--device", "cpu", "--seqlens", "32", "--seconds", "0.001", "--backends", "tiled,sdpa-math")
    result = invoke(*small, "--protocol", "both", "--seed", "7", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "Providers take turns in random order: --seed 7." in result.output
    assert "Speed over the best of all peers" in result.output
    assert result.output.splitlines()[-1].startswith("flashtile (tiled), speed over the best of all peers under sust")
    found = read(tmp_path / "sdpa_Lsweep_B1_H1_d64_fp32.csv", Row)
    assert {(row.protocol, row.seed) for row in found} == {("sustained", 7)}
    result = invoke(*small, "--protocol", "long", "--out", tmp_path / "new")
    assert "--protocol: got 'long'; accepted: short, sustained, both" in result.output
    result = invoke(*small, "--protocol", "both", "--cold", "--out", tmp_path / "new")
    assert "--protocol: got it with --overhead or --cold" in result.output
    assert not (tmp_path / "new").exists()


def test_a_comparison_of_different_protocols_says_so(measured: list[Row], tmp_path: Path):
    plain = [dataclasses.replace(row, protocol="rounds") for row in measured]
    for name, some in (("load", measured), ("plain", plain)):
        with Writer(tmp_path / f"{name}.csv", Row) as writer:
            writer.add(some)
    result = invoke("bench", "--compare", tmp_path / "load.csv", tmp_path / "plain.csv", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "Different protocols: rounds, sustained. The ratios say nothing" in result.output
    result = invoke("bench", "--compare", tmp_path / "load.csv", tmp_path / "load.csv", "--out", tmp_path)
    assert "Different protocols" not in result.output


def test_the_paper_grid_takes_both_on_a_gpu_and_no_other_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flashtile.lab.bench.device.resolve", lambda wanted: ("cuda", "a GPU"))
    monkeypatch.setattr("flashtile.lab.bench.device.environment", lambda *_: None)
    monkeypatch.setattr("flashtile.lab.bench.device.cache_bytes", lambda where: 0)
    monkeypatch.setattr(nvml, "open_probe", lambda where: nvml.Probe(complaint="no sensors"))

    def settings(**options: object):
        return prepare(Options(out=tmp_path, **options), []).args[0].settings

    assert settings(grid="paper").protocols == (SHORT, SUSTAINED)
    assert settings(grid="paper", protocol="short").protocols == (SHORT,)
    assert settings(grid="paper").probe.complaint == "no sensors"
    assert settings(grid="options").protocols == ()
    assert settings(grid="options", protocol="sustained").protocols == (SUSTAINED,)
    assert settings(grid="paper").seed != settings(grid="paper").seed
    assert settings(grid="paper", seed=5).seed == 5


def fake_fa3(monkeypatch: pytest.MonkeyPatch, num_arguments: int) -> list[tuple[object, ...]]:
    seen: list[tuple[object, ...]] = []

    def fwd(*arguments: object) -> tuple[torch.Tensor, None]:
        seen.append(arguments)
        q = arguments[0]
        assert isinstance(q, torch.Tensor)
        return torch.ones_like(q), None

    fwd._schema = types.SimpleNamespace(arguments=[None] * num_arguments)  # type: ignore[attr-defined]
    library = types.SimpleNamespace(fwd=types.SimpleNamespace(default=fwd))
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", library, raising=False)
    for name in ("vllm", "vllm.vllm_flash_attn", providers._VLLM_FA3):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return seen


@pytest.mark.parametrize(("num_arguments", "tail"), [(33, ()), (34, (None,)), (37, (None, 1, 0, None))])
def test_flash_attention_3_of_vllm_is_a_peer_of_the_forward_pass(
    num_arguments: int, tail: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
):
    fa3 = by_name("flash-attn-3")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert "flash_attn_interface cannot be imported" in str(missing(fa3))
    seen = fake_fa3(monkeypatch, num_arguments)
    assert missing(fa3) is None
    point = Point(2, 4, 2, 8, 16, 32, 32, "bf16", is_causal=True)
    inputs = point.make("cpu", 0).leaves("bshd", needs_grad=False)
    attend = fa3.build(point, inputs)
    assert attend.detail == "vLLM's build"
    assert attend.call(inputs.q, inputs.k, inputs.v).shape == (2, 8, 4, 32)
    (arguments,) = seen
    assert len(arguments) == num_arguments
    assert [tuple(tensor.shape) for tensor in arguments[:3]] == [(16, 4, 32), (32, 2, 32), (32, 2, 32)]
    assert [arguments[place].tolist() for place in (7, 8)] == [[0, 8, 16], [0, 16, 32]]
    assert (arguments[12], arguments[13]) == (8, 16)
    assert arguments[23:33] == (32**-0.5, True, -1, -1, 0.0, True, None, 0, None, 0)
    assert arguments[33:] == tail
    with pytest.raises(Exception, match="no backward pass"):
        fa3.build(dataclasses.replace(point, direction="bwd"), inputs)


def test_flash_attention_3_and_4_of_their_own_packages_take_both_passes(monkeypatch: pytest.MonkeyPatch):
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, None]:
        return q + causal, None

    made: dict[str, Callable[..., object]] = {"flash_attn_func": attention}
    for name, module in (("flash-attn-3", "flash_attn_interface"), ("flash-attn-4", "flash_attn.cute")):
        for part in (module.partition(".")[0], module):
            monkeypatch.setitem(sys.modules, part, types.SimpleNamespace(**made))
        one = by_name(name)
        assert missing(one) is None
        for direction in ("fwd", "bwd"):
            point = Point(1, 1, 1, 4, 4, 8, 8, "bf16", is_causal=True, direction=direction)
            inputs = point.make("cpu", 0).leaves("bshd", needs_grad=False)
            assert torch.equal(one.build(point, inputs).call(inputs.q, inputs.k, inputs.v), inputs.q + 1)
