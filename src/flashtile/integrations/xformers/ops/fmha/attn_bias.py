"""xformers.ops.fmha.attn_bias: who sees whom, as an object instead of a tensor.

Each class is a band (a corner and a window) over one rectangle of scores, or over one for each sequence. `band_of` says
which, for these classes and for those of the xformers package; the functions and `materialize` go by it. The gappy
classes, whose keys start anywhere, are refused when they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from flashtile.errors import unsupported, value_error

_Device = str | torch.device
_MODULES = (__name__, "xformers.ops.fmha.attn_bias", "mslk.attention.fmha.attn_bias")
_TOP_LEFT, _BOTTOM_RIGHT = "top_left", "bottom_right"


def _local(corner: str) -> Callable[[Any], tuple[bool | str, Any]]:
    """A causal band that reaches _window_size keys back, the query's own among them."""
    return lambda bias: (corner, (bias._window_size - 1, -1))


def _two_sided(bias: Any) -> tuple[bool | str, Any]:
    return False, (bias.window_left, bias.window_right)


def _fixed(causal: bool | str) -> Callable[[Any], tuple[bool | str, Any]]:
    return lambda bias: (causal, None)


# By the name of a class: (causal, window) of `flashtile.attention`
_BANDS: dict[str, Callable[[Any], tuple[bool | str, Any]]] = {
    "LowerTriangularMask": _fixed(_TOP_LEFT),
    "LowerTriangularMaskWithTensorBias": _fixed(_TOP_LEFT),
    "LowerTriangularFromBottomRightMask": _fixed(_BOTTOM_RIGHT),
    "LowerTriangularFromBottomRightLocalAttentionMask": _local(_BOTTOM_RIGHT),
    "LocalAttentionFromBottomRightMask": _two_sided,
    "BlockDiagonalMask": _fixed(False),
    "BlockDiagonalCausalMask": _fixed(_TOP_LEFT),
    "BlockDiagonalCausalFromBottomRightMask": _fixed(_BOTTOM_RIGHT),
    "BlockDiagonalCausalLocalAttentionMask": _local(_TOP_LEFT),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _local(_BOTTOM_RIGHT),
    "BlockDiagonalPaddedKeysMask": _fixed(False),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _fixed(_BOTTOM_RIGHT),
    "BlockDiagonalLocalAttentionPaddedKeysMask": _two_sided,
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _local(_BOTTOM_RIGHT),
    "PagedBlockDiagonalPaddedKeysMask": _fixed(False),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": _fixed(_BOTTOM_RIGHT),
}


def band_of(bias: Any) -> tuple[bool | str, Any]:
    """Returns (causal, window) of a bias object. Its exact class decides: a subclass may mean anything."""
    kind = type(bias)
    if kind.__module__ not in _MODULES or kind.__name__ not in _BANDS:
        raise unsupported("attn_bias", kind.__name__, f"None, a tensor, {', '.join(_BANDS)}")
    return _BANDS[kind.__name__](bias)


def _visible(bias: Any, rows: int, keys: int) -> Tensor:
    """True where a query sees a key, over one rectangle."""
    causal, window = band_of(bias)
    offset = 0 if causal == _TOP_LEFT else keys - rows
    ahead = torch.arange(keys) - torch.arange(rows)[:, None] - offset
    left, right = window or (-1, -1)
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        visible &= ahead <= 0
    if left >= 0:
        visible &= ahead >= -left
    if right >= 0:
        visible &= ahead <= right
    return visible


