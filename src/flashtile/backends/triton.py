"""The Triton engine: a second GPU implementation, independent of the CUDA one and used to check it.

This file turns a call into launches of the kernels in triton_kernels/: it refuses what they cannot do and builds
arguments; triton_tiles.py chooses tiles. It shares nothing with the CUDA engine but the meaning of the options. Triton
is imported by the first call that needs it, never by `import flashtile`. With TRITON_INTERPRET=1 set before that import
the kernels run on the CPU in Triton's interpreter; the backend then has to be asked for by name.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashtile.backends import dropout
from flashtile.backends.base import Backend, Grads, capability
from flashtile.backends.triton_tiles import CONFIGS, SMALL_CONFIGS, Config, capability_of, padded_head_dim, tile_config
from flashtile.errors import dtype_name
from flashtile.plans.params import kernel_softcap, kernel_window
from flashtile.problem import (
    AttentionArgs,
    Problem,
    check_values,
    head_axis,
    key_window,
    row_axis,
    shape_of,
    softmax_scale,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
OLDEST_TRITON = (3, 6)
OLDEST_CAPABILITY = (8, 0)
_PREPROCESS_ROWS = 64
# With a larger one an absolute error of the tanh counts in 16-bit calls
_LARGEST_ROUGH_SOFTCAP = 256.0
# With a smaller scale the difference of two dot products may overflow where its product with the scale counts
_SMALLEST_EXPONENT_SCALE = 2.0**-118


class TritonBackend(Backend):
    name = "triton"
    summary = "FlashAttention-2 in Triton, independent of the CUDA kernels; memory linear in the sequence length"
    is_compiled = True

    def __init__(self) -> None:
        # Triton reads the same variable when it is imported
        self.is_interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "y", "yes", "on", "true")
        self.devices = ("cpu",) if self.is_interpreted else ("cuda",)
        self.is_automatic = self.has_compile_jobs = not self.is_interpreted

    def refuse(self, problem: Problem, op: str = "forward") -> str | None:
        if problem.dtype not in DTYPES:
            return (
                f"{dtype_name(problem.dtype)} is not among its dtypes "
                f"({', '.join(dtype_name(dtype) for dtype in DTYPES)})"
            )
        largest = max(problem.shape.head_dim, problem.shape.head_dim_v)
        if largest > MAX_HEAD_DIM:
            return f"head_dim {largest} is over its {MAX_HEAD_DIM}"
        if problem.page_size:
            return "paged keys are not among its features"
        if self.is_interpreted and problem.dtype == torch.bfloat16:
            return "Triton's interpreter does not multiply bfloat16 as a GPU does"
        if problem.arch:
            return _refuse_capability(capability_of(problem.arch))
        return _missing(self.is_interpreted, problem.device_index)

    def forward(self, args: AttentionArgs, out: Tensor, lse: Tensor) -> None:
        if self.is_interpreted:
            check_values(args)
        with _device_of(args):
            _launch(*_forward_call(args, out, lse))

    def backward(
        self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads
    ) -> None:
        if self.is_interpreted:
            check_values(args)
        with _device_of(args):
            for call in _backward_calls(args, dout, dlse, out, lse, grads):
                _launch(*call)

    def compile_jobs(
        self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads | None
    ) -> dict[Hashable, Callable[[], None]]:
        calls = [_forward_call(args, out, lse)]
        if grads is not None:
            calls += _backward_calls(args, dout, dlse, out, lse, grads)
        jobs: dict[Hashable, Callable[[], None]] = {}
        for kernel, num_programs, config, arguments in calls:
            if num_programs > 0:
                named = {name: _without_memory(value) for name, value in arguments.items()}
                jobs[_variant(kernel, config, named)] = functools.partial(_compile, kernel, config, named)
        return jobs

    def details(self, problem: Problem, op: str = "forward") -> dict[str, str]:
        names = ["fwd"]
        if problem.needs_grad:
            names += ["bwd_dkdv", "bwd_dq", "bwd_dbias"] if problem.needs_bias_grad else ["bwd_dkdv", "bwd_dq"]
        found = {}
        for name in names:
            has_score_tensors = problem.has_mask or problem.bias_dtype is not None
            is_aligned16 = problem.shape.head_dim % 8 == 0 and problem.shape.head_dim_v % 8 == 0
            device = torch.device(problem.device)
            config = tile_config(
                name, problem.dtype, problem.shape, device, has_score_tensors, is_aligned16, problem.arch
            )
            tile = (
                f"tile {config.block_m} x {config.block_n}, head dim "
                f"{padded_head_dim(max(problem.shape.head_dim, problem.shape.head_dim_v))}"
            )
            found[f"{name}_triton_kernel"] = f"{tile}, {config.num_warps} warps, {config.num_stages} stages"
        found["products"] = (
            _precision(problem.dtype, self.is_interpreted)
            if problem.dtype == torch.float32
            else dtype_name(problem.dtype)
        )
        return found

    def tile_sizes(self) -> frozenset[int]:
        configs = (
            config
            for table in (CONFIGS, SMALL_CONFIGS)
            for sizes in table.values()
            for dims in sizes.values()
            for config in dims.values()
        )
        return frozenset(size for config in configs for size in (config.block_m, config.block_n))

    def loaded_kernels(self) -> frozenset[str]:
        return frozenset(_loaded)

    def prepare(self, problem: Problem) -> None:
        """Compiles the kernels by running the problem on short contiguous tensors."""
        args = _short_args(problem)
        out = args.q.new_zeros((*args.q.shape[:-1], args.v.shape[-1]), dtype=problem.out_dtype)
        lse = args.q.new_zeros(
            (*args.q.shape[:-3], problem.shape.heads, args.q.shape[row_axis(args.layout)]), dtype=torch.float32
        )
        self.forward(args, out, lse)
        if problem.needs_grad:
            dbias = torch.empty_like(args.bias) if args.bias is not None and problem.needs_bias_grad else None
            dq, dk, dv = (torch.empty_like(tensor) for tensor in (args.q, args.k, args.v))
            self.backward(args, out, None, out, lse, Grads(dq, dk, dv, dbias, None))


# Availability


@functools.cache
def _kernels() -> Any:
    return importlib.import_module(__name__ + "_kernels")


@functools.cache
def _missing(is_interpreted: bool, device_index: int) -> str | None:
    """Returns why no kernel can be compiled for that GPU or launched on it, or None."""
    try:
        version = importlib.import_module("triton").__version__
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRITON:
        return f"triton {version} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    if is_interpreted:
        return None
    reason = _refuse_capability(capability(device_index))
    if reason is not None:
        return reason
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CC", "cc"), "gcc", "clang")):
        return "Triton needs a C compiler to launch kernels, and none is here (CC, gcc, clang)"
    return None


def _refuse_capability(capability: tuple[int, int]) -> str | None:
    if capability >= OLDEST_CAPABILITY:
        return None
    own, oldest = (".".join(map(str, numbers)) for numbers in (capability, OLDEST_CAPABILITY))
    return f"compute capability {own} is older than Triton's oldest ({oldest})"


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def _device_of(args: AttentionArgs) -> AbstractContextManager[Any]:
    """Makes the tensors' device current: Triton launches on the current device."""
    device = args.q.device
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _short_args(problem: Problem) -> AttentionArgs:
    """A call with the problem's dtypes and options on one short sequence of zeros."""
    shape, zeros = problem.shape, functools.partial(torch.zeros, device=problem.device)
    rows_q, rows_k = min(shape.seqlen_q, 128), min(shape.seqlen_k, 128)

    def rows(heads: int, length: int, dim: int) -> Tensor:
        sizes = (heads, length, dim) if problem.layout == "bhsd" else (length, heads, dim)
        return zeros(sizes if problem.is_varlen else (1, *sizes), dtype=problem.dtype)

    def scores(dtype: torch.dtype | None) -> Tensor | None:
        return None if dtype is None else zeros((1, shape.heads, rows_q, rows_k), dtype=dtype)

    def index(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=problem.device)

    return AttentionArgs(
        rows(shape.heads, rows_q, shape.head_dim),
        rows(shape.heads_kv, rows_k, shape.head_dim),
        rows(shape.heads_kv, rows_k, shape.head_dim_v),
        bias=scores(problem.bias_dtype),
        mask=scores(torch.bool if problem.has_mask else None),
        alibi_slopes=zeros(shape.heads) if problem.has_alibi else None,
        sinks=zeros(shape.heads) if problem.has_sinks else None,
        rng_state=zeros(2, dtype=torch.int64) if problem.dropout_p else None,
        cu_seqlens_q=index(0, rows_q) if problem.is_varlen else None,
        cu_seqlens_k=index(0, rows_k) if problem.is_varlen else None,
        seqused_k=index(rows_k) if problem.has_key_lengths else None,
        scale=problem.scale,
        causal=problem.causal,
        window_left=problem.window[0],
        window_right=problem.window[1],
        softcap=problem.softcap,
        dropout_p=problem.dropout_p,
        layout=problem.layout,
    )


