"""Runs `flashtile ladder`: checks every rung, times it beside SDPA and our `cuda` backend, profiles it on request and
writes the results.

A rung is one teaching kernel, lab/ladder/NN_*.cu, or the user's own (FLASH_KERNEL_SRC). cli/main.py calls `prepare`,
then the job that it returns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from flashtile.errors import Unsupported, unsupported, value_error
from flashtile.lab.bench import device
from flashtile.lab.bench import tables as bench_tables
from flashtile.lab.bench.files import writable_folder
from flashtile.lab.bench.load import Load
from flashtile.lab.bench.points import Plan
from flashtile.lab.bench.rows import Environment, Row, Writer, as_dict
from flashtile.lab.bench.sweep import Sweep, gpu_settings
from flashtile.lab.bench.terminal import INTERRUPTED, collect, make_console, say, say_files, say_remark, show
from flashtile.lab.ladder import counters, figures, launcher, measure, probe, rungs, tables
from flashtile.lab.ladder.rows import Counters, HbmRow, RungRow
from flashtile.lab.ladder.rungs import Rung, Variables
from flashtile.lab.options import LadderOptions as Options
from flashtile.lab.profile import ceilings, gpu, ncu
from flashtile.lab.profile.ncu import Call
from flashtile.plans.arch import ARCHS, Arch
from flashtile.runtime import toolchain

_DEFAULT_ARCH = 90
_HBM_SEQLENS = (512, 1024, 2048, 4096, 8192)


def prepare(options: Options, arguments: Sequence[str]) -> Callable[[], int]:
    """Checks options and environment and returns the job. Errors in them are raised here, before the GPU is used."""
    variables = Variables.read()
    if options.dtype is not None:
        options = replace(options, dtype=measure.checked_dtype(options.dtype))
    measure.check_head_dim(options.head_dim)
    chosen = measure.chosen(options.only, variables, options.dtype)
    if options.is_list:
        arch = _arch(options.arch)
        for rung in chosen:
            if rung.is_own:
                launcher.compile_rung(rung, options.head_dim, arch, variables)
        return partial(_list, chosen, arch, variables, options.as_json, options.head_dim)
    if options.arch is not None:
        raise value_error(
            "--arch", options.arch, "no --arch without --list", "Kernels are measured on the GPU of this machine"
        )
    device_name, device_line = device.resolve(None)
    if device_name != "cuda":
        hint = "`flashtile ladder --list` needs none and shows what each kernel takes"
        raise unsupported("flashtile ladder", "no GPU here", "a GPU that torch sees", hint)
    if options.has_profile:
        ncu.find()
    if options.dtype is None:
        dtype = measure.dtype_of(chosen, options.only)
        options, chosen = replace(options, dtype=dtype), [rung for rung in chosen if rung.dtype == dtype]
    folder = writable_folder(options.out or device.own_results(device_name))
    arch, console = gpu.current_arch(), make_console(options.as_json)
    fitting, refusals = with_tiles(chosen, options.head_dim, arch, variables)
    # Compile in parallel. A compile error ends the command here, with the compiler's log
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda rung: launcher.compile_rung(rung, options.head_dim, arch, variables), fitting))
    for text in (device_line, *refusals):
        say(console, text)
    return Run(options, variables, fitting, folder, device.environment(device_name, arguments), console).start


def with_tiles(chosen: Sequence[Rung], head_dim: int, arch: Arch, variables: Variables) -> tuple[list[Rung], list[str]]:
    """Returns the rungs that have a tile within the limits, and why the others have none.

    Raises if the user's own kernel has no tile, or if no rung has one.
    """
    fitting, refusals = list[Rung](), list[Exception]()
    for rung in chosen:
        try:
            rung.tile(head_dim, arch, variables)
            fitting.append(rung)
        except (ValueError, Unsupported) as error:
            if rung.is_own:
                raise
            refusals.append(error)
    if not fitting:
        raise refusals[0]
    return fitting, [str(error) for error in refusals]


@dataclass
class Run:
    """One run of the command."""

    options: Options
    variables: Variables
    chosen: Sequence[Rung]
    folder: Path
    env: Environment
    console: Console

    def start(self) -> int:
        try:
            return self._all()
        except probe.KernelFault as fault:
            say(self.console, str(fault), "red")
            return 1
        except KeyboardInterrupt:
            say(self.console, "Interrupted: the rows measured so far were kept in a file named _unfinished.")
            return INTERRUPTED

    def _all(self) -> int:
        """Returns the exit status: 1 if a counter could not be read or a rung is inaccurate."""
        self._check()
        roofs = ceilings.measure()
        say(
            self.console,
            f"Measured ceilings: {roofs.fma_ceiling_tflops:.1f} TFLOP/s of FMA, "
            f"{roofs.tensor_ceiling_tflops:.0f} of tensor cores, "
            f"{roofs.dram_ceiling_gb_per_s:.0f} GB/s of device memory, "
            f"{roofs.shared_ceiling_gb_per_s:.0f} GB/s of shared memory.",
        )
        # A partial run does not overwrite the files of a full one
        is_whole = self.options.only is None and self.options.is_causal is None and not self.variables.change_kernels
        stem = measure.stem(self._dtype, self.options.head_dim) + ("" if is_whole else "_part")
        rows_path, kernels_path, hbm_path = (
            self.folder / f"{name}_{stem}.csv" for name in ("ladder", "ladder_kernels", "ladder_hbm")
        )
        written = [rows_path, kernels_path]
        load = Load("cuda")
        rows = self._measure(rows_path)
        remark = load.remark()
        counted, hbm, refusal = self._profile()
        kernels = self._kernel_rows(rows, roofs, counted)
        with Writer(kernels_path, RungRow) as writer:
            writer.add(kernels)
        if hbm:
            written.append(hbm_path)
            with Writer(hbm_path, HbmRow) as hbm_writer:
                hbm_writer.add(hbm)
        for kind in tables.KINDS:
            show(self.console, tables.of(rows, kernels, kind))
        show(self.console, bench_tables.refusals(rows))
        if hbm:
            show(self.console, tables.hbm_table(hbm))
        say(self.console, refusal, "red")
        try:
            written += [path for source in tuple(written) for path in figures.draw(source)]
        except Unsupported as error:
            say(self.console, str(error))
        say_files(self.console, written)
        say_remark(self.console, remark)
        if self.options.as_json:
            print(
                json.dumps(
                    {"rows": [as_dict(row) for row in rows], "kernels": [as_dict(row) for row in kernels]}, indent=1
                )
            )
        return 1 if refusal or any(row.status == "inaccurate" for row in rows if not row.is_baseline) else 0

    @property
    def _dtype(self) -> str:
        return self.options.dtype or rungs.DTYPES[0]

    @property
    def _plan(self) -> Plan:
        return measure.plan(self._dtype, self.options.is_causal, self.options.head_dim)

    def _check(self) -> None:
        """Checks every rung against float64 at odd lengths, with guard zones. The user's own kernel runs in a separate
        process, which a fault would end."""
        errors = []
        for rung in self.chosen:
            check = probe.check_apart if rung.is_own else probe.check
            errors.append(check(rung, self.options.head_dim, self.variables))
        names = ", ".join(f"{rung.name} {error:.2g}" for rung, error in zip(self.chosen, errors, strict=True))
        lengths = ", ".join(map(str, probe.SEQLENS))
        say(self.console, f"Checked against float64 at lengths {lengths}, largest errors: {names}.")

    def _measure(self, path: Path) -> list[Row]:
        """Times all providers, interleaved. Rows are written as they are measured."""
        plan = self._plan
        providers = [*measure.rung_providers(self.variables, self.chosen), *measure.baselines()]
        sweep = Sweep(plan, providers, gpu_settings(), self.env)
        with Writer(path, Row) as writer:
            collect(
                self.console,
                len(plan.points),
                lambda describe: sweep.rows(lambda point, name: describe(f"S={point.seqlen_q}: {name}")),
                writer.add,
            )
        return writer.rows

    def _profile(self) -> tuple[dict[tuple[str, bool], Counters], list[HbmRow], str]:
        """Returns the counters of each rung at the large problem, by its name and the mask; the bytes by sequence
        length; and why counters could not be read, or an empty text."""
        if not self.options.has_profile:
            return {}, [], ""
        counted: dict[tuple[str, bool], Counters] = {}
        points = measure.large_points(self._plan)
        calls = [Call(rung.name, point, has_warm_up=False) for point in points for rung in self.chosen]
        try:
            counts = counters.profile(calls, self.variables)
            counted = {(call.provider, call.point.is_causal): one for call, one in zip(calls, counts, strict=True)}
            return counted, self._hbm(), ""
        except Unsupported as error:
            return counted, [], str(error)

    def _kernel_rows(
        self, rows: Sequence[Row], roofs: ceilings.Ceilings, counted: dict[tuple[str, bool], Counters]
    ) -> list[RungRow]:
        """Returns the row of each rung at the large problem, with and without a causal mask."""
        kernel_rows = []
        for point in measure.large_points(self._plan):
            for rung in self.chosen:
                timed = next(
                    (row for row in rows if row.provider == rung.name and row.point == point and row.is_ok), None
                )
                counts = counted.get((rung.name, point.is_causal), Counters())
                kernel_rows.append(measure.rung_row(rung, point, self.variables, timed, roofs, counts, self.env))
        return kernel_rows

    def _hbm(self) -> list[HbmRow]:
        """Returns the device memory traffic by sequence length of eager attention and of the last rung."""
        large = measure.large_points(measure.plan(self._dtype, False, self.options.head_dim))[0]
        calls = [
            Call(name, replace(large, seqlen_q=seqlen, seqlen_k=seqlen), has_warm_up=name == "eager")
            for name in ("eager", self.chosen[-1].name)
            for seqlen in _HBM_SEQLENS
        ]
        hbm_rows = []
        for call, (dram_bytes, num_kernels) in zip(calls, counters.device_bytes(calls, self.variables), strict=True):
            point = call.point
            shape = (point.dtype, point.batch, point.heads, point.seqlen_q, point.head_dim)
            scores = 4 * point.batch * point.heads * point.seqlen_q * point.seqlen_k
            traffic = num_kernels, dram_bytes, point.least_bytes(), scores
            hbm_rows.append(HbmRow(call.provider, *shape, *traffic, self.env))
        return hbm_rows


def _arch(name: str | None) -> Arch:
    if name is None:
        return gpu.current_arch() if torch.cuda.is_available() else ARCHS[_DEFAULT_ARCH]
    return gpu.arch_option(name)


def _list(chosen: Sequence[Rung], arch: Arch, variables: Variables, as_json: bool, head_dim: int) -> int:
    """Lists the rungs and the resources of each on the architecture, and returns the exit status. Compiles them; needs
    no GPU."""
    console = make_console(as_json)
    entries, lines = list[dict[str, object]](), list[tuple[str, ...]]()
    no_compiler = _no_compiler()
    for rung in chosen:
        if no_compiler:
            entries.append({"rung": rung.name, "title": rung.title})
            lines.append((rung.name, "", "", "", "", "", "", rung.title))
            continue
        try:
            kernel = launcher.compile_rung(rung, head_dim, arch, variables)
        except (Unsupported, ValueError) as error:
            entries.append({"rung": rung.name, "title": rung.title, "refusal": str(error)})
            lines.append((rung.name, "", "", "", "", "", "", str(error)))
            continue
        tile, resources = kernel.tile, kernel.resources
        takes = (
            str(tile.num_threads),
            str(resources.registers),
            str(resources.spill_bytes),
            f"{tile.shared_bytes / 1024:.1f}",
            f"{kernel.occupancy:.0%}",
        )
        lines.append((rung.name, f"{tile.block_m} x {tile.block_n}", *takes, rung.title))
        facts = {
            "registers": resources.registers,
            "spill_bytes": resources.spill_bytes,
            "occupancy": kernel.occupancy,
            "arch": arch.name,
        }
        entries.append({"rung": rung.name, "title": rung.title, **vars(tile), **facts})
    show(console, replace(tables.kernel_table(lines), title=f"The ladder for {arch.name}, d={head_dim}"))
    if no_compiler:
        say(console, f"Not compiled, so that resources are not known. {no_compiler}")
    if as_json:
        print(json.dumps({"rungs": entries, "refusal": no_compiler}, indent=1))
    return 0


def _no_compiler() -> str:
    """Returns why nothing can be compiled, or an empty text."""
    try:
        toolchain.find()
    except Unsupported as error:
        return str(error)
    return ""