def _as_bias(visible: Tensor, shape: Sequence[int], dtype: torch.dtype, device: _Device) -> Tensor:
    """0 where a key is seen, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf")).to(device).expand(*shape)


class AttentionBias:
    """A bias that is described instead of stored."""

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: _Device = "cpu"
    ) -> Tensor:
        """The bias as a tensor of this shape (..., rows, keys). For tests: it stores the whole rectangle."""
        return _as_bias(_visible(self, *shape[-2:]), shape, dtype, device)

    def to(self, device: _Device) -> Any:
        return self


class LowerTriangularMask(AttentionBias):
    """Query i sees keys 0 to i."""

    def __init__(self, device: _Device | None = None) -> None:
        pass

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Query i sees keys 0 to i, and a tensor is added to the scores."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def to(self, device: _Device) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(self._bias.to(device))

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: _Device = "cpu"
    ) -> Tensor:
        return super().materialize(shape, dtype, device) + self._bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """The last query sees every key, each query before it one key less."""

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal from the bottom right; a query sees the last _window_size of its keys."""

    _window_size: int

    def __post_init__(self) -> None:
        _check_window(self._window_size)


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """A query sees window_left keys before its own, which is counted from the bottom right, and window_right behind
    it."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        for name in ("window_left", "window_right"):
            if getattr(self, name) < 0:
                raise value_error(name, getattr(self, name), "0 or more")


def _check_window(size: int) -> None:
    if size <= 0:
        raise value_error("window_size", size, "1 or more")


# Sequences


@dataclass
class _SeqLenInfo:
    """Sequences that lie one behind the other: sequence b begins at seqstart[b] (int32; seqstart_py on the host)."""

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: _Device | None = None) -> Any:
        lengths = list(seqlens)
        starts = _starts(lengths)
        return cls(_index(starts, device), max(lengths, default=-1), min(lengths, default=-1), starts)

    def from_seqlens_inplace(self, seqlens: Iterable[int]) -> None:
        """Takes other lengths, of as many sequences, into the same tensor, as CUDA graphs need it."""
        lengths = list(seqlens)
        self._check_inplace(lengths, len(self.seqstart_py) - 1)
        self.seqstart_py[:] = _starts(lengths)
        self.seqstart.copy_(torch.tensor(self.seqstart_py, dtype=torch.int32), non_blocking=True)

    def _check_inplace(self, lengths: Sequence[int], count: int) -> None:
        if len(lengths) != count or max(lengths, default=-1) > self.max_seqlen:
            raise value_error("seqlens", list(lengths), f"{count} lengths up to {self.max_seqlen}, as before")

    def intervals(self) -> Iterator[tuple[int, int]]:
        """(start, end) of each sequence."""
        yield from pairwise(self.seqstart_py)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """The rows (1, total, ...) as one tensor (batch, rows, ...) for each batch of sequences of one length."""
        if x.shape[:2] != (1, self.seqstart_py[-1]):
            raise value_error("tensor", x, f"(1, {self.seqstart_py[-1]}, ...)")
        ends = _starts(batch_sizes or [1] * (len(self.seqstart_py) - 1))
        return [
            x[0, self.seqstart_py[first] : self.seqstart_py[end]].unflatten(0, (end - first, -1))
            for first, end in pairwise(ends)
        ]

    def to(self, device: _Device) -> Any:
        return _moved(self, device)


@dataclass
class _PaddedSeqLenInfo(_SeqLenInfo):
    """Sequences with `padding` rows each, of which seqlen[b] count (int32; seqlen_py on the host)."""

    seqlen: Tensor
    seqlen_py: list[int]
    padding: int

    @classmethod
    def from_seqlens_padded(cls, seqlens: Sequence[int], padding: int, *, device: _Device | None = None) -> Any:
        lengths = list(seqlens)
        if max(lengths, default=0) > padding:
            raise value_error("kv_seqlen", lengths, f"lengths up to kv_padding = {padding}")
        starts = _starts([padding] * len(lengths))
        longest, shortest = max(lengths, default=-1), min(lengths, default=-1)
        return cls(_index(starts, device), longest, shortest, starts, _index(lengths, device), lengths, padding)

    def from_seqlens_padded_inplace(self, seqlens: Sequence[int]) -> None:
        """Takes other lengths, of as many sequences, into the same tensor, as CUDA graphs need it."""
        self._check_inplace(seqlens, len(self.seqlen_py))
        self.seqlen_py[:] = seqlens
        self.seqlen.copy_(torch.tensor(self.seqlen_py, dtype=torch.int32), non_blocking=True)

    def intervals(self) -> Iterator[tuple[int, int]]:
        yield from ((start, start + used) for start, used in zip(self.seqstart_py, self.seqlen_py, strict=False))


def _starts(lengths: Iterable[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        if length < 0:
            raise value_error("seqlens", length, "lengths of at least 0")
        starts.append(starts[-1] + length)
    return starts


def _index(values: list[int], device: _Device | None) -> Tensor:
    """int32, on the GPU if there is one and no device is named."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.tensor(values, dtype=torch.int32, device=device)


