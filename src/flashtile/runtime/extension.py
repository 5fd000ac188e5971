"""The C++ extension flashtile._C: its functions, or why it is not there. Whoever needs it asks `missing` first."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from types import ModuleType
from typing import Any

import torch

from flashtile.errors import unsupported, value_error
from flashtile.runtime import driver

_NAME = __name__.replace(".runtime.extension", "._C")
_ISA_SWITCH = "FLASHTILE_CPU_ISA"
_ALL_INSTRUCTION_SETS = ("avx512", "avx2", "baseline")  # that some build and processor have
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
# As csrc/exec/tensor.h: Dtype, from 1 on
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "bool", "uint8", *FLOAT8)


@functools.cache
def _load() -> tuple[ModuleType | None, str | None]:
    """The module, or the reason why there is none."""
    try:
        return importlib.import_module(_NAME), None
    except ModuleNotFoundError as error:
        if error.name != _NAME:
            raise
        if sys.platform == "win32":
            return None, "the C++ extension is not made for Windows; everything works through Python, slower"
        return (
            None,
            (
                "the C++ extension is not built; `pip install .` with a C++ compiler and torch 2.10 or newer in place, "
                "and without FLASHTILE_EXTENSION=0, builds it"
            ),
        )
    except ImportError as error:
        return None, f"the C++ extension does not load: {error}; `pip install .` builds it anew"


def missing() -> str | None:
    """Returns why there is no extension, or None."""
    return _load()[1]


def _module() -> Any:
    module, reason = _load()
    if module is None:
        raise unsupported("extension", str(reason), "a built extension")
    return module


def path() -> str:
    """The file of the extension."""
    return str(_module().__file__)


def params_bytes() -> int:
    """The size of the C++ struct of parameters."""
    return int(_module().PARAMS_BYTES)


@functools.cache
def instruction_sets() -> tuple[str, ...]:
    """Returns what both this build and this processor have, the best first."""
    return tuple(_module().instruction_sets())


def named_instruction_set() -> str | None:
    """Returns what FLASHTILE_CPU_ISA names, if anything."""
    wanted = os.environ.get(_ISA_SWITCH)
    if not wanted:
        return None
    known = _ALL_INSTRUCTION_SETS if missing() else instruction_sets()
    if wanted not in known:
        raise value_error(_ISA_SWITCH, repr(wanted), ", ".join(known), "Unset it")
    return wanted


def instruction_set() -> str:
    """Returns the instruction set that runs."""
    return named_instruction_set() or instruction_sets()[0]


def cpu_forward(params: int, *more: int) -> None:
    """Runs a forward pass; the arguments are those of csrc/module.cpp."""
    _module().cpu_forward(params, *more, instruction_set())


def cpu_backward(params: int, *more: int) -> None:
    _module().cpu_backward(params, *more, instruction_set())


# The executor (csrc/exec)


def executor() -> Any:
    """The module with its functions, or None."""
    return _load()[0]


def open_executor(device_type: str) -> str | None:
    """Lets C++ handle calls on such devices ("host": the CPU engine) from now on. Returns why it cannot, or None."""
    try:
        switches = torch._C._get_deterministic_algorithms, torch._C._get_float32_matmul_precision
    except AttributeError as error:
        return f"torch {torch.__version__} has no {error.name}"
    reason: str | None = _module().open_executor(driver.library(), device_type, driver.check, *switches)
    return reason
