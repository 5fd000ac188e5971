"""The triton backend beside compiled FlexAttention, in turns: bf16, B=4 H=16 S=4096, full and causal, both passes.
Needs a GPU.

PYTHONPATH=src python tools/triton_flex.py [head_dim,...]        writes results/<device>/triton_flex.csv
"""

from __future__ import annotations

import csv
import itertools
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashtile.lab.bench import device as facts
from flashtile.lab.bench.points import Point
from flashtile.lab.bench.providers import Provider, choose
from flashtile.lab.bench.timing import Thunk, median_ms

NAMES = ("triton", "flex")
ROUNDS = 25


def thunk(provider: Provider, point: Point) -> Thunk:
    """One pass, on inputs that both are given."""
    inputs = point.make("cuda", seed=0)
    call = provider.build(point, inputs).call
    leaves = inputs.leaves("bhsd", point.direction == "bwd")
    q, k, v = leaves.q, leaves.k, leaves.v
    if point.direction == "fwd":
        return partial(call, q, k, v)
    out = call(q, k, v)
    return lambda: torch.autograd.grad(out, (q, k, v), leaves.dout, retain_graph=True)


def main() -> None:
    head_dims = [int(part) for part in sys.argv[1].split(",")] if len(sys.argv) > 1 else [128, 64]
    environment = asdict(facts.environment("cuda", sys.argv[1:], "python tools/triton_flex.py"))
    providers = choose(",".join(NAMES), is_grid=False)
    rows: list[dict[str, Any]] = []
    for head_dim, is_causal, direction in itertools.product(head_dims, (False, True), ("fwd", "bwd")):
        sizes = {"heads_kv": 16, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": head_dim, "head_dim_v": head_dim}
        point = Point(batch=4, heads=16, dtype="bf16", is_causal=is_causal, direction=direction, **sizes)
        times = median_ms({provider.name: thunk(provider, point) for provider in providers}, ROUNDS)
        kind = {"dtype": "bf16", "batch": 4, "heads": 16, "seqlen": 4096, "head_dim": head_dim, "is_causal": is_causal}
        found = {f"{name}_ms": round(times[name], 4) for name in NAMES}
        rows.append(
            kind | {"direction": direction} | found | {"flex_over_triton": round(times["flex"] / times["triton"], 3)}
        )
        print(*rows[-1].values(), flush=True)
    folder = Path(__file__).resolve().parent.parent / "results" / facts.slug("cuda")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "triton_flex.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*rows[0], *environment))
        writer.writerows((*row.values(), *environment.values()) for row in rows)


if __name__ == "__main__":
    main()
