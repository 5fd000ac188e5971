"""What a build says when it cannot make the extension. tools/try_install.py installs for real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")
ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    places = ("--build-lib", str(folder / "lib"))
    environment = {name: value for name, value in os.environ.items() if name not in ("FLASHTILE_EXTENSION", "CXX")}
    return subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_py", *places],
        cwd=ROOT, env=environment | variables, capture_output=True, text=True,
    )  # fmt: skip


def test_no_compiler(tmp_path: Path) -> None:
    done = build(tmp_path, PATH=str(tmp_path))
    assert done.returncode != 0
    assert "flashtile: the C++ extension cannot be built: there is no C++ compiler" in done.stderr
    assert "To install without the extension, which is slower, set FLASHTILE_EXTENSION=0." in done.stderr
    assert not (tmp_path / "lib").exists()


def test_the_extension_can_be_left_out(tmp_path: Path) -> None:
    done = build(tmp_path, PATH=str(tmp_path), FLASHTILE_EXTENSION="0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lib" / "flashtile" / "api.py").is_file()
    assert (tmp_path / "lib" / "flashtile_command.py").is_file()
    assert not (tmp_path / "lib" / "flashtile" / "csrc").exists()


def test_other_values_are_refused(tmp_path: Path) -> None:
    done = build(tmp_path, FLASHTILE_EXTENSION="no")
    assert done.returncode != 0
    assert "FLASHTILE_EXTENSION: got 'no'; accepted: 0 or 1." in done.stderr
