"""The CUDA engine: from a call to the key of a plan, and to an executor that runs it on torch's current stream.

No length is read on the host and nothing waits for the GPU. Kernels are compiled on first use and cached (runtime/cache.py).
"""

from __future__ import annotations

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from flashtile.backends import executor, native
from flashtile.backends.base import Backend, Grads
from flashtile.backends.call import backward_tensors, form_of, scalars_of, tensors_of
from flashtile.backends.executor import Launch
from flashtile.backends.kvcache import AppendArgs
from flashtile.errors import Unsupported, dtype_name
from flashtile.kernels import plan as plans
from flashtile.kernels import table
from flashtile.kernels.append import AppendKey
from flashtile.kernels.append import plan as append_plan
from flashtile.kernels.arch import Arch, arch_of
from flashtile.kernels.plan import GRADS, LaunchPlan, PlanKey
from flashtile.kernels.spec import Features, Row, Sm90Row
from flashtile.problem import (
    AttentionArgs,
    Problem,
    check_values,
    head_axis,
    is_checking,
    is_deterministic,
    key_window,
    row_axis,
    shape_of,
    softmax_scale,
)
from flashtile.runtime import cache, toolchain


class CudaBackend(Backend):
    name = "cuda"
    summary = "hand-written CUDA kernels, compiled for this GPU on first use; memory linear in the sequence length"
    devices = ("cuda",)
    is_compiled = True
    takes_mutations = True

    def refuse(self, problem: Problem) -> str | None:
        if dtype_name(problem.dtype) not in table.DTYPES:
            return f"{dtype_name(problem.dtype)} is not among its dtypes ({', '.join(table.DTYPES)})"
        largest = max(problem.shape.head_dim, problem.shape.head_dim_v)
        if table.padded_head_dim(largest) is None:
            return f"head_dim {largest} is over its {table.HEAD_DIMS[-1]}"
        if problem.needs_grad and problem.page_size:
            return "it has no backward pass for paged keys"
        return _missing()

    def forward(self, args: AttentionArgs, out: Tensor, lse: Tensor) -> None:
        if is_checking():
            check_values(args)
        _execute(native.FORWARD, forward_launch(args, out, lse))

    def backward(self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads) -> None:
        if is_checking():
            check_values(args)
        _execute(native.BACKWARD, backward_launch(args, dout, dlse, out, lse, grads))

    def details(self, problem: Problem) -> dict[str, str]:
        found = {}
        for key in _problem_keys(problem):
            if key.arch.has_wgmma and key.grads is None and (reason := plans.why_not_sm90(key)) is not None:
                found["fwd_sm90_kernel"] = f"not taken: {reason}"
            for step in plans.kernels(key):
                if not key.is_small and step.shared_bytes:
                    tile = f"tile {step.block_rows} x {step.block_columns}, {step.num_threads // 32} warps"
                    if step.is_persistent and key.packed_heads > 1:
                        tile += f", the queries of {key.packed_heads} heads of a KV head in one tile"
                    found[step.name] = f"{tile}, {step.shared_bytes / 1024:.0f} KiB of shared memory, {key.arch.name}"
        return found

    def tile_sizes(self) -> frozenset[int]:
        return table.tile_sizes()

    def loaded_kernels(self) -> frozenset[str]:
        return frozenset(executor.loaded)

    def prepare(self, problem: Problem) -> None:
        """Compiles for tensors whose rows are aligned, if their head dims allow that."""
        kernels = {(step.unit, step.entry, key.arch.name) for key in _problem_keys(problem) for step in plans.kernels(key)}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda kernel: executor.function(*kernel), kernels))


def row_plan(row: Row | Sm90Row, args: AttentionArgs, out: Tensor, lse: Tensor) -> LaunchPlan:
    """The plan of a forward pass by one kernel that need not be in the table, without splits."""
    given = tensors_of(args) | {"out": out, "lse": lse}
    key = _key(args, given)
    return plans.plan_of(key, form_of(args, given), (plans.step_of(row, key.features),))


# The cache


def takes_append(dtype: torch.dtype) -> bool:
    return dtype_name(dtype) in table.DTYPES and _missing() is None


def append(args: AppendArgs) -> None:
    """As kvcache.append, bit for bit; rows that the cache has no room for are dropped."""
    _execute(native.APPEND, append_launch(args))


def _execute(kind: int, launch: Launch) -> None:
    """Here, and by the C++ executor from the next call like it on."""
    executor.execute(launch)
    if not is_checking():
        native.register_plan(kind, launch)


# From a call to what an executor is told


def forward_launch(args: AttentionArgs, out: Tensor, lse: Tensor) -> Launch:
    given = tensors_of(args) | {"out": out, "lse": lse}
    plan = plans.plan(_forward_key(args, given), form_of(args, given))
    return Launch(plan, given, scalars_of(args), _splits(args), _arch_of(args).name)


def backward_launch(args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads) -> Launch:
    given = backward_tensors(args, dout, dlse, out, lse, grads)
    wanted = tuple(name for name in GRADS if name in given)
    plan = plans.plan(_key(args, given, grads=wanted), form_of(args, given))
    return Launch(plan, given, scalars_of(args), _splits(args), _arch_of(args).name)


def append_launch(args: AppendArgs) -> Launch:
    given = {name: value for name, value in args._asdict().items() if isinstance(value, Tensor)}
    dtype = dtype_name(args.k.dtype)
    angle_dtypes = {dtype_name(angles.dtype) for angles in (args.rotary_cos, args.rotary_sin) if angles is not None}
    angle_dtype = "float32" if len(angle_dtypes) == 2 else next(iter(angle_dtypes), dtype)
    key = AppendKey(dtype, angle_dtype, args.layout, args.block_table is not None, bool(angle_dtypes))
    index = args.k.device.index or 0
    arch = _arch(index)
    assert arch is not None  # else refused
    splits = executor.Splits(1, _num_multiprocessors(index))
    return Launch(append_plan(key), given, {"is_interleaved": args.rotary_interleaved}, splits, arch.name)


