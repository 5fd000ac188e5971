"""Parts that all kinds of problems share: options, score modifiers, tensors in odd memory, and the choice of gradients.

A problem holds its tensors in the caller's layout and memory, and their values in float64 as (batch, heads, rows, dim).
"""

from __future__ import annotations

import math
from typing import Any

import bounds
import numpy as np
import torch
from bounds import PRECISIONS, Precision
from drawing import DTYPES, Draw, place, rounded
from reference import Array, Head, Options, Reference, Sequence
from torch import Tensor

Expected = dict[str, tuple[Any, Any, str]]  # name: value, bound, dtype
Results = dict[str, Tensor]


def evaluate(
    ref: Reference, o: Options, x: Sequence, r: Precision, dout: Array | None = None, dlse: Array | None = None
) -> dict[str, Any]:
    """All heads of a sequence. Each array begins with value and bound; where heads are summed, magnitudes follow."""
    sq, sk, d, dv = x.q.shape[1], x.k.shape[1], x.q.shape[2], x.v.shape[2]
    out, lse = np.zeros((2, o.heads, sq, dv)), np.zeros((2, o.heads, sq))
    found: dict[str, Any] = {"out": out, "lse": lse}
    heads: list[tuple[Head, bounds.Errors]] = []
    for h in range(o.heads):
        f = ref.forward(o, x, h)
        e = bounds.forward(f, r)
        heads.append((f, e))
        out[0, h], out[1, h], lse[0, h], lse[1, h] = f.out, e.out, f.lse, e.lse
    if dout is None or dlse is None:
        return found
    found["dq"] = dq = np.zeros((2, o.heads, sq, d))
    found["dbias"] = dbias = np.zeros((2, o.heads, sq, sk))
    found["dsinks"] = dsinks = np.zeros((3, o.heads))
    found["dk"] = sum_dk = np.zeros((3, o.heads_kv, sk, d))
    found["dv"] = sum_dv = np.zeros((3, o.heads_kv, sk, dv))
    for h, (f, e) in enumerate(heads):
        b = ref.backward(f, dout[h], dlse[h])
        eb = bounds.backward(f, e, b, dout[h], dlse[h], r)
        dq[0, h], dq[1, h] = b.dq, eb.dq
        dbias[0, h], dbias[1, h] = b.dbias, eb.dbias
        dsinks[:, h] = b.dsink, eb.dsink, abs(b.dsink)
        kv = ref.key_head(o, h)
        for total, value, error in ((sum_dk, b.dk, eb.dk), (sum_dv, b.dv, eb.dv)):
            total[0, kv] += value
            total[1, kv] += error
            total[2, kv] += abs(value)
    return found


