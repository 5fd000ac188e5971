"""The figures of a CSV.

The metadata of each PNG holds the name and the hash of its CSV, so that a stale figure is detected.
Throughput and bandwidth have a linear axis from 0. Time and memory span several decades and have a log axis.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashtile.errors import Unsupported, unsupported
from flashtile.lab.bench import files, join, ratio_colours
from flashtile.lab.bench.compare import pairs, speedups
from flashtile.lab.bench.points import DIRECTIONS
from flashtile.lab.bench.rows import Row
from flashtile.lab.bench.tables import DEFAULT_BACKENDS, measured_labels, serving_label

SOURCE_KEY, HASH_KEY = "flashtile:csv", "flashtile:sha256"

# The palette of Okabe and Ito, safe for every kind of colour vision
_BLACK, _ORANGE, _SKY, _GREEN, _BLUE, _RED, _PINK, _GREY = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#767676",
)  # fmt: skip
_STYLES: dict[str, tuple[str, str, str]] = {  # provider -> colour, line, marker; the same in every figure
    "cuda": (_RED, "-", "o"),
    "cpu": (_RED, "-", "s"),
    "triton": (_ORANGE, "-", "^"),
    "numba": (_ORANGE, "--", "v"),
    "tiled": (_ORANGE, "-", "D"),
    "reference": (_GREY, "-", "x"),
    "sdpa": (_BLACK, "-", "."),
    "sdpa-flash": (_BLUE, "-", "."),
    "sdpa-cudnn": (_GREEN, "-", "."),
    "sdpa-efficient": (_SKY, "-", "."),
    "sdpa-math": (_BLUE, ":", "."),
    "eager": (_PINK, ":", "."),
    "compiled": (_GREEN, "--", "."),
    "flex": (_GREY, "--", "."),
    "torch-varlen": (_SKY, "-.", "."),
    "flashtile": (_RED, "-", "o"),
    "flashtile-high": (_ORANGE, "-", "o"),
    "flash-attn-2": (_BLUE, "--", "."),
    "flash-attn-3": (_PINK, "--", "."),
    "flash-attn-4": (_PINK, "-", "."),
    "xformers": (_SKY, "--", "."),
    "flashinfer": (_SKY, ":", "."),
}
_PAGE_MARKERS = {"1": "v", "16": "o", "64": "s", "256": "D"}  # by the rows of a page

Value = Callable[[Row], "float | None"]
End = tuple[float, float, str, str, bool]  # y, x, label, colour, is emphasised


@contextmanager
def drawing() -> Iterator[None]:
    """Gives figures our look, as a context or a decorator; refuses where there is no matplotlib."""
    if find_spec("matplotlib") is None:
        raise unsupported(
            "plots",
            "no matplotlib",
            "an installed one",
            "The CSV needs none; pip install 'flashtile[bench]' draws the figures",
        )
    import matplotlib

    with matplotlib.rc_context(look()):
        yield


def new_figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def add_title(figure: Any, text: str, **font: Any) -> None:
    figure.suptitle(text, x=0.01, ha="left", fontweight="bold", **font)


@drawing()
def draw(csv_path: Path, rows: Sequence[Row]) -> list[Path]:
    """Draw every figure of a run beside its CSV and return their paths."""
    timed = [row for row in rows if row.is_ok]
    if not timed:
        raise Unsupported("plots: no row was measured; there is nothing to draw. The reasons stand in the CSV.")
    if timed[0].sweep == "decode":
        plain, serving = [row for row in timed if not row.option], [row for row in timed if row.option]
        drawn = _grid_figures(csv_path, plain) if plain else []
        return [*drawn, _serving_figure(csv_path, serving)] if serving else drawn
    if timed[0].option or timed[0].sweep == "float32":
        return []  # such a grid is a table
    if timed[0].sweep == "Lsweep":
        return _length_figures(csv_path, timed)
    return _grid_figures(csv_path, timed)


def style(provider: str) -> tuple[str, str, str]:
    """Colour, line and marker of a provider."""
    return _STYLES.get(provider, (_GREY, "-.", "."))


def look() -> dict[str, Any]:
    return {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e4e4e4",
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "axes.titlesize": 11,
        "xtick.minor.size": 0,
        "figure.dpi": 130,
    }


# One problem over the sequence length


def _length_figures(csv_path: Path, rows: Sequence[Row]) -> list[Path]:
    first = rows[0]
    heads = f"H={first.heads}" if first.heads == first.heads_kv else f"H={first.heads}/{first.heads_kv}"
    problem = (
        f"B={first.batch} {heads} d={first.head_dim} {first.dtype}{' causal' if first.is_causal else ''}, "
        f"{DIRECTIONS[first.direction]}"
    )
    suffix = "_" + csv_path.stem.removeprefix("sdpa_Lsweep_")
    suffix = suffix.replace("_B1_H1_d64_fp32", "", 1)
    prefix, factor = ("T", 1.0) if max(row.tflops or 0.0 for row in rows) >= 1 else ("G", 1e3)
    figures: list[tuple[str, str, str, Value]] = [
        ("latency", "Time per call (ms)", "median, band p20 to p80; lower is better", lambda row: row.median_ms),
        (
            "memory",
            "Peak memory beyond the inputs (MiB)",
            "lower is better",
            lambda row: None if row.memory_bytes is None else row.memory_bytes / 2**20,
        ),
        ("throughput", f"Throughput ({prefix}FLOP/s)", "higher is better", lambda row: (row.tflops or 0.0) * factor),
    ]
    written = []
    for what, label, note, value in figures:
        figure = new_figure(9.0, 5.0)
        axes = figure.add_subplot()
        ends = _lines(axes, rows, value, has_band=what == "latency", is_linear=what == "throughput")
        axes.set_ylabel(label)
        axes.set_xlabel("Sequence length S")
        axes.set_title(f"{label.partition(' (')[0]}: {problem}\n", loc="left", fontweight="bold")
        _caption(axes, first, note)
        label_ends(axes, ends)
        written.append(save(figure, csv_path, f"{what}_vs_L{suffix}.png"))
    return written


def _caption(axes: Any, row: Row, note: str = "") -> None:
    texts = [
        row.env.device,
        f"torch {row.env.torch}",
        f"{row.env.commit or 'no commit'}{', changed' if row.env.is_dirty else ''}",
        note,
    ]
    axes.text(0, 1.015, "; ".join(filter(None, texts)), transform=axes.transAxes, fontsize=8.5, color="#555555")


def _lines(axes: Any, rows: Sequence[Row], value: Value, has_band: bool = False, is_linear: bool = False) -> list[End]:
    """Plot one line for each provider; return the lines' right ends, for `label_ends` once all axes are final."""
    ends: list[End] = []
    names = measured_labels(rows)
    lengths = sorted({row.seqlen_k for row in rows})
    drawn: list[dict[int, float]] = []
    for name, label in sorted(names.items(), key=lambda one: not _is_default(one[0])):  # sorted keeps the order of rows
        own = by_length(row for row in rows if row.provider == name and value(row))
        if not own:
            continue
        colour, line, marker = style(name)
        is_default = _is_default(name)
        xs, ys = [row.seqlen_k for row in own], [value(row) or 0.0 for row in own]
        width, size, order = (2.8, 7, 3) if is_default else (1.5, 5, 2)
        shown: str | tuple[int, tuple[int, ...]] = line
        if under := num_under(drawn, dict(zip(xs, ys, strict=True))):
            shown, order = (
                (6 * (under - 1), (6, 12)),
                3 + under,
            )  # dashes over the lines below, each at places of its own
        axes.plot(xs, ys, color=colour, linestyle=shown, marker=marker, linewidth=width, markersize=size, zorder=order)
        drawn.append(dict(zip(xs, ys, strict=True)))
        if has_band:
            axes.fill_between(
                xs,
                [row.p20_ms or 0.0 for row in own],
                [row.p80_ms or 0.0 for row in own],
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
        ends.append((ys[-1], xs[-1], label, colour, is_default))
    axes.set_xscale("log", base=2)
    axes.set_yscale("linear" if is_linear else "log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    return ends


def _is_default(provider: str) -> bool:
    return provider in (*DEFAULT_BACKENDS, "flashtile")


def num_under(lines: Iterable[dict[int, float]], line: dict[int, float]) -> int:
    """Returns how many of the lines have all points of this one, so that it would hide them."""
    return sum(all(x in other and math.isclose(other[x], y, rel_tol=0.05) for x, y in line.items()) for other in lines)


def by_length(rows: Iterable[Row]) -> list[Row]:
    """The rows of one line, one for each length."""
    found = join.unique(rows, lambda row: row.seqlen_k)
    return [found[length] for length in sorted(found)]


def _plain_ticks(axes: Any) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, as plain numbers; on a long axis only the powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = axes.get_ylim()
    decades = high / low
    digits = (1, 2, 5) if decades < 300 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=digits, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def label_ends(axes: Any, ends: Sequence[End]) -> None:
    """Write each label to the right of its line, apart from its neighbours, with a thin line between the two."""
    if not ends:
        return
    if axes.get_yscale() == "log":
        _plain_ticks(axes)
    else:
        axes.set_ylim(bottom=0)
    figure = axes.figure
    figure.draw_without_rendering()
    height = axes.get_window_extent().height / figure.dpi * 72  # in points
    gap = 12.5 / height
    to_axes = axes.transData + axes.transAxes.inverted()
    ordered = sorted(ends)
    wanted = [float(to_axes.transform((x, y))[1]) for y, x, *_ in ordered]
    places = spread(wanted, gap, 0.0)
    for (y, x, label, colour, is_emphasised), place in zip(ordered, places, strict=True):
        axes.annotate(
            label,
            xy=(x, y),
            xycoords="data",
            xytext=(1.045, place),
            textcoords="axes fraction",
            color=colour,
            fontsize=9.5,
            fontweight="bold" if is_emphasised else "normal",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "alpha": 0.6,
                "relpos": (0, 0.5),
                "shrinkB": 3,
            },
        )


def spread(wanted: Sequence[float], gap: float, floor: float = -math.inf) -> list[float]:
    """Sorted positions moved as little as possible: neighbours at least a gap apart, none below the floor."""
    groups: list[tuple[float, int]] = []  # the sum of the wanted positions of a run of neighbours, and their count

    def bottom(group: tuple[float, int]) -> float:
        total, count = group
        return max(floor, total / count - gap * (count - 1) / 2)

    for position in wanted:
        groups.append((position, 1))
        while len(groups) > 1 and bottom(groups[-2]) + gap * groups[-2][1] > bottom(groups[-1]) + 1e-12:
            total, count = groups.pop()
            groups[-1] = (groups[-1][0] + total, groups[-1][1] + count)
    return [bottom(group) + index * gap for group in groups for index in range(group[1])]


# Grids


def _grid_figures(csv_path: Path, rows: Sequence[Row]) -> list[Path]:
    if rows[0].sweep == "decode":
        written = [_decode_figure(csv_path, rows)]
    else:
        written = [_small_multiples(csv_path, rows, head_dim) for head_dim in sorted({row.head_dim for row in rows})]
    heat = _heat_maps(csv_path, rows)
    return written if heat is None else [*written, heat]


def _stem(csv_path: Path, rows: Sequence[Row]) -> str:
    """The first part of a figure's name. It says so where none of flashtile's backends was measured."""
    stem = csv_path.stem.removeprefix("sdpa_")
    return f"{stem}_peers" if all(row.is_baseline for row in rows) else stem


def _small_multiples(csv_path: Path, rows: Sequence[Row], head_dim: int) -> Path:
    """Throughput over the sequence length for one head_dim: a row of panels for each pass, a column for each mask."""
    here = [row for row in rows if row.head_dim == head_dim]
    passes, masks = list(dict.fromkeys(row.direction for row in here)), sorted({row.is_causal for row in here})
    figure = new_figure(6.2 * len(masks), 3.9 * len(passes) + 0.6)
    panels = figure.subplots(len(passes), len(masks), squeeze=False, sharey="row")
    ends: list[tuple[Any, list[End]]] = []
    for panel_row, direction in zip(panels, passes, strict=True):
        for axes, is_causal in zip(panel_row, masks, strict=True):
            own = [row for row in here if row.direction == direction and row.is_causal == is_causal]
            ends.append((axes, _lines(axes, own, lambda row: row.tflops, is_linear=True)))
            axes.set_title(f"{DIRECTIONS[direction]}, {'causal' if is_causal else 'full'}", loc="left")
            axes.set_xlabel("Sequence length S")
        panel_row[0].set_ylabel("Throughput (TFLOP/s)")
    for axes, own_ends in ends:
        label_ends(axes, own_ends)
    first = here[0]
    add_title(
        figure,
        f"Attention, {first.dtype}, d={head_dim}, H={first.heads}, {first.batch * first.seqlen_k} tokens; "
        f"{first.env.device}, torch {first.env.torch}; higher is better",
    )
    return save(figure, csv_path, f"{_stem(csv_path, rows)}_d{head_dim}.png")


def _decode_figure(csv_path: Path, rows: Sequence[Row]) -> Path:
    """Bandwidth over the number of keys, one panel for each batch size."""
    batches = sorted({row.batch for row in rows})
    columns = min(2, len(batches))
    lines = -(-len(batches) // columns)
    figure = new_figure(6.2 * columns, 3.6 * lines + 0.6)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    ends: list[tuple[Any, list[End]]] = []
    for axes, batch in zip(panels, batches, strict=False):
        ends.append(
            (axes, _lines(axes, [row for row in rows if row.batch == batch], lambda row: row.gb_per_s, is_linear=True))
        )
        axes.set_title(f"B={batch}", loc="left")
        axes.set_xlabel("Keys per sequence")
        axes.set_ylabel("Bandwidth (GB/s)")
    for axes, own_ends in ends:
        label_ends(axes, own_ends)
    for axes in panels[len(batches) :]:
        axes.set_visible(False)
    first = rows[0]
    problem = f"H={first.heads}/{first.heads_kv} d={first.head_dim} {first.dtype}"
    where = f"{first.env.device}, torch {first.env.torch}"
    title = f"Decoding, one query per sequence: {problem}; {where}; higher is better"
    add_title(figure, title)
    return save(figure, csv_path, f"{_stem(csv_path, rows)}.png")


def _serving_figure(csv_path: Path, rows: Sequence[Row]) -> Path:
    """Bars for each call over a cache: bandwidth beside that of a copy, throughput of chunks of prompts. Marks on the
    bars are the same calls over a cache in pages."""
    chunks = [row for row in rows if row.option.startswith("chunk")]
    parts = [("Bandwidth (GB/s)", [row for row in rows if row not in chunks]), ("Throughput (TFLOP/s)", chunks)]
    parts = [(label, some) for label, some in parts if some]
    heights = [len({_call(row) for row in some}) for _, some in parts]
    figure = new_figure(9.5, 2.1 + 0.48 * sum(heights))
    panels = figure.subplots(len(parts), 1, squeeze=False, height_ratios=heights).flatten()
    shown: dict[str, Any] = {}
    for axes, (label, some) in zip(panels, parts, strict=True):
        is_bandwidth = some is not chunks
        _serving_bars(axes, some, measured_labels(rows), shown, is_bandwidth)
        if is_bandwidth and some[0].copy_gb_per_s:
            line = axes.axvline(some[0].copy_gb_per_s, color=_BLACK, linestyle="--", linewidth=1)
            shown["memory copy (half of its bytes are writes)"] = line
        axes.set_xlabel(label)
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=min(4, len(shown)), fontsize=9)
    first = rows[0]
    problem = f"H={first.heads}/{first.heads_kv} d={first.head_dim} {first.dtype}"
    title = f"Serving: {problem}; {first.env.device}, torch {first.env.torch}; higher is better"
    note = f"B sequences, queries x keys of each; H{first.heads}: a key head for each query head"
    add_title(figure, title)
    panels[0].set_title(note, loc="left", fontsize=9.5, color="#555555")
    return save(figure, csv_path, f"{csv_path.stem.removeprefix('sdpa_')}_serving.png")


def _call(row: Row) -> str:
    """The call of a row, whether its cache is in pages or not."""
    return serving_label(row).partition(", page")[0]


def _serving_bars(
    axes: Any, rows: Sequence[Row], names: dict[str, str], shown: dict[str, Any], is_bandwidth: bool
) -> None:
    calls = join.groups(rows, _call)
    dense = {call: [row for row in own if ", page" not in serving_label(row)] for call, own in calls.items()}
    thickness = 0.84 / max(1, *map(len, dense.values()))
    for y, (call, own) in enumerate(calls.items()):
        middles: dict[str, float] = {}
        for place, row in enumerate(dense[call]):
            middle = middles[row.provider] = y + (place - (len(dense[call]) - 1) / 2) * thickness
            width = (row.gb_per_s if is_bandwidth else row.tflops) or 0.0
            shown[names[row.provider]] = axes.barh(middle, width, thickness, color=style(row.provider)[0])
        for row in own:
            _, is_paged, size = serving_label(row).partition(", page ")
            if is_paged:
                width, middle = (row.gb_per_s if is_bandwidth else row.tflops) or 0.0, middles.get(row.provider, y)
                is_alone = len({one.provider for one in rows if ", page" in serving_label(one)}) == 1
                name = f"pages of {size}" if is_alone else f"{names[row.provider]}, pages of {size}"
                (shown[name],) = axes.plot(
                    width, middle, linestyle="", marker=_PAGE_MARKERS.get(size, "P"), markersize=5.5, zorder=4,
                    markerfacecolor="white", markeredgecolor=_BLACK if is_alone else style(row.provider)[0],
                )  # fmt: skip
    axes.margins(y=0.01)
    axes.set_yticks(range(len(calls)), list(calls), fontsize=9)
    axes.invert_yaxis()
    axes.grid(False, axis="y")


def _heat_maps(csv_path: Path, rows: Sequence[Row]) -> Path | None:
    """Speed ratios at every point: our backends over each baseline, or the baselines over `sdpa` if none of ours
    ran."""
    import numpy as np
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    names = measured_labels(rows)
    tables = {pair: found for pair in pairs(rows) if (found := speedups(rows, *pair))}
    if not tables:
        return None
    lengths = sorted({row.seqlen_k for row in rows})
    kinds = list(dict.fromkeys(_heat_line(row) for row in rows))
    lines = -(-len(tables) // 4)
    columns = -(-len(tables) // lines)
    figure = new_figure(2.4 + (0.6 + 0.52 * len(lengths)) * columns, 1.1 + (0.9 + 0.32 * len(kinds)) * lines)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    norm = Normalize(-1.0, 1.0)
    colours = LinearSegmentedColormap.from_list(
        "ratios", [ratio_colours.colour(float(part)) for part in np.linspace(-1, 1, 257)], N=257
    )
    for axes, ((provider, peer), found) in zip(panels, tables.items(), strict=False):
        values = np.full((len(kinds), len(lengths)), np.nan)
        cells = heat_cells([row for row in rows if row.provider == provider and row.point in found])
        for (line, length), row in cells.items():
            values[kinds.index(line), lengths.index(length)] = found[row.point]
        axes.imshow(np.log2(values), cmap=colours, norm=norm, aspect="auto")
        for (line, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                ink = ratio_colours.on(ratio_colours.colour(ratio_colours.share(value)))
                said = ratio_colours.text(value)
                axes.text(column, line, said, ha="center", va="center", fontsize=8.5, color=ink)
        axes.set_xticks(
            range(len(lengths)), [f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in lengths]
        )
        is_left = axes.get_subplotspec().is_first_col()
        axes.set_yticks(range(len(kinds)), kinds if is_left else [""] * len(kinds), fontsize=9)
        axes.grid(False)
        axes.tick_params(length=0)
        axes.set_title(f"{names[provider]} over {names[peer]}", loc="left", fontweight="bold")
        axes.set_xlabel("Keys per sequence" if rows[0].sweep == "decode" else "Sequence length S")
    for axes in panels[len(tables) :]:
        axes.set_visible(False)
    bar = figure.colorbar(
        ScalarMappable(norm, colours), ax=list(panels), shrink=0.5, aspect=28, ticks=[-1, 0, 1], label="speed ratio"
    )
    bar.ax.set_yticklabels(["1/2 or less", "1", "2 or more"])
    first = rows[0]
    run = f"{first.dtype}; {first.env.device}, torch {first.env.torch}"
    title = f"Speed ratio: above 1, in orange, the first is faster\n{run}"
    add_title(figure, title)
    return save(figure, csv_path, f"{_stem(csv_path, rows)}_ratios.png")


def heat_cells(rows: Sequence[Row]) -> dict[tuple[str, int], Row]:
    """The rows of one provider by their line and column of a heat map."""
    return join.unique(rows, lambda row: (_heat_line(row), row.seqlen_k))


def _heat_line(row: Row) -> str:
    if row.sweep == "decode":
        return f"B={row.batch}"
    return f"{row.direction} d={row.head_dim} {'causal' if row.is_causal else 'full'}"


# Files


def save(figure: Any, csv_path: Path, name: str) -> Path:
    path, metadata = csv_path.with_name(name), {SOURCE_KEY: csv_path.name, HASH_KEY: sha256(csv_path), "Software": None}
    with files.replacing(path) as beside:
        figure.savefig(beside, dpi=130, format="png", metadata=metadata)
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def metadata(path: Path) -> dict[str, str]:
    """The text entries of a PNG."""
    data, found, at = path.read_bytes(), {}, 8
    while at + 8 <= len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind == b"tEXt":
            key, _, text = data[at + 8 : at + 8 + size].partition(b"\0")
            found[key.decode("latin-1")] = text.decode("latin-1")
        at += 12 + size
    return found


def is_current(path: Path) -> bool:
    """True if the figure exists and was drawn from the present contents of its CSV."""
    if not path.exists():
        return False
    entries = metadata(path)
    source = path.with_name(entries.get(SOURCE_KEY, "?"))
    return source.exists() and entries.get(HASH_KEY) == sha256(source)
