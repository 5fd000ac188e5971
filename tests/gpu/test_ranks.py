"""Attention over ranks that share the GPU: gloo through pinned memory and NCCL through sockets, by the error rule; what
its messages run beside; and a fault in the dropout of a part."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import SEED

from flashtile.backends import cuda, executor, native
from flashtile.distributed import exactness, launch, ring
from flashtile.distributed.sharding import Shards, take
from flashtile.lab.check.mutants import broken
from flashtile.problem import row_axis
from flashtile.testing import Case, assert_agrees, disagreements, run

WAYS = (exactness.WAYS[0], exactness.WAYS[2], exactness.WAYS[4])  # ring by messages, ring by gathering, Ulysses
HAS_ALL = os.environ.get("FLASHTILE_TEST_ALL") == "1"
LIMIT_S = 300.0 if HAS_ALL else 180.0  # then the ranks that have not ended are named


def names() -> tuple[str, ...]:
    """Two of the cases, others in each run: most of the time goes into compiling their kernels."""
    found = exactness.case_names("cuda")
    return found if HAS_ALL else tuple(random.Random(SEED).sample(found, 2))


class Silence:
    """A channel that carries nothing: a rank computes with the keys that happen to be in its buffers."""

    stream = None

    def __init__(self, name: str, *_: Any) -> None:
        self.rank, self.size = map(int, name.split("/"))

    def check_same(self, options: Any) -> None: ...

    def mark(self) -> None: ...

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def post(self, *_: Any, **__: Any) -> Silence:
        return self

    def wait(self) -> None: ...


def ring_passes(name: str, size: int, sharding: str, transport: str) -> Iterator[ring.RingArgs]:
    """What each rank calls."""
    args = exactness.case_inputs(name, 0, "cuda").args
    row, given = row_axis(args.layout), args._asdict()
    length = args.q.shape[row]
    for rank in range(size):
        rows = list(Shards(length, size, sharding).ranges(rank))
        own = {key: take(given[key], rows, row) for key in ("q", "k", "v")}
        shared = {key: given[key] for key in ring.RingArgs._fields if key in given and key not in own}
        place = {"group": f"{rank}/{size}", "sharding": sharding, "seqlen_q": length, "seqlen_k": length}
        rest = {"cu_seqlens": args.cu_seqlens_q, "merged": 1, "transport": transport, "timeout": 0.0}
        yield ring.RingArgs(**own, **(shared | rest | place))


def compile_kernels() -> None:
    """What the ranks will need, once and side by side: each rank has one thread. Tests poison memory by torch's switch
    for deterministic algorithms, which ranks do not set: their keys may be split."""
    torch.use_deterministic_algorithms(False)
    needs = (True, True, True, False, False)
    with pytest.MonkeyPatch.context() as patch, native.record_launches() as units:
        patch.setattr(ring, "Channel", Silence)
        for name in names():
            run(exactness.case_inputs(name, 0, "cuda"))  # Ulysses
            for size in (2, 4):
                for way in WAYS[:2]:
                    for args in ring_passes(name, size, way.sharding, way.transport):
                        out, lse = ring._Forward(args).run()
                        ring._Backward(args, out, None, out, lse, needs).run()
    arch = cuda._arch(0)
    assert arch is not None
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda unit: executor.function(*unit, arch.name), units))


@pytest.mark.long(180)
def test_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    """One test, so that one worker compiles the kernels."""
    compile_kernels()
    given = (SEED % 1000, names(), WAYS)
    found = launch.on_ranks(results_by_backend, 4, *given, device="cuda", limit_s=LIMIT_S)
    for backend, results in found.items():
        assert {one.way for one in results} == {str(way) for way in WAYS}
        assert [f"{backend}, {one.case}, {one.way}: {one.complaints}" for one in results if one.complaints] == []
    if HAS_ALL:
        check_overlap(tmp_path)


def results_by_backend(group: Any, *given: Any) -> dict[str, list[exactness.Exactness]]:
    """By gloo over all ranks, and by NCCL over two of them: the kernels of NCCL wait on the GPU, which they share."""
    found = {"gloo": exactness.check_group(group, "cuda", *given)}
    if dist.is_nccl_available():
        two = dist.new_group([0, 1], backend="nccl")
        if dist.get_rank(group) < 2:
            found["nccl"] = exactness.check_group(two, "cuda", *given)
    return found


def check_overlap(folder: Path) -> None:
    """Copies from the host, which a step waits for, run beside kernels: all but the first of each pass."""
    tool = Path(__file__).parents[2] / "tools" / "trace_ranks.py"
    sizes = ["--ranks", "4", "--rows", "16384", "--heads", "64", "--heads-kv", "1", "--head-dim", "64"]
    subprocess.run([sys.executable, str(tool), *sizes, "--out", str(folder)], check=True, timeout=120)
    summary = json.loads((folder / "distributed_trace_gloo.json").read_text())["summary"]
    assert summary["from host"]["count"] >= 6
    assert (
        summary["from host"]["hidden_share"] > 0.1
    )  # without overlap 0; the GPU and the host are busy with other tests


def test_a_wrong_origin_of_dropout_is_noticed() -> None:
    """A rank's rows are a part of the problem: dropout counts from where the part begins."""
    case = Case(dropout_p=0.2, origin=(1000, 4096, 5, 40), batch=1, seqlen_q=150, seqlen_k=300, backend="cuda")
    inputs = case.make(SEED % 1000, "cuda")
    assert_agrees(run(inputs, has_backward=False), inputs)
    with broken("dropout_origin"):
        assert disagreements(run(inputs, has_backward=False), inputs)
