"""One problem of a check: a case, its seed and its passes, and the line of text that brings it back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flashtile import families
from flashtile.errors import dtype_name, value_error
from flashtile.lab.dtypes import DTYPES, accepted_names, dtype_key
from flashtile.problem import CAUSAL_KINDS, LAYOUTS, MAX_HEAD_DIM
from flashtile.testing import DOUT_MEMORIES, FORWARD_ONLY, KINDS, MEMORIES, VALUES, Case, Inputs

# The backend is asked for on the command line, not by the problem
_FIELDS = {field.name: field for field in dataclasses.fields(Case) if field.name != "backend"}
_OTHERS = ("families", "seed", "pass")


@dataclass(frozen=True)
class Trial:
    """A problem to be run; its text is a reproducer."""

    case: Case
    seed: int
    has_backward: bool
    families: tuple[str, ...] = ()  # of the CUDA engine's kernels: those that must run; none: the fastest

    def make(self, device: str) -> Inputs:
        return self.case.make(self.seed, device)

    def __str__(self) -> str:
        """Returns what differs from the plain case, as name=value with commas between."""
        words = [
            f"{name}={_text(getattr(self.case, name))}"
            for name, field in _FIELDS.items()
            if getattr(self.case, name) != field.default
        ]
        words += [f"families={_text(self.families)}"] if self.families else []
        return ",".join([*words, f"seed={self.seed}", f"pass={'backward' if self.has_backward else 'forward'}"])

    @classmethod
    def parse(cls, text: str) -> Trial:
        """The reverse of str. Fields that are left out are those of the plain case."""
        options: dict[str, Any] = {}
        seed, has_backward, chosen = 0, False, tuple[str, ...]()
        for word in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = word.partition("=")
            if not equals or name not in {*_FIELDS, *_OTHERS}:
                raise value_error(
                    "--case", repr(word), f"name=value, the name one of {', '.join((*_FIELDS, *_OTHERS))}"
                )
            try:
                if name == "seed":
                    seed = int(value)
                elif name == "pass":
                    has_backward = {"forward": False, "backward": True}[value]
                elif name == "families":
                    chosen = tuple(families.find(part).name for part in value.split(":"))
                else:
                    options[name] = _value(_FIELDS[name].type, value)
            except (ValueError, KeyError) as error:
                accepted = {
                    "pass": "forward or backward",
                    "seed": "an integer",
                    "families": ":".join(family.name for family in families.all_families()) + ", or some of them",
                    "dtype": accepted_names(),
                }.get(name)
                accepted = accepted or str(_FIELDS[name].type)
                raise value_error("--case", repr(word), accepted) from error
            if name in _ACCEPTED and not _ACCEPTED[name].is_met(options.get(name, seed)):
                raise value_error("--case", repr(word), _ACCEPTED[name].words)
        trial = cls(Case(**options), seed, has_backward, chosen)
        if has_backward and trial.case.values in FORWARD_ONLY:
            raise value_error("--case", f"'values={trial.case.values}' with 'pass=backward'", "pass=forward")
        return trial


class _Accepted(NamedTuple):
    """Values that a field may have, as a test and in words."""

    is_met: Callable[[Any], bool]
    words: str


def _one_of(*names: str) -> _Accepted:
    return _Accepted(lambda value: value is None or value in names, ", ".join(names))


def _at_least(least: int) -> _Accepted:
    return _Accepted(lambda value: value >= least, f"an integer of {least} or more")


_AXES = _Accepted(
    lambda value: value is None or (value != "" and set(value) <= set("bhqk1")), "axes out of b, h, q and k, or 1"
)
_HEAD_DIM = _Accepted(lambda value: 1 <= value <= MAX_HEAD_DIM, f"1 to {MAX_HEAD_DIM}")
_ACCEPTED = {
    "layout": _one_of(*LAYOUTS),
    "kind": _one_of(*KINDS),
    "memory": _one_of(*MEMORIES),
    "dout": _one_of(*DOUT_MEMORIES),
    "causal": _one_of(*CAUSAL_KINDS),
    "values": _one_of(*VALUES),
    "alibi": _one_of("h", "bh"),
    "mask": _AXES,
    "bias": _AXES,
    "batch": _at_least(0),
    "heads": _at_least(1),
    "heads_kv": _at_least(1),
    "seqlen_q": _at_least(0),
    "seqlen_k": _at_least(0),
    "head_dim": _HEAD_DIM,
    "head_dim_v": _HEAD_DIM,
    "page_size": _at_least(1),
    "num_splits": _at_least(0),
    "window": _Accepted(lambda value: min(value) >= -1, "left:right, each -1 or more"),
    "scale": _Accepted(lambda value: value is None or math.isfinite(value), "a finite number"),
    "softcap": _Accepted(lambda value: 0 <= value < math.inf, "a finite number of 0 or more"),
    "dropout_p": _Accepted(lambda value: 0 <= value < 1, "a number from 0 up to, and without, 1"),
    "origin": _Accepted(
        lambda value: min(value) >= 0 and value[1] % 8 == 0, "query:key:head:heads, each 0 or more, key a multiple of 8"
    ),
    "seed": _Accepted(lambda value: 0 <= value < 1 << 63, "an integer from 0 to 2**63 - 1"),
}


def _text(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _value(kind: Any, text: str) -> Any:
    kind, _, optional = str(kind).partition(" | ")
    if optional and text == "None":
        return None
    if kind == "torch.dtype":
        return DTYPES[dtype_key(text)]
    if kind == "bool":
        return {"True": True, "False": False}[text]
    if kind.startswith("tuple"):
        numbers = tuple(map(int, text.split(":")))
        if len(numbers) != kind.count("int"):
            raise ValueError
        return numbers
    return {"int": int, "float": float, "str": str}[kind](text)
