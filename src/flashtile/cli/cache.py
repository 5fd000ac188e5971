"""`flashtile cache`: where compiled kernels are kept, how many there are of which version, and how to remove them."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from flashtile.errors import is_switched_on, value_error
from flashtile.runtime.cache import KernelCache, Stored


def facts(cache: KernelCache) -> dict[str, Any]:
    """Returns folder, status and size of the cache. Creates no folder."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exists = cache.directory is not None and cache.directory.exists()
        is_usable = not exists or cache.usable() is not None
    found = {"directory": cache.directory and str(cache.directory), "status": "usable", "files": 0, "bytes": 0}
    if cache.directory is None:
        found["status"] = (
            "off: FLASHTILE_CACHE=0"
            if not is_switched_on("FLASHTILE_CACHE", default=True)
            else "off: the user has no home directory"
        )
    elif not is_usable:
        found["status"] = str(caught[0].message) if caught else "not usable"
    elif not exists:
        found["status"] = "not there yet: made when the first kernel is compiled"
    else:
        sizes = [path.lstat().st_size for path in cache.directory.glob("*.kernel")]
        found |= {"files": len(sizes), "bytes": sum(sizes)}
    return found


def held(found: dict[str, Any]) -> str:
    """Returns number and size of the kernels, in words."""
    return f"{found['files']} kernel{'' if found['files'] == 1 else 's'}, {found['bytes'] / 2**20:.1f} MB"


def prepare(is_clear: bool, is_sure: bool, as_json: bool) -> Callable[[], int]:
    """Checks the options and returns the job."""
    if is_sure and not is_clear:
        raise value_error("--yes", "it without --clear", "--clear --yes")
    if is_clear and not is_sure and (as_json or not _is_terminal()):
        raise value_error("--clear", "it where nobody can be asked", "--clear --yes, or a terminal")
    cache = KernelCache.default()
    if is_clear:
        return partial(_clear, cache, is_sure, as_json)
    return partial(_show, cache, as_json)


def _show(cache: KernelCache, as_json: bool) -> int:
    found = facts(cache)
    kernels = cache.stored() if found["files"] else []
    if as_json:
        print(json.dumps({**found, "kernels": [kernel._asdict() for kernel in kernels]}, indent=2))
        return 0
    console = Console()
    console.print(f"{found['directory'] or 'no folder'}: {found['status']}", highlight=False, soft_wrap=True)
    console.print(held(found), highlight=False)
    if kernels:
        console.print(_table(kernels))
    return 0


def _table(kernels: Sequence[Stored]) -> Table:
    groups: dict[tuple[str, str, str], list[int]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.flashtile, kernel.nvrtc, kernel.arch), []).append(kernel.num_bytes)
    shown = Table("flashtile", "NVRTC", "arch")
    for name in ("kernels", "MB"):
        shown.add_column(name, justify="right")
    for names, sizes in sorted(groups.items()):
        shown.add_row(*(name or "unknown" for name in names), str(len(sizes)), f"{sum(sizes) / 2**20:.1f}")
    return shown


def _clear(cache: KernelCache, is_sure: bool, as_json: bool) -> int:
    found = facts(cache)
    question = f"Remove {held(found)} from {found['directory']}?"
    if not is_sure and found["files"] and not typer.confirm(question):
        print("Nothing was removed.")
        return 1
    removed = cache.clear() if found["status"] == "usable" else 0
    if as_json:
        print(json.dumps({"directory": found["directory"], "removed": removed, "status": found["status"]}, indent=2))
    else:
        rest = "" if found["status"] == "usable" else f" ({found['status']})"
        print(f"{removed} kernel{'' if removed == 1 else 's'} removed{rest}.")
    return 0


def _is_terminal() -> bool:
    return sys.stdin.isatty()
