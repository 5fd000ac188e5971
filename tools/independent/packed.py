"""Problems of `attention_varlen` and `flash_attn_varlen_func`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from drawing import Draw
from problem import Expected, Problem, Results, evaluate
from reference import Reference

import flashtile


class Packed(Problem):
    kind = "packed"

    def __init__(self, d: Draw) -> None:
        super().__init__(d)
        o = self.o
        self.via = d.pick(["api"] * 5 + ["flash"])
        if self.via == "flash":
            self.use_flash()
        self.lengths_q = [d.length() for _ in range(self.batch)]
        self.lengths_k = [d.length() for _ in range(self.batch)]
        self.used = list(self.lengths_k)
        self.is_paged = d.chance(0.35)
        if self.via == "api" and d.chance(0.4):
            self.used = [d.integer(0, n) for n in self.lengths_k]
            self.tensors["seqused_k"] = torch.tensor(self.used, dtype=torch.int32)
        self.starts_q, self.starts_k = np.cumsum([0, *self.lengths_q]), np.cumsum([0, *self.lengths_k])
        self.tensors["cu_seqlens_q"] = torch.tensor(self.starts_q, dtype=torch.int32)
        if not (self.is_paged and "seqused_k" in self.tensors and d.chance(0.3)):
            self.tensors["cu_seqlens_k"] = torch.tensor(self.starts_k, dtype=torch.int32)
        self.add("q", self.draw_rows("q", (o.heads, int(self.starts_q[-1]), self.head_dim)), self.dtype, swap=(0, 1))
        if self.is_paged:
            self.draw_pages()
        else:
            self.draw_keys()

        # Upper bounds of the lengths; without them mask and bias have any size that is large enough
        self.max_q, self.max_k = (max(n, default=0) + d.pick([0, 0, 3]) for n in (self.lengths_q, self.lengths_k))
        self.has_max = self.via == "flash" or d.chance(0.6)
        self.is_max_tensor = self.via == "api" and d.chance(0.1)
        full = (self.batch, o.heads, self.max_q, self.max_k)
        if self.via == "api":
            self.draw_dropout()
            self.draw_sinks()
            self.draw_mask(full)
            extra = (0, 0) if self.has_max else (d.pick([0, 2]), d.pick([0, 1]))
            self.draw_bias((*full[:2], self.max_q + extra[0], self.max_k + extra[1]), d.pick([self.dtype, "float32"]))
        self.draw_slopes()
        self.draw_gradients((o.heads, self.starts_q[-1], self.head_dim_v), (o.heads, self.starts_q[-1]), (0, 1))
        self.return_lse = "dlse" in self.tensors or d.chance(0.7)

    def draw_keys(self) -> None:
        """Keys one sequence behind the other; those behind `seqused_k` are NaN."""
        self.rows = [np.arange(a, b) for a, b in zip(self.starts_k, self.starts_k[1:], strict=False)]
        for name, dim in (("k", self.head_dim), ("v", self.head_dim_v)):
            x = self.draw_rows(name, (self.o.heads_kv, int(self.starts_k[-1]), dim))
            for rows, n in zip(self.rows, self.used, strict=True):
                x[:, rows[n:]] = np.nan
            self.add(name, x, self.dtype, swap=(0, 1))

    def draw_pages(self) -> None:
        """Keys in pages anywhere; rows that no sequence uses are NaN. `rows` then counts the rows of all pages."""
        d, o = self.d, self.o
        page = d.pick([1, 2, 3, 4, 8, 16, 16, 32, 64])
        columns = max((-(-n // page) for n in self.lengths_k), default=0) + d.pick([0, 1])
        pages = self.batch * columns + d.integer(1, 3)
        order = d.rng.permutation(pages)
        # What stands behind the pages in use is not read
        table = np.full((self.batch, columns), d.pick([int(order[-1]), -1, 2**31 - 1]), np.int32)
        next_page = 0
        for b, n in enumerate(self.used):
            for c in range(-(-n // page)):
                is_shared = b > 0 and c == 0 and d.chance(0.2) and self.used[0] > 0
                table[b, c] = table[0, 0] if is_shared else order[next_page]
                next_page += 1
        self.rows = [(row[:, None].astype(int) * page + np.arange(page)).reshape(-1) for row in table]
        live = np.zeros(pages * page, bool)
        for rows, n in zip(self.rows, self.used, strict=True):
            live[rows[:n]] = True
        for name, dim in (("k", self.head_dim), ("v", self.head_dim_v)):
            x = self.draw_rows(name, (o.heads_kv, pages * page, dim))
            x[:, ~live] = np.nan
            x = x.reshape(o.heads_kv, pages, page, dim).swapaxes(0, 1)
            self.add(name, x, self.dtype, swap=(1, 2))
            self.values[name] = self.values[name].swapaxes(0, 1).reshape(o.heads_kv, pages * page, dim)
        self.pages = (pages, page)
        self.tensors["block_table"] = torch.from_numpy(table)

    def run(self, backend: str | None) -> Results:
        self.start()
        t = self.leaves
        q, k, v, starts_q, starts_k = (t.get(n) for n in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"))
        if self.via == "flash":
            named = self.flash_arguments("alibi_slopes", "block_table") | {"return_attn_probs": True}
            out, lse, _ = flashtile.flash_attn_varlen_func(q, k, v, starts_q, starts_k, self.max_q, self.max_k, **named)
            return self.finish(out, lse)
        named = self.arguments("mask", "bias", "alibi_slopes", "sinks", "rng_state", "seqused_k", "block_table")
        if self.has_max:
            given = (self.max_q, self.max_k)
            if self.is_max_tensor:
                # Accepted, not read
                given = (torch.tensor(self.max_q), torch.tensor(self.max_k))
            named |= dict(zip(("max_seqlen_q", "max_seqlen_k"), given, strict=True))
        named |= {"dropout_p": self.o.dropout_p, "return_lse": self.return_lse, "backend": backend}
        found: Any = flashtile.attention_varlen(q, k, v, starts_q, starts_k, **named)
        return self.finish(*(found if self.return_lse else (found, None)))

    def expected(self, ref: Reference, results: Results) -> Expected:
        values, o = self.values, self.o
        total_q, total_k, d, dv = int(self.starts_q[-1]), values["k"].shape[1], self.head_dim, self.head_dim_v
        out, lse, dq = (np.zeros((2, o.heads, total_q, *rest)) for rest in ((dv,), (), (d,)))
        sums = {"k": np.zeros((3, o.heads_kv, total_k, d)), "v": np.zeros((3, o.heads_kv, total_k, dv))}
        found = []
        for b in range(self.batch):
            at, rows = slice(self.starts_q[b], self.starts_q[b + 1]), self.rows[b][: self.used[b]]
            x = self.sequence(b, values["q"][:, at], values["k"][:, rows], values["v"][:, rows])
            given = (values["dout"][:, at], values["dlse"][:, at]) if self.needs else ()
            f = evaluate(ref, o, x, self.r, *given)
            found.append(f)
            out[:, :, at], lse[:, :, at] = f["out"], f["lse"]
            if self.needs:
                dq[:, :, at] = f["dq"]
                for name, total in sums.items():
                    total[:, :, rows] += f["d" + name]
        out = self.swapped(out, 1, 2)
        expected: Expected = {"out": (out[0], out[1], self.dtype), "lse": (lse[0], lse[1], self.lse_dtype)}
        if "q" in self.needs:
            expected["dq"] = self.rounded_sum(self.swapped(dq, 1, 2), 0, self.dtype)
        for name, total in sums.items():
            if name in self.needs:
                if self.is_paged:
                    pages = total.reshape(3, o.heads_kv, *self.pages, total.shape[-1]).swapaxes(1, 2)
                    total = self.swapped(pages, 2, 3)
                else:
                    total = self.swapped(total, 1, 2)
                terms = o.heads // o.heads_kv * (self.batch if self.is_paged else 1)
                expected["d" + name] = self.rounded_sum(total, terms, self.dtype)
        self.shared_gradients(ref, found, expected)
        return expected
