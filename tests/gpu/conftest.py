"""GPU tests: kernels are compiled ahead, side by side; what was covered is written to results/<device>/ at the end.

With pytest-xdist (`make test-gpu` uses it where it is installed) several workers share the GPU and the kernel cache on
disk. They draw from one seed, begin with the longest tests, and the controller joins what they covered. A line of
progress has the tests done of each file.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from flashtile.backends import cuda, executor, native
from flashtile.families import assemble
from flashtile.lab.bench import device as facts
from flashtile.testing import Case, Inputs, assert_agrees, run

# Workers inherit the environment, and with it the seed
SEED = int(os.environ.setdefault("FLASHTILE_SEED", str(random.SystemRandom().randrange(2**31))))
RESULTS = Path(__file__).resolve().parents[2] / "results"
covered: dict[str, set[str]] = {"problems": set(), "kernels": set(), "features": set()}


class Progress:
    """A line now and then: time, tests done of all, and of each file that is not done."""

    EVERY_S = 10.0

    def __init__(self, config: pytest.Config) -> None:
        self.plugins = config.pluginmanager
        self.start = self.shown = time.monotonic()
        self.totals, self.done = Counter[str](), Counter[str]()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.expect(ids)  # the same from every worker

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for name, found in getattr(node, "workeroutput", {}).get("covered", {}).items():
            covered[name].update(found)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self.done[file_of(report.nodeid)] += 1
        # At once: these tests take minutes, and what ends them early would take the reasons with it
        if report.failed:
            self.write(f"{report.nodeid}, FLASHTILE_SEED={SEED}\n{report.longreprtext}")
        elif time.monotonic() - self.shown > self.EVERY_S:
            self.shown = time.monotonic()
            minutes, seconds = divmod(int(self.shown - self.start), 60)
            files = [
                f"{name} {self.done[name]}/{total}" for name, total in self.totals.items() if self.done[name] < total
            ]
            self.write(f"{minutes}:{seconds:02d}  {self.done.total()}/{self.totals.total()}  {', '.join(files)}")

    def expect(self, ids: Iterable[str]) -> None:
        self.totals = Counter(file_of(nodeid) for nodeid in ids) or self.totals

    def write(self, text: str) -> None:
        terminal = self.plugins.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.write_line(f"\n{text}")


def file_of(nodeid: str) -> str:
    return Path(nodeid.partition("::")[0]).stem


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long(seconds): takes this long beside others on an NVIDIA H200, nothing cached")
    if not is_worker(config):
        config.pluginmanager.register(Progress(config), "flashtile-progress")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        raise pytest.UsageError("tests/gpu needs a GPU that torch sees; tests/cpu runs without one")
    items[:] = dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def dealt(items: list[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """The tests in the order in which several workers end soonest. xdist gives each worker as many consecutive tests.
    Each share begins with long tests, the longest first: one that begins last would run alone."""
    if num_workers == 1:
        return items
    seconds = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("long")) is not None}
    long = sorted(seconds, key=seconds.__getitem__, reverse=True)
    others = [item for item in items if item not in seconds]
    found: list[pytest.Item] = []
    for worker in range(num_workers):
        share = long[worker::num_workers]
        count = max(0, (len(items) - len(found)) // (num_workers - worker) - len(share))
        found += share + others[:count]
        del others[:count]
    return found + others


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if is_worker(session.config):
        session.config.workeroutput["covered"] = {name: sorted(found) for name, found in covered.items()}
        return
    # A part of the tests leaves the record of all of them as it is
    if not covered["problems"] or session.config.option.markexpr or session.config.option.keyword:
        return
    env = asdict(facts.environment("cuda", [], "make test-gpu"))
    counts = {name: len(found) for name, found in covered.items()}
    report = {
        "tests": session.testscollected,
        "failed": session.testsfailed,
        **counts,
        "all_features": sorted(covered["features"]),
        **env,
    }
    folder = RESULTS / facts.slug("cuda")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test_gpu.json").write_text(json.dumps(report, indent=1, default=str) + "\n")


@pytest.fixture(autouse=True)
def free_switches():
    """No test takes plans of another one, whose families, faults or architecture were forced."""
    yield
    torch.use_deterministic_algorithms(False)
    cuda._arch.cache_clear()
    assemble.clear_plans()


def has_backward(case: Case) -> bool:
    return case.kind != "paged"


T = TypeVar("T")


def drawn(choices: Sequence[T], at_least: int = 4) -> list[T]:
    """A seventh of the choices, others in each run: most of the time of a run goes into compiling their kernels.
    FLASHTILE_TEST_ALL=1 keeps them all."""
    if os.environ.get("FLASHTILE_TEST_ALL") == "1":
        return list(choices)
    count = min(len(choices), max(at_least, len(choices) // 7))
    return random.Random(f"{SEED} {len(choices)} {choices[0]}").sample(choices, count)


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