class _Sequences(AttentionBias):
    """A band over the keys of each sequence."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo

    def to(self, device: _Device) -> Any:
        return _moved(self, device)

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: _Device = "cpu"
    ) -> Tensor:
        """The bias as a tensor of this shape (..., all queries, all keys). For tests: it stores the whole rectangle."""
        rows, keys = self.q_seqinfo.seqstart_py[-1], self.k_seqinfo.seqstart_py[-1]
        if tuple(shape[-2:]) != (rows, keys):
            raise value_error("shape", shape, f"(..., {rows}, {keys})")
        visible = torch.zeros(rows, keys, dtype=torch.bool)
        for (top, bottom), (left, right) in zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True):
            visible[top:bottom, left:right] = _visible(self, bottom - top, right - left)
        return _as_bias(visible, shape, dtype, device)


@dataclass
class BlockDiagonalMask(_Sequences):
    """Packed sequences; each query sees the keys of its own."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: _Device | None = None
    ) -> Any:
        queries = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        if kv_seqlen is None or list(kv_seqlen) == list(q_seqlen):
            return cls(queries, queries)
        _check_counts(q_seqlen, kv_seqlen)
        return cls(queries, _SeqLenInfo.from_seqlens(kv_seqlen, device=device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Any, Tensor]:
        """The bias and the rows (1, total, ...) of tensors (batch, rows, ...)."""
        return cls._of(tensors, tensors), _packed(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[Tensor],
        tensors_k: Sequence[Tensor],
        tensors_v: Sequence[Tensor] | None = None,
    ) -> tuple[Any, Tensor, Tensor, Tensor | None]:
        values = None if tensors_v is None else _packed(tensors_v)
        return cls._of(tensors_q, tensors_k), _packed(tensors_q), _packed(tensors_k), values

    @classmethod
    def _of(cls, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Any:
        lengths = [[x.shape[1] for x in part for _ in range(x.shape[0])] for part in (queries, keys)]
        bias = cls.from_seqlens(*lengths, device=queries[0].device)
        bias._batch_sizes = [x.shape[0] for x in queries]
        return bias

    def split_queries(self, tensor: Tensor) -> Sequence[Tensor]:
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> Sequence[Tensor]:
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """Undoes `from_tensor_list`."""
        if self.q_seqinfo is not self.k_seqinfo:
            raise value_error(
                "tensor", tensor, "queries and keys of the same lengths", "Call split_queries or split_kv"
            )
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        parts = (self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(*parts)


def _moved(whole: Any, device: _Device) -> Any:
    """The dataclass with its parts on the device."""
    parts = {f.name: getattr(whole, f.name) for f in fields(whole)}
    moved = {name: part.to(device) for name, part in parts.items() if hasattr(part, "to")}
    if whole.__dict__.get("q_seqinfo") is not None and parts["q_seqinfo"] is parts["k_seqinfo"]:
        moved["k_seqinfo"] = moved["q_seqinfo"]  # `split` asks whether they are the same
    return replace(whole, **moved)


def _check_counts(queries: Sequence[Any], keys: Sequence[Any]) -> None:
    if len(queries) != len(keys):
        raise value_error("kv_seqlen", f"{len(keys)} sequences", f"{len(queries)}, as q_seqlen")


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten(0, 1) for x in tensors])[None]


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Each sequence is causal from its top left."""


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Each sequence is causal from its bottom right."""


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Each sequence is causal from its top left; a query sees the last _window_size of its keys."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        _check_window(self._window_size)


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """Each sequence is causal from its bottom right; a query sees the last _window_size of its keys."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        _check_window(self._window_size)


@dataclass
class BlockDiagonalPaddedKeysMask(_Sequences):
    """Packed queries; the keys of every sequence have kv_padding rows, of which the first kv_seqlen[b] count."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: _Device | None = None,
    ) -> Any:
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, device))

    def make_paged(self, block_tables: Tensor, page_size: int, paged_type: type[Any]) -> Any:
        """Returns the bias over pages: row b of block_tables lists those of sequence b."""
        keys = replace(self.k_seqinfo, padding=block_tables.shape[1] * page_size)
        return paged_type(self.q_seqinfo, keys, block_tables, page_size)

    def make_local_attention(self, window_left: int, window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)


