"""Calls of serving in `bench --grid decode`: small ones give what the dense call gives; their table and figure."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
import torch
from bench_fakes import ENV, SETTINGS
from rich.console import Console
from torch import Tensor

from flashtile.lab.bench import plots, providers, serving, tables
from flashtile.lab.bench.command import run_sweep
from flashtile.lab.bench.options import OPTIONS
from flashtile.lab.bench.points import Plan, Point
from flashtile.lab.bench.rows import Row, read
from flashtile.lab.bench.sweep import Sweep

SMALL = Point(batch=3, heads=4, heads_kv=2, seqlen_q=1, seqlen_k=1040, head_dim=16, head_dim_v=16)
NAMES = [name for name, option in OPTIONS.items() if option.entry == "serving"]


def small(name: str) -> Point:
    queries = {"decode": 1, "mixed": 1, "speculative": 3, "chunk": 20}[name.partition(",")[0]]
    return dataclasses.replace(SMALL, seqlen_q=queries, is_causal=queries > 1, option=name)


def plainly(point: Point, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sequence by sequence in float64."""
    outs = []
    for b, length in enumerate(serving.lengths(point)):
        keys, values = (tensor[b, :, :length].double().repeat_interleave(2, 0) for tensor in (k, v))
        scores = q[b].double() @ keys.transpose(-1, -2) / 4
        places = torch.arange(point.seqlen_q)[:, None] + length - point.seqlen_q
        if point.is_causal:
            scores = scores.masked_fill(torch.arange(length) > places, -torch.inf)
        outs.append(scores.softmax(-1) @ values)
    return torch.stack(outs)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_over_a_cache_is_that_over_plain_rows(name: str) -> None:
    point = small(name)
    inputs = point.make("cpu", 3)
    attend = providers.by_name("cpu").build(point, inputs)
    assert attend.arrange is not None
    assert "instructions" in attend.detail
    arranged = attend.arrange(inputs.leaves("bhsd", False))
    page = point.extra.page_size
    if page is not None:
        assert arranged.k.shape[1:] == (page, 2, 16)
        assert arranged.k.shape[0] == sum(-(-length // page) for length in serving.lengths(point))
    out = attend.call(arranged.q, arranged.k, arranged.v)
    torch.testing.assert_close(out.double(), plainly(point, inputs.q, inputs.k, inputs.v), atol=1e-5, rtol=1e-5)


def test_pages_are_in_random_order() -> None:
    layout = serving.Layout(small("mixed, page 16"), torch.device("cpu"))
    assert layout.table is not None
    assert layout.table[0].tolist() != sorted(layout.table[0].tolist())
    held = layout.table[layout.table >= 0]
    assert sorted(held.tolist()) == list(range(len(held)))
    assert (layout.table[1:, 32:] == -1).all()  # 512 keys in 32 pages


def test_torch_without_pages_and_lengths() -> None:
    for name in NAMES:
        point = small(name)
        if name in ("decode", "speculative"):
            inputs = point.make("cpu", 3)
            attend = providers.by_name("sdpa").build(point, inputs)
            out = attend.call(inputs.q, inputs.k, inputs.v)
            expected = plainly(point, inputs.q, inputs.k, inputs.v)
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
        else:
            with pytest.raises(NotImplementedError, match="neither pages nor lengths"):
                providers.by_name("sdpa").build(point, point.make("cpu", 3))


def test_table_and_figure(tmp_path: Path) -> None:
    names = ("decode", "decode, page 16", "speculative", "chunk", "chunk, page 16")
    points = (dataclasses.replace(SMALL, seqlen_k=64), *map(small, names))
    settings = dataclasses.replace(SETTINGS, copy_gb_per_s=20.0)
    compared = providers.choose("flashtile,sdpa,torch-varlen", True)
    sweep = Sweep(Plan("decode", "sdpa_decode_fp32", points), compared, settings, ENV)
    run_sweep(sweep, tmp_path, Console(file=io.StringIO()))
    rows = read(tmp_path / "sdpa_decode_fp32.csv", Row)
    assert {row.status for row in rows if not row.is_baseline} == {"ok"}
    assert {row.copy_gb_per_s for row in rows if row.status == "ok"} == {20.0}
    table = tables.of(rows, "serving")
    assert [line[0] for line in table.lines] == [
        tables.serving_label(row) for row in rows if row.provider == "flashtile"
    ][1:]
    cells = {line[0]: dict(zip(table.header, line, strict=True)) for line in table.lines}
    paged, dense = cells["B3 1 x 1040, decode, page 16"], cells["B3 1 x 1040, decode"]
    assert float(paged["over dense"]) == pytest.approx(float(paged["flashtile"]) / float(dense["flashtile"]), abs=0.02)
    assert dense["over dense"] == ""
    assert dense["best peer / ours"] != "" == paged["best peer / ours"]
    assert 0 < float(dense["of a copy's GB/s"]) < 50
    assert [line[0] for line in tables.of(rows, "latency").lines] == ["S=64"]  # calls over a cache stand apart
    assert plots.is_current(tmp_path / "decode_fp32_serving.png")