class Problem:
    kind = ""
    is_result_needed = False  # what is expected follows from what a call returns or writes

    def __init__(self, d: Draw) -> None:
        self.d = d
        self.dtype = d.pick(["float32"] * 4 + ["bfloat16"] * 3 + ["float16"] * 2 + ["float64"] * 2)
        self.lse_dtype = "float64" if self.dtype == "float64" else "float32"
        self.r = PRECISIONS[self.dtype]
        self.layout = d.pick(["bhsd", "bshd"])
        self.batch = d.pick([1, 1, 2, 3]) if d.chance(0.97) else 0
        heads_kv = d.pick([1, 1, 2, 3])
        self.o = Options(heads_kv * d.pick([1, 1, 2, 3, 4]), heads_kv, 1.0)
        self.head_dim = d.head_dim()
        self.head_dim_v = self.head_dim if d.chance(0.6) else d.head_dim()
        self.via = "api"
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, Any] = {}
        self.needs: list[str] = []
        self.runs = 2 if d.chance(0.15) else 1  # a second call of the same shapes finds its plan registered
        self.threads = 3 if d.chance(0.05) else 1
        self.draw_options()

    # Options

    def draw_options(self) -> None:
        d, o = self.d, self.o
        o.causal = d.pick([False, False, True, "bottom_right", "top_left"])
        if d.chance(0.35):
            sides = [-1, 0, 1, 2, 3, 5, 8, 20, 1000, 2**30 - 1, 2**30, 2**31 - 1]
            o.window = (d.pick(sides), d.pick(sides))
        if d.chance(0.3):
            o.softcap = d.pick([0.01, 0.5, 2.0, 15.0, 30.0, 1e4, 3e38, 1e30, 1e-30, 1e-38])
        self.scale: float | None = d.pick([None, None, None, 1.0, 0.1, 0.37, -0.5, 0.0])
        self.style = d.pick(["normal"] * 6 + ["large", "huge", "exact", "exact", "tiny", "ties", "rising"])
        if self.style == "exact":
            # Products and sums of few bits: scores are exact up to here, however large
            self.scale = d.pick([1.0, 0.5, 4.0])
        o.scale = 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    def draw_dropout(self) -> None:
        d, o = self.d, self.o
        if not d.chance(0.25):
            return
        largest = [] if self.dtype == "float16" else [0.9999999]
        o.dropout_p = d.pick([0.1, 0.1, 0.25, 0.25, 0.5, 0.5, 0.9, 0.3333, 1 / 65536, 0.4 / 65536, *largest])
        o.seed = d.pick([0, 1, 12345, d.integer(-(2**63), 2**63 - 1)])
        o.offset = d.pick([0, 4, 2**32 + 5, d.integer(-(2**63), 2**63 - 1)])
        self.tensors["rng_state"] = torch.tensor([o.seed, o.offset], dtype=torch.int64)

    def draw_slopes(self) -> None:
        d, o = self.d, self.o
        if d.chance(0.2):
            shape = (o.heads,) if d.chance(0.5) else (self.batch, o.heads)
            self.add("alibi_slopes", d.rng.random(shape) * d.pick([0.1, 1.0, -0.3]), d.pick([self.dtype, "float32"]))

    def draw_sinks(self) -> None:
        d, o = self.d, self.o
        if d.chance(0.25):
            sinks = d.normal(o.heads) * d.pick([1.0, 4.0, 30.0])
            if d.chance(0.1):
                sinks[d.integer(0, o.heads - 1)] = -np.inf
            self.add("sinks", sinks, d.pick([self.dtype, "float32"]))

    # Tensors

    def add(
        self, name: str, x: Any, dtype: str, constant: int | None = None, swap: tuple[int, int] | None = None
    ) -> None:
        """A tensor of the call. `swap` are the dimensions that layout "bshd" swaps, `constant` is one of stride 0."""
        if constant is not None:
            x = np.broadcast_to(np.take(x, [0], axis=constant), x.shape)
        t, self.values[name] = rounded(x, dtype)
        if swap is not None and self.layout == "bshd":
            t = t.transpose(*swap)
            constant = dict([swap, swap[::-1]]).get(constant, constant) if constant is not None else None
        is_copied = self.via != "api" and name in ("q", "k", "v")
        any_last = is_copied or name in ("dout", "dlse", "sinks", "alibi_slopes", "bias")
        self.tensors[name] = place(self.d, t, constant, any_last, negated="cache" not in name)

    def add_rows(self, name: str, shape: tuple[int, ...], swap: tuple[int, int]) -> None:
        constant = None
        if self.d.chance(0.06):
            dim = self.d.integer(0, len(shape) - 2)
            constant = dim if shape[dim] > 1 else None
        self.add(name, self.draw_rows(name, shape), self.dtype, constant, swap)

    def draw_rows(self, name: str, shape: tuple[int, ...]) -> Any:
        """Values of q, k, v or dout, (..., rows, dim)."""
        d = self.d
        x = d.normal(*shape)
        if name == "v":
            # So large that nothing may be added before it is weighed, with room for the products of a gradient
            is_roomy = self.dtype != "float16" and self.style not in ("huge", "exact")
            return x * d.pick([1.0, 1.0, 1.0, 1.0, 30.0, 1e30 if is_roomy else 30.0])
        if name not in ("q", "k"):
            return x
        if self.style == "exact":
            power = d.pick([0, 1, 3, 6] if self.dtype == "float16" else [0, 1, 3, 6, 12, 17])
            return d.rng.integers(-4, 5, shape) * 2.0**power
        if self.style == "huge":
            return x * (100.0 if self.dtype == "float16" else d.pick([1e2, 1e3, 1e4, 1e5, 1e7]))
        if self.style in ("large", "tiny"):
            return x * (12 if self.style == "large" else 1e-4)
        if name == "k" and self.style == "ties" and shape[-2]:
            return np.broadcast_to(x[..., :1, :], shape).copy()
        if name == "k" and self.style == "rising":
            return x * (np.arange(shape[-2])[:, None] / 4)
        return x

    def draw_mask(self, full: tuple[int, int, int, int]) -> None:
        d = self.d
        if not d.chance(0.3):
            return
        shape = d.broadcast_shape(full)
        mask = np.array(d.rng.random(shape) < d.pick([0.2, 0.5, 0.9]))
        if d.chance(0.3) and mask.ndim > 1 and mask.size:
            mask[..., d.integer(0, shape[-2] - 1), :] = False
        self.values["mask"] = np.broadcast_to(mask, full)
        t = place(d, torch.from_numpy(mask), any_last=True)
        self.tensors["mask"] = t.expand(full) if self.via == "api" and d.chance(0.15) else t

    def draw_bias(self, full: tuple[int, int, int, int], dtype: str) -> None:
        d = self.d
        if not d.chance(0.35):
            return
        shape = d.broadcast_shape(full)
        bias = np.array(d.normal(*shape) * d.pick([1.0, 1.0, 10.0]))
        if d.chance(0.3):
            bias[d.rng.random(shape) < 0.3] = -np.inf
        if d.chance(0.3):
            self.draw_extremes(bias, dtype)
        if "mask" in self.values and self.values["mask"].shape == full and d.chance(0.2):
            # Under a mask the bias may be anything
            lead = (1,) * (4 - len(shape)) + shape
            dims = tuple(n for n in range(4) if lead[n] == 1)
            hidden = (~self.values["mask"]).all(axis=dims, keepdims=True).reshape(shape)
            bias[hidden] = d.pick([np.nan, np.inf])
        self.add("bias", bias, dtype)
        self.values["bias"] = np.broadcast_to(self.values["bias"], full)
        if self.via == "api" and d.chance(0.15):
            self.tensors["bias"] = self.tensors["bias"].expand(full)

    def draw_extremes(self, bias: Any, dtype: str) -> None:
        """Finite values up to the largest of the dtype: in some places, in a row, everywhere."""
        d = self.d
        low = float(torch.finfo(DTYPES[dtype]).min) / (4 if dtype == "float64" else 1)
        sizes = [low, low, low / 2, -low, -low / 2, -65504.0, -1e4]
        sizes += [] if dtype == "float16" else [-1e9, -1e30, -2.3e38]
        value, where = d.pick(sizes), d.pick(["some", "row", "all"])
        if where == "some":
            bias[d.rng.random(bias.shape) < 0.3] = value
        elif where == "row" and bias.ndim > 1 and bias.size:
            bias[..., d.integer(0, bias.shape[-2] - 1), :] = value
        else:
            bias[...] = value

    # The pieces of a call

    def arguments(self, *names: str) -> dict[str, Any]:
        """Options by their names, and those of the named tensors that the problem has."""
        o = self.o
        given = {
            "causal": o.causal,
            "window": o.window,
            "scale": self.scale,
            "softcap": o.softcap,
            "layout": self.layout,
        }
        return given | {n: self.leaves[n] for n in names if n in self.leaves}

    def flash_arguments(self, *names: str) -> dict[str, Any]:
        o = self.o
        given = {"causal": bool(o.causal), "window_size": o.window or (-1, -1), "softcap": o.softcap}
        return given | {"softmax_scale": self.scale} | {n: self.leaves[n] for n in names if n in self.leaves}

    def use_flash(self) -> None:
        """Narrows the problem to what flash_attn's functions can say."""
        self.layout, self.o.causal = "bshd", bool(self.o.causal)

    def draw_gradients(self, out_shape: tuple[int, ...], lse_shape: tuple[int, ...], swap: tuple[int, int]) -> None:
        d = self.d
        if not d.chance(0.6):
            return
        names = [n for n in ("q", "k", "v", "bias", "sinks") if n in self.tensors]
        self.needs = names if d.chance(0.6) else [n for n in names if d.chance(0.5)]
        if not self.needs:
            return
        self.values["dout"], self.values["dlse"] = np.zeros(out_shape), np.zeros(lse_shape)
        has_lse = self.via == "api" and d.chance(0.6)
        if has_lse:
            self.add("dlse", d.normal(*lse_shape), self.lse_dtype)
        if not has_lse or d.chance(0.85):
            self.add_rows("dout", out_shape, swap)

    def start(self) -> None:
        """The tensors of one call; those that need a gradient are leaves over the same memory."""
        given = self.tensors.items()
        self.leaves = {n: t.detach().requires_grad_() if n in self.needs else t.detach() for n, t in given}

    def finish(self, out: Tensor, lse: Tensor | None) -> Results:
        results = {"out": out.detach()}
        if lse is not None:
            results["lse"] = lse.detach()
        if self.needs:
            pairs = [
                (x, self.tensors[n]) for x, n in ((out, "dout"), (lse, "dlse")) if x is not None and n in self.tensors
            ]
            outputs, seeds = zip(*pairs, strict=True)
            grads = torch.autograd.grad(outputs, [self.leaves[n] for n in self.needs], seeds, allow_unused=True)
            # None where only lse has a gradient and v no part in it
            zeros = [torch.zeros(self.leaves[n].shape, dtype=self.leaves[n].dtype) for n in self.needs]
            results |= {"d" + n: z if g is None else g for n, g, z in zip(self.needs, grads, zeros, strict=True)}
        return results

    # What the reference expects

    def sequence(self, b: int, q: Array, k: Array, v: Array) -> Sequence:
        """Sequence b with its part of every score modifier."""
        sq, sk = q.shape[1], k.shape[1]
        x = Sequence(b, q, k, v, sinks=self.values.get("sinks"))
        if "mask" in self.values:
            x.mask = self.values["mask"][b, :, :sq, :sk]
        if "bias" in self.values:
            x.bias = self.values["bias"][b, :, :sq, :sk]
        if "alibi_slopes" in self.values:
            x.slopes = np.broadcast_to(self.values["alibi_slopes"], (self.batch, self.o.heads))[b]
        return x

    def swapped(self, x: Any, a: int, b: int) -> Any:
        """Turns (batch, heads, rows, dim) into the caller's layout, or back."""
        return np.swapaxes(x, a, b) if self.layout == "bshd" else x

    def rounded_sum(self, x: Any, terms: int, dtype: str) -> tuple[Any, Any, str]:
        """(value, bound, magnitudes) of a sum, as it is stored."""
        return x[0], bounds.stored(x[0], x[1], terms, x[-1] if len(x) > 2 else abs(x[0]), dtype, self.r), dtype

    def shared_gradients(self, ref: Reference, found: list[dict[str, Any]], expected: Expected) -> None:
        """Gradients of bias and sinks, which sequences may share."""
        if "bias" in self.needs:
            t = self.tensors["bias"]
            full = np.zeros((2, *self.values["bias"].shape))
            for b, f in enumerate(found):
                sq, sk = f["dbias"].shape[2:]
                full[:, b, :, :sq, :sk] = f["dbias"]
            parts = [(ref, full[0]), (Reference(), full[1]), (Reference(), abs(full[0]))]
            sums = np.stack([rules.bias_gradient(x, tuple(t.shape)) for rules, x in parts])
            terms = full[0].size // max(sums[0].size, 1)
            expected["dbias"] = self.rounded_sum(sums, terms, str(t.dtype).removeprefix("torch."))
        if "sinks" in self.needs:
            total = sum((f["dsinks"] for f in found), np.zeros((3, self.o.heads)))
            expected["dsinks"] = self.rounded_sum(
                total, self.batch, str(self.tensors["sinks"].dtype).removeprefix("torch.")
            )

    def describe(self) -> str:
        o = self.o
        parts = [self.kind, self.via, self.dtype, self.layout, f"batch={self.batch} heads={o.heads}/{o.heads_kv}"]
        parts.append(f"dims={self.head_dim}/{self.head_dim_v} style={self.style}")
        options = (("causal", o.causal), ("window", o.window), ("scale", self.scale), ("softcap", o.softcap))
        parts += [f"{n}={v}" for n, v in options if v]
        if o.dropout_p:
            parts.append(f"dropout_p={o.dropout_p} rng=({o.seed}, {o.offset})")
        parts += [f"{n}{tuple(t.shape)}:{t.stride()}:{str(t.dtype)[6:]}" for n, t in self.tensors.items()]
        return " ".join([*parts, f"needs={self.needs}"])

    def backends(self) -> list[str | None]:
        """A facade cannot name one; `cpu` has no float64."""
        if self.via != "api":
            return [None]
        return ["tiled"] if self.dtype == "float64" else ["cpu", "tiled"]

    def run(self, backend: str | None) -> Results:
        raise NotImplementedError

    def expected(self, ref: Reference, results: Results) -> Expected:
        raise NotImplementedError

    def objection(self, results: Results) -> str | None:
        """Returns what is wrong apart from values."""
        return None
