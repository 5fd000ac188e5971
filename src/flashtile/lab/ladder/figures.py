"""The ladder's figures: times, roofline, counters of each rung and its predecessor, bytes by sequence length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashtile.lab.bench import join, plots
from flashtile.lab.bench.rows import Row, read
from flashtile.lab.bench.tables import number
from flashtile.lab.ladder.rows import HbmRow, RungRow
from flashtile.lab.ladder.tables import labels
from flashtile.lab.profile import ncu

OURS, STEP_BEFORE, PEER = "#D55E00", "#9a9a9a", "#0072B2"
_WAVEFRONT_BYTES = 128  # bytes that the shared-memory pipe moves in one cycle


@plots.drawing()
def draw(csv_path: Path) -> list[Path]:
    """Draws every figure of one of the ladder's CSVs into its folder."""
    if csv_path.stem.startswith("ladder_hbm"):
        return [_bytes_figure(csv_path, read(csv_path, HbmRow))]
    if csv_path.stem.startswith("ladder_kernels"):
        kernels = read(csv_path, RungRow)
        figures = [_roofline(csv_path, kernels)] if any(kernel.tflops for kernel in kernels) else []
        counted = [kernel for kernel in kernels if kernel.unit_percent is not None and not kernel.is_causal]
        before: RungRow | None = None
        causal = join.unique((kernel for kernel in kernels if kernel.is_causal), lambda kernel: kernel.rung)
        for kernel in counted:
            figures.append(_counter_figure(csv_path, kernel, before, causal.get(kernel.rung)))
            before = kernel
        return figures
    return [_times(csv_path, [row for row in read(csv_path, Row) if row.is_ok and row.batch * row.heads > 1])]


