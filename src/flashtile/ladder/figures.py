"""The ladder's figures: time of every rung, the roofline, each rung's counters beside the step before, bytes over the length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashtile.bench import plots
from flashtile.bench.rows import Row, read
from flashtile.bench.tables import number
from flashtile.ladder.rows import HbmRow, RungRow

OURS, STEP_BEFORE, PEER = "#D55E00", "#9a9a9a", "#0072B2"


def draw(csv_path: Path) -> list[Path]:
    """Every figure of one of the ladder's CSVs, beside it."""
    plots.require_matplotlib()
    import matplotlib

    with matplotlib.rc_context(plots.look()):
        if csv_path.stem.startswith("ladder_hbm"):
            return [_bytes_figure(csv_path, read(csv_path, HbmRow))]
        if csv_path.stem.startswith("ladder_kernels"):
            kernels = read(csv_path, RungRow)
            figures = [_roofline(csv_path, kernels)] if any(kernel.tflops for kernel in kernels) else []
            counted = [kernel for kernel in kernels if kernel.dram_bytes is not None and not kernel.is_causal]
            before: RungRow | None = None
            for kernel in counted:
                figures.append(_counter_figure(csv_path, kernel, before))
                before = kernel
            return figures
        return [_times(csv_path, [row for row in read(csv_path, Row) if row.is_ok and row.batch * row.heads > 1])]


def _times(csv_path: Path, rows: Sequence[Row]) -> Path:
    """Bars of the large problem, full and causal, on a log axis: each step's factor is a length."""
    from matplotlib.figure import Figure

    masks = sorted({row.is_causal for row in rows})
    names = list(dict.fromkeys(row.provider for row in rows))
    figure = Figure(figsize=(5.9 * len(masks) + 1.2, 0.36 * len(names) + 1.5), layout="constrained")
    panels = figure.subplots(1, len(masks), squeeze=False, sharey=True)[0]
    for axes, is_causal in zip(panels, masks, strict=True):
        here = {row.provider: row for row in rows if row.is_causal == is_causal}
        for place, name in enumerate(names):
            if name not in here:
                continue
            row = here[name]
            ms = row.median_ms or 0.0
            axes.barh(place, ms, color=PEER if row.is_baseline else OURS, height=0.68, alpha=0.55 if name == "cuda" else 1.0)
            axes.text(ms * 1.12, place, f"{number(ms)} ms", va="center", fontsize=9)
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.set_xlim(max(low, 1.0), high * 3)
        axes.set_yticks(range(len(names)), names)
        axes.grid(False, axis="y")
        axes.set_xlabel("Time per call (ms)")
        axes.set_title("causal" if is_causal else "full", loc="left")
    panels[0].invert_yaxis()
    first = rows[0]
    problem = f"B={first.batch} H={first.heads} S={first.seqlen_q} d={first.head_dim} {first.dtype}"
    figure.suptitle(f"The ladder: {problem}; {first.env.device}, torch {first.env.torch}", x=0.01, ha="left", fontweight="bold")
    return plots.save(figure, csv_path, f"{csv_path.stem}_times.png")


