"""The figures of a CSV. Each PNG names its CSV and that file's hash in its metadata, so that a stale one can be told."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashtile.bench.compare import speedups
from flashtile.bench.rows import Row
from flashtile.errors import Unsupported, unsupported

SOURCE_KEY, HASH_KEY = "flashtile:csv", "flashtile:sha256"

# Okabe and Ito's colours: told apart with every kind of colour vision
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
    "eager": (_BLACK, ":", "."),
    "compiled": (_GREEN, "--", "."),
    "flex": (_GREY, "--", "."),
    "flash-attn-2": (_BLUE, "--", "."),
    "flash-attn-3": (_PINK, "--", "."),
    "flash-attn-4": (_PINK, "-", "."),
    "xformers": (_SKY, "--", "."),
    "flashinfer": (_SKY, ":", "."),
}
_PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}

Value = Callable[[Row], "float | None"]
End = tuple[float, float, str, str, bool]  # y, x, provider, colour, is ours


def require_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise unsupported(
            "plots", "no matplotlib", "an installed one", "The CSV is complete; pip install 'flashtile[bench]' draws the figures"
        )


def draw(csv_path: Path, rows: Sequence[Row]) -> list[Path]:
    """Every figure of a run, beside its CSV."""
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context(look()):
        timed = [row for row in rows if row.is_ok]
        if not timed:
            raise Unsupported("plots: no row was measured; there is nothing to draw. The reasons stand in the CSV.")
        if timed[0].sweep == "Lsweep":
            return _length_figures(csv_path, timed)
        return _grid_figures(csv_path, timed)


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
    problem = f"B={first.batch} {heads} d={first.head_dim} {first.dtype}{' causal' if first.is_causal else ''}, {_PASSES[first.direction]}"
    suffix = "_" + csv_path.stem.removeprefix("sdpa_Lsweep_")
    suffix = suffix.replace("_B1_H1_d64_fp32", "", 1)
    figures: list[tuple[str, str, Value]] = [
        ("latency", "Time per call (ms)", lambda row: row.median_ms),
        ("memory", "Peak memory over the inputs (MiB)", lambda row: None if row.memory_bytes is None else row.memory_bytes / 2**20),
        ("throughput", "Throughput (TFLOP/s)", lambda row: row.tflops),
    ]
    from matplotlib.figure import Figure

    written = []
    for what, label, value in figures:
        figure = Figure(figsize=(8.4, 5.0), layout="constrained")
        axes = figure.add_subplot()
        has_band = what == "latency"
        ends = _lines(axes, rows, value, has_band)
        axes.set_ylabel(label)
        axes.set_xlabel("Sequence length L")
        axes.set_title(f"{label.partition(' (')[0]} against sequence length: {problem}\n", loc="left", fontweight="bold")
        note = "median, band p20 to p80" if has_band else ""
        _caption(axes, first, note)
        label_ends(axes, ends)
        written.append(save(figure, csv_path, f"{what}_vs_L{suffix}.png"))
    return written


def _caption(axes: Any, row: Row, note: str = "") -> None:
    texts = [row.env.device, f"torch {row.env.torch}", f"{row.env.commit or 'no commit'}{', changed' if row.env.is_dirty else ''}", note]
    axes.text(0, 1.015, "; ".join(filter(None, texts)), transform=axes.transAxes, fontsize=8.5, color="#555555")


def _lines(axes: Any, rows: Sequence[Row], value: Value, has_band: bool = False) -> list[End]:
    """One line for each provider on log axes; returns the lines' ends, to be labelled when all axes are final."""
    ends: list[End] = []
    lengths = sorted({row.seqlen_k for row in rows})
    for name in dict.fromkeys(row.provider for row in rows):
        own = sorted((row for row in rows if row.provider == name and value(row)), key=lambda row: row.seqlen_k)
        if not own:
            continue
        colour, line, marker = _STYLES.get(name, (_GREY, "-.", "."))
        is_ours = not own[0].is_baseline
        xs, ys = [row.seqlen_k for row in own], [value(row) or 0.0 for row in own]
        width = 2.6 if is_ours else 1.5
        axes.plot(
            xs, ys, color=colour, linestyle=line, marker=marker, linewidth=width, markersize=6 if is_ours else 5, zorder=3 if is_ours else 2
        )
        if has_band:
            axes.fill_between(
                xs, [row.p20_ms or 0.0 for row in own], [row.p80_ms or 0.0 for row in own], color=colour, alpha=0.15, linewidth=0
            )
        ends.append((ys[-1], xs[-1], name, colour, is_ours))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    return ends


