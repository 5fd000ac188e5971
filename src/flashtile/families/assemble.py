"""Makes a launch plan from a key and a layout: what the family launches (base.py: Launch), and what every pass is told
of its tensors (plans/operands.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from flashtile import families
from flashtile.families.base import Launch
from flashtile.plans.operands import assembled, call_values, forward_operands
from flashtile.plans.plan import AnyStep, LaunchPlan, Memset, Operand, Step
from flashtile.plans.spec import CallLayout, PlanKey


@functools.lru_cache(maxsize=4096)
def plan(key: PlanKey, layout: CallLayout) -> LaunchPlan:
    """The plan of a pass by the family that takes it."""
    return plan_of(key, layout, families.select(key).launch(key, layout))


def plan_of(key: PlanKey, layout: CallLayout, launch: Launch) -> LaunchPlan:
    """The plan of a pass by these launches."""
    operands = forward_operands(layout, is_written=key.grads is None)
    tensors = ["q", "k", "v", "out"]
    if key.grads is not None:
        operands += [Operand("dout", dtype=key.out_dtype), *_grad_operands(key.grads), *launch.scratch]
        operands += [Operand("dlse", strides="contiguous", dtype="float32")] if "dlse" in layout.tensors else []
        tensors += ["dout", *(operand.name for operand in operands if operand.name in ("dq", "dk", "dv"))]
    operands = [item._replace(strides="pairs") if item.name in launch.in_pairs else item for item in operands]
    if key.copies_rows:
        operands = [item._replace(strides="aligned") if item.name in tensors else item for item in operands]
    steps: tuple[AnyStep, ...] = (*(Memset(name) for name in launch.zeroed), *launch.steps)
    values, dims = call_values(layout), (key.head_dim, key.head_dim_v)
    return assembled(
        steps, operands, tensors, values, launch.splits, launch.workspaces, dims, layout, launch.maps, launch.struct
    )


@functools.lru_cache(maxsize=4096)
def kernels(key: PlanKey) -> tuple[Step, ...]:
    """The kernels of a pass, in the order of their launch."""
    layout = CallLayout("bhsd", ())
    return families.select(key).launch(key, layout).steps


def _grad_operands(grads: Sequence[str]) -> list[Operand]:
    found = [Operand(name, is_written=True) for name in ("dq", "dk", "dv") if name in grads]
    if "dbias" in grads:
        found.append(Operand("dbias", strides="contiguous", is_written=True))
    if "dsinks" in grads:
        found.append(Operand("dsinks", strides="contiguous", dtype="float32", is_written=True))
    return found


on_clear: list[Callable[[], None]] = []  # of those who keep what they made from plans


def clear_plans() -> None:
    """Drops every plan, and what others made from it: units written from now on may differ (plans/mutation.py), and
    so may the choice of a family."""
    families.clear_choices()
    kernels.cache_clear()
    plan.cache_clear()
    for clear in on_clear:
        clear()
