"""Joins of measured rows. A key that does not tell rows apart would silently take one of them for the other: it is an
error."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from flashtile.errors import value_error

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


def unique(rows: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, Item]:
    """The rows by their keys, which must differ."""
    found: dict[Key, Item] = {}
    for row in rows:
        if (name := key(row)) in found:
            hint = f"They differ in {', '.join(_differences(found[name], row)) or 'nothing'}"
            raise value_error("rows", f"two of {name}", "rows that the columns of a table or figure tell apart", hint)
        found[name] = row
    return found


def groups(rows: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The rows of each key, in their order."""
    found: dict[Key, list[Item]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _differences(one: object, other: object) -> list[str]:
    """The columns in which two rows differ."""
    return [name for name, value in vars(one).items() if name != "env" and getattr(other, name) != value]
