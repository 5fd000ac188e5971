"""Compiles a rung and launches it on torch's stream, for contiguous tensors (batch, heads, seqlen, head_dim)."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.errors import dtype_name, unsupported, value_error
from flashtile.lab.dtypes import DTYPES
from flashtile.lab.ladder.rungs import Rung, Tile, Variables
from flashtile.lab.profile import gpu
from flashtile.plans.arch import Arch
from flashtile.runtime import cache, driver
from flashtile.runtime.nvrtc import Compiled, Resources

_BOX_COLUMNS = 64  # of a tensor map: 128 bytes, what its swizzle takes


class Params(ctypes.Structure):
    """The argument of every rung. `layout_asserts` checks it against the struct in the file."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("o", ctypes.c_void_p),
        ("seqlen", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("scale_log2", ctypes.c_float),
        ("is_causal", ctypes.c_int32),
    )


_Map = ctypes.c_ubyte * driver.TENSOR_MAP_BYTES  # an array of c_char would end at the first zero


class MappedParams(ctypes.Structure):
    """The argument of a rung with tensor maps."""

    _fields_ = (
        ("map_q", _Map),
        ("map_k", _Map),
        ("map_v", _Map),
        ("p", Params),
        ("num_tiles", ctypes.c_int32),  # query tiles of all heads
        ("padding", ctypes.c_char * 12),  # to a multiple of 64 bytes
    )


def layout_asserts(kinds: Sequence[type[ctypes.Structure]] = (Params,)) -> str:
    """C++ static_asserts that fail if the structs of the file differ from ours."""
    lines = []
    for kind in kinds:
        known = kind.__name__
        lines.append(
            f'static_assert(sizeof({known}) == {ctypes.sizeof(kind)}, "{known}: as in the files of the ladder");'
        )
        for name, *_ in kind._fields_:
            if name == "padding":
                continue
            address = f"__INTADDR__(&(static_cast<{known}*>(nullptr)->{name}))"
            lines.append(
                f'static_assert({address} == {getattr(kind, name).offset}, "{known}: {name} as in the '
                'files of the ladder");'
            )
    return "\n".join(lines)


@dataclass(frozen=True)
class Kernel:
    """A compiled rung."""

    rung: Rung
    arch: Arch
    tile: Tile
    compiled: Compiled
    is_debug: bool

    @property
    def resources(self) -> Resources:
        return self.compiled.resources(self.rung.function)

    @property
    def occupancy(self) -> float:
        """Resident warps over the most that a multiprocessor holds, from registers and shared memory."""
        blocks = self.arch.blocks_per_multiprocessor(
            self.tile.num_threads, self.resources.registers, self.tile.shared_bytes
        )
        return blocks * -(-self.tile.num_threads // 32) / self.arch.max_warps

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, out: Tensor | None = None) -> Tensor:
        """Attention. The result goes to `out` if given."""
        out = torch.empty_like(q) if out is None else out
        batch, heads, seqlen, head_dim = q.shape
        scale_log2 = math.log2(math.e) / math.sqrt(head_dim)
        params: ctypes.Structure = Params(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), seqlen, head_dim, scale_log2, is_causal
        )
        grid = batch * heads * -(-seqlen // self.tile.block_m)
        if grid == 0:
            return out
        index = q.device.index or 0
        if self.rung.has_maps:
            rows = self.tile.block_m, self.tile.block_n, self.tile.block_n
            maps = [_tensor_map(tensor, box_rows) for tensor, box_rows in zip((q, k, v), rows, strict=True)]
            params = MappedParams(*maps, params, grid)
        if self.rung.blocks_per_multiprocessor:
            grid = min(grid, self.rung.blocks_per_multiprocessor * driver.multiprocessor_count(index))
        function = _function(self.compiled.cubin, self.compiled.symbols[self.rung.function])
        with torch.cuda.device(index):
            function.set_shared_bytes(index, self.tile.shared_bytes)
            stream = torch.cuda.current_stream().cuda_stream
            function.launch((grid, 1, 1), (self.tile.num_threads, 1, 1), self.tile.shared_bytes, stream, params)
            if self.is_debug:
                print(
                    f"{self.rung.name}: grid {grid}, block {self.tile.num_threads}, shared {self.tile.shared_bytes}",
                    file=sys.stderr,
                )
                torch.cuda.synchronize()
        return out


def _tensor_map(tensor: Tensor, box_rows: int) -> ctypes.Array[ctypes.c_ubyte]:
    """The map of a tensor, heads apart, so that rows past the last one of a head are loaded as zeros."""
    batch, heads, seqlen, head_dim = tensor.shape
    row_bytes = head_dim * tensor.element_size()
    sizes, strides = (head_dim, seqlen, batch * heads), (row_bytes, seqlen * row_bytes)
    tensor_map = driver.TensorMap(dtype_name(tensor.dtype), sizes, strides, (_BOX_COLUMNS, box_rows, 1))
    return _Map.from_buffer_copy(tensor_map.encode(tensor.data_ptr()))


@functools.cache
def _function(cubin: bytes, symbol: str) -> driver.Function:
    return driver.load(cubin).function(symbol)


def compile_rung(
    rung: Rung, head_dim: int, arch: Arch, variables: Variables, is_aligned16: bool | None = None
) -> Kernel:
    """Compiles for one head dim; needs no GPU. A CompileError contains the whole log."""
    tile = rung.tile(head_dim, arch, variables)
    is_aligned16 = _has_aligned_rows(rung, head_dim) if is_aligned16 is None else is_aligned16
    if rung.has_maps and not is_aligned16:
        raise unsupported(rung.name, f"head_dim {head_dim}", "rows on 16-byte boundaries, since it loads by TMA")
    structs = (Params, MappedParams) if rung.has_maps else (Params,)
    unit = f'#line 1 "{rung.path.name}"\n{rung.source}\n#line 1 "launcher"\n{layout_asserts(structs)}\n'
    compiled = cache.compile_cached(unit, arch.name, [rung.function], tile.defines(is_aligned16))
    kernel = Kernel(rung, arch, tile, compiled, variables.is_debug)
    if variables.is_debug:
        print(
            f"{rung.name}: {rung.path}, {' '.join(tile.defines(is_aligned16))}\n{compiled.log.strip()}", file=sys.stderr
        )
    return kernel


def kernel_for(rung: Rung, q: Tensor, k: Tensor, v: Tensor, variables: Variables) -> Kernel:
    """Checks the tensors of a call and returns the kernel for it."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != DTYPES[rung.dtype]:
            raise unsupported(name, tensor.dtype, f"{dtype_name(DTYPES[rung.dtype])}, what {rung.name} computes")
        if tensor.dim() != 4 or tensor.shape != q.shape:
            raise value_error(name, tensor, "(batch, heads, seqlen, head_dim), the same for q, k and v")
        if not tensor.is_contiguous():
            raise value_error(name, f"strides {tensor.stride()}", "a contiguous tensor", "Call .contiguous()")
        if tensor.device != q.device or tensor.device.type != "cuda":
            raise unsupported(name, f"it on {tensor.device}", "one CUDA device")
    is_aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (q, k, v))
    is_aligned16 = is_aligned and _has_aligned_rows(rung, q.shape[-1])
    return compile_rung(rung, q.shape[-1], gpu.current_arch(q.device.index or 0), variables, is_aligned16)


def _has_aligned_rows(rung: Rung, head_dim: int) -> bool:
    """Rows of a contiguous tensor that starts on a 16-byte boundary start on one, too."""
    return head_dim * DTYPES[rung.dtype].itemsize % 16 == 0
