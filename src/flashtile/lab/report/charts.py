"""Turns rows of results into what page.py puts on the page: charts as data, timelines as SVG, heat maps as HTML tables.

page.js draws the charts from these keys, and reads them by name:

- every chart: `kind` (lines, roofline or scatter); `title`, if it has one, is shown by page.py
- lines: `x` (label of the axis), `metrics` (each `key`, `label`, `log`), `choices` (each `label`, `series`), `start`
  (the choice shown first). A series has `label`, `colour`, `dash`, `marker`, `strong`, `x`, `note`, and a list for
  each metric's `key`
- roofline: `tops` and `levels` (each `label`, `value`), `isColumn`, `points` (each `label`, `colour`, `marker`, `y`,
  and `x` by the label of a level)
- scatter: `x`, `y` (labels of the axes), `choices` (each `label`, `points` with `label`, `colour`, `marker`, `x`, `y`)

Choices and levels are never empty. A colour that is hard to see on a dark
page needs a dark form in DARK_OF of page.js.
tests/cpu/test_report.py compares the keys with those that page.js reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flashtile.lab.bench import join, ratio_colours
from flashtile.lab.bench.compare import pairs, speedups
from flashtile.lab.bench.plots import by_length, heat_cells, style
from flashtile.lab.bench.points import DIRECTIONS
from flashtile.lab.bench.rows import Row
from flashtile.lab.bench.tables import DEFAULT_BACKENDS, measured_labels
from flashtile.lab.ladder.rows import HbmRow, RungRow
from flashtile.lab.profile.figures import kernel_tflops, levels, roofline_groups, roofline_points
from flashtile.lab.profile.rows import KernelRow
from flashtile.lab.profile.tables import point_labels
from flashtile.lab.profile.timeline import COLOURS, WAIT_COLOUR, Timeline, drawn, header_constants, lane_names
from flashtile.lab.tiles.rows import TileRow
from flashtile.markup import Raw, escape, table

Chart = dict[str, Any]
_OURS, _PEER, _BLACK = "#D55E00", "#0072B2", "#000000"
_WAVEFRONT_BYTES = 128  # what shared memory moves at a time: 32 banks of 4 bytes
_METRICS: dict[str, tuple[str, bool, Callable[[Row], float | None]]] = {  # key -> label, log axis, value
    "throughput": ("TFLOP/s", False, lambda row: row.tflops),
    "latency": ("ms per call", True, lambda row: row.median_ms),
    "memory": ("MiB beyond the inputs", True, lambda row: row.memory_bytes / 2**20 if row.memory_bytes else None),
    "bandwidth": ("GB/s", False, lambda row: row.gb_per_s),
}


def line_chart(metrics: Sequence[tuple[str, str, bool]], choices: Sequence[Chart], x_label: str) -> Chart:
    """Returns a chart of lines. `metrics`: key, label and whether the axis is logarithmic."""
    shown = [{"key": key, "label": label, "log": is_log} for key, label, is_log in metrics]
    return {"kind": "lines", "x": x_label, "metrics": shown, "choices": list(choices)}


def curves(files: Iterable[tuple[str, Sequence[Row]]], metrics: Sequence[str], x_label: str) -> Chart | None:
    """Returns a chart with a choice for each problem measured at two or more lengths, or None if there is none."""
    choices = []
    for stem, rows in files:
        for name, own in _problems(rows).items():
            if len({row.seqlen_k for row in own}) > 1:
                choices.append({"label": f"{name} ({stem})", "series": _series(own, metrics)})
    if not choices:
        return None
    start = next((index for index, choice in enumerate(choices) if "d=128" in choice["label"]), 0)  # the usual head dim
    return line_chart([(key, *_METRICS[key][:2]) for key in metrics], choices, x_label) | {"start": start}


def _problems(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Groups the measured rows by problem: rows of a group differ in length only, in the grid `paper`, whose number of
    tokens is fixed, also in batch."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.median_ms is None or row.option:
            continue
        heads = f"H={row.heads}" if row.heads == row.heads_kv else f"H={row.heads}/{row.heads_kv}"
        batch = f"{row.batch * row.seqlen_k} tokens" if row.sweep == "paper" else f"B={row.batch}"
        mask = "causal" if row.is_causal else "full"
        name = f"{DIRECTIONS[row.direction]}, {mask}, {batch} {heads} d={row.head_dim} {row.dtype}"
        found.setdefault(name, []).append(row)
    return found


def _series(rows: Sequence[Row], metrics: Sequence[str]) -> list[Chart]:
    """Returns a series for each provider."""
    found = []
    for name, label in measured_labels(rows).items():
        own = by_length(row for row in rows if row.provider == name)
        colour, line, marker = style(name)
        found.append(
            {
                "label": label,
                "colour": colour,
                "dash": {"-": "", "--": "7 4", ":": "2 4", "-.": "8 3 2 3"}[line],
                "marker": marker,
                "strong": name in (*DEFAULT_BACKENDS, "flashtile"),
                "x": [row.seqlen_k for row in own],
                "note": ["" if row.is_ok else row.status for row in own],
                **{key: [_rounded(_METRICS[key][2](row)) for row in own] for key in metrics},
            }
        )
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def hbm_chart(rows: Sequence[HbmRow]) -> Chart:
    """Returns the chart of bytes through device memory over the sequence length."""
    names = list(dict.fromkeys(row.provider for row in rows))
    lengths = sorted({row.seqlen for row in rows})
    least = {row.seqlen: row.least_bytes / 1e9 for row in rows}
    series: list[Chart] = [
        {"label": "least there can be", "colour": _BLACK, "dash": "2 4", "marker": ".", "strong": False,
         "x": lengths, "note": [""] * len(lengths), "gb": [_rounded(least[length]) for length in lengths]}
    ]  # fmt: skip
    for name in names:
        own = sorted((row for row in rows if row.provider == name), key=lambda row: row.seqlen)
        join.unique(own, lambda row: row.seqlen)
        series.append(
            {"label": name, "colour": _PEER if name == "eager" else _OURS, "dash": "", "marker": "o",
             "strong": name != "eager", "x": [row.seqlen for row in own], "note": [""] * len(own),
             "gb": [_rounded(row.dram_bytes / 1e9) for row in own]}
        )  # fmt: skip
    first = rows[0]
    problem = f"B={first.batch} H={first.heads} d={first.head_dim} {first.dtype}, forward"
    return line_chart([("gb", "GB", True)], [{"label": problem, "series": series}], "sequence length")


def rung_roofline(kernels: Sequence[RungRow]) -> Chart | None:
    """Returns the roofline of the rungs that have counters, without a causal mask; None if there is none."""
    chosen = [kernel for kernel in kernels if not kernel.is_causal and kernel.tflops and kernel.dram_bytes]
    if not chosen:
        return None
    first = chosen[0]
    points = []
    for kernel in chosen:
        intensity = {"device memory": kernel.flops / (kernel.dram_bytes or 1.0)}
        if kernel.shared_wavefronts:
            intensity["shared memory"] = kernel.flops / (_WAVEFRONT_BYTES * kernel.shared_wavefronts)
        points.append({"label": kernel.rung, "colour": _OURS, "marker": "o", "y": kernel.tflops, "x": intensity})
    roofs = {"device memory": first.dram_ceiling_gb_per_s, "shared memory": first.shared_ceiling_gb_per_s}
    return _roofline(points, {first.unit: first.ceiling_tflops}, roofs)


def profile_rooflines(rows: Sequence[KernelRow]) -> list[Chart]:
    """Returns one roofline, or one for each pass if there are many calls (profile.figures.roofline_groups)."""
    return [_profile_roofline(group) for group in roofline_groups(roofline_points(rows))]


def _profile_roofline(calls: Sequence[KernelRow]) -> Chart:
    first = calls[0]
    points = [
        {"label": label, "colour": style(row.provider)[0],
         "marker": {"fwd": "o", "bwd": "s"}.get(row.direction, "D"), "y": kernel_tflops(row),
         "x": {name: x for name, (x, _) in levels(row).items()}}
        for row, label in zip(calls, point_labels(calls), strict=True)
    ]  # fmt: skip
    tops = {"tensor cores": first.tensor_ceiling_tflops, "FMA": first.fma_ceiling_tflops}
    roofs = {name: roof for row in calls for name, (_, roof) in levels(row).items()}
    title = {"fwd": "Forward", "bwd": "Backward"}.get(first.direction, "")
    is_alone = len({row.direction for row in calls}) == 1
    chart = _roofline(points, {name: value for name, value in tops.items() if value}, roofs)
    return chart | {"isColumn": True, "title": title if is_alone else ""}


def _roofline(points: Sequence[Chart], tops: dict[str, float], roofs: dict[str, float]) -> Chart:
    return {
        "kind": "roofline",
        "tops": [{"label": name, "value": _rounded(value)} for name, value in tops.items()],
        "levels": [{"label": name, "value": _rounded(value)} for name, value in roofs.items()],
        "points": [
            point | {"y": _rounded(point["y"]), "x": {name: _rounded(x) for name, x in point["x"].items()}}
            for point in points
        ],
    }


def tiles_chart(rows: Sequence[TileRow]) -> Chart | None:
    """Returns the chart of the throughput of each tile over its occupancy, without a causal mask; None if nothing was
    timed."""
    choices = []
    for head_dim in sorted({row.head_dim for row in rows}):
        own = [row for row in rows if row.head_dim == head_dim and not row.is_causal and row.tflops]
        if not own:
            continue
        points = [
            {"label": row.tile + (", taken" if row.is_chosen else "") + (f", spills {row.spill_bytes} bytes"
             if row.spill_bytes else ""), "x": _rounded(100 * (row.achieved_occupancy or row.occupancy or 0.0)),
             "y": _rounded(row.tflops), "colour": _OURS if row.is_chosen else _PEER,
             "marker": "D" if row.is_chosen else "x" if row.spill_bytes else "o"}
            for row in own
        ]  # fmt: skip
        choices.append({"label": f"{own[0].kernel} {own[0].dtype} d={head_dim}", "points": points})
    if not choices:
        return None
    return {"kind": "scatter", "x": "achieved occupancy, %", "y": "TFLOP/s", "choices": choices}


# Timelines

# Lengths in units of the viewBox
_WIDTH = 1100.0  # of the lanes
_LABEL_WIDTH, _MARGIN = 90, 10  # left and right of them
_LANE, _GAP = 34, 4  # height of a lane; above and below its bars
_BASELINE = 22  # of a label, from the top of its lane
_AXIS_HEIGHT = 24  # below the lanes
_WARPS_PER_GROUP = 4


def timeline_picture(timeline: Timeline) -> str:
    """Returns an SVG with a lane for each warpgroup over a few steps. The mouse shows a phase's name; waits are
    hatched."""
    phases = {phase.name: phase for phase in header_constants()[0]}
    shown = [span for span in drawn(timeline.spans) if span.phase != "end"]
    warps = sorted({span.warp for span in shown})
    start, end = min(span.start for span in shown), max(span.end for span in shown)
    hatch_id = "wait-" + re.sub(r"\W+", "-", f"{timeline.kernel} {timeline.problem} {timeline.env.device}")
    parts = []
    for span in shown:
        x = _LABEL_WIDTH + (span.start - start) / (end - start) * _WIDTH
        width = (span.end - span.start) / (end - start) * _WIDTH
        phase = phases[span.phase]
        fill = f"url(#{hatch_id})" if phase.is_wait else COLOURS[span.phase]
        title = f"{'waits' if phase.is_wait else 'works'}: {phase.what}; {span.end - span.start} clocks"
        parts.append(
            f'<rect x="{x:.1f}" y="{warps.index(span.warp) * _LANE + _GAP}" width="{max(width, 0.5):.1f}" '
            f'height="{_LANE - 2 * _GAP}" fill="{fill}"><title>{escape(title)}</title></rect>'
        )
    names = lane_names(timeline.spans)
    labels = "".join(
        f'<text x="0" y="{index * _LANE + _BASELINE}">{names[warp // _WARPS_PER_GROUP]}</text>'
        for index, warp in enumerate(warps)
    )
    used = [name for name in dict.fromkeys(span.phase for span in shown) if not phases[name].is_wait]
    legend = "".join(
        f'<span><i style="background:{COLOURS[name]}"></i>{escape(phases[name].what)}</span>' for name in used
    )
    height = len(warps) * _LANE + _AXIS_HEIGHT
    hatch = (
        f'<pattern id="{hatch_id}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="6" height="6" fill="{WAIT_COLOUR}"/><rect width="2" height="6" fill="#8a8a8a"/></pattern>'
    )
    whole_width = _LABEL_WIDTH + _WIDTH + _MARGIN
    return (
        f'<div class="scroll"><svg class="plot lanes" viewBox="0 0 {whole_width:.0f} {height}" role="img" '
        f'aria-label="{escape(timeline.kernel)}: what its warpgroups do over {end - start} clocks">'
        f'<defs>{hatch}</defs>{labels}{"".join(parts)}<text x="{_LABEL_WIDTH + _WIDTH:.0f}" y="{height - _GAP}" '
        f'text-anchor="end" class="soft">{end - start} clocks</text></svg></div>'
        f'<p class="keys">{legend}<span><i class="wait"></i>waits</span></p>'
    )


# Heat maps


def heat_maps(rows: Sequence[Row]) -> dict[str, str]:
    """Returns for each pair of providers a coloured table of speed ratios, problems by length, by the names of the two.
    The colours are those of bench.plots."""
    timed = [row for row in rows if row.is_ok and not row.option]
    names = measured_labels(timed)
    found = {}
    for provider, peer in pairs(timed):
        ratios = speedups(timed, provider, peer)
        if len(ratios) > 1:
            found[f"{names[provider]} against {names[peer]}"] = _heat_table(timed, provider, ratios)
    return found


def _heat_table(rows: Sequence[Row], provider: str, ratios: dict[Any, float]) -> str:
    cells = heat_cells([row for row in rows if row.provider == provider and row.point in ratios])
    lengths = sorted({length for _, length in cells})
    shown = {place: ratios[row.point] for place, row in cells.items()}
    table_lines = [
        (line, *(_heat_cell(shown.get((line, length))) for length in lengths))
        for line in dict.fromkeys(line for line, _ in cells)
    ]
    return table(("", *map(str, lengths)), table_lines, cell_class="heat")


def _heat_cell(ratio: float | None) -> Raw:
    """Returns the ratio on its colour: orange if faster, purple if slower, from half to double."""
    if ratio is None:
        return Raw("")
    back = ratio_colours.colour(ratio_colours.share(ratio))
    colour = ",".join(str(round(255 * channel)) for channel in back)
    css = f"background:rgb({colour});color:{ratio_colours.on(back)}"
    return Raw(f'<span style="{css}">{escape(ratio_colours.text(ratio))}</span>')
