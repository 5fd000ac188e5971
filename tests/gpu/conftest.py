"""GPU tests: kernels are compiled ahead, side by side; what was covered is written to results/<device>/ at the end."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from flashtile.backends import cuda, executor, native
from flashtile.bench import device as facts
from flashtile.testing import Case, Inputs, assert_agrees, run

SEED = int(os.environ.get("FLASHTILE_SEED") or random.SystemRandom().randrange(2**31))
RESULTS = Path(__file__).resolve().parents[2] / "results"
covered: dict[str, set[str]] = {"problems": set(), "kernels": set(), "features": set()}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """At once: these tests take minutes, and what ends them early would take the reasons with it."""
    if report.failed:
        print(f"\n{report.nodeid}, FLASHTILE_SEED={SEED}\n{report.longreprtext}", flush=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        raise pytest.UsageError("tests/gpu needs a GPU that torch sees; tests/cpu runs without one")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if not covered["problems"]:
        return
    env = asdict(facts.environment("cuda", [], "make test-gpu"))
    counts = {name: len(found) for name, found in covered.items()}
    report = {"tests": session.testscollected, "failed": session.testsfailed, **counts, "all_features": sorted(covered["features"]), **env}
    folder = RESULTS / facts.slug("cuda")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test_gpu.json").write_text(json.dumps(report, indent=1, default=str) + "\n")


@pytest.fixture(autouse=True)
def free_switches():
    yield
    torch.use_deterministic_algorithms(False)


def has_backward(case: Case) -> bool:
    return case.kind != "paged"


def precompile(problems: Iterable[tuple[Case, int]], monkeypatch: pytest.MonkeyPatch, is_forward: bool = False) -> None:
    """Compiles every kernel that the problems will ask for, in as many threads as there are cores."""
    with native.record_launches() as units:
        for case, seed in problems:
            run(case.make(seed, "cuda"), has_backward=has_backward(case) and not is_forward)
    arch = cuda._arch(0)
    assert arch is not None
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda unit: executor.function(*unit, arch.name), units))


def check(case: Case, seed: int, is_forward: bool = False) -> None:
    """One problem, forward and backward or forward alone, by the error rule."""
    inputs: Inputs = case.make(seed, "cuda")
    assert_agrees(run(inputs, has_backward=has_backward(case) and not is_forward), inputs)
    covered["problems"].add(f"{case} {seed}")
