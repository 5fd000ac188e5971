"""`flashtile.install()`: torch's own attention operators run on flashtile, in every model and without a change to it.

    report = flashtile.install()
    model(x)         # any scaled_dot_product_attention, nn.MultiheadAttention, compiled graph, C++ caller
    print(report)    # what was served, what was left to torch, and why
    flashtile.uninstall()

It overrides torch's kernels of the operators that scaled_dot_product_attention calls, for the CPU and CUDA, and those
of torch.nn.attention.varlen. torch's autograd formulas and fake kernels stay. A call that flashtile refuses goes to
torch's own kernel. What torch sends to MATH is served in eager calls, unless MATH is the only backend that is switched
on.
"""

from __future__ import annotations

import importlib
import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.library import Library

from flashtile import ops
from flashtile.backends import registry
from flashtile.errors import Unsupported, unsupported
from flashtile.integrations import fastpath, torch_kernels

Function = Callable[..., Any]
_Key = torch._C.DispatchKey
_SDPA = "aten::_scaled_dot_product_"
MATH = f"{_SDPA}attention_math"
CPU_KERNELS: dict[str, Function] = {
    f"{_SDPA}flash_attention_for_cpu": torch_kernels.flash_for_cpu,
    f"{_SDPA}flash_attention_for_cpu_backward": torch_kernels.flash_for_cpu_backward,
}
CUDA_KERNELS: dict[str, Function] = {
    f"{_SDPA}flash_attention": torch_kernels.flash,
    f"{_SDPA}flash_attention_backward": torch_kernels.flash_backward,
    f"{_SDPA}efficient_attention": torch_kernels.efficient,
    f"{_SDPA}efficient_attention_backward": torch_kernels.efficient_backward,
    f"{_SDPA}cudnn_attention": torch_kernels.cudnn,
    f"{_SDPA}cudnn_attention_backward": torch_kernels.cudnn_backward,
}
VARLEN_KERNELS: dict[str, Function] = {
    "torch_attn::_varlen_attn": torch_kernels.varlen,
    "torch_attn::_varlen_attn_backward": torch_kernels.varlen_backward,
}


@dataclass
class Report:
    """Counts of calls by operator. Backward operators are counted on their own; calls in a compiled graph are counted
    when it runs."""

    served: Counter[str] = field(default_factory=Counter)
    left_to_torch: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (operator, reason)
    not_overridden: dict[str, str] = field(default_factory=dict)  # operators that stayed torch's, and why
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def share(self) -> float:
        """The part of forward calls that was served; 1 if there was none."""
        with self._lock:
            served = sum(count for name, count in self.served.items() if not is_backward(name))
            left = sum(count for (name, _), count in self.left_to_torch.items() if not is_backward(name))
        return served / (served + left) if served + left else 1.0

    def clear(self) -> None:
        """Starts the counts anew."""
        with self._lock:
            self.served.clear()
            self.left_to_torch.clear()

    def count_served(self, name: str) -> None:
        with self._lock:
            self.served[name] += 1

    def count_left(self, name: str, reason: str) -> None:
        with self._lock:
            self.left_to_torch[name, reason] += 1

    def __str__(self) -> str:
        with self._lock:
            served, left = self.served.copy(), self.left_to_torch.copy()
        lines = [f"served by flashtile: {served.total()}"]
        lines += [f"  {count} x {name}" for name, count in served.most_common()]
        lines += [f"left to torch: {left.total()}"]
        lines += [f"  {count} x {name}: {reason}" for (name, reason), count in left.most_common()]
        lines += [f"not overridden: {name}: {reason}" for name, reason in self.not_overridden.items()]
        return "\n".join(lines)


def is_backward(name: str) -> bool:
    return name.endswith("_backward")


_report = Report()
_libraries: list[Library] = []
_install_lock = threading.Lock()


def install() -> Report:
    """Serves torch's attention operators by flashtile in the whole process, until `uninstall()`. A second call changes
    nothing. Returns the report, which goes on counting. No other thread may call attention meanwhile: torch's table of
    kernels may not change while it is read."""
    with _install_lock:
        if not _libraries:
            _report.not_overridden.clear()
            importlib.import_module("torch.nn.attention.varlen")  # defines torch_attn's operators
            _libraries.extend(override(_report, ("CPU", "CUDA")))
            fastpath.hold_off()
    return _report


def uninstall() -> None:
    """Gives torch its own kernels back. Backward passes with dropout must be done before, since the random numbers of
    the two libraries differ. No other thread may call attention meanwhile."""
    with _install_lock:
        if _libraries:
            remove(_libraries)
            fastpath.release()


