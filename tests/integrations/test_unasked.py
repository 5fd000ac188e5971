"""Nothing is imported or changed before somebody asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashtile

SOURCE = Path(flashtile.__file__).parents[1]
PACKAGES = (
    "transformers",
    "diffusers",
    "thunder",
    "vllm",
    "onnx",
    "flash_attn",
    "accelerate",
    "comfy",
    "megatron",
    "torchtitan",
    "torch._dynamo",
    "torch.distributed.tensor",
)
CHECK = f"""
import sys, torch, torch.nn.functional as F
before, loaded = F.scaled_dot_product_attention, set(sys.modules)
{{statement}}
assert F.scaled_dot_product_attention is before
new = [name for name in {PACKAGES} if name in sys.modules and name not in loaded]
assert not new, new
"""


@pytest.mark.parametrize(
    "statement",
    [
        "import flashtile",
        "import flashtile.integrations",
        "from flashtile.integrations import comfyui, sdpa, torch_flash, export",
    ],
)
def test_imports(statement: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(statement=statement)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_importing_a_module_patches_nothing() -> None:
    from transformers import AttentionInterface, PreTrainedModel

    from flashtile.integrations import transformers as ours

    ours.unregister()
    assert "ftile" not in AttentionInterface._global_mapping
    assert not hasattr(PreTrainedModel._check_and_adjust_attn_implementation, "_flashtile_original")
