"""Processes that stay: tests send them functions, which all ranks of a group run. Forked from a server that has
imported everything once, so that eight of them start in about a second."""

from __future__ import annotations

import multiprocessing as mp
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

TIMEOUT = 600  # seconds for one task, before a rank counts as hanging
meshes: dict[tuple[int, int], Any] = {}  # of the first ranks, in each of them: all ranks must make them together


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def prepare(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _serve(rank: int, size: int, port: int, sizes: Sequence[int], shapes: Any, pipe: Any) -> None:
    prepare(rank, size, port)
    groups = {count: dist.new_group(list(range(count))) for count in sizes}
    for shape in shapes:
        members = torch.arange(shape[0] * shape[1]).view(shape)
        meshes[shape] = DeviceMesh("cpu", members, mesh_dim_names=("ring", "heads"))
    while (task := pipe.recv()) is not None:
        function, count, args = task
        try:
            result = function(groups[count], *args) if rank < count else None
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, f"rank {rank} of {count}:\n{traceback.format_exc()}"))
    dist.destroy_process_group()


def context() -> Any:
    found = mp.get_context("forkserver")
    found.set_forkserver_preload(["flashtile.distributed", "flashtile.testing", "rank_pool"])
    return found


class Pool:
    """`size` ranks, a group of the first n of them for every n of `sizes`, and a mesh for every one of `shapes`."""

    def __init__(self, size: int, sizes: Sequence[int], shapes: Sequence[tuple[int, int]] = ()):
        ctx, port = context(), free_port()
        self.pipes, self.processes, self.is_broken = [], [], False
        for rank in range(size):
            ours, theirs = ctx.Pipe()
            process = ctx.Process(target=_serve, args=(rank, size, port, sizes, shapes, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], count: int, *args: Any) -> list[Any]:
        """function(group, *args) on each of the first `count` ranks; their results."""
        assert not self.is_broken, "an earlier task left ranks behind"
        for pipe in self.pipes[:count]:
            pipe.send((function, count, args))
        results: dict[int, Any] = {}
        failures, deadline = [], time.monotonic() + TIMEOUT
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes[:count])}
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=1):
                rank = waiting.pop(pipe)
                is_good, result = pipe.recv()
                if is_good:
                    results[rank] = result
                else:
                    failures.append(result)
                    deadline = min(deadline, time.monotonic() + 60)  # the others may wait for it
        if failures or waiting:
            self.is_broken = bool(waiting)
            failures += [f"rank {rank} of {count} hangs in {function.__name__}" for rank in waiting.values()]
            raise AssertionError("\n".join(failures))
        return [results[rank] for rank in range(count)]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(0 if self.is_broken else TIMEOUT)
            if process.is_alive():
                process.kill()
