"""Problems of `attention_kvcache` and `flash_attn_with_kvcache`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from drawing import Draw, rounded
from problem import Expected, Problem, Results, evaluate
from reference import Array, Reference
from torch import Tensor

import flashtile


class Cache(Problem):
    kind = "cache"
    is_result_needed = True

    def __init__(self, d: Draw) -> None:
        super().__init__(d)
        o = self.o
        self.via = d.pick(["api"] * 5 + ["flash"])
        if self.via == "flash":
            self.use_flash()
        self.seqlen_q = d.pick([0, 1, 1, 1, 1, 1, 2, 2, 3, 3, 5, 8, 17])
        self.is_appending = d.chance(0.6)
        self.num_new = d.pick([self.seqlen_q, self.seqlen_q, 0, 1, 4]) if self.is_appending else 0
        self.draw_lengths()
        self.draw_places(max(self.kept, default=0) + self.num_new)
        live = np.zeros(self.num_rows, bool)
        for rows, n, pad in zip(self.rows, self.kept, self.leftpad, strict=True):
            live[rows[pad:n]] = True
        swap = (1, 2)
        for name, dim in (("k", self.head_dim), ("v", self.head_dim_v)):
            x = self.draw_rows(name, (o.heads_kv, self.num_rows, dim))
            x[:, ~live] = np.nan
            self.add(name + "_cache", x.reshape(o.heads_kv, *self.shape, dim).swapaxes(0, 1), self.dtype, swap=swap)
            if self.is_appending:
                self.add_rows(name, (self.batch, o.heads_kv, self.num_new, dim), swap)
        self.add_rows("q", (self.batch, o.heads, self.seqlen_q, self.head_dim), swap)
        self.draw_rotary()
        if self.via == "api":
            self.draw_sinks()
        self.draw_slopes()
        self.num_splits = d.pick([0, 0, 1, 2, 5])
        self.return_lse = d.chance(0.7)

    def draw_lengths(self) -> None:
        """Rows in use, `kept`, and how many at the start are ignored. Without `cache_seqlens` all rows are in use."""
        d = self.d
        self.kept = [d.length() for _ in range(self.batch)]
        self.has_seqlens = self.is_appending or d.chance(0.8)
        self.seqlens: int | None = None
        if not self.has_seqlens or d.chance(0.15):
            self.kept = [d.length()] * self.batch
            self.seqlens = self.kept[0] if self.kept else 0
        elif self.has_seqlens:
            self.tensors["cache_seqlens"] = torch.tensor(self.kept, dtype=torch.int32)
        self.leftpad = [0] * self.batch
        if d.chance(0.25):
            self.leftpad = [d.integer(0, n) for n in self.kept]
            self.tensors["cache_leftpad"] = torch.tensor(self.leftpad, dtype=torch.int32)

    def draw_rotary(self) -> None:
        d = self.d
        self.rotary_dim = 0
        if not self.is_appending or self.head_dim == 1 or d.chance(0.5):
            return
        self.rotary_dim = 2 * d.integer(1, self.head_dim // 2)
        self.is_interleaved = d.chance(0.5)
        positions = max(self.kept, default=0) + max(self.num_new, self.seqlen_q) + d.integer(1, 3)
        angles = d.rng.random((positions, self.rotary_dim // 2)) * 2 * np.pi
        dtype = d.pick([self.dtype, "float32"])
        for name, function in (("rotary_cos", np.cos), ("rotary_sin", np.sin)):
            self.tensors[name], self.values[name] = rounded(function(angles), dtype)

    def draw_places(self, longest: int) -> None:
        """Draws where row j of each sequence lies, as an index into all rows of the cache."""
        d = self.d
        if d.chance(0.35):
            page = d.pick([1, 2, 3, 4, 8, 16, 16, 32, 64])
            columns = -(-longest // page) + (d.pick([0, 1]) if self.has_seqlens else 0)
            pages = max(self.batch * columns, 1) + d.integer(0, 3)
            table = d.rng.permutation(pages)[: self.batch * columns].reshape(self.batch, columns)
            self.shape = (pages, page)
            self.rows = [(row[:, None] * page + np.arange(page)).reshape(-1) for row in table]
            if self.has_seqlens:
                # What stands behind the pages in use is not read
                for b, n in enumerate(self.kept):
                    table[b, -(-(n + self.num_new) // page) :] = d.pick([0, -1, 2**31 - 1])
            else:
                self.kept = [columns * page] * self.batch
            self.tensors["block_table"] = torch.from_numpy(table.astype(np.int32))
        else:
            capacity = longest + (d.integer(0, 5) if self.has_seqlens else 0)
            places, slots = self.batch, np.arange(self.batch)
            if d.chance(0.3):
                places = self.batch + d.integer(0, 3)
                slots = d.rng.permutation(places)[: self.batch]
                self.tensors["cache_batch_idx"] = torch.from_numpy(slots.astype(np.int32))
            self.shape = (places, capacity)
            self.rows = [slot * capacity + np.arange(capacity) for slot in slots]
        self.num_rows = self.shape[0] * self.shape[1]

    def run(self, backend: str | None) -> Results:
        self.start()
        t = self.leaves
        # The call writes to them; every run gets its own, in the same memory layout
        caches = [relaid(t[name]) for name in ("k_cache", "v_cache")]
        names = (
            "k",
            "v",
            "cache_seqlens",
            "cache_batch_idx",
            "cache_leftpad",
            "block_table",
            "rotary_cos",
            "rotary_sin",
        )
        more: dict[str, Any] = {"num_splits": self.num_splits}
        if self.has_seqlens and self.seqlens is not None:
            more["cache_seqlens"] = self.seqlens
        if self.rotary_dim:
            more["rotary_interleaved"] = self.is_interleaved
        if self.via == "flash":
            named = self.flash_arguments(*names, "alibi_slopes") | more | {"return_softmax_lse": self.return_lse}
            found: Any = flashtile.flash_attn_with_kvcache(t["q"], *caches, **named)
        else:
            named = self.arguments(*names, "alibi_slopes", "sinks") | more | {"return_lse": self.return_lse}
            found = flashtile.attention_kvcache(t["q"], *caches, **named, backend=backend)
        results = self.finish(*(found if self.return_lse else (found, None)))
        return results | {"k_cache": caches[0], "v_cache": caches[1]}

    def flat(self, cache: Array) -> Array:
        """(places, heads_kv, rows, dim) as (heads_kv, all rows, dim)."""
        return cache.swapaxes(0, 1).reshape(self.o.heads_kv, self.num_rows, cache.shape[-1])

    def rotated(self, ref: Reference, x: Array, positions: Any) -> tuple[Array, Array]:
        """Rows of x, rotated and rounded, with the bound of both."""
        cos, sin = self.values["rotary_cos"][positions], self.values["rotary_sin"][positions]
        value, size = ref.rotate(x, cos, sin, self.is_interleaved)
        error = 4 * self.r.compute * size + self.r.stored * abs(value) + self.r.smallest
        return value, np.where(size > 0, error, 0.0)

    def expected_cache(self, ref: Reference, name: str, expected: Expected) -> None:
        """New rows stand behind those in use; no other bit changes."""
        rows_of = self.flat(self.values[name + "_cache"]).copy()
        error = np.zeros_like(rows_of)
        for b, rows in enumerate(self.rows if self.is_appending else []):
            at = self.kept[b]
            places, new = rows[at : at + self.num_new], self.values[name][b]
            if name == "k" and self.rotary_dim:
                new, error[:, places] = self.rotated(ref, new, at + np.arange(self.num_new))
            rows_of[:, places] = new
        shape = (self.o.heads_kv, *self.shape, rows_of.shape[-1])
        value, bound = (self.swapped(x.reshape(shape).swapaxes(0, 1), 1, 2) for x in (rows_of, error))
        expected[name + "_cache"] = value, bound, self.dtype

    def expected(self, ref: Reference, results: Results) -> Expected:
        o, r = self.o, self.r
        expected: Expected = {}
        after = {}
        for name in ("k", "v"):
            self.expected_cache(ref, name, expected)
            # Queries attend to what the cache then holds, rounded
            after[name] = self.flat(self.swapped(results[name + "_cache"].double().numpy(), 1, 2))
        out = np.zeros((2, self.batch, o.heads, self.seqlen_q, self.head_dim_v))
        lse = np.zeros((2, self.batch, o.heads, self.seqlen_q))
        for b in range(self.batch):
            kept = self.rows[b][self.leftpad[b] : self.kept[b] + self.num_new]
            x = self.sequence(b, self.values["q"][b], after["k"][:, kept], after["v"][:, kept])
            if self.rotary_dim:
                x.q, x.q_error = self.rotated(ref, x.q, ref.query_positions(o, self.kept[b], self.seqlen_q))
            f = evaluate(ref, o, x, r)
            out[:, b], lse[:, b] = f["out"], f["lse"]
        out = self.swapped(out, 2, 3)
        return expected | {"out": (out[0], out[1], self.dtype), "lse": (lse[0], lse[1], self.lse_dtype)}


def relaid(t: Tensor) -> Tensor:
    """A copy with the same strides and the same bytes between the elements."""
    if t.numel() == 0:
        return t.clone()
    span = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) + 1
    flat = t.as_strided((span,), (1,), t.storage_offset()).clone()
    return flat.as_strided(t.shape, t.stride(), 0)