def _precision(dtype: torch.dtype, is_interpreted: bool) -> str:
    """The input precision of float32 products; other dtypes have only one."""
    if dtype != torch.float32 or is_interpreted:
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


_loaded: set[str] = set()  # kernels that this process has compiled or loaded

# Kernel arguments

Call = tuple[str, int, Config, dict[str, Any]]  # kernel, number of programs, configuration, arguments by name


def _contiguous_rows(tensor: Tensor) -> Tensor:
    """The tensor, copied if its last dimension is not contiguous."""
    return tensor if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def _is_aligned16(tensor: Tensor) -> bool:
    """True if rows can be copied 16 bytes at a time."""
    strides = (stride for stride, length in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if length > 1)
    return tensor.data_ptr() % 16 == 0 and tensor.shape[-1] % 8 == 0 and all(stride % 8 == 0 for stride in strides)


def _row_strides(tensor: Tensor, layout: str) -> tuple[int, int, int]:
    """Strides of (batch, head, row).

    An axis of length 1 gets the row length, so that it does not change the alignment class. The missing batch axis of
    a packed tensor gets 0.
    """
    axes = (0 if tensor.dim() == 4 else None, head_axis(layout), row_axis(layout))
    return tuple(
        0 if axis is None else tensor.stride(axis) if tensor.shape[axis] > 1 else tensor.shape[-1] for axis in axes
    )  # type: ignore[return-value]


