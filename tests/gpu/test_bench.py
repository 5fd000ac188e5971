"""`flashtile bench` on a GPU: both protocols with the sensors, random calls, regrets."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashtile.cli.main import app
from flashtile.lab.bench.regret import RegretRow
from flashtile.lab.bench.rows import Row, read
from flashtile.lab.bench.wild import WildRow


def bench(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("graph", [[], ["--graph"]], ids=["events", "graph"])
def test_both_protocols_with_the_sensors(graph: list[str], tmp_path: Path):
    small = ("--seqlens", "512,1024", "--dtype", "bf16", "--heads", "16", "--backends", "cuda,sdpa-flash")
    said = bench(*small, *graph, "--protocol", "both", "--out", tmp_path)
    (path,) = tmp_path.glob("*.csv")
    rows = read(path, Row)
    assert [row.status for row in rows] == ["ok"] * 4
    for row in rows:
        assert row.protocol == "sustained"
        assert min(row.alone_ms, row.short_ms, row.sustained_ms) > 0
    if importlib.util.find_spec("pynvml") is None:
        assert "pip install nvidia-ml-py" in said
    else:
        assert all(row.sustained_power_w > 10 and row.sustained_clock_mhz > 100 for row in rows)


@pytest.mark.long(120)
def test_random_calls(tmp_path: Path):
    bench("--grid", "wild", "--seed", "1", "--points", "8", "--out", tmp_path)
    rows = read(tmp_path / "wild_seed1.csv", WildRow)
    ours = [row for row in rows if row.provider == "flashtile"]
    assert {row.status for row in ours} == {"ok"}, [row.reason for row in ours]
    assert {row.mode for row in ours} == {"kernel", "eager"}
    assert {row.call for row in ours} == set(range(8))


@pytest.mark.long(120)
def test_regrets(tmp_path: Path):
    bench("--regret", "4", "--seed", "1", "--out", tmp_path)
    rows = read(tmp_path / "regret_seed1.csv", RegretRow)
    assert {row.status for row in rows} == {"ok"}, [row.reason for row in rows]
    assert all(row.regret >= 1.0 and row.chosen != "cuda" for row in rows)
