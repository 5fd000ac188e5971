"""The CUDA engine: from a call to the key of a plan, and to an executor that runs it on torch's current stream.

No length is read on the host and nothing waits for the GPU. Kernels are compiled on first use and cached
(runtime/cache.py).
"""

from __future__ import annotations

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from flashtile import families
from flashtile.backends import executor, kvcache, native
from flashtile.backends.base import Backend, GradNeeds, Grads, capability
from flashtile.backends.base import device_arch as _arch
from flashtile.backends.call import backward_tensors, layout_of, scalars_of, tensors_of, wanted_grads
from flashtile.backends.executor import Launch
from flashtile.backends.kvcache import AppendArgs
from flashtile.errors import Unsupported, dtype_name
from flashtile.families import Family, Row, assemble
from flashtile.families.steps import append_kv
from flashtile.plans.arch import Arch, arch_named, gpu_named, typical_multiprocessors
from flashtile.plans.plan import LaunchPlan
from flashtile.plans.spec import DTYPES, GRADS, PlanKey
from flashtile.problem import (
    AttentionArgs,
    Problem,
    is_aligned16,
    is_deterministic,
    shape_of,
)
from flashtile.runtime import cache, toolchain

# Persistent kernels number their tiles, of at least 64 rows, in 32 bits, those of packed sequences twice over
# (attn/scheduler.cuh). Others have a block for each tile
MAX_TILES = 2**30 - 1


