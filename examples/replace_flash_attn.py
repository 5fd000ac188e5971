"""Code that was written for flash_attn runs on flashtile after one line, on a CPU too.

    python examples/replace_flash_attn.py
    python examples/replace_flash_attn.py --device cuda --length 4096 --heads 16   # bfloat16 on a GPU

The one line is `flash_attn.install(replace=True)` below. Behind it stand two pieces of code as one finds them in models
that use the flash_attn package: attention over a padded batch without its padding, and decoding with rotary embedding
over a cache. Each is compared with torch's attention in float32, which sees masks and whole sequences. Exits 1 if a
difference is larger than its bound: one thousandth of the largest value in float32, one twentieth in 16 bits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flashtile.integrations import flash_attn

# Where flash_attn is installed, flashtile takes its place in this process
flash_attn.install(replace=True)

# What follows, to the next line of this kind, knows nothing of flashtile ----------------------------------------------
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: E402
from flash_attn.bert_padding import pad_input, unpad_input  # noqa: E402
from flash_attn.layers.rotary import apply_rotary_emb  # noqa: E402


def unpadded_attention(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    """Attends within the sequences of a padded batch (batch, rows, heads, dim); the padding costs nothing."""
    batch, rows = attention_mask.shape
    q, indices, cu_seqlens, max_seqlen, _ = unpad_input(q, attention_mask)
    k, v = unpad_input(k, attention_mask)[0], unpad_input(v, attention_mask)[0]
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)
    return pad_input(out, indices, batch, rows)


class CachedAttention:
    """Attention of a decoder over a cache: rotates, appends the new rows and attends to all of it."""

    def __init__(self, batch: int, capacity: int, heads_kv: int, cos: Tensor, sin: Tensor, like: Tensor) -> None:
        self.k_cache = like.new_zeros(batch, capacity, heads_kv, like.shape[-1])
        self.v_cache = torch.zeros_like(self.k_cache)
        self.cache_seqlens = torch.zeros(batch, dtype=torch.int32, device=like.device)
        self.rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = (self.k_cache, self.v_cache)
        out = flash_attn_with_kvcache(q, *cache, k=k, v=v, cache_seqlens=self.cache_seqlens, causal=True, **self.rotary)
        self.cache_seqlens += q.shape[1]
        return out


# ----------------------------------------------------------------------------------------------------------------------


def by_torch(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None) -> Tensor:
    """Returns causal attention over (batch, rows, heads, dim) in float32, within the first rows if keep marks them."""
    rows = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()
    mask = rows if keep is None else rows & keep[:, None, None, :]
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def draw(options: argparse.Namespace, rows: int) -> list[Tensor]:
    sizes = [(options.batch, rows, heads, options.head_dim) for heads in (options.heads, *2 * [options.heads_kv])]
    return [torch.randn(size, device=options.device, dtype=options.dtype) for size in sizes]


Found = list[tuple[str, str, Tensor, Tensor]]  # what, compared with what, ours, torch's


def compare_packing(options: argparse.Namespace) -> Found:
    qkv = [x.requires_grad_() for x in draw(options, options.length)]
    lengths = torch.randint(1, options.length + 1, (options.batch, 1), device=options.device)
    lengths[0] = options.length
    keep = torch.arange(options.length, device=options.device) < lengths
    weights = torch.randn(qkv[0].shape, device=options.device) * keep[..., None, None]
    out = unpadded_attention(*qkv, keep.int())
    expected = by_torch(*qkv, keep) * keep[..., None, None]
    grads = [torch.autograd.grad((x.float() * weights).sum(), qkv) for x in (out, expected)]
    names = [f"d{name}" for name in "qkv"]
    pairs = [("output", out, expected), *zip(names, *grads, strict=True)]
    share = f"{int(lengths.sum())} rows of {keep.numel()}"
    return [(f"packed, {share}: {name}", "padded, with a mask", *pair) for name, *pair in pairs]


@torch.inference_mode()
def compare_decoding(options: argparse.Namespace) -> Found:
    total = options.length + options.new
    q, k, v = draw(options, total)
    half = options.head_dim // 2
    angles = torch.arange(total)[:, None] * 10000 ** (-torch.arange(half) / half)
    cos, sin = (table.to(q) for table in (angles.cos(), angles.sin()))
    decode = CachedAttention(options.batch, total, options.heads_kv, cos, sin, q)
    steps = [slice(0, options.length), *(slice(row, row + 1) for row in range(options.length, total))]
    out = torch.cat([decode(q[:, rows], k[:, rows], v[:, rows]) for rows in steps], 1)
    expected = by_torch(apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin), v)
    parts = {"prompt": slice(0, options.length), f"{options.new} steps": slice(options.length, total)}
    return [(f"cache: {name}", "all rows at once", out[:, at], expected[:, at]) for name, at in parts.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    sizes = {"batch": 4, "length": 512, "new": 32, "heads": 8, "heads-kv": 2, "head-dim": 64, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    options = parser.parse_args(arguments)
    for name in sizes:
        value = getattr(options, name.replace("-", "_"))
        if name != "seed" and value < 1:
            parser.error(f"--{name}: got {value}; accepted: 1 or more")
    if options.heads % options.heads_kv:
        parser.error(f"--heads: got {options.heads}; accepted: multiples of --heads-kv, {options.heads_kv}")
    if options.head_dim % 2:
        parser.error(f"--head-dim: got {options.head_dim}; accepted: even numbers")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda; accepted: cpu, since torch finds no GPU here")
    is_gpu = options.device == "cuda"
    options.dtype = torch.bfloat16 if is_gpu else torch.float32

    torch.manual_seed(options.seed)
    begin = time.perf_counter()
    found = compare_packing(options) + compare_decoding(options)
    table, is_right = Table("flash_attn's functions", "beside torch's"), True
    table.add_column("largest difference", justify="right")
    for what, other, ours, theirs in found:
        difference = ((ours.float() - theirs.float()).abs().max() / theirs.abs().max()).item()
        is_right &= difference <= (0.05 if is_gpu else 1e-3)
        table.add_row(what, other, f"{difference:.1e}")
    Console().print(table)
    print(f"{'equal within the bound' if is_right else 'DIFFERENT'}, {time.perf_counter() - begin:.1f} s")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
