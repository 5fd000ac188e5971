"""Python imports this at its start, since flashtile.integrations.launch has put its folder on PYTHONPATH.

It imports neither torch nor flashtile: it waits until the program imports torch, or transformers' models, and acts
right after that. Where another sitecustomize would have been imported, it is imported too.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = str(FOLDER.parents[3])  # where flashtile is imported from


_TRANSFORMERS = "transformers.modeling_utils"
# By what the launcher's variable says: the module that is waited for, and our function
DOORS = {
    "transformers": (_TRANSFORMERS, "flashtile.integrations.transformers", "register"),
    "install": ("torch", "flashtile", "install"),
    "flash_attn": ("torch", "flashtile.integrations.flash_attn", "install"),
    "xformers": ("torch", "flashtile.integrations.xformers", "install"),
}

_half_imported: set[str] = set()  # of the modules that are waited for


def _opener(awaited: str, module: str, function: str) -> Callable[[], None]:
    """Returns what calls our function, once: as soon as the awaited module is imported and none of ours is half
    imported, as where the program imports flashtile, which imports torch."""
    names = (awaited, "flashtile", module)
    is_done = False

    def act() -> None:
        nonlocal is_done
        if is_done or awaited not in sys.modules or not _half_imported.isdisjoint(names):
            return
        is_done = True
        if ROOT not in sys.path:
            sys.path.append(ROOT)
        getattr(importlib.import_module(module), function)()

    return act


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do, and has something done once the module is imported."""

    def __init__(self, actions: dict[str, list[Callable[[], None]]]) -> None:
        self.actions = actions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.actions:
            return None
        spec = None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                break
        if spec is not None and spec.loader is not None:
            # Whoever only asks where the module is gets this spec, too
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                loader.exec_module = execute
                _half_imported.add(name)
                try:
                    execute(module)
                finally:
                    _half_imported.discard(name)
                for action in self.actions.pop(name, []):
                    action()

            loader.exec_module = exec_module
        return spec


def _wait() -> None:
    actions: dict[str, list[Callable[[], None]]] = {}
    for door in filter(None, os.environ.get("FLASHTILE_LAUNCH", "").split(",")):
        awaited, module, function = DOORS[door]
        action = _opener(awaited, module, function)
        for name in {awaited, "flashtile", module}:
            actions.setdefault(name, []).append(action)
    if actions:
        sys.meta_path.insert(0, _Finder(actions))


def _import_other() -> None:
    """Imports the sitecustomize that this one hides."""
    paths = [path for path in sys.path if Path(path or ".").resolve() != FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_wait()
_import_other()
