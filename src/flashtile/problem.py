"""The question: the arguments of one attention call, their checks, and the Problem that selection looks at.

`AttentionArgs` is the one list of the arguments of `flashtile::forward`: the schemas of the ops and
csrc/exec/arguments.inc are generated from it. `validate` checks whatever can be told from sizes, strides and dtypes
alone; it runs inside the op and inside its fake, so it takes symbolic sizes. `check_values` checks what stands inside
the index tensors. `Problem` is the frozen summary that decides which backend runs.

csrc/exec/attention.cpp makes the same checks for calls of a known plan, less those of what the plan's key holds, and
leaves a call that fails one to Python, which words the refusal. It also gives the sizes and facts of a `Problem`
(native.described). A new check, or a field, is a change of both. tests/cpu/test_native.py compares them:
test_sizes_are_checked_where_a_plan_is_known, test_cpp_describes_a_call_as_python_does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor

from flashtile.errors import dtype_name, is_switched_on, type_error, unsupported, value_error

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("bhsd", "bshd")
CAUSAL_KINDS = ("none", "top_left", "bottom_right")
MAX_HEAD_DIM = 512
MAX_LENGTH = 2**31 - 1024  # positions are 32-bit, and loops step past the end by less than 1024
LIMITS = {"max_head_dim": MAX_HEAD_DIM, "max_length": MAX_LENGTH}  # that C++ checks, too

LARGEST_SCALE = 2.0**127  # but for float64: scale * log2(e) is a float32 number up to here
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max

_ACCEPTED_DTYPES = ", ".join(dtype_name(dtype) for dtype in DTYPES)


class AttentionArgs(NamedTuple):
    """The arguments of `flashtile::forward`, in schema order. The shapes are those of layout "bhsd"."""

    q: Tensor  # (batch, heads, seqlen_q, head_dim), or packed (heads, total_q, head_dim)
    k: Tensor  # (batch, heads_kv, seqlen_k, head_dim), packed as q, or pages (num_pages, heads_kv, page_size, head_dim)
    v: Tensor  # as k, with head_dim_v
    bias: Tensor | None = None  # broadcastable to (batch, heads, seqlen_q, seqlen_k); q's dtype or float32
    mask: Tensor | None = None  # broadcastable to (batch, heads, seqlen_q, seqlen_k); bool, True = attend
    alibi_slopes: Tensor | None = None  # (heads,) or (batch, heads)
    sinks: Tensor | None = None  # (heads,)
    rng_state: Tensor | None = None  # (2,) int64: seed, offset
    cu_seqlens_q: Tensor | None = None  # (batch + 1,) int32; given exactly when q is packed
    cu_seqlens_k: Tensor | None = None  # (batch + 1,) int32
    seqused_k: Tensor | None = None  # (batch,) int32: end of each sequence's keys
    leftpad_k: Tensor | None = None  # (batch,) int32: start of each sequence's keys
    block_table: Tensor | None = None  # (batch, pages_per_sequence) int32; given exactly when k and v are pages
    max_seqlen_q: int | None = None  # an upper bound of the packed lengths; None = derived from the shapes
    max_seqlen_k: int | None = None
    scale: float | None = None  # None = 1 / sqrt(head_dim)
    causal: str = "none"  # one of CAUSAL_KINDS
    window_left: int = -1  # -1 = unbounded
    window_right: int = -1
    softcap: float = 0.0  # 0 = none
    dropout_p: float = 0.0
    first_query: int = 0  # dropout indices of this call's first query, key and head in a larger problem
    first_key: int = 0  # a multiple of 8
    first_head: int = 0  # b * total_heads + h
    total_heads: int = 0  # of the larger problem; 0 = q's
    deterministic: bool | None = None  # None = follow torch's global switch
    num_splits: int = 0  # 0 = the backend's choice
    out_dtype: torch.dtype | None = None  # None = q's dtype; float32 to merge partial results without rounding them
    layout: str = "bhsd"  # one of LAYOUTS
    backend: str | None = None  # None = the best that takes the call
    needs_grad: bool = False  # a backward pass will follow; set by autograd, so that one backend is chosen for both
    needs_bias_grad: bool = False


NUM_TENSORS = 13  # they come first

# The options of the `dense` overloads beside scale: bit fields of one integer, `mode`, that index these tuples. Each
# argument that torch converts costs time. Calls with other values take the ops with all arguments.
DENSE_FIELDS: dict[str, tuple[object, ...]] = {
    "causal": CAUSAL_KINDS,
    "layout": LAYOUTS,
    "backend": (None, "cpu", "cuda"),
    "deterministic": (False, True),
    "needs_grad": (False, True),
}
# The arguments of `flashtile::forward.cache` that it shares with the other overloads, before its mode
CACHE_ARGUMENTS = (
    *("q", "k", "v", "alibi_slopes", "sinks", "seqused_k", "leftpad_k", "block_table"),
    *("scale", "window_left", "window_right", "softcap"),
)
_DENSE_BITS = [(len(values) - 1).bit_length() for values in DENSE_FIELDS.values()]
DENSE_SHIFTS = dict(zip(DENSE_FIELDS, accumulate(_DENSE_BITS, initial=0), strict=False))

_SCHEMA_TYPES: dict[object, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    int | None: "SymInt?",
    float: "float",
    float | None: "float?",
    bool: "bool",
    bool | None: "bool?",
    str: "str",
    str | None: "str?",
    torch.dtype | None: "ScalarType?",
}
# The type of each argument in the schema of an op
SCHEMA_TYPES = {name: _SCHEMA_TYPES[hint] for name, hint in get_type_hints(AttentionArgs).items()}


def schema(names: Iterable[str] = AttentionArgs._fields) -> str:
    """These arguments as the schema of an op lists them."""
    return ", ".join(f"{SCHEMA_TYPES[name]} {name}" for name in names)


def dense_schema() -> tuple[str, ...]:
    """The bit fields of a mode, in words."""
    return tuple(f"{name} << {DENSE_SHIFTS[name]}: {values}" for name, values in DENSE_FIELDS.items())


def limits() -> tuple[str, ...]:
    """The limits, in words."""
    return tuple(f"limit: {name} {value}" for name, value in LIMITS.items())


class Shape(NamedTuple):
    """The sizes of a call. For packed or paged inputs the sequence lengths are upper bounds. A share is how many rows a
    packed sequence has on average. Kernels are chosen by the means: shares, unless a maximum of the keys is given."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    mean_q: int | None = None
    mean_k: int | None = None
    share_k: int | None = None

    @property
    def expected_q(self) -> int:
        """The length by which kernels and tiles are chosen. Each of them takes any length."""
        return self.seqlen_q if self.mean_q is None else self.mean_q

    @property
    def few_q(self) -> int:
        """The length by which kernels for few queries are chosen, which are slow where there are many. One query is
        what a mean of 1 says; a larger mean may be that of one long sequence among short ones."""
        return self.expected_q if self.expected_q <= 1 else self.seqlen_q

    @property
    def expected_k(self) -> int:
        return self.seqlen_k if self.mean_k is None else self.mean_k

    @property
    def least_share(self) -> int:
        """The rows that memory by rows holds for each sequence: of q, or of k if they are fewer."""
        return min(self.expected_q, self.seqlen_k if self.share_k is None else self.share_k)


