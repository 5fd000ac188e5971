"""The sections of the page. Tables are HTML; charts are data that page.js draws."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from flashtile.lab.bench import join, ratio_colours
from flashtile.lab.bench import tables as bench_tables
from flashtile.lab.bench.points import DIRECTIONS
from flashtile.lab.bench.rows import Environment, Row
from flashtile.lab.bench.tables import Table, number
from flashtile.lab.ladder import tables as ladder_tables
from flashtile.lab.ladder.rows import RungRow
from flashtile.lab.ladder.rungs import DTYPES, Rung, rungs
from flashtile.lab.profile import ncu, timeline
from flashtile.lab.profile import tables as profile_tables
from flashtile.lab.report import charts
from flashtile.lab.report.collect import DeviceResults, ResultCsv
from flashtile.lab.report.summary import marked, summary
from flashtile.lab.tiles import tables as tile_tables
from flashtile.markup import DARK_VARIABLES, VARIABLES, Raw, escape, page, table
from flashtile.version import __version__

_FOLDER = Path(__file__).resolve().parent
_TITLE = "flashtile: measured"


def build(devices: Sequence[DeviceResults]) -> str:
    """The whole page."""
    parts = [_device(device, index) for index, device in enumerate(devices)]
    choices = "".join(
        f'<button type="button" data-device="{index}" aria-pressed="{"true" if index == 0 else "false"}">'
        f"{escape(device.title)}</button>"
        for index, device in enumerate(devices)
    )
    body = f"""<header>
