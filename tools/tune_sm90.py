"""Times tiles of the Hopper forward beside cuDNN's kernel, bf16, B * S = 16384, H * d = 2048, after a check against float64.

PYTHONPATH=src python tools/tune_sm90.py [--lengths 2048 8192] [--dims 64 128 256] [--rounds 7]        its figures: docs/sm90.md
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashtile.bench.timing import median_ms
from flashtile.kernels import source
from flashtile.kernels.arch import ARCHS
from flashtile.kernels.params import FwdSm90Params
from flashtile.kernels.spec import Features, Sm90Row
from flashtile.runtime import cache, driver

# head dim -> (block_m, block_n, num_stages, takes_turns, scales_lazily, stores_p)
Tile = tuple[int, int, int, bool, bool, bool]
TILES: dict[int, list[Tile]] = {
    64: [(192, 128, 2, True, False, False), (192, 128, 2, True, False, True), (128, 128, 2, True, False, False)],
    128: [
        (128, 128, 2, True, False, False),
        (128, 128, 2, True, True, False),
        (192, 80, 2, True, True, False),
        (192, 112, 2, True, True, True),
        (192, 128, 2, True, True, True),
    ],
    256: [(128, 80, 2, True, True, False), (128, 64, 2, True, True, False)],
}
BENCH_TOKENS, BENCH_WIDTH = 16384, 2048
CHECK_LENGTHS = (128, 387, 1024)


class Launch:
    """One compiled tile."""

    def __init__(self, dtype: str, head_dim: int, tile: Tile, is_causal: bool):
        self.row = Sm90Row(dtype, dtype, head_dim, head_dim, *tile, packs_heads=False)
        self.is_causal, features = is_causal, Features(has_band=is_causal)
        unit, entry = source.unit(self.row, features), source.entry(self.row, features)
        compiled = cache.compile_cached(unit, ARCHS[90].name, [entry])
        self.spills = compiled.resources(entry).spill_store_bytes
        self.function = driver.load(compiled.cubin).function(compiled.symbols[entry])
        self.function.set_shared_bytes(0, self.row.shared_bytes)

    def __str__(self) -> str:
        row = self.row
        words = [
            f"{row.block_m}x{row.block_n}/{row.num_stages}",
            *(["turns"] if row.takes_turns else []),
            *(["lazy"] if row.scales_lazily else []),
            *(["P shared"] if row.stores_p else []),
        ]
        return " ".join([*words, *([f"spills {self.spills}"] if self.spills else [])])

    def bind(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Callable[[], None]:
        batch, heads, seqlen, head_dim = q.shape
        row, params = self.row, FwdSm90Params()
        for name, tensor, rows in (("q", q, 64), ("k", k, row.block_n), ("v", v, row.block_n), ("out", out, 16)):
            sizes, strides = (head_dim, *(tensor.shape[axis] for axis in (2, 1, 0))), tuple(2 * tensor.stride(axis) for axis in (2, 1, 0))
            encoded = driver.TensorMap(row.dtype, sizes, strides, (64, rows, 1, 1)).encode(tensor.data_ptr())
            ctypes.memmove(ctypes.addressof(params) + getattr(FwdSm90Params, f"{name}_map").offset, encoded, len(encoded))
        p = params.base
        for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
            setattr(p, name, tensor.data_ptr())
            getattr(p, f"{name}_strides")[:] = tensor.stride()[:3]
        p.lse, p.lse_batch_stride, p.lse_head_stride, p.lse_size = lse.data_ptr(), lse.stride(0), lse.stride(1), lse.numel()
        p.batch, p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k = batch, heads, k.shape[1], seqlen, k.shape[2]
        p.head_dim = p.head_dim_v = head_dim
        p.num_splits, p.window_left, p.window_right = 1, -1, 0 if self.is_causal else -1
        p.scale = head_dim**-0.5
        p.scale_log2 = p.scale * 1.4426950408889634
        num_tiles = -(-seqlen // row.block_m) * batch * heads
        grid = (min(num_tiles, driver.multiprocessor_count(0)), 1, 1)
        return lambda: self.function.launch(
            grid, (row.num_threads, 1, 1), row.shared_bytes, torch.cuda.current_stream().cuda_stream, params
        )


def inputs(batch: int, heads: int, seqlen: int, head_dim: int, dtype: str) -> list[torch.Tensor]:
    return [torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=getattr(torch, dtype)).transpose(1, 2) for _ in range(3)]


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def check(launch: Launch, seqlen: int) -> str:
    """The largest error against float64, and cuDNN's; outputs are poisoned first."""
    q, k, v = inputs(2, 2, seqlen, launch.row.head_dim, launch.row.dtype)
    out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:3], float("nan"), device="cuda")
    launch.bind(q, k, v, out, lse)()
    torch.cuda.synchronize()
    scores = q.double() @ k.double().transpose(2, 3) * launch.row.head_dim**-0.5
    if launch.is_causal:
        scores = scores.masked_fill(torch.ones(seqlen, seqlen, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
    ref, ref_lse = scores.softmax(-1) @ v.double(), scores.logsumexp(-1)
    ours, theirs = ((x.double() - ref).abs().max().item() for x in (out, cudnn(q, k, v, launch.is_causal)))
    stat = (lse.double() - ref_lse).abs().max().item()
    return f"{ours:.2e} (cudnn {theirs:.2e}) lse {stat:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--dims", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    jobs = [(options.dtype, dim, tile, is_causal) for dim in options.dims for is_causal in (False, True) for tile in TILES[dim]]
    torch.empty(1, device="cuda")
    with ThreadPoolExecutor() as pool:
        launches = list(pool.map(lambda job: Launch(*job), jobs))
    for launch in launches:
        for seqlen in CHECK_LENGTHS:
            what = f"d={launch.row.head_dim} {'causal' if launch.is_causal else 'full'} {launch} S={seqlen}"
            print(f"error {what}: {check(launch, seqlen)}", flush=True)
    for head_dim in options.dims:
        for seqlen in options.lengths:
            q, k, v = inputs(BENCH_TOKENS // seqlen, BENCH_WIDTH // head_dim, seqlen, head_dim, options.dtype)
            out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
            for is_causal in (False, True):
                thunks: dict[str, Callable[[], object]] = {"cudnn": lambda q=q, k=k, v=v, c=is_causal: cudnn(q, k, v, c)}
                chosen = [one for one in launches if (one.row.head_dim, one.is_causal) == (head_dim, is_causal)]
                thunks |= {str(one): one.bind(q, k, v, out, lse) for one in chosen}
                found = median_ms(thunks, options.rounds, max(2, 8192 // seqlen))
                flops = 4 * BENCH_TOKENS * seqlen * BENCH_WIDTH / (2 if is_causal else 1)
                cells = [f"{name} {flops / ms / 1e9:.0f} ({found['cudnn'] / ms:.2f}x)" for name, ms in found.items()]
                print(f"TFLOP/s d={head_dim} S={seqlen} {'causal' if is_causal else 'full'}: " + "; ".join(cells), flush=True)


if __name__ == "__main__":
    main()
