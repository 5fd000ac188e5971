"""The quickstarts of README.md and the first blocks of two pages run as they are written, on the CPU.
tests/integrations/test_docs.py runs the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashtile

SOURCE = Path(flashtile.__file__).parents[1]
ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = {
    re.findall(r"^\*\*(.+?):\*\*", README[: match.start()], re.MULTILINE)[-1]: match.group(1)
    for match in re.finditer(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
}
ALONE = [title for title, block in BLOCKS.items() if "transformers" not in block]


def test_there_is_a_quickstart_for_each_use() -> None:
    assert list(BLOCKS) == ["Train", "A Hugging Face model", "Serve"]
    assert ALONE == ["Train", "Serve"]


def run(words: list[str], folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def first_block(page: str) -> str:
    found = re.search(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.mark.parametrize("title", ALONE)
def test_quickstart(title: str, tmp_path: Path) -> None:
    run(["-c", BLOCKS[title]], tmp_path)


def test_a_step_over_pages(tmp_path: Path) -> None:
    pages = "assert out.shape == q.shape and (k_pages.abs().sum((1, 2, 3)) > 0).sum() == 4  # one page of each sequence"
    run(["-c", f"{first_block('serving.md')}\n{pages}\nassert lengths.tolist() == [6, 1, 18, 101]"], tmp_path)


def test_attention_over_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(first_block("distributed.md"), encoding="utf-8")
    run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ranks.py"], tmp_path)
