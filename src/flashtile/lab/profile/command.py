"""`flashtile profile`: times calls, reads the counters of their kernels, prints one table for each problem."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from flashtile.errors import Unsupported, unsupported
from flashtile.lab.bench import device, providers
from flashtile.lab.bench.files import writable_folder, write_whole
from flashtile.lab.bench.load import Load
from flashtile.lab.bench.points import Plan
from flashtile.lab.bench.providers import Provider
from flashtile.lab.bench.rows import Environment, Row, Writer, as_dict
from flashtile.lab.bench.sweep import Sweep, gpu_settings
from flashtile.lab.bench.terminal import INTERRUPTED, collect, make_console, say, say_files, say_remark, show
from flashtile.lab.options import ProfileOptions as Options
from flashtile.lab.profile import ceilings, figures, measure, problems, tables, timeline
from flashtile.lab.profile.gpu import arch_option, current_arch
from flashtile.lab.profile.problems import Problems
from flashtile.lab.profile.rows import KernelRow
from flashtile.plans.arch import Arch


def prepare(options: Options, arguments: Sequence[str]) -> Callable[[], int]:
    """Checks the options and returns the job."""
    wanted = problems.parse(options.problem or ())
    chosen = providers.choose(options.providers, is_grid=False, option="--providers")
    console = make_console(options.as_json)
    if options.arch is not None:
        return partial(
            _facts, wanted, arch_option(options.arch), device.environment("cpu", arguments), console, options.as_json
        )
    where, line = device.resolve(None)
    if where != "cuda":
        hint = "With --arch sm_90 it shows what the compiler knows about the kernels of that GPU"
        if options.has_timeline:
            hint = "A timeline is measured; without --timeline, --arch sm_90 shows what the compiler knows"
        raise unsupported("flashtile profile", "no GPU here", "a GPU that torch sees", hint)
    folder = writable_folder(options.out or device.own_results(where))
    say(console, line)
    if options.has_timeline:
        return partial(_timeline, wanted, folder, device.environment(where, arguments), console)
    return Run(wanted, chosen, folder, device.environment(where, arguments), console, options.as_json).start


@dataclass
class Run:
    """One run of the command."""

    wanted: Problems
    providers: Sequence[Provider]
    folder: Path
    env: Environment
    console: Console
    as_json: bool

    def start(self) -> int:
        try:
            return self._all()
        except KeyboardInterrupt:
            say(self.console, "Interrupted: nothing was written.")
            return INTERRUPTED

    def _all(self) -> int:
        load = Load("cuda")  # before anything of this run keeps the GPU busy
        roofs = ceilings.measure()
        say(
            self.console,
            f"Measured ceilings: {roofs.tensor_ceiling_tflops:.0f} TFLOP/s of tensor cores, "
            f"{roofs.fma_ceiling_tflops:.1f} of FMA; "
            f"GB/s: {roofs.dram_ceiling_gb_per_s:.0f} of device memory, {roofs.l2_ceiling_gb_per_s:.0f} of L2, "
            f"{roofs.shared_ceiling_gb_per_s:.0f} of shared memory.",
        )
        timed = self._time()
        remark = load.remark()
        ran = [row for row in timed if row.is_ok]
        counted, no_counters = measure.counters_of(ran)
        kernels = iter(counted) if counted is not None else None
        rows: list[KernelRow] = []
        for row in timed:
            found = next(kernels) if kernels is not None and row.is_ok else None
            rows += measure.rows_of(row, found, no_counters if row.is_ok else "", roofs, current_arch())
        written = self._write(rows, no_counters)
        for table in (*tables.tables(rows), tables.refusals(rows)):
            show(self.console, table)
        if no_counters:
            say(self.console, f"No counters, only times and what the compiler knows. {no_counters}", "yellow")
        say_files(self.console, written)
        say_remark(self.console, remark)
        return 0 if ran else 1

    def _time(self) -> list[Row]:
        """Every provider at every point: time, accuracy, or why it does not run."""
        rows: list[Row] = []
        plan = Plan("profile", self.wanted.stem, self.wanted.points)
        sweep = Sweep(plan, self.providers, gpu_settings(), self.env)
        collect(self.console, len(plan.points), lambda say: sweep.rows(lambda _, name: say(name)), rows.extend)
        return rows

    def _write(self, rows: Sequence[KernelRow], no_counters: str) -> list[Path]:
        path = self.folder / f"{self.wanted.stem}.csv"
        with Writer(path, KernelRow) as writer:
            writer.add(rows)
        text = json.dumps({"no_counters": no_counters, "rows": [as_dict(row) for row in rows]}, indent=1)
        write_whole(path.with_suffix(".json"), text + "\n")
        if self.as_json:
            print(text)
        written = [path, path.with_suffix(".json")]
        try:
            written += figures.draw(path)
        except Unsupported as error:
            say(self.console, str(error))
        return written


def _facts(wanted: Problems, arch: Arch, env: Environment, console: Console, as_json: bool) -> int:
    """Shows what the compiler knows about our kernels for each problem; needs no GPU."""
    why = f"compiled for {arch.name}, not run"
    found: list[KernelRow] = []
    refused: list[str] = []
    for point in wanted.points:
        try:
            found += measure.compiled_rows(point, arch, why, env)
        except Unsupported as error:
            refused.append(f"{point.direction}: {error}")
    for table in tables.tables(found):
        show(console, replace(table, title=f"{table.title}; {why}"))
    for text in refused:
        say(console, text, "red")
    if as_json:
        print(json.dumps({"no_counters": why, "rows": [as_dict(row) for row in found]}, indent=1))
    return 0 if found else 1


def _timeline(wanted: Problems, folder: Path, env: Environment, console: Console) -> int:
    """Records the clocks of one block of our kernels. Every kernel of a problem has a file."""
    written: list[Path] = []
    for point in wanted.points:
        try:
            found = timeline.record(point, tables.problem_text(point), env)
        except Unsupported as error:
            say(console, str(error), "red")
            continue
        for one in found:
            show(console, timeline.table(one))
            words = problems.stem(point).removeprefix("profile_")
            written += timeline.write(one, folder / f"timeline_{one.kernel.removesuffix('_kernel')}_{words}.json")
    if not written:
        return 1
    say_files(console, written)
    return 0
