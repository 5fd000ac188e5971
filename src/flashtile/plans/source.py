"""The generated unit: one include, one kernel named with its policies, and the asserts that tie Python and C++
together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flashtile.plans import mutation
from flashtile.plans.params import Struct, layout_asserts
from flashtile.plans.spec import CPP_TYPES, Features


def cpp_type(dtype: str) -> str:
    name = CPP_TYPES[dtype]
    return name if name == "float" else f"flashtile::{name}"


def plain_unit(header: str | Path, entry: str, struct: Struct) -> str:
    """A unit for a kernel without a tile. header: its .cuh below families/, without its ending; a path if it is not
    part of this package, and is then put in whole."""
    include = header.read_text(encoding="utf-8") if isinstance(header, Path) else f'#include "families/{header}.cuh"'
    instance = f"template __global__ void {entry}(const FT_GRID_CONSTANT flashtile::{struct.__name__});"
    return "\n".join([*mutation.defines(include), include, layout_asserts(struct), instance, ""])


def unit(
    header: str | Path,
    kernel: str,
    config: str,
    struct: Struct,
    features: Features,
    facts: Mapping[str, tuple[str, object]],
) -> tuple[str, str]:
    """(the text that is compiled, the C++ name of the kernel). Equal texts are equal kernels, whatever the shapes."""
    arguments = ", ".join(f"flashtile::{name}" for name in [config, *features.policies()])
    entry = qualified(f"flashtile::{kernel}_kernel<{arguments}>")
    text = plain_unit(header, entry, struct)
    for message, (expression, value) in facts.items():
        text += f'static_assert({qualified(expression)} == {str(value).lower()}, "{message}");\n'
    return text, entry


def qualified(text: str) -> str:
    """Element types inside template arguments need their namespace too."""
    for name in ("half_t", "bf16_t", "NoBias"):
        text = text.replace(f"<{name}", f"<flashtile::{name}").replace(f" {name}", f" flashtile::{name}")
    return text