@dataclass(frozen=True)
class Problem:
    """Everything that decides which backend and kernel run, without a tensor in it."""

    needs_grad: bool
    device: str
    device_index: int
    dtype: torch.dtype  # q's
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    out_dtype: torch.dtype
    shape: Shape
    layout: str
    scale: float
    causal: str
    window: tuple[int, int]
    softcap: float
    dropout_p: float
    deterministic: bool
    num_splits: int
    has_mask: bool
    bias_dtype: torch.dtype | None
    needs_bias_grad: bool
    has_alibi: bool
    has_sinks: bool
    is_varlen: bool
    has_key_lengths: bool
    page_size: int  # 0 = not paged
    # Every row of q, k and v, and where C++ has told it of all that kernels read or write by rows, starts on a 16-byte
    # boundary and is a multiple of 16 bytes long
    is_aligned16: bool
    rows_disjoint: bool  # no two rows of q, k or v overlap in memory
    heads_disjoint: bool  # no two heads of q share memory
    is_v_in_k: bool  # each row of v is the beginning of the same row of k in memory
    classes: tuple[str, tuple[int, ...]] | None = None  # (op, its length classes), where C++ has told them
    arch: str = ""  # a GPU that need not be here, such as sm_80; empty: the device's own
    gpu: str = ""  # its name, such as A100; empty: any GPU of that architecture

    @classmethod
    def of(cls, args: AttentionArgs) -> Problem:
        """Validates the arguments and sums them up."""
        return cls.summary(args, validate(args))

    @classmethod
    def summary(cls, args: AttentionArgs, shape: Shape, facts: Facts | None = None) -> Problem:
        """Returns the summary of arguments that are known to be valid."""
        facts = facts or facts_of(args)
        return cls(
            needs_grad=args.needs_grad,
            device=args.q.device.type,
            device_index=args.q.device.index or 0,
            dtype=args.q.dtype,
            k_dtype=args.k.dtype,
            v_dtype=args.v.dtype,
            out_dtype=args.out_dtype or args.q.dtype,
            shape=shape,
            layout=args.layout,
            scale=facts.scale,
            causal=args.causal,
            window=key_window(args),
            softcap=args.softcap,
            dropout_p=args.dropout_p,
            deterministic=facts.deterministic,
            num_splits=args.num_splits,
            has_mask=args.mask is not None,
            bias_dtype=None if args.bias is None else args.bias.dtype,
            needs_bias_grad=args.needs_bias_grad,
            has_alibi=args.alibi_slopes is not None,
            has_sinks=args.sinks is not None,
            is_varlen=args.cu_seqlens_q is not None,
            has_key_lengths=args.seqused_k is not None or args.leftpad_k is not None,
            page_size=page_size(args),
            is_aligned16=facts.is_aligned16,
            rows_disjoint=facts.rows_disjoint,
            heads_disjoint=facts.heads_disjoint,
            is_v_in_k=facts.is_v_in_k,
            classes=facts.classes,
        )


