"""Tests of tests/gpu as far as they run without a GPU (paper_gpu.py): calls take the kernels that tests name. Each run
draws some of their choices, as on a GPU; FLASHTILE_TEST_ALL=1 takes all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CPU = Path(__file__).resolve().parent
FILES = (("bwd", "fwd", "sm80"), ("cuda", "decode", "float32", "sm90"))  # by the beginnings of their names
COMPILING = "test_sm80_ptx.py"  # makes PTX of its kernels


@pytest.mark.parametrize("files", FILES, ids=" ".join)
def test_calls_take_the_kernels_that_tests_name(files: tuple[str, ...]) -> None:
    found = [path for start in files for path in sorted((CPU.parent / "gpu").glob(f"test_{start}*.py"))]
    paths = [str(path) for path in found if path.name != COMPILING]
    env = os.environ | {"FLASHTILE_EXECUTOR": "python"}
    env["PYTHONPATH"] = os.pathsep.join([str(CPU), env.get("PYTHONPATH", "")])
    # With -k no record of a run is written
    command = [sys.executable, "-m", "pytest", "-p", "paper_gpu", "-p", "no:cacheprovider", "-k", "test", *paths]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=CPU.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