<h1>flashtile <small>{escape(__version__)}</small></h1>
<p>Attention from the memory hierarchy upward: times, memory, errors and hardware counters, as measured.</p>
<div class="bar devices" role="group" aria-label="Device">{choices}</div>
<button type="button" id="theme" aria-label="Switch between light and dark">◐ light / dark</button>
</header>
<main>{"".join(parts)}</main>
<footer>Every number is from a file under <code>results/</code>; the tables of sources name the commands.
Written by <code>flashtile report</code>.</footer>"""
    style = (_FOLDER / "page.css").read_text(encoding="utf-8")
    style = f":root[data-theme=light] {{{VARIABLES}}}\n:root[data-theme=dark] {{{DARK_VARIABLES}}}\n{style}"
    return page(_TITLE, body, style, (_FOLDER / "page.js").read_text(encoding="utf-8"))


def _device(device: DeviceResults, index: int) -> str:
    sections = [
        ("summary", "Summary", _summary(device)),
        ("curves", "Time, throughput and memory", _curves(device)),
        ("ratios", "Speed ratios", _ratios(device)),
        ("decode", "Decoding", _decode(device)),
        ("options", "Options and unusual shapes", _options(device)),
        ("profile", "Counters of each kernel", _profiles(device)),
        ("timelines", "Timelines of a block", _timelines(device)),
        ("memory", "Bytes through device memory", _memory(device)),
        ("ladder", "The ladder", _ladder(device)),
        ("tiles", "Tiles against occupancy", _tiles(device)),
        ("host", "Host time and first calls", _host(device)),
        ("accuracy", "Accuracy", _accuracy(device)),
        ("machine", "Machine, versions, commands", _machine(device)),
    ]
    present = [(f"{name}-{index}", title, body) for name, title, body in sections if body]
    links = "".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in present)
    body = "".join(f'<section id="{key}"><h2>{escape(title)}</h2>{text}</section>' for key, title, text in present)
    return (
        f'<article data-device="{index}" aria-label="{escape(device.title)}">'
        f'<nav aria-label="Sections">{links}</nav>{body}</article>'
    )


def _chart(chart: charts.Chart | None, label: str) -> str:
    """The data of a chart, and where it is drawn."""
    if chart is None:
        return ""
    data = json.dumps(chart, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<figure class="chart" data-label="{escape(label)}"><script type="application/json">{data}</script>'
        "<noscript>The chart needs JavaScript; the tables do not.</noscript></figure>"
    )


def _panels(found: dict[str, str], label: str) -> str:
    """Parts of which one is shown at a time."""
    if not found:
        return ""
    parts = "".join(f'<div data-panel="{escape(name)}">{text}</div>' for name, text in found.items())
    return f'<div class="panels" data-label="{escape(label)}">{parts}</div>'


def _table(shown: Table) -> str:
    return table(shown.header, shown.lines, shown.title) if shown.lines else ""


def _details(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""


def _plain(device: DeviceResults) -> list[ResultCsv]:
    """The sweeps over the length: grids before single problems, those with our kernels first, forward passes first."""
    found = [one for one in device.of("sdpa_") if one.rows[0].sweep in ("Lsweep", "paper")]

    def rank(one: ResultCsv) -> tuple[bool, bool, int]:
        first = one.rows[0]
        is_without_ours = all(row.is_baseline for row in one.rows)
        return first.sweep != "paper", is_without_ours, list(DIRECTIONS).index(first.direction)

    return sorted(found, key=rank)


# Sections


def _summary(device: DeviceResults) -> str:
    """Speeds against the fastest peer, with the remarks on the files that they are of."""
    files = [*_plain(device), *(one for one in device.of("sdpa_") if one not in _plain(device))]
    found = summary(files)
    return found + _notes(device, files) if found else ""


def _notes(device: DeviceResults, files: Sequence[ResultCsv]) -> str:
    """The remarks on files, from the notes.json beside them."""
    return "".join(
        f"<p><code>{escape(pattern)}</code>: {escape(text)}</p>"
        for pattern, text in device.notes.items()
        if any(fnmatch(one.stem, pattern) for one in files)
    )


def _curves(device: DeviceResults) -> str:
    files = _plain(device)
    chart = charts.curves(
        [(one.stem, one.rows) for one in files], ("throughput", "latency", "memory"), "sequence length"
    )
    single = "".join(
        _details(one.stem, _table(bench_tables.of(one.rows, "latency")) + _table(bench_tables.of(one.rows, "memory")))
        for one in files
    )
    return (_chart(chart, "Problem") + _details("All problems as tables", single)) if files else ""


def _ratios(device: DeviceResults) -> str:
    found = {}
    for one in [*_plain(device), *_of_sweep(device, "decode")]:
        for name, text in charts.heat_maps(one.rows).items():
            found[f"{name} ({one.stem})"] = text
    note = f"<p>How many times as fast the first is as the second: {ratio_colours.WORDS}.</p>"
    return note + _panels(found, "Pair") if found else ""


def _of_sweep(device: DeviceResults, sweep: str) -> list[ResultCsv]:
    return [one for one in device.of("sdpa_") if one.rows[0].sweep == sweep]


def _decode(device: DeviceResults) -> str:
    files = _of_sweep(device, "decode")
    chart = charts.curves([(one.stem, one.rows) for one in files], ("bandwidth", "latency"), "keys per sequence")
    note = "<p>One query per sequence over a long cache. Bandwidth is the least possible bytes over the time.</p>"
    return note + _chart(chart, "Batch") if chart else ""


def _options(device: DeviceResults) -> str:
    files = [*_of_sweep(device, "options"), *_of_sweep(device, "cpu")]
    return _notes(device, files) + "".join(_table(_marked(bench_tables.options_table(one.rows))) for one in files)


def _marked(shown: Table) -> Table:
    """The table with marks on the ratios below 1, in the last column."""
    lines = tuple((*cells, marked(last) if last else last) for *cells, last in shown.lines)
    return Table(shown.title, shown.header, lines)


def _profiles(device: DeviceResults) -> str:
    parts = []
    for one in device.of("profile_"):
        panels: dict[str, str] = {}
        for problem in dict.fromkeys(row.problem for row in one.rows):
            own = [row for row in one.rows if row.problem == problem]
            panels[profile_tables.problem_text(own[0])] = "".join(map(_table, profile_tables.tables(own)))
        missing = next((row.no_counters for row in one.rows if row.no_counters), "")
        note = f'<p class="soft">No counters: {escape(missing)}</p>' if missing else ""
        parts.append(
            f"<h3>{escape(one.stem.removeprefix('profile_').replace('_', ' '))}</h3>{note}"
            f"{''.join(map(_roofline, charts.profile_rooflines(one.rows)))}{_panels(panels, 'Problem')}"
        )
    return "".join(parts)


def _roofline(chart: charts.Chart) -> str:
    title = chart["title"]
    return (f"<h4>{escape(title)}</h4>" if title else "") + _chart(chart, "Memory")


def _timelines(device: DeviceResults) -> str:
    """Returns the section on what the warpgroups of a block do, clock by clock."""
    return "".join(
        f"<h3>{escape(one.kernel)}, {escape(one.problem)}</h3>{charts.timeline_picture(one)}"
        + _details("Median clocks of each phase", _table(timeline.table(one)))
        for one in sorted(device.timelines, key=lambda one: ("sm90" not in one.kernel, "fwd" not in one.kernel))
    )


def _memory(device: DeviceResults) -> str:
    return "".join(
        _chart(charts.hbm_chart(one.rows), "Problem") + _table(ladder_tables.hbm_table(one.rows))
        for one in device.of("ladder_hbm_")
    )


def _tiles(device: DeviceResults) -> str:
    note = "<p>A diamond is the tile that the kernel takes by default. A cross spills registers.</p>"
    found = "".join(
        _chart(charts.tiles_chart(one.rows), "Head dim")
        + _details(f"All tiles, {one.rows[0].dtype}", _table(tile_tables.study_table(one.rows)))
        for one in device.of("tiles_")
    )
    return note + found if found else ""


def _host(device: DeviceResults) -> str:
    overhead = "".join(
        f"<h3>{escape(one.stem)}</h3>" + _table(bench_tables.overhead_table(one.rows)) for one in device.of("overhead_")
    )
    cold = "".join(_table(bench_tables.cold_table(one.rows)) for one in device.of("cold_"))
    return overhead + cold


def _machine(device: DeviceResults) -> str:
    """The machines and versions that the files name, then the commit and the command of each file."""
    envs: dict[str, Environment] = {one.stem: one.env for one in device.all_files}
    machines = dict.fromkeys(
        (env.device, env.torch, env.cuda, env.cudnn, env.driver, env.triton, env.python) for env in envs.values()
    )
    found = table(
        ("device", "torch", "CUDA", "cuDNN", "driver", "Triton", "Python"), machines, "Machine", is_numeric=False
    )
    lines = [
        (
            stem,
            env.date[:10],
            f"{env.flashtile} {env.commit or 'unknown'}{' with changes' if env.is_dirty else ''}",
            Raw(f"<code>{escape(env.command)}</code>"),
        )
        for stem, env in envs.items()
    ]
    found += table(("file", "date", "flashtile", "command"), lines, "Files", is_numeric=False)
    if device.skipped:
        found += table(("file", "why it is not shown"), device.skipped, "Not shown", is_numeric=False)
    return f'<div class="files">{found}</div>'


# Accuracy


def _accuracy(device: DeviceResults) -> str:
    """The largest error of each provider over all its calls, and the records of checks."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for one in device.of("sdpa_"):
        for row in one.rows:
            if row.max_error is not None and row.yardstick_error:
                groups.setdefault((row.dtype, row.direction, row.provider), []).append(row)
    # A call with `backend=None` is `flashtile` in one file, the backend that it takes in another
    names = bench_tables.labels(provider for _, _, provider in groups)
    names |= {name: f"flashtile ({name})" for name in bench_tables.DEFAULT_BACKENDS if name in names}
    lines = []
    for (dtype, direction, provider), rows in sorted(groups.items()):
        worst = max(rows, key=lambda row: (row.max_error or 0.0) / (row.yardstick_error or 1.0))
        wrong = sum(row.is_accurate is False for row in rows)
        cells = (number(worst.max_error or 0.0), number(worst.yardstick_error or 0.0))
        ratio = number((worst.max_error or 0.0) / (worst.yardstick_error or 1.0))
        verdict = Raw(f'<span class="{"bad" if wrong else "good"}">{wrong}</span>')
        lines.append((f"{dtype} {direction} {names[provider]}", str(len(rows)), *cells, ratio, verdict))
    header = ("", "calls", "error there", "error of plain math there", "worst ratio", "inaccurate calls")
    shown = table(header, lines, "Largest error against float64, relative to plain math in the same dtype")
    return (shown if lines else "") + "".join(_record(name, found) for name, found in device.records.items())


