"""Random problems against the independent reference (tools/independent), and against wrong ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "independent"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *options], capture_output=True, text=True)


def test_random_problems_agree() -> None:
    """With a fresh seed every time; a failure prints the command that shows it again."""
    found = run("--problems", "100")
    assert found.returncode == 0, found.stdout + found.stderr
    assert " 0 failed" in found.stdout


def test_wrong_references_are_noticed() -> None:
    found = run("--faults", "--seconds", "3600")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "NOT NOTICED" not in found.stdout
    assert len(found.stdout.splitlines()) >= 15
