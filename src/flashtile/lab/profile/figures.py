"""The roofline of a profile: throughput by arithmetic intensity under the ceilings measured on the same GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashtile.lab.bench import plots
from flashtile.lab.bench.rows import read
from flashtile.lab.bench.tables import number
from flashtile.lab.profile.measure import by_call, main_kernel
from flashtile.lab.profile.rows import KernelRow
from flashtile.lab.profile.tables import point_labels

_MANY_POINTS = 8  # more do not fit in one panel with their names
_GREY = "#9a9a9a"
_MARKERS = {"fwd": "o", "bwd": "s", "fwd+bwd": "D"}
_WAVEFRONT_BYTES = 128  # that the shared-memory pipe moves in one cycle


@plots.drawing()
def draw(csv_path: Path) -> list[Path]:
    """Draws the roofline beside the CSV. No figure without counters."""
    points = roofline_points(read(csv_path, KernelRow))
    if not points:
        return []
    return [_roofline(csv_path, points)]


def roofline_points(rows: Sequence[KernelRow]) -> list[KernelRow]:
    """A row for each call that was counted: its longest kernel, with the time and the traffic of all of them."""
    calls = [kernels for kernels in by_call(rows).values() if kernels[0].status == "ok"]
    return [row for row in map(_whole_call, calls) if row.kernel_ms and row.dram_bytes and row.l2_bytes]


_SUMMED = ("kernel_ms", "dram_bytes", "l2_bytes", "shared_wavefronts")


def _whole_call(kernels: Sequence[KernelRow]) -> KernelRow:
    """The products may be spread over several kernels: the FLOPs of a call belong to the sum of their times."""
    sums: dict[str, Any] = {name: sum(getattr(row, name) or 0.0 for row in kernels) for name in _SUMMED}
    return replace(main_kernel(kernels), **sums)


def roofline_groups(points: Sequence[KernelRow]) -> list[list[KernelRow]]:
    """Returns the points of each panel: all, or where they are many those of one pass."""
    if not points:
        return []
    if len(points) <= _MANY_POINTS:
        return [list(points)]
    return [[row for row in points if row.direction == one] for one in dict.fromkeys(row.direction for row in points)]


def levels(row: KernelRow) -> dict[str, tuple[float, float]]:
    """Returns the FLOP per byte of a row and the measured bandwidth in GB/s for each level of memory."""
    found = {}
    if row.dram_bytes and row.dram_ceiling_gb_per_s:
        found["device memory"] = row.flops / row.dram_bytes, row.dram_ceiling_gb_per_s
    if row.l2_bytes and row.l2_ceiling_gb_per_s:
        found["L2"] = row.flops / row.l2_bytes, row.l2_ceiling_gb_per_s
    # Tensor cores read shared memory past the pipe that is counted
    if row.shared_wavefronts and row.shared_ceiling_gb_per_s and not row.tensor_percent:
        found["shared memory"] = row.flops / (_WAVEFRONT_BYTES * row.shared_wavefronts), row.shared_ceiling_gb_per_s
    return found


def kernel_tflops(row: KernelRow) -> float:
    return row.flops / (row.kernel_ms or 1.0) / 1e9


def _roofline(csv_path: Path, kernels: Sequence[KernelRow]) -> Path:
    """A column for each level of memory. Many points get a row of panels for each pass."""
    names = [name for name in ("device memory", "L2", "shared memory") if any(name in levels(row) for row in kernels)]
    groups = roofline_groups(kernels)
    figure = plots.new_figure(6.6 * len(names), 4.6 * len(groups) + 0.6)
    panels = figure.subplots(len(groups), len(names), squeeze=False, sharey="row")
    for line, group in zip(panels, groups, strict=True):
        for axes, name in zip(line, names, strict=True):
            _panel(axes, [row for row in group if name in levels(row)], name)
            axes.set_xlabel(f"FLOP for each byte of {name}, as counted")
        line[0].set_ylabel(f"TFLOP/s of all kernels of a call{', ' + group[0].direction if len(groups) > 1 else ''}")
    first = kernels[0]
    plots.add_title(
        figure,
        f"Roofline, roofs as measured: {first.env.device}; {csv_path.stem.removeprefix('profile_').replace('_', ' ')}",
        fontsize=11,
    )
    return plots.save(figure, csv_path, f"{csv_path.stem}_roofline.png")


def _panel(axes: Any, kernels: Sequence[KernelRow], name: str) -> None:
    import numpy as np

    first = kernels[0]
    gb_per_s = levels(first)[name][1]
    tops = {
        label: value
        for label, value in (("tensor cores", first.tensor_ceiling_tflops), ("FMA", first.fma_ceiling_tflops))
        if value
    }
    top = max(tops.values())
    points = sorted(((levels(row)[name][0], kernel_tflops(row), row) for row in kernels), key=lambda one: one[1])
    ridge = top / gb_per_s * 1e3
    low, high = min(ridge, *(x for x, _, _ in points)) / 6, max(ridge, *(x for x, _, _ in points)) * 60
    xs = np.logspace(np.log10(low), np.log10(high), 300)
    axes.plot(xs, np.minimum(xs * gb_per_s / 1e3, top), color="#000000", linewidth=1.5)
    for label, value in tops.items():
        axes.plot(
            [value / gb_per_s * 1e3, high], [value, value], color="#000000", linewidth=1.0 if value < top else 1.5
        )
        axes.text(high, value * 1.06, f"{label}, {number(value)} TFLOP/s", ha="right", fontsize=9)
    axes.text(low * 1.1, top * 1.06, f"{name}, {number(gb_per_s)} GB/s", fontsize=9)
    texts = dict(zip(map(id, kernels), point_labels(kernels), strict=True))
    places = _under(float(np.log10(top)), [float(np.log10(y)) for _, y, _ in points], 0.085)
    right = max(x for x, _, _ in points)
    for (x, y, row), place in zip(points, places, strict=True):
        colour = plots.style(row.provider)[0]
        axes.plot(x, y, _MARKERS[row.direction], color=colour, markersize=8)
        axes.annotate(
            texts[id(row)], xy=(x, y), xytext=(right * 1.9, 10**place), fontsize=8.5, va="center", color=colour,
            arrowprops={"arrowstyle": "-", "color": _GREY, "linewidth": 0.6, "relpos": (0.0, 0.5)},
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(min(min(y for _, y, _ in points), min(tops.values())) / 3, top * 1.5)


def _under(top: float, heights: Sequence[float], gap: float) -> list[float]:
    """Heights of labels at least a gap apart, beside their points or lower, under the top. `heights` rise."""
    places: list[float] = []
    for height in reversed(heights):
        top = min(height, top - gap)
        places.append(top)
    return places[::-1]
