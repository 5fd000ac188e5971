"""The tile study without a GPU: which tiles, rows, table, figure, and what is said where something is missing."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from bench_fakes import ENV, SETTINGS
from rich.console import Console
from typer.testing import CliRunner

from flashtile import families
from flashtile.backends import cuda, executor
from flashtile.cli.main import app
from flashtile.errors import Unsupported
from flashtile.families import Tile
from flashtile.lab.bench import plots
from flashtile.lab.bench.points import Plan, Point
from flashtile.lab.bench.providers import Attend, Provider
from flashtile.lab.bench.rows import read
from flashtile.lab.ladder import counters
from flashtile.lab.ladder.rows import Counters
from flashtile.lab.tiles import command, figures, study, tables
from flashtile.lab.tiles.rows import TileRow
from flashtile.lab.tiles.study import STUDIES, Study, TileUse, Trial
from flashtile.plans.arch import ARCHS
from flashtile.runtime import cache
from flashtile.runtime.nvrtc import CompileError

HOPPER = ARCHS[90]
SIMT, SM90 = STUDIES


@pytest.mark.parametrize("family", STUDIES, ids=lambda study: study.family)
def test_six_shapes_and_more_for_each_of_three_head_dims(family: Study) -> None:
    assert family.head_dims == [64, 128, 256]
    assert len(set(family.rows)) == len(family.rows)
    for head_dim in family.head_dims:
        trials = family.trials(head_dim)
        assert len({(trial.row.owned, trial.row.streamed) for trial in trials}) >= 6
        assert len({trial.name for trial in trials}) == len(trials)
        for is_causal in (False, True):
            assert sum(trial.is_chosen(is_causal, HOPPER) for trial in trials) == 1
        for trial in trials:
            assert trial.why_not(HOPPER) is None


def test_the_reference_tile_is_studied_and_most_are_not_in_the_table() -> None:
    simt = {(row.head_dim, row.owned, row.streamed, row.num_threads) for row in SIMT.rows}
    assert (64, 64, 64, 128) in simt
    known = set(families.find("fwd_simt").every_row("float32"))
    assert len(set(SIMT.rows) - known) > len(SIMT.rows) / 2


def test_a_tile_outside_the_table_compiles_and_its_shared_memory_is_as_stated() -> None:
    (trial,) = (trial for trial in SIMT.trials(64) if trial.name == "128 x 128, 4 warps")
    step = trial.step(False, HOPPER)
    resources = cache.compile_cached(step.unit, HOPPER.name, [step.entry]).resources(step.entry)
    assert resources.spill_store_bytes > 0  # what it is there to show
    use = TileUse(step, resources, HOPPER, blocks=1)
    assert use.occupancy == use.computed_occupancy == 4 / 64


def test_a_persistent_kernel_has_one_block_on_a_multiprocessor() -> None:
    (trial,) = (trial for trial in SM90.trials(64) if trial.name == "128 x 64, 12 warps")
    assert TileUse(trial.step(False, HOPPER), None, HOPPER, blocks=2).occupancy == 12 / 64  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "number", "words"),
    [(SIMT, 86, "104 KiB of shared memory, and a block of sm_86 may have 99"), (SM90, 80, "sm_80 has no wgmma")],
    ids=("shared", "wgmma"),
)
def test_why_a_tile_cannot_run(family: Study, number: int, words: str) -> None:
    names = {"128 x 64, 4 warps", "128 x 64, 12 warps"}
    (trial,) = (trial for trial in family.trials(64) if trial.name in names)
    assert trial.why_not(ARCHS[number]) == words
    assert not list(study.steps([replace(family, rows=(trial.row,))], ARCHS[number]))
    assert len(list(study.steps([replace(family, rows=(trial.row,))], HOPPER))) == 2


def test_a_tile_refuses_other_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "current_arch", lambda: HOPPER)
    provider = SIMT.trials(64)[0].provider()
    for point in (Point(head_dim=128, head_dim_v=128), Point(dtype="bf16")):
        with pytest.raises(Unsupported, match=r"tile: got .*; accepted: float32, head_dim 64"):
            provider.build(point, point.make("cpu", 0))


@pytest.mark.parametrize(("family", "num_blocks"), [(SIMT, 20), (SM90, 4)], ids=("fwd_simt", "fwd_sm90"))
def test_a_call_launches_the_tile(family: Study, num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(study, "current_arch", lambda: HOPPER)
    monkeypatch.setattr(cuda, "_arch", lambda index: HOPPER)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4))
    monkeypatch.setattr(executor, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(executor, "encode_maps", lambda *_: None)
    monkeypatch.setattr(
        executor, "launch", lambda step, values, *_: launched.append((step, executor.num_blocks(step, values)))
    )
    trial, point = family.trials(64)[0], Point(1, 2, 2, 300, 300, 64, 64, family.dtype, is_causal=True)
    inputs = point.make("cpu", 0)
    assert trial.provider().build(point, inputs).call(inputs.q, inputs.k, inputs.v).shape == inputs.q.shape
    assert launched == [(trial.step(True, HOPPER), num_blocks)]  # of a persistent grid, one for each multiprocessor


def test_a_tile_that_does_not_compile_is_left_to_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fail(unit: str, entry: str, arch: str) -> None:
        asked.append(entry)
        raise CompileError("no such tile")

    monkeypatch.setattr(executor, "function", fail)
    study.compile_all([replace(SM90, rows=SM90.rows[:2])], HOPPER)
    assert len(asked) == 4


def test_names_are_found_again_by_the_process_under_the_profiler() -> None:
    names = [provider.name for provider in study.profiled_providers()]
    assert len(set(names)) == len(names) == len(SIMT.rows) + len(SM90.rows)


# A run, with a CPU in place of the GPU

COUNTED = Counters(
    achieved_occupancy=0.123, fma_percent=67.0, shared_percent=50.0, top_stall="math_pipe_throttle", dram_bytes=1.0
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two tiles of d = 64 and one that does not fit, on small problems; the profiler answers what the test says."""
    rows = tuple(trial.row for trial in SIMT.trials(64) if trial.name in ("64 x 64, 4 warps", "128 x 64, 4 warps"))
    too_large = families.find("fwd_simt").row(Tile("fwd_simt", ("float32",), 64, 64, 256, 256, 256), "float32")
    family = replace(SIMT, peer="sdpa-math", rows=(*rows, too_large))
    shape = (1, 2, 2, 32, 32, 64, 64)
    monkeypatch.setattr(
        Study, "plan", lambda self, d: Plan("tiles", "tiles_fp32", (Point(*shape), Point(*shape, is_causal=True)))
    )

    def attend(trial: Trial, point: Point) -> Attend:
        if trial.why_not(HOPPER):
            raise Unsupported("tile: too large")
        return Attend(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=point.is_causal))

    def fake(trial: Trial) -> Provider:
        return Provider(trial.provider_name, False, lambda point, inputs: attend(trial, point))

    def use(trial: Trial, is_causal: bool, arch: object) -> TileUse:
        step = trial.step(is_causal, HOPPER)
        resources = cache.compile_cached(step.unit, HOPPER.name, [step.entry]).resources(step.entry)
        return TileUse(step, resources, HOPPER, blocks=2)

    monkeypatch.setattr(Trial, "provider", fake)
    monkeypatch.setattr(Trial, "facts", use)
    monkeypatch.setattr(command, "gpu_settings", lambda *_: SETTINGS)

    def start(counted: Counters | Exception = COUNTED, as_json: bool = False):
        def profile(calls, source):
            assert source == "flashtile.lab.tiles.study"
            if isinstance(counted, Exception):
                raise counted
            return [counted for _ in calls]

        monkeypatch.setattr(counters, "profile", profile)
        text = io.StringIO()
        status = command.Run([family], HOPPER, tmp_path, ENV, Console(file=text, width=240), as_json).start()
        return status, text.getvalue(), read(tmp_path / "tiles_fp32.csv", TileRow)

    return start


