"""`flashtile distributed simulate`: predictions for many GPUs, written, drawn and shown; and runs on this CPU over slow
links beside what the model says of them. `flashtile distributed check`: errors over ranks of this machine."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch

from flashtile.cli.options import RanksOptions, SimulateOptions
from flashtile.distributed import exactness, simulate
from flashtile.distributed.cost import LINKS, measured_device
from flashtile.distributed.exactness import Exactness
from flashtile.distributed.simulate import Comparison, Point
from flashtile.errors import value_error
from flashtile.lab.bench import device as facts
from flashtile.lab.bench import plots
from flashtile.lab.bench.files import replacing, writable_folder, write_whole
from flashtile.lab.bench.tables import Table, number
from flashtile.lab.bench.terminal import make_console, say_files, show

_NAME = "distributed_simulation"
_STYLES = {"ring": ("#D55E00", "o"), "ulysses": ("#0072B2", "D")}  # strategy -> colour, marker


def prepare(options: SimulateOptions, arguments: Sequence[str]) -> Callable[[], int]:
    ranks, rows = _numbers("--ranks", options.ranks), _numbers("--rows", options.rows)
    links = [name.strip() for name in options.links.split(",")]
    for name in links:
        if name not in LINKS:
            raise value_error("--links", repr(name), ", ".join(LINKS))
    if options.heads < 1 or options.heads_kv < 1 or options.heads % options.heads_kv:
        raise value_error("--heads", f"{options.heads} over {options.heads_kv}", "a multiple of --heads-kv")
    if not 1 <= options.head_dim <= 512:
        raise value_error("--head-dim", str(options.head_dim), "1 to 512")
    folder = None if options.out is None else writable_folder(options.out)

    def run() -> int:
        console = make_console(options.as_json)
        if options.is_measured:
            compared = simulate.compare_with_runs()
            table = _runs_table(compared)
            show(console, table)
            if folder is not None:
                say_files(console, [_write_table(folder / "distributed_slow_link.json", table, "cpu", arguments)])
            if options.as_json:
                print(json.dumps([asdict(one) for one in compared]))
            return 0
        device = measured_device("cuda", torch.bfloat16, options.head_dim, options.head_dim)
        sizes = (options.heads, options.heads_kv, options.head_dim)
        points = simulate.sweep(ranks, rows, links, device, *sizes, not options.is_full)
        console.print(
            f"{device.name}: {device.forward_flops / 1e12:.0f} TFLOP/s forward, "
            f"{device.backward_flops / 1e12:.0f} backward; bfloat16, {options.heads} query heads, "
            f"{options.heads_kv} key heads, head dim {options.head_dim}"
        )
        table = _points_table(points)
        show(console, table)
        if folder is not None:
            written = _write_table(folder / f"{_NAME}.json", table, "cpu", arguments)
            say_files(console, [*_write(folder, points), written])
        if options.as_json:
            print(json.dumps([asdict(point) for point in points]))
        return 0

    return run


def prepare_check(options: RanksOptions, arguments: Sequence[str]) -> Callable[[], int]:
    """Exit status 1 if a result breaks the error rule."""
    ranks = _numbers("--ranks", options.ranks)
    for name, value, accepted in (
        ("--device", options.device, ("cpu", "cuda")),
        ("--backend", options.backend, ("gloo", "nccl")),
    ):
        if value not in accepted:
            raise value_error(name, repr(value), " or ".join(accepted))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise value_error("--device", "'cuda' without a GPU", "cpu")
    if options.backend == "nccl" and options.device == "cpu":
        raise value_error("--backend", "'nccl' on a CPU", "gloo")
    if options.seconds is not None and not options.seconds >= 0:  # NaN is not
        raise value_error("--seconds", str(options.seconds), "0 or more")
    folder = None if options.out is None else writable_folder(options.out)

    def run() -> int:
        console = make_console(options.as_json)
        found = [
            one
            for count in ranks
            for one in exactness.check(
                count, options.device, options.backend, seed=options.seed, seconds=options.seconds
            )
        ]
        table = _exactness_table(found, options)
        show(console, table)
        wrong = [one for one in found if one.complaints]
        for one in wrong:
            console.print(f"{one.case}, {one.way}, {one.num_ranks} ranks: {'; '.join(one.complaints)}", markup=False)
        console.print(f"{len(found)} results, {len(wrong)} break the error rule")
        if folder is not None:
            name = f"distributed_exactness{'' if options.backend == 'gloo' else '_nccl'}.json"
            say_files(console, [_write_table(folder / name, table, options.device, arguments)])
        if options.as_json:
            print(json.dumps([asdict(one) for one in found]))
        return 1 if wrong else 0

    return run


def _exactness_table(found: Sequence[Exactness], options: RanksOptions) -> Table:
    """The largest error of all ways, by case and number of ranks."""
    sizes = list(dict.fromkeys(one.num_ranks for one in found))
    columns = ("yardstick", *(str(size) for size in sizes))
    header = ("case", *(f"{what}: {column}" for what in ("out", "gradients") for column in columns))
    lines = []
    for case in dict.fromkeys(one.case for one in found):
        here = [one for one in found if one.case == case]
        words = [case]
        for error, yardstick in (("out_error", "out_yardstick"), ("grad_error", "grad_yardstick")):
            words.append(f"{getattr(here[0], yardstick):.1e}")
            for size in sizes:
                errors = [getattr(one, error) for one in here if one.num_ranks == size]
                words.append(f"{max(errors):.1e}" if errors else "")
        lines.append(tuple(words))
    title = f"Largest errors against the float64 oracle of one process, by ranks; {options.device}, {options.backend}"
    return Table(title, header, tuple(lines))


def _write_table(path: Path, table: Table, device: str, arguments: Sequence[str]) -> Path:
    """Writes the table as tools/make_docs.py reads it."""
    environment = asdict(facts.environment(device, arguments))
    shown = {"header": table.header, "rows": table.lines}
    write_whole(path, json.dumps({"table": shown, "environment": environment}, indent=1) + "\n")
    return path


def _numbers(name: str, text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise value_error(name, repr(text), "integers, separated by commas") from None
    if min(found) < 1:
        raise value_error(name, repr(text), "integers of 1 or more")
    return found


def _points_table(points: Sequence[Point]) -> Table:
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
    return Table("Forward and backward pass of one layer, predicted", header, lines)


def _runs_table(runs: Sequence[Comparison]) -> Table:
    header = ("pass", "ranks", "rows of each", "message / compute", "link MB/s", "measured ms", "predicted ms", "ratio")
    lines = tuple(
        (
            run.op,
            str(run.num_ranks),
            str(run.rows),
            f"{run.share:g}",
            f"{run.megabytes_per_s:.0f}",
            f"{1e3 * run.measured_s:.1f}",
            f"{1e3 * run.predicted_s:.1f}",
            f"{run.ratio:.2f}",
        )
        for run in runs
    )
    return Table("Ring attention on this CPU, measured and predicted", header, lines)


def _write(folder: Path, points: Sequence[Point]) -> list[Path]:
    path = folder / f"{_NAME}.csv"
    with replacing(path) as beside, beside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(points[0])))
        writer.writeheader()
        writer.writerows(asdict(point) for point in points)
    return [path, _draw(path, points)]


def redraw(path: Path) -> Path:
    """The figure of a CSV."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = {"int": int, "float": float, "str": str}
    return _draw(path, [Point(**{f.name: kinds[str(f.type)](row[f.name]) for f in fields(Point)}) for row in rows])


