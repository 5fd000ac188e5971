"""The figures of results/: what a reader must be able to see in them."""

from __future__ import annotations

import io
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colors
from matplotlib.text import Text

from flashtile.cli import distributed
from flashtile.lab.bench import plots, ratio_colours
from flashtile.lab.bench.rows import Row, read
from flashtile.lab.ladder import figures as ladder_figures
from flashtile.lab.profile import ncu
from flashtile.lab.tiles import figures as tile_figures

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "nvidia-h200"


@pytest.fixture
def drawn(monkeypatch):
    """The figures that a function draws, by their names. Nothing is written."""
    found = {}

    def save(figure, csv_path, name):
        figure.savefig(io.BytesIO())  # settles the layout
        found[name] = figure
        return csv_path

    monkeypatch.setattr(plots, "save", save)
    return found


@pytest.mark.parametrize("stem", ["paper_bf16_fwd", "decode_bf16_graph"])
def test_ratios_have_the_colours_of_the_report(drawn, stem):
    path = RESULTS / f"sdpa_{stem}.csv"
    plots.draw(path, read(path, Row))
    axes = drawn[f"{stem}_ratios.png"].axes[0]
    (image,) = axes.images
    figure = drawn[f"{stem}_ratios.png"]
    assert figure._suptitle.get_window_extent().x1 < figure.bbox.x1
    assert all(len(text.get_text().partition(".")[2]) == 2 for text in axes.texts)  # 2.00, not 2
    inks = set()
    for text in axes.texts:
        ratio = float(text.get_text())
        wanted = ratio_colours.colour(ratio_colours.share(ratio))
        assert image.to_rgba(np.log2(ratio))[:3] == pytest.approx(wanted, abs=0.01)
        inks.add(text.get_color())
    assert "#000000" in inks <= {"#000000", "#ffffff"}
    red, _, blue = ratio_colours.colour(ratio_colours.share(1.5))
    assert red > blue
    red, _, blue = ratio_colours.colour(ratio_colours.share(0.7))
    assert red < blue


def test_the_name_of_a_figure_says_that_it_holds_peers_alone(drawn):
    path = RESULTS / "sdpa_paper_bf16.csv"
    plots.draw(path, read(path, Row))
    assert set(drawn) == {f"paper_bf16_peers_{what}.png" for what in ("d64", "d128", "d256", "ratios")}


def test_lines_at_the_same_place_are_dashed(drawn):
    path = RESULTS / "sdpa_Lsweep_B1_H1_d64_fp32_full.csv"
    plots.draw(path, read(path, Row))
    axes = drawn["memory_vs_L_full.png"].axes[0]
    ends = {text.get_text(): text.xy for text in axes.texts if hasattr(text, "xy")}
    lowest = [line for line in axes.lines if line.get_ydata()[-1] == pytest.approx(ends["flashtile"][1], rel=0.02)]
    assert len(lowest) == 3  # with sdpa and sdpa-efficient
    assert len({line.get_color() for line in axes.lines}) == len(axes.lines)
    ours, *others = sorted(lowest, key=lambda line: line.get_zorder())
    assert ours.get_linestyle() == "-"
    assert {line.get_linestyle() for line in others} == {"--"}
    assert all(line.get_linewidth() < ours.get_linewidth() for line in others)
    dashes = {line._unscaled_dash_pattern[0] for line in others}  # where the first dash begins
    assert len(dashes) == 2
    times = sorted(drawn["latency_vs_L_full.png"].axes[0].lines, key=lambda line: line.get_zorder())
    assert times[-1].get_linestyle() == "--"  # sdpa is sdpa-efficient


def test_calls_in_pages_are_marks_on_the_bar_of_their_call(drawn):
    path = RESULTS / "sdpa_decode_bf16_graph.csv"
    rows = [row for row in read(path, Row) if row.is_ok and row.option]
    plots.draw(path, rows)
    (figure,) = drawn.values()
    assert figure.get_size_inches()[1] * 130 < 1300
    calls = [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    assert len(calls) == len({plots._call(row) for row in rows})
    assert not any("page" in call for call in calls)
    marks = [line for axes in figure.axes for line in axes.lines if line.get_marker() in plots._PAGE_MARKERS.values()]
    paged = {row.gb_per_s if not row.option.startswith("chunk") else row.tflops for row in rows if "page" in row.option}
    assert {float(line.get_xdata()[0]) for line in marks} == {float(value) for value in paged}
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"pages of 1", "pages of 16", "pages of 64", "pages of 256", "flashtile"} < set(words)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_labels_of_rungs_are_below_the_roof_and_apart(drawn, dtype):
    ladder_figures.draw(RESULTS / f"ladder_kernels_{dtype}.csv")
    figure = drawn[f"ladder_roofline_{dtype}.png"]
    for axes in figure.axes:
        roof = axes.transData.transform((1, max(axes.lines[0].get_ydata())))[1]
        boxes = [Text.get_window_extent(text) for text in axes.texts if text.get_text()[:2].isdigit()]
        boxes.sort(key=lambda box: box.y0)
        assert len(boxes) > 5
        assert boxes[-1].y1 < roof
        for low, high in itertools.pairwise(boxes):
            assert low.y0 + 0.75 * low.height < high.y0  # a box has room below its letters


def test_what_warps_wait_for_is_said_in_words(drawn):
    assert set(ncu.STALL_WORDS) == set(ncu.STALLS)
    ladder_figures.draw(RESULTS / "ladder_kernels_fp32.csv")
    label = drawn["ladder_00_naive.png"].axes[0].get_xlabel()
    assert label == "Percent. Warps wait most for data from global memory (long scoreboard)"
    assert ncu.stall_words("some_new_reason") == "some new reason"


def test_a_log_axis_has_points_and_no_bars(drawn):
    ladder_figures.draw(RESULTS / "ladder_fp32.csv")
    for axes in drawn["ladder_fp32_times.png"].axes:
        assert axes.get_xscale() == "log"
        assert not axes.patches
        assert len(axes.lines) == len(axes.texts) > 8


def test_the_title_of_tiles_names_the_kernel_that_takes_them(drawn):
    tile_figures.draw(RESULTS / "tiles_fp32.csv")
    assert drawn["tiles_fp32.png"].get_suptitle().endswith("in orange what fwd_simt takes")


def test_figures_of_ranks_name_the_gpu(drawn, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import trace_ranks

    distributed.redraw(RESULTS / "distributed_simulation.csv")
    figure = drawn["distributed_simulation.png"]
    assert "NVIDIA H200" in figure.get_suptitle()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ring", "ulysses"]
    assert "1,024 x\n16,384" in [label.get_text() for label in figure.axes[-1].get_xticklabels()]
    for backend in ("gloo", "nccl"):
        path = RESULTS / f"distributed_trace_{backend}.json"
        trace_ranks.draw(path)
        (axes,) = drawn[path.with_suffix(".png").name].axes
        words = " ".join(text.get_text() for text in axes.texts)
        env = json.loads(path.read_text())["environment"]
        assert all(part in words for part in (env["device"], env["torch"], env["commit"], "16384 rows", "H=64/2"))
        used = {colors.to_hex(face) for bars in axes.collections for face in bars.get_facecolor()}
        assert used <= {colour.lower() for colour in trace_ranks.COLOURS.values()}
    del sys.modules["trace_ranks"]


def test_under_counts_lines_that_a_line_would_hide():
    line = {512: 1.0, 1024: 2.0}
    assert plots.num_under([{512: 1.0, 1024: 2.01, 2048: 3.0}, {512: 1.0, 1024: 3.0}, {1024: 2.0}], line) == 1
