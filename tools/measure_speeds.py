"""Measures the times by which families and backends are chosen, and writes them into src/flashtile/families/speeds.csv.

PYTHONPATH=src python tools/measure_speeds.py [--device cpu] [--op backward] [--dtype bfloat16] [--size small]

Each kind of call (op, dtype, head dim, option, size) is timed in interleaved rounds: every family and backend of ours
that takes it, and torch's kernels, each pinned by name. Large calls are timed by CUDA events, small ones by the host's
clock. Rows of other kinds of calls stay as they are. Compiling comes first, in several processes.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtile
from flashtile import families
from flashtile.backends import cuda, registry
from flashtile.families import assemble, speeds
from flashtile.lab.bench import device as facts

HEADER = ("arch", "op", "dtype", "head_dim", "option", "size", "provider", "us")
LARGE = speeds.LARGE
SMALL = (1, 1, 64)
ROUNDS, SMALL_CALLS, PAGE = 5, 50, 64
SDPA = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
Thunk = Callable[[], Any]


@dataclass(frozen=True)
class Kind:
    """The calls that one row of times is about."""

    dtype: str
    head_dim: int
    option: str
    size: str


def kinds(device: str) -> list[Kind]:
    """Plain calls of four head dims, every option at one or two of them, and what only the slowest backends take."""
    if device == "cpu":
        dtypes = ("float32", "bfloat16", "float64")
        return [Kind(dtype, 64, speeds.PLAIN, size) for dtype in dtypes for size in ("large", "small")]
    found = []
    for dtype in ("bfloat16", "float32"):
        found += [Kind(dtype, dim, speeds.PLAIN, "large") for dim in (64, 128, 256, 512)]
        # Other kernels take the options of wide heads
        for dim in (128, 256) if dtype == "bfloat16" else (128,):
            found += [Kind(dtype, dim, option, "large") for option in speeds.OPTIONS if dim == 128 or option != "paged"]
        found += [Kind(dtype, dim, speeds.PLAIN, "small") for dim in (128, 256, 512)]
    return [*found, Kind("float64", 64, speeds.PLAIN, "large"), Kind("float64", 64, speeds.PLAIN, "small")]


class Inputs:
    """The tensors of a kind of call."""

    def __init__(self, kind: Kind, device: str):
        batch, heads, length = SMALL if kind.size == "small" else LARGE[device]
        if kind.dtype == "float64" or kind.head_dim > 256:
            batch, heads, length = (batch, heads, length) if kind.size == "small" else (1, 4, min(length, 2048))
        dtype = getattr(torch, kind.dtype)
        self.kind, self.device = kind, device
        shape = (batch, heads, length, kind.head_dim)
        self.q, self.k, self.v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
        self.dout = torch.randn(shape, dtype=dtype, device=device)
        self.length, self.heads, self.batch = length, heads, batch
        # Only what the option needs: a dense mask of a large call is large
        self.mask = torch.rand(batch, 1, length, length, device=device) > 0.2 if kind.option == "mask" else None
        self.bias = torch.randn(1, heads, length, length, dtype=dtype, device=device) if kind.option == "bias" else None

    def options(self) -> dict[str, Any]:
        return {
            "mask": {"mask": self.mask},
            "bias": {"bias": self.bias},
            "alibi": {"alibi_slopes": torch.rand(self.heads, device=self.device)},
            "softcap": {"softcap": 30.0},
            "dropout": {"dropout_p": 0.1},
        }.get(self.kind.option, {})

    def ours(self) -> Thunk | None:
        """The forward call of flashtile, whichever backend the context names."""
        if self.kind.option in ("lengths", "paged"):
            used = torch.full((self.batch,), self.length, dtype=torch.int32, device=self.device)
            if self.kind.option == "lengths":
                steps = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * self.length
                packed = [
                    tensor.detach().transpose(1, 2).flatten(0, 1).requires_grad_()
                    for tensor in (self.q, self.k, self.v)
                ]
                self.q, self.k, self.v = packed
                self.dout = self.dout.transpose(1, 2).flatten(0, 1)
                return lambda **more: flashtile.attention_varlen(  # type: ignore[misc]
                    *packed, steps, steps, self.length, self.length, layout="bshd", **more
                )
            pages = self.batch * self.length // PAGE
            caches = [
                tensor.detach().transpose(1, 2).reshape(pages, PAGE, self.heads, -1).contiguous()
                for tensor in (self.k, self.v)
            ]
            table = torch.randperm(pages, device=self.device).to(torch.int32).view(self.batch, -1)
            q = self.q.detach().transpose(1, 2).contiguous()
            return lambda **more: flashtile.attention_kvcache(  # type: ignore[misc]
                q, *caches, cache_seqlens=used, block_table=table, **more
            )
        return lambda **more: flashtile.attention(self.q, self.k, self.v, **self.options(), **more)  # type: ignore[misc]


@dataclass(frozen=True)
class Contender:
    name: str
    forward: Callable[[], Tensor]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def ours(inputs: Inputs, op: str) -> Iterator[Contender]:
    """Every family of the CUDA backend by itself, then the other backends."""
    call = inputs.ours()
    assert call is not None
    slow = ("numba", "reference")
    for backend in registry.BACKENDS:
        if (
            inputs.device not in backend.devices
            or backend.name in slow
            or (backend.name == "cuda" and inputs.device == "cpu")
        ):
            continue
        is_wide = inputs.kind.dtype == "float64" or inputs.kind.head_dim > 256 or inputs.kind.option == "paged"
        if backend.name == "tiled" and inputs.kind.size == "large" and not is_wide and inputs.device == "cuda":
            continue  # hundreds of times slower
        if backend.name != "cuda":
            yield Contender(backend.name, lambda name=backend.name: call(backend=name))
            continue
        for family in families.all_families(op):
            yield Contender(family.name, lambda: call(backend="cuda"), lambda name=family.name: forcing(name))


class forcing:  # noqa: N801
    """A context in which calls take a family; plans of other families are dropped around it."""

    def __init__(self, name: str):
        self.forced = families.forced(name)

    def __enter__(self) -> None:
        self.forced.__enter__()
        assemble.clear_plans()

    def __exit__(self, *error: object) -> None:
        self.forced.__exit__(None, None, None)
        assemble.clear_plans()


def theirs(inputs: Inputs) -> Iterator[Contender]:
    """torch's kernels, each pinned; those of FlexAttention where no other has the option."""
    kind = inputs.kind
    more: dict[str, Any] = {}
    if kind.option in ("mask", "bias"):
        more["attn_mask"] = inputs.mask if kind.option == "mask" else inputs.bias
    elif kind.option == "dropout":
        more["dropout_p"] = 0.1
    elif kind.option in ("alibi", "softcap"):
        if inputs.device == "cuda" and kind.size == "large":
            yield from flex(inputs)
        return
    elif kind.option != speeds.PLAIN:
        return
    q, k, v = inputs.q, inputs.k, inputs.v
    for name, backend in SDPA.items():
        if name == "sdpa-math" and kind.size == "large" and kind.dtype != "float64" and kind.head_dim <= 256:
            continue  # stores the scores; never the fastest there
        yield Contender(
            name, lambda: F.scaled_dot_product_attention(q, k, v, **more), lambda backend=backend: sdpa_kernel(backend)
        )


