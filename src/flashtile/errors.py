"""The errors and warnings of flashtile, and the one form their messages take.

Every refusal names the argument, what came, what is accepted and, where there is one, the way out:

    k: got 3 heads; accepted: a divisor of q's 4 heads. Repeat or drop heads.
"""

from __future__ import annotations

import re
import sys
from typing import Any, TypeVar

import torch

ErrorType = TypeVar("ErrorType", bound=Exception)


class Unsupported(NotImplementedError):  # noqa: N818, the public name
    """A valid request that no backend, or not the one asked for, can serve. The message says why."""


class SlowPathWarning(UserWarning):
    """A slower backend serves a call. Shown once per reason; an error under FLASHTILE_STRICT=1."""


def message(argument: str, came: Any, accepted: str, way_out: str = "") -> str:
    text = f"{argument}: got {describe(came)}; accepted: {accepted}."
    return f"{text} {way_out}." if way_out else text


def value_error(argument: str, came: Any, accepted: str, way_out: str = "") -> ValueError:
    return _marked(ValueError(message(argument, came, accepted, way_out)))


def type_error(argument: str, came: Any, accepted: str, way_out: str = "") -> TypeError:
    return _marked(TypeError(message(argument, came, accepted, way_out)))


def unsupported(argument: str, came: Any, accepted: str, way_out: str = "") -> Unsupported:
    return _marked(Unsupported(message(argument, came, accepted, way_out)))


def _marked(error: ErrorType) -> ErrorType:
    error.names_argument = True  # type: ignore[attr-defined]
    return error


def caller_stacklevel() -> int:
    """For a `warnings.warn` in the function that asks: the first frame outside of flashtile and torch, whose dispatcher may stand between a
    public function and its kernel. On autograd's threads there is none: the outermost."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("flashtile", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def describe(value: Any) -> str:
    """What came, in words: a string is taken as it is, the rest is described by type and value."""
    if isinstance(value, str):
        return value
    if isinstance(value, torch.Tensor):
        return f"shape {tuple(value.shape)} ({dtype_name(value.dtype)} on {value.device})"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return f"{value!r} ({type(value).__name__})"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def renamed(error: Exception, names: dict[str, str]) -> Exception:
    """One of our errors in the words of a function whose arguments have other names; any other error as it is."""
    if not names or not getattr(error, "names_argument", False):
        return error
    pattern = r"\b(" + "|".join(re.escape(name) for name in names) + r")\b"
    text = re.sub(pattern, lambda match: names[match[0]], str(error))
    return _marked(type(error)(text)).with_traceback(error.__traceback__)
