"""The attention of the xformers package, served by flashtile on every device and dtype it takes.

    from flashtile.integrations.xformers import LowerTriangularMask, memory_efficient_attention     # as they are
    import flashtile.integrations.xformers as ours
    ours.install()                                                              # or under the names of the package
    import xformers.ops as xops

`xformers.ops.fmha` and its attn_bias are there; the other operators of the package are not. Where the package itself is
installed, its bias classes may be passed to these functions.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

from flashtile.integrations.xformers import ops, version
from flashtile.integrations.xformers.ops import *  # noqa: F403, the names of xformers.ops
from flashtile.integrations.xformers.ops import __all__ as _names
from flashtile.integrations.xformers.ops import fmha
from flashtile.integrations.xformers.ops.fmha import attn_bias
from flashtile.integrations.xformers.version import __version__

__all__ = [*_names, "__version__", "install", "uninstall"]

_installed: dict[str, ModuleType] = {}


def install(replace: bool = False) -> None:
    """Makes `import xformers` give these modules. Where the package is installed this is refused, unless replace is
    True."""
    if _installed:
        return
    if not replace and find_spec("xformers") is not None:
        raise ImportError("xformers is installed; flashtile takes its place only with install(replace=True).")
    for name in [name for name in sys.modules if name.partition(".")[0] == "xformers"]:
        del sys.modules[name]
    _installed.update(
        {
            "xformers": sys.modules[__name__],
            "xformers.version": version,
            "xformers.ops": ops,
            "xformers.ops.fmha": fmha,
            "xformers.ops.fmha.attn_bias": attn_bias,
        }
    )
    sys.modules.update(_installed)


def uninstall() -> None:
    """Undoes `install`. Names that were imported meanwhile stay."""
    for name, module in _installed.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _installed.clear()
