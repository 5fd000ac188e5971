"""The words that describe the calls to profile: `B=4 H=16 S=4096 d=128 causal dtype=bf16 pass=fwd,bwd`.

A value may be a list: `S=1024,4096` profiles both lengths. `causal` and `full` may stand together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from flashtile.errors import value_error
from flashtile.lab.bench.points import DIRECTIONS, Point
from flashtile.lab.dtypes import dtype_key

_SIZES = ("B", "H", "Hkv", "S", "Sq", "Sk", "d", "dv")
_DEFAULTS = {"B": "4", "H": "16", "S": "4096", "d": "128", "dtype": "bf16", "pass": "fwd"}
_MASKS = ("full", "causal")
_EXAMPLE = "B=4 H=16 S=4096 d=128 causal dtype=bf16 pass=fwd,bwd"
_MAX_SIZE = 2**24


@dataclass(frozen=True)
class Problems:
    points: tuple[Point, ...]
    stem: str  # of the result files


def parse(words: Sequence[str]) -> Problems:
    """The points of the words. What is left out has the values of the example."""
    given: dict[str, list[str]] = {}
    masks = [word for word in words if word in _MASKS]
    for word in words:
        if word in _MASKS:
            continue
        key, equals, value = word.partition("=")
        if key not in (*_SIZES, "dtype", "pass") or not equals:
            raise value_error("problem", repr(word), f"words such as {_EXAMPLE}, and Hkv, Sq, Sk, dv, full")
        if key in given:
            raise value_error("problem", f"{key} twice", "each word once; a list is written S=1024,4096")
        given[key] = _values(key, value)
    lists = {key: given.get(key, [default]) for key, default in _DEFAULTS.items()}
    lists |= {key: values for key, values in given.items() if key not in lists}
    points = tuple(
        _point(dict(zip(lists, chosen, strict=True)), mask == "causal")
        for mask in dict.fromkeys(masks or ["full"])
        for chosen in itertools.product(*lists.values())
    )
    return Problems(points, _stem(lists, masks))


def _values(key: str, text: str) -> list[str]:
    parts = [part for part in text.split(",") if part]
    if not parts:
        raise value_error("problem", f"{key}={text}", f"{key} with a value")
    for part in parts:
        if key == "dtype":
            dtype_key(part)
        elif key == "pass":
            if part not in DIRECTIONS:
                raise value_error("pass", repr(part), ", ".join(DIRECTIONS))
        elif not (part.isascii() and part.isdigit() and 1 <= int(part) <= _MAX_SIZE):
            raise value_error(key, repr(part), f"an integer from 1 to {_MAX_SIZE}")
    return parts


def _point(chosen: dict[str, str], is_causal: bool) -> Point:
    size = {key: int(chosen[key]) for key in _SIZES if key in chosen}
    heads, head_dim = size["H"], size["d"]
    heads_kv = size.get("Hkv", heads)
    if heads % heads_kv:
        raise value_error("Hkv", str(heads_kv), f"a divisor of H, which is {heads}")
    return Point(
        batch=size["B"],
        heads=heads,
        heads_kv=heads_kv,
        seqlen_q=size.get("Sq", size["S"]),
        seqlen_k=size.get("Sk", size["S"]),
        head_dim=head_dim,
        head_dim_v=size.get("dv", head_dim),
        dtype=dtype_key(chosen["dtype"]),
        is_causal=is_causal,
        direction=chosen["pass"],
    )


def _stem(lists: dict[str, list[str]], masks: Sequence[str]) -> str:
    """The words in one fixed order, so that a problem has one file name. A mask or pass alone is left out where it is
    the default."""
    sizes = [key + "-".join(lists[key]) for key in _SIZES if key in lists and not (key == "S" and "Sq" in lists)]
    names = [dtype_key(name) for name in lists["dtype"]]
    for words, default in ((list(dict.fromkeys(masks)), "full"), (lists["pass"], "fwd")):
        names += [] if words in ([], [default]) else [word.replace("+", "") for word in words]
    return "_".join(["profile", *sizes, *names])


def stem(point: Point) -> str:
    """The file name of one problem and pass."""
    words = {"B": point.batch, "H": point.heads, "Hkv": point.heads_kv, "Sq": point.seqlen_q, "Sk": point.seqlen_k}
    words |= {"d": point.head_dim, "dv": point.head_dim_v}
    if point.heads_kv == point.heads:
        del words["Hkv"]
    if point.seqlen_q == point.seqlen_k:
        del words["Sq"], words["Sk"]
        words["S"] = point.seqlen_q
    if point.head_dim_v == point.head_dim:
        del words["dv"]
    texts = [f"{key}={value}" for key, value in {**words, "dtype": point.dtype, "pass": point.direction}.items()]
    return parse([*texts, "causal"] if point.is_causal else texts).stem
