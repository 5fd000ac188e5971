"""DTensor: two processes, each with a shard of the batch or of the heads, give what one gives, and send nothing."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import flashtile
from flashtile.integrations import dtensor

NUM_RANKS, LAYOUTS = 2, ("bhsd", "bshd")


def given(layout: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    sizes = {"q": (4, 4, 7, 8), "k": (4, 2, 9, 8), "v": (4, 2, 9, 8)}
    tensors = {name: torch.randn(shape) for name, shape in sizes.items()}
    if layout == "bshd":
        tensors = {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items()}
    tensors |= {"bias": torch.randn(4, 1, 7, 9), "sinks": torch.randn(4), "mask": torch.rand(1, 4, 7, 9) < 0.8}
    return tensors | {"alibi_slopes": torch.rand(4)}


def placements(axis: str, layout: str) -> dict[str, Any]:
    rows = Shard(0 if axis == "batch" else 1 if layout == "bhsd" else 2)
    whole = {"sinks": Replicate(), "alibi_slopes": Replicate()}
    if axis == "batch":
        return {"q": rows, "k": rows, "v": rows, "bias": Shard(0), "mask": Replicate(), **whole}
    split = {"sinks": Shard(0), "alibi_slopes": Shard(0)}
    return {"q": rows, "k": rows, "v": rows, "bias": Replicate(), "mask": Shard(1), **split}


def attend(tensors: dict[str, torch.Tensor], layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    options = {name: value for name, value in tensors.items() if name not in "qkv"}
    q, k, v = (tensors[name] for name in "qkv")
    return flashtile.attention(q, k, v, causal=True, softcap=3.0, layout=layout, return_lse=True, **options)


def differentiated(tensors: dict[str, torch.Tensor], layout: str) -> tuple[Any, ...]:
    names = [name for name in tensors if name not in ("mask", "alibi_slopes")]
    for name in names:
        tensors[name].requires_grad_()
    out, lse = attend(tensors, layout)
    loss = out.square().sum() + lse.sum()
    return out, lse, *torch.autograd.grad(loss, [tensors[name] for name in names])


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def worker(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    dtensor.register()
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for layout in LAYOUTS:
        expected = differentiated(given(layout), layout)
        for axis in ("batch", "heads"):
            split = placements(axis, layout)
            tensors = {name: distribute_tensor(t, mesh, [split[name]]) for name, t in given(layout).items()}
            with CommDebugMode() as communication, torch.no_grad():
                out, lse = attend(tensors, layout)
            assert communication.get_total_counts() == 0
            assert out.placements == (split["q"],)
            assert lse.placements == (Shard(0 if axis == "batch" else 1),)
            results = differentiated(tensors, layout)
            for ours, theirs in zip(results, expected, strict=True):
                torch.testing.assert_close(whole(ours), whole(theirs), rtol=1e-4, atol=1e-5)
    # Dropout: every process computes the whole
    q = distribute_tensor(torch.randn(4, 4, 7, 8), mesh, [Shard(0)])
    state = torch.tensor([1, 2])
    out = flashtile.attention(q, q, q, dropout_p=0.5, rng_state=distribute_tensor(state, mesh, [Replicate()]))
    full = q.full_tensor()
    torch.testing.assert_close(out.full_tensor(), flashtile.attention(full, full, full, dropout_p=0.5, rng_state=state))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_shards() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, args=(port,), nprocs=NUM_RANKS)