def test_a_whole_run(run, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    status, text, rows = run(as_json=True)
    assert status == 0, text
    assert json.loads(capsys.readouterr().out)[0]["achieved_occupancy"] == 0.123
    assert [(row.tile, row.is_causal, row.status) for row in rows] == [
        (tile, is_causal, status)
        for is_causal in (False, True)
        for tile, status in (("64 x 64, 4 warps", "ok"), ("128 x 64, 4 warps", "ok"), ("256 x 256, 8 warps", "refused"))
    ]
    chosen = rows[1]
    assert chosen.is_chosen
    assert not rows[0].is_chosen
    assert (chosen.registers or 0) > 0
    assert chosen.spill_bytes == 0
    assert (chosen.blocks, chosen.occupancy, chosen.computed_occupancy, chosen.achieved_occupancy) == (
        2,
        0.125,
        0.125,
        0.123,
    )
    assert rows[4].no_counters == "counted in the full call"
    assert (chosen.tflops or 0.0) > 0
    assert chosen.peer_tflops
    assert rows[2].registers is None
    assert "refused: d=64 256 x 256, 8 warps: tile: too large" in text
    assert {path.name for path in tmp_path.iterdir()} == {"tiles_fp32.csv", "tiles_fp32.png"}
    assert plots.is_current(tmp_path / "tiles_fp32.png")
    shown = tables.study_table(rows)
    assert shown.lines[-1][0] == "d=64 sdpa-math"
    (line,) = (line for line in shown.lines if line[0] == "d=64 128 x 64, 4 warps")
    assert line[4:11] == ("2", "12.5 %", "12.5 %", "12.3 %", "67", "50", "math pipe throttle")
    assert line[11].endswith(" *")
    assert "no counters" not in shown.title


def test_without_a_profiler_the_table_says_so(run) -> None:
    status, text, rows = run(counted=Unsupported("Nsight Compute: got no ncu on PATH"))
    assert status == 0
    assert rows[0].achieved_occupancy is None
    assert rows[0].no_counters == "Nsight Compute: got no ncu on PATH"
    assert "no counters: Nsight Compute: got no ncu on PATH" in text
    assert "not counted" in text


def test_without_matplotlib_the_csv_is_written(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    status, text, _ = run()
    assert status == 0
    assert "pip install 'flashtile[bench]'" in text
    assert [path.name for path in tmp_path.iterdir()] == ["tiles_fp32.csv"]


def test_a_wrong_tile_fails_the_run(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, is_causal: q)
    status, text, rows = run()
    assert status == 1
    assert {row.status for row in rows} == {"inaccurate", "refused"}
    assert "plots: no tile was measured" in text


def test_nothing_to_draw(run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"file: got none\.csv"):
        figures.draw(tmp_path / "none.csv")
    assert tables.study_table([]).lines == ()


# As it is typed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--tiles: got no GPU here; accepted: a GPU that torch sees"),
        (("--dtype", "fp16"), "--dtype: got 'fp16'; accepted: fp32, bf16 with --tiles"),
        (("--head-dim", "128"), "--tiles: got options of a sweep beside it; accepted: --dtype, --out and --json"),
        (("--overhead",), "--tiles: got options of a sweep beside it"),
    ],
    ids=("gpu", "dtype", "sweep", "overhead"),
)
def test_refusals(arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "--tiles", *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