def _padded(
    q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], device: _Device | None = None
) -> tuple[_SeqLenInfo, _PaddedSeqLenInfo]:
    _check_counts(q_seqlen, kv_seqlen)
    queries = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
    return queries, _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device)


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Padded keys; each sequence is causal from the bottom right of its keys in use."""

    causal_diagonal: Any = None


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Padded keys with a window on both sides, counted from the bottom right of the keys in use."""

    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_left: int, window_right: int
    ) -> Any:
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen), window_left, window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Padded keys, causal from the bottom right of those in use; a query sees the last _window_size of its keys."""

    _window_size: int

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int
    ) -> Any:
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen), window_size)


@dataclass
class PagedBlockDiagonalPaddedKeysMask(_Sequences):
    """Padded keys in pages: key and value are (1, pages * page_size, heads, dim)."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo
    block_tables: Tensor
    page_size: int

    _UNPAGED_TYPE: ClassVar[type[BlockDiagonalPaddedKeysMask]] = BlockDiagonalPaddedKeysMask

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: _Device | None = None,
    ) -> Any:
        parts = _padded(q_seqlen, block_tables.shape[1] * page_size, kv_seqlen, device)
        return cls(*parts, block_tables, page_size)

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: _Device = "cpu"
    ) -> Tensor:
        """The bias over the rows of all pages up to the last one in use. The shape counts the keys without pages."""
        pages = self.block_tables.cpu()
        rows, size = self.q_seqinfo.seqstart_py[-1], self.page_size
        if tuple(shape[-2:]) != (rows, pages.numel() * size):
            raise value_error("shape", shape, f"(..., {rows}, {pages.numel() * size})")
        visible = torch.zeros(rows, (int(pages.max()) + 1) * size, dtype=torch.bool)
        for (top, bottom), used, own in zip(self.q_seqinfo.intervals(), self.k_seqinfo.seqlen_py, pages, strict=True):
            places = (own[:, None] * size + torch.arange(size)).flatten()[:used]
            visible[top:bottom, places] = _visible(self, bottom - top, used)
        return _as_bias(visible, (*shape[:-1], visible.shape[1]), dtype, device)


@dataclass
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """Pages; each sequence is causal from the bottom right of its keys in use."""

    _UNPAGED_TYPE = BlockDiagonalCausalWithOffsetPaddedKeysMask


class _Gappy(AttentionBias):
    def __init__(self, *args: Any, **options: Any) -> None:
        raise _refusal(type(self))

    @classmethod
    def from_seqlens(cls, *args: Any, **options: Any) -> NoReturn:
        raise _refusal(cls)


def _refusal(kind: type[Any]) -> Exception:
    return unsupported(
        "attn_bias", f"{kind.__name__}, whose keys start anywhere", "the classes of padded or paged keys"
    )


class BlockDiagonalGappyKeysMask(_Gappy):
    """Refused."""


class BlockDiagonalCausalWithOffsetGappyKeysMask(_Gappy):
    """Refused."""


class PagedBlockDiagonalGappyKeysMask(_Gappy):
    """Refused."""


class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(_Gappy):
    """Refused."""
