"""Tests create their tensors and models on the device that FLASHTILE_TEST_DEVICE names; without it on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
