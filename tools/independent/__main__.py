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
from problem import Expected, Problem, Results
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
    """Returns why a result is wrong; None if it is right."""
    if str(got.dtype) != f"torch.{dtype}":
        return f"{name} is {got.dtype}, expected {dtype}"
    if tuple(got.shape) != value.shape:
        return f"{name} has shape {tuple(got.shape)}, expected {value.shape}"
    x = got.double().numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(x - value)
        overflow = np.isinf(x) & (np.sign(x) * value + bound >= PRECISIONS[dtype].largest)
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


def compare(problem: Problem, results: Results, expected: Expected, tally: Tally) -> list[str]:
    reasons = [judge(name, got, *expected[name], tally) for name, got in results.items()]
    return [reason for reason in [*reasons, problem.objection(results)] if reason is not None]


def check(problem: Problem, ref: Reference, tally: Tally) -> list[str]:
    """Returns what is wrong with the problem on every backend that takes it."""
    wrong = []
    expected: Expected | None = None
    torch.set_num_threads(problem.threads)
    for backend in problem.backends() * problem.runs:
        label = backend or problem.via
        tally.calls[label] += 1
        try:
            results = problem.run(backend)
            if expected is None or problem.is_result_needed:
                expected = problem.expected(ref, results)
            reasons = compare(problem, results, expected, tally)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            reasons = [f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {error}"]
        wrong += [f"{label}: {reason}" for reason in reasons]
    return wrong


def draw(seed: int, index: int) -> Problem:
    d = Draw(seed, index)
    return d.pick([Dense] * 10 + [Packed] * 6 + [Cache] * 6 + [DrawnDropout])(d)


def run(seed: int, indices: range, seconds: float) -> Tally:
    """Problems of the seed, until time is up or 20 have failed."""
    tally = Tally()
    end = time.monotonic() + seconds
    for index in indices:
        if time.monotonic() >= end or len(tally.failures) >= 20:
            break
        problem = draw(seed, index)
        tally.problems += 1
        wrong = check(problem, Reference(), tally)
        if wrong:
            tally.failures.append(f"--seed {seed} --case {index}: {problem.describe()}\n    " + "\n    ".join(wrong))
    return tally


def try_faults(seed: int, seconds: float) -> int:
    """Compares with every wrong reference until each has disagreed once."""
    missing = dict(FAULTS)
    end = time.monotonic() + seconds
    index = 0
    while missing and time.monotonic() < end:
        problem = draw(seed, index)
        results = problem.run(problem.backends()[0])
        index += 1
        for name, ref in list(missing.items()):
            wrong = compare(problem, results, problem.expected(ref, results), Tally())
            if wrong:
                print(f"{name:24} {index:5} problems  {wrong[0]}", flush=True)
                del missing[name]
    for name in missing:
        print(f"{name:24} {index:5} problems  NOT NOTICED")
    return 1 if missing else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="how long; 60 where --problems is not given either")
    parser.add_argument("--problems", type=int, help="how many")
    parser.add_argument("--seed", type=int, help="a fresh one unless given")
    parser.add_argument("--first", type=int, default=0, help="the first problem of the seed")
    parser.add_argument("--case", type=int, help="only this problem of the seed")
    parser.add_argument("--faults", action="store_true", help="compare with wrong references")
    options = parser.parse_args()
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    seed = options.seed if options.seed is not None else time.time_ns() % 2**32
    if options.faults:
        return try_faults(seed, options.seconds or 60.0)
    start = time.monotonic()
    indices = range(options.first, options.first + options.problems) if options.problems else range(10**9)
    if options.case is not None:
        indices = range(options.case, options.case + 1)
        print(draw(seed, options.case).describe())
    tally = run(seed, indices, options.seconds or (1e9 if options.problems else 60.0))
    for failure in tally.failures:
        print(failure)
    took = time.monotonic() - start
    calls = ", ".join(f"{n} {c}" for n, c in sorted(tally.calls.items()))
    print(f"seed {seed}: {tally.problems} problems ({calls}), {len(tally.failures)} failed, {took:.0f} s")
    shares = ", ".join(f"{n} {x:.2f}" for n, x in sorted(tally.closest.items()))
    print(f"largest error as a share of its bound: {shares}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