def _plain_ticks(axes: Any) -> None:
    """1, 2, 5 and their tens, as plain numbers; at least about two of them on a short axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = axes.get_ylim()
    decades = high / low
    digits = (1, 2, 5) if decades < 300 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=digits, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def label_ends(axes: Any, ends: Sequence[End]) -> None:
    """Names right of the lines' ends, pushed apart where they would overlap, each tied to its line."""
    if not ends:
        return
    _plain_ticks(axes)
    figure = axes.figure
    figure.draw_without_rendering()
    height = axes.get_window_extent().height / figure.dpi * 72  # in points
    gap = 12.5 / height
    to_axes = axes.transData + axes.transAxes.inverted()
    ordered = sorted(ends)
    wanted = [float(to_axes.transform((x, y))[1]) for y, x, *_ in ordered]
    places = spread(wanted, gap)
    for (y, x, name, colour, is_ours), place in zip(ordered, places, strict=True):
        axes.annotate(
            name,
            xy=(x, y),
            xycoords="data",
            xytext=(1.045, place),
            textcoords="axes fraction",
            color=colour,
            fontsize=9.5,
            fontweight="bold" if is_ours else "normal",
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 1, "shrinkB": 3},
        )


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Sorted places moved as little as possible so that neighbours are at least a gap apart."""
    groups: list[list[float]] = []  # sum of (wanted - own offset), count
    for place in wanted:
        groups.append([place, 1])
        while len(groups) > 1 and _top(groups[-2], gap) > _bottom(groups[-1], gap) - gap + 1e-12:
            total, count = groups.pop()
            groups[-1] = [groups[-1][0] + total, groups[-1][1] + count]
    found = []
    for group in groups:
        found += [_bottom(group, gap) + index * gap for index in range(int(group[1]))]
    return found


def _bottom(group: Sequence[float], gap: float) -> float:
    return group[0] / group[1] - gap * (group[1] - 1) / 2


def _top(group: Sequence[float], gap: float) -> float:
    return _bottom(group, gap) + gap * (group[1] - 1)


# Grids


def _grid_figures(csv_path: Path, rows: Sequence[Row]) -> list[Path]:
    if rows[0].sweep == "decode":
        written = [_decode_figure(csv_path, rows)]
    else:
        written = [_small_multiples(csv_path, rows, head_dim) for head_dim in sorted({row.head_dim for row in rows})]
    heat = _heat_maps(csv_path, rows)
    return written if heat is None else [*written, heat]


def _small_multiples(csv_path: Path, rows: Sequence[Row], head_dim: int) -> Path:
    """Throughput over the length for one head_dim: passes below each other, masks side by side."""
    from matplotlib.figure import Figure

    here = [row for row in rows if row.head_dim == head_dim]
    passes, masks = list(dict.fromkeys(row.direction for row in here)), sorted({row.is_causal for row in here})
    figure = Figure(figsize=(6.2 * len(masks), 3.9 * len(passes) + 0.6), layout="constrained")
    panels = figure.subplots(len(passes), len(masks), squeeze=False, sharey="row")
    ends: list[tuple[Any, list[End]]] = []
    for panel_row, direction in zip(panels, passes, strict=True):
        for axes, is_causal in zip(panel_row, masks, strict=True):
            own = [row for row in here if row.direction == direction and row.is_causal == is_causal]
            ends.append((axes, _lines(axes, own, lambda row: row.tflops)))
            axes.set_title(f"{_PASSES[direction]}, {'causal' if is_causal else 'full'}", loc="left")
            axes.set_xlabel("Sequence length L")
        panel_row[0].set_ylabel("Throughput (TFLOP/s)")
    for axes, own_ends in ends:
        label_ends(axes, own_ends)
    first = here[0]
    figure.suptitle(
        f"d={head_dim} {first.dtype}, H={first.heads}, B*L={first.batch * first.seqlen_k}; {first.env.device}, torch {first.env.torch}",
        x=0.01, ha="left", fontweight="bold",
    )  # fmt: skip
    return save(figure, csv_path, f"{csv_path.stem.removeprefix('sdpa_')}_d{head_dim}.png")


def _decode_figure(csv_path: Path, rows: Sequence[Row]) -> Path:
    """Bandwidth over the cache's length, one panel for each batch."""
    from matplotlib.figure import Figure

    batches = sorted({row.batch for row in rows})
    columns = min(2, len(batches))
    lines = -(-len(batches) // columns)
    figure = Figure(figsize=(6.2 * columns, 3.6 * lines + 0.6), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    ends: list[tuple[Any, list[End]]] = []
    for axes, batch in zip(panels, batches, strict=False):
        ends.append((axes, _lines(axes, [row for row in rows if row.batch == batch], lambda row: row.gb_per_s)))
        axes.set_title(f"B={batch}", loc="left")
        axes.set_xlabel("Keys per sequence")
        axes.set_ylabel("Bandwidth (GB/s)")
    for axes, own_ends in ends:
        label_ends(axes, own_ends)
    for axes in panels[len(batches) :]:
        axes.set_visible(False)
    first = rows[0]
    problem = f"H={first.heads}/{first.heads_kv} d={first.head_dim} {first.dtype}"
    figure.suptitle(f"Decoding, one query: {problem}; {first.env.device}, torch {first.env.torch}", x=0.01, ha="left", fontweight="bold")
    return save(figure, csv_path, f"{csv_path.stem.removeprefix('sdpa_')}.png")


def _heat_maps(csv_path: Path, rows: Sequence[Row]) -> Path | None:
    """Speed ratios at every point: each of ours over each peer, or, where none of ours ran, everyone over `sdpa`."""
    import numpy as np
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    names = dict.fromkeys(row.provider for row in rows)
    ours = list(dict.fromkeys(row.provider for row in rows if not row.is_baseline))
    pairs = (
        [(one, peer) for one in ours for peer in names if peer not in ours] if ours else [(one, "sdpa") for one in names if one != "sdpa"]
    )
    tables = {pair: found for pair in pairs if (found := speedups(rows, *pair))}
    if not tables:
        return None
    lengths = sorted({row.seqlen_k for row in rows})
    kinds = list(dict.fromkeys(_heat_line(row) for row in rows))
    columns = min(4, len(tables))
    lines = -(-len(tables) // columns)
    figure = Figure(figsize=(2.4 + (0.6 + 0.52 * len(lengths)) * columns, 0.9 + (0.7 + 0.32 * len(kinds)) * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    norm = TwoSlopeNorm(0.0, -1.5, 1.5)
    for axes, ((provider, peer), found) in zip(panels, tables.items(), strict=False):
        values = np.full((len(kinds), len(lengths)), np.nan)
        for row in rows:
            if row.provider == provider and row.point in found:
                values[kinds.index(_heat_line(row)), lengths.index(row.seqlen_k)] = found[row.point]
        axes.imshow(np.log2(values), cmap="PuOr", norm=norm, aspect="auto")
        for (line, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                shade = "white" if abs(np.log2(value)) > 0.75 else "black"
                axes.text(column, line, f"{value:.2f}", ha="center", va="center", fontsize=8.5, color=shade)
        axes.set_xticks(range(len(lengths)), [f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in lengths])
        is_left = axes.get_subplotspec().is_first_col()
        axes.set_yticks(range(len(kinds)), kinds if is_left else [""] * len(kinds), fontsize=9)
        axes.grid(False)
        axes.tick_params(length=0)
        axes.set_title(f"{provider} over {peer}", loc="left", fontweight="bold")
    for axes in panels[len(tables) :]:
        axes.set_visible(False)
    bar = figure.colorbar(ScalarMappable(norm, "PuOr"), ax=list(panels), shrink=0.5, aspect=28, ticks=[-1, 0, 1], label="times as fast")
    bar.ax.set_yticklabels(["1/2", "1", "2"])
    first = rows[0]
    figure.suptitle(f"Speed ratios, {first.dtype}; {first.env.device}, torch {first.env.torch}", x=0.01, ha="left", fontweight="bold")
    return save(figure, csv_path, f"{csv_path.stem.removeprefix('sdpa_')}_ratios.png")


def _heat_line(row: Row) -> str:
    if row.sweep == "decode":
        return f"B={row.batch}"
    return f"{row.direction} d={row.head_dim} {'causal' if row.is_causal else 'full'}"


# Files


def save(figure: Any, csv_path: Path, name: str) -> Path:
    path = csv_path.with_name(name)
    figure.savefig(path, dpi=130, metadata={SOURCE_KEY: csv_path.name, HASH_KEY: sha256(csv_path), "Software": None})
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
    """Whether a figure exists and was drawn from its CSV as that file is now."""
    if not path.exists():
        return False
    entries = metadata(path)
    source = path.with_name(entries.get(SOURCE_KEY, "?"))
    return source.exists() and entries.get(HASH_KEY) == sha256(source)
