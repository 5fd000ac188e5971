"""Fill README.md and the pages under docs/ from results/.

Everything between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->` is filled in. NAME is one of
- <folder>/<csv stem>:<table>, such as nvidia-h200/sdpa_Lsweep_B1_H1_d64_fp32:latency. Tables: latency, throughput,
  bandwidth, memory, accuracy, ratios, overhead; of the ladder: ladder, ladder-causal, counters, counters-causal,
  one-head, hbm; of the tile study: tiles; of a profile: profile; of a timeline: timeline; of any CSV: columns.
  `?column=pattern&...` behind a table of a sweep, or behind columns, chooses rows (csv_tables.py);
- <folder>/<figure>.png; its alternative text is written in the page and kept;
- rung/<name>: the notes at the head of that kernel of the ladder;
- <folder>/check*.json, mutations.json or sanitize*.json: the record of a check;
- <folder>/distributed_<what>.json: the table in it;
- families: the kernel families, from the code, and where each has run, from the records under results/;
- speeds: our speed beside that of the peers, with worst points (speed_table.py);
- environment: the variables of the environment, from the code.
The table between `<!-- support -->` and `<!-- /support -->` is compared with the code (support_table.py).
A figure whose CSV has changed is drawn again.

python tools/make_docs.py [--check | --redraw] [--root FOLDER]
    --check    change nothing; exit 1 where something is out of date
    --redraw   draw every figure again, as after a change of the drawing code
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import csv_tables
import speed_table
import support_table
import trace_ranks

from flashtile.backends import environment
from flashtile.cli import distributed as distributed_command
from flashtile.errors import value_error
from flashtile.lab.bench import plots, tables
from flashtile.lab.bench.rows import Environment, OverheadRow, Row, read
from flashtile.lab.ladder import figures as ladder_figures
from flashtile.lab.ladder import tables as ladder_tables
from flashtile.lab.ladder.rows import HbmRow, RungRow
from flashtile.lab.ladder.rungs import FOLDER
from flashtile.lab.ladder.rungs import read as read_rung
from flashtile.lab.profile import figures as profile_figures
from flashtile.lab.profile import tables as profile_tables
from flashtile.lab.profile import timeline
from flashtile.lab.profile.rows import KernelRow
from flashtile.lab.tiles import figures as tile_figures
from flashtile.lab.tiles import tables as tile_tables
from flashtile.lab.tiles.rows import TileRow

MARKED = re.compile(r"(<!-- bench:(?P<name>[^ ]+) -->\n)(?P<body>.*?)(<!-- /bench:(?P=name) -->)", re.DOTALL)
IMAGE = re.compile(r"!\[(?P<words>[^\]]+)\]\(")
OPENING = re.compile(r"^<!-- /?bench:[^ ]+ -->$", re.MULTILINE)


def pages(root: Path) -> list[Path]:
    return [path for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))) if path.exists()]


def fill(text: str, page: Path, results: Path) -> str:
    """The page with every marked part filled in again."""
    return MARKED.sub(lambda match: f"{match[1]}{part(match['name'], page, results, match['body'])}\n{match[4]}", text)


def part(name: str, page: Path, results: Path, before: str = "") -> str:
    """The text between the markers of that name. `before` is what the page has there now."""
    if name.endswith(".png"):
        figure, image = results / name, IMAGE.match(before)
        words = image["words"] if image else figure.stem.replace("_", " ")
        return f"![{words}]({os.path.relpath(figure, page.parent)})"
    if name.startswith("rung/"):
        rung = read_rung(FOLDER / f"{name.removeprefix('rung/')}.cu", None)
        return "\n\n".join(f"**{word}.** {rung.note(word)}" for word in ("Changed", "Why", "Predicted", "Measured"))
    if name == "families":
        return support_table.families_table()
    if name == "speeds":
        return speed_table.table(results, page)
    if name == "environment":
        return environment_tables()
    if name.endswith(".json"):
        return record(results / name)
    chosen = csv_tables.choice(name, results)
    path, kind = chosen.paths[0], chosen.kind
    if kind == "columns":
        table, environments = csv_tables.columns_table(chosen)
        return f"{table.markdown()}\n\n{csv_tables.origins(environments, origin)}"
    if kind in ladder_tables.KINDS:
        rows = named(read(path, Row))
        kernels = read(path.with_name(path.name.replace("ladder_", "ladder_kernels_")), RungRow)
        return titled(ladder_tables.of(rows, kernels, kind), rows[0].env)
    if kind == "hbm":
        hbm_rows = read(path, HbmRow)
        return titled(ladder_tables.hbm_table(hbm_rows), hbm_rows[0].env)
    if kind == "profile":
        kernel_rows = read(path, KernelRow)
        found = profile_tables.tables(kernel_rows)
        return "\n\n".join((*(f"{one.title}:\n\n{one.markdown()}" for one in found), origin(kernel_rows[0].env)))
    if kind == "timeline":
        marks = timeline.read(path.with_suffix(".json"))
        return titled(timeline.table(marks), marks.env)
    if kind == "tiles":
        tile_rows = read(path, TileRow)
        return titled(tile_tables.study_table(tile_rows), tile_rows[0].env)
    if kind == "overhead":
        overhead_rows = read(path, OverheadRow)
        return f"{tables.overhead_table(overhead_rows).markdown()}\n\n{origin(overhead_rows[0].env)}"
    rows = csv_tables.chosen_rows(chosen)
    found_table = tables.of(rows, kind)
    return (
        f"{found_table.title}:\n\n{found_table.markdown()}\n\n{csv_tables.origins([row.env for row in rows], origin)}"
    )


def named(rows: Sequence[Row]) -> list[Row]:
    """The rows with the printed names of their providers, for tables that print a provider as it is."""
    names = ladder_tables.labels(rows)
    return [replace(row, provider=names[row.provider]) for row in rows]


def titled(table: tables.Table, env: Environment) -> str:
    return f"{table.title}:\n\n{table.markdown()}\n\n{origin(env)}"


def record(path: Path) -> str:
    """The result of a check, of a run with planted faults or of a sanitizer run, and where it ran."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise value_error("results", f"no {path.name} ({error.strerror})", "the file that the docs name") from error
    if path.stem.startswith("distributed"):
        header, rows = found["table"]["header"], found["table"]["rows"]
        align = "|".join(["--", *("--:" for _ in header[1:])])
    elif path.stem == "mutations":
        header, align = ["fault", "what is wrong", "problems", "seen as"], "--|--|--:|--"
        rows = [
            [
                f"`{one['mutation']}`",
                one["what"],
                one["problems"] if one["found"] else "not found",
                one["complaint"].split("; ")[0],
            ]
            for one in found["mutations"]
        ]
    elif path.stem.startswith("sanitize"):
        header, align = ["tool", "kernels", "reports", "fault planted: reports then"], "--|--:|--:|--"
        rows = []
        for name, one in found["tools"].items():
            planted = ", ".join(f"`{fault}`: {run['errors']}" for fault, run in one["planted"].items())
            rows.append([name, one["clean"]["kernels"], one["clean"]["errors"], planted])
    else:
        header, align = ["backend", "problems", "refused", "failed", "kernels"], "--|--:|--:|--:|--:"
        refused = {name: sum(reasons.values()) for name, reasons in found["refused"].items()}
        rows = [
            [name, ran, refused.get(name, 0), found["failed"][name], found["kernels"].get(name, "")]
            for name, ran in found["ran"].items()
        ]
    lines = [" | ".join(map(str, row)) for row in (header, *rows)]
    table = "\n".join(f"| {line} |" for line in (lines[0], align.replace("|", " | "), *lines[1:]))
    seed = f"seed {found['seed']}, {found['total_s']:.0f} s; " if path.stem.startswith("check") else ""
    return f"{table}\n\n{seed}{origin(Environment(**found['environment']))}"


