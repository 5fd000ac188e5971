"""Models written by others under `flashtile.install()`. test_torch_ops.py has the operators themselves."""

from __future__ import annotations

import installed_models
import pytest
import torch


@pytest.fixture(autouse=True)
def on_the_cpu(test_device: None) -> None:
    torch.set_default_device(None)


@pytest.mark.parametrize("name", installed_models.CASES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_model(name: str) -> None:
    package = installed_models.CASES[name][0]
    pytest.importorskip({"openai-whisper": "whisper"}.get(package, package.replace("-", "_")))
    result = installed_models.check(name)
    assert result.served > 0
    assert not result.left
    assert result.difference < 2e-4


def test_the_difference_is_seen() -> None:
    big, zero = torch.tensor([100.0, -2.0]), torch.tensor([1e-7])
    assert installed_models.difference([big, zero], [big, zero]) == 0.0
    assert installed_models.difference([big + 1e-3, zero], [big, zero]) == pytest.approx(1e-5, rel=0.1)
    assert installed_models.difference([big, -zero], [big, zero]) < 1e-5
    assert installed_models.difference([big, zero + float("nan")], [big, zero]) == float("inf")
