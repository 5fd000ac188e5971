"""`flashtile compile`: fills the kernel cache for given architectures, no GPU needed, and shows what each kernel takes.

What is compiled comes from the families, so a new row, kernel or step is covered as soon as a family launches it. A
kernel that spills, keeps a stack frame, makes the compiler warn or asks for more shared memory than the architecture
has is a failure.
"""

from __future__ import annotations

import dataclasses
import functools
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

from flashtile.bench.files import writable_folder
from flashtile.cli.limits import check_jobs
from flashtile.errors import value_error
from flashtile.kernels import append_kv, families
from flashtile.kernels.arch import ARCHS, Arch, arch_named, arch_of
from flashtile.kernels.families import Family
from flashtile.kernels.length_class import LengthClass
from flashtile.kernels.plan import Step
from flashtile.kernels.spec import DTYPES, CallLayout, Features, PlanKey
from flashtile.runtime import cache, toolchain
from flashtile.runtime.nvrtc import CompileError
from flashtile.runtime.toolchain import Toolchain

_FILE_WIDTH = 200
_LAYOUT = CallLayout("bhsd", ())  # kernels do not depend on it


@dataclass(frozen=True)
class Job:
    """One kernel to compile: a step of a family's launch, and the key that led to it."""

    step: Step
    key: PlanKey
    family: Family[Any] | None = None  # None: no family's

    @property
    def is_chosen(self) -> bool:
        """Some call with the features of this key takes the family."""
        return self.family is None or self.family in _chosen_families(dataclasses.replace(self.key, classes=()))

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
        words = [
            field.name if value is True else f"{field.name}={value}" for field, value in pairs if value != field.default
        ]
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


def head_dims() -> tuple[int, ...]:
    """Every padded head dim of every family."""
    return tuple(sorted({dim for family in families.all_families() for pair in family.head_dims for dim in pair}))


def plain_jobs(
    archs: Iterable[Arch],
    dtypes: Sequence[str] = DTYPES,
    dims: Sequence[int] | None = None,
    has_band: bool = False,
) -> list[Job]:
    """Every kernel without any option, or causal, for every class of lengths. One that exists only with an option comes
    with that option alone."""
    return _once(_plain_jobs(archs, dtypes, dims, has_band))


def _plain_jobs(
    archs: Iterable[Arch], dtypes: Sequence[str], dims: Sequence[int] | None, has_band: bool
) -> Iterator[Job]:
    """As plain_jobs, with a kernel that several families or keys share once for each."""
    for arch in archs:
        for family, dtype, pair in _tables(arch, dtypes, dims):
            for grads in _grad_sets(family):
                bias = dtype if grads == ("dbias",) else None
                key = PlanKey(dtype, dtype, *pair, Features(has_band=has_band, bias_dtype=bias), arch, grads)
                yield from _jobs(family, _of_all_lengths(family, key))
        for dtype in dtypes:
            key = PlanKey(dtype, dtype, 0, 0, Features(), arch)
            for angle_dtype in dict.fromkeys((dtype, "float32")):
                for is_aligned16 in (False, True):
                    yield Job(append_kv.kernel(dtype, angle_dtype, is_aligned16), key)


def embedded_jobs(
    archs: Sequence[Arch], dtypes: Sequence[str] = DTYPES, dims: Sequence[int] | None = None
) -> list[Job]:
    """The kernels that come with a package: those without an option, and causal ones, of the families that calls
    take."""
    jobs = (job for has_band in (False, True) for job in _plain_jobs(archs, dtypes, dims, has_band))
    return _once(job for job in jobs if job.is_chosen)


def _chosen_families(key: PlanKey) -> frozenset[Family[Any]]:
    """Those that calls of any length take, deterministic or not."""
    return _chosen_of(key, tuple(families.all_families(key.op)), families.forced_names())


@functools.lru_cache(maxsize=256)
def _chosen_of(key: PlanKey, known: tuple[Family[Any], ...], forced: tuple[str, ...]) -> frozenset[Family[Any]]:
    """The same; the choice depends on the families that there are and on those that are forced."""
    keys = (dataclasses.replace(key, is_deterministic=is_deterministic) for is_deterministic in (False, True))
    return frozenset(families.select(one) for key in keys for one in _asked_lengths(key, families.select))


@dataclass(frozen=True)
class _PartialKey(PlanKey):
    """A key that does not guess a length class it was not given."""

    def length(self, which: LengthClass) -> int:
        if which not in dict(self.classes):
            raise _UnknownLengthError(which)
        return super().length(which)


class _UnknownLengthError(Exception):
    def __init__(self, which: LengthClass) -> None:
        super().__init__(which)
        self.which = which