def _record(name: str, found: dict[str, Any]) -> str:
    if name.startswith("check"):
        lines = [
            (backend, ran, sum(found["refused"].get(backend, {}).values()), found["failed"][backend])
            for backend, ran in found["ran"].items()
        ]
        header = ("backend", "ran", "refused", "failed")
        command = " --".join(["flashtile check", *name.split("_")[1:]])
        return table(header, lines, f"{command}: {found['problems']} random problems, seed {found['seed']}")
    if name == "mutations":
        faults = [
            (one["mutation"], one["what"], one["problems"] if one["found"] else "not found")
            for one in found["mutations"]
        ]
        shown = table(("fault", "what is wrong", "found after problems"), faults, is_numeric=False)
        return _details(f"Faults planted in the kernels: {len(faults)}", shown)
    tools = [
        (tool, one["clean"]["kernels"], one["clean"]["errors"], sum(run["errors"] for run in one["planted"].values()))
        for tool, one in found["tools"].items()
    ]
    title = "compute-sanitizer, simt kernels" if name == "sanitize_simt" else "compute-sanitizer"
    return table(("tool", "kernels", "reports", "reports with faults planted"), tools, title)


# The ladder


def _ladder(device: DeviceResults) -> str:
    """One panel for each rung: its notes and counters beside its source, in which new lines are marked."""
    kernel_files, time_files = device.of("ladder_kernels_"), device.of("ladder_")
    if not kernel_files or not time_files:
        return ""
    kernels: list[RungRow] = [row for one in kernel_files for row in one.rows]
    times: list[Row] = [row for one in time_files for row in one.rows]
    panels, before = dict[str, str](), None
    counted = _counted(kernels)
    for rung in rungs():
        panels[f"{rung.name[:2]} {rung.name[3:].replace('_', ' ')}"] = _rung(rung, before, counted)
        before = rung
    shown = ""
    for own in join.groups(sorted(kernels, key=lambda row: DTYPES.index(row.dtype)), lambda row: row.problem).values():
        shown += _table(ladder_tables.of(times, own, "ladder"))
        shown += _chart(charts.rung_roofline(own), "Memory")
    return _panels(panels, "Step") + shown


