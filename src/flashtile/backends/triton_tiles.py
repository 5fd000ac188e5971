"""The tiles of the Triton kernels: which each call takes, by its dtype, head dims and GPU. triton.py launches them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from flashtile.backends.base import device_arch
from flashtile.plans.arch import arch_of
from flashtile.problem import Shape


@dataclass(frozen=True)
class Config:
    """Tile and launch configuration of a kernel."""

    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    num_stages: int  # depth of Triton's load pipeline


# Kernel -> element size in bytes -> largest padded head dim -> configuration, for GPUs with 227 KB of shared memory per
# block. Up to head dim 128 they are chosen from results/nvidia-h200/triton_tiles.csv, over full and causal calls;
# at 256 they are those that spill least. bwd_dbias was not timed. tools/tune_triton.py measures them.
CONFIGS: dict[str, dict[int, dict[int, Config]]] = {
    "fwd": {
        2: {64: Config(128, 64, 8, 3), 128: Config(64, 64, 4, 3), 256: Config(128, 64, 8, 2)},
        4: {64: Config(128, 64, 8, 2), 128: Config(128, 32, 8, 2), 256: Config(32, 16, 4, 2)},
    },
    "bwd_dkdv": {
        2: {64: Config(64, 64, 4, 2), 128: Config(64, 128, 8, 3), 256: Config(32, 64, 8, 2)},
        4: {64: Config(32, 128, 8, 2), 128: Config(32, 64, 8, 1), 256: Config(16, 16, 4, 1)},
    },
    "bwd_dq": {
        2: {64: Config(64, 64, 4, 3), 128: Config(128, 64, 8, 3), 256: Config(128, 32, 8, 2)},
        4: {64: Config(128, 32, 8, 2), 128: Config(64, 16, 4, 1), 256: Config(16, 16, 4, 1)},
    },
    "bwd_dbias": {
        2: {64: Config(64, 64, 4, 1), 128: Config(64, 64, 4, 1), 256: Config(32, 32, 4, 1)},
        4: {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
    },
}
# For every other GPU: they fit into 99 KB of shared memory. Compiled for some, never run on one
SMALL_CONFIGS: dict[str, dict[int, dict[int, Config]]] = {
    "fwd": {
        2: {64: Config(64, 64, 4, 2), 128: Config(64, 32, 4, 2), 256: Config(32, 32, 4, 1)},
        4: {64: Config(32, 32, 4, 2), 128: Config(32, 16, 4, 1), 256: Config(16, 16, 4, 1)},
    },
    "bwd_dkdv": {
        2: {64: Config(32, 64, 4, 2), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
        4: {64: Config(16, 32, 4, 1), 128: Config(16, 16, 4, 1), 256: Config(16, 16, 4, 1)},
    },
    "bwd_dq": {
        2: {64: Config(64, 32, 4, 2), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
        4: {64: Config(32, 16, 4, 1), 128: Config(16, 16, 4, 1), 256: Config(16, 16, 4, 1)},
    },
    "bwd_dbias": {
        2: {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
        4: {64: Config(16, 16, 4, 1), 128: Config(16, 16, 4, 1), 256: Config(16, 16, 4, 1)},
    },
}
_LARGE_SHARED_BYTES = 227 * 1024


def capability_of(arch: str) -> tuple[int, int]:
    """Returns the compute capability of a name such as sm_80."""
    return divmod(int(arch.removeprefix("sm_")), 10)


@functools.cache
def _fits_tuned_tiles(device: torch.device, arch_name: str = "") -> bool:
    """True if a block may use as much shared memory as the tuned tiles need. `arch_name`: as in tile_config."""
    if device.type == "cpu":
        return True  # Triton's interpreter, which has no limit
    if arch_name:
        arch = arch_of(*capability_of(arch_name))
    else:
        arch = device_arch(torch.cuda.current_device() if device.index is None else device.index)
    return arch is not None and arch.shared_bytes >= _LARGE_SHARED_BYTES


def padded_head_dim(head_dim: int) -> int:
    """Returns the head dim of the tile: a power of two, at least 32.

    A head dim of 16 is padded to 32: with 8 warps Triton 3.6 compiles a product of 64 rows and 16 columns that reads
    past its tile.
    """
    return max(32, 1 << (head_dim - 1).bit_length())


def tile_config(
    kernel: str,
    dtype: torch.dtype,
    shape: Shape,
    device: torch.device,
    has_score_tensors: bool,
    is_aligned16: bool,
    arch: str = "",
) -> Config:
    """Returns the tile of a kernel for such a call. `arch`: a GPU to ask about, such as sm_80, which need not be here;
    empty: the device."""
    table = CONFIGS if _fits_tuned_tiles(device, arch) else SMALL_CONFIGS
    padded = padded_head_dim(max(shape.head_dim, shape.head_dim_v))
    config = next(config for limit, config in table[kernel][dtype.itemsize].items() if padded <= limit)
    if dtype.itemsize == 2 and not (
        is_aligned16 and padded_head_dim(shape.head_dim) == padded_head_dim(shape.head_dim_v)
    ):
        # 2-byte elements that cannot be copied 16 bytes at a time pass through registers. Triton 3.6 miscompiles wgmma
        # products of such tiles, most often if K and V differ in size. It uses wgmma for tiles of 64 rows or more,
        # and mma.sync where what the block owns is 32
        owned = "block_n" if kernel == "bwd_dkdv" else "block_m"
        config = replace(config, num_warps=4, **{owned: 32})
    if kernel == "fwd" and shape.seqlen_q <= 16:
        # Few queries, as in decoding: a larger tile would be mostly padding
        config = replace(config, block_m=16, num_warps=4)
    if has_score_tensors:
        # Tiles of bias and mask need shared memory too
        config = replace(config, num_stages=max(1, config.num_stages - 1))
    return config