@plots.drawing()
def _draw(path: Path, points: Sequence[Point]) -> Path:
    """Overlap and time for each number of GPUs and tokens, a column of panels for each link."""
    links = list(dict.fromkeys(point.link for point in points))
    sizes = sorted({(point.seqlen, point.num_ranks) for point in points})
    strategies = {name: _STYLES[name] for name in _STYLES if any(point.strategy == name for point in points)}
    figure = plots.new_figure(4.2 * len(links), 6.8)
    panels = figure.subplots(2, len(links), squeeze=False, sharex=True, sharey="row")
    for column, link in enumerate(links):
        for index, (strategy, (colour, marker)) in enumerate(strategies.items()):
            here = [point for point in points if point.link == link and point.strategy == strategy]
            places = [sizes.index((point.seqlen, point.num_ranks)) + 0.36 * (index - 0.5) for point in here]
            hidden, times = [100 * point.overlap for point in here], [1e3 * point.total_s for point in here]
            bars = panels[0][column].bar(places, hidden, 0.34, color=colour, label=strategy)
            panels[0][column].bar_label(bars, [f"{value:.0f}" for value in hidden], fontsize=8.5)
            panels[1][column].plot(places, times, marker, color=colour, markersize=8)
            for place, time in zip(places, times, strict=True):
                at = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 8.5}
                panels[1][column].annotate(number(time), (place, time), **at)
        panels[0][column].set_title(link)
        panels[1][column].set_yscale("log")
        panels[1][column].margins(y=0.12)
        panels[1][column].set_xticks(
            range(len(sizes)), [f"{ranks:,} x\n{length // ranks:,}" for length, ranks in sizes], fontsize=9.5
        )
        panels[1][column].set_xlabel("GPUs x tokens of each")
        for axes in panels[:, column]:
            axes.grid(False, axis="x")
    panels[0][0].set_ylabel("communication hidden (%)")
    panels[0][0].set_ylim(0, 110)
    panels[1][0].set_ylabel("forward + backward (ms)")
    words = " and ".join(strategies)
    title = f"Attention over GPUs by {words}, simulated from the measured speed of one NVIDIA H200"
    plots.add_title(figure, title)
    bars_, names = panels[0][0].get_legend_handles_labels()
    figure.legend(bars_, names, loc="outside lower center", ncols=len(names))
    return plots.save(figure, path, f"{_NAME}.png")
