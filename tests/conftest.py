"""Every test starts with poisoned memory: whatever torch.empty gives is NaN until somebody writes it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from flashtile import api
from flashtile.backends import native, registry

SEED = os.environ.get("FLASHTILE_SEED")
settings.register_profile(
    "flashtile",
    deadline=None,
    derandomize=bool(SEED),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("flashtile")


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: Any, config: pytest.Config) -> tuple[str, str, str] | None:
    """The name of a test that fails, as it comes, where others are dots."""
    if not (report.failed and config.get_verbosity() < 0):
        return None
    category, word = ("failed", "FAILED") if report.when == "call" else ("error", "ERROR")
    return category, f"\n{word} {report.nodeid}\n", word


@pytest.fixture(autouse=True)
def poisoned_memory():
    registry._warned.clear()
    api._served.clear()
    native.clear_plans()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def seed() -> int:
    """A fresh seed for each test and run, shown when the test fails. FLASHTILE_SEED repeats one, and hypothesis draws
    the same then."""
    value = int(SEED or random.SystemRandom().randrange(2**31))
    print(f"FLASHTILE_SEED={value}")
    torch.manual_seed(value)
    return value


@pytest.fixture
def threads() -> Iterator[None]:
    """Whatever a test sets, the next one starts as this one did."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kept_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled kernels are kept between runs of the tests: an unchanged one is compiled once."""
    folder = request.config.cache.mkdir("kernels")
    folder.chmod(0o700)
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(folder))
