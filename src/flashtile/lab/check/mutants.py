"""Counts the problems that it takes to notice each fault that can be planted in a kernel: the check of the check."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from flashtile import families
from flashtile.backends import registry
from flashtile.backends.cuda import problem_key
from flashtile.errors import dtype_name
from flashtile.families import assemble
from flashtile.lab.check.judge import is_alive
from flashtile.lab.check.report import Report, Settings
from flashtile.lab.check.runner import check_trials, drawn
from flashtile.lab.check.trial import Trial
from flashtile.lab.check.workers import GRACE_S, TimeOver, as_done, processes
from flashtile.plans.mutation import Mutation, is_broken, mutations, planted
from flashtile.problem import Problem
from flashtile.testing import Case

# A fault is most often seen at once: few problems are compiled for at a time, most of them with options of their own
CHUNK, REUSE = 4, 2
MAX_DEATHS = 3  # of processes, until it is no accident
_DRAWS = 10  # for each problem that is judged: most draws reach the kernel

_NO_OPTIONS: dict[str, Any] = {"kind": "dense", "causal": "none", "window": (-1, -1), "softcap": 0.0, "dropout_p": 0.0}
_NO_OPTIONS |= dict.fromkeys(("mask", "bias", "alibi", "deterministic"))
_BAND, _GROUPS = {"causal": "bottom_right"}, {"heads": 4, "heads_kv": 2, "seqlen_q": 150}
_MANY_TILES = {"seqlen_q": 300, "seqlen_k": 700, "num_splits": 1}
_RISING = {"values": "huge", "softcap": 0.0, **_MANY_TILES}
_CROWD = {"kind": "dense", "batch": 16, "heads": 48, "heads_kv": 48, "seqlen_q": 20, "seqlen_k": 20}
_JUNK_BEHIND = {"kind": "used", "batch": 3}
_SHARED_BIAS = {"kind": "dense", "bias": "qk", "heads": 2, "heads_kv": 2}
_BIAS, _MASK = {"kind": "dense", "bias": "hqk", "seqlen_q": 200}, {"kind": "dense", "mask": "qk"}
_DROPOUT = {"kind": "dense", "dropout_p": 0.2}
# What a problem must have for a fault to show, by the fault's name without the family. A family says what its own
# kernels need beside it (Family.fault_needs).
NEEDS: dict[str, dict[str, Any]] = {
    "rescale": _RISING,
    "skip_rescale": _RISING,
    "stale_max": _RISING,
    "last_tile": _MANY_TILES,
    "drop_last_tile": _MANY_TILES,
    "dq_tile": _MANY_TILES,
    "rank": _MANY_TILES,
    "split": {"num_splits": 2, "seqlen_k": 1500},
    "combine_weight": {"num_splits": 3, "seqlen_k": 1500},
    "item": {"seqlen_q": 300},
    # More query tiles than four for each persistent block; without options these take turns
    "later_tile": _CROWD,
    "rotation": {**_CROWD, **_NO_OPTIONS},
    "guess": {**_RISING, **_NO_OPTIONS, "head_dim": 64, "head_dim_v": 64},
    "mask_offset": _BAND,
    "dq_mask": _BAND,
    "skip": _BAND,
    "window_edge": {"window": (17, 3)},
    "empty_row": {"kind": "dense", "causal": "bottom_right", "seqlen_q": 200, "seqlen_k": 100},
    "tail": _JUNK_BEHIND,
    "tail_key": {"kind": "dense"},
    "column": {"memory": "sliced", "head_dim": 40, "head_dim_v": 40},
    "tail_column": {"memory": "sliced", "head_dim": 40, "head_dim_v": 40},
    "gqa_head": _GROUPS,
    "group": _GROUPS,
    "dk_group": _GROUPS,
    "neighbour_length": {"kind": "varlen", "batch": 3},
    "packed_rest": {"kind": "varlen", "batch": 3},
    "page": {"kind": "paged", "batch": 3},
    "page_index": {"kind": "paged", "batch": 3},
    "mask_bits": _MASK,
    "mask_row": _MASK,
    "mask_tiles": {"kind": "dense", "mask": "q", "seqlen_q": 300, "seqlen_k": 300},  # rows that see all keys or none
    "bias_row": _BIAS,
    "dbias_head": _SHARED_BIAS,
    "alibi": {"alibi": "h", "seqlen_q": 100, "seqlen_k": 300},
    "alibi_offset": {"alibi": "h", "seqlen_q": 100, "seqlen_k": 300},
    "dropout": _DROPOUT,
    "dropout_lane": _DROPOUT,
    "dropout_backward": _DROPOUT,
    "dropout_origin": {**_DROPOUT, "origin": (5, 0, 0, 8), "heads": 4, "heads_kv": 2},
    "softcap": {"softcap": 2.0},
    "softcap_derivative": {"softcap": 2.0},
    "sink_twice": {"has_sinks": True},
    "dsinks_sign": {"has_sinks": True},
}


@dataclass(frozen=True)
class Hunt:
    """A fault, and the first problem that showed it."""

    mutation: Mutation
    is_found: bool
    num_problems: int
    report: Report

    def as_dict(self) -> dict[str, Any]:
        first = self.report.failures[0] if self.is_found else None
        return {
            "mutation": self.mutation.name,
            "what": self.mutation.what,
            "found": self.is_found,
            "problems": self.num_problems,
            "complaint": "" if first is None else "; ".join(first.complaints),
            "case": "" if first is None else str(first.trial),
            "seconds": round(self.report.total_s, 1),
        }


def hunt(mutations: Sequence[Mutation], settings: Settings) -> Iterator[Hunt]:
    """Each fault is planted and checked for until a problem fails, in processes of their own. As they come.

    A time limit holds for all of them together: those that it leaves no time for do not come.
    """
    clock = settings.clock
    end = math.inf if settings.seconds is None else clock() + settings.seconds
    alone = dataclasses.replace(settings, chunk=CHUNK, reuse=REUSE, jobs=0, stops_at_failure=True)
    remaining = list(mutations)
    num_deaths = 0
    while remaining and clock() < end:
        try:
            with processes(max(1, settings.jobs), settings.device, end, clock) as pool:
                hunts = [pool.submit(hunt_one, mutation, alone, end) for mutation in remaining]
                for future in as_done(hunts, end + GRACE_S, clock):
                    found = future.result()
                    if found.num_problems or not (found.report.lost or found.report.is_time_over):
                        remaining.remove(found.mutation)
                        yield found
                    if found.report.lost:
                        break  # its process cannot use the GPU any more: the rest goes on in new ones
        except TimeOver:
            return
        except BrokenProcessPool:
            num_deaths += 1
            if num_deaths == MAX_DEATHS:
                raise


def hunt_one(mutation: Mutation, settings: Settings, end: float = math.inf) -> Hunt:
    """Checks for one fault until a problem shows it, `settings.problems` do not, or the time is over. Only problems
    that reach a kernel with the fault are judged."""
    if settings.clock() > end:
        return Hunt(mutation, False, 0, Report(is_time_over=True))
    if not is_alive(settings.device):
        return Hunt(mutation, False, 0, Report(lost="an earlier fault took the GPU from this process"))
    settings = dataclasses.replace(settings, seconds=None if end == math.inf else end - settings.clock())
    with broken(mutation.name):
        draws = itertools.islice(drawn(settings), _DRAWS * (settings.problems or sys.maxsize // _DRAWS))
        trials = (fit for trial in draws if (fit := fitted(trial, mutation, settings.device)) is not None)
        report = check_trials(itertools.islice(trials, settings.problems), settings)
    return Hunt(mutation, bool(report.failures), report.num_problems, report)


def needs_of(mutation: Mutation) -> dict[str, Any]:
    """Returns what a problem must have for the fault to show."""
    own, kind = families.fault_family(mutation), families.fault_kind(mutation)
    return NEEDS.get(kind, {}) | ({} if own is None else dict(own.fault_needs.get(kind, {})))


def fitted(trial: Trial, mutation: Mutation, device: str) -> Trial | None:
    """The problem with what the fault needs to show, with its other options if a kernel with the fault then takes it,
    else without; None if none does. Called where the fault is planted."""
    case, family = trial.case, families.families_with(mutation)[0]
    dims = family.padded(case.head_dim, case.head_dim_v) or family.head_dims[-1]
    dtype = case.dtype if dtype_name(case.dtype) in family.dtypes else getattr(torch, family.dtypes[0])
    # Lengths of a few rows, and values that weigh all keys alike, hide most faults; large problems take time
    changes: dict[str, Any] = {"dtype": dtype, "head_dim": dims[0], "head_dim_v": dims[1], "values": "normal"}
    changes |= {name: 64 + getattr(case, name) % 256 for name in ("seqlen_q", "seqlen_k")}
    group, heads_kv, batch = case.heads // case.heads_kv, min(case.heads_kv, 2), min(max(case.batch, 1), 3)
    changes |= {"batch": batch, "heads": group * heads_kv, "heads_kv": heads_kv}
    changes |= needs_of(mutation)
    has_backward = trial.has_backward if families.fault_family(mutation) is None else family.op == "backward"
    for options in (case, Case()):
        fit = Trial(dataclasses.replace(options, **changes), trial.seed, has_backward)
        if _reaches(fit, device):
            return fit
    return None


def _reaches(trial: Trial, device: str) -> bool:
    """True if one of the kernels that the call launches has the fault."""
    args, ops = trial.make(device).args, ("forward", "backward") if trial.has_backward else ("forward",)
    needs_bias_grad = trial.has_backward and args.bias is not None
    problem = Problem.of(args._replace(needs_grad=trial.has_backward, needs_bias_grad=needs_bias_grad))
    backend = registry.find("cuda")
    if any(backend.refuse(problem, op) is not None for op in ops):
        return False
    return any(is_broken(step.unit) for op in ops for step in assemble.kernels(problem_key(problem, op)))


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Every kernel that is made inside has the fault, and none that was made outside is used. Calls of the pass take
    a family that has it, though another may be faster, or are refused."""
    (mutation,) = (mutation for mutation in mutations() if mutation.name == name)
    try:
        with planted(name), families.forced(*(family.name for family in families.families_with(mutation))):
            assemble.clear_plans()
            yield
    finally:
        assemble.clear_plans()
