"""Times each configuration of each kernel of the triton backend, B=4 H=16 S=4096. Needs a GPU.

The table in backends/triton_tiles.py holds the fastest ones.

PYTHONPATH=src python tools/tune_triton.py [dtype,... [head_dim,...]]        writes results/<device>/triton_tiles.csv
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from measuring import results_file, write_csv

from flashtile.backends import triton as backend
from flashtile.backends.base import Grads
from flashtile.backends.triton import Config
from flashtile.lab.bench import device as facts
from flashtile.lab.bench.timing import median_ms
from flashtile.problem import AttentionArgs

BATCH, HEADS, SEQLEN, ROUNDS = 4, 16, 4096, 7
PRODUCTS = {"fwd": 2, "bwd_dkdv": 4, "bwd_dq": 3}  # matrix products in each kernel, 2 * S * S * d FLOPs each
ConfigTuple = tuple[int, int, int, int]  # block_m, block_n, num_warps, num_stages
CONFIGS: dict[tuple[str, int, int], tuple[ConfigTuple, ...]] = {  # by kernel, element bytes and head dim
    ("fwd", 2, 64): (
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (128, 128, 4, 3),
        (128, 64, 4, 3),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 64, 8, 3),
    ),
    ("fwd", 2, 128): (
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 4, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
    ),
    ("fwd", 2, 256): ((128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3)),
    ("bwd_dkdv", 2, 64): (
        (64, 128, 8, 3),
        (64, 128, 8, 2),
        (64, 128, 4, 2),
        (128, 128, 8, 2),
        (64, 64, 4, 3),
        (64, 64, 4, 2),
    ),
    ("bwd_dkdv", 2, 128): (
        (64, 128, 8, 3),
        (64, 128, 8, 2),
        (32, 128, 8, 3),
        (32, 128, 8, 2),
        (64, 64, 4, 2),
        (32, 64, 4, 2),
    ),
    ("bwd_dkdv", 2, 256): ((32, 64, 8, 2), (32, 128, 8, 1), (64, 64, 8, 1), (32, 64, 8, 1)),
    ("bwd_dq", 2, 64): ((128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2)),
    ("bwd_dq", 2, 128): (
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (128, 32, 8, 3),
        (128, 128, 8, 1),
    ),
    ("bwd_dq", 2, 256): ((128, 32, 8, 2), (64, 32, 4, 2), (64, 64, 8, 1), (64, 32, 8, 2)),
    ("fwd", 4, 64): ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2), (64, 64, 4, 2)),
    ("fwd", 4, 128): ((128, 32, 8, 2), (64, 32, 4, 2), (64, 16, 4, 2), (128, 16, 8, 2)),
    ("bwd_dkdv", 4, 64): ((32, 128, 8, 2), (32, 64, 4, 2), (16, 64, 4, 2), (16, 128, 8, 2)),
    ("bwd_dkdv", 4, 128): ((16, 64, 4, 2), (16, 64, 4, 1), (32, 64, 8, 1), (16, 128, 8, 1)),
    ("bwd_dq", 4, 64): ((128, 32, 8, 2), (64, 32, 4, 2), (64, 16, 4, 2)),
    ("bwd_dq", 4, 128): ((64, 16, 4, 1), (64, 16, 4, 2), (64, 32, 8, 1), (128, 16, 8, 1)),
}


@dataclass(frozen=True)
class Trial:
    kernel: str
    dtype: str
    head_dim: int
    is_causal: bool
    config: Config
    precision: str


class Taken(NamedTuple):
    """Resources that a configuration takes, or why it does not run."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    reason: str


def trials(dtypes: list[str], head_dims: list[int]) -> list[Trial]:
    """Every configuration without a mask, and 2-byte dtypes at head dim 128 also with a causal one.

    float32 products use tf32x3; the forward pass at head dim 64 is also timed with ieee.
    """
    found = []
    for (kernel, size, head_dim), configs in CONFIGS.items():
        for dtype in dtypes:
            if getattr(torch, dtype).itemsize != size or head_dim not in head_dims:
                continue
            masks = (False, True) if (size, head_dim) == (2, 128) else (False,)
            precisions = (
                ("ieee",) if size == 2 else (("tf32x3", "ieee") if (kernel, head_dim) == ("fwd", 64) else ("tf32x3",))
            )
            found += [
                Trial(kernel, dtype, head_dim, is_causal, Config(*config), precision)
                for config in configs
                for is_causal in masks
                for precision in precisions
            ]
    return found