class Facts(NamedTuple):
    """Fields of a problem that take a look at tensors and switches."""

    scale: float
    deterministic: bool
    is_aligned16: bool
    rows_disjoint: bool
    heads_disjoint: bool
    is_v_in_k: bool
    classes: tuple[str, tuple[int, ...]] | None = None


def facts_of(args: AttentionArgs) -> Facts:
    tensors = (args.q, args.k, args.v)
    return Facts(
        softmax_scale(args),
        is_deterministic(args),
        all(map(is_aligned16, tensors)),
        all(rows_disjoint(tensor, args.layout) for tensor in tensors),
        args.q.stride(head_axis(args.layout)) != 0,
        is_v_in_k(args.k, args.v),
    )


def is_aligned16(tensor: Tensor) -> bool:
    """Every row starts on a 16-byte boundary and is a multiple of 16 bytes long."""
    size = tensor.element_size()
    # Without memory: as in memory that starts on such a boundary
    address = tensor.data_ptr() if has_memory(tensor) else tensor.storage_offset() * size
    if address % 16 or tensor.shape[-1] * size % 16:
        return False
    strides = zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
    return all(stride * size % 16 == 0 for stride, length in strides if length > 1)


def has_memory(tensor: Tensor) -> bool:
    """True if the elements can be read: not those of meta tensors, fake ones and other wrappers."""
    kind = type(tensor)
    return not tensor.is_meta and (kind is Tensor or kind.__torch_dispatch__ is Tensor.__torch_dispatch__)


def rows_disjoint(tensor: Tensor, layout: str) -> bool:
    """No two rows of a head overlap in memory."""
    row = row_axis(layout)
    return tensor.shape[row] <= 1 or tensor.stride(row) >= tensor.shape[-1]


def is_v_in_k(k: Tensor, v: Tensor) -> bool:
    """Each row of v is the beginning of the same row of k in memory."""
    if k.dtype != v.dtype or k.shape[:-1] != v.shape[:-1] or v.shape[-1] > k.shape[-1]:
        return False
    if not has_memory(k) or not has_memory(v) or k.data_ptr() != v.data_ptr():
        return False
    strides = zip(k.shape[:-1], k.stride(), v.stride(), strict=False)
    return all(one == other for length, one, other in strides if length > 1)


# What the options mean, for everyone who asks.


def softmax_scale(args: AttentionArgs) -> float:
    return 1.0 / math.sqrt(args.q.shape[-1]) if args.scale is None else args.scale


def key_window(args: AttentionArgs) -> tuple[int, int]:
    """The inclusive (left, right) reach around a query's position with causal folded in; -1 = unbounded."""
    return args.window_left, args.window_right if args.causal == "none" else 0


