"""flashtile: IO-aware attention for PyTorch. `flashtile.attention` is the place to start."""

import importlib
import os
import warnings
from typing import Any

with warnings.catch_warnings():
    # torch's imports warn where NumPy is not installed. Nothing here needs it
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    import flashtile.flops  # noqa: F401, registers the formulas
    from flashtile.api import attention, attention_kvcache, attention_varlen, explain, prewarm
    from flashtile.backends.environment import check as _check_environment
    from flashtile.backends.registry import Explanation
    from flashtile.errors import SlowPathWarning, Unsupported
    from flashtile.facades import (
        flash_attn_func,
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
        scaled_dot_product_attention,
    )
    from flashtile.version import __version__

__path__.append(os.path.join(__path__[0], "former"))
_check_environment()

__all__ = [
    "Explanation",
    "SlowPathWarning",
    "Unsupported",
    "__version__",
    "attention",
    "attention_kvcache",
    "attention_varlen",
    "explain",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "install",
    "prewarm",
    "scaled_dot_product_attention",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """`install` and `uninstall`, whose module is imported when one of them is asked for."""
    if name in ("install", "uninstall"):
        return getattr(importlib.import_module(f"{__name__}.integrations.torch_ops"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
