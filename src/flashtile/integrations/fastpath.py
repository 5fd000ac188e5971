"""torch's fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer, which calls no attention function: it is
off while somebody holds it off."""

from __future__ import annotations

import torch

_holders = [0]
_was_enabled = [True]


def hold_off() -> None:
    if _holders[0] == 0:
        _was_enabled[0] = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
    _holders[0] += 1


def release() -> None:
    """Undoes one `hold_off`. The last one restores the setting that the first one found."""
    _holders[0] -= 1
    if _holders[0] == 0:
        torch.backends.mha.set_fastpath_enabled(_was_enabled[0])
