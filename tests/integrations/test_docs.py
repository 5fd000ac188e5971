"""Every block of docs/integrations.md runs as it is written, and so does that of README.md with transformers."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashtile

SOURCE = Path(flashtile.__file__).parents[1]
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text()
BLOCKS = {
    re.findall(r"^## (.*)$", PAGE[: match.start()], re.MULTILINE)[-1]: match.group(1)
    for match in re.finditer(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
}

README = (ROOT / "README.md").read_text()
WITH_TRANSFORMERS = [
    block
    for block in re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    if "import AutoModelForCausalLM" in block
]


def run(block: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, "-c", block], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("title", BLOCKS)
def test_block(title: str, tmp_path: Path) -> None:
    for package in ("kernels", "megatron.core", "thunder", "torchtitan", "vllm"):
        if re.search(rf"^(import|from) {package}\b", BLOCKS[title], re.MULTILINE):
            try:
                importlib.import_module(package)
            except Exception as error:
                pytest.skip(f"{package} cannot be imported: {error}")
    restore = "restore_flash_attention_impl"
    if restore in BLOCKS[title] and not hasattr(torch.nn.attention, restore):
        pytest.skip(f"this torch has no {restore}")
    done = run(BLOCKS[title], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_block_of_the_readme_with_transformers(tmp_path: Path) -> None:
    (block,) = WITH_TRANSFORMERS
    is_named = "assert model.config._attn_implementation == 'ftile'"
    done = run(f"{block}\nimport torch\n{is_named}\nmodel(torch.tensor([[5, 6, 7]]))", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_section_has_a_block() -> None:
    sections = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    without = ["What works with what", "What is not here", "Measured"]
    assert [title for title in sections if title not in BLOCKS] == without


def test_versions_are_those_of_the_environment() -> None:
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "requirements-integrations.txt").read_text(), re.MULTILINE))
    for package in ("transformers", "diffusers", "onnxruntime"):
        assert f"{package} {pins[package]}" in PAGE.replace("| transformers | ", "| transformers ")
    apart = dict(re.findall(r"^(\S+)==(\S+)", (ROOT / "requirements-apart.txt").read_text(), re.MULTILINE))
    written = {
        "axolotl": "axolotl",
        "kernels": "kernels",
        "llamafactory": "LLaMA-Factory",
        "trl": "TRL",
        "verl": "verl",
    }
    for package, name in (written | {"xformers": "xformers"}).items():
        assert f"{name} {apart[package]}" in PAGE
    assert f"FlashAttention-3 and -4 ({apart['flash-attn-4']})" in PAGE
