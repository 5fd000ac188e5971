"""The console script `flashtile`.

It stands outside of the package, whose import takes seconds: an interrupt meanwhile ends the process at once, without
a traceback.
"""

from __future__ import annotations

import signal


def main() -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from flashtile.cli.main import app

    signal.signal(signal.SIGINT, handler)
    app()
