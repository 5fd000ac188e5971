"""`flashtile bench`: measures what the options select, writes CSVs, draws figures, prints tables."""

from __future__ import annotations

import json
import math
import random
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from flashtile.errors import Unsupported, value_error
from flashtile.lab.bench import (
    cold,
    compare,
    device,
    nvml,
    overhead,
    plots,
    protocol,
    random_runs,
    regret,
    tables,
    wild,
)
from flashtile.lab.bench.files import writable_folder
from flashtile.lab.bench.load import Load
from flashtile.lab.bench.points import (
    DIRECTIONS,
    FAST_SEQLENS,
    FULL_SEQLENS,
    GRIDS,
    Plan,
    Point,
    cpu_grid,
    decode_grid,
    float32_grid,
    length_sweep,
    options_grid,
    paper_grid,
)
from flashtile.lab.bench.providers import (
    CPU_PROVIDERS,
    DECODE_PROVIDERS,
    FLOAT32_PROVIDERS,
    OPTION_PROVIDERS,
    Provider,
    check_ours,
    choose,
)
from flashtile.lab.bench.rows import ColdRow, OverheadRow, Row, Writer, as_dict, read
from flashtile.lab.bench.sweep import Settings, Sweep
from flashtile.lab.bench.terminal import INTERRUPTED, collect, make_console, say, say_files, say_remark, show
from flashtile.lab.dtypes import dtype_key
from flashtile.lab.options import BenchOptions as Options

_DEFAULT_BUDGET_S = {"cpu": 0.4, "cuda": 0.08}
_DEFAULT_CALL_LIMIT_S = {"cpu": 5.0, "cuda": 2.0}
_DEFAULT_COMPILE_LIMIT_S = {"cpu": 60.0, "cuda": 150.0}


_SWEEP_ONLY = {  # options that a grid does not accept
    "--full": "is_full",
    "--seqlens": "seqlens",
    "--batch": "batch",
    "--heads": "heads",
    "--heads-kv": "heads_kv",
    "--head-dim": "head_dim",
    "--causal": "is_causal",
}


# Options that random calls take
_OF_RANDOM_CALLS = ("grid", "regret", "seed", "points", "first", "calls", "backends", "device", "out", "as_json")


def prepare(options: Options, arguments: Sequence[str]) -> Callable[[], int]:
    """Checks the options and returns the job, which returns the exit status. Errors in options are raised here."""
    if options.compare is not None:
        return _prepare_compare(*options.compare, options)
    console = make_console(options.as_json)
    for name, seconds in (
        ("--seconds", options.seconds),
        ("--call-limit", options.call_limit),
        ("--compile-limit", options.compile_limit),
    ):
        check_seconds(name, seconds)
    if options.grid == "cpu" and options.device not in (None, "cpu"):
        raise value_error("--device", f"{options.device!r} with --grid cpu", "cpu", "Drop --device")
    where, line = device.resolve("cpu" if options.grid == "cpu" else options.device)
    if options.grid == "wild" or options.regret is not None:
        return _random_calls(options, where, line, arguments, console)
    for name, value in (("--points", options.points), ("--from", options.first)):
        if value is not None:
            raise value_error(name, f"it without random calls ({value})", "--grid wild or --regret", f"Drop {name}")
    plan = make_plan(options, where)
    default_sets = {
        "options": OPTION_PROVIDERS,
        "float32": FLOAT32_PROVIDERS,
        "cpu": CPU_PROVIDERS,
        "decode": DECODE_PROVIDERS,
    }
    default_set = default_sets.get(options.grid or "")
    providers = choose(options.backends or default_set, is_grid=options.grid is not None)
    if options.grid is None:
        check_ours(providers, plan, where)
    if options.use_graph and where != "cuda":
        raise value_error("--graph", f"it on {where}", "a GPU: it replays CUDA graphs", "Drop --graph")
    if options.protocol is not None and (options.has_overhead or options.has_cold):
        raise value_error("--protocol", "it with --overhead or --cold", "a sweep or a grid", "Drop --protocol")
    protocols = protocol.chosen(options.protocol, "both" if (options.grid, where) == ("paper", "cuda") else None)
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    folder = writable_folder(options.out or device.own_results(where))
    env = device.environment(where, arguments)
    say(console, line)
    if options.has_overhead or options.has_cold:
        return partial(_host_runs, options, plan.points[0], providers, where, env, folder, console)
    settings = Settings(
        device=where,
        cache_bytes=device.cache_bytes(where),
        budget_s=options.seconds if options.seconds is not None else _DEFAULT_BUDGET_S[where],
        call_limit_s=options.call_limit if options.call_limit is not None else _DEFAULT_CALL_LIMIT_S[where],
        compile_limit_s=_compile_limit(options, where),
        use_graph=options.use_graph,
        copy_gb_per_s=device.copy_gb_per_s(where) if options.grid == "decode" else None,
        seed=seed,
        protocols=protocols,
        probe=nvml.open_probe(where) if protocols else nvml.Probe(),
    )
    console.print(f"Providers take turns in random order: --seed {seed}.", highlight=False)
    return partial(run_sweep, Sweep(plan, providers, settings, env), folder, console, options.as_json)


