"""A function on several ranks of this machine, each a process: for checks, measurements and traces."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import start_processes

T = TypeVar("T")
_TIMEOUT = datetime.timedelta(seconds=180)  # until a rank that waits for another fails


def on_ranks(function: Callable[..., T], num_ranks: int, *args: Any, device: str = "cpu", backend: str = "gloo") -> T:
    """function(group, *args) on every rank, one thread each; what rank 0 returns. An exception on one ends all.

    On a GPU ranks may share it. NCCL refuses that within one host, so each rank calls itself a host of its own then,
    and messages go through sockets.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = get_context("spawn").SimpleQueue()
    given = (num_ranks, port, device, backend, queue, function, args)
    processes = start_processes(_serve, given, num_ranks, join=False, start_method="spawn")
    assert processes is not None
    # A rank that fails puts nothing: join raises its exception
    while queue.empty() and not processes.join(timeout=0.05):
        pass
    if queue.empty():
        raise RuntimeError(f"{num_ranks} ranks ended without a result")
    result: T = queue.get()
    while not processes.join():
        pass
    return result


def _serve(
    rank: int, num_ranks: int, port: int, device: str, backend: str, queue: Any, function: Any, args: tuple[Any, ...]
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if backend == "nccl" and num_ranks > torch.cuda.device_count():
            os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, address, timeout=_TIMEOUT, rank=rank, world_size=num_ranks)
    result = function(dist.group.WORLD, *args)
    if rank == 0:
        queue.put(result)
    dist.barrier()
    dist.destroy_process_group()
