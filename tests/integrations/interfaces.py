"""Signatures of other packages, as recorded in interfaces/ from the version that a file's name has.

The packages are in a folder of their own (requirements-apart.txt), so that nothing else finds them there. Where it is
missing, the recorded signatures stand alone; where it is there, tests compare them with the packages.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# `make test-integrations` puts the packages there
APART = Path(sys.prefix) / "apart"
RECORDED = Path(__file__).parent / "interfaces"


def recorded(name: str) -> dict[str, str]:
    """Returns the parameters of each function, without annotations and values of defaults."""
    return json.loads((RECORDED / f"{name}.json").read_text())


def outline(function: Callable[..., Any]) -> str:
    """Returns the parameters as they are recorded."""
    parts, is_starred = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_starred:
            parts.append("*")
            is_starred = True
        parts.append(parameter.name + ("" if parameter.default is parameter.empty else "="))
    return ", ".join(parts)


def outline_of_source(path: Path, name: str) -> str:
    """The same of a function in a file that cannot be imported here."""
    (node,) = (x for x in ast.parse(path.read_text()).body if isinstance(x, ast.FunctionDef) and x.name == name)
    arguments = node.args
    positional = [x.arg for x in (*arguments.posonlyargs, *arguments.args)]
    first_default = len(positional) - len(arguments.defaults)
    parts = [name + ("=" if index >= first_default else "") for index, name in enumerate(positional)]
    if arguments.kwonlyargs:
        parts.append("*")
        parts += [
            x.arg + ("" if default is None else "=")
            for x, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        ]
    return ", ".join(parts)


def apart(path: str) -> Path:
    """Returns a file or folder of a package that is kept apart."""
    found = APART / path
    if not found.exists():
        pytest.skip(f"{found} is missing: make test-integrations installs it")
    return found


@functools.cache
def imported(name: str) -> Any:
    """Returns a module of a package that is kept apart, imported once: it may register operators. It does not find its
    neighbours, and nothing finds it afterwards."""
    package = name.partition(".")[0]
    source = apart(package)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / package).symlink_to(source)
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(folder)
            for new in [new for new in sys.modules if new.partition(".")[0] == package]:
                del sys.modules[new]
