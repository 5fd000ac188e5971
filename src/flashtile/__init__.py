"""flashtile: IO-aware attention for PyTorch. `flashtile.attention` is the place to start."""

import flashtile.flops  # noqa: F401, registers the formulas
from flashtile.api import attention, attention_kvcache, attention_varlen, explain, prewarm
from flashtile.backends.registry import Explanation
from flashtile.errors import SlowPathWarning, Unsupported
from flashtile.facades import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)
from flashtile.version import __version__

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
    "prewarm",
    "scaled_dot_product_attention",
]
