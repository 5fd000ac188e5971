"""The CPU engine: from a call to filled parameters, scratch for the backward pass, and one call into the C++ extension."""

from __future__ import annotations

import ctypes
from array import array

import torch
from torch import Tensor

from flashtile.backends.base import Backend, Grads
from flashtile.backends.cuda import _fill, _rows
from flashtile.errors import dtype_name
from flashtile.kernels.params import Params
from flashtile.problem import AttentionArgs, Problem, check_values, is_deterministic
from flashtile.runtime import extension

# csrc/cpu/engine.h: Element
_ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_PAD = 16  # csrc/cpu/tiles.h: kPad


class CpuBackend(Backend):
    name = "cpu"
    summary = "C++ for AVX2, AVX-512 and others, chosen at run time; memory linear in the sequence length"
    devices = ("cpu",)

    def refuse(self, problem: Problem) -> str | None:
        if problem.dtype not in _ELEMENTS:
            return f"{dtype_name(problem.dtype)} is not among its dtypes ({', '.join(dtype_name(dtype) for dtype in _ELEMENTS)})"
        return extension.missing()

    def forward(self, args: AttentionArgs, out: Tensor, lse: Tensor) -> None:
        params, _ = _fill(args, out, lse)
        extension.cpu_forward(*_call(args, params, out, args.q.dtype))

    def backward(self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads) -> None:
        dout, out = _rows(dout.to(out.dtype)), _rows(out)
        lse, dlse = lse.contiguous(), None if dlse is None else dlse.to(torch.float32).contiguous()
        dk, dv = grads.dk, grads.dv
        if args.block_table is not None:
            # Sequences may share pages: their shares add up, and are rounded once
            dk, dv = (None if grad is None else torch.zeros(grad.shape, dtype=torch.float32) for grad in (dk, dv))
        elif args.cu_seqlens_q is not None or args.seqused_k is not None or args.leftpad_k is not None:
            # Keys outside every sequence have no owner
            for grad in (dk, dv):
                if grad is not None:
                    grad.zero_()
        lse_log2, delta = torch.empty_like(lse), torch.empty_like(lse)
        dbias = None if grads.dbias is None else torch.empty(grads.dbias.shape, dtype=grads.dbias.dtype)
        dsinks = None if grads.dsinks is None else torch.empty(grads.dsinks.shape, dtype=torch.float32)
        rows = {name: grad for name, grad in (("dq", grads.dq), ("dk", dk), ("dv", dv)) if grad is not None}
        params, _ = _fill(args, out, lse, dout=dout, **rows)
        for name, tensor in (("dlse", dlse), ("lse_log2", lse_log2), ("delta", delta), ("dbias", dbias), ("dsinks", dsinks)):
            setattr(params, name, None if tensor is None else tensor.data_ptr())
        params.num_splits = _num_splits(args, params)
        dims = -(-params.head_dim // _PAD) * _PAD
        partial = torch.empty(params.num_splits * params.lse_size * dims if params.num_splits > 1 else 0, dtype=torch.float32)
        params.partial_out = partial.data_ptr()
        extension.cpu_backward(*_call(args, params, out, torch.float32 if args.block_table is not None else args.q.dtype))
        grads.fill(Grads(None, *((dk, dv) if args.block_table is not None else (None, None)), dbias, dsinks))

    def details(self, problem: Problem) -> dict[str, str]:
        return {"instructions": extension.instruction_set(), "arithmetic": "float32"}


def _num_splits(args: AttentionArgs, params: Params) -> int:
    """Over how many tasks the keys of a head are dealt out: one if there is a head for every thread or the result may not depend on that."""
    num_tasks = params.heads_kv * params.batch
    if is_deterministic(args) or args.block_table is not None or num_tasks == 0:
        return 1
    return max(1, min(-(-torch.get_num_threads() // num_tasks), -(-params.seqlen_k // 128)))


def _call(args: AttentionArgs, params: Params, out: Tensor, key_grad: torch.dtype) -> tuple[int | str, ...]:
    """The arguments of the C++ functions (csrc/module.cpp). Index tensors are checked, so that bad values never lead out of bounds."""
    spans = 0
    if any(tensor is not None for tensor in (args.cu_seqlens_q, args.seqused_k, args.leftpad_k, args.block_table)):
        params.spans = array("i", [number for span in check_values(args) for number in span])
        spans = params.spans.buffer_info()[0]
        params.seqlen_q = max(params.spans[1::4], default=0)
    bias = torch.float32 if args.bias is None else args.bias.dtype
    return ctypes.addressof(params), spans, *(_ELEMENTS[dtype] for dtype in (args.q.dtype, out.dtype, bias, key_grad)), extension.instruction_set()
