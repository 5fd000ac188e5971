"""A function on several ranks of this machine, each a process: for checks, measurements and traces."""

from __future__ import annotations

import datetime
import faulthandler
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import start_processes

T = TypeVar("T")
_TIMEOUT = datetime.timedelta(seconds=180)  # until a rank that waits for another fails


class _Place(NamedTuple):
    """Facts that the ranks have in common."""

    num_ranks: int
    port: int
    device: str
    backend: str
    end: float  # by time.monotonic(), which all processes of a machine share
    folder: str  # a file for each rank: where it was at the end


def on_ranks(
    function: Callable[..., T],
    num_ranks: int,
    *args: Any,
    device: str = "cpu",
    backend: str = "gloo",
    limit_s: float = math.inf,
) -> T:
    """function(group, *args) on every rank, one thread each; what rank 0 returns. An exception on one ends all and
    names it. After limit_s seconds TimeoutError says which ranks had not ended, and where each of them was.

    On a GPU ranks may share it. NCCL refuses that within one host, so each rank calls itself a host of its own then,
    and messages go through sockets.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        place = _Place(num_ranks, port, device, backend, time.monotonic() + limit_s, folder)
        given = (place, queue, function, args)
        processes = start_processes(_serve, given, num_ranks, join=False, start_method="spawn")
        assert processes is not None
        results: list[T] = []
        # A rank that fails puts nothing: join raises its exception
        while not processes.join(timeout=0.05):
            if not (results or queue.empty()):
                results.append(queue.get())
            if time.monotonic() > place.end:
                raise TimeoutError(_unfinished(processes.processes, place, limit_s))
        if not (results or queue.empty()):
            results.append(queue.get())
    if not results:
        raise RuntimeError(f"{num_ranks} ranks ended without a result")
    return results[0]


def _unfinished(processes: list[Any], place: _Place, limit_s: float) -> str:
    """Ends the ranks that run, and says where they were."""
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    found = [f"rank {rank}: {_stack(place, rank)}" for rank in late]
    return f"{len(late)} of {place.num_ranks} ranks had not ended after {limit_s:.0f} s\n" + "\n".join(found)


def _stack_file(place: _Place, rank: int) -> Path:
    return Path(place.folder) / f"rank{rank}.txt"


def _stack(place: _Place, rank: int) -> str:
    path = _stack_file(place, rank)
    return (path.read_text().strip() if path.exists() else "") or "had not started"


def _serve(rank: int, place: _Place, queue: Any, function: Any, args: tuple[Any, ...]) -> None:
    with _stack_file(place, rank).open("w") as stack:
        if place.end < math.inf:
            faulthandler.dump_traceback_later(max(place.end - time.monotonic() - 0.5, 0.1), file=stack)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        if place.device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
            if place.num_ranks > torch.cuda.device_count():
                os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")
        address = f"tcp://127.0.0.1:{place.port}"
        dist.init_process_group(place.backend, address, timeout=_TIMEOUT, rank=rank, world_size=place.num_ranks)
        result = function(dist.group.WORLD, *args)
        if rank == 0:
            queue.put(result)
        dist.barrier()
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
