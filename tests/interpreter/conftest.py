"""Triton's interpreter, made faster: it runs only with TRITON_INTERPRET=1 (tests/cpu/test_triton.py)."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def patches_once() -> Iterator[None]:
    """The interpreter replaces every function of triton.language at the start of a kernel, and again, to no effect, in
    each call of a device function, which takes half of its time. Here it does so once for each kernel."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch, run_grid = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules: dict[int, frozenset[Any]] = {}  # of triton.language that a file of kernels sees, by its globals
    patched = set[Any]()  # since the kernel began

    def patch_once(function: Any) -> Any:
        seen = function.__globals__
        if id(seen) not in modules:
            modules[id(seen)] = frozenset(
                value for value in seen.values() if inspect.ismodule(value) and value in (tl, tl.core)
            )
        if modules[id(seen)] <= patched:
            return interpreter._LangPatchScope()
        patched.update(modules[id(seen)])
        return patch(function)

    def run_patched(*args: Any, **options: Any) -> Any:
        patched.clear()
        return run_grid(*args, **options)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(interpreter, "_patch_lang", patch_once)
        context.setattr(interpreter.GridExecutor, "__call__", run_patched)
        yield
