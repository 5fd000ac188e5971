"""A backend: a name, a reason for every refusal, and the two passes."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile import families
from flashtile.errors import dtype_name
from flashtile.families import speeds
from flashtile.plans.arch import Arch, arch_here
from flashtile.plans.spec import features_of
from flashtile.problem import AttentionArgs, Problem


@functools.cache
def device_arch(index: int = 0) -> Arch | None:
    """Returns what this GPU is taken for, by every part of flashtile (arch_here); None where it is too old.
    FLASHTILE_ARCH is read once."""
    return arch_here(*torch.cuda.get_device_capability(index))


def capability(index: int) -> tuple[int, int]:
    """Returns the compute capability of what this GPU is taken for, or its own where it is too old."""
    arch = device_arch(index)
    return torch.cuda.get_device_capability(index) if arch is None else divmod(arch.number, 10)


def kind_of(problem: Problem, op: str) -> speeds.Kind:
    """The kind of calls that the problem is compared with, on any device."""
    arch, shape = problem.arch or problem.device, problem.shape
    if arch == "cuda":
        arch = "sm_{}{}".format(*capability(problem.device_index))
    told_op, told = problem.classes or ("", ())
    size = told[families.SIZE_AT] if told_op == op else speeds.SIZE.of(shape, 0)
    head_dims = shape.head_dim, shape.head_dim_v
    return speeds.kind(arch, op, dtype_name(problem.dtype), head_dims, features_of(problem), bool(size))


class GradNeeds(NamedTuple):
    """Gradients that the backward pass is asked for."""

    dq: bool
    dk: bool
    dv: bool
    dbias: bool
    dsinks: bool


class Grads(NamedTuple):
    """The buffers of the backward pass, allocated by the op in the inputs' shapes; None where not needed."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None
    dsinks: Tensor | None

    def wide(self, dtype: torch.dtype) -> Grads:
        """Zeros of the same shapes to gather in: shares of many tiles and sequences are rounded once, at the end."""
        return Grads(
            *(None if grad is None else torch.zeros(grad.shape, dtype=dtype, device=grad.device) for grad in self)
        )

    def fill(self, gathered: Grads) -> None:
        for grad, sums in zip(self, gathered, strict=True):
            if grad is not None and sums is not None:
                grad.copy_(sums)


class Backend(ABC):
    """One way to compute attention. Every backend gives the same results, within rounding."""

    name: str
    summary: str
    devices: tuple[str, ...]  # device types it runs on
    is_automatic: bool = True  # False: only taken when asked for by name
    is_compiled: bool = False  # True: the first call of a kind waits for a compiler
    has_compile_jobs: bool = False  # True: other processes can compile for it (compile_jobs)
    is_layout_exact: bool = False  # True: the same values give the same bits however they lie in memory
    takes_mutations: bool = False  # True: its kernels can be broken on purpose (plans/mutation.py)

    @abstractmethod
    def refuse(self, problem: Problem, op: str = "forward") -> str | None:
        """Returns why this backend does not take the op ("forward" or "backward") of the problem, or None if it does.
        Devices are checked by the registry."""

    def time_us(self, problem: Problem, op: str) -> float | None:
        """Returns the measured time of the backend for calls like this one (families/speeds.py), None where it is not
        known. Asked before `refuse`, so it may not be expensive."""
        return families.provider_us(self.name, kind_of(problem, op))

    def plan_forward(self, args: AttentionArgs, problem: Problem) -> bool:
        """Registers a plan for the call that C++ has handed to Python (backends/native.py), which C++ then runs. False
        where `forward` has to."""
        return False

    def plan_backward(self, args: AttentionArgs, problem: Problem, needs: GradNeeds, has_dlse: bool) -> bool:
        """Does the same for a backward pass."""
        return False

    @abstractmethod
    def forward(self, args: AttentionArgs, out: Tensor, lse: Tensor) -> None:
        """Fills `out` and `lse`, every element of them."""

    @abstractmethod
    def backward(
        self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads
    ) -> None:
        """Fills those of `grads` that are there. `out` and `lse` may be those of a larger problem that this is a part
        of, and of another backend."""

    def details(self, problem: Problem, op: str = "forward") -> dict[str, str]:
        """Returns what `explain` says about how this backend would run the problem."""
        return {}

    def tile_sizes(self) -> frozenset[int]:
        """Returns the lengths at which tiles of its kernels end: with one key or query more a call may take another
        path."""
        return frozenset()

    def loaded_kernels(self) -> frozenset[str]:
        """Every kernel that this process has compiled or loaded so far."""
        return frozenset()

    def compile_jobs(
        self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads | None
    ) -> dict[Hashable, Callable[[], None]]:
        """Returns what a call would wait for, as jobs for other processes, by the kernel that each compiles; grads is
        None in a forward pass.

        Of backends whose compiler leaves its kernels on disk and keeps Python's other threads waiting. The others are
        compiled by calls.
        """
        return {}

    def prepare(self, problem: Problem) -> None:
        """Does ahead of time whatever the first call would wait for, such as compiling."""
        return None
