"""The ceilings of the roofline, measured on the current GPU: FMA rate, device and shared memory bandwidth."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from functools import partial

import torch

from flashtile.bench import timing
from flashtile.ladder.launcher import current_arch
from flashtile.ladder.rungs import FOLDER
from flashtile.runtime import cache, driver

_NUM_THREADS, _NUM_FMAS, _NUM_READS = 256, 512, 32
_BLOCKS_PER_MULTIPROCESSOR, _ROUNDS = 8, 2000
_COPY_BYTES = 2**31
_BUDGET_S = 0.06


@dataclass(frozen=True)
class Ceilings:
    fma_tflops: float  # an FMA counts as two operations
    dram_gb_per_s: float  # bytes read plus bytes written by a copy
    shared_gb_per_s: float  # of 16-byte reads


class _Params(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("num_rounds", ctypes.c_int32))


def measure() -> Ceilings:
    """Takes the best of several rounds: a ceiling is the highest rate that was reached."""
    out = torch.zeros(1, device="cuda")
    source = torch.empty(_COPY_BYTES // 4, device="cuda").normal_()
    target = torch.empty_like(source)
    num_blocks = _BLOCKS_PER_MULTIPROCESSOR * driver.multiprocessor_count(torch.cuda.current_device())
    threads = num_blocks * _NUM_THREADS * _ROUNDS
    amounts = {"fma_kernel": 2.0 * threads * _NUM_FMAS, "shared_read_kernel": 16.0 * threads * _NUM_READS}
    thunks: dict[str, timing.Thunk] = {
        name: partial(_launch, name, num_blocks, _Params(out.data_ptr(), _ROUNDS)) for name in amounts
    }
    amounts["copy"], thunks["copy"] = 2.0 * _COPY_BYTES, partial(target.copy_, source)
    contenders = [timing.Contender(name, [thunk], timing.once(thunk, "cuda")[1]) for name, thunk in thunks.items()]
    timing.interleave(contenders, "cuda", _BUDGET_S)
    rates = {one.name: amounts[one.name] / min(one.seconds) for one in contenders}
    return Ceilings(rates["fma_kernel"] / 1e12, rates["copy"] / 1e9, rates["shared_read_kernel"] / 1e9)


def _launch(name: str, num_blocks: int, params: _Params) -> None:
    _function(name).launch((num_blocks, 1, 1), (_NUM_THREADS, 1, 1), 0, torch.cuda.current_stream().cuda_stream, params)


@functools.cache
def _function(name: str) -> driver.Function:
    defines = [f"NUM_THREADS={_NUM_THREADS}", f"NUM_FMAS={_NUM_FMAS}", f"NUM_READS={_NUM_READS}"]
    compiled = cache.compile_cached(
        (FOLDER / "ceilings.cu").read_text(encoding="utf-8"), current_arch().name, [name], defines
    )
    return driver.load(compiled.cubin).function(compiled.symbols[name])
