"""The generated unit: one include, one kernel named with its policies, and the asserts that tie Python and C++ together."""

from __future__ import annotations

from flashtile.kernels import mutation
from flashtile.kernels.params import Params, Struct, layout_asserts
from flashtile.kernels.spec import CPP_TYPES, Features, Row


def entry(row: Row, features: Features) -> str:
    """The C++ name of the kernel."""
    arguments = ", ".join(f"flashtile::{name}" for name in [row.config, *features.policies()])
    return _qualified(f"flashtile::{row.kernel}_kernel<{arguments}>")


def cpp_type(dtype: str) -> str:
    name = CPP_TYPES[dtype]
    return name if name == "float" else f"flashtile::{name}"


def plain_unit(header: str, entry: str, struct: Struct) -> str:
    """A unit for a kernel without a tile."""
    include = f'#include "flashtile/kernels/{header}.cuh"'
    instance = f"template __global__ void {entry}(const FT_GRID_CONSTANT flashtile::{struct.__name__});"
    return "\n".join([*mutation.defines(), include, layout_asserts(struct), instance, ""])


def unit(row: Row, features: Features) -> str:
    """The text that is compiled. Equal texts are equal kernels, whatever the shapes."""
    size = f"sizeof(flashtile::{row.storage}<{_qualified('flashtile::' + row.config)}>)"
    return plain_unit(row.header, entry(row, features), Params) + f'static_assert({size} == {row.shared_bytes}, "shared bytes");\n'


def _qualified(text: str) -> str:
    """Element types inside template arguments need their namespace too."""
    for name in ("half_t", "bf16_t", "NoBias"):
        text = text.replace(f"<{name}", f"<flashtile::{name}").replace(f" {name}", f" flashtile::{name}")
    return text
