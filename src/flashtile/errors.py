"""The errors and warnings of flashtile, and the format of their messages.

Every error names the argument, what it got, what is accepted and, if possible, what to do:

    k: got 3 heads; accepted: a divisor of q's 4 heads. Repeat or drop heads.
"""

from __future__ import annotations

import re
import sys
from typing import Any, TypeVar

import torch

ErrorType = TypeVar("ErrorType", bound=Exception)


class Unsupported(NotImplementedError):  # noqa: N818, the public name
    """A valid call that no backend, or not the requested one, can handle. The message says why."""


class SlowPathWarning(UserWarning):
    """A call falls back to a slower backend. Shown once per reason; an error under FLASHTILE_STRICT=1."""


def message(argument: str, got: Any, accepted: str, hint: str = "") -> str:
    text = f"{argument}: got {describe(got)}; accepted: {accepted}."
    return f"{text} {hint}." if hint else text


def value_error(argument: str, got: Any, accepted: str, hint: str = "") -> ValueError:
    return _marked(ValueError(message(argument, got, accepted, hint)))


def type_error(argument: str, got: Any, accepted: str, hint: str = "") -> TypeError:
    return _marked(TypeError(message(argument, got, accepted, hint)))


def unsupported(argument: str, got: Any, accepted: str, hint: str = "") -> Unsupported:
    return _marked(Unsupported(message(argument, got, accepted, hint)))


def _marked(error: ErrorType) -> ErrorType:
    error.names_argument = True  # type: ignore[attr-defined]
    return error


def caller_stacklevel() -> int:
    """For a `warnings.warn` in the function that asks: the first frame outside of flashtile and torch, whose dispatcher
    may stand between a public function and its kernel. On autograd's threads there is none: the outermost."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("flashtile", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def describe(value: Any) -> str:
    """The value as text: a string as it is, anything else by type and value."""
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
    """The error with argument names replaced, for functions whose arguments have other names.

    Errors that do not come from this module are returned as they are.
    """
    if not names or not getattr(error, "names_argument", False):
        return error
    pattern = r"\b(" + "|".join(re.escape(name) for name in names) + r")\b"
    text = re.sub(pattern, lambda match: names[match[0]], str(error))
    return _marked(type(error)(text)).with_traceback(error.__traceback__)
