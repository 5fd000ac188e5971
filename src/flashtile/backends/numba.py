"""FlashAttention's forward pass as a CUDA kernel in Python, compiled by Numba.

The kernel is in numba_kernel.py, which is imported on first use because Numba is optional. It is written to be read and
to cross-check the other backends, and has to be asked for by name. With NUMBA_ENABLE_CUDASIM=1 it runs on the CPU, in
Numba's simulator.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.base import Backend, Grads
from flashtile.backends.segments import Segment, segments
from flashtile.errors import Unsupported, dtype_name
from flashtile.problem import AttentionArgs, Problem, key_window, softmax_scale

MAX_HEAD_DIM = 128


class NumbaBackend(Backend):
    name = "numba"
    summary = "the tiled algorithm as a Numba CUDA kernel: forward, float32, causal and window; only taken by name"
    devices = ("cuda", "cpu")
    is_automatic = False

    def refuse(self, problem: Problem, op: str = "forward") -> str | None:
        largest = max(problem.shape.head_dim, problem.shape.head_dim_v)
        options = {
            "a mask": problem.has_mask,
            "a bias": problem.bias_dtype is not None,
            "ALiBi": problem.has_alibi,
            "sinks": problem.has_sinks,
            "softcap": problem.softcap > 0.0,
            "dropout": problem.dropout_p > 0.0,
        }
        asked = [name for name, is_on in options.items() if is_on]
        if problem.dtype != torch.float32 or problem.out_dtype != torch.float32:
            return (
                f"it computes and stores float32, and this is {dtype_name(problem.dtype)} to "
                f"{dtype_name(problem.out_dtype)}"
            )
        if op == "backward":
            return "it has no backward pass"
        if asked:
            return f"it does not know {' and '.join(asked)}"
        if largest > MAX_HEAD_DIM:
            return f"head_dim {largest} is over its {MAX_HEAD_DIM}"
        return missing(problem.device)

    def forward(self, args: AttentionArgs, out: Tensor, lse: Tensor) -> None:
        for segment in segments(args):
            _forward_segment(args, segment, segment.queries(out), segment.stats(lse))

    def backward(
        self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads
    ) -> None:
        raise Unsupported("backend: got 'numba' in a backward pass; accepted: another one. It has no backward pass.")

    def details(self, problem: Problem, op: str = "forward") -> dict[str, str]:
        return {"compiled by": "Numba's simulator, not at all" if problem.device == "cpu" else "Numba"}


@functools.cache
def missing(device: str) -> str | None:
    """Returns why Numba cannot run on tensors of the device, or None. Imports Numba only if it may run there."""
    if device == "cpu" and os.environ.get("NUMBA_ENABLE_CUDASIM", "0") in ("", "0"):
        return "on the CPU it runs in Numba's simulator only; set NUMBA_ENABLE_CUDASIM=1 before Numba is imported"
    try:
        from numba import config, cuda
    except Exception as error:  # SystemError, ImportError or AttributeError with a NumPy that Numba does not support
        return _incompatible("be imported", error)
    if config.ENABLE_CUDASIM:
        return (
            None if device == "cpu" else "Numba's simulator is on (NUMBA_ENABLE_CUDASIM=1) and takes tensors on the CPU"
        )
    if device == "cpu":
        return "Numba was imported before NUMBA_ENABLE_CUDASIM=1 was set, so its simulator is off"
    if not cuda.is_available():
        return f"Numba finds no usable CUDA: {_cuda_error(cuda)}"
    try:
        cuda.compile_ptx_for_current_device(_empty_kernel, ())
    except (ImportError, AttributeError, SystemError) as error:  # Numba imports parts of itself on first compilation
        return _incompatible("compile", error)
    except Exception as error:
        return f"Numba cannot compile here: {' '.join(str(error).split())}"
    return None


def _incompatible(verb: str, error: Exception) -> str:
    import numpy

    got, hint = " ".join(str(error).split()), "pip install 'flashtile[numba]'; Numba 0.68 takes numpy up to 2.4"
    return f"numba cannot {verb} beside numpy {numpy.__version__}: {got}. {hint}"


def _empty_kernel() -> None:
    pass


def _cuda_error(cuda: Any) -> str:
    error = cuda.cuda_error()
    return " ".join(str(error).split()) if error is not None else "no CUDA toolkit with NVVM; set CUDA_HOME"


def _forward_segment(args: AttentionArgs, segment: Segment, out: Tensor, lse: Tensor) -> None:
    """Fills `out` (batch, heads, seqlen_q, head_dim_v) and `lse` (batch, heads, seqlen_q) of one segment."""
    q, k, v = segment.queries(args.q), segment.keys(args.k), segment.keys(args.v)
    batch, heads, seqlen_q, head_dim = q.shape
    from flashtile.backends.numba_kernel import TILE, kernel_for

    kernel = kernel_for(max(head_dim, v.shape[-1]))
    num_blocks = batch * heads * -(-seqlen_q // TILE)
    if num_blocks == 0:
        return
    left, right = key_window(args)
    numbers = (softmax_scale(args), left, right, segment.offset)
    if q.device.type == "cpu":
        # The simulator takes contiguous arrays only
        buffers = [tensor.detach().contiguous() for tensor in (q, k, v, out, lse)]
        kernel[num_blocks, (TILE, TILE)](*(buffer.numpy() for buffer in buffers), *numbers)
        out.copy_(buffers[3])
        lse.copy_(buffers[4])
        return
    from numba import cuda

    with torch.cuda.device(q.device), cuda.gpus[q.device.index or 0], warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Numba warns about grids smaller than the GPU
        stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream)
        arrays = [cuda.as_cuda_array(tensor.detach(), sync=False) for tensor in (q, k, v, out, lse)]
        kernel[num_blocks, (TILE, TILE), stream](*arrays, *numbers)