def _counted(kernels: Sequence[RungRow]) -> dict[str, RungRow]:
    """Full calls by rung. All rungs of a dtype are shown at one problem: the one with the most counters, of several the
    smallest."""
    found: dict[str, RungRow] = {}
    full = [kernel for kernel in kernels if not kernel.is_causal]
    for of_dtype in join.groups(full, lambda kernel: kernel.dtype).values():
        problems = join.groups(of_dtype, lambda kernel: kernel.problem)
        num_counted = {one: sum(row.dram_bytes is not None for row in rows) for one, rows in problems.items()}
        chosen = min(problems, key=lambda problem: (-num_counted[problem], problem))
        found |= join.unique(problems[chosen], lambda kernel: kernel.rung)
    return found


def _rung(rung: Rung, before: Rung | None, kernels: dict[str, RungRow]) -> str:
    notes = "".join(
        f"<dt>{word}</dt><dd>{escape(rung.note(word))}</dd>" for word in ("Changed", "Why", "Predicted", "Measured")
    )
    own, last = kernels.get(rung.name), None if before is None else kernels.get(before.name)
    code = _source(rung.source, "" if before is None else before.source)
    return (
        f'<div class="rung"><div><h3>{escape(rung.title)}</h3><dl>{notes}</dl>{_bars(own, last)}</div>'
        f'<pre tabindex="0" aria-label="Source of {escape(rung.name)}">{code}</pre></div>'
    )


def _source(text: str, before: str) -> str:
    """The source. Lines that the rung before does not have are marked."""
    old, new = before.splitlines(), text.splitlines()
    added = {
        index
        for kind, _, _, start, end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        if kind != "equal" and before
        for index in range(start, end)
    }
    return "\n".join(
        f"<mark>{escape(line) or ' '}</mark>" if index in added and not re.match(r"\s*//", line) else escape(line)
        for index, line in enumerate(new)
    )


def _bars(kernel: RungRow | None, before: RungRow | None) -> str:
    if kernel is None:
        return ""
    if before is not None and before.unit != kernel.unit:
        before = None
    values: list[tuple[str, Any]] = [
        (f"{kernel.unit} pipe busy", lambda one: one.unit_percent),
        ("shared memory", lambda one: one.shared_percent),
        ("L2", lambda one: one.l2_percent),
        ("occupancy", lambda one: 100 * (one.achieved_occupancy or one.occupancy)),
        (f"of the {kernel.unit} ceiling", lambda one: 100 * (one.tflops or 0.0) / one.ceiling_tflops),
    ]
    lines = []
    for name, value in values:
        own, last = value(kernel), None if before is None else value(before)
        if own is None:
            continue
        ghost = "" if last is None else f'<i style="width:{min(last, 100):.1f}%"></i>'
        bar = Raw(f'<span class="meter"><b style="width:{min(own, 100):.1f}%"></b>{ghost}</span>')
        lines.append((name, bar, f"{own:.3g} %", "" if last is None else f"{last:.3g} %"))
    title = f"d={kernel.head_dim}: {number(kernel.median_ms)} ms" if kernel.median_ms else ""
    if title and kernel.top_stall:  # counted
        title += f"; waits most for {ncu.stall_words(kernel.top_stall)}"
    return table(("", "", "here", "step before"), lines, title)
