"""One problem of a check: a case, its seed and its passes, and the line of text that brings it back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from flashtile.errors import dtype_name, value_error
from flashtile.problem import DTYPES
from flashtile.testing import Case, Inputs

# The backend is asked for on the command line, not by the problem
_FIELDS = {field.name: field for field in dataclasses.fields(Case) if field.name != "backend"}


@dataclass(frozen=True)
class Trial:
    """A problem to be run; its text is a reproducer."""

    case: Case
    seed: int
    has_backward: bool

    def make(self, device: str) -> Inputs:
        return self.case.make(self.seed, device)

    def __str__(self) -> str:
        """What differs from the plain case, as name=value with commas between."""
        words = [
            f"{name}={_text(getattr(self.case, name))}"
            for name, field in _FIELDS.items()
            if getattr(self.case, name) != field.default
        ]
        return ",".join([*words, f"seed={self.seed}", f"pass={'backward' if self.has_backward else 'forward'}"])

    @classmethod
    def parse(cls, text: str) -> Trial:
        """The reverse of str. Fields that are left out are those of the plain case."""
        options: dict[str, Any] = {}
        seed, has_backward = 0, False
        for word in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = word.partition("=")
            if not equals or name not in {*_FIELDS, "seed", "pass"}:
                raise value_error(
                    "--case", repr(word), f"name=value, the name one of {', '.join((*_FIELDS, 'seed', 'pass'))}"
                )
            try:
                if name == "seed":
                    seed = int(value)
                elif name == "pass":
                    has_backward = {"forward": False, "backward": True}[value]
                else:
                    options[name] = _value(_FIELDS[name].type, value)
            except (ValueError, KeyError) as error:
                accepted = {
                    "pass": "forward or backward",
                    "seed": "an integer",
                    "dtype": ", ".join(map(dtype_name, DTYPES)),
                }.get(name)
                accepted = accepted or str(_FIELDS[name].type)
                raise value_error("--case", repr(word), accepted) from error
        return cls(Case(**options), seed, has_backward)


def _text(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _value(kind: Any, text: str) -> Any:
    kind, _, optional = str(kind).partition(" | ")
    if optional and text == "None":
        return None
    if kind == "torch.dtype":
        return {dtype_name(dtype): dtype for dtype in DTYPES}[text]
    if kind == "bool":
        return {"True": True, "False": False}[text]
    if kind.startswith("tuple"):
        left, right = text.split(":")
        return int(left), int(right)
    return {"int": int, "float": float, "str": str}[kind](text)
