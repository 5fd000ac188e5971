"""Which backend runs a problem, and why not the others.

Backends stand in order of preference. Selection takes the first automatic one that does not refuse; when that is not the
first one meant for the device, a slower backend serves, and the caller hears about it once per reason.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

from flashtile.backends.base import Backend
from flashtile.backends.cpu import CpuBackend
from flashtile.backends.cuda import CudaBackend
from flashtile.backends.numba import NumbaBackend
from flashtile.backends.reference import ReferenceBackend
from flashtile.backends.tiled import TiledBackend
from flashtile.backends.triton import TritonBackend
from flashtile.errors import SlowPathWarning, Unsupported, caller_stacklevel, dtype_name, value_error
from flashtile.problem import Problem

BACKENDS: list[Backend] = [CudaBackend(), TritonBackend(), CpuBackend(), TiledBackend(), NumbaBackend(), ReferenceBackend()]

_warned: set[str] = set()


def names() -> list[str]:
    return [backend.name for backend in BACKENDS]


def find(name: str) -> Backend:
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise value_error("backend", repr(name), "None or one of " + ", ".join(repr(known) for known in names()))


def refusal(backend: Backend, problem: Problem) -> str | None:
    if problem.device not in backend.devices:
        return f"it runs on {' and '.join(backend.devices)}, and q is on {problem.device}"
    return backend.refuse(problem)


def choose(problem: Problem, name: str | None) -> tuple[Backend, list[str]]:
    """The backend for the problem, the one asked for or the first that takes it, and why faster ones do not."""
    if name is not None:
        backend = find(name)
        reason = refusal(backend, problem)
        if reason is not None:
            raise Unsupported(f"backend: got {name!r}, which refuses: {reason}. accepted: None, or another of {', '.join(names())}.")
        return backend, []
    reasons: list[str] = []
    for backend in BACKENDS:
        if not backend.is_automatic:
            continue
        reason = refusal(backend, problem)
        if reason is None:
            return backend, [f"{slow}; {backend.name!r} serves instead" for slow in reasons]
        if problem.device in backend.devices:
            reasons.append(f"{backend.name!r} refuses: {reason}")
    raise Unsupported("no backend takes this call. " + "; ".join(reasons or [f"none runs on {problem.device}"]))


def select(problem: Problem, name: str | None) -> Backend:
    """The backend that will run, after saying so if it is a slower one."""
    backend, reasons = choose(problem, name)
    for reason in reasons:
        announce_slow_path(reason)
    return backend


def announce_slow_path(reason: str) -> None:
    """A slower way than the best serves a call: an error in strict mode, else one warning per reason."""
    if is_strict():
        raise Unsupported(f"{reason} (FLASHTILE_STRICT=1 forbids slower paths).")
    if reason not in _warned:
        warnings.warn(reason, SlowPathWarning, stacklevel=caller_stacklevel())
        _warned.add(reason)


def is_strict() -> bool:
    return os.environ.get("FLASHTILE_STRICT", "0") not in ("", "0")


@dataclass(frozen=True)
class Explanation:
    """What would run and why: the answer of `flashtile.explain`. Printing it gives the readable form."""

    problem: Problem
    backend: str
    details: dict[str, str]
    refusals: dict[str, str]  # every other backend, with its reason
    slow_paths: tuple[str, ...]  # what a warning, or in strict mode an error, would say

    def __str__(self) -> str:
        problem, shape = self.problem, self.problem.shape
        options = {
            "causal": problem.causal if problem.causal != "none" else "",
            "window": str(problem.window) if problem.window != ((-1, -1) if problem.causal == "none" else (-1, 0)) else "",
            "softcap": str(problem.softcap) if problem.softcap else "",
            "dropout": str(problem.dropout_p) if problem.dropout_p else "",
            "mask": "yes" if problem.has_mask else "",
            "bias": dtype_name(problem.bias_dtype) if problem.bias_dtype else "",
            "alibi": "yes" if problem.has_alibi else "",
            "sinks": "yes" if problem.has_sinks else "",
            "varlen": "yes" if problem.is_varlen else "",
            "key lengths": "yes" if problem.has_key_lengths else "",
            "page size": str(problem.page_size) if problem.page_size else "",
            "deterministic": "yes" if problem.deterministic else "",
        }
        given = ", ".join(f"{name} {value}" for name, value in options.items() if value)
        passes = "forward and backward" if problem.needs_grad else "forward"
        lines = [
            f"problem   {dtype_name(problem.dtype)} on {problem.device}, layout {problem.layout}, {passes}",
            f"sizes     batch {shape.batch}, heads {shape.heads} over {shape.heads_kv}, seqlen {shape.seqlen_q} x {shape.seqlen_k}, "
            f"head_dim {shape.head_dim} / {shape.head_dim_v}",
            f"options   scale {problem.scale:.4g}" + (f", {given}" if given else ""),
            f"backend   {self.backend}",
            *(f"  {name}: {value}" for name, value in self.details.items()),
            *(f"not       {name}: {reason}" for name, reason in self.refusals.items()),
            *(f"slow      {reason}" for reason in self.slow_paths),
        ]
        return "\n".join(lines)


def explain(problem: Problem, name: str | None) -> Explanation:
    chosen, slow = choose(problem, name)
    refusals = {}
    for backend in BACKENDS:
        if backend is chosen:
            continue
        reason = refusal(backend, problem)
        if reason is None:
            reason = f"{chosen.name!r} was asked for" if name is not None else f"{chosen.name!r} comes first"
            if not backend.is_automatic:
                reason = f"only taken by name: {backend.summary}"
        refusals[backend.name] = reason
    return Explanation(problem, chosen.name, chosen.details(problem), refusals, tuple(slow))
