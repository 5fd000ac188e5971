"""The row schema, its CSV, the counting conventions and the ratios."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from bench_fakes import ENV, provider, rows

from flashtile.lab.bench import compare, plots, tables
from flashtile.lab.bench.points import Point, decode_grid, dtype_key, paper_grid
from flashtile.lab.bench.rows import OverheadRow, Row, Writer, as_dict, columns, read


@pytest.fixture(scope="module")
def measured() -> list[Row]:
    def refusing(q, k, v):
        raise NotImplementedError('a "quoted", reason\nover two lines')

    return rows([provider("ours", is_baseline=False), provider("peer"), provider("absent", refusing)], 32, 48)


def with_times(measured: list[Row], times: dict[tuple[str, int], float]) -> list[Row]:
    return [
        dataclasses.replace(row, median_ms=times.get((row.provider, row.seqlen_k), row.median_ms)) for row in measured
    ]


def test_columns_are_the_fields_in_order_with_the_environment_last():
    assert columns(Row)[:3] == ["sweep", "provider", "is_baseline"]
    assert columns(Row)[-12:] == [field.name for field in dataclasses.fields(ENV)]
    assert set(columns(Row)) >= {
        "device",
        "driver",
        "torch",
        "cuda",
        "cudnn",
        "triton",
        "flashtile",
        "commit",
        "is_dirty",
        "date",
        "command",
    }


def test_csv_gives_the_rows_back(measured: list[Row], tmp_path: Path):
    path = tmp_path / "rows.csv"
    with Writer(path, Row) as writer:
        writer.add(measured)
    back = read(path, Row)
    assert len(back) == len(measured) == 6
    for row, again in zip(measured, back, strict=True):
        for name, value in as_dict(row).items():
            found = as_dict(again)[name]
            if isinstance(value, float):
                assert math.isclose(found, value, rel_tol=1e-5)
            elif isinstance(value, str):
                assert found == " ".join(value.split())
            else:
                assert found == value
                assert type(found) is type(value)


def test_rows_are_on_disk_before_the_file_is_closed(measured: list[Row], tmp_path: Path):
    writer = Writer(tmp_path / "rows.csv", Row)
    writer.add(measured[:2])
    assert len(read(tmp_path / "rows_unfinished.csv", Row)) == 2
    assert not (tmp_path / "rows.csv").exists()


def test_a_file_of_rows_is_replaced_when_the_next_is_complete(measured: list[Row], tmp_path: Path):
    path = tmp_path / "rows.csv"
    with Writer(path, Row) as writer:
        writer.add(measured)

    def crash(count: int) -> None:
        with Writer(path, Row) as writer:
            writer.add(measured[:count])
            raise RuntimeError

    for count in (0, 1, 2):
        with pytest.raises(RuntimeError):
            crash(count)
    assert len(read(path, Row)) == len(measured)
    assert len(read(tmp_path / "rows_unfinished.csv", Row)) == 1
    assert len(read(tmp_path / "rows_unfinished2.csv", Row)) == 2
    with Writer(path, Row) as writer:
        writer.add(measured[:3])
    assert len(read(path, Row)) == 3
    assert len(list(tmp_path.iterdir())) == 3


def test_another_schema_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "other.csv"
    with Writer(path, OverheadRow):
        pass
    with pytest.raises(ValueError, match=r"file: got other\.csv with other columns; accepted: the columns of Row"):
        read(path, Row)
    with pytest.raises(ValueError, match=r"absent\.csv"):
        read(tmp_path / "absent.csv", Row)


def test_a_line_that_was_cut_off_is_named(measured: list[Row], tmp_path: Path):
    path = tmp_path / "rows.csv"
    with Writer(path, Row) as writer:
        writer.add(measured)
    path.write_text(path.read_text()[:-200])
    with pytest.raises(ValueError, match=r"file: got rows\.csv with a broken line 7; accepted: rows of Row"):
        read(path, Row)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"file: got rows\.csv \(not UTF-8\)"):
        read(path, Row)


def test_flops_and_bytes_follow_the_convention():
    point = Point(batch=2, heads=4, heads_kv=2, seqlen_q=8, seqlen_k=16, head_dim=32, head_dim_v=64, dtype="bf16")
    forward = 2 * 2 * 4 * 8 * 16 * (32 + 64)
    assert point.flops() == forward
    square = dataclasses.replace(point, seqlen_k=8, is_causal=True, direction="bwd")
    assert square.flops() == forward / 2 / 2 * 2.5
    assert dataclasses.replace(point, direction="fwd+bwd").flops() == forward * 3.5
    assert point.sizes() == (2 * 4 * 8 * 32 * 2, 2 * 2 * 16 * 32 * 2, 2 * 2 * 16 * 64 * 2, 2 * 4 * 8 * 64 * 2)
    assert point.least_bytes() == sum(point.sizes())


def test_grids_hold_what_they_promise():
    paper = paper_grid("bf16").points
    assert len(paper) == len(set(paper)) == 72
    forward = paper_grid("fp16", only="fwd")
    assert forward.stem == "sdpa_paper_fp16_fwd"
    assert [point.direction for point in forward.points] == 36 * ["fwd"]
    assert all(point.batch * point.seqlen_k == 16384 and point.heads * point.head_dim == 2048 for point in paper)
    decode = decode_grid("bf16").points
    assert len(decode) == len(set(decode))
    assert {(point.heads, point.heads_kv, point.head_dim) for point in decode} == {(32, 8, 128), (32, 32, 128)}
    assert {point.seqlen_q for point in decode if not point.option} == {1}
    served = [point for point in decode if point.option]
    assert {point.extra.page_size for point in served} == {None, 1, 16, 64, 256}
    assert {point.seqlen_q for point in served} == {1, 2, 4, 8, 512, 2048}
    assert all(point.extra.is_packed == (point.seqlen_q >= 512) for point in served)
    assert all(point.is_causal == (point.seqlen_q > 1) for point in served)
    assert {dataclasses.replace(point, option=point.option.partition(", page")[0]) for point in served} <= set(served)


def test_work_of_calls_over_a_cache():
    mixed = Point(batch=4, heads=2, heads_kv=1, seqlen_q=1, seqlen_k=4096, head_dim=64, head_dim_v=64, option="mixed")
    keys = 4096 + 3 * 512
    assert mixed.num_keys() == keys
    assert mixed.flops() == 4 * 2 * keys * 64
    assert mixed.least_bytes() == 4 * (2 * keys * 64 + 2 * 4 * 2 * 64)
    # Query i of a chunk sees all keys but the last ones
    chunk = Point(seqlen_q=4, seqlen_k=10, head_dim=8, head_dim_v=8, is_causal=True, option="chunk")
    assert chunk.flops() == 2 * (4 * 10 - 4 * 4 / 2) * 16
    assert Point(seqlen_q=8, seqlen_k=8, is_causal=True).flops() * 2 == Point(seqlen_q=8, seqlen_k=8).flops()


def test_dtype_names():
    assert dtype_key("bfloat16") == dtype_key("bf16") == "bf16"
    with pytest.raises(ValueError, match="--dtype: got 'int8'"):
        dtype_key("int8")


def test_ratios_are_peer_time_over_ours(measured: list[Row]):
    timed = with_times(measured, {("ours", 32): 1.0, ("ours", 48): 2.0, ("peer", 32): 2.0, ("peer", 48): 16.0})
    (ratio,) = compare.ratios(timed)
    assert (ratio.provider, ratio.peer, ratio.direction, ratio.num_points) == ("ours", "peer", "fwd", 2)
    assert (ratio.lowest, ratio.highest) == (2.0, 8.0)
    assert math.isclose(ratio.geometric_mean, 4.0)


def test_an_inaccurate_row_enters_no_ratio(measured: list[Row]):
    timed = with_times(measured, {("ours", 32): 1.0, ("ours", 48): 2.0, ("peer", 32): 2.0, ("peer", 48): 16.0})
    timed = [
        dataclasses.replace(row, status="inaccurate") if (row.provider, row.seqlen_k) == ("ours", 48) else row
        for row in timed
    ]
    (ratio,) = compare.ratios(timed)
    assert (ratio.num_points, ratio.highest) == (1, 2.0)
    assert "inaccurate" in tables.of(timed, "latency").markdown()
    assert {(one.provider, one.seqlen_k) for one in compare.changes(measured, timed)} == {
        ("ours", 32),
        ("peer", 32),
        ("peer", 48),
    }


def test_two_runs_are_compared_point_by_point(measured: list[Row], tmp_path: Path):
    before = with_times(measured, {("ours", 32): 4.0, ("ours", 48): 9.0, ("peer", 32): 1.0, ("peer", 48): 1.0})
    after = with_times(measured, {("ours", 32): 1.0, ("ours", 48): 1.0, ("peer", 32): 2.0, ("peer", 48): 1.0})
    found = compare.changes(before, after)
    assert {(one.provider, one.seqlen_k): one.speedup for one in found} == {
        ("ours", 32): 4.0, ("ours", 48): 9.0, ("peer", 32): 0.5, ("peer", 48): 1.0,
    }  # fmt: skip
    means = {name: (count, mean, low) for name, count, mean, low in compare.means(found)}
    assert means["ours"][0] == 2
    assert math.isclose(means["ours"][1], 6.0)
    assert means["peer"][2] == 0.5
    compare.write(tmp_path / "c.csv", found)
    assert len((tmp_path / "c.csv").read_text().splitlines()) == 5


def test_tables_name_what_was_not_measured(measured: list[Row]):
    (line,) = tables.refusals(measured).lines
    assert line[:3] == ("absent", "refused", "S=32 and 1 more")
    assert "quoted" in line[3]
    latency = tables.of(measured, "latency")
    assert latency.header == ("", "ours", "peer")
    assert [cells[0] for cells in latency.lines] == ["S=32", "S=48"]
    with pytest.raises(ValueError, match="table: got 'colour'"):
        tables.of(measured, "colour")


def renamed(measured: list[Row], names: dict[str, str]) -> list[Row]:
    return [dataclasses.replace(row, provider=names.get(row.provider, row.provider)) for row in measured]


@pytest.mark.parametrize(
    ("names", "printed"),
    [
        (["cuda", "sdpa"], ["flashtile", "sdpa"]),
        (["sdpa", "cpu", "cpu"], ["sdpa", "flashtile"]),
        (["cuda", "triton", "flex"], ["flashtile (cuda)", "flashtile (triton)", "flex"]),
        (["triton", "flex"], ["flashtile (triton)", "flex"]),
        (["00_naive", "cuda"], ["00_naive", "flashtile"]),
        ([], []),
    ],
)
def test_our_default_is_called_flashtile_where_it_is_alone(names: list[str], printed: list[str]):
    assert list(tables.labels(names).values()) == printed


def test_tables_print_labels_and_refusals_print_the_names_of_the_option(measured: list[Row]):
    default = renamed(measured, {"ours": "cuda", "absent": "triton"})
    assert tables.of(default, "latency").header == ("", "flashtile", "peer")
    assert tables.of(default, "ratios").lines[0][0] == "flashtile over peer"
    assert tables.refusals(default).lines[0][0] == "triton"
    several = [*default, *renamed([row for row in measured if row.provider == "ours"], {"ours": "tiled"})]
    assert tables.of(several, "latency").header == ("", "flashtile (cuda)", "peer", "flashtile (tiled)")
    (change, _) = tables.change_tables(compare.changes(default, default))
    assert {line[0] for line in change.lines} == {"flashtile", "peer"}


def test_throughput_is_linear_from_0_with_our_label(
    measured: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    figures = {}

    def keep(figure, csv_path: Path, name: str) -> Path:
        figures[name.partition("_")[0]] = figure.axes[0]
        return csv_path.with_name(name)

    monkeypatch.setattr(plots, "save", keep)
    plots.draw(tmp_path / "sdpa_Lsweep_B1_H1_d16_fp32.csv", renamed(measured, {"ours": "cuda"}))
    assert set(figures) == {"latency", "memory", "throughput"}
    assert figures["throughput"].get_yscale() == "linear"
    assert figures["throughput"].get_ylim()[0] == 0
    assert figures["latency"].get_yscale() == "log"
    for axes in figures.values():
        assert {text.get_text() for text in axes.texts} >= {"flashtile", "peer"}


def test_labels_of_lines_stay_above_the_floor():
    assert plots.spread([0.0, 0.0, 0.01, 0.5], 0.1, 0.0) == pytest.approx([0.0, 0.1, 0.2, 0.5])
    assert plots.spread([0.0, 0.0], 0.1) == pytest.approx([-0.05, 0.05])
