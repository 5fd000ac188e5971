"""The names of dtypes, the same for every command: bf16 and bfloat16, fp16, float16 and half, ..."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flashtile.errors import dtype_name, value_error

# By their short names, which stand in results
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_SPELLINGS = {dtype_name(dtype): key for key, dtype in DTYPES.items()} | {"half": "fp16"}


def accepted_names(keys: Iterable[str] = DTYPES) -> str:
    """Returns every spelling of these dtypes, for messages."""
    keys = list(keys)
    return ", ".join((*keys, *(name for name, key in _SPELLINGS.items() if key in keys)))


def dtype_key(name: str, option: str = "--dtype", keys: Iterable[str] = DTYPES) -> str:
    """Returns the short name of a dtype; refuses what is not one of `keys`."""
    key = _SPELLINGS.get(name, name)
    if key not in keys:
        raise value_error(option, repr(name), accepted_names(keys))
    return key
