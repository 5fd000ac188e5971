"""Choice of the backend that runs an op of a problem, and why not the others.

Of the automatic backends that do not refuse, the fastest is taken by families/speeds.csv, forward and backward each.
One whose time is not known keeps its place in the order below. A call that is served more than speeds.SLOW times slower
than the fastest known way, torch's kernels among them, warns once per reason.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

from flashtile import families, markup
from flashtile.backends.base import Backend, kind_of
from flashtile.backends.cpu import CpuBackend
from flashtile.backends.cuda import CudaBackend
from flashtile.backends.numba import NumbaBackend
from flashtile.backends.reference import ReferenceBackend
from flashtile.backends.tiled import TiledBackend
from flashtile.backends.triton import TritonBackend
from flashtile.errors import SlowPathWarning, Unsupported, caller_stacklevel, dtype_name, is_switched_on, value_error
from flashtile.families import speeds
from flashtile.problem import Problem

BACKENDS: list[Backend] = [
    CudaBackend(),
    TritonBackend(),
    CpuBackend(),
    TiledBackend(),
    NumbaBackend(),
    ReferenceBackend(),
]

_warned: set[str] = set()


def names() -> list[str]:
    return [backend.name for backend in BACKENDS]


def find(name: str) -> Backend:
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise value_error("backend", repr(name), "None or one of " + ", ".join(repr(known) for known in names()))


def refusal(backend: Backend, problem: Problem) -> str | None:
    """Returns why the backend does not take the problem, in the backward pass either if one will follow, or None."""
    if problem.device not in backend.devices:
        return f"it runs on {' and '.join(backend.devices)}, and q is on {problem.device}"
    ops = ("backward", "forward") if problem.needs_grad else ("forward",)
    return next((reason for op in ops if (reason := backend.refuse(problem, op)) is not None), None)


def choose(problem: Problem, name: str | None, op: str = "forward") -> tuple[Backend, list[str]]:
    """The backend for an op of the problem: the one asked for, or the fastest that takes it; and why it is slow, if it
    is."""
    if name is not None:
        backend = find(name)
        reason = refusal(backend, problem)
        if reason is not None:
            others = ", ".join(repr(other) for other in names() if other != name)
            raise Unsupported(
                f"backend: got {name!r}, which refuses: {reason}; accepted: None, or another of {others}."
            )
        return backend, []
    best: tuple[float, int, Backend] | None = None
    reasons: dict[int, str] = {}  # of those that refuse
    for index, backend in enumerate(BACKENDS):
        if not backend.is_automatic or problem.device not in backend.devices:
            continue
        # A later one is asked only where it is known to be faster: asking may import a compiler
        if best is not None and not _is_faster(backend, problem, op, best[0]):
            continue
        reason = backend.refuse(problem, op)
        if reason is None:
            us = backend.time_us(problem, op)
            best = math.inf if us is None else us, index, backend
        else:
            reasons[index] = f"{backend.name!r} refuses: {reason}"
    if best is None:
        said = reasons.values() or [f"none runs on {problem.device}"]
        raise Unsupported("no backend takes this call. " + "; ".join(said))
    us, chosen, backend = best
    before = [reason for index, reason in reasons.items() if index < chosen]
    return backend, _slow_paths(problem, op, backend, us, before)


def _is_faster(backend: Backend, problem: Problem, op: str, us: float) -> bool:
    """True if this backend's measured time is known and below the other, which is known too."""
    own = backend.time_us(problem, op) if us < math.inf else None
    return own is not None and own < us


def _slow_paths(problem: Problem, op: str, backend: Backend, us: float, refusals: list[str]) -> list[str]:
    """Returns warnings for the chosen backend: one far behind the fastest known way, or, without measurements of such
    calls, one that serves because preferred ones refuse."""
    kind = kind_of(problem, op)
    absent = frozenset[str]() if speeds.is_measured(kind.arch) else families.absent(kind.arch)
    best = speeds.best_known(kind, absent)
    if best is None or us == math.inf:
        return [f"{reason}; {backend.name!r} serves instead" for reason in refusals]
    provider, best_us = best
    if us <= speeds.SLOW * best_us:
        return []
    what = ", ".join([f"{kind.dtype} {op}", f"head_dim {kind.head_dim}", *kind.options])
    times = f"{us / best_us:.1f} times slower than {provider}, the fastest known"
    return ["; ".join([f"{backend.name!r} serves this call ({what}) {times}", *refusals])]


