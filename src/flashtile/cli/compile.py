"""`flashtile compile`: fills the kernel cache for given architectures, no GPU needed, and shows what each kernel takes.

What is compiled comes from the launch plans, so a new row, kernel or step is covered as soon as a plan uses it. A kernel that spills,
keeps a stack frame, makes the compiler warn or asks for more shared memory than the architecture has is a failure.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashtile.errors import value_error
from flashtile.kernels import append, table
from flashtile.kernels import plan as plans
from flashtile.kernels.arch import ARCHS, Arch, arch_of
from flashtile.kernels.plan import PlanKey, Step
from flashtile.kernels.spec import Features
from flashtile.runtime import cache, toolchain
from flashtile.runtime.nvrtc import CompileError
from flashtile.runtime.toolchain import Toolchain

_FILE_WIDTH = 200
_PACKED_HEADS = 4  # any number above 1: kernels do not know it
_BUCKETS: tuple[dict[str, Any], ...] = ({"is_small": True}, {"is_ragged": True}, {"packed_heads": _PACKED_HEADS})  # of lengths


@dataclass(frozen=True)
class Job:
    """One kernel to compile: a step of a plan, and the key that led to it."""

    step: Step
    key: PlanKey

    @property
    def kernel(self) -> str:
        return self.step.name.removesuffix("_kernel")

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.step.unit, self.step.entry, self.key.arch.name

    @property
    def has_tile(self) -> bool:
        return self.step.shared_bytes > 0

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.step.block_rows, self.step.block_columns, self.step.num_threads

    @property
    def features(self) -> str:
        """The features that are not as in the plain variant, in words."""
        pairs = ((field, getattr(self.key.features, field.name)) for field in dataclasses.fields(Features))
        words = [field.name if value is True else f"{field.name}={value}" for field, value in pairs if value != field.default]
        return ", ".join([*words, *([f"out={self.key.out_dtype}"] if self.key.out_dtype != self.key.dtype else [])])

    def __str__(self) -> str:
        tile = f" {self.step.block_rows}x{self.step.block_columns}" if self.has_tile else ""
        what = f"{self.kernel} {self.key.dtype} head dim {self.key.head_dim}{tile} for {self.key.arch.name}"
        return f"{what} ({self.features})" if self.features else what


@dataclass(frozen=True)
class Result:
    """What came of a job. `problems` is empty if the kernel may be used."""

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
            "tile": [job.step.block_rows, job.step.block_columns] if job.has_tile else None,
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


# What to compile

_PASSES = (None, ("dq", "dk", "dv"), ("dbias",))  # forward, and the gradients of a backward pass


def plain_jobs(
    archs: Iterable[Arch],
    dtypes: Sequence[str] = table.DTYPES,
    head_dims: Sequence[int] = table.HEAD_DIMS,
    has_band: bool = False,
) -> list[Job]:
    """Every kernel without any option, or causal. One that exists only with an option comes with that option alone."""
    keys, appends = [], []
    for arch, dtype, head_dim in itertools.product(archs, dtypes, head_dims):
        forward = PlanKey(dtype, dtype, head_dim, head_dim, Features(has_band=has_band), arch)
        backward = dataclasses.replace(forward, grads=("dq", "dk", "dv", "dsinks"))
        keys += [forward, *(dataclasses.replace(forward, **bucket) for bucket in _BUCKETS), backward]
        keys.append(dataclasses.replace(forward, features=Features(has_band=has_band, bias_dtype=dtype), grads=("dbias",)))
        appends += [(append.kernel(dtype, angle_dtype), forward) for angle_dtype in dict.fromkeys((dtype, "float32"))]
    return [*_jobs(keys), *_once(Job(step, key) for step, key in appends)]


def embedded_jobs(archs: Sequence[Arch], dtypes: Sequence[str] = table.DTYPES, head_dims: Sequence[int] = table.HEAD_DIMS) -> list[Job]:
    """The kernels that come with a package: those without an option, and causal ones."""
    return _once(job for has_band in (False, True) for job in plain_jobs(archs, dtypes, head_dims, has_band))


def covering_jobs(
    archs: Sequence[Arch],
    dtypes: Sequence[str] = table.DTYPES,
    head_dims: Sequence[int] = table.HEAD_DIMS,
    crosses_head_dims: bool = True,
) -> list[Job]:
    """Variants of each kernel in which every two values of its options and dtype meet; its head dims too, or else they take turns."""
    keys = []
    hopper = [(arch, None, True) for arch in archs if arch.has_wgmma and set(dtypes) & set(table.SM90_DTYPES)]
    for arch, grads, is_hopper in [*((arch, grads, False) for arch in archs for grads in _PASSES), *hopper]:
        factors: dict[str, Sequence[Any]] = {"head_dim": head_dims} if crosses_head_dims else {}
        factors |= {"dtype": dtypes, "out_dtype": ("own", "float32"), "is_small": (False, True)}
        for field in dataclasses.fields(Features):
            factors[field.name] = (False, True) if isinstance(field.default, bool) else _values_of(field.name)
        if grads is not None:
            factors |= {"is_paged": (False,), "is_small": (False,)}
        if is_hopper:
            factors |= {"dtype": [dtype for dtype in dtypes if dtype in table.SM90_DTYPES], "is_small": (False,)}
            factors |= {"is_paged": (False,), "is_wide": (True,), "packed_heads": (1, _PACKED_HEADS), "is_ragged": (False, True)}
        if grads == ("dbias",):
            factors["bias_dtype"] = ("own", "float32")
        for choice, turn in zip(pairwise(factors), itertools.cycle(head_dims), strict=False):
            dtype, out_dtype, head_dim = choice.pop("dtype"), choice.pop("out_dtype"), choice.pop("head_dim", turn)
            choice["bias_dtype"] = dtype if choice["bias_dtype"] == "own" else choice["bias_dtype"]
            is_small, out_dtype = choice.pop("is_small"), dtype if out_dtype == "own" else out_dtype
            bucket = {name: choice.pop(name) for name in ("packed_heads", "is_ragged") if name in choice}
            keys.append(PlanKey(dtype, out_dtype, head_dim, head_dim, Features(**choice), arch, is_small, grads, **bucket))
    return _jobs(keys)


def edge_jobs(archs: Iterable[Arch], dtypes: Sequence[str] = table.DTYPES, head_dims: Sequence[int] = table.HEAD_DIMS) -> list[Job]:
    """Variants with few options, of the tiles that take only so many: these are closest to a spill. With many, the tile is another."""
    found = []
    for arch, dtype, head_dim, grads in itertools.product(archs, dtypes, head_dims, _PASSES):
        base = PlanKey(dtype, dtype, head_dim, head_dim, Features(), arch, grads=grads)
        bias = dtype if grads == ("dbias",) else None
        # A band, lengths and narrow loads are no options of the table's kind: every tile takes them
        plain = Features(has_band=True, has_lengths=True, is_wide=False, bias_dtype=bias)
        switches = [field.name for field in dataclasses.fields(Features) if field.default is False and not getattr(plain, field.name)]
        single = [
            Features(**(dataclasses.asdict(plain) | {name: True})) for name in switches if not (grads is not None and name == "is_paged")
        ]
        wide = dataclasses.replace(plain, is_wide=True)
        features = [plain, wide, dataclasses.replace(wide, has_lengths=False), dataclasses.replace(wide, has_band=False)]
        features += [*single, dataclasses.replace(plain, bias_dtype=dtype)]
        most = dataclasses.replace(plain, bias_dtype=dtype, **dict.fromkeys(switches, True))
        tiles = {job.kernel: job.tile for job in _jobs([dataclasses.replace(base, features=most)])}
        jobs = _jobs(dataclasses.replace(base, features=some) for some in features)
        found += [job for job in jobs if job.has_tile and job.tile != tiles.get(job.kernel)]
    return _once(found)


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """A short list of choices in which every two values of two factors meet. The same factors always give the same list."""
    names = list(factors)
    missing = {
        pair: None
        for one, other in itertools.combinations(names, 2)
        for pair in itertools.product(((one, value) for value in factors[one]), ((other, value) for value in factors[other]))
    }
    chosen: list[dict[str, Any]] = []
    while missing:
        choice = dict(next(iter(missing)))
        for name in names:
            if name not in choice:
                # The value that brings most new pairs; of equals, the one taken least so far
                ranks = [
                    (len(missing.keys() & _pairs(names, {**choice, name: value}).keys()), -sum(old[name] == value for old in chosen))
                    for value in factors[name]
                ]
                choice[name] = factors[name][ranks.index(max(ranks))]
        for pair in _pairs(names, choice):
            missing.pop(pair, None)
        chosen.append({name: choice[name] for name in names})
    return chosen


def _pairs(names: Sequence[str], choice: Mapping[str, Any]) -> dict[Any, None]:
    return dict.fromkeys(itertools.combinations([(name, choice[name]) for name in names if name in choice], 2))


def _values_of(feature: str) -> tuple[Any, ...]:
    """The values of a feature that is more than a switch."""
    return {"bias_dtype": (None, "own", "float32")}[feature]


def _jobs(keys: Iterable[PlanKey]) -> list[Job]:
    """The kernels of the plans, each once."""
    return _once(Job(step, key) for key in keys for step in plans.kernels(key))


def _once(jobs: Iterable[Job]) -> list[Job]:
    found: dict[tuple[str, str, str], Job] = {}
    for job in jobs:
        found.setdefault(job.identity, job)
    return list(found.values())


# Which architectures


def why_unknown(arch: Arch, compiler: Toolchain) -> str:
    major, minor = compiler.version
    known = sorted(compiler.archs)
    span = f"it compiles for sm_{known[0]} to sm_{known[-1]}"
    if arch.number < known[0]:
        return f"NVRTC {major}.{minor} no longer knows {arch.name}: {span}. NVRTC 12.9 does: nvidia-cuda-nvrtc-cu12, FLASHTILE_NVRTC"
    return f"NVRTC {major}.{minor} does not know {arch.name}: {span}. A newer one may: nvidia-cuda-nvrtc, FLASHTILE_NVRTC"


def _asked_archs(names: Sequence[str], compiler: Toolchain) -> list[Arch]:
    archs = []
    accepted = f"one of {', '.join(arch.name for arch in ARCHS.values())}"
    for name in names:
        digits = name.removeprefix("sm_").removesuffix("a")
        arch = arch_of(int(digits) // 10, int(digits) % 10) if digits.isdigit() else None
        if arch is None:
            raise value_error("--arch", name, accepted)
        if arch.number not in compiler.archs:
            raise value_error("--arch", name, "an architecture the compiler knows", why_unknown(arch, compiler))
        archs.append(arch)
    return archs


def _archs_found() -> list[Arch]:
    """The architectures of the GPUs here."""
    capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    archs = [arch for arch in (arch_of(*capability) for capability in capabilities) if arch is not None]
    if not archs:
        way_out = f"Name what to compile for, as in --arch sm_90, or take --all; known: {', '.join(arch.name for arch in ARCHS.values())}"
        raise value_error("--arch", "none, and no GPU to take it from", "the architecture of a GPU, once or more", way_out)
    return list(dict.fromkeys(archs))


# How well it will run


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
    spill_bytes, shared_bytes = used.spill_store_bytes + used.spill_load_bytes, step.shared_bytes + used.static_shared_bytes
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
            f"does not fit a multiprocessor: {step.num_threads} threads of {used.registers} registers, {shared_bytes} bytes shared"
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


@dataclass(frozen=True)
class Options:
    archs: Sequence[str] = ()
    is_all: bool = False
    dtypes: Sequence[str] = ()
    head_dims: Sequence[int] = ()
    as_json: bool = False
    num_threads: int | None = None
    embed: Path | None = None


def prepare(options: Options) -> Callable[[], int]:
    """Checks the options. What it returns does the work and gives the exit status."""
    compiler = toolchain.find()
    for dtype in options.dtypes:
        if dtype not in table.DTYPES:
            raise value_error("--dtype", dtype, f"one of {', '.join(table.DTYPES)}")
    head_dims = []
    for head_dim in options.head_dims:
        padded = table.padded_head_dim(head_dim) if head_dim > 0 else None
        if padded is None:
            raise value_error("--head-dim", str(head_dim), f"1 to {table.HEAD_DIMS[-1]}")
        head_dims.append(padded)
    if options.num_threads is not None and options.num_threads < 1:
        raise value_error("--jobs", str(options.num_threads), "1 or more")
    skipped = []
    if options.archs:
        archs = _asked_archs(options.archs, compiler)
    elif options.is_all:
        known = compiler.archs
        archs = [arch for arch in ARCHS.values() if arch.number in known]
        skipped = [why_unknown(arch, compiler) for arch in ARCHS.values() if arch.number not in known]
    else:
        archs = _archs_found()
    chosen = (archs, options.dtypes or table.DTYPES, head_dims or table.HEAD_DIMS)
    jobs = plain_jobs(*chosen) if options.embed is None else embedded_jobs(*chosen)
    if options.is_all:
        seen = {job.identity for job in jobs}
        jobs += [job for job in edge_jobs(*chosen) if job.identity not in seen]
        seen |= {job.identity for job in jobs}
        jobs += [job for job in covering_jobs(*chosen) if job.identity not in seen]
    return lambda: _run(jobs, skipped, options)


def _run(jobs: Sequence[Job], skipped: Sequence[str], options: Options) -> int:
    console = Console(stderr=options.as_json)
    console = console if console.is_terminal else Console(stderr=options.as_json, width=_FILE_WIDTH)
    for reason in skipped:
        console.print(f"skipped: {escape(reason)}", highlight=False)
    num_threads = options.num_threads or os.cpu_count() or 1
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    results, start = {}, time.perf_counter()
    with warnings.catch_warnings(), Progress(*columns, console=console, transient=True) as progress:
        warnings.showwarning = lambda text, *_: progress.console.print(f"[yellow]warning: {escape(str(text))}")
        task = progress.add_task("", total=len(jobs))
        for result in compile_jobs(jobs, num_threads):
            results[result.job] = result
            progress.update(task, advance=1, description=str(result.job))
    ordered = [results[job] for job in jobs]
    failed = [result for result in ordered if result.problems]
    if options.as_json:
        print(json.dumps({"kernels": [result.as_dict() for result in ordered], "skipped": list(skipped)}, indent=2))
    else:
        console.print(_table(ordered))
    if options.embed is not None and not failed:
        for job in jobs:
            cache.embed(options.embed, job.step.unit, job.key.arch.name, [job.step.entry])
    directory = options.embed or cache.KernelCache.default().directory
    where = "kept in no file" if directory is None else f"in {directory}"
    console.print(f"{len(ordered)} kernels in {time.perf_counter() - start:.1f} s on {num_threads} threads, {where}", highlight=False)
    for result in failed:
        for problem in result.problems:
            console.print(f"[red]{escape(f'{result.job}: {problem}')}", highlight=False, soft_wrap=True)
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
        tile = f"{step.block_rows} x {step.block_columns}" if job.has_tile else "-"
        cells = [job.kernel, job.key.arch.name, job.key.dtype, str(job.key.head_dim), tile]
        cells += [str(step.num_threads), str(result.registers), str(result.spill_bytes), str(result.stack_bytes)]
        cells += [
            f"{result.shared_bytes / 1024:.1f}",
            str(result.blocks),
            str(result.blocks * step.num_threads // 32),
            f"{result.seconds:.2f}",
        ]
        shown.add_row(*cells, *([job.features] if has_features else []), style="red" if result.problems else None)
    return shown
