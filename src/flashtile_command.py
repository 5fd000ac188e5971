"""The console script `flashtile`.

It stands outside of the package, whose import takes seconds: an interrupt meanwhile ends the process at once, without
a traceback.
"""

from __future__ import annotations

import signal
import sys


def main() -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from flashtile.cli.main import app
    except (ValueError, NotImplementedError) as error:  # a variable of the environment that says nonsense
        if not getattr(error, "names_argument", False):
            raise
        sys.exit(f"flashtile: {error}")
    signal.signal(signal.SIGINT, handler)
    app()
