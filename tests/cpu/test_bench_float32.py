"""The float32 grid: its calls, the provider of "high" precision, relative errors and the table."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from bench_fakes import ENV, SETTINGS, provider, right, rows
from torch import Tensor
from typer.testing import CliRunner

from flashtile.cli.main import app
from flashtile.errors import Unsupported
from flashtile.lab.bench import plots, tables
from flashtile.lab.bench.options import TINY_ROW
from flashtile.lab.bench.points import Plan, Point, float32_grid
from flashtile.lab.bench.providers import AUTOMATIC, HIGH, Attend, by_name, choose
from flashtile.lab.bench.rows import Row, Writer, read
from flashtile.lab.bench.sweep import Sweep

SMALL = Point(2, 4, 4, 40, 40, 16, 16)


def test_the_grid_has_every_call_in_both_passes() -> None:
    plan = float32_grid()
    assert (plan.sweep, plan.stem) == ("float32", "sdpa_float32")
    forward, backward = plan.points[: len(plan.points) // 2], plan.points[len(plan.points) // 2 :]
    assert [dataclasses.replace(point, direction="bwd") for point in forward] == list(backward)
    assert {(point.batch, point.heads, point.seqlen_k, point.dtype) for point in plan.points} == {(4, 16, 4096, "fp32")}
    plain = [(point.head_dim, point.is_causal) for point in forward if not point.option]
    assert plain == [(dim, causal) for dim in (64, 128, 256) for causal in (False, True)]
    assert {point.option for point in forward} == {"", TINY_ROW, "bool mask (B,1,S,S)", "bias (1,H,S,S)"}
    assert float32_grid(only="bwd").stem == "sdpa_float32_bwd"
    assert float32_grid(is_small=True).points[0].seqlen_k == 512


def test_one_row_of_v_is_out_of_the_range_of_float16() -> None:
    v = dataclasses.replace(SMALL, option=TINY_ROW).make("cpu", 0).v
    assert 0 < v[:, :, 0].abs().max() < 2.0**-36
    assert v[:, :, 1:].abs().max() > 1


def test_high_precision_is_set_while_its_calls_run_and_no_longer() -> None:
    words = list[str]()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        words.append(torch.get_float32_matmul_precision())
        return right(q, k, v)

    inputs = SMALL.make("cpu", 0)
    attend = HIGH.build(SMALL, inputs)
    with attend.context():
        call(inputs.q, inputs.k, inputs.v)
    call(inputs.q, inputs.k, inputs.v)
    assert words == ["high", "highest"]
    with pytest.raises(Unsupported, match="set_float32_matmul_precision"):
        HIGH.build(dataclasses.replace(SMALL, dtype="bf16"), inputs)
    assert choose("flashtile-high,flashtile", is_grid=True) == [AUTOMATIC, HIGH]
    assert HIGH not in choose(None, is_grid=True)
    assert by_name("flashtile-high") is HIGH


@pytest.mark.parametrize(("error", "status"), [(1e-4, "ok"), (2e-3, "inaccurate")])
def test_a_bound_on_the_relative_error_takes_the_place_of_the_rule(error: float, status: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return right(q, k, v) * (1 + error)

    loose = dataclasses.replace(provider("loose"), build=lambda point, inputs: Attend(call), max_relative_error=1e-3)
    strict = dataclasses.replace(loose, name="strict", max_relative_error=None)
    first, second = rows([loose, strict], 64)
    assert (first.status, second.status) == (status, "inaccurate")
    assert first.relative_error == pytest.approx(error, rel=0.01)


def test_relative_errors_are_kept_in_the_csv(tmp_path: Path) -> None:
    (row,) = rows([provider("sdpa")], 32)
    assert row.relative_error is not None
    assert 0 < row.relative_error < 1e-6
    with Writer(tmp_path / "x.csv", Row) as writer:
        writer.add([row])
    assert read(tmp_path / "x.csv", Row)[0].relative_error == pytest.approx(row.relative_error, rel=1e-5)
    # A file of before there was the column
    header, line = (text.split(",") for text in (tmp_path / "x.csv").read_text().splitlines())
    index = header.index("relative_error")
    older = "\n".join(",".join(cells[:index] + cells[index + 1 :]) for cells in (header, line))
    (tmp_path / "x.csv").write_text(older + "\n")
    assert read(tmp_path / "x.csv", Row)[0].relative_error is None


def test_the_table_compares_speeds_and_errors() -> None:
    plan = Plan("float32", "x", (SMALL, dataclasses.replace(SMALL, option=TINY_ROW, direction="bwd")))
    sweep = Sweep(plan, choose("flashtile,flashtile-high,sdpa-math", is_grid=True), SETTINGS, ENV)
    found = [
        dataclasses.replace(row, median_ms={"flashtile": 2.0, "flashtile-high": 1.0}.get(row.provider, 6.0))
        for some in sweep.rows()
        for row in some
    ]
    table = tables.of(found, "float32")
    assert table.header[1:5] == ("ms", "TFLOP/s", "over sdpa-math", '"high" over it')
    assert [line[0] for line in table.lines] == ["fwd d=16 full", f"bwd d=16 {TINY_ROW}"]
    assert [line[3:5] for line in table.lines] == [("3.00", "2.00")] * 2
    assert all(0 < float(cell) < 1e-6 for line in table.lines for cell in line[5:])
    assert plots.draw(Path("x.csv"), found) == []


def test_the_grid_has_a_dtype_of_its_own() -> None:
    result = CliRunner().invoke(app, ["bench", "--grid", "float32", "--dtype", "bf16", "--device", "cpu"])
    assert result.exit_code == 2
    assert "--dtype" in result.output
