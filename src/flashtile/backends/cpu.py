"""The CPU engine: from a call to the parameters of its plan, and one call into the C++ extension (csrc/cpu) that runs
it."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

from flashtile.backends import executor, native
from flashtile.backends.base import Backend, GradNeeds, Grads
from flashtile.backends.call import backward_tensors, layout_of, scalars_of, tensors_of, wanted_grads
from flashtile.backends.executor import Launch, Scalars, Splits
from flashtile.errors import dtype_name
from flashtile.plans.host import HostKey, arithmetic_of, host_plan
from flashtile.plans.params import WideParams
from flashtile.plans.plan import ENGINE_DTYPES, LaunchPlan
from flashtile.plans.spec import GRADS
from flashtile.problem import AttentionArgs, Problem, check_values, is_deterministic, shape_of
from flashtile.runtime import extension


class CpuBackend(Backend):
    name = "cpu"
    summary = "C++ for AVX-512, AVX2 or any processor, chosen at run time; memory linear in the sequence length"
    devices = ("cpu",)
    is_layout_exact = True

    def refuse(self, problem: Problem, op: str = "forward") -> str | None:
        if dtype_name(problem.dtype) not in ENGINE_DTYPES:
            return f"{dtype_name(problem.dtype)} is not among its dtypes ({', '.join(ENGINE_DTYPES)})"
        reason = extension.missing()
        if reason is None and extension.params_bytes() != ctypes.sizeof(WideParams):
            return "the C++ extension was built from other sources; `pip install .` builds it anew"
        return reason

    def plan_forward(self, args: AttentionArgs, problem: Problem) -> bool:
        return native.register_plan(native.FORWARD, _plan(args, tensors_of(args), None))

    def plan_backward(self, args: AttentionArgs, problem: Problem, needs: GradNeeds, has_dlse: bool) -> bool:
        plan = _plan(args, (*tensors_of(args), *("dlse",) * has_dlse), wanted_grads(args, needs))
        return native.register_plan(native.BACKWARD, plan)

    def forward(self, args: AttentionArgs, out: Tensor, lse: Tensor) -> None:
        args, spans = _with_spans(args)
        given = tensors_of(args) | {"out": out, "lse": lse}
        executor.execute_on_host(_launch(args, given, scalars_of(args)), _address(spans))

    def backward(
        self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads
    ) -> None:
        args, spans = _with_spans(args)
        given = backward_tensors(args, dout, dlse, out, lse, grads, is_for_gpu=False)
        num_splits = _num_splits(args)
        scalars = scalars_of(args) | {"num_splits": num_splits, "num_shares": num_splits if num_splits > 1 else 0}
        launch = _launch(args, given, scalars, tuple(name for name in GRADS if name in given))
        executor.execute_on_host(launch, _address(spans))

    def details(self, problem: Problem, op: str = "forward") -> dict[str, str]:
        return {"instructions": extension.instruction_set(), "arithmetic": arithmetic_of(dtype_name(problem.dtype))}


def _launch(
    args: AttentionArgs, given: dict[str, Tensor], scalars: Scalars, grads: tuple[str, ...] | None = None
) -> Launch:
    return Launch(_plan(args, given, grads), given, scalars, Splits(1, 1), "")


def _plan(args: AttentionArgs, tensors: Iterable[str], grads: tuple[str, ...] | None) -> LaunchPlan:
    """tensors: the names of those that are there."""
    bias = None if args.bias is None else dtype_name(args.bias.dtype)
    dtype, out_dtype = dtype_name(args.q.dtype), dtype_name(args.out_dtype or args.q.dtype)
    key = HostKey(dtype, out_dtype, bias, args.q.shape[-1], args.v.shape[-1], grads)
    return host_plan(key, layout_of(args, tensors))


def _has_lengths(args: AttentionArgs) -> bool:
    return any(tensor is not None for tensor in (args.cu_seqlens_q, args.seqused_k, args.leftpad_k, args.block_table))


def _with_spans(args: AttentionArgs) -> tuple[AttentionArgs, array[int] | None]:
    """The place of every sequence (csrc/cpu/engine.h: Span), checked, so that no value in an index tensor leads out of
    bounds."""
    if not _has_lengths(args):
        return args, None
    spans = check_values(args)
    if args.cu_seqlens_q is not None:
        args = args._replace(max_seqlen_q=max((span.seqlen_q for span in spans), default=0))
    return args, array("i", [number for span in spans for number in span])


def _address(spans: array[int] | None) -> int:
    return 0 if spans is None else spans.buffer_info()[0]


def _num_splits(args: AttentionArgs) -> int:
    """Returns over how many tasks of the backward pass the keys of a head are dealt out: one where there is a head for
    every thread, or where the result may not depend on their number."""
    shape = shape_of(args)
    num_tasks = shape.heads_kv * shape.batch
    if is_deterministic(args) or args.block_table is not None or num_tasks == 0:
        return 1
    return max(1, min(-(-torch.get_num_threads() // num_tasks), -(-shape.seqlen_k // 128)))
