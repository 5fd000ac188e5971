"""The console script `flashtile`.

It stands outside of the package, whose `__init__` imports torch: the help and the errors of the parser need none of it.
"""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    if "flashtile" not in sys.modules:
        spec = importlib.util.find_spec("flashtile")
        assert spec is not None
        sys.modules["flashtile"] = importlib.util.module_from_spec(spec)  # a command runs its __init__
    from flashtile.cli.main import app

    app()
