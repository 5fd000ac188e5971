"""The CUDA engine: from a call to a plan, compiled kernels, filled parameters and launches on torch's current stream.

No length is read on the host and nothing waits for the GPU. Kernels are compiled on first use and cached (runtime/cache.py).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flashtile.backends import dropout
from flashtile.backends.base import Backend, BoundForward, Grads
from flashtile.errors import Unsupported, dtype_name
from flashtile.kernels import plan as plans
from flashtile.kernels import table
from flashtile.kernels.arch import Arch, arch_of
from flashtile.kernels.params import Params
from flashtile.kernels.plan import PlanKey, Step
from flashtile.kernels.spec import Features
from flashtile.problem import (
    AttentionArgs,
    Problem,
    check_values,
    head_axis,
    is_checking,
    is_deterministic,
    key_window,
    page_size,
    row_axis,
    shape_of,
    softmax_scale,
)
from flashtile.runtime import cache, driver, toolchain

_UNBOUNDED = 1 << 30  # a window at least this wide hides nothing, and sums with positions stay in 32 bits


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
        params, steps = _forward_plan(args, out, lse)
        partial = _allocate_partial(params, lse)
        _run(args, steps, params)
        del partial

    def bind(self, args: AttentionArgs, out: Tensor, lse: Tensor) -> BoundForward | None:
        if any(tensor is not None for tensor in (args.alibi_slopes, args.sinks, args.block_table)):
            return None  # these may need a copy of their own in every call
        return _Bound(args, out, lse)

    def backward(self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads) -> None:
        if is_checking():
            check_values(args)
        # Kernels read rows whose last dimension is contiguous, and statistics that are contiguous throughout
        dout, out = _rows(dout.to(out.dtype)), _rows(out)
        lse, dlse = lse.contiguous(), None if dlse is None else dlse.to(torch.float32).contiguous()
        buffers = {
            "dq": torch.empty_like(args.q) if grads.dq is None else grads.dq,
            "dk": torch.empty_like(args.k) if grads.dk is None else grads.dk,
            "dv": torch.empty_like(args.v) if grads.dv is None else grads.dv,
        }
        if args.cu_seqlens_q is not None or args.seqused_k is not None or args.leftpad_k is not None:
            # Keys outside every sequence have no owner
            buffers["dk"].zero_()
            buffers["dv"].zero_()
        lse_log2, delta = torch.empty_like(lse), torch.empty_like(lse)
        dbias = None if grads.dbias is None else torch.zeros(grads.dbias.shape, dtype=grads.dbias.dtype, device=lse.device)
        dsinks = None if grads.dsinks is None else torch.zeros(grads.dsinks.shape, dtype=torch.float32, device=lse.device)
        params, features = _fill(args, out, lse, dout=dout, **buffers)
        for name, tensor in (("dlse", dlse), ("lse_log2", lse_log2), ("delta", delta), ("dbias", dbias), ("dsinks", dsinks)):
            setattr(params, name, None if tensor is None else tensor.data_ptr())
        key = _key(args, out, features, is_backward=True, needs_dbias=dbias is not None, needs_dsinks=dsinks is not None)
        _run(args, plans.plan(key), params)
        if grads.dbias is not None and dbias is not None:
            grads.dbias.copy_(dbias)
        if grads.dsinks is not None and dsinks is not None:
            grads.dsinks.copy_(dsinks)

    def details(self, problem: Problem) -> dict[str, str]:
        arch = _arch(torch.cuda.current_device())
        padded = table.padded_head_dim(max(problem.shape.head_dim, problem.shape.head_dim_v))
        if arch is None or padded is None:
            return {}
        kernels = table.PASSES["forward"] + (table.PASSES["backward"] if problem.needs_grad else ())
        found = {}
        for kernel in kernels:
            if kernel == "bwd_dbias_simt" and not problem.needs_bias_grad:
                continue
            features = _problem_features(problem)
            row = table.select(kernel, dtype_name(problem.dtype), dtype_name(problem.out_dtype), padded, features, arch)
            tile = f"tile {row.block_m} x {row.block_n}, head dim {row.head_dim}, {row.num_warps} warps"
            found[f"{kernel}_kernel"] = f"{tile}, {row.shared_bytes / 1024:.0f} KiB of shared memory, {arch.name}"
        return found

    def tile_sizes(self) -> frozenset[int]:
        return table.tile_sizes()

    def loaded_kernels(self) -> frozenset[str]:
        return frozenset(_loaded)

    def prepare(self, problem: Problem) -> None:
        """Compiles for tensors whose rows are aligned, if their head dims allow that."""
        arch = _arch(torch.cuda.current_device())
        assert arch is not None
        names, shape = (dtype_name(problem.dtype), dtype_name(problem.out_dtype)), problem.shape
        key = PlanKey(*names, max(shape.head_dim, shape.head_dim_v), _problem_features(problem), arch)
        keys = [key, dataclasses.replace(key, is_small=True)]
        if problem.needs_grad:
            keys.append(dataclasses.replace(key, is_backward=True, needs_dbias=problem.needs_bias_grad, needs_dsinks=problem.has_sinks))
        steps = {step for key in keys for step in plans.plan(key)}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda step: _function(step.unit, step.entry, arch.name), steps))


# What is there


@functools.cache
def _arch(device_index: int) -> Arch | None:
    return arch_of(*torch.cuda.get_device_capability(device_index))


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
    try:
        toolchain.find()
    except Unsupported as error:
        return str(error)
    return None


# From a call to its plan


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


def _is_small(params: Params, device_index: int) -> bool:
    """The grid of a large tile would leave multiprocessors idle."""
    large = 2 * table.SMALL_BLOCK_M
    return -(-params.seqlen_q // large) * params.heads * params.batch < _num_multiprocessors(device_index)


def _num_splits(args: AttentionArgs, step: Step, params: Params) -> int:
    """Over how many blocks the keys of a row are spread: what the caller says, one if the result may not depend on the batch, else
    as many as fill the GPU twice over, each with a tile of keys at least."""
    num_tiles = -(-params.seqlen_k // step.block_columns)
    if args.num_splits:
        return max(1, min(args.num_splits, num_tiles))
    num_blocks = -(-params.seqlen_q // step.block_rows) * params.heads * params.batch
    if is_deterministic(args) or num_blocks == 0:
        return 1
    return max(1, min(2 * _num_multiprocessors(args.q.device.index or 0) // num_blocks, num_tiles))


def _key(args: AttentionArgs, out: Tensor, features: Features, **more: bool) -> PlanKey:
    arch = _arch(args.q.device.index or 0)
    assert arch is not None
    return PlanKey(dtype_name(args.q.dtype), dtype_name(out.dtype), max(args.q.shape[-1], args.v.shape[-1]), features, arch, **more)


# Parameters


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(tensor: Tensor, layout: str) -> tuple[int, int, int]:
    """(batch or page, head, row), 0 for the batch of a packed tensor."""
    batch = tensor.stride(0) if tensor.dim() == 4 else 0
    return batch, tensor.stride(head_axis(layout)), tensor.stride(row_axis(layout))


def _is_wide(tensor: Tensor) -> bool:
    """Every row starts on a 16-byte boundary and is a multiple of 16 bytes long."""
    size = tensor.element_size()
    if tensor.data_ptr() % 16 or tensor.shape[-1] * size % 16:
        return False
    return all(stride * size % 16 == 0 for stride, length in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if length > 1)


def _broadcast_strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(0 if length == 1 else stride for stride, length in zip(tensor.stride(), tensor.shape, strict=True))


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _fill(args: AttentionArgs, out: Tensor, lse: Tensor, **more: Tensor) -> tuple[Params, Features]:
    """Parameters of a call, and the features that its tensors ask for. `more` are dout, dq, dk and dv."""
    shape = shape_of(args)
    params = Params()
    tensors = {"q": args.q, "k": args.k, "v": args.v, "out": out, **more}
    for name, tensor in tensors.items():
        setattr(params, name, tensor.data_ptr())
        getattr(params, f"{name}_strides")[:] = _strides(tensor, args.layout)
    params.lse = lse.data_ptr()
    params.lse_batch_stride = lse.stride(0) if lse.dim() == 3 else 0
    params.lse_head_stride, params.lse_size, params.num_splits = lse.stride(-2), lse.numel(), 1
    for name in ("rng_state", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k"):
        setattr(params, name, _pointer(getattr(args, name)))
    if args.bias is not None:
        params.bias = args.bias.data_ptr()
        params.bias_strides[:] = _broadcast_strides(args.bias)
        params.bias_sizes[:] = tuple(args.bias.shape)
    if args.mask is not None:
        params.mask = args.mask.data_ptr()
        params.mask_strides[:] = _broadcast_strides(args.mask)
    # Kept alive by the params object until its launches are queued; torch's allocator orders reuse on the same stream
    params.kept = kept = {}
    for name in ("alibi_slopes", "sinks"):
        tensor = getattr(args, name)
        if tensor is not None:
            kept[name] = tensor.float().contiguous()
            setattr(params, name, kept[name].data_ptr())
    if args.alibi_slopes is not None and args.alibi_slopes.dim() == 2:
        params.alibi_batch_stride = shape.heads
    if args.block_table is not None:
        kept["block_table"] = _rows(args.block_table)
        params.block_table = kept["block_table"].data_ptr()
        params.table_stride = kept["block_table"].stride(0)
        params.num_pages, params.page_size = args.k.shape[0], page_size(args)
    params.batch, params.heads, params.heads_kv = shape.batch, shape.heads, shape.heads_kv
    params.seqlen_q, params.seqlen_k = shape.seqlen_q, shape.seqlen_k
    params.total_q, params.total_k = args.q.shape[row_axis(args.layout)], args.k.shape[row_axis(args.layout)]
    params.head_dim, params.head_dim_v = shape.head_dim, shape.head_dim_v
    params.window_left, params.window_right = (-1 if reach >= _UNBOUNDED else reach for reach in key_window(args))
    params.is_top_left = args.causal == "top_left"
    scale = softmax_scale(args)
    params.scale, params.scale_log2, params.softcap = scale, scale * math.log2(math.e), args.softcap
    params.dropout_threshold, params.keep_factor = dropout.threshold(args.dropout_p), dropout.keep_factor(args.dropout_p)
    return params, _features(args, all(_is_wide(tensor) for tensor in tensors.values()))


def _forward_plan(args: AttentionArgs, out: Tensor, lse: Tensor) -> tuple[Params, tuple[Step, ...]]:
    params, features = _fill(args, out, lse)
    steps = plans.plan(_key(args, out, features, is_small=_is_small(params, args.q.device.index or 0)))
    params.num_splits = _num_splits(args, steps[0], params)
    return params, steps


def _allocate_partial(params: Params, lse: Tensor) -> Tensor | None:
    """Room for the outputs and statistics of the splits, behind each other; must live until the launches are queued."""
    if params.num_splits == 1:
        return None
    num_rows = params.num_splits * params.lse_size
    partial = torch.empty(num_rows * (params.head_dim_v + 1), dtype=torch.float32, device=lse.device)
    address = partial.data_ptr()
    params.partial_out, params.partial_lse = address, address + 4 * num_rows * params.head_dim_v
    return partial


# Launch


class _Bound:
    """The forward pass of one signature: parameters filled but for the addresses, kernels loaded, grids known."""

    def __init__(self, args: AttentionArgs, out: Tensor, lse: Tensor):
        params, steps = _forward_plan(args, out, lse)
        self.template = bytes(params)
        self.allocate_out = functools.partial(torch.empty_strided, out.shape, out.stride(), dtype=out.dtype, device=out.device)
        self.allocate_lse = functools.partial(torch.empty_strided, lse.shape, lse.stride(), dtype=lse.dtype, device=lse.device)
        self.pointers = [
            (AttentionArgs._fields.index(name), name)
            for name in ("q", "k", "v", "bias", "mask", "rng_state", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k")
            if getattr(args, name) is not None
        ]
        self.num_splits, self.index = params.num_splits, args.q.device.index or 0
        arch = _arch(self.index)
        assert arch is not None
        self.launches = []
        for step in steps:
            if (num_blocks := _num_blocks(step, params)) > 0:
                function = _function(step.unit, step.entry, arch.name)
                function.set_shared_bytes(self.index, step.shared_bytes)
                self.launches.append((function.launch, (num_blocks, 1, 1), (step.num_threads, 1, 1), step.shared_bytes))

    def __call__(self, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        out, lse = self.allocate_out(), self.allocate_lse()
        params = Params.from_buffer_copy(self.template)
        for place, name in self.pointers:
            setattr(params, name, args[place].data_ptr())  # type: ignore[union-attr]
        params.out, params.lse = out.data_ptr(), lse.data_ptr()
        partial = _allocate_partial(params, lse) if self.num_splits > 1 else None
        with nullcontext() if torch.cuda.current_device() == self.index else torch.cuda.device(self.index):
            stream = torch._C._cuda_getCurrentRawStream(self.index)
            for launch, grid, block, shared_bytes in self.launches:
                launch(grid, block, shared_bytes, stream, params)
        del partial
        return out, lse


_loaded: set[str] = set()


@functools.cache
def _function(unit: str, entry: str, arch: str) -> driver.Function:
    compiled = cache.compile_cached(unit, arch, [entry])
    _loaded.add(entry)
    return driver.load(compiled.cubin).function(compiled.symbols[entry])


def _num_blocks(step: Step, params: Params) -> int:
    if step.grid == "combine" and params.num_splits == 1:
        return 0
    if step.grid in ("queries", "splits", "combine"):
        splits = params.num_splits if step.grid == "splits" else 1
        return splits * -(-params.seqlen_q // step.block_rows) * params.heads * params.batch
    if step.grid == "keys":
        return -(-params.seqlen_k // step.block_rows) * params.heads_kv * params.batch
    if step.grid == "heads":
        return int(params.heads)
    batch, heads, rows, columns = params.bias_sizes
    tiles = 1 if rows == 1 else -(-params.seqlen_q // step.block_rows)
    return int(batch * heads * tiles * (1 if columns == 1 else -(-params.seqlen_k // step.block_columns)))


def _run(args: AttentionArgs, steps: tuple[Step, ...], params: Params) -> None:
    device = args.q.device
    index = device.index or 0
    arch = _arch(index)
    assert arch is not None
    guard: AbstractContextManager[Any] = nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(device)
    with guard:
        stream = torch._C._cuda_getCurrentRawStream(index)
        for step in steps:
            num_blocks = _num_blocks(step, params)
            if num_blocks == 0:
                continue
            function = _function(step.unit, step.entry, arch.name)
            function.set_shared_bytes(index, step.shared_bytes)
            function.launch((num_blocks, 1, 1), (step.num_threads, 1, 1), step.shared_bytes, stream, params)