def origin(env: Environment) -> str:
    """One line with the device, the versions, the commit and the command."""
    versions = [
        f"torch {env.torch}",
        *(f"{key} {value}" for key, value in (("cuDNN", env.cudnn), ("driver", env.driver)) if value),
    ]
    commit = f"commit {env.commit or 'unknown'}{' with changes' if env.is_dirty else ''}"
    return f"{env.device}; {', '.join(versions)}; flashtile {env.flashtile}, {commit}, {env.date[:10]}; `{env.command}`"


def figures(results: Path, wanted: set[str], is_redraw: bool = False) -> tuple[list[Path], list[Path]]:
    """The figures that are out of date (with is_redraw all) or missing, and the CSVs to draw them from."""
    drawn = [path for path in sorted(results.glob("*/*.png")) if plots.HASH_KEY in plots.metadata(path)]
    stale = [path for path in drawn if is_redraw or not plots.is_current(path)]
    absent = [results / name for name in sorted(wanted) if not (results / name).exists()]
    sources = {path.with_name(plots.metadata(path)[plots.SOURCE_KEY]) for path in stale}
    sources.update(source for path in absent for source in path.parent.glob(f"{_kind(path)}_*.csv"))
    return stale + absent, sorted(source for source in sources if source.exists())


def _kind(path: Path) -> str:
    """The prefix of the names of a figure's CSVs."""
    return next(
        (kind for kind in ("ladder", "tiles", "profile", "timeline", "distributed") if path.stem.startswith(kind)),
        "sdpa",
    )