def _times(csv_path: Path, rows: Sequence[Row]) -> Path:
    """Points of the large problem, full and causal, on a log axis: equal speedups are equal distances."""
    masks = sorted({row.is_causal for row in rows})
    names = labels(rows)
    figure = plots.new_figure(5.9 * len(masks) + 1.2, 0.36 * len(names) + 1.5)
    panels = figure.subplots(1, len(masks), squeeze=False, sharey=True)[0]
    for axes, is_causal in zip(panels, masks, strict=True):
        here = join.unique((row for row in rows if row.is_causal == is_causal), lambda row: row.provider)
        for y, name in enumerate(names):
            if name not in here:
                continue
            row = here[name]
            ms = row.median_ms or 0.0
            shape = "s" if row.is_baseline else "D" if name == "cuda" else "o"
            axes.plot(ms, y, shape, color=PEER if row.is_baseline else OURS, markersize=9)
            axes.annotate(f"{number(ms)} ms", (ms, y), (10, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set_xscale("log")
        times = [row.median_ms or 1.0 for row in here.values()]
        axes.set_xlim(min(times) * 0.6, max(times) * 6)
        axes.set_yticks(range(len(names)), names.values())
        axes.set_xlabel("Time per call (ms), logarithmic; to the left is faster")
        axes.set_title("causal" if is_causal else "full", loc="left")
    panels[0].invert_yaxis()
    first = rows[0]
    problem = f"B={first.batch} H={first.heads} S={first.seqlen_q} d={first.head_dim} {first.dtype}"
    plots.add_title(figure, f"The ladder: {problem}; {first.env.device}, torch {first.env.torch}")
    return plots.save(figure, csv_path, f"{csv_path.stem}_times.png")


def _roofline(csv_path: Path, kernels: Sequence[RungRow]) -> Path:
    """Throughput by arithmetic intensity, with measured ceilings. One panel each for device and for shared memory.

    Device memory bytes are counted or, without a profile, the least possible.
    """
    full = [kernel for kernel in kernels if not kernel.is_causal and kernel.tflops] or [
        kernel for kernel in kernels if kernel.tflops
    ]
    first = full[0]
    device = [(kernel.flops / (kernel.dram_bytes or kernel.least_bytes), kernel) for kernel in full]
    shared = [
        (kernel.flops / (_WAVEFRONT_BYTES * kernel.shared_wavefronts), kernel)
        for kernel in full
        if kernel.shared_bytes and kernel.shared_wavefronts
    ]
    panels = [(device, "device memory", first.dram_ceiling_gb_per_s, "as counted" if first.dram_bytes else "at best")]
    if shared:
        panels.append((shared, "shared memory", first.shared_ceiling_gb_per_s, "as counted"))
    lowest = min(_range(points, roof)[0] * roof / 1e3 for points, _, roof, _ in panels)
    lowest = min(lowest, *(kernel.tflops or lowest for kernel in full))
    gap = 0.038 * math.log10(first.ceiling_tflops / lowest)  # a line of text
    figure = plots.new_figure(6.4 * len(panels), 5.0)
    for axes, (points, name, roof, how) in zip(
        figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True
    ):
        _roof_panel(axes, points, name, roof, gap)
        axes.set_xlabel(f"FLOP for each byte of {name}, {how}")
        axes.set_ylabel("TFLOP/s")
    problem = (
        f"B={first.batch} H={first.heads} S={first.seqlen} d={first.head_dim} "
        f"{first.dtype}{', causal' if first.is_causal else ''}"
    )
    plots.add_title(figure, f"Roofline, roofs as measured: {problem}; {first.env.device}", fontsize=11)
    return plots.save(figure, csv_path, f"{csv_path.stem.replace('kernels', 'roofline')}.png")


def _range(points: Sequence[tuple[float, RungRow]], gb_per_s: float) -> tuple[float, float]:
    """Ends of the axis of FLOP per byte."""
    ridge = points[0][1].ceiling_tflops / gb_per_s * 1e3
    return min(ridge, *(x for x, _ in points)) / 8, max(ridge, *(x for x, _ in points)) * 40


def _roof_panel(axes: Any, points: Sequence[tuple[float, RungRow]], name: str, gb_per_s: float, gap: float) -> None:
    import numpy as np

    first = points[0][1]
    top = first.ceiling_tflops
    low, high = _range(points, gb_per_s)
    xs = np.logspace(np.log10(low), np.log10(high), 200)
    axes.plot(xs, np.minimum(xs * gb_per_s / 1e3, top), color="#000000", linewidth=1.5)
    axes.text(high, top * 1.08, f"{first.unit}, {number(top)} TFLOP/s", ha="right", fontsize=9)
    axes.text(low * 1.1, top * 1.08, f"{name}, {number(gb_per_s)} GB/s", fontsize=9)
    ordered = sorted(points, key=lambda one: one[1].tflops or 0.0)
    label_ys = _below_the_roof(
        [float(np.log10(kernel.tflops or 1.0)) for _, kernel in ordered], gap, float(np.log10(top))
    )
    right = max(x for x, _ in points)
    for (x, kernel), label_y in zip(ordered, label_ys, strict=True):
        axes.plot(x, kernel.tflops, "o", color=OURS, markersize=7)
        axes.annotate(
            kernel.rung, xy=(x, kernel.tflops), xytext=(right * 1.8, 10**label_y), fontsize=9, va="center",
            arrowprops={"arrowstyle": "-", "color": STEP_BEFORE, "linewidth": 0.6, "relpos": (0, 0.5)},
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)


def _below_the_roof(wanted: Sequence[float], gap: float, roof: float) -> list[float]:
    """Places of labels, in powers of ten, a gap apart from each other and below the roof."""
    return [-place for place in reversed(plots.spread([-one for one in reversed(wanted)], gap, gap - roof))]


def _counter_figure(csv_path: Path, kernel: RungRow, before: RungRow | None, causal: RungRow | None) -> Path:
    """Counters of a rung as percentages, with the previous rung in grey."""
    values: list[tuple[str, Any]] = [
        (f"{kernel.unit} pipe busy", lambda one: one.unit_percent),
        ("shared memory throughput", lambda one: one.shared_percent or 0.0),
        ("L2 throughput", lambda one: one.l2_percent or 0.0),
        ("occupancy", lambda one: 100 * (one.achieved_occupancy or 0.0)),
        ("waits for global memory", lambda one: 100 * (one.global_stall_share or 0.0)),
        (f"TFLOP/s of {kernel.unit} ceiling", lambda one: 100 * (one.tflops or 0.0) / one.ceiling_tflops),
    ]
    figure = plots.new_figure(7.6, 3.1)
    axes = figure.add_subplot()
    for y, (_, value) in enumerate(values):
        axes.barh(y - 0.19, value(kernel), color=OURS, height=0.36)
        axes.text(value(kernel) + 1, y - 0.19, _digits(value(kernel)), va="center", fontsize=8.5)
        if before is not None:
            axes.barh(y + 0.19, value(before), color=STEP_BEFORE, height=0.36)
            axes.text(value(before) + 1, y + 0.19, _digits(value(before)), va="center", fontsize=8.5, color="#666666")
    axes.set_yticks(range(len(values)), [name for name, _ in values])
    axes.set_xlim(0, 108)
    axes.set_xlabel(f"Percent. Warps wait most for {ncu.stall_words(kernel.top_stall)}", fontsize=9.5)
    axes.grid(False, axis="y")
    axes.invert_yaxis()
    step = f"; in grey {before.rung}" if before is not None else ""
    timed = (("full ", kernel), ("causal ", causal))
    times = [f"{name}{number(one.median_ms)} ms" for name, one in timed if one is not None and one.median_ms]
    plots.add_title(figure, f"{kernel.rung}, d={kernel.head_dim}: {', '.join(times)}{step}", fontsize=10.5)
    suffix = csv_path.stem.removeprefix(f"ladder_kernels_{kernel.dtype}")
    return plots.save(figure, csv_path, f"ladder_{kernel.rung}{suffix}.png")


def _digits(percent: float) -> str:
    return f"{percent:.0f}" if percent >= 1 or percent == 0 else f"{percent:.1g}"


def _bytes_figure(csv_path: Path, rows: Sequence[HbmRow]) -> Path:
    """Device memory traffic by sequence length: quadratic if scores are stored, else linear."""
    figure = plots.new_figure(8.4, 5.0)
    axes = figure.add_subplot()
    lengths = sorted({row.seqlen for row in rows})
    names = list(dict.fromkeys(row.provider for row in rows))
    least = {row.seqlen: row.least_bytes for row in rows}
    axes.plot(lengths, [least[length] / 1e9 for length in lengths], color="#000000", linestyle=":", linewidth=1.5)
    ends: list[plots.End] = [(least[lengths[-1]] / 1e9, lengths[-1], "least bytes", "#000000", False)]
    for name in names:
        own = sorted((row for row in rows if row.provider == name), key=lambda row: row.seqlen)
        colour = PEER if name == "eager" else OURS
        axes.plot(
            [row.seqlen for row in own], [row.dram_bytes / 1e9 for row in own], color=colour, marker="o", linewidth=2.2
        )
        ends.append((own[-1].dram_bytes / 1e9, own[-1].seqlen, name, colour, name != "eager"))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("Sequence length")
    axes.set_ylabel("GB through device memory in one call")
    first = rows[0]
    problem = f"B={first.batch} H={first.heads} d={first.head_dim} {first.dtype}"
    axes.set_title(
        f"Device memory traffic, counted: {problem}, forward; {first.env.device}",
        loc="left",
        fontweight="bold",
        fontsize=11,
    )
    plots.label_ends(axes, ends)
    return plots.save(figure, csv_path, f"{csv_path.stem}.png")
