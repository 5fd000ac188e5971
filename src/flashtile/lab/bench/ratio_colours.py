"""Colours and text of speed ratios, the same in figures and on the report's page: orange above 1, purple below."""

from __future__ import annotations

import math
from collections.abc import Sequence

Colour = tuple[float, float, float]  # red, green, blue, from 0 to 1

_EQUAL: Colour = (247 / 255, 247 / 255, 247 / 255)
_FASTER: Colour = (179 / 255, 88 / 255, 6 / 255)
_SLOWER: Colour = (84 / 255, 39 / 255, 136 / 255)
WORDS = "above 1, in orange, the first is faster; below 1, in purple, the second"


def share(ratio: float) -> float:
    """Returns the logarithm to base 2 of a ratio, within -1 (half or less) and 1 (double or more)."""
    return max(-1.0, min(1.0, math.log2(ratio)))


def colour(part: float) -> Colour:
    """Returns the colour of a share."""
    end, amount = _FASTER if part > 0 else _SLOWER, abs(part) ** 0.8
    red, green, blue = (start + (stop - start) * amount for start, stop in zip(_EQUAL, end, strict=True))
    return red, green, blue


def on(back: Colour) -> str:
    """Returns black or white, whichever has the better contrast on a colour."""
    return "#ffffff" if _luminance(back) < 0.18 else "#000000"


def text(ratio: float) -> str:
    """Returns a ratio with two decimals, so that the numbers of a table line up."""
    return f"{ratio:.2f}"


def _luminance(back: Sequence[float]) -> float:
    """Returns the relative luminance of an sRGB colour."""
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in back]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
