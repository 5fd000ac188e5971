"""The errors and warnings of flashtile, and the format of their messages.

Every error names the argument, what it got, what is accepted and, if possible, what to do:

    k: got 3 heads; accepted: a divisor of q's 4 heads. Repeat or drop heads.
"""

from __future__ import annotations

import difflib
import os
import re
import reprlib
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch.compiler import is_compiling

ErrorType = TypeVar("ErrorType", bound=Exception)

_LONGEST_TEXT = 2000  # of a value in a message


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
    if not is_compiling():  # Dynamo cannot trace the attribute, and would report that instead of the error
        error.names_argument = True  # type: ignore[attr-defined]
    return error


def is_switched_on(variable: str, default: bool = False) -> bool:
    """An environment variable that is 0 or 1; the default where it is unset or empty."""
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise value_error(variable, repr(value), "0 or 1")
    return value == "1" if value else default


def caller_stacklevel() -> int:
    """Returns the level of the first frame outside of flashtile and torch for a `warnings.warn` in the function that
    asks; torch's dispatcher may stand between a public function and its kernel. On autograd's threads there is no such
    frame, and the outermost is taken."""
    level, frame, inner = 1, sys._getframe(1), (__name__.partition(".")[0], "torch")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in inner:
        level, frame = level + 1, frame.f_back
    return level


_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxlist, _repr.maxtuple, _repr.maxdict, _repr.maxstring, _repr.maxother = 2, 8, 8, 4, 80, 80


def describe(value: Any) -> str:
    """The value as text: a string as it is, tensors and arrays by shape, anything else by type and value. Long values
    are cut."""
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_TEXT else value[:_LONGEST_TEXT] + "..."
    if isinstance(value, torch.Tensor):
        return f"shape {_sizes(value)} ({dtype_name(value.dtype)} on {value.device})"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"shape {_sizes(value)} ({value.dtype}, {type(value).__module__}.{type(value).__name__})"
    return f"{short_repr(value)} ({type(value).__name__})"


def quoted(value: Any) -> Any:
    """A value as the caller gave it, for a message: a string would count as a description otherwise."""
    return f"{short_repr(value)} (str)" if isinstance(value, str) else value


def short_repr(value: Any) -> str:
    """The value as Python writes it, cut where it is long or nested."""
    # torch 2.10 cannot trace reprlib's way to these
    if isinstance(value, str):
        return _repr.repr_str(value, 1)
    return repr(value) if isinstance(value, float | bool) else _repr.repr(value)


def _sizes(value: Any) -> Any:
    try:
        return tuple(value.shape)
    except (RuntimeError, TypeError):  # a nested tensor with strides has none
        return "unknown"


# What other libraries call an option: what it is called here, and how
_FOREIGN_OPTIONS = {
    "is_causal": "causal='top_left', which is torch's meaning, or causal=True for the bottom right",
    "attn_mask": "mask for booleans (True = attend), bias for values to be added",
    "attention_mask": "mask for booleans (True = attend), bias for values to be added",
    "attn_bias": "bias",
    "key_padding_mask": "mask[:, None, None] of booleans (True = attend)",
    "enable_gqa": "nothing: key heads are shared by their number",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "window_size": "window",
    "sliding_window": "window=(left, right)",
    "logits_soft_cap": "softcap",
    "s_aux": "sinks",
    "dropout": "dropout_p",
    "return_attn_probs": "return_lse; probabilities are never stored",
    "return_softmax_lse": "return_lse",
}


def unknown_option(function: str, name: str, known: Iterable[str]) -> TypeError:
    """Returns the error for an option that the function does not have; it names the one that was probably meant."""
    known = list(known)
    if name in _FOREIGN_OPTIONS:
        return type_error(name, f"an option that {function} does not have", _FOREIGN_OPTIONS[name])
    close = [] if is_compiling() else difflib.get_close_matches(name, known, n=1)  # difflib cannot be traced
    hint = f"Perhaps {close[0]} is meant" if close else ""
    return type_error(name, f"an option that {function} does not have", ", ".join(known), hint)


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