def _random_calls(
    options: Options, where: str, line: str, arguments: Sequence[str], console: Console
) -> Callable[[], int]:
    """The job of --grid wild or --regret."""
    is_wild, kind = options.regret is None, "--grid wild" if options.regret is None else "--regret"
    if options.regret is not None and options.grid is not None:
        raise value_error("--grid", f"it with --regret ({options.grid})", "one of both", "Drop --grid")
    for field in fields(Options):
        is_known = field.name in _OF_RANDOM_CALLS and not (field.name in ("points", "backends") and not is_wild)
        if not is_known and getattr(options, field.name) != field.default:
            raise value_error(_named(field.name), f"it with {kind}", "the options of random calls", "Drop it")
    if options.regret is not None and options.regret < 1:
        raise value_error("--regret", options.regret, "an integer >= 1")
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    points = options.points if is_wild or options.calls is not None else options.regret
    selection = random_runs.select(seed, points, options.first, options.calls, where)
    providers = choose(options.backends or (wild.GPU_PROVIDERS if where == "cuda" else wild.CPU_PROVIDERS), True)
    folder = writable_folder(options.out or device.own_results(where))
    env, cache_bytes = device.environment(where, arguments), device.cache_bytes(where)
    chosen = (("--device", options.device), ("--backends", options.backends), ("--out", options.out))
    added = "".join(f" {name} {shlex.quote(str(value))}" for name, value in chosen if value is not None)
    console.print(line, highlight=False, soft_wrap=True)
    console.print(f"Random calls, providers in random order: --seed {seed}.", highlight=False)
    if is_wild:
        wild_job = wild.job(selection, providers, where, cache_bytes, env, added)
        return random_runs.prepare(wild_job, folder, console, options.as_json)
    regret_job = regret.job(selection, where, cache_bytes, env, added)
    return random_runs.prepare(regret_job, folder, console, options.as_json)


def _named(field: str) -> str:
    """The option of the command line that fills a field."""
    names = {"is_full": "--full", "is_causal": "--causal", "direction": "--pass", "use_graph": "--graph"}
    names |= {"has_overhead": "--overhead", "has_cold": "--cold"}
    return names.get(field, f"--{field.replace('_', '-')}")


def _compile_limit(options: Options, where: str) -> float:
    return _DEFAULT_COMPILE_LIMIT_S[where] if options.compile_limit is None else options.compile_limit