def _roofline(csv_path: Path, kernels: Sequence[RungRow]) -> Path:
    """Throughput over arithmetic intensity, of device memory as counted (else as at least), under the measured roofs."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 5.0), layout="constrained")
    axes = figure.add_subplot()
    first = kernels[0]
    full = [kernel for kernel in kernels if not kernel.is_causal and kernel.tflops]
    points = [(kernel.flops / (kernel.dram_bytes or kernel.least_bytes), kernel.tflops or 0.0, kernel.rung) for kernel in full]
    xs = np.logspace(np.log10(min(0.5, *(x for x, _, _ in points)) / 2), np.log10(max(2000.0, *(x for x, _, _ in points)) * 2), 200)
    axes.plot(xs, np.minimum(xs * first.dram_ceiling_gb_per_s / 1e3, first.fma_ceiling_tflops), color="#000000", linewidth=1.5)
    axes.text(xs[-1], first.fma_ceiling_tflops * 1.08, f"FMA, {number(first.fma_ceiling_tflops)} TFLOP/s", ha="right", fontsize=9)
    at = first.fma_ceiling_tflops / first.dram_ceiling_gb_per_s * 1e3
    axes.text(
        at * 0.75, first.fma_ceiling_tflops * 0.85, f"device memory, {number(first.dram_ceiling_gb_per_s)} GB/s", ha="right", fontsize=9
    )
    for x, y, _ in points:
        axes.plot(x, y, "o", color=OURS, markersize=7)
    places = plots.spread([float(np.log10(y)) for _, y, _ in sorted(points, key=lambda one: one[1])], 0.13)
    for (x, y, name), place in zip(sorted(points, key=lambda one: one[1]), places, strict=True):
        axes.annotate(
            name, xy=(x, y), xytext=(x * 1.25, 10**place), fontsize=9, va="center",
            arrowprops={"arrowstyle": "-", "color": STEP_BEFORE, "linewidth": 0.6},
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(xs[0], xs[-1])
    axes.set_xlabel(
        "FLOP for each byte of device memory, as counted" if full[0].dram_bytes else "FLOP for each byte of device memory, at best"
    )
    axes.set_ylabel("TFLOP/s")
    problem = f"B={first.batch} H={first.heads} S={first.seqlen} d={first.head_dim} {first.dtype}, full"
    axes.set_title(f"Roofline, roofs as measured: {problem}; {first.env.device}", loc="left", fontweight="bold", fontsize=11)
    return plots.save(figure, csv_path, f"{csv_path.stem.replace('kernels', 'roofline')}.png")


def _counter_figure(csv_path: Path, kernel: RungRow, before: RungRow | None) -> Path:
    """A rung's counters as percentages, the step before in grey."""
    from matplotlib.figure import Figure

    values: list[tuple[str, Any]] = [
        ("FMA pipe busy", lambda one: one.fma_percent),
        ("shared memory throughput", lambda one: one.shared_percent),
        ("L2 throughput", lambda one: one.l2_percent),
        ("occupancy", lambda one: 100 * one.achieved_occupancy),
        ("TFLOP/s of FMA ceiling", lambda one: 100 * (one.tflops or 0.0) / one.fma_ceiling_tflops),
    ]
    figure = Figure(figsize=(7.6, 2.5), layout="constrained")
    axes = figure.add_subplot()
    for place, (_, value) in enumerate(values):
        axes.barh(place - 0.19, value(kernel), color=OURS, height=0.36)
        axes.text(value(kernel) + 1, place - 0.19, f"{value(kernel):.0f}", va="center", fontsize=8.5)
        if before is not None:
            axes.barh(place + 0.19, value(before), color=STEP_BEFORE, height=0.36)
            axes.text(value(before) + 1, place + 0.19, f"{value(before):.0f}", va="center", fontsize=8.5, color="#666666")
    axes.set_yticks(range(len(values)), [name for name, _ in values])
    axes.set_xlim(0, 108)
    axes.set_xlabel("%")
    axes.grid(False, axis="y")
    axes.invert_yaxis()
    step = f", {before.rung} in grey" if before is not None else ""
    times = f"{number(kernel.median_ms)} ms" if kernel.median_ms else ""
    stall = f"waits most for {kernel.top_stall.replace('_', ' ')}"
    axes.set_title(f"{kernel.rung}: {times}, {stall}{step}", loc="left", fontweight="bold", fontsize=10.5)
    return plots.save(figure, csv_path, f"ladder_{kernel.rung}.png")


def _bytes_figure(csv_path: Path, rows: Sequence[HbmRow]) -> Path:
    """Bytes through device memory over the length: quadratic where scores are stored, linear where they are not."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 5.0), layout="constrained")
    axes = figure.add_subplot()
    lengths = sorted({row.seqlen for row in rows})
    names = list(dict.fromkeys(row.provider for row in rows))
    least = {row.seqlen: row.least_bytes for row in rows}
    axes.plot(lengths, [least[length] / 1e9 for length in lengths], color="#000000", linestyle=":", linewidth=1.5)
    ends: list[plots.End] = [(least[lengths[-1]] / 1e9, lengths[-1], "least there can be", "#000000", False)]
    for name in names:
        own = sorted((row for row in rows if row.provider == name), key=lambda row: row.seqlen)
        colour = PEER if name == "eager" else OURS
        axes.plot([row.seqlen for row in own], [row.dram_bytes / 1e9 for row in own], color=colour, marker="o", linewidth=2.2)
        ends.append((own[-1].dram_bytes / 1e9, own[-1].seqlen, name, colour, name != "eager"))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("Sequence length")
    axes.set_ylabel("GB through device memory in one call")
    first = rows[0]
    problem = f"B={first.batch} H={first.heads} d={first.head_dim} {first.dtype}"
    axes.set_title(f"Device memory traffic, counted: {problem}, forward; {first.env.device}", loc="left", fontweight="bold", fontsize=11)
    plots.label_ends(axes, ends)
    return plots.save(figure, csv_path, f"{csv_path.stem}.png")
