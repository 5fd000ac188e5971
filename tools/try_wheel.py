"""Tests a wheel with the current Python and torch: the extension's tests, and `flashtile check` for 20 seconds.

python tools/try_wheel.py dist/flashtile-0.1.0-cp310-abi3-linux_x86_64.whl [pytest options]

The wheel is unpacked into a temporary folder; nothing is installed. Exits 1 if it does not load or a test fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("test_cpu_engine.py", "test_host.py", "test_masked_rows.py", "test_error_rule.py")
LOAD_CHECK = """
import pathlib, platform, sys, torch, flashtile
from flashtile.runtime import extension
assert pathlib.Path(flashtile.__file__).is_relative_to(sys.argv[1]), flashtile.__file__
assert extension.missing() is None, extension.missing()
file, sets = pathlib.Path(extension.path()).name, ", ".join(extension.instruction_sets())
print(f"Python {platform.python_version()}, torch {torch.__version__}: {file}, {sets}")
"""


def main() -> int:
    wheel, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        tests = [str(ROOT / "tests" / "cpu" / name) for name in TESTS]
        for arguments in (
            ["-c", LOAD_CHECK, folder],
            ["-m", "pytest", "-p", "no:cacheprovider", "-k", "cpu or together", *options, *tests],
            ["-m", "flashtile", "check", "--device", "cpu", "--seconds", "20"],
        ):
            if subprocess.run([sys.executable, *arguments], cwd=folder, env=environment).returncode != 0:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
