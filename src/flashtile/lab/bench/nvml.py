"""Clock and power of the GPU while calls run, by NVML (the package nvidia-ml-py, module pynvml)."""

from __future__ import annotations

import importlib
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sample:
    """One look at the sensors."""

    clock_mhz: float  # of the multiprocessors
    power_w: float  # of the board


@dataclass
class Probe:
    """Samples the sensors from a thread of its own. Without a reader it finds nothing."""

    read: Callable[[], Sample] | None = None
    complaint: str = ""  # why there is no reader, or why it stopped

    @contextmanager
    def during(self, period_s: float) -> Iterator[list[Sample]]:
        """Inside, the list grows by a sample in every period, the first at its end."""
        found, is_done = list[Sample](), threading.Event()
        if self.read is None:
            yield found
            return
        thread = threading.Thread(target=self._run, args=(self.read, found, is_done, period_s), daemon=True)
        thread.start()
        try:
            yield found
        finally:
            is_done.set()
            thread.join()

    def _run(self, read: Callable[[], Sample], found: list[Sample], is_done: threading.Event, period_s: float) -> None:
        while not is_done.wait(period_s):
            try:
                found.append(read())
            except Exception as error:  # NVML's own type, of a module that need not exist
                self.read, self.complaint = None, f"NVML stopped answering: {error}"
                return


def clock_mhz(samples: Sequence[Sample]) -> float | None:
    """Returns the median clock; None without a sample."""
    return statistics.median(sample.clock_mhz for sample in samples) if samples else None


def power_w(samples: Sequence[Sample]) -> float | None:
    """Returns the mean power, which times a duration is the energy; None without a sample."""
    return statistics.fmean(sample.power_w for sample in samples) if samples else None


def open_probe(device: str) -> Probe:
    """Returns a probe of torch's current GPU. On the CPU, and where NVML does not answer, it has no reader."""
    if device != "cuda":
        return Probe()
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return Probe(complaint="clock and power are empty: pip install nvidia-ml-py to read them")
    try:
        # By its UUID: CUDA_VISIBLE_DEVICES renumbers the GPUs for torch, not for NVML
        return Probe(reader(nvml, f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"))
    except Exception as error:  # NVML's own type
        return Probe(complaint=f"clock and power are empty: NVML does not answer ({error})")


def reader(nvml: Any, uuid: str) -> Callable[[], Sample]:
    """Returns the function that reads the GPU of that UUID. Power is the momentary one where the driver has it;
    elsewhere NVML's usual reading, which is an average over up to a second."""
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    field = getattr(nvml, "NVML_FI_DEV_POWER_INSTANT", None)

    def momentary_w() -> float | None:
        if field is None:
            return None
        value = nvml.nvmlDeviceGetFieldValues(handle, [field])[0]
        return value.value.uiVal / 1e3 if value.nvmlReturn == nvml.NVML_SUCCESS else None

    has_momentary = momentary_w() is not None

    def read() -> Sample:
        watts = momentary_w() if has_momentary else None
        if watts is None:
            watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
        return Sample(float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)), watts)

    read()
    return read