def flex(inputs: Inputs) -> Iterator[Contender]:
    from torch.nn.attention.flex_attention import flex_attention

    slopes = torch.rand(inputs.heads, device=inputs.device)

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if inputs.kind.option == "alibi":
            return score - slopes[h] * (i - j).abs()
        return 30.0 * torch.tanh(score / 30.0)

    compiled = torch.compile(flex_attention, fullgraph=True)
    yield Contender("flex", lambda: compiled(inputs.q, inputs.k, inputs.v, score_mod=change))


def thunk_of(contender: Contender, inputs: Inputs, op: str) -> Thunk:
    """One call of the op, made once. It is to be called inside the contender's context."""
    if op == "forward":

        def forward() -> None:
            with torch.no_grad():
                contender.forward()

        thunk: Thunk = forward
    else:
        with contender.context():
            out = contender.forward()
        leaves = (inputs.q, inputs.k, inputs.v)
        thunk = partial(torch.autograd.grad, out, leaves, inputs.dout, retain_graph=True)
    with contender.context():
        thunk()
    return thunk


def batch_us(thunk: Thunk, calls: int, device: str) -> float:
    """The time of one of so many calls: of the GPU where there are few, of the host where there are many."""
    if device == "cuda" and calls == 1:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        thunk()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        thunk()
    us = (time.perf_counter() - begin) / calls * 1e6
    if device == "cuda":
        torch.cuda.synchronize()
    return us


