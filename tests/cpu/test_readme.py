"""The quickstarts of README.md run as they are written, on the CPU. tests/integrations/test_docs.py runs the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashtile

SOURCE = Path(flashtile.__file__).parents[1]
README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = {
    re.findall(r"^\*\*(.+?):\*\*", README[: match.start()], re.MULTILINE)[-1]: match.group(1)
    for match in re.finditer(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
}
ALONE = [title for title, block in BLOCKS.items() if "transformers" not in block]


def test_there_is_a_quickstart_for_each_use() -> None:
    assert list(BLOCKS) == ["Train", "A Hugging Face model", "Serve"]
    assert ALONE == ["Train", "Serve"]


@pytest.mark.parametrize("title", ALONE)
def test_quickstart(title: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS[title]], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
