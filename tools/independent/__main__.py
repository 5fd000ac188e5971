"""Random problems through flashtile's public API, each compared with an independent reference.

python tools/independent --seconds 60                        a minute of problems, a fresh seed
python tools/independent --problems 5000 --seed 7            so many, the same ones every time
python tools/independent --seed 7 --case 123                 one of them, with everything about it
python tools/independent --faults                            wrong references, one at a time: each must be noticed
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from bounds import PRECISIONS
from cache import Cache
from dense import Dense, DrawnDropout
from drawing import Draw
from faults import FAULTS
from packed import Packed
from problem import Problem
from reference import Reference

import flashtile

warnings.simplefilter("ignore", flashtile.SlowPathWarning)


@dataclass
class Tally:
    problems: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    closest: dict[str, float] = field(default_factory=dict)  # result and dtype: largest error as a share of its bound


def judge(name: str, got: torch.Tensor, value: Any, bound: Any, dtype: str, tally: Tally) -> str | None:
    """Why a result is wrong; None if it is right."""
    if str(got.dtype) != f"torch.{dtype}":
        return f"{name} is {got.dtype}, expected {dtype}"
    if tuple(got.shape) != value.shape:
        return f"{name} has shape {tuple(got.shape)}, expected {value.shape}"
    x = got.double().numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(x - value)
        overflow = np.isinf(x) & (x * value > 0) & (np.abs(value) + bound >= PRECISIONS[dtype].largest)
        is_right = (x == value) | (off <= bound) | (np.isnan(x) & np.isnan(value)) | overflow
        if is_right.all():
            share = off / bound
            share = share[np.isfinite(share)]
            key = f"{name} {dtype}"
            tally.closest[key] = max(tally.closest.get(key, 0.0), float(share.max(initial=0.0)))
            return None
    worst = np.unravel_index(np.argmax(np.where(is_right, -1.0, np.nan_to_num(off, nan=np.inf))), off.shape)
    wrong = int((~is_right).sum())
    at = tuple(int(n) for n in worst)
    allowed = f"{value[worst]:.9g} within {bound[worst]:.3g}"
    return f"{name}{list(at)} = {x[worst]:.9g}, expected {allowed} ({wrong} of {x.size} wrong)"


def check(problem: Problem, ref: Reference, tally: Tally) -> list[str]:
    """What is wrong with the problem on every backend that takes it."""
    wrong = []
    for backend in problem.backends() * problem.runs:
        label = backend or problem.via
        tally.calls[label] += 1
        try:
            results = problem.run(backend)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"{label}: {type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {error}")
            continue
        expected = problem.expected(ref, results)
        reasons = [judge(name, got, *expected[name], tally) for name, got in results.items()]
        wrong += [f"{label}: {reason}" for reason in [*reasons, problem.objection(results)] if reason is not None]
    return wrong


def draw(seed: int, index: int, extremes: bool) -> Problem:
    d = Draw(seed, index)
    return d.pick([Dense] * 10 + [Packed] * 6 + [Cache] * 6 + [DrawnDropout])(d, extremes)


def run(
    seed: int,
    first: int,
    problems: int,
    seconds: float,
    extremes: bool,
    ref: Reference,
    tally: Tally,
    stop_at: int = 20,
) -> None:
    end = time.monotonic() + seconds
    for index in range(first, first + problems):
        if time.monotonic() >= end or len(tally.failures) >= stop_at:
            return
        problem = draw(seed, index, extremes)
        tally.problems += 1
        with np.errstate(all="ignore"):
            wrong = check(problem, ref, tally)
        if wrong:
            tally.failures.append(f"--seed {seed} --case {index}: {problem.describe()}\n    " + "\n    ".join(wrong))


def try_faults(seed: int, seconds: float, extremes: bool) -> int:
    missed = 0
    for name, ref in FAULTS.items():
        tally = Tally()
        run(seed, 0, 10**9, seconds, extremes, ref, tally, stop_at=1)
        found = tally.failures[0].splitlines()[1].strip() if tally.failures else "NOT NOTICED"
        missed += not tally.failures
        print(f"{name:24} {tally.problems:5} problems  {found}", flush=True)
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--problems", type=int, default=None)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--first", type=int, default=0, help="the first problem of the seed")
    parser.add_argument("--case", type=int, default=None, help="only this problem of the seed")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--no-extremes", action="store_true", help="without values at the extremes of the types")
    options = parser.parse_args()
    torch.set_num_threads(1)
    extremes = not options.no_extremes
    seed = options.seed if options.seed is not None else time.time_ns() % 2**32
    if options.faults:
        return try_faults(seed, options.seconds or 20.0, extremes)
    tally = Tally()
    start = time.monotonic()
    if options.case is not None:
        run(seed, options.case, 1, 1e9, extremes, Reference(), tally)
        print(draw(seed, options.case, extremes).describe())
    else:
        count = options.problems if options.problems is not None else 10**9 if options.seconds else 1000
        run(seed, options.first, count, options.seconds or 1e9, extremes, Reference(), tally)
    for failure in tally.failures:
        print(failure)
    took = time.monotonic() - start
    calls = ", ".join(f"{n} {c}" for n, c in sorted(tally.calls.items()))
    print(f"seed {seed}: {tally.problems} problems ({calls}), {len(tally.failures)} failed, {took:.0f} s")
    print(
        "largest error as a share of its bound: " + ", ".join(f"{n} {x:.2f}" for n, x in sorted(tally.closest.items()))
    )
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