def call(trial: Trial, args: AttentionArgs, tensors: list[torch.Tensor], lse: torch.Tensor) -> Callable[[], Any]:
    out, dq, dk, dv = tensors
    name = trial.kernel
    backend.tile_config = lambda *_: trial.config  # type: ignore[assignment]
    backend._precision = lambda *_: trial.precision  # type: ignore[assignment]
    if name == "fwd":
        made = backend._forward_call(args, out, lse)
    elif name == "bwd_dkdv":
        made = backend._dkdv_call(args, out, lse, lse, Grads(None, dk, dv, None, None))
    else:
        made = backend._dq_call(args, out, lse, lse, dq)
    function = getattr(backend._kernels(), f"{name}_triton_kernel")
    _, num_programs, config, arguments = made
    return lambda: function[(num_programs,)](**arguments, num_warps=config.num_warps, num_stages=config.num_stages)


def inputs(trial: Trial, seqlen: int) -> tuple[AttentionArgs, list[torch.Tensor], torch.Tensor]:
    make = lambda: torch.randn(BATCH, HEADS, seqlen, trial.head_dim, device="cuda", dtype=getattr(torch, trial.dtype))  # noqa: E731
    args = AttentionArgs(make(), make(), make(), causal="top_left" if trial.is_causal else "none")
    return args, [make() for _ in range(4)], torch.randn(BATCH, HEADS, seqlen, device="cuda")


def compile_one(trial: Trial) -> Taken:
    """Compiles a configuration, into Triton's disk cache."""
    try:
        compiled = call(trial, *inputs(trial, 256))()
        torch.cuda.synchronize()
        return Taken(compiled.n_regs, 4 * compiled.n_spills, compiled.metadata.shared, "")
    except Exception as error:
        return Taken(0, 0, 0, f"{type(error).__name__}: {error}"[:80])


def main() -> None:
    dtypes = sys.argv[1].split(",") if len(sys.argv) > 1 else ["bfloat16", "float32"]
    head_dims = [int(part) for part in sys.argv[2].split(",")] if len(sys.argv) > 2 else [64, 128, 256]
    chosen = trials(dtypes, head_dims)
    with ProcessPoolExecutor(max(1, min(15, (os.cpu_count() or 2) - 1)), multiprocessing.get_context("spawn")) as pool:
        resources = dict(zip(chosen, pool.map(compile_one, chosen), strict=True))
    env = facts.environment("cuda", sys.argv[1:], "python tools/tune_triton.py")
    medians: dict[Trial, float] = {}
    groups = {(trial.dtype, trial.head_dim, trial.is_causal): [] for trial in chosen}
    for trial in chosen:
        if not resources[trial].reason:
            groups[trial.dtype, trial.head_dim, trial.is_causal].append(trial)
    for group in groups.values():
        if group:
            tensors = inputs(group[0], SEQLEN)
            medians |= median_ms({trial: call(trial, *tensors) for trial in group}, ROUNDS)
    rows = []
    for trial in sorted(chosen, key=lambda t: (t.dtype, t.head_dim, t.kernel, t.is_causal, medians.get(t, 1e9))):
        row = {name: getattr(trial, name) for name in ("kernel", "dtype", "head_dim", "is_causal", "precision")}
        row |= asdict(trial.config) | resources[trial]._asdict() | {"median_ms": "", "tflops": ""}
        if (ms := medians.get(trial)) is not None:
            flops = PRODUCTS[trial.kernel] * 2 * BATCH * HEADS * SEQLEN**2 * trial.head_dim
            flops /= 2 if trial.is_causal else 1
            row |= {"median_ms": round(ms, 4), "tflops": round(flops / ms / 1e9, 1)}
        rows.append(row)
        print(*row.values())
    write_csv(results_file("triton_tiles.csv"), rows, env)


if __name__ == "__main__":
    main()
