"""The names of the flash_attn package, served by flashtile on every device and dtype it takes.

    from flashtile.integrations.flash_attn import flash_attn_qkvpacked_func     # use them as they are
    import flashtile.integrations.flash_attn as ours
    ours.install()                                                              # or under the names of the package
    from flash_attn import flash_attn_func
    from flash_attn.bert_padding import unpad_input

FlashAttention-3's functions are in `fa3`, installed as `flash_attn_interface`. FlashAttention-4's are in `cute`,
installed as `flash_attn.cute`.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

from flashtile.integrations.flash_attn import bert_padding, cute, fa3, flash_attn_interface, mha, rotary
from flashtile.integrations.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

# The version whose functions these are
__version__ = "2.8.4"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]


def _package(name: str, **modules: ModuleType) -> ModuleType:
    package = ModuleType(name, "Served by flashtile.")
    package.__path__ = []
    package.__dict__.update(modules)
    return package


def _modules() -> dict[str, ModuleType]:
    return {
        "flash_attn": sys.modules[__name__],
        "flash_attn.flash_attn_interface": flash_attn_interface,
        "flash_attn.bert_padding": bert_padding,
        "flash_attn.layers": _package("flash_attn.layers", rotary=rotary),
        "flash_attn.layers.rotary": rotary,
        "flash_attn.modules": _package("flash_attn.modules", mha=mha),
        "flash_attn.modules.mha": mha,
        "flash_attn.cute": cute,
        "flash_attn.cute.interface": cute,
        "flash_attn_interface": fa3,
    }


_installed: dict[str, ModuleType] = {}


def install(replace: bool = False) -> None:
    """Makes `import flash_attn` and `import flash_attn_interface` give these modules. Where one of the packages is
    installed this is refused, unless replace is True."""
    if _installed:
        return
    for name in ("flash_attn", "flash_attn_interface"):
        if not replace and find_spec(name) is not None:
            raise ImportError(f"{name} is installed; flashtile takes its place only with install(replace=True).")
    if replace:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "flash_attn_interface")]:
            del sys.modules[name]
    _installed.update(_modules())
    sys.modules.update(_installed)


def uninstall() -> None:
    """Undoes `install`. Names that were imported meanwhile stay."""
    for name, module in _installed.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _installed.clear()