def select(problem: Problem, name: str | None, op: str = "forward") -> Backend:
    """The backend that will run, after saying so if it is slow."""
    backend, reasons = choose(problem, name, op)
    for reason in reasons:
        announce_slow_path(reason)
    return backend


def announce_slow_path(reason: str) -> None:
    """A call is served far slower than it could be: an error in strict mode, else one warning per reason."""
    if is_strict():
        raise Unsupported(f"{reason} (FLASHTILE_STRICT=1 forbids slow paths).")
    if reason not in _warned:
        warnings.warn(reason, SlowPathWarning, stacklevel=caller_stacklevel())
        _warned.add(reason)


def is_strict() -> bool:
    return is_switched_on("FLASHTILE_STRICT")


@dataclass(frozen=True)
class Explanation:
    """Answer of `flashtile.explain`: what would run and why. Printing it gives the readable form."""

    problem: Problem
    backend: str
    details: dict[str, str]
    refusals: dict[str, str]  # every other backend, with its reason
    slow_paths: tuple[str, ...]  # what a warning, or in strict mode an error, would say

    def _lines(self) -> list[tuple[str, str]]:
        """The answer as pairs of a label and a text. A detail of the backend has an indented label."""
        problem, shape = self.problem, self.problem.shape
        options = {
            "causal": problem.causal if problem.causal != "none" else "",
            "window": str(problem.window)
            if problem.window != ((-1, -1) if problem.causal == "none" else (-1, 0))
            else "",
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
        device = f"{problem.gpu} ({problem.arch})" if problem.gpu else problem.arch or problem.device
        return [
            ("problem", f"{dtype_name(problem.dtype)} on {device}, layout {problem.layout}, {passes}"),
            (
                "sizes",
                f"batch {shape.batch}, heads {shape.heads} over {shape.heads_kv}, seqlen {shape.seqlen_q} x "
                f"{shape.seqlen_k}, head_dim {shape.head_dim} / {shape.head_dim_v}",
            ),
            ("options", f"scale {problem.scale:.4g}" + (f", {given}" if given else "")),
            ("backend", self.backend),
            *((f"  {name}", value) for name, value in self.details.items()),
            *(("not", f"{name}: {reason}") for name, reason in self.refusals.items()),
            *(("slow", reason) for reason in self.slow_paths),
        ]

    def __str__(self) -> str:
        return "\n".join(
            f"{label}: {text}" if label.startswith(" ") else f"{label:<10}{text}" for label, text in self._lines()
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the answer as plain data, for JSON."""
        asked = {label: text for label, text in self._lines() if label in ("problem", "sizes", "options")}
        answer = {"backend": self.backend, "details": self.details, "refusals": self.refusals}
        return {**asked, **answer, "slow_paths": list(self.slow_paths)}

    def _repr_html_(self) -> str:
        """The answer as a table, for notebooks."""
        kinds = {"backend": "good", "slow": "bad", "not": "soft"}
        lines = []
        for label, text in self._lines():
            kind = kinds.get(label.split()[0], "plain")
            if label == "not":
                name, _, text = text.partition(": ")
                label = f"not {name}"
            lines.append((label.strip(), markup.Raw(f'<span class="{kind}">{markup.escape(text)}</span>')))
        return markup.fragment("flashtile-explain", markup.table(("", ""), lines, is_numeric=False))


def explain(problem: Problem, name: str | None) -> Explanation:
    chosen, slow = choose(problem, name)
    details = chosen.details(problem, "forward")
    if problem.needs_grad:
        backward, slow_backward = choose(problem, name, "backward")
        slow = [*slow, *slow_backward]
        details |= {"backward": backward.name} | backward.details(problem, "backward")
    refusals = {}
    for backend in BACKENDS:
        if backend is chosen:
            continue
        reason = refusal(backend, problem)
        if reason is None:
            reason = f"{chosen.name!r} was asked for" if name is not None else f"{chosen.name!r} is faster"
            if not backend.is_automatic:
                reason = f"only taken by name: {backend.summary}"
        refusals[backend.name] = reason
    return Explanation(problem, chosen.name, details, refusals, tuple(slow))