def num_tiles(problem: Problem) -> int:
    """Tiles of 64 queries, as csrc/exec/attention.cpp counts them. Each packed sequence may have one more."""
    shape = problem.shape
    if problem.is_varlen:
        return (-(-shape.expected_q * shape.batch // 64) + shape.batch) * shape.heads
    return -(-shape.seqlen_q // 64) * shape.batch * shape.heads


class CudaBackend(Backend):
    name = "cuda"
    summary = "hand-written CUDA kernels, compiled for this GPU on first use; memory linear in the sequence length"
    devices = ("cuda",)
    is_compiled = True
    takes_mutations = True
    is_layout_exact = True

    def refuse(self, problem: Problem, op: str = "forward") -> str | None:
        if dtype_name(problem.dtype) not in DTYPES:
            return f"{dtype_name(problem.dtype)} is not among its dtypes ({', '.join(DTYPES)})"
        reason = None if problem.arch else _missing(problem.device_index)
        if reason is not None:
            return reason
        if num_tiles(problem) > MAX_TILES:
            return "more tiles of queries than kernels number in 32 bits"
        key = problem_key(problem, op)
        if families.fastest(key) is not None:
            return None
        return "; ".join(f"{name}: {reason}" for name, reason in families.refusals(key).items())

    def time_us(self, problem: Problem, op: str) -> float | None:
        return families.time_us(problem_key(problem, op))

    def plan_forward(self, args: AttentionArgs, problem: Problem) -> bool:
        return _plan(native.FORWARD, args, problem, None, ())

    def plan_backward(self, args: AttentionArgs, problem: Problem, needs: GradNeeds, has_dlse: bool) -> bool:
        return _plan(native.BACKWARD, args, problem, wanted_grads(args, needs), ("dlse",) * has_dlse)

    def forward(self, args: AttentionArgs, out: Tensor, lse: Tensor) -> None:
        executor.execute(forward_launch(args, out, lse))

    def backward(
        self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads
    ) -> None:
        executor.execute(backward_launch(args, dout, dlse, out, lse, grads))

    def details(self, problem: Problem, op: str = "forward") -> dict[str, str]:
        key, found = problem_key(problem, op), {}
        chosen = families.select(key)
        if key.copies_rows:
            label = "copies" if op == "forward" else "backward copies"
            found[label] = "rows that are not multiples of 16 bytes on 16-byte boundaries, to memory where they are"
        for step in assemble.kernels(key):
            if step.shared_bytes:
                tile = f"tile {step.tile}, {step.num_threads // 32} warps"
                memory = f"{step.shared_bytes / 1024:.0f} KiB of shared memory"
                found[step.name] = f"{tile}{chosen.tile_note(key)}, {memory}, {key.arch.label}"
        for name, reason in families.refusals(key).items():
            if reason is None and name != chosen.name:
                reason = families.find(name).drawback(key) or f"{chosen.name} is faster"
            if reason is not None:
                found[f"not {name}"] = reason
        return found

    def tile_sizes(self) -> frozenset[int]:
        return families.tile_sizes()

    def loaded_kernels(self) -> frozenset[str]:
        return frozenset(executor.loaded)

    def prepare(self, problem: Problem) -> None:
        """Compiles for tensors whose rows are aligned, if their head dims allow that, and for calls that differ in one
        class of lengths."""
        keys = [_plain_key(problem, None)]
        if problem.needs_grad and self.refuse(problem, "backward") is None:
            keys.append(_plain_key(problem, _all_grads(problem)))
        keys += [key for one in list(keys) for key in _other_lengths(one)]
        keys = [_with_copies(key, problem) for key in keys]
        kernels = {(step.unit, step.entry, key.arch.name) for key in keys for step in assemble.kernels(key)}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda kernel: executor.function(*kernel), kernels))


def row_plan(family: Family, row: Row, args: AttentionArgs, out: Tensor, lse: Tensor) -> LaunchPlan:
    """The plan of a forward pass by one row that need not be in its family's table, without splits."""
    tensors = tensors_of(args) | {"out": out, "lse": lse}
    key, layout = _key(args, tensors), layout_of(args, tensors)
    with families.forced_rows({row.kernel: row}):
        launch = family.launch(key, layout)
    steps = tuple(step for step in launch.steps if not step.is_for_splits)
    workspaces = tuple(workspace for workspace in launch.workspaces if not workspace.is_for_splits)
    return assemble.plan_of(key, layout, replace(launch, steps=steps, workspaces=workspaces, splits=None))


# The cache


def takes_append(k: Tensor) -> bool:
    return dtype_name(k.dtype) in DTYPES and _missing(k.device.index or 0) is None


def append(args: AppendArgs) -> None:
    """Appends as kvcache.append does, bit for bit; rows that the cache has no room for are dropped."""
    launch = append_launch(args)
    if not _plan_append(launch):
        executor.execute(launch)


def append_step(args: AppendArgs, q: Tensor, is_ordered: bool) -> tuple[Tensor | None, Tensor | None]:
    """Appends as kvcache.append_step does, bit for bit, in one launch. Without results where C++ makes the call by a
    plan."""
    rotated = None if args.rotary_cos is None else kvcache.empty_rotated(q, args.layout)
    seqused = torch.empty_like(args.cache_seqlens)
    launch = append_launch(args, q, is_ordered, rotated, seqused)
    if _plan_append(launch):
        return None, None
    executor.execute(launch)
    return rotated, seqused


def _plan_append(launch: Launch) -> bool:
    """Registers the plan of the append that waits for one."""
    index, num_multiprocessors = launch.device_index, launch.splits.num_multiprocessors
    if native.missing() is not None:
        return False
    return native.register_plan(native.APPEND, launch.plan, num_multiprocessors, launch.arch, index)


# From a call to what an executor is told


def _plan(
    kind: int, args: AttentionArgs, problem: Problem, grads: tuple[str, ...] | None, others: tuple[str, ...]
) -> bool:
    """Registers the plan of the call that waits for one. others: the optional tensors of a backward pass."""
    key, index = _key_of(problem, grads), problem.device_index
    plan = assemble.plan(key, layout_of(args, (*tensors_of(args), *others)))
    return native.register_plan(kind, plan, _num_multiprocessors(index), key.arch.name, index)


def forward_launch(args: AttentionArgs, out: Tensor, lse: Tensor) -> Launch:
    return _launch(args, tensors_of(args) | {"out": out, "lse": lse})


def backward_launch(
    args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads
) -> Launch:
    tensors = backward_tensors(args, dout, dlse, out, lse, grads, is_for_gpu=True)
    return _launch(args, tensors, tuple(name for name in GRADS if name in tensors))


def _launch(args: AttentionArgs, tensors: dict[str, Tensor], grads: tuple[str, ...] | None = None) -> Launch:
    plan = assemble.plan(_key(args, tensors, grads), layout_of(args, tensors))
    return Launch(plan, tensors, scalars_of(args), _splits(args), _arch_of(args).name)


def append_launch(
    args: AppendArgs,
    q: Tensor | None = None,
    is_ordered: bool = False,
    rotated_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Launch:
    """Returns the launch of an append; with seqused_k, of a step: the queries are rotated into rotated_q where there
    are angles."""
    given = args._asdict() | {"seqused_k": seqused_k}
    if rotated_q is not None:
        given |= {"q": q, "rotated_q": rotated_q}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    dtype = dtype_name(args.k.dtype)
    angle_dtypes = {dtype_name(angles.dtype) for angles in (args.rotary_cos, args.rotary_sin) if angles is not None}
    angle_dtype = "float32" if len(angle_dtypes) == 2 else next(iter(angle_dtypes), dtype)
    has_rotary, is_step = bool(angle_dtypes), seqused_k is not None
    is_aligned = _is_append_aligned(args, tensors)
    key = append_kv.AppendKey(
        dtype, angle_dtype, args.layout, args.block_table is not None, has_rotary, is_step, is_aligned
    )
    index = args.k.device.index or 0
    arch = _arch(index)
    assert arch is not None  # else refused
    splits = executor.Splits(1, _num_multiprocessors(index))
    scalars = {"is_interleaved": args.rotary_interleaved, "is_ordered": is_ordered, "length": 0}
    return Launch(append_kv.plan(key), tensors, scalars, splits, arch.name)


def _is_append_aligned(args: AppendArgs, tensors: dict[str, Tensor]) -> bool:
    """Rows can be moved in chunks of 16 bytes, the two halves of a rotated part too."""
    if args.rotary_cos is not None and args.rotary_cos.shape[1] * args.k.element_size() % 16:
        return False
    rows = [tensors[name] for name in ("k_cache", "v_cache", "k", "v", "q", "rotated_q") if name in tensors]
    return all(is_aligned16(tensor) and (tensor.shape[-1] <= 1 or tensor.stride(-1) == 1) for tensor in rows)


# What is there


def introduce(device_index: int) -> None:
    """Lets C++ describe calls on a GPU (native.described)."""
    native.introduce(device_index, _num_multiprocessors(device_index))


def _arch_of(args: AttentionArgs) -> Arch:
    arch = _arch(args.q.device.index or 0)
    assert arch is not None  # else refused
    return arch


@functools.cache
def _num_multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@functools.cache
def _missing(device_index: int) -> str | None:
    """Returns why nothing can be compiled for that GPU or launched on it, or None."""
    arch = _arch(device_index)
    if arch is None:
        major, minor = capability(device_index)
        return f"compute capability {major}.{minor} is older than its kernels (6.1)"
    if cache.is_embedded(arch.name):
        return None
    try:
        toolchain.find()
    except Unsupported as error:
        return str(error)
    return None


# The key of a plan


def _key(args: AttentionArgs, tensors: dict[str, Tensor], grads: tuple[str, ...] | None = None) -> PlanKey:
    problem = Problem.summary(args, shape_of(args))
    others = (tensors[name] for name in ("out", "dout", "dq", "dk", "dv") if name in tensors)
    if problem.is_aligned16 and not all(map(is_aligned16, others)):
        problem = replace(problem, is_aligned16=False)
    return _key_of(problem, grads)


def problem_key(problem: Problem, op: str) -> PlanKey:
    """The key of a pass as far as it is known before its results are allocated."""
    return _key_of(problem, _all_grads(problem) if op == "backward" else None)


def _all_grads(problem: Problem) -> tuple[str, ...]:
    is_wanted = {"dbias": problem.needs_bias_grad, "dsinks": problem.has_sinks}
    return tuple(name for name in GRADS if is_wanted.get(name, True))


def _key_of(problem: Problem, grads: tuple[str, ...] | None) -> PlanKey:
    key = _plain_key(problem, grads)
    return key if key.features.is_aligned16 else _with_copies(key, problem)


def _plain_key(problem: Problem, grads: tuple[str, ...] | None) -> PlanKey:
    """The key for tensors as they are, without copies of rows, on the device or on a GPU that need not be here."""
    index, gpu = problem.device_index, gpu_named(problem.gpu) if problem.gpu else None
    arch = arch_named(problem.arch) if problem.arch else _arch(index)
    assert arch is not None  # else refused
    if gpu is not None:
        num_multiprocessors = gpu.multiprocessors
    else:
        num_multiprocessors = typical_multiprocessors(arch) if problem.arch else _num_multiprocessors(index)
    return families.key_of(problem, grads, arch, num_multiprocessors)


def _with_copies(key: PlanKey, problem: Problem) -> PlanKey:
    """Keys and values are not copied where they are a cache, of which a call reads a part."""
    is_cache = problem.page_size > 0 or problem.has_key_lengths
    return key if is_cache else families.with_copies(key)


def _other_lengths(key: PlanKey) -> list[PlanKey]:
    """The keys of calls that differ from this one in the class of their lengths alone."""
    found = []
    for index, (which, value) in enumerate(key.classes):
        for other in which.values:
            if other != value:
                classes = (*key.classes[:index], (which, other), *key.classes[index + 1 :])
                found.append(dataclasses.replace(key, classes=classes))
    return found


# What the key and the executor are told


def _splits(args: AttentionArgs) -> executor.Splits:
    """Returns num_splits if given; 1 in deterministic calls; 0 lets the plan choose."""
    asked = args.num_splits or int(is_deterministic(args))
    return executor.Splits(asked, _num_multiprocessors(args.q.device.index or 0))