def _asked_lengths(key: PlanKey, function: Callable[[PlanKey], object]) -> Iterator[PlanKey]:
    """Keys with every value of every length class that the function asks them for. Of two classes of which the second
    is asked for under some values of the first alone, not all pairs come."""
    fields = {field.name: getattr(key, field.name) for field in dataclasses.fields(key)}
    left: list[tuple[tuple[LengthClass, int], ...]] = [()]
    while left:
        fields["classes"] = left.pop()
        try:
            function(_PartialKey(**fields))
        except _UnknownLengthError as missing:
            left += [(*fields["classes"], (missing.which, value)) for value in missing.which.values]
        else:
            yield PlanKey(**fields)


def covering_jobs(
    archs: Sequence[Arch],
    dtypes: Sequence[str] = DTYPES,
    dims: Sequence[int] | None = None,
    crosses_head_dims: bool = True,
) -> list[Job]:
    """Variants of each kernel in which every two values of its options, dtype and length classes meet; its head dims
    too, or else they take turns."""
    jobs: list[Job] = []
    for arch, family in itertools.product(archs, families.all_families()):
        own_dtypes = [dtype for dtype in dtypes if dtype in family.dtypes]
        pairs = [pair for pair in family.head_dims if dims is None or max(pair) in dims]
        if not family.runs_on(arch) or not own_dtypes or not pairs:
            continue
        for grads in _grad_sets(family):
            factors = {"head_dim": pairs} if crosses_head_dims else {}
            factors |= {"dtype": own_dtypes, "out_dtype": ("own", "float32")} | _feature_values(family, grads)
            factors |= {which: which.values for which in family.length_classes}
            for choice, turn in zip(pairwise(factors), itertools.cycle(pairs), strict=False):
                jobs += _jobs(family, [_chosen_key(family, choice, turn, arch, grads)])
        # Kernels that take no option
        if set(family.kernels) - {job.kernel for job in jobs}:
            dtype, (head_dim, head_dim_v) = own_dtypes[0], pairs[0]
            key = PlanKey(dtype, dtype, head_dim, head_dim_v, Features(), arch, _grad_sets(family)[0])
            jobs += _jobs(family, _of_all_lengths(family, key))
    return _once(jobs)


def edge_jobs(archs: Iterable[Arch], dtypes: Sequence[str] = DTYPES, dims: Sequence[int] | None = None) -> list[Job]:
    """Variants with few options, of the tiles that take only so many: these are closest to a spill. With many, the tile
    is another."""
    found = []
    for arch in archs:
        for family, dtype, pair in _tables(arch, dtypes, dims):
            for grads in _grad_sets(family):
                base = PlanKey(dtype, dtype, *pair, Features(), arch, grads)
                # A band, lengths and narrow loads cost no registers of the table's kind: every tile takes them
                wanted = {"has_band": True, "has_lengths": True, "is_aligned16": False}
                plain = Features(
                    bias_dtype=dtype if grads == ("dbias",) else None,
                    **{name: value for name, value in wanted.items() if name in family.features},
                )
                wide = dataclasses.replace(plain, is_aligned16=True)
                switches = [
                    field.name
                    for field in dataclasses.fields(Features)
                    if field.default is False and field.name in family.features and not getattr(plain, field.name)
                ]
                features = [plain, wide]
                features += [dataclasses.replace(wide, has_lengths=False), dataclasses.replace(wide, has_band=False)]
                features += [Features(**(dataclasses.asdict(plain) | {name: True})) for name in switches]
                features += [dataclasses.replace(plain, bias_dtype=dtype)]
                all_on = dict.fromkeys(switches, True) | {"bias_dtype": dtype}
                most = Features(**(dataclasses.asdict(plain) | all_on))
                tiles = {job.kernel: job.tile for job in _jobs(family, [dataclasses.replace(base, features=most)])}
                jobs = _jobs(family, [dataclasses.replace(base, features=some) for some in features])
                found += [job for job in jobs if job.has_tile and job.tile != tiles.get(job.kernel)]
    return _once(found)


def _tables(
    arch: Arch, dtypes: Sequence[str], dims: Sequence[int] | None
) -> Iterator[tuple[Family[Any], str, tuple[int, int]]]:
    """Every family that runs on the architecture, with each of its dtypes and pairs of head dims."""
    for family in families.all_families():
        if family.runs_on(arch):
            for dtype, pair in itertools.product(family.dtypes, family.head_dims):
                if dtype in dtypes and (dims is None or max(pair) in dims):
                    yield family, dtype, pair


def _grad_sets(family: Family[Any]) -> tuple[tuple[str, ...] | None, ...]:
    return family.grad_sets or (None,)


def _of_all_lengths(family: Family[Any], key: PlanKey) -> list[PlanKey]:
    """The keys of calls that differ in the classes of their lengths alone, as far as the family looks at them."""
    return list(_asked_lengths(key, lambda some: family.refuse(some) or family.launch(some, _LAYOUT)))


def _feature_values(family: Family[Any], grads: tuple[str, ...] | None) -> dict[str, Sequence[Any]]:
    """The values that each feature of the family may have."""
    values: dict[str, Sequence[Any]] = {}
    for field in dataclasses.fields(Features):
        if field.name not in family.features:
            values[field.name] = (field.default,)
        elif field.name == "bias_dtype":
            values[field.name] = ("own", "float32") if grads == ("dbias",) else (None, "own", "float32")
        else:
            values[field.name] = (False, True)
    return values


