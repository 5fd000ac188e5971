"""`flashtile compile`: fills the kernel cache for given architectures, no GPU needed, and shows what each kernel takes.

kernel_jobs.py says what is compiled. A kernel that spills, keeps a stack frame, makes the compiler warn or asks for
more shared memory than the architecture has is a failure.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from flashtile.backends.base import device_arch
from flashtile.cli.kernel_jobs import Job, covering_jobs, edge_jobs, embedded_jobs, head_dims, plain_jobs
from flashtile.cli.limits import check_jobs
from flashtile.cli.options import CompileOptions as Options
from flashtile.errors import dtype_name, value_error
from flashtile.lab.bench.files import writable_folder
from flashtile.lab.bench.terminal import INTERRUPTED, make_console, progress_bar, say
from flashtile.lab.dtypes import DTYPES as SPELLED
from flashtile.lab.dtypes import dtype_key
from flashtile.plans.arch import ARCHS, Arch, arch_named, known_names
from flashtile.plans.spec import DTYPES
from flashtile.runtime import cache, toolchain
from flashtile.runtime.nvrtc import CompileError
from flashtile.runtime.toolchain import Toolchain


@dataclass(frozen=True)
class Result:
    """Outcome of a job. `problems` is empty if the kernel may be used."""

    job: Job
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    blocks: int
    seconds: float
    problems: tuple[str, ...]

    @property
    def warps(self) -> int:
        return self.blocks * self.job.step.num_threads // 32

    def as_dict(self) -> dict[str, Any]:
        job = self.job
        return {
            "kernel": job.kernel,
            "arch": job.key.arch.name,
            "dtype": job.key.dtype,
            "head_dim": job.key.head_dim,
            "tile": [job.step.owned, job.step.streamed] if job.has_tile else None,
            "features": job.features,
            "threads": job.step.num_threads,
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
            "stack_bytes": self.stack_bytes,
            "shared_bytes": self.shared_bytes,
            "blocks_per_multiprocessor": self.blocks,
            "warps_per_multiprocessor": self.warps,
            "seconds": round(self.seconds, 3),
            "problems": list(self.problems),
        }


# Which architectures


def why_unknown(arch: Arch, compiler: Toolchain) -> str:
    major, minor = compiler.version
    known = sorted(compiler.archs)
    span = f"it compiles for sm_{known[0]} to sm_{known[-1]}"
    if arch.number < known[0]:
        return (
            f"NVRTC {major}.{minor} no longer knows {arch.name}: {span}. NVRTC 12.9 does: "
            "nvidia-cuda-nvrtc-cu12, FLASHTILE_NVRTC"
        )
    return (
        f"NVRTC {major}.{minor} does not know {arch.name}: {span}. A newer one may: nvidia-cuda-nvrtc, FLASHTILE_NVRTC"
    )


def _asked_archs(names: Sequence[str], compiler: Toolchain) -> list[Arch]:
    archs = []
    for name in names:
        arch = arch_named(name)
        if arch is None:
            raise value_error("--arch", name, known_names())
        if arch.number not in compiler.archs:
            raise value_error("--arch", name, "an architecture the compiler knows", why_unknown(arch, compiler))
        archs.append(arch)
    return archs


def _archs_found() -> list[Arch]:
    """The architectures of the GPUs here."""
    archs = [arch for index in range(torch.cuda.device_count()) if (arch := device_arch(index)) is not None]
    if not archs:
        way_out = (
            "Name what to compile for, as in --arch sm_90, or take --all; known: "
            f"{', '.join(arch.name for arch in ARCHS.values())}"
        )
        raise value_error(
            "--arch", "none, and no GPU to take it from", "the architecture of a GPU, once or more", way_out
        )
    return list(dict.fromkeys(archs))


# Compiling


def compile_job(job: Job) -> Result:
    """Compiles one kernel, or takes it from the cache, and judges it."""
    start = time.perf_counter()
    arch, step = job.key.arch, job.step
    try:
        compiled = cache.compile_cached(step.unit, arch.name, [step.entry])
    except CompileError as error:
        return Result(job, 0, 0, 0, step.shared_bytes, 0, time.perf_counter() - start, (str(error),))
    used = compiled.resources(step.entry)
    spill_bytes, shared_bytes = (
        used.spill_bytes,
        step.shared_bytes + used.static_shared_bytes,
    )
    problems = list(compiled.warnings)
    if spill_bytes:
        problems.append(f"spills registers: {used.spill_store_bytes} bytes stored, {used.spill_load_bytes} loaded")
    if used.stack_bytes:
        problems.append(f"keeps a stack frame of {used.stack_bytes} bytes")
    if shared_bytes > arch.shared_bytes:
        problems.append(f"needs {shared_bytes} bytes of shared memory; a block of {arch.name} has {arch.shared_bytes}")
    blocks = arch.blocks_per_multiprocessor(step.num_threads, used.registers, shared_bytes)
    if not blocks:
        problems.append(
            f"does not fit a multiprocessor: {step.num_threads} threads of {used.registers} "
            f"registers, {shared_bytes} bytes shared"
        )
    seconds = time.perf_counter() - start
    return Result(job, used.registers, spill_bytes, used.stack_bytes, shared_bytes, blocks, seconds, tuple(problems))


def compile_jobs(jobs: Sequence[Job], num_threads: int) -> Iterator[Result]:
    """The results as they come. NVRTC works outside Python's lock, so threads are enough."""
    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        futures = [pool.submit(compile_job, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


# The command


def prepare(options: Options) -> Callable[[], int]:
    """Checks the options. What it returns does the work and gives the exit status."""
    compiler = toolchain.find()
    compiled = [key for key, dtype in SPELLED.items() if dtype_name(dtype) in DTYPES]
    dtypes = [dtype_name(SPELLED[dtype_key(name, keys=compiled)]) for name in options.dtype or ()]
    known_dims = head_dims()
    dims = []
    for head_dim in options.head_dim or ():
        padded = next((known for known in known_dims if 0 < head_dim <= known), None)
        if padded is None:
            raise value_error("--head-dim", str(head_dim), f"1 to {known_dims[-1]}")
        dims.append(padded)
    check_jobs(options.jobs)
    if options.embed is not None:
        cache.check_embedding()
        options = dataclasses.replace(options, embed=writable_folder(options.embed, "--embed"))
    skipped = []
    if options.arch:
        archs = _asked_archs(options.arch, compiler)
    elif options.is_all:
        known = compiler.archs
        archs = [arch for arch in ARCHS.values() if arch.number in known]
        skipped = [why_unknown(arch, compiler) for arch in ARCHS.values() if arch.number not in known]
    else:
        archs = _archs_found()
    chosen = (archs, dtypes or DTYPES, dims or known_dims)
    jobs = plain_jobs(*chosen) if options.embed is None else embedded_jobs(*chosen)
    if options.is_all:
        seen = {job.identity for job in jobs}
        jobs += [job for job in edge_jobs(*chosen) if job.identity not in seen]
        seen |= {job.identity for job in jobs}
        jobs += [job for job in covering_jobs(*chosen) if job.identity not in seen]
    return lambda: _run(jobs, skipped, options)


def _run(jobs: Sequence[Job], skipped: Sequence[str], options: Options) -> int:
    console = make_console(options.as_json)
    for reason in skipped:
        console.print(f"skipped: {escape(reason)}", highlight=False)
    num_threads = options.jobs or os.cpu_count() or 1
    results, start, is_interrupted = dict[Job, Result](), time.perf_counter(), False
    with warnings.catch_warnings(), progress_bar(console) as progress:
        warnings.showwarning = lambda text, *_: progress.console.print(f"[yellow]warning: {escape(str(text))}")
        task = progress.add_task("", total=len(jobs))
        try:
            for result in compile_jobs(jobs, num_threads):
                results[result.job] = result
                progress.update(task, advance=1, description=str(result.job))
        except KeyboardInterrupt:
            is_interrupted = True
    ordered = [results[job] for job in jobs if job in results]
    failed = [result for result in ordered if result.problems]
    if options.as_json:
        print(json.dumps({"kernels": [result.as_dict() for result in ordered], "skipped": list(skipped)}, indent=2))
    elif ordered:
        console.print(_table(ordered))
    if options.embed is not None and not failed and not is_interrupted:
        for job in jobs:
            cache.embed(options.embed, job.step.unit, job.key.arch.name, [job.step.entry])
    directory = (None if is_interrupted else options.embed) or cache.KernelCache.default().directory
    where = "kept in no file" if directory is None else f"in {directory}"
    console.print(
        f"{len(ordered)} kernels in {time.perf_counter() - start:.1f} s on {num_threads} threads, {where}",
        highlight=False,
    )
    for result in failed:
        for problem in result.problems:
            say(console, f"{result.job}: {problem}", "red")
    if is_interrupted:
        console.print(f"Interrupted: {len(ordered)} of {len(jobs)} kernels are done.", highlight=False)
        return INTERRUPTED
    return 1 if failed else 0


def _table(results: Sequence[Result]) -> Table:
    shown = Table("kernel", "arch", "dtype", "dim", "tile", title="what each kernel takes", title_justify="left")
    for name in ("threads", "registers", "spills", "stack", "shared KB", "blocks / SM", "warps / SM", "seconds"):
        shown.add_column(name, justify="right")
    has_features = any(result.job.features for result in results)
    if has_features:
        shown.add_column("features")
    for result in results:
        job, step = result.job, result.job.step
        tile = f"{step.owned} x {step.streamed}" if job.has_tile else "-"
        cells = [job.kernel, job.key.arch.name, job.key.dtype, str(job.key.head_dim or "any"), tile]
        cells += [str(step.num_threads), str(result.registers), str(result.spill_bytes), str(result.stack_bytes)]
        cells += [
            f"{result.shared_bytes / 1024:.1f}",
            str(result.blocks),
            str(result.warps),
            f"{result.seconds:.2f}",
        ]
        shown.add_row(*cells, *([job.features] if has_features else []), style="red" if result.problems else None)
    return shown
