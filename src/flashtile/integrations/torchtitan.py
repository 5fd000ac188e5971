"""torchtitan's SDPA and variable-length attention, by `flashtile.install()`.

    from flashtile.integrations.torchtitan import register
    report = register()  # before torchtitan makes a model; unregister() undoes it

torchtitan activates FlashAttention-3 or -4 by name for each variable-length attention that it makes, which would take
the place of the operators that `install()` overrides, and fails where that package is missing. `register` therefore
also answers torchtitan's question for that name with None.
"""

from __future__ import annotations

import sys
from typing import Any

from torchtitan.tools import utils

from flashtile.integrations import torch_ops

_FUNCTION = "get_cuda_flash_attention_impl"
# Modules that hold the function under its name
_MODULES = (utils.__name__, "torchtitan.experiments.rl.models.attention")
_originals: dict[str, Any] = {}


def register() -> torch_ops.Report:
    """Serves the attention of every torchtitan model of this process. A second call changes nothing. Returns the report
    of `flashtile.install()`."""
    report = torch_ops.install()
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is not None and name not in _originals:
            _originals[name] = getattr(module, _FUNCTION)
            setattr(module, _FUNCTION, _no_name)
    return report


def unregister() -> None:
    """Undoes `register`, and `flashtile.install()` with it."""
    for name, original in _originals.items():
        setattr(sys.modules[name], _FUNCTION, original)
    _originals.clear()
    torch_ops.uninstall()


def _no_name() -> None:
    """Answers which flash attention torchtitan shall activate: none."""
    return None