def _row_arguments(layout: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    strides = {name: _row_strides(tensor, layout) for name, tensor in tensors.items()}
    row_tensor, encode_strides = _kernels().RowTensor, _kernels().encode_strides
    return {
        **{name: row_tensor(tensor, *encode_strides(strides[name])) for name, tensor in tensors.items()},
        "USE_INT64": max((found[2] for found in strides.values()), default=0) * MAX_HEAD_DIM >= 2**31,
    }


def _score_strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(0 if length == 1 else stride for stride, length in zip(tensor.stride(), tensor.shape, strict=True))


def _arguments(kernel: str, args: AttentionArgs, tensors: dict[str, Tensor]) -> tuple[Config, dict[str, Any]]:
    """Configuration and arguments that all kernels but preprocess take. `tensors`: row tensors besides q, k and v."""
    shape, kernels, row = shape_of(args), _kernels(), row_axis(args.layout)
    is_aligned16 = all(_is_aligned16(tensor) for tensor in (args.q, args.k, args.v, *tensors.values()))
    config = tile_config(
        kernel, args.q.dtype, shape, args.q.device, args.bias is not None or args.mask is not None, is_aligned16
    )
    window_left, window_right = map(kernel_window, key_window(args))
    softcap, softcap_factor = kernel_softcap(args.softcap, softmax_scale(args))
    is_float32 = args.q.dtype == torch.float32
    # In a packed call no sequence is longer than the rows and columns of bias and mask
    score_tensors = [tensor for tensor in (args.bias, args.mask) if tensor is not None]
    seqlen_q = min([shape.seqlen_q, *(tensor.shape[2] for tensor in score_tensors if tensor.shape[2] != 1)])
    seqlen_k = min([shape.seqlen_k, *(tensor.shape[3] for tensor in score_tensors if tensor.shape[3] != 1)])
    index_tensors = (args.cu_seqlens_q, args.cu_seqlens_k, args.seqused_k, args.leftpad_k)
    slopes = args.alibi_slopes
    return config, {
        **_row_arguments(args.layout, {"q": args.q, "k": args.k, "v": args.v, **tensors}),
        "bias": None if args.bias is None else kernels.ScoreTensor(args.bias, *_score_strides(args.bias)),
        "mask": None
        if args.mask is None
        else kernels.ScoreTensor(args.mask.view(torch.uint8), *_score_strides(args.mask)),
        "alibi_slopes": None if slopes is None else slopes.float().contiguous(),
        "alibi_batch_stride": shape.heads if slopes is not None and slopes.dim() == 2 else 0,
        "rng_state": args.rng_state,
        "first_query": args.first_query,
        "first_key": args.first_key,
        "first_head": args.first_head,
        "total_heads": args.total_heads or shape.heads,
        "lengths": kernels.Lengths(*(None if tensor is None else tensor.contiguous() for tensor in index_tensors)),
        "heads": shape.heads,
        "GROUP": shape.heads // shape.heads_kv,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "total_q": args.q.shape[row],
        "total_k": args.k.shape[row],
        "scale": softmax_scale(args),
        "softcap": softcap,
        "softcap_factor": softcap_factor,
        "window_left": window_left,
        "window_right": window_right,
        "drop_threshold": dropout.threshold(args.dropout_p),
        "keep_factor": dropout.keep_factor(args.dropout_p),
        "D": shape.head_dim,
        "DV": shape.head_dim_v,
        "BLOCK_D": padded_head_dim(shape.head_dim),
        "BLOCK_DV": padded_head_dim(shape.head_dim_v),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "IS_TOP_LEFT": args.causal == "top_left",
        "HAS_LEFT": window_left >= 0,
        "HAS_RIGHT": window_right >= 0,
        "SOFTCAP": 0 if args.softcap == 0.0 else 1 + (is_float32 or args.softcap > _LARGEST_ROUGH_SOFTCAP),
        "HAS_DROPOUT": args.dropout_p > 0.0,
        "PRECISION": _precision(args.q.dtype, args.q.device.type == "cpu"),
    }


def _num_blocks(length: int, block: int) -> int:
    return -(-length // block)


def _forward_call(args: AttentionArgs, out: Tensor, lse: Tensor) -> Call:
    shape = shape_of(args)
    config, arguments = _arguments("fwd", args, {"out": out})
    num_m_blocks = _num_blocks(shape.seqlen_q, config.block_m)
    options = (args.alibi_slopes, args.bias, args.sinks)
    has_plain_scores = args.softcap == 0.0 and all(option is None for option in options)
    scales_exponents = has_plain_scores and softmax_scale(args) >= _SMALLEST_EXPONENT_SCALE
    sinks = None if args.sinks is None else args.sinks.float().contiguous()
    arguments |= {"lse": lse, "sinks": sinks, "num_m_blocks": num_m_blocks, "SCALE_IN_EXPONENT": scales_exponents}
    arguments["IS_FLOAT32"] = args.q.dtype == torch.float32
    return "fwd", num_m_blocks * shape.heads * shape.batch, config, arguments


def _preprocess_call(
    args: AttentionArgs, out: Tensor, dout: Tensor, dlse: Tensor | None, lse: Tensor, score_lse: Tensor, delta: Tensor
) -> Call:
    heads, rows = lse.shape[-2:]
    num_blocks = _num_blocks(rows, _PREPROCESS_ROWS)
    arguments = {
        **_row_arguments(args.layout, {"out": out, "dout": dout}),
        "dlse": dlse,
        "lse": lse,
        "score_lse": score_lse,
        "delta": delta,
        "heads": heads,
        "rows": rows,
        "num_blocks": num_blocks,
        "DV": out.shape[-1],
        "BLOCK_DV": padded_head_dim(out.shape[-1]),
        "BLOCK_M": _PREPROCESS_ROWS,
        "IS_NATURAL": args.bias is not None,
    }
    batch = lse.shape[0] if lse.dim() == 3 else 1
    return "bwd_preprocess", num_blocks * heads * batch, Config(_PREPROCESS_ROWS, 0, 4, 1), arguments


def _dkdv_call(args: AttentionArgs, dout: Tensor, score_lse: Tensor, delta: Tensor, grads: Grads) -> Call:
    shape = shape_of(args)
    dk = torch.empty_like(args.k) if grads.dk is None else grads.dk
    dv = torch.empty_like(args.v) if grads.dv is None else grads.dv
    if args.cu_seqlens_q is not None or args.seqused_k is not None or args.leftpad_k is not None:
        # Keys outside every sequence belong to no program
        dk.zero_()
        dv.zero_()
    config, arguments = _arguments("bwd_dkdv", args, {"dout": dout, "dk": dk, "dv": dv})
    num_n_blocks = _num_blocks(shape.seqlen_k, config.block_n)
    arguments |= {"score_lse": score_lse, "delta": delta, "num_n_blocks": num_n_blocks}
    return "bwd_dkdv", num_n_blocks * shape.heads_kv * shape.batch, config, arguments


def _dq_call(args: AttentionArgs, dout: Tensor, score_lse: Tensor, delta: Tensor, dq: Tensor) -> Call:
    shape = shape_of(args)
    config, arguments = _arguments("bwd_dq", args, {"dout": dout, "dq": dq})
    num_m_blocks = _num_blocks(shape.seqlen_q, config.block_m)
    arguments |= {"score_lse": score_lse, "delta": delta, "num_m_blocks": num_m_blocks}
    return "bwd_dq", num_m_blocks * shape.heads * shape.batch, config, arguments


def _dbias_calls(args: AttentionArgs, dout: Tensor, score_lse: Tensor, delta: Tensor, dbias: Tensor) -> Iterator[Call]:
    """If a broadcast bias has too few tiles to fill the GPU, programs share the (batch, head) pairs of a tile."""
    shape = shape_of(args)
    config, arguments = _arguments("bwd_dbias", args, {"dout": dout})
    batch, heads, rows, columns = dbias.shape
    pair_heads = shape.heads if heads == 1 else 1
    num_pairs = pair_heads * (shape.batch if batch == 1 else 1)
    num_m_blocks, num_n_blocks = _num_blocks(rows, config.block_m), _num_blocks(columns, config.block_n)
    num_tiles = batch * heads * num_m_blocks * num_n_blocks
    num_splits = max(1, min(num_pairs, 4 * _num_multiprocessors(args.q.device) // max(1, num_tiles)))
    sums = (
        dbias if num_splits == 1 else torch.empty((num_splits, *dbias.shape), dtype=torch.float32, device=dbias.device)
    )
    arguments |= {
        "score_lse": score_lse,
        "delta": delta,
        "dbias": _kernels().ScoreTensor(sums, *sums.stride()[-4:]),
        "split_stride": 0 if num_splits == 1 else sums.stride(0),
        "num_splits": num_splits,
        "num_pairs": num_pairs,
        "pair_heads": pair_heads,
        "dbias_heads": heads,
        "dbias_rows": rows,
        "dbias_columns": columns,
        "num_m_blocks": num_m_blocks,
        "num_n_blocks": num_n_blocks,
        "BROADCAST_BATCH": batch == 1,
        "BROADCAST_HEADS": heads == 1,
        "BROADCAST_ROWS": rows == 1,
        "BROADCAST_COLUMNS": columns == 1,
    }
    yield "bwd_dbias", num_tiles * num_splits, config, arguments
    if num_splits > 1:
        dbias.copy_(sums.sum(0))


def _backward_calls(
    args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads
) -> Iterator[Call]:
    """Calls in launch order. PyTorch work between two launches runs when the iterator advances."""
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.to(torch.float32).contiguous()
    score_lse, delta = torch.empty_like(lse), torch.empty_like(lse)
    yield _preprocess_call(args, _contiguous_rows(out), _contiguous_rows(dout), dlse, lse, score_lse, delta)
    # Products need operands of one dtype
    dout = _contiguous_rows(dout.to(args.q.dtype))
    if grads.dk is not None or grads.dv is not None:
        yield _dkdv_call(args, dout, score_lse, delta, grads)
    if grads.dq is not None:
        yield _dq_call(args, dout, score_lse, delta, grads.dq)
    if grads.dbias is not None:
        yield from _dbias_calls(args, dout, score_lse, delta, grads.dbias)
    if grads.dsinks is not None and args.sinks is not None:
        p_sink = torch.exp((args.sinks.float()[:, None] - lse).clamp(max=0.0))
        shares = torch.where(lse == -torch.inf, 0.0, p_sink * delta)
        grads.dsinks.copy_(-shares.sum(-1 if lse.dim() == 2 else (0, 2)))


# Compiling and launching


@dataclass(frozen=True)
class _Memory:
    """The properties of a tensor that a compiled kernel depends on."""

    dtype: torch.dtype
    is_aligned: bool

    def data_ptr(self) -> int:
        return 0 if self.is_aligned else self.dtype.itemsize


def _without_memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Memory(value.dtype, value.data_ptr() % 16 == 0)
    if isinstance(value, tuple):  # a NamedTuple
        return type(value)(*map(_without_memory, value))
    return value


def _variant(kernel: str, config: Config, arguments: dict[str, Any]) -> Hashable:
    """A key for the compiled variant: two calls share it exactly if Triton compiles one kernel for both.

    Triton does not look at the values of numbers, except whether an integer is 1, a multiple of 16, or over 32 bits.
    """

    def kind(value: Any) -> Hashable:
        if isinstance(value, tuple):
            return tuple(map(kind, value))
        if isinstance(value, float):
            return float
        return (value == 1, value % 16 == 0, value >= 2**31) if isinstance(value, int) else value

    ignored = _kernels().NOT_SPECIALIZED
    specialized = {name: value for name, value in arguments.items() if name not in ignored}
    return kernel, config, *((name, value if name.isupper() else kind(value)) for name, value in specialized.items())


def _compile(kernel: str, config: Config, arguments: dict[str, Any]) -> None:
    """Puts the kernel and its launcher into Triton's disk cache."""
    function = getattr(_kernels(), f"{kernel}_triton_kernel")
    function.warmup(**arguments, grid=(1,), num_warps=config.num_warps, num_stages=config.num_stages)[(1, 1, 1)]


def _launch(kernel: str, num_programs: int, config: Config, arguments: dict[str, Any]) -> None:
    if num_programs > 0:
        function = getattr(_kernels(), f"{kernel}_triton_kernel")
        compiled = function[(num_programs,)](**arguments, num_warps=config.num_warps, num_stages=config.num_stages)
        if compiled is not None:  # None in the interpreter
            _loaded.add(f"{kernel}_triton_kernel {compiled.hash}")