def query_offset(args: AttentionArgs, seqlen_q: int, seqlen_k: int) -> int:
    """Query i stands at key i + offset."""
    return 0 if args.causal == "top_left" else seqlen_k - seqlen_q


def is_deterministic(args: AttentionArgs) -> bool:
    if args.deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    return args.deterministic


def lse_dtype(args: AttentionArgs) -> torch.dtype:
    return torch.float64 if args.q.dtype == torch.float64 else torch.float32


def page_size(args: AttentionArgs) -> int:
    if args.block_table is None:
        return 0
    return args.k.shape[row_axis(args.layout)]


def head_axis(layout: str) -> int:
    """The axis of the heads, counted from the end: the same for batched, packed and paged tensors."""
    return -2 if layout == "bshd" else -3


def row_axis(layout: str) -> int:
    return -3 if layout == "bshd" else -2


def shape_of(args: AttentionArgs) -> Shape:
    """The sizes, once the ranks are known to be right."""
    head, row = head_axis(args.layout), row_axis(args.layout)
    q, k, v = args.q, args.k, args.v
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[row], k.shape[row]
    mean_q = mean_k = share_k = None
    if args.block_table is not None:
        seqlen_k *= args.block_table.shape[1]
    if args.cu_seqlens_q is not None:
        batch = args.cu_seqlens_q.shape[0] - 1
        total_q, total_k = seqlen_q, seqlen_k
        seqlen_q = _bound(args, total_q, args.max_seqlen_q, 2)
        seqlen_k = _bound(args, total_k, args.max_seqlen_k, 3)
        # The number of sequences may not be known yet while torch.compile traces: nothing here decides by it
        num_shares = torch.sym_max(batch, 1)
        mean_q = torch.sym_min(-(-total_q // num_shares), seqlen_q)
        share_k = None if args.block_table is not None else torch.sym_min(-(-total_k // num_shares), seqlen_k)
        mean_k = share_k if args.max_seqlen_k is None else None
    means = mean_q, mean_k, share_k
    return Shape(batch, q.shape[head], k.shape[head], seqlen_q, seqlen_k, q.shape[-1], v.shape[-1], *means)


def _bound(args: AttentionArgs, most: int, max_seqlen: int | None, axis: int) -> int:
    """No packed sequence is longer than all of them together, than its pages hold, or than a mask or bias that is not
    broadcast along the axis: 2 for queries, 3 for keys."""
    sizes = [most] if max_seqlen is None else [most, max_seqlen]
    for tensor in (args.mask, args.bias):
        if tensor is not None and tensor.dim() == 4 and tensor.shape[axis] != 1:
            sizes.append(tensor.shape[axis])
    return functools.reduce(torch.sym_min, sizes)


# Checks. Each raises a typed error; none reads the contents of a tensor.


def validate(args: AttentionArgs) -> Shape:
    """Checks sizes, strides, dtypes, devices and scalars; returns the sizes."""
    _check_scalars(args)
    _check_qkv(args)
    _check_index_tensors(args)
    shape = shape_of(args)
    _check_lengths(args, shape)
    _check_sizes(args, shape)
    _check_score_tensors(args, shape)
    return shape


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise value_error("layout", repr(layout), " or ".join(repr(name) for name in LAYOUTS))


def _check_scalars(args: AttentionArgs) -> None:
    check_layout(args.layout)
    if args.causal not in CAUSAL_KINDS:
        raise value_error("causal", repr(args.causal), "'none', 'top_left' or 'bottom_right'")
    for side, value in (("left", args.window_left), ("right", args.window_right)):
        if value < -1:
            raise value_error("window", f"{side} = {value}", "integers >= 0, or -1 for unbounded")
    if args.scale is not None and not (-math.inf < args.scale < math.inf):
        raise value_error("scale", args.scale, "a finite number, or None for 1 / sqrt(head_dim)")
    if args.scale is not None and args.q.dtype != torch.float64 and not -LARGEST_SCALE <= args.scale <= LARGEST_SCALE:
        accepted = f"a number of size 2^127 at most for {dtype_name(args.q.dtype)}"
        raise value_error("scale", args.scale, accepted, "Scale q instead, or pass float64 tensors")
    if not (0.0 <= args.softcap <= _LARGEST_FLOAT32):
        raise value_error("softcap", args.softcap, "a float32 number >= 0 (0 = none)")
    if not (0.0 <= args.dropout_p < 1.0):
        raise value_error("dropout_p", args.dropout_p, "a probability in [0, 1)")
    for name in ("first_query", "first_key", "first_head", "total_heads"):
        index = getattr(args, name)
        if not (0 <= index <= MAX_LENGTH) or (name == "first_key" and index % 8 != 0):
            accepted = f"an integer of 0 to {MAX_LENGTH}"
            raise value_error(name, index, accepted + (", a multiple of 8" if name == "first_key" else ""))
    if args.num_splits < 0:
        raise value_error("num_splits", args.num_splits, "an integer >= 0 (0 = chosen)")
    for name, length in (("max_seqlen_q", args.max_seqlen_q), ("max_seqlen_k", args.max_seqlen_k)):
        if length is not None and not (0 <= length <= MAX_LENGTH):
            raise value_error(name, length, f"an integer of 0 to {MAX_LENGTH}, or None")


def _check_qkv(args: AttentionArgs) -> None:
    is_packed, is_paged = args.cu_seqlens_q is not None, args.block_table is not None
    if args.q.dtype not in DTYPES:
        raise type_error("q", args.q.dtype, _ACCEPTED_DTYPES, "Convert q, k and v")
    for name, tensor, rank in (
        ("q", args.q, 3 if is_packed else 4),
        ("k", args.k, 3 if is_packed and not is_paged else 4),
        ("v", args.v, 3 if is_packed and not is_paged else 4),
    ):
        if tensor.dtype != args.q.dtype:
            raise type_error(name, tensor.dtype, f"{dtype_name(args.q.dtype)}, as q", "Convert q, k and v to one dtype")
        if tensor.dim() != rank:
            raise value_error(name, f"{tensor.dim()} dimensions {tuple(tensor.shape)}", _axes(args, name, rank))
        _check_device(args, name, tensor)
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel() > 0:
            raise value_error(
                name,
                f"stride {tensor.stride(-1)} in the last dimension",
                "stride 1 there, any other strides",
                f"Call {name}.contiguous()",
            )
    if args.out_dtype not in (None, args.q.dtype, torch.float32):
        raise type_error("out_dtype", args.out_dtype, f"None, {dtype_name(args.q.dtype)} (q's) or float32")


def _axes(args: AttentionArgs, name: str, rank: int) -> str:
    letter = "q" if name == "q" else "k"
    heads, rows, dim = (
        ("heads" if name == "q" else "heads_kv"),
        f"seqlen_{letter}",
        ("head_dim_v" if name == "v" else "head_dim"),
    )
    if rank == 3:
        rows = f"total_{letter}"
    elif letter == "k" and args.block_table is not None:
        rows = "page_size"
    inner = f"{heads}, {rows}" if args.layout == "bhsd" else f"{rows}, {heads}"
    outer = "" if rank == 3 else ("num_pages, " if rows == "page_size" else "batch, ")
    return f"{rank} dimensions ({outer}{inner}, {dim}) for layout {args.layout!r}"


def _check_device(args: AttentionArgs, name: str, tensor: Tensor) -> None:
    if tensor.device != args.q.device:
        raise value_error(name, f"device {tensor.device}", f"{args.q.device}, where q is", f"Move {name} there")


def _check_index_tensors(args: AttentionArgs) -> None:
    batch_plus_one = "(batch + 1,)"
    for name, shape, rank in (
        ("cu_seqlens_q", batch_plus_one, 1),
        ("cu_seqlens_k", batch_plus_one, 1),
        ("seqused_k", "(batch,)", 1),
        ("leftpad_k", "(batch,)", 1),
        ("block_table", "(batch, pages_per_sequence)", 2),
    ):
        tensor = getattr(args, name)
        if tensor is None:
            continue
        if tensor.dtype != torch.int32:
            raise type_error(name, tensor.dtype, "int32", f"Call {name}.to(torch.int32)")
        if tensor.dim() != rank:
            raise value_error(name, tensor, shape)
        _check_device(args, name, tensor)
    if args.cu_seqlens_q is None:
        if args.cu_seqlens_k is not None:
            raise value_error("cu_seqlens_k", "it without cu_seqlens_q", "both or neither")
    else:
        if args.cu_seqlens_q.shape[0] < 1:
            raise value_error("cu_seqlens_q", args.cu_seqlens_q, f"{batch_plus_one}, starting with 0")
        if args.cu_seqlens_k is None and (args.block_table is None or args.seqused_k is None):
            raise value_error(
                "cu_seqlens_k", "None", f"{batch_plus_one}, or None where block_table and seqused_k are both given"
            )
    if args.rng_state is not None:
        if args.rng_state.dtype != torch.int64:
            raise type_error("rng_state", args.rng_state.dtype, "int64 (seed, offset)")
        if args.rng_state.dim() != 1 or args.rng_state.shape[0] != 2:
            raise value_error("rng_state", args.rng_state, "shape (2,): seed, offset")
        _check_device(args, "rng_state", args.rng_state)
    elif args.dropout_p > 0.0:
        raise value_error("rng_state", "None", "an int64 (seed, offset) tensor wherever dropout_p > 0")


def _check_lengths(args: AttentionArgs, shape: Shape) -> None:
    """Sizes have to fit into 32 bits. Symbolic ones are checked when they have become numbers."""
    for name, tensor in (("q", args.q), ("k", args.k), ("v", args.v)):
        for size in tensor.shape:
            if type(size) is int and size > MAX_LENGTH:
                raise unsupported(name, f"shape {tuple(tensor.shape)}", f"sizes up to {MAX_LENGTH}")
    if args.block_table is not None and type(shape.seqlen_k) is int and shape.seqlen_k > MAX_LENGTH:
        columns, size = args.block_table.shape[1], page_size(args)
        raise unsupported(
            "block_table",
            f"{columns} pages of {size} keys per sequence",
            f"up to {MAX_LENGTH} keys per sequence",
            "Drop columns that no sequence reaches",
        )


def _check_sizes(args: AttentionArgs, shape: Shape) -> None:
    k, v = args.k, args.v
    head, row = head_axis(args.layout), row_axis(args.layout)
    if shape.head_dim < 1 or shape.head_dim > MAX_HEAD_DIM:
        raise unsupported("q", f"head_dim {shape.head_dim}", f"1 to {MAX_HEAD_DIM}")
    if shape.head_dim_v < 1 or shape.head_dim_v > MAX_HEAD_DIM:
        raise unsupported("v", f"head_dim_v {shape.head_dim_v}", f"1 to {MAX_HEAD_DIM}")
    if k.shape[-1] != shape.head_dim:
        raise value_error("k", f"head_dim {k.shape[-1]}", f"{shape.head_dim}, as q")
    if shape.heads < 1:
        raise value_error("q", f"{shape.heads} heads", "at least 1")
    if shape.heads_kv < 1 or shape.heads % shape.heads_kv != 0:
        raise value_error("k", f"{shape.heads_kv} heads", f"a divisor of q's {shape.heads} heads")
    if v.shape[head] != shape.heads_kv:
        raise value_error("v", f"{v.shape[head]} heads", f"{shape.heads_kv}, as k")
    if v.shape[row] != k.shape[row]:
        raise value_error("v", f"{v.shape[row]} keys", f"{k.shape[row]}, as k")
    if args.block_table is not None:
        if v.shape[0] != k.shape[0]:
            raise value_error("v", f"{v.shape[0]} pages", f"{k.shape[0]}, as k")
    elif args.cu_seqlens_q is None:
        for name, tensor in (("k", k), ("v", v)):
            if tensor.shape[0] != shape.batch:
                raise value_error(name, f"batch {tensor.shape[0]}", f"{shape.batch}, as q")
    for name, extra in (("cu_seqlens_k", 1), ("seqused_k", 0), ("leftpad_k", 0), ("block_table", 0)):
        tensor = getattr(args, name)
        if tensor is not None and tensor.shape[0] != shape.batch + extra:
            raise value_error(name, f"{tensor.shape[0]} rows", f"{shape.batch + extra}, for batch {shape.batch}")


def _check_score_tensors(args: AttentionArgs, shape: Shape) -> None:
    if args.mask is not None:
        if args.mask.dtype != torch.bool:
            is_added = args.mask.is_floating_point()
            hint = "Pass values to be added as bias" if is_added else "Call mask.bool() where nonzero means attend"
            raise type_error("mask", args.mask.dtype, "bool, True = attend", hint)
        _check_broadcast(args, "mask", args.mask, shape)
    if args.bias is not None:
        if args.bias.dtype not in (args.q.dtype, torch.float32):
            hint = "Call bias.to(q.dtype)" if args.bias.is_floating_point() else "Pass booleans as mask"
            raise type_error("bias", args.bias.dtype, q_or_float32(args.q.dtype), hint)
        _check_broadcast(args, "bias", args.bias, shape)
    for name, slopes in (("alibi_slopes", args.alibi_slopes), ("sinks", args.sinks)):
        if slopes is None:
            continue
        if slopes.dtype not in (args.q.dtype, torch.float32):
            raise type_error(name, slopes.dtype, q_or_float32(args.q.dtype), f"Call {name}.float()")
        per_head = slopes.dim() == 1 and slopes.shape[0] == shape.heads
        per_batch = slopes.dim() == 2 and slopes.shape[0] == shape.batch and slopes.shape[1] == shape.heads
        if not per_head and not (per_batch and name == "alibi_slopes"):
            accepted = f"shape ({shape.heads},)" + (
                f" or ({shape.batch}, {shape.heads})" if name == "alibi_slopes" else ""
            )
            raise value_error(name, slopes, accepted)
        _check_device(args, name, slopes)


def q_or_float32(dtype: torch.dtype) -> str:
    return "float32" if dtype == torch.float32 else f"{dtype_name(dtype)} (q's) or float32"


def _check_broadcast(args: AttentionArgs, name: str, tensor: Tensor, shape: Shape) -> None:
    """(batch, heads, seqlen_q, seqlen_k), each 1 or whole. Packed rows and keys may exceed every length: see
    check_values."""
    _check_device(args, name, tensor)
    is_packed = args.cu_seqlens_q is not None
    max_seqlen_q = args.max_seqlen_q if is_packed else None
    max_seqlen_k = args.max_seqlen_k if is_packed else None
    full = (
        shape.batch,
        shape.heads,
        shape.seqlen_q if max_seqlen_q is None else max_seqlen_q,
        shape.seqlen_k if max_seqlen_k is None else max_seqlen_k,
    )
    is_open = (False, False, is_packed and max_seqlen_q is None, is_packed and max_seqlen_k is None)
    if tensor.dim() == 4 and all(
        is_open[axis] or tensor.shape[axis] == 1 or tensor.shape[axis] == full[axis] for axis in range(4)
    ):
        return
    raise broadcast_error(name, tuple(tensor.shape), full)


def broadcast_error(name: str, shape: tuple[int, ...], full: tuple[int, ...]) -> ValueError:
    """Returns the error for a mask or bias that does not broadcast to (batch, heads, seqlen_q, seqlen_k)."""
    batch, _, seqlen_q, seqlen_k = full
    hint = ""
    if shape == (batch, seqlen_k):
        hint = f"Pass {name}[:, None, None] where it is (batch, seqlen_k)"
    elif len(shape) == 3 and shape[0] == batch and shape[1] in (1, seqlen_q) and shape[2] in (1, seqlen_k):
        hint = f"Pass {name}[:, None] where it is (batch, seqlen_q, seqlen_k)"
    accepted = "at most 4 dimensions, broadcastable to (batch, heads, seqlen_q, seqlen_k) = " + str(full)
    error = value_error(name, f"shape {shape}", accepted, hint)
    error.full_shape = full  # type: ignore[attr-defined]
    return error


def with_given_shapes(error: Exception, **tensors: Tensor | None) -> Exception:
    """The error of `_check_broadcast`, which sees four dimensions, with the shape that the caller gave."""
    full, name = getattr(error, "full_shape", None), str(error).partition(":")[0]
    tensor = tensors.get(name)
    if full is None or tensor is None or tensor.dim() == len(full):
        return error
    return broadcast_error(name, tuple(tensor.shape), full).with_traceback(error.__traceback__)


def is_checking() -> bool:
    """FLASHTILE_CHECK=1: index tensors on a GPU are read and checked too, which waits for it. Kernels clamp bad values
    otherwise."""
    return is_switched_on("FLASHTILE_CHECK")


def check_values(args: AttentionArgs) -> list[SequenceSpan]:
    """Reads the index tensors on the host, checks them, and returns each sequence's place."""
    spans = _spans(args)
    if args.cu_seqlens_q is None:
        return spans
    for name, longest, given, tensor_axis in (
        ("max_seqlen_q", max((span.seqlen_q for span in spans), default=0), args.max_seqlen_q, 2),
        ("max_seqlen_k", max((span.seqlen_k for span in spans), default=0), args.max_seqlen_k, 3),
    ):
        if given is not None and given < longest:
            raise value_error(name, given, f"at least {longest}, the longest sequence")
        for score_name, tensor in (("bias", args.bias), ("mask", args.mask)):
            if tensor is not None and 1 != tensor.shape[tensor_axis] < longest:
                came = f"{tensor.shape[tensor_axis]} {'rows' if tensor_axis == 2 else 'columns'}"
                raise value_error(score_name, came, f"1, or at least {longest}, the longest sequence")
    return spans


class SequenceSpan(NamedTuple):
    """Place of one sequence of a batch: its packed query rows and its keys."""

    q_start: int  # packed row of its first query
    seqlen_q: int
    k_start: int  # row of its first key, left padding skipped: packed, or within its own keys
    seqlen_k: int


def _spans(args: AttentionArgs) -> list[SequenceSpan]:
    shape = shape_of(args)
    row = row_axis(args.layout)
    is_packed = args.cu_seqlens_q is not None
    q_bounds = k_bounds = None
    if args.cu_seqlens_q is not None:
        q_bounds = _bounds("cu_seqlens_q", args.cu_seqlens_q, args.q.shape[row])
    if args.cu_seqlens_k is not None:
        k_bounds = _bounds(
            "cu_seqlens_k", args.cu_seqlens_k, None if args.block_table is not None else args.k.shape[row]
        )
    used = None if args.seqused_k is None else args.seqused_k.tolist()
    leftpad = None if args.leftpad_k is None else args.leftpad_k.tolist()
    spans = []
    for b in range(shape.batch):
        q_start, q_end = (q_bounds[b], q_bounds[b + 1]) if q_bounds is not None else (0, shape.seqlen_q)
        k_start, k_end = (k_bounds[b], k_bounds[b + 1]) if k_bounds is not None else (0, shape.seqlen_k)
        if args.block_table is not None:
            room = args.block_table.shape[1] * page_size(args)
            k_start, k_end = 0, k_end - k_start
            if used is None and k_end > room:
                raise value_error(
                    "cu_seqlens_k", f"{k_end} keys in sequence {b}", f"at most {room}, what its pages hold"
                )
        else:
            room = k_end - k_start
        if used is not None:
            if not 0 <= used[b] <= room:
                raise value_error("seqused_k", f"{used[b]} for sequence {b}", f"0 to {room}")
            k_end = k_start + used[b]
        if leftpad is not None:
            if not 0 <= leftpad[b] <= k_end - k_start:
                raise value_error(
                    "leftpad_k", f"{leftpad[b]} for sequence {b}", f"0 to {k_end - k_start}, its number of keys"
                )
            k_start += leftpad[b]
        spans.append(SequenceSpan(q_start if is_packed else 0, q_end - q_start, k_start, k_end - k_start))
    _check_pages(args, spans)
    return spans


def _bounds(name: str, cu_seqlens: Tensor, total: int | None) -> list[int]:
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise value_error(name, f"{bounds[0]} at the start", "0 there")
    for i, (start, end) in enumerate(pairwise(bounds)):
        if end < start:
            raise value_error(name, f"{start} followed by {end} at position {i + 1}", "values that never decrease")
    if total is not None and bounds[-1] != total:
        raise value_error(name, f"{bounds[-1]} at the end", f"{total}, the number of packed rows")
    return bounds


def _check_pages(args: AttentionArgs, spans: list[SequenceSpan]) -> None:
    """Every page that a sequence reaches must exist; entries behind its last key may hold anything."""
    if args.block_table is None:
        return
    size, num_pages = page_size(args), args.k.shape[0]
    for b, (span, row) in enumerate(zip(spans, args.block_table.tolist(), strict=True)):
        if span.seqlen_k == 0:
            continue
        for slot in range(span.k_start // size, (span.k_start + span.seqlen_k - 1) // size + 1):
            if not 0 <= row[slot] < num_pages:
                raise value_error("block_table", f"page {row[slot]} at [{b}, {slot}]", f"0 to {num_pages - 1}")