def draw(source: Path) -> list[Path]:
    if _kind(source) == "sdpa":
        return plots.draw(source, read(source, Row))
    drawn_by = {
        "ladder": ladder_figures.draw,
        "tiles": tile_figures.draw,
        "profile": profile_figures.draw,
        "timeline": timeline.redraw,
        "distributed": draw_distributed,
    }
    return drawn_by[_kind(source)](source)


def draw_distributed(source: Path) -> list[Path]:
    """A trace is JSON, a simulation CSV."""
    return [trace_ranks.draw(source) if source.suffix == ".json" else distributed_command.redraw(source)]


def environment_tables() -> str:
    """A table of variables for each group of backends/environment.py."""
    header = "| variable | accepted | default | what it does | when it is read |\n|---|---|---|---|---|"
    return "\n\n".join(
        "\n".join((f"**{name}**\n", header, *(f"| `{one.name}` | {' | '.join(one[1:])} |" for one in group)))
        for name, group in environment.GROUPS.items()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill README.md and docs/ from results/.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="change nothing; exit 1 where something is out of date")
    mode.add_argument("--redraw", action="store_true", help="draw every figure again")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    options = parser.parse_args(arguments)
    results, complaints, wanted = options.root / "results", [], set()
    for page in pages(options.root):
        text = page.read_text(encoding="utf-8")
        name = page.relative_to(options.root)
        found = [match["name"] for match in MARKED.finditer(text)]
        wanted.update(entry for entry in found if entry.endswith(".png"))
        if len(OPENING.findall(text)) != 2 * len(found):
            complaints.append(f"{name}: a bench marker without its partner")
            continue
        try:
            filled = fill(text, page, results)
        except ValueError as error:
            complaints.append(f"{name}: {error}")
            continue
        complaints += [f"{name}: table of backends: {complaint}" for complaint in support_table.complaints(filled)]
        if filled == text:
            continue
        if options.check:
            complaints.append(f"{name}: differs from results/")
        else:
            page.write_text(filled, encoding="utf-8")
            print(f"{name}: written")
    out_of_date, sources = figures(results, wanted, options.redraw)
    if options.check:
        complaints += [f"{path.relative_to(options.root)}: missing, or drawn from another CSV" for path in out_of_date]
    else:
        for source in sources:
            print("\n".join(f"{path.relative_to(options.root)}: drawn" for path in draw(source)))
        complaints += [
            f"{path.relative_to(options.root)}: no CSV to draw it from"
            for path in out_of_date
            if not plots.is_current(path)
        ]
    for complaint in complaints:
        print(complaint + ("; run `make docs`" if options.check else ""), file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
