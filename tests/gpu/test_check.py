"""`flashtile check` on the GPU: all backends agree, and faults planted in the kernels are noticed."""

from __future__ import annotations

import os
import random

import pytest

from flashtile.backends import registry
from flashtile.check.mutants import hunt_one
from flashtile.check.runner import Settings, check
from flashtile.kernels.mutation import mutations

SEED = int(os.environ.get("FLASHTILE_SEED") or random.SystemRandom().randrange(2**31))


def settings(*names: str, **options) -> Settings:
    print(f"FLASHTILE_SEED={SEED}")
    backends = [backend for backend in registry.BACKENDS if "cuda" in backend.devices and (not names or backend.name in names)]
    return Settings(backends, "cuda", SEED, **options)


def test_all_backends_agree() -> None:
    report = check(settings(problems=100, reuse=20))
    assert report.ran.keys() >= {"cuda", "tiled", "reference"}
    assert len(report.kernels["cuda"]) > 10
    assert [f"{failure.reproducer}: {failure.smallest_complaints}" for failure in report.failures] == []


@pytest.mark.parametrize("name", ["skip_rescale", "mask_offset", "delta_missing"])
def test_a_fault_is_noticed(name: str) -> None:
    (mutation,) = [mutation for mutation in mutations() if mutation.name == name]
    assert hunt_one(mutation, settings("cuda", problems=200, chunk=8, reuse=2, stops_at_failure=True)).is_found