def run_sweep(sweep: Sweep, folder: Path, console: Console, as_json: bool = False) -> int:
    """Writes rows as they are measured. After an interrupt the results so far are drawn and shown."""
    is_interrupted, load = False, Load(sweep.settings.device)
    writer = Writer(folder / f"{sweep.plan.stem}.csv", Row)

    def measured(say: Callable[[str], None]) -> Iterator[list[Row]]:
        return sweep.rows(lambda point, name: say(_describe(point, name)))

    try:
        with writer:
            collect(console, len(sweep.plan.points), measured, writer.add)
    except KeyboardInterrupt:
        is_interrupted = True
    rows, remark = writer.rows, " ".join(filter(None, (load.remark(), sweep.settings.probe.complaint)))
    for table in _summary(rows):
        show(console, table)
    if rows:
        written = [writer.written]
        try:
            written += plots.draw(writer.written, rows)
        except Unsupported as error:
            console.print(str(error), highlight=False, markup=False)
        say_files(console, written)
    say_remark(console, remark)
    if is_interrupted:
        console.print(f"Interrupted: {len(rows)} rows were kept.", highlight=False)
    closing = "" if is_interrupted else tables.closing_line(rows)
    say(console, closing, "bold")
    if as_json:
        ratios = [vars(one) for one in compare.ratios(rows)]
        payload = {"rows": [as_dict(row) for row in rows], "ratios": ratios, "remark": remark, "closing": closing}
        print(json.dumps(payload, indent=1))
    return INTERRUPTED if is_interrupted else 0


def _describe(point: Point, name: str) -> str:
    if point.option:
        return f"{point.direction} {point.option} B={point.batch}: {name}"
    return (
        f"{point.direction} d={point.head_dim} {'causal' if point.is_causal else 'full'} B={point.batch} "
        f"S={point.seqlen_k}: {name}"
    )


def _summary(rows: Sequence[Row]) -> Iterator[tables.Table]:
    sweep = rows[0].sweep if rows else ""
    kinds: tuple[str, ...] = ("latency", "throughput", "memory", "accuracy", "ratios")
    by_protocol = ("standings", "places", "power")
    if sweep == "decode":
        kinds = ("latency", "bandwidth", "ratios", "serving")
    elif sweep in ("options", "cpu"):
        kinds = ("options",)
    elif sweep == "float32":
        kinds = ("float32",)
    for kind in (*kinds, *by_protocol):
        yield tables.of(rows, kind)
    yield tables.refusals(rows)


def _host_runs(
    options: Options, point: Point, providers: Sequence[Provider], where: str, env: Any, folder: Path, console: Console
) -> int:
    """Runs --overhead and --cold: one table each instead of a sweep."""
    written, payload, load = list[Path](), dict[str, Any](), Load(where)
    try:
        if options.has_overhead:
            limits = overhead.Limits(options.seconds, _compile_limit(options, where))
            with Writer(folder / f"overhead_{point.dtype}.csv", OverheadRow) as writer:
                measured = partial(overhead.rows, providers, point, where, env, limits=limits)
                collect(console, len(overhead.COLUMNS), measured, writer.add)
            written.append(writer.written)
            show(console, tables.overhead_table(writer.rows))
            payload["overhead"] = [as_dict(row) for row in writer.rows]
        if options.has_cold:
            with Writer(folder / f"cold_{point.dtype}.csv", ColdRow) as cold_writer:
                collect(console, len(providers), partial(cold.rows, providers, point, where, env), cold_writer.add)
            written.append(cold_writer.written)
            show(console, tables.cold_table(cold_writer.rows))
            payload["cold"] = [as_dict(row) for row in cold_writer.rows]
    except KeyboardInterrupt:
        console.print("Interrupted: the rows measured so far were kept in a file named _unfinished.", highlight=False)
        return INTERRUPTED
    payload["remark"] = load.remark()
    say_files(console, written)
    say_remark(console, payload["remark"])
    if options.as_json:
        print(json.dumps(payload, indent=1))
    return 0


def _prepare_compare(first: Path, second: Path, options: Options) -> Callable[[], int]:
    """The job that shows the ratios of two runs and writes them to the folder of the second."""
    if replace(options, compare=None, out=None, as_json=False) != Options():
        raise value_error("--compare", "options of a sweep beside it", "--out and --json", "Drop the others")
    before, after = read(first, Row), read(second, Row)
    found = compare.changes(before, after)
    if not found:
        raise value_error("--compare", "two runs without a common accurate row", "two CSVs of the same sweep")
    devices = sorted({row.env.device for row in (*before, *after)})
    protocols = sorted({row.protocol or protocol.ROUNDS for row in (*before, *after) if row.is_ok})
    path = writable_folder(options.out or second.parent) / f"compare_{first.stem}_{second.stem}.csv"
    return partial(_compare, found, devices, protocols, path, options.as_json)


