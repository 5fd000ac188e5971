"""The Hopper family: what its instructions mean, bit by bit, and its kernels."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from flashtile.runtime import driver, nvrtc, toolchain

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs a GPU of compute capability 9.0")
PROOF = (Path(__file__).parent / "wgmma_proof.cuh").read_text()


def product(a: torch.Tensor, b: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """A B where B is transposed in shared memory and A in registers, else A B^T, by one warpgroup."""
    columns, slabs = (b.shape[1] if is_transposed else b.shape[0]), a.shape[1] // 64
    name = {torch.bfloat16: "bf16_t", torch.float16: "half_t"}[a.dtype]
    entry = f"flashtile::wgmma_proof_kernel<flashtile::{name}, {columns}, {slabs}, {str(is_transposed).lower()}>"
    compiled = nvrtc.compile_source(toolchain.find(), PROOF, "sm_90a", [entry])
    function = driver.load(compiled.cubin).function(compiled.symbols[entry])
    d = torch.full((64, columns), float("nan"), device="cuda")
    image = b""
    for tensor in (a, b):
        sizes, strides = (tensor.shape[1], tensor.shape[0], 1, 1), (2 * tensor.stride(0), 16, 16)
        tensor_map = driver.TensorMap(str(a.dtype).removeprefix("torch."), sizes, strides, (64, tensor.shape[0], 1, 1))
        image += tensor_map.encode(tensor.data_ptr())
    image = ctypes.create_string_buffer(image + d.data_ptr().to_bytes(8, "little"))
    slabs_b = -(-b.shape[1] // 64)
    shared_bytes = 2 * 64 * (64 * slabs + b.shape[0] * slabs_b) + 64
    function.set_shared_bytes(0, shared_bytes)
    function.launch((1, 1, 1), (128, 1, 1), shared_bytes, torch.cuda.current_stream().cuda_stream, ctypes.addressof(image))
    torch.cuda.synchronize()
    return d


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slabs", [1, 2])
@pytest.mark.parametrize("columns", [64, 80, 96, 128, 176, 192, 256])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_descriptors(dtype: torch.dtype, slabs: int, columns: int, is_transposed: bool) -> None:
    """Small integers: the product is exact, so that one wrong element is seen."""
    torch.manual_seed(slabs * columns)
    a = torch.randint(-4, 5, (64, 64 * slabs), device="cuda").to(dtype)
    b = torch.randint(-4, 5, (64 * slabs, columns) if is_transposed else (columns, 64 * slabs), device="cuda").to(dtype)
    expected = a.double() @ (b.double() if is_transposed else b.double().T)
    assert torch.equal(product(a, b, is_transposed).double(), expected)