# What is there


@functools.cache
def _arch(device_index: int) -> Arch | None:
    return arch_of(*torch.cuda.get_device_capability(device_index))


def _arch_of(args: AttentionArgs) -> Arch:
    arch = _arch(args.q.device.index or 0)
    assert arch is not None  # else refused
    return arch


@functools.cache
def _num_multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@functools.cache
def _missing() -> str | None:
    """Why nothing can be compiled or launched here, or None."""
    arch = _arch(torch.cuda.current_device())
    if arch is None:
        major, minor = torch.cuda.get_device_capability()
        return f"compute capability {major}.{minor} is older than its kernels (6.1)"
    if cache.is_embedded(arch.name):
        return None
    try:
        toolchain.find()
    except Unsupported as error:
        return str(error)
    return None


# The key of a plan


def _features(args: AttentionArgs, is_wide: bool) -> Features:
    return Features(
        has_band=key_window(args) != (-1, -1),
        has_bool_mask=args.mask is not None,
        has_softcap=args.softcap > 0.0,
        has_alibi=args.alibi_slopes is not None,
        bias_dtype=None if args.bias is None else dtype_name(args.bias.dtype),
        has_dropout=args.dropout_p > 0.0,
        has_lengths=any(tensor is not None for tensor in (args.cu_seqlens_q, args.seqused_k, args.leftpad_k)),
        is_paged=args.block_table is not None,
        is_wide=is_wide,
    )


def _problem_features(problem: Problem) -> Features:
    size, shape = problem.dtype.itemsize, problem.shape
    return Features(
        has_band=problem.window != (-1, -1),
        has_bool_mask=problem.has_mask,
        has_softcap=problem.softcap > 0.0,
        has_alibi=problem.has_alibi,
        bias_dtype=None if problem.bias_dtype is None else dtype_name(problem.bias_dtype),
        has_dropout=problem.dropout_p > 0.0,
        has_lengths=problem.is_varlen or problem.has_key_lengths,
        is_paged=problem.page_size > 0,
        is_wide=shape.head_dim * size % 16 == 0 and shape.head_dim_v * size % 16 == 0,
    )


def _key(args: AttentionArgs, given: dict[str, Tensor], **more: Any) -> PlanKey:
    dtypes = dtype_name(args.q.dtype), dtype_name(given["out"].dtype)
    is_wide = all(_is_wide(given[name]) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv") if name in given)
    more |= {
        "is_scale_positive": softmax_scale(args) > 0.0,
        "has_own_rows": all(_has_own_rows(x, args.layout) for x in (args.q, args.k, args.v)),
    }
    return PlanKey(*dtypes, args.q.shape[-1], args.v.shape[-1], _features(args, is_wide), _arch_of(args), **more)


def _forward_key(args: AttentionArgs, given: dict[str, Tensor]) -> PlanKey:
    # The grid of a large tile would leave multiprocessors idle
    shape = shape_of(args)
    num_blocks = -(-shape.seqlen_q // (2 * table.SMALL_BLOCK_M)) * shape.heads * shape.batch
    is_small = num_blocks < _num_multiprocessors(args.q.device.index or 0)
    is_spread = args.q.stride(head_axis(args.layout)) == 0  # a box of the copy engine has no room for that
    packed_heads = 1 if is_spread else table.packed_heads(shape.seqlen_q, shape.heads, shape.heads_kv)
    return _key(args, given, is_small=is_small, packed_heads=packed_heads, is_ragged=table.is_ragged(shape.seqlen_q))


def _problem_keys(problem: Problem) -> list[PlanKey]:
    """Of a forward pass over large grids and over small ones, and of the backward pass if one will follow."""
    arch, shape = _arch(torch.cuda.current_device()), problem.shape
    assert arch is not None  # else refused
    dtypes = dtype_name(problem.dtype), dtype_name(problem.out_dtype)
    features = _problem_features(problem)
    key = PlanKey(*dtypes, shape.head_dim, shape.head_dim_v, features, arch, is_scale_positive=problem.scale > 0.0)
    packed_heads = table.packed_heads(shape.seqlen_q, shape.heads, shape.heads_kv)
    forward = dataclasses.replace(key, packed_heads=packed_heads, is_ragged=table.is_ragged(shape.seqlen_q))
    keys = [forward, dataclasses.replace(forward, is_small=True)]
    if problem.needs_grad:
        is_wanted = {"dbias": problem.needs_bias_grad, "dsinks": problem.has_sinks}
        keys.append(dataclasses.replace(key, grads=tuple(name for name in GRADS if is_wanted.get(name, True))))
    return keys


# What the key and the executor are told


def _splits(args: AttentionArgs) -> executor.Splits:
    """What the caller says; else none where a result may not depend on the batch."""
    return executor.Splits(args.num_splits or int(is_deterministic(args)), _num_multiprocessors(args.q.device.index or 0))


def _has_own_rows(tensor: Tensor, layout: str) -> bool:
    row = row_axis(layout)
    return tensor.shape[row] <= 1 or tensor.stride(row) >= tensor.shape[-1]


def _is_wide(tensor: Tensor) -> bool:
    """Every row starts on a 16-byte boundary and is a multiple of 16 bytes long."""
    size = tensor.element_size()
    if tensor.data_ptr() % 16 or tensor.shape[-1] * size % 16:
        return False
    return all(stride * size % 16 == 0 for stride, length in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if length > 1)