def _compare(
    found: Sequence[compare.Change], devices: Sequence[str], protocols: Sequence[str], path: Path, as_json: bool
) -> int:
    console = make_console(as_json)
    if len(devices) > 1:
        console.print(f"Different devices: {', '.join(devices)}.", highlight=False)
    if len(protocols) > 1:
        said = f"Different protocols: {', '.join(protocols)}. The ratios say nothing of a change of the code."
        console.print(said, style="yellow", highlight=False)
    for table in tables.change_tables(found):
        show(console, table)
    compare.write(path, found)
    say_files(console, [path])
    if as_json:
        print(json.dumps([vars(one) for one in found], indent=1))
    return 0


def check_seconds(option: str, seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds < math.inf:  # NaN fails too
        raise value_error(option, str(seconds), "a number of seconds above 0")


def make_plan(options: Options, where: str) -> Plan:
    """The points that the options select on that device, and the file name."""
    if options.direction not in (None, *DIRECTIONS):
        raise value_error("--pass", repr(options.direction), ", ".join(DIRECTIONS))
    if options.calls is not None and options.grid != "options":
        raise value_error("--calls", "it without --grid options", "the calls of that grid", "Drop --calls")
    suffix = "_graph" if options.use_graph else ""
    if options.grid is not None:
        if options.grid not in GRIDS:
            raise value_error("--grid", repr(options.grid), ", ".join(GRIDS))
        for name, field in _SWEEP_ONLY.items():
            if getattr(options, field) != getattr(Options(), field):
                raise value_error(name, f"it with --grid {options.grid}", "a length sweep", f"Drop {name} or --grid")
        is_small = options.grid in ("options", "float32") and where == "cpu"
        dtype = dtype_key(options.dtype or ("fp32" if is_small else "bf16"))
        if options.grid == "paper":
            return paper_grid(dtype, suffix, options.direction)
        if options.grid == "options":
            return options_grid(dtype, suffix, options.direction, is_small, options.calls)
        if options.grid == "float32":
            if options.dtype is not None:
                raise value_error("--dtype", "it with --grid float32", "float32", "Drop --dtype")
            return float32_grid(suffix, options.direction, is_small)
        if options.direction not in (None, "fwd"):
            raise value_error("--pass", f"{options.direction!r} with --grid {options.grid}", "fwd")
        if options.grid == "cpu":
            if options.dtype is not None:
                raise value_error("--dtype", "it with --grid cpu", "the dtypes of its calls", "Drop --dtype")
            return cpu_grid()
        return decode_grid(dtype, suffix)
    for name, size in (("--batch", options.batch), ("--heads", options.heads), ("--head-dim", options.head_dim)):
        if size < 1:
            raise value_error(name, size, "an integer >= 1")
    heads_kv = options.heads if options.heads_kv is None else options.heads_kv
    if heads_kv < 1 or options.heads % heads_kv:
        raise value_error("--heads-kv", heads_kv, f"a divisor of --heads {options.heads}")
    seqlens: tuple[int, ...] = FULL_SEQLENS if options.is_full else FAST_SEQLENS
    if options.seqlens is not None:
        seqlens = _numbers(options.seqlens)
    point = Point(
        batch=options.batch,
        heads=options.heads,
        heads_kv=heads_kv,
        head_dim=options.head_dim,
        head_dim_v=options.head_dim,
        dtype=dtype_key(options.dtype or "fp32"),
        is_causal=options.is_causal,
        direction=options.direction or "fwd",
    )
    return length_sweep(point, seqlens, suffix + ("_full" if options.is_full else ""))


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise value_error("--seqlens", repr(text), "lengths >= 1, separated by commas")
    return tuple(sorted({int(part) for part in parts}))
