"""Times every tile of the Hopper forward by itself beside cuDNN's kernel, bf16, B * S = 16384, H * d = 2048, after a check against float32.

PYTHONPATH=src python tools/tune_sm90.py [--lengths 4096 ...] [--dims 64 128 256] [--rounds 7]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashtile.kernels.params import FwdSm90Params
from flashtile.kernels.source import _qualified
from flashtile.kernels.spec import Features
from flashtile.runtime import driver, nvrtc, toolchain

# head dim -> (block_m, block_n, stages, takes_turns, scales_lazily)
TILES = {
    64: [(192, 128, 2, True, False), (192, 128, 2, True, True), (192, 128, 2, False, False), (128, 128, 2, True, False)],
    128: [
        (128, 128, 2, True, False),
        (128, 128, 2, True, True),
        (128, 128, 2, False, False),
        (128, 160, 2, True, False),
        (128, 176, 2, True, False),
        (192, 80, 2, True, False),
    ],
    256: [(128, 80, 2, True, False), (128, 80, 2, True, True), (128, 80, 2, False, True)],
}


class Launch:
    """One compiled tile."""

    def __init__(self, dtype: str, head_dim: int, tile: tuple, is_causal: bool, defines: tuple[str, ...] = ()):
        self.dtype, self.head_dim, self.tile, self.is_causal = dtype, head_dim, tile, is_causal
        block_m, block_n, stages, *flags = tile
        name = {"bfloat16": "bf16_t", "float16": "half_t"}[dtype]
        config = f"Sm90Config<{name}, {name}, {head_dim}, {head_dim}, {block_m}, {block_n}, {stages}, {', '.join(str(flag).lower() for flag in flags)}>"
        policies = Features(has_band=is_causal).policies()
        entry = _qualified("flashtile::fwd_sm90_kernel<" + ", ".join(f"flashtile::{name}" for name in [config, *policies]) + ">")
        unit = f'#include "flashtile/kernels/fwd_sm90.cuh"\ntemplate __global__ void {entry}(const FT_GRID_CONSTANT flashtile::FwdSm90Params);\n'
        compiled = nvrtc.compile_source(toolchain.find(), unit, "sm_90a", [entry], defines)
        self.resources = compiled.resources(entry)
        self.function = driver.load(compiled.cubin).function(compiled.symbols[entry])
        slabs = -(-head_dim // 64)
        self.shared_bytes = -(-(slabs * 128 * (block_m + 2 * stages * block_n) + 2048) // 1024) * 1024
        self.function.set_shared_bytes(0, self.shared_bytes)

    def __str__(self) -> str:
        block_m, block_n, stages, turns, lazy = self.tile
        spills = self.resources.spill_store_bytes
        return f"{block_m}x{block_n}/{stages}{' turns' if turns else ''}{' lazy' if lazy else ''}{f' SPILLS {spills}' if spills else ''}"

    def bind(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Callable[[], None]:
        batch, heads, seqlen, head_dim = q.shape
        block_m, block_n = self.tile[:2]
        image = FwdSm90Params()
        for name, tensor, rows in (("q", q, 64), ("k", k, block_n), ("v", v, block_n)):
            sizes = (head_dim, tensor.shape[2], tensor.shape[1], tensor.shape[0])
            strides = tuple(2 * tensor.stride(axis) for axis in (2, 1, 0))
            encoded = driver.TensorMap(self.dtype, sizes, strides, (64, rows, 1, 1)).encode(tensor.data_ptr())
            ctypes.memmove(ctypes.addressof(image) + getattr(FwdSm90Params, f"{name}_map").offset, encoded, len(encoded))
        p = image.base
        for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
            setattr(p, name, tensor.data_ptr())
            getattr(p, f"{name}_strides")[:] = (tensor.stride(0), tensor.stride(1), tensor.stride(2))
        p.lse, p.lse_batch_stride, p.lse_head_stride, p.lse_size = lse.data_ptr(), lse.stride(0), lse.stride(1), lse.numel()
        p.batch, p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k = batch, heads, k.shape[1], seqlen, k.shape[2]
        p.head_dim = p.head_dim_v = head_dim
        p.num_splits, p.window_left, p.window_right, p.is_top_left = 1, -1, 0 if self.is_causal else -1, 0
        p.scale = head_dim**-0.5
        p.scale_log2 = p.scale * 1.4426950408889634
        tiles = -(-seqlen // block_m) * batch * heads
        grid, block = (min(tiles, driver.multiprocessor_count(0)), 1, 1), (2 * block_m + 128, 1, 1)

        def call() -> None:
            self.function.launch(grid, block, self.shared_bytes, torch.cuda.current_stream().cuda_stream, image)

        return call


def inputs(batch: int, heads: int, seqlen: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(3)]


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def check(launch: Launch, seqlen: int) -> str:
    """The largest error against float32 math on the rounded inputs, and cuDNN's; outputs are poisoned first."""
    dtype = getattr(torch, launch.dtype)
    q, k, v = inputs(2, 2, seqlen, launch.head_dim, dtype)
    out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:3], float("nan"), device="cuda")
    launch.bind(q, k, v, out, lse)()
    torch.cuda.synchronize()
    scores = q.double() @ k.double().transpose(2, 3) * launch.head_dim**-0.5
    if launch.is_causal:
        scores = scores.masked_fill(torch.ones(seqlen, seqlen, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
    ref, ref_lse = scores.softmax(-1) @ v.double(), scores.logsumexp(-1)
    ours, theirs = (out.double() - ref).abs().max().item(), (cudnn(q, k, v, launch.is_causal).double() - ref).abs().max().item()
    stat = (lse.double() - ref_lse).abs().max().item()
    return f"{'ok ' if ours <= 2 * theirs + 1e-3 and stat < 1e-3 else 'BAD'} {ours:.2e} (cudnn {theirs:.2e}) lse {stat:.1e}"


def time_ms(thunks: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """Medians over interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in thunks}
    for _ in range(rounds):
        for name, thunk in thunks.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            thunk()
            start.record()
            for _ in range(calls):
                thunk()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / calls)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--dims", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    jobs = [(options.dtype, dim, tile, is_causal) for dim in options.dims for is_causal in (False, True) for tile in TILES[dim]]
    torch.cuda.init()
    torch.empty(1, device="cuda")
    with ThreadPoolExecutor() as pool:
        launches = list(pool.map(lambda job: Launch(*job), jobs))
    for launch in launches:
        for seqlen in (128, 387, 1024):
            print(f"d={launch.head_dim} {'causal' if launch.is_causal else 'full':6} {launch!s:24} S={seqlen:5} {check(launch, seqlen)}", flush=True)
    for head_dim in options.dims:
        for seqlen in options.lengths:
            q, k, v = inputs(16384 // seqlen, 2048 // head_dim, seqlen, head_dim, getattr(torch, options.dtype))
            out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
            for is_causal in (False, True):
                thunks: dict[str, Callable[[], object]] = {"cudnn": lambda q=q, k=k, v=v, c=is_causal: cudnn(q, k, v, c)}
                thunks |= {str(one): one.bind(q, k, v, out, lse) for one in launches if (one.head_dim, one.is_causal) == (head_dim, is_causal)}
                found = time_ms(thunks, options.rounds, max(2, 8192 // seqlen))
                flops = 4 * 16384 * seqlen * 2048 / (2 if is_causal else 1)
                cells = [f"{name} {flops / ms / 1e9:.0f} ({found['cudnn'] / ms:.2f}x)" for name, ms in found.items()]
                print(f"d={head_dim} S={seqlen} {'causal' if is_causal else 'full'}: " + "; ".join(cells), flush=True)


if __name__ == "__main__":
    main()