def _chosen_key(
    family: Family[Any], choice: dict[Any, Any], pair: tuple[int, int], arch: Arch, grads: tuple[str, ...] | None
) -> PlanKey:
    dtype, out_dtype, pair = choice.pop("dtype"), choice.pop("out_dtype"), choice.pop("head_dim", pair)
    classes = tuple((which, choice.pop(which)) for which in family.length_classes)
    choice["bias_dtype"] = dtype if choice["bias_dtype"] == "own" else choice["bias_dtype"]
    out_dtype = dtype if out_dtype == "own" else out_dtype
    return PlanKey(dtype, out_dtype, pair[0], pair[1], Features(**choice), arch, grads, classes=classes)


def pairwise(factors: Mapping[Any, Sequence[Any]]) -> list[dict[Any, Any]]:
    """A short list of choices in which every two values of two factors meet. The same factors always give the same
    list."""
    names = list(factors)
    missing = {
        pair: None
        for one, other in itertools.combinations(names, 2)
        for pair in itertools.product(
            ((one, value) for value in factors[one]), ((other, value) for value in factors[other])
        )
    }
    chosen: list[dict[Any, Any]] = []
    while missing:
        choice = dict(next(iter(missing)))
        for name in names:
            if name not in choice:
                # The value that brings most new pairs; of equals, the one taken least so far
                ranks = [
                    (
                        len(missing.keys() & _pairs(names, {**choice, name: value}).keys()),
                        -sum(old[name] == value for old in chosen),
                    )
                    for value in factors[name]
                ]
                choice[name] = factors[name][ranks.index(max(ranks))]
        for pair in _pairs(names, choice):
            missing.pop(pair, None)
        chosen.append({name: choice[name] for name in names})
    return chosen


def _pairs(names: Sequence[Any], choice: Mapping[Any, Any]) -> dict[Any, None]:
    return dict.fromkeys(itertools.combinations([(name, choice[name]) for name in names if name in choice], 2))


def _jobs(family: Family[Any], keys: Iterable[PlanKey]) -> list[Job]:
    """The kernels that the family launches for the keys it takes, once for each key."""
    taken = (key for key in keys if family.refuse(key) is None)
    return [Job(step, key, family) for key in taken for step in family.launch(key, _LAYOUT).steps]


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
        return (
            f"NVRTC {major}.{minor} no longer knows {arch.name}: {span}. NVRTC 12.9 does: "
            "nvidia-cuda-nvrtc-cu12, FLASHTILE_NVRTC"
        )
    return (
        f"NVRTC {major}.{minor} does not know {arch.name}: {span}. A newer one may: nvidia-cuda-nvrtc, FLASHTILE_NVRTC"
    )


def _asked_archs(names: Sequence[str], compiler: Toolchain) -> list[Arch]:
    archs = []
    accepted = f"one of {', '.join(arch.name for arch in ARCHS.values())}"
    for name in names:
        arch = arch_named(name)
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
        used.spill_store_bytes + used.spill_load_bytes,
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
        if dtype not in DTYPES:
            raise value_error("--dtype", dtype, f"one of {', '.join(DTYPES)}")
    known_dims = head_dims()
    dims = []
    for head_dim in options.head_dims:
        padded = next((known for known in known_dims if 0 < head_dim <= known), None)
        if padded is None:
            raise value_error("--head-dim", str(head_dim), f"1 to {known_dims[-1]}")
        dims.append(padded)
    check_jobs(options.num_threads)
    if options.embed is not None:
        cache.check_embedding()
        options = dataclasses.replace(options, embed=writable_folder(options.embed, "--embed"))
    skipped = []
    if options.archs:
        archs = _asked_archs(options.archs, compiler)
    elif options.is_all:
        known = compiler.archs
        archs = [arch for arch in ARCHS.values() if arch.number in known]
        skipped = [why_unknown(arch, compiler) for arch in ARCHS.values() if arch.number not in known]
    else:
        archs = _archs_found()
    chosen = (archs, options.dtypes or DTYPES, dims or known_dims)
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
    console.print(
        f"{len(ordered)} kernels in {time.perf_counter() - start:.1f} s on {num_threads} threads, {where}",
        highlight=False,
    )
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
        cells = [job.kernel, job.key.arch.name, job.key.dtype, str(job.key.head_dim or "any"), tile]
        cells += [str(step.num_threads), str(result.registers), str(result.spill_bytes), str(result.stack_bytes)]
        cells += [
            f"{result.shared_bytes / 1024:.1f}",
            str(result.blocks),
            str(result.blocks * step.num_threads // 32),
            f"{result.seconds:.2f}",
        ]
        shown.add_row(*cells, *([job.features] if has_features else []), style="red" if result.problems else None)
    return shown
