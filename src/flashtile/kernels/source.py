"""The generated unit: one include, one kernel named with its policies, and the asserts that tie Python and C++ together."""

from __future__ import annotations

from flashtile.kernels import mutation
from flashtile.kernels.params import FwdSm90Params, Params, Struct, layout_asserts
from flashtile.kernels.spec import CPP_TYPES, Features, Row, Sm90Row


def entry(row: Row | Sm90Row, features: Features) -> str:
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


def unit(row: Row | Sm90Row, features: Features) -> str:
    """The text that is compiled. Equal texts are equal kernels, whatever the shapes."""
    config = _qualified("flashtile::" + row.config)
    struct: Struct = Params
    if isinstance(row, Sm90Row):
        mask, score_mod, dropout, lengths = (_qualified(f"flashtile::{policy}") for policy in features.policies()[:4])
        struct, storage = FwdSm90Params, f"FwdSm90Storage<{config}, {mask}, {lengths}>"
        kernel = f"flashtile::FwdSm90<{config}, {mask}, {score_mod}, {dropout}, {lengths}>"
        has_map = str(row.stores_by_tma(features)).lower()
        facts = f'static_assert({kernel}::kStoresByTma == {has_map}, "map of the output");\n'
    else:
        facts = ""
        storage = f"{'FwdSimtStorage' if row.kernel == 'fwd_simt' else 'BwdSimtStorage'}<{config}>"
    size = f'static_assert(sizeof(flashtile::{storage}) == {row.shared_bytes}, "shared bytes");\n'
    return plain_unit(row.header, entry(row, features), struct) + size + facts


def _qualified(text: str) -> str:
    """Element types inside template arguments need their namespace too."""
    for name in ("half_t", "bf16_t", "NoBias"):
        text = text.replace(f"<{name}", f"<flashtile::{name}").replace(f" {name}", f" flashtile::{name}")
    return text
