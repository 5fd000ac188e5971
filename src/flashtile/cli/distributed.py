"""`flashtile distributed simulate`: predictions for many GPUs, written, drawn and shown; and runs on this CPU over slow
links beside what the model says of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from flashtile.bench import plots
from flashtile.bench.files import replacing, writable_folder
from flashtile.bench.tables import Table
from flashtile.bench.terminal import make_console, say_files, show
from flashtile.distributed import simulate
from flashtile.distributed.cost import LINKS, measured_device
from flashtile.distributed.simulate import Comparison, Point
from flashtile.errors import value_error

_NAME = "distributed_simulation"


@dataclass(frozen=True)
class Options:
    ranks: str
    rows: str
    links: str
    heads: int
    heads_kv: int
    head_dim: int
    is_causal: bool
    is_measured: bool
    out: Path | None
    as_json: bool


def prepare(options: Options) -> Callable[[], int]:
    ranks, rows = _numbers("--ranks", options.ranks), _numbers("--rows", options.rows)
    links = [name.strip() for name in options.links.split(",")]
    for name in links:
        if name not in LINKS:
            raise value_error("--links", repr(name), ", ".join(LINKS))
    if options.heads < 1 or options.heads_kv < 1 or options.heads % options.heads_kv:
        raise value_error("--heads", f"{options.heads} over {options.heads_kv}", "a multiple of --heads-kv")
    if not 1 <= options.head_dim <= 512:
        raise value_error("--head-dim", options.head_dim, "1 to 512")
    folder = None if options.out is None else writable_folder(options.out)

    def run() -> int:
        console = make_console(options.as_json)
        if options.is_measured:
            compared = simulate.compare_with_runs()
            _show_runs(console, compared)
            if options.as_json:
                print(json.dumps([asdict(one) | {"ratio": one.ratio} for one in compared]))
            return 0
        device = measured_device("cuda", torch.bfloat16, options.head_dim, options.head_dim)
        sizes = (options.heads, options.heads_kv, options.head_dim)
        points = simulate.sweep(ranks, rows, links, device, *sizes, options.is_causal)
        console.print(
            f"{device.name}: {device.forward_flops / 1e12:.0f} TFLOP/s forward, "
            f"{device.backward_flops / 1e12:.0f} backward; bfloat16, {options.heads} query heads, "
            f"{options.heads_kv} key heads, head dim {options.head_dim}"
        )
        _show_points(console, points)
        if folder is not None:
            say_files(console, _write(folder, points))
        if options.as_json:
            print(json.dumps([asdict(point) for point in points]))
        return 0

    return run


def _numbers(name: str, text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise value_error(name, repr(text), "integers, separated by commas") from None
    if min(found) < 1:
        raise value_error(name, repr(text), "integers of 1 or more")
    return found


def _show_points(console: Console, points: Sequence[Point]) -> None:
    header = ("link", "GPUs", "tokens", "strategy", "ms", "compute ms", "overlap", "sent GB", "memory GB")
    lines = tuple(
        (
            point.link,
            str(point.num_ranks),
            f"{point.seqlen:,}",
            point.strategy,
            f"{1e3 * point.total_s:.1f}",
            f"{1e3 * point.compute_s:.1f}",
            f"{point.overlap:.0%}",
            f"{point.sent_bytes / 1e9:.2f}",
            f"{point.memory_bytes / 1e9:.2f}",
        )
        for point in points
    )
    show(console, Table("Forward and backward pass of one layer, predicted", header, lines))


def _show_runs(console: Console, runs: Sequence[Comparison]) -> None:
    header = ("pass", "ranks", "rows of each", "link MB/s", "measured ms", "predicted ms", "ratio")
    lines = tuple(
        (
            run.op,
            str(run.num_ranks),
            str(run.rows),
            f"{run.megabytes_per_s:g}",
            f"{1e3 * run.measured_s:.1f}",
            f"{1e3 * run.predicted_s:.1f}",
            f"{run.ratio:.2f}",
        )
        for run in runs
    )
    show(console, Table("Ring attention on this CPU, measured and predicted", header, lines))


def _write(folder: Path, points: Sequence[Point]) -> list[Path]:
    path = folder / f"{_NAME}.csv"
    with replacing(path) as beside, beside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(points[0])))
        writer.writeheader()
        writer.writerows(asdict(point) for point in points)
    return [path, _draw(path, points)]


def _draw(path: Path, points: Sequence[Point]) -> Path:
    """Overlap and time over the length of the sequence, a panel for each link, a line for each strategy and number of
    rows."""
    plots.require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    links = list(dict.fromkeys(point.link for point in points))
    with matplotlib.rc_context(plots.look()):
        figure = Figure(figsize=(4.2 * len(links), 6.4), layout="constrained")
        panels = figure.subplots(2, len(links), squeeze=False, sharex=True, sharey="row")
        for column, link in enumerate(links):
            here = [point for point in points if point.link == link]
            for key in dict.fromkeys((point.strategy, point.seqlen // point.num_ranks) for point in here):
                line = [p for p in here if (p.strategy, p.seqlen // p.num_ranks) == key]
                label = f"{key[0]}, {key[1]:,} tokens a GPU"
                tokens, style = [p.seqlen for p in line], "-" if key[0] == "ring" else "--"
                panels[0][column].plot(tokens, [100 * p.overlap for p in line], style, marker="o", label=label)
                panels[1][column].plot(tokens, [1e3 * p.total_s for p in line], style, marker="o", label=label)
            panels[0][column].set_title(link)
            panels[1][column].set_xlabel("tokens")
            panels[1][column].set_xscale("log", base=2)
            panels[1][column].set_yscale("log")
        panels[0][0].set_ylabel("messages hidden, %")
        panels[1][0].set_ylabel("forward + backward, ms")
        panels[1][0].legend()
        return plots.save(figure, path, f"{_NAME}.png")
