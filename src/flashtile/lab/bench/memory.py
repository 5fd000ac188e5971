"""Peak memory of one call beyond what was allocated before it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(thunk: Callable[[], Any], device: str) -> int:
    """On a GPU from torch's allocator statistics; on the CPU from the profiler's memory events."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = thunk()
        torch.cuda.synchronize()
        del kept
        return int(torch.cuda.max_memory_allocated() - before)
    with _quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = thunk()
    del kept
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    events = [] if results is None else [event for event in results.events() if event.name() == "[memory]"]
    changes = [
        event.nbytes()
        for event in sorted(events, key=lambda event: event.start_ns())
        if "CPU" in str(event.device_type())
    ]
    running = highest = 0
    for change in changes:
        running += change
        highest = max(highest, running)
    return highest


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Silences stderr: the profiler of some builds prints to it from C++."""
    saved = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