def override(report: Report, devices: tuple[str, ...], cuda_key: str = "CUDA") -> list[Library]:
    """Puts the kernels of these devices in place; `remove` undoes it. A test gives another key for those of CUDA."""
    libraries = {namespace: Library(namespace, "IMPL") for namespace in ("aten", "torch_attn")}
    entries: list[tuple[str, str, Function]] = []
    for device in devices:
        kernels, key = (CPU_KERNELS, device) if device == "CPU" else (CUDA_KERNELS, cuda_key)
        entries += [(name, key, serve) for name, serve in (kernels | VARLEN_KERNELS).items()]
        entries += [(MATH, prefix + key, torch_kernels.math) for prefix in ("Autograd", "")]
    with warnings.catch_warnings():
        # torch warns of the first kernel of a process that is replaced
        warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel", UserWarning)
        for name, key, serve in entries:
            if reason := _mismatch(name, serve):
                report.not_overridden[name] = reason
                continue
            namespace, _, base = name.partition("::")
            kernel = _kernel(name, serve, _original(name, key), report)
            libraries[namespace].impl(base, kernel, key, with_keyset=True, allow_override=True)
    _forget_dispatch()
    return list(libraries.values())


def remove(libraries: list[Library]) -> None:
    while libraries:
        libraries.pop()._destroy()
    _forget_dispatch()


def _forget_dispatch() -> None:
    """Clears what torch's tracers keep of the kernels of each operator. From a kernel that is gone they would go to
    none, without a gradient."""
    for name in (*CPU_KERNELS, *CUDA_KERNELS, *VARLEN_KERNELS, MATH):
        if packet := _packet(name):
            packet.default._dispatch_cache.clear()


def _packet(name: str) -> Any:
    """Returns the operator, or None where torch does not have it."""
    namespace, _, base = name.partition("::")
    return getattr(getattr(torch.ops, namespace), base, None)


def _mismatch(name: str, serve: Function) -> str:
    """Returns why the operator cannot be served by this function, or "". A version of torch may have fewer arguments,
    or new ones at the end: a call that gives those is refused by Python."""
    packet = _packet(name)
    if packet is None:
        return f"torch {torch.__version__} does not have it"
    theirs = [argument.name for argument in packet.default._schema.arguments]
    ours = list(inspect.signature(serve).parameters)
    if any(a != b for a, b in zip(theirs, ours, strict=False)):
        return f"its arguments in torch {torch.__version__} are ({', '.join(theirs)})"
    return ""


def _original(name: str, key: str) -> Function | None:
    """torch's kernel, which stays callable while ours is in its place; None where torch was built without one."""
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key):
        return None
    call: Function = torch.library.get_kernel(name, key).call_boxed
    return call


def _kernel(name: str, serve: Function, original: Function | None, report: Report) -> Function:
    refuse = _why_not_math if name == MATH else None

    def run(keyset: Any, *args: Any, **options: Any) -> Any:
        reason = refuse(keyset) if refuse is not None else ""
        if not reason:
            try:
                results = serve(*args, **options)
                report.count_served(name)
                return results
            except (Unsupported, ValueError, TypeError) as error:
                reason = str(error)
        report.count_left(name, reason)
        if name != MATH or reason not in _CHOSEN:
            registry.announce_slow_path(f"a call of {name} was left to torch: {reason}")
        if original is None:
            raise unsupported(name, "a call that flashtile refuses", f"one of its calls: {reason}")
        return original(keyset, *args, **options)

    return run


_TRACED = "MATH while a graph is traced, or with a tensor subclass, a dispatch mode or a transform of torch.func"
_PINNED = "MATH is the only backend that is switched on"
_CHOSEN = {_TRACED, _PINNED}  # not a slow path: torch does what it was asked to do


def _why_not_math(keyset: Any) -> str:
    """Returns why a call of the MATH operator is left to torch, or "". A traced call would put flashtile's operators
    into a graph, which another process may load from torch's cache without flashtile."""
    if keyset.has(_Key.Python) or ops.num_dispatch_modes() or torch._C._are_functorch_transforms_active():
        return _TRACED
    if torch.autograd.forward_ad._current_level >= 0:
        return _TRACED
    backends = torch.backends.cuda
    if backends.flash_sdp_enabled() or backends.mem_efficient_sdp_enabled() or backends.cudnn_sdp_enabled():
        return ""
    return _PINNED
