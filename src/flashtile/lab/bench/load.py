"""Whether other processes kept the machine busy while a benchmark ran, so that its times are not to be trusted."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_MAX_WAIT_SHARE = 0.1  # of the time in which a thread could have run
_MAX_GPU_PERCENT = 10  # busy before the first call


@dataclass(frozen=True)
class _Times:
    """Seconds that the threads of this process ran, and that they waited for a core; cores and stolen time."""

    running: float
    waiting: float
    total: float
    stolen: float


class Load:
    """Measures from its creation on. Knows nothing where the system does not say: outside of Linux."""

    def __init__(self, device: str) -> None:
        self._gpu_percent = _gpu_percent() if device == "cuda" else 0.0
        self._start = _times()

    def remark(self) -> str:
        """Why the times are not to be trusted, or an empty text."""
        now, start = _times(), self._start
        running, waiting = now.running - start.running, now.waiting - start.waiting
        total, stolen = now.total - start.total, now.stolen - start.stolen
        reasons = []
        if waiting > _MAX_WAIT_SHARE * (running + waiting) > 0:
            share = waiting / (running + waiting)
            reasons.append(f"threads of this run waited for a core {share:.0%} of the time in which they could run")
        if stolen > _MAX_WAIT_SHARE * total > 0:
            reasons.append(f"the host took {stolen / total:.0%} of the time of the cores")
        if self._gpu_percent > _MAX_GPU_PERCENT:
            reasons.append(f"the GPU was {self._gpu_percent:.0f} % busy before the run")
        if not reasons:
            return ""
        return f"The machine was too busy to trust these times: {'; '.join(reasons)}. Measure again when it is idle."


def _times() -> _Times:
    running = waiting = total = stolen = 0.0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        try:
            ran_ns, waited_ns, _ = thread.read_text().split()
        except (OSError, ValueError):  # the thread ended, or the kernel counts nothing
            continue
        running, waiting = running + int(ran_ns) / 1e9, waiting + int(waited_ns) / 1e9
    try:
        # user nice system idle iowait irq softirq steal
        counts = [int(count) for count in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        total, stolen = float(sum(counts)), float(counts[7])
    except (OSError, ValueError, IndexError):
        pass
    return _Times(running, waiting, total, stolen)


def _gpu_percent() -> float:
    """How busy the GPU is now, by nvidia-smi; 0 where that does not say."""
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return max((float(line) for line in said.split()), default=0.0)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0.0
