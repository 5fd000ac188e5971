"""The mma.sync families as PTX of other architectures, which the driver compiles for this GPU: exactly the instructions
that a Turing or an Ampere GPU has run here, with the tiles for its shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import check
from family_tests import FEATURES, needs_ampere, problem
from ptx import ptx_of

from flashtile import families
from flashtile.backends import cuda, executor, native
from flashtile.families.assemble import clear_plans
from flashtile.runtime import driver

pytestmark = needs_ampere
LENGTHS = ((150, 300), (193, 257), (64, 129))
FAMILIES = ("fwd_sm80", "fwd_sm80_wide", "bwd_sm80", "bwd_sm80_wide")


@pytest.fixture(params=["75", "80"])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Inside, every kernel is PTX of this architecture."""
    monkeypatch.setenv("FLASHTILE_ARCH", f"sm_{request.param}")
    cuda._arch.cache_clear()
    clear_plans()
    seen: dict[str, str] = {}  # PTX by kernel

    def function(unit: str, entry: str, arch: str) -> driver.Function:
        ptx, name = ptx_of(unit, entry, f"compute_{request.param}")
        assert f".target sm_{request.param}".encode() in ptx
        if "sm80" in entry:
            seen[entry] = ptx.decode(errors="replace")
        return driver.load(ptx).function(name)

    monkeypatch.setattr(executor, "function", function)
    with families.forced(*FAMILIES), native.python_only():
        yield request.param
    product = "m16n8k8" if request.param == "75" else "m16n8k16"
    assert all(any(kernel in entry for entry in seen) for kernel in ("fwd_sm80_kernel", "bwd_sm80_kernel"))
    assert all(f"mma.sync.aligned.{product}" in text for text in seen.values())
    assert all(("cp.async" in text) is (request.param == "80") for text in seen.values())
    cuda._arch.cache_clear()
    clear_plans()


# (head dims, feature, whether forward alone), in float16, which is all that Turing takes
PROBLEMS = (((64, 64), "causal", False), ((128, 128), "plain", False), ((256, 256), "causal", True))
WIDE = ((512, 512), "causal", False)  # not in the 64 KiB of Turing


@pytest.mark.long(50)
def test_error_rule(target: str) -> None:
    for number, (head_dims, feature, is_forward) in enumerate((*PROBLEMS, *([WIDE] if target == "80" else []))):
        # Tests poison memory by torch's switch for deterministic algorithms, under which bwd_sm80 refuses
        options = FEATURES[feature] | {"deterministic": False}
        case, seed = problem(2 * number + 1, head_dims, LENGTHS[number % len(LENGTHS)], **options)
        assert case.dtype == torch.float16
        check(case, seed, is_forward)
