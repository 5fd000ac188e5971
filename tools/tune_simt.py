"""Times the tiles of the simt backward kernels, full and causal, float32, B=4 H=16 S=4096. They order the lines of
families/tiles.csv.

PYTHONPATH=src python tools/tune_simt.py        writes results/<device>/simt_tiles.csv; of the forward: flashtile bench
--tiles
"""

from __future__ import annotations

from functools import partial

import torch
from measuring import compile_all, results_file, write_csv

from flashtile import families
from flashtile.backends import call, cuda, executor
from flashtile.families import Tile, assemble
from flashtile.lab.bench import device as facts
from flashtile.lab.bench.timing import median_ms
from flashtile.plans.spec import CallLayout, Features, PlanKey
from flashtile.problem import AttentionArgs

BATCH, HEADS, SEQLEN, ROUNDS = 4, 16, 4096, 7
PRODUCTS = {"bwd_dq_simt": 3, "bwd_dkdv_simt": 4}  # matrix products of 2 * S * S * d operations in each
TILES = {
    "bwd_dq_simt": {64: ((128, 32, 4), (64, 64, 4), (64, 32, 4)), 128: ((64, 32, 4), (64, 64, 8), (32, 32, 4))},
    "bwd_dkdv_simt": {64: ((64, 64, 4), (64, 32, 4), (32, 64, 4)), 128: ((64, 32, 4), (64, 64, 8), (32, 32, 4))},
}


def main() -> None:
    arch = cuda._arch(0)
    assert arch is not None
    family, steps = families.find("bwd_simt"), {}
    rows = [
        family.row(Tile(kernel, ("float32",), d, d, owned, streamed, 32 * num_warps), "float32")
        for kernel, dims in TILES.items()
        for d, tiles in dims.items()
        for owned, streamed, num_warps in tiles
    ]
    for row in rows:
        for is_causal in (False, True):
            dims = row.head_dim, row.head_dim_v
            key = PlanKey("float32", "float32", *dims, Features(has_band=is_causal), arch, ("dq", "dk", "dv"))
            steps[row, is_causal] = family.step(row, key, CallLayout("bhsd", ()))
    compile_all((step.unit, step.entry) for step in steps.values())
    env = facts.environment("cuda", [], "python tools/tune_simt.py")
    found = []
    for head_dim in (64, 128):
        for is_causal in (False, True):
            q, k, v, dout, dq, dk, dv = (torch.randn(BATCH, HEADS, SEQLEN, head_dim, device="cuda") for _ in range(7))
            args = AttentionArgs(q, k, v, causal="top_left" if is_causal else "none")
            out, (lse, score_lse, delta) = (
                torch.empty_like(q),
                torch.randn(3, BATCH, HEADS, SEQLEN, device="cuda").unbind(),
            )
            given = call.tensors_of(args) | {"out": out, "lse": lse, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
            plan = assemble.plan(cuda._key(args, given, ("dq", "dk", "dv")), call.layout_of(args, given))
            values = executor.evaluate(plan, given, call.scalars_of(args), cuda._splits(args))
            pointers = {
                name: tensor.data_ptr() for name, tensor in (given | {"score_lse": score_lse, "delta": delta}).items()
            }
            image = executor.fill(plan, given, call.scalars_of(args), values, pointers)
            chosen = {
                row: step for (row, causal), step in steps.items() if causal == is_causal and row.head_dim == head_dim
            }
            thunks = {row: partial(executor.launch, step, values, image, 0, arch.name) for row, step in chosen.items()}
            for row, ms in median_ms(thunks, ROUNDS).items():
                step = chosen[row]
                used = executor.cache.compile_cached(step.unit, arch.name, [step.entry]).resources(step.entry)
                flops = PRODUCTS[row.kernel] * 2 * BATCH * HEADS * SEQLEN**2 * head_dim / (2 if is_causal else 1)
                one = {
                    "kernel": row.kernel,
                    "head_dim": row.head_dim,
                    "is_causal": is_causal,
                    "block_m": row.owned,
                    "block_n": row.streamed,
                    "num_warps": row.num_threads // 32,
                    "shared_bytes": row.shared_bytes,
                    "registers": used.registers,
                    "spill_bytes": used.spill_store_bytes,
                    "median_ms": round(ms, 3),
                    "tflops": round(flops / ms / 1e9, 1),
                }
                found.append(one)
                print(*one.values())
    write_csv(results_file("simt_tiles.csv"), found, env)


if __name__ == "__main__":
    main()
