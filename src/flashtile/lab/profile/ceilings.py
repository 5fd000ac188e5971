"""The ceilings of the roofline, measured on the current GPU: FMA and tensor-core rate, bandwidth of device memory, L2
and shared memory."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from flashtile.lab.bench import device, timing
from flashtile.lab.profile.gpu import current_arch
from flashtile.plans.arch import Arch
from flashtile.runtime import cache, driver
from flashtile.runtime.nvrtc import Compiled

_NUM_THREADS, _NUM_FMAS, _NUM_PRODUCTS, _NUM_READS = 256, 512, 16, 32
_BLOCKS_PER_MULTIPROCESSOR, _ROUNDS = 8, 2000
_COPY_BYTES = 2**31
_L2_SHARE = 0.25  # of L2 that its kernel reads
_BUDGET_S = 0.06
_TENSOR_DTYPE = "bfloat16"
_SOURCE = Path(__file__).with_name("ceilings.cu")
KERNELS = ("fma_kernel", "shared_read_kernel", "l2_read_kernel", "tensor_kernel")


@dataclass(frozen=True)
class Ceilings:
    """The highest rates that were reached, by the names of the columns of results."""

    fma_ceiling_tflops: float  # an FMA counts as two operations
    dram_ceiling_gb_per_s: float  # bytes read plus bytes written by a copy
    shared_ceiling_gb_per_s: float  # of 16-byte reads
    l2_ceiling_gb_per_s: float = 0.0  # of 16-byte reads past L1
    tensor_ceiling_tflops: float = 0.0  # bfloat16 products into float32; 0: this GPU has no such tensor cores


class _Params(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("source_size", ctypes.c_int32),
        ("num_rounds", ctypes.c_int32),
    )


def measure() -> Ceilings:
    """Takes the best of several rounds: a ceiling is the highest rate that was reached."""
    arch = current_arch()
    source = torch.empty(_COPY_BYTES // 4, device="cuda").normal_()
    target = torch.empty_like(source)
    num_blocks = _BLOCKS_PER_MULTIPROCESSOR * driver.multiprocessor_count(torch.cuda.current_device())
    words = int(_L2_SHARE * device.cache_bytes("cuda")) // 16
    num_rounds = dict.fromkeys(KERNELS, _ROUNDS) | {"l2_read_kernel": 40, "tensor_kernel": 400}
    amounts = {name: _amount(name, arch) * num_blocks * num_rounds[name] for name in KERNELS}
    if _TENSOR_DTYPE not in arch.mma_dtypes:
        del amounts["tensor_kernel"]
    out = torch.zeros(1, device="cuda")
    thunks: dict[str, timing.Thunk] = {
        name: partial(
            _launch, name, num_blocks, _Params(out.data_ptr(), source.data_ptr(), words, num_rounds[name]), arch
        )
        for name in amounts
    }
    amounts["copy"], thunks["copy"] = 2.0 * _COPY_BYTES, partial(target.copy_, source)
    contenders = [timing.Contender(name, [thunk], timing.once(thunk, "cuda")[1]) for name, thunk in thunks.items()]
    timing.interleave(contenders, "cuda", _BUDGET_S)
    rates = {one.name: amounts[one.name] / min(one.seconds) for one in contenders}
    return Ceilings(
        fma_ceiling_tflops=rates["fma_kernel"] / 1e12,
        dram_ceiling_gb_per_s=rates["copy"] / 1e9,
        shared_ceiling_gb_per_s=rates["shared_read_kernel"] / 1e9,
        l2_ceiling_gb_per_s=rates["l2_read_kernel"] / 1e9,
        tensor_ceiling_tflops=rates.get("tensor_kernel", 0.0) / 1e12,
    )


def _amount(name: str, arch: Arch) -> float:
    """Operations or bytes of one block in one round."""
    if name == "tensor_kernel":
        units, size = (_NUM_THREADS // 128, 64 * 256 * 16) if arch.has_wgmma else (_NUM_THREADS // 32, 16 * 8 * 16)
        return 2.0 * units * size * _NUM_PRODUCTS
    return _NUM_THREADS * (2.0 * _NUM_FMAS if name == "fma_kernel" else 16.0 * _NUM_READS)


def _launch(name: str, num_blocks: int, params: _Params, arch: Arch) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    _function(name, arch).launch((num_blocks, 1, 1), (_NUM_THREADS, 1, 1), 0, stream, params)


@functools.cache
def _function(name: str, arch: Arch) -> driver.Function:
    compiled = compile_kernels(arch)
    return driver.load(compiled.cubin).function(compiled.symbols[name])


def compile_kernels(arch: Arch) -> Compiled:
    names = KERNELS if _TENSOR_DTYPE in arch.mma_dtypes else KERNELS[:-1]
    defines = [
        f"NUM_THREADS={_NUM_THREADS}",
        f"NUM_FMAS={_NUM_FMAS}",
        f"NUM_PRODUCTS={_NUM_PRODUCTS}",
        f"NUM_READS={_NUM_READS}",
        f"HAS_WGMMA={int(arch.has_wgmma)}",
        f"HAS_TENSOR={int(_TENSOR_DTYPE in arch.mma_dtypes)}",
    ]
    return cache.compile_cached(_SOURCE.read_text(encoding="utf-8"), arch.name, names, defines)
