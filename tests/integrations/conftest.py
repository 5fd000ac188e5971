"""Tests create their tensors and models on the device that FLASHTILE_TEST_DEVICE names; without it on the CPU."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def test_device() -> Iterator[None]:
    name = os.environ.get("FLASHTILE_TEST_DEVICE")
    if name is None:
        yield
        return
    torch.use_deterministic_algorithms(False)  # cuBLAS and others would refuse
    torch.set_default_device(name)
    yield
    torch.set_default_device(None)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints what test_transformers_models.py found, of every model type."""
    found: dict[str, list[str]] = defaultdict(list)
    for reports in terminalreporter.stats.values():
        for report in reports:
            for key, value in getattr(report, "user_properties", []):
                if key == "model_type" and report.when == "call":
                    found[value[0]].append(value[1])
    for outcome, names in sorted(found.items()):
        listed = "" if outcome == "right" else f": {', '.join(sorted(names))}"
        terminalreporter.write_line(f"transformers model types, {outcome}: {len(names)}{listed}")
