"""Problems of `attention`, `scaled_dot_product_attention` and `flash_attn_func`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from drawing import Draw
from problem import Expected, Problem, Results, evaluate
from reference import Array, Options, Reference

import flashtile


class Dense(Problem):
    kind = "dense"

    def __init__(self, d: Draw) -> None:
        super().__init__(d)
        o = self.o
        self.via = d.pick(["api"] * 6 + ["sdpa", "flash"])
        self.seqlen_q, self.seqlen_k = d.length(), d.length()
        full = (self.batch, o.heads, self.seqlen_q, self.seqlen_k)
        if self.via == "sdpa":
            self.layout, o.window, o.softcap = "bhsd", None, 0.0
            o.causal = d.pick([False, False, "top_left"])
        if self.via == "flash":
            self.use_flash()
        self.draw_qkv()
        if self.via == "api":
            self.draw_dropout()
            self.draw_sinks()
            self.draw_mask(full)
            self.draw_bias(full, d.pick([self.dtype, "float32"]))
        elif self.via == "sdpa" and not o.causal:
            self.draw_mask(full)
            if "mask" not in self.values:
                self.draw_bias(full, self.dtype)
        if self.via != "sdpa":
            self.draw_slopes()
        out_shape = (self.batch, o.heads, self.seqlen_q, self.head_dim_v)
        self.draw_gradients(out_shape, out_shape[:3], (1, 2))
        if not self.needs and self.via == "api" and d.chance(0.3):
            self.poison_keys()
        self.return_lse = "dlse" in self.tensors or d.chance(0.7)
        self.deterministic = d.pick([None, True, False])
        self.rank = d.pick([4, 4, 5, 3 if self.batch == 1 else 4])

    def draw_qkv(self) -> None:
        o = self.o
        self.add_rows("q", (self.batch, o.heads, self.seqlen_q, self.head_dim), (1, 2))
        self.add_rows("k", (self.batch, o.heads_kv, self.seqlen_k, self.head_dim), (1, 2))
        self.add_rows("v", (self.batch, o.heads_kv, self.seqlen_k, self.head_dim_v), (1, 2))

    def poison_keys(self) -> None:
        """Keys that no query sees hold NaN or infinities; now and then one that is seen holds a NaN."""
        d, o, k = self.d, self.o, self.values["k"]
        given = self.tensors["k"].transpose(1, 2) if self.layout == "bshd" else self.tensors["k"]
        if 0 in given.stride() or given.is_neg():
            return
        seen = np.zeros(k.shape[:3], bool)
        rules = Reference()
        for b in range(self.batch):
            # A bias of -inf is added to the score, so that it hides no NaN
            x = replace(self.sequence(b, self.values["q"][b], k[b], self.values["v"][b]), bias=None)
            for h in range(o.heads):
                seen[b, rules.key_head(o, h)] |= rules.forward(o, x, h).seen.any(0)
        k[~seen] = d.pick([np.nan, np.inf, -np.inf])
        if d.chance(0.3) and seen.any() and not o.dropout_p and "bias" not in self.values:
            k[(*d.pick(np.argwhere(seen).tolist()), d.integer(0, self.head_dim - 1))] = np.nan
        given.copy_(torch.from_numpy(k))

    def run(self, backend: str | None) -> Results:
        self.start()
        t = self.leaves
        q, k, v = t["q"], t["k"], t["v"]
        if self.via == "sdpa":
            mask = t.get("bias", t.get("mask"))
            if self.rank == 3:
                q, k, v = q[0], k[0], v[0]
                mask = mask[0] if mask is not None and mask.dim() == 4 else mask
            elif self.rank == 5:
                q, k, v = q[None], k[None], v[None]
            is_grouped = self.o.heads != self.o.heads_kv
            out = flashtile.scaled_dot_product_attention(
                q, k, v, mask, self.o.dropout_p, bool(self.o.causal), scale=self.scale, enable_gqa=is_grouped
            )
            return self.finish(out[None] if self.rank == 3 else out[0] if self.rank == 5 else out, None)
        if self.via == "flash":
            named = self.flash_arguments("alibi_slopes")
            out, lse, probabilities = flashtile.flash_attn_func(
                q, k, v, dropout_p=self.o.dropout_p, **named, return_attn_probs=True
            )
            assert probabilities.numel() == 0
            return self.finish(out, lse)
        named = self.arguments("mask", "bias", "alibi_slopes", "sinks", "rng_state")
        named |= {"dropout_p": self.o.dropout_p, "deterministic": self.deterministic, "backend": backend}
        found: Any = flashtile.attention(q, k, v, **named, return_lse=self.return_lse)
        return self.finish(*(found if self.return_lse else (found, None)))

    def objection(self, results: Results) -> str | None:
        """out is dense, in the memory order of q."""
        q, out = self.tensors["q"], results["out"]
        if self.via == "flash" or min(*q.shape, self.head_dim_v, *q.stride()) < 1 or min(q.shape[:3]) < 2:
            return None
        order = [*sorted(range(3), key=lambda n: -q.stride(n)), 3]
        if self.rank == 4 and q.stride(3) == 1 and not out.permute(order).is_contiguous():
            return f"out has strides {out.stride()}, q {q.stride()}"
        return None

    def expected(self, ref: Reference, results: Results) -> Expected:
        values, o = self.values, self.o
        found = []
        for b in range(self.batch):
            x = self.sequence(b, values["q"][b], values["k"][b], values["v"][b])
            given = (values["dout"][b], values["dlse"][b]) if self.needs else ()
            found.append(evaluate(ref, o, x, self.r, *given))
        sq, sk, d, dv = self.seqlen_q, self.seqlen_k, self.head_dim, self.head_dim_v

        def stacked(name: str, *shape: int) -> Any:
            return np.stack([f[name] for f in found], axis=1) if found else np.zeros((3, 0, *shape))

        out, lse = self.swapped(stacked("out", o.heads, sq, dv), 2, 3), stacked("lse", o.heads, sq)
        expected: Expected = {"out": (out[0], out[1], self.dtype), "lse": (lse[0], lse[1], self.lse_dtype)}
        group = o.heads // o.heads_kv
        for name, terms, *shape in (
            ("q", 0, o.heads, sq, d),
            ("k", group, o.heads_kv, sk, d),
            ("v", group, o.heads_kv, sk, dv),
        ):
            if name in self.needs:
                total = self.swapped(stacked("d" + name, *shape), 2, 3)
                expected["d" + name] = self.rounded_sum(total, terms, self.dtype)
        self.shared_gradients(ref, found, expected)
        return expected


class Given(Reference):
    """The rules, but for dropout bits that are known already."""

    def __init__(self, drop: Array) -> None:
        self.given = drop  # (batch, heads, sq, sk)

    def drop(self, o: Options, b: int, h: int, sq: int, sk: int) -> Array:
        return self.given[b, h]


class DrawnDropout(Dense):
    """Dropout by bits that the call draws. v is the identity matrix, so that out shows which elements were dropped."""

    kind = "dropout"
    is_result_needed = True

    def __init__(self, d: Draw) -> None:
        Problem.__init__(self, d)
        o = self.o
        self.via = d.pick(["api", "sdpa", "flash"])
        o.window, o.softcap, o.dropout_p, self.style = None, 0.0, d.pick([0.1, 0.25, 0.5, 0.75]), "tiny"
        o.causal = d.pick([False, "top_left" if self.via == "sdpa" else True])
        self.layout = {"sdpa": "bhsd", "flash": "bshd"}.get(self.via, self.layout)
        self.seqlen_q, self.seqlen_k = d.integer(1, 40), d.integer(1, 40)
        self.head_dim_v = self.seqlen_k
        self.draw_qkv()
        v = np.broadcast_to(np.eye(self.seqlen_k), (self.batch, o.heads_kv, self.seqlen_k, self.seqlen_k))
        self.add("v", v, self.dtype, swap=(1, 2))
        out_shape = (self.batch, o.heads, self.seqlen_q, self.head_dim_v)
        self.draw_gradients(out_shape, out_shape[:3], (1, 2))
        self.return_lse, self.deterministic, self.rank, self.runs = True, None, 4, 1

    def expected(self, ref: Reference, results: Results) -> Expected:
        out = self.swapped(results["out"].double().numpy(), 1, 2)
        t = ref.threshold(self.o.dropout_p)
        return super().expected(Given(np.where(out == 0, 0.0, 65536 / (65536 - t))), results)

    def objection(self, results: Results) -> str | None:
        """The share of dropped elements is within six standard deviations."""
        o = self.o
        seen = Reference().sees(o, self.seqlen_q, self.seqlen_k)
        out = self.swapped(results["out"].double().numpy(), 1, 2)
        total, p = int(seen.sum()) * self.batch * o.heads, Reference().threshold(o.dropout_p) / 65536
        dropped = int(((out == 0) & seen).sum())
        if abs(dropped - total * p) > 6 * np.sqrt(total * p * (1 - p)) + 1:
            return f"{dropped} of {total} elements dropped, dropout_p={o.dropout_p}"
        return None