def measure(kind: Kind, op: str, device: str) -> dict[str, float]:
    inputs = Inputs(kind, device)
    thunks: dict[str, Thunk] = {}
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
    for contender in [*ours(inputs, op), *theirs(inputs)]:
        try:
            thunks[contender.name] = thunk_of(contender, inputs, op)
        except (flashtile.Unsupported, RuntimeError):
            continue
        contexts[contender.name] = contender.context
    times: dict[str, list[float]] = {name: [] for name in thunks}
    calls = SMALL_CALLS if kind.size == "small" else 1
    for _ in range(ROUNDS):
        for name, thunk in thunks.items():
            if times[name] and times[name][0] > 5e4:
                continue  # once is enough
            # Entering a context drops plans: the first call makes them anew
            with contexts[name]():
                thunk()
                times[name].append(batch_us(thunk, calls, device))
    return {name: statistics.median(found) for name, found in times.items()}


@dataclass(frozen=True)
class Choice:
    """The kinds of calls that are measured; None: all."""

    device: str
    op: str | None = None
    dtype: str | None = None
    size: str | None = None

    def kinds(self) -> list[tuple[Kind, str]]:
        return [
            (kind, op)
            for kind, op in itertools.product(kinds(self.device), speeds.OPS)
            if self.op in (None, op) and self.dtype in (None, kind.dtype) and self.size in (None, kind.size)
            if not (kind.option == "paged" and op == "backward")
        ]

    def words(self) -> list[str]:
        return [word for word in (self.op, self.dtype, self.size) if word is not None]


def warm(choice: Choice, share: int, shares: int) -> None:
    """One call of everything, so that compilers leave their kernels on disk."""
    for kind, op in choice.kinds()[share::shares]:
        if kind.size == "large":
            inputs = Inputs(kind, choice.device)
            for contender in ours(inputs, op):
                if contender.name != "tiled":
                    with suppress(flashtile.Unsupported, RuntimeError):
                        thunk_of(contender, inputs, op)


def rows(choice: Choice) -> Iterator[tuple[object, ...]]:
    arch = "cpu"
    if choice.device == "cuda":
        found = cuda._arch(0)
        assert found is not None
        arch = f"sm_{found.number}"
    dense: dict[str, float] = {}
    for kind, op in choice.kinds():
        times = measure(kind, op, choice.device)
        if kind.option == speeds.PLAIN and op == "forward" and kind.size == "large" and kind.head_dim == 128:
            dense[kind.dtype] = min(us for name, us in times.items() if not name.startswith("sdpa"))
        if kind.option == "paged":
            times["ours with dense keys"] = dense[kind.dtype]
        shown = ", ".join(f"{name} {us:.0f}" for name, us in sorted(times.items(), key=lambda pair: pair[1]))
        print(f"{op:8} {kind.dtype:8} d={kind.head_dim:<4}{kind.option:8}{kind.size:6} {shown}", flush=True)
        for name, us in times.items():
            yield arch, op, kind.dtype, kind.head_dim, kind.option, kind.size, name, f"{us:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=speeds.TABLE)
    parser.add_argument("--op", choices=speeds.OPS, help="only this; default: both")
    parser.add_argument("--dtype", help="only this; default: all")
    parser.add_argument("--size", choices=("large", "small"), help="only these; default: both")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile ahead")
    options = parser.parse_args()
    choice = Choice(options.device, options.op, options.dtype, options.size)
    if options.share:
        warm(choice, *map(int, options.share.split("/")))
        return 0
    if options.device == "cuda" and options.size != "small":
        shares = [subprocess.Popen([*sys.orig_argv, "--share", f"{n}/{options.jobs}"]) for n in range(options.jobs)]
        for share in shares:
            share.wait()
    warnings.filterwarnings("ignore", category=UserWarning)  # torch says at length why a pinned kernel refuses
    found = [tuple(map(str, row)) for row in rows(choice)]
    environment = facts.environment(options.device, [], "python tools/measure_speeds.py")
    which = "# " + ", ".join([found[0][0], *choice.words()]) + ":"
    note = f"{which} {environment.device}; torch {environment.torch}, cuDNN {environment.cudnn or 'none'}, "
    note += f"driver {environment.driver or 'none'}; commit {environment.commit}, {environment.date}"
    kept, notes = list[tuple[str, ...]](), list[str]()
    if options.out.exists():
        lines = options.out.read_text(encoding="utf-8").splitlines()
        replaced = {row[:6] for row in found}  # all but provider and time
        notes = [line for line in lines if line.startswith("#") and not line.startswith(which)]
        read = csv.reader(line for line in lines if not line.startswith("#"))
        kept = [tuple(row) for row in read if row != list(HEADER) and tuple(row[:6]) not in replaced]
    with options.out.open("w", encoding="utf-8", newline="") as file:
        file.write("".join(f"{line}\n" for line in sorted([*notes, note])))
        csv.writer(file, lineterminator="\n").writerows([HEADER, *sorted([*kept, *found])])
    return 0


if __name__ == "__main__":
    sys.exit(main())
