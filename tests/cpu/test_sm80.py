"""The mma.sync families without a GPU: which tile each architecture and call takes, and the machine code of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_kernels import LOCAL_MEMORY, kernel_cache, needs_nvdisasm, opcodes  # noqa: F401

from flashtile.kernels import families
from flashtile.kernels.arch import ARCHS, Arch
from flashtile.kernels.families.fwd_sm80 import FwdSm80, Sm80Row
from flashtile.kernels.length_class import PackedHeads, RaggedQueries
from flashtile.kernels.spec import CallLayout, Features, PlanKey
from flashtile.runtime import cache

FORWARD, BACKWARD = families.find("fwd_sm80"), families.find("bwd_sm80")
AMPERE_ON = [arch for arch in ARCHS.values() if arch.number >= 80]
EVERYTHING = Features(True, True, True, True, "float32", True, True)
GRADS = ("dq", "dk", "dv")


def key(arch: Arch, head_dim: int, head_dim_v: int, features: Features = Features(), **changes) -> PlanKey:  # noqa: B008
    return PlanKey("bfloat16", "bfloat16", head_dim, head_dim_v, features, arch, **changes)


@pytest.mark.parametrize("arch", AMPERE_ON, ids=lambda arch: arch.name)
@pytest.mark.parametrize("features", [Features(), EVERYTHING], ids=("plain", "everything"))
def test_every_architecture_has_a_tile_for_every_call(arch: Arch, features: Features) -> None:
    for family, grads in ((FORWARD, None), (BACKWARD, GRADS)):
        features = replace(features, bias_dtype=features.bias_dtype if family is FORWARD else None)
        for dims in family.head_dims:
            for head_dims in (dims, (dims[0] - 8, dims[1])):
                call = key(arch, *head_dims, features, grads=grads)
                assert family.refuse(call) is None
                row = family.select(family.name, call)
                shared = row.min_blocks * (row.shared_bytes + arch.reserved_shared_bytes)
                assert shared <= arch.shared_bytes_per_multiprocessor
                assert row.is_exact is (head_dims == dims)


@pytest.mark.parametrize("family", [FORWARD, BACKWARD], ids=lambda family: family.name)
def test_turing_has_none(family: families.Family) -> None:
    assert family.refuse(key(ARCHS[75], 64, 64)) == "sm_75 has no cp.async and no mma.sync of bfloat16"


def row_of(**changes) -> Sm80Row:
    return FORWARD.select("fwd_sm80", key(ARCHS[90], 128, 128, **changes))


def test_what_a_call_changes_in_its_tile() -> None:
    assert row_of().block_m == 128
    assert row_of().is_scale_positive
    # Few queries, and options that need registers, take the small tile
    short = row_of(classes=((RaggedQueries(128, 64, 140), 1),))
    packed = row_of(classes=((PackedHeads(64, 128), 4),))
    assert (short.block_m, short.packs_heads) == (64, False)
    assert (packed.block_m, packed.packs_heads) == (64, True)
    negative = row_of(is_scale_positive=False)
    assert (negative.block_m, negative.is_scale_positive) == (64, False)


def test_pages_and_unaligned_rows_are_taken_by_this_family_alone_of_the_tensor_core_ones() -> None:
    for features in (Features(is_paged=True, has_lengths=True), Features(is_aligned16=False)):
        call = key(ARCHS[90], 64, 64, features)
        assert families.find("fwd_sm90").refuse(call) is not None
        assert FORWARD.refuse(call) is None


def test_what_the_backward_refuses() -> None:
    def refuse(**changes) -> str | None:
        return BACKWARD.refuse(key(ARCHS[80], 64, 64, **({"grads": GRADS} | changes)))

    assert refuse() is None
    assert refuse(is_deterministic=True) == "deterministic sums"
    assert refuse(features=Features(bias_dtype="float32")) == "a bias"
    assert BACKWARD.refuse(key(ARCHS[80], 256, 256, grads=GRADS)) == "head_dim 256, 256 is over its 128, 128"


# Every pair of head dims on two architectures; `make compile-all` compiles all
COMPILED = [(AMPERE_ON[place % len(AMPERE_ON)], dims) for place, dims in enumerate(2 * FwdSm80.head_dims)]


@needs_nvdisasm
@pytest.mark.parametrize(("arch", "dims"), COMPILED, ids=lambda value: getattr(value, "name", str(value)))
def test_forward_code_has_tensor_core_products_and_no_local_memory(arch: Arch, dims, tmp_path) -> None:
    call = key(arch, *dims, Features(has_band=True, has_lengths=True))
    row = FORWARD.select("fwd_sm80", call)
    (step,) = FORWARD.launch_row(row, call, CallLayout("bhsd", ())).steps
    compiled = cache.compile_cached(step.unit, arch.name, [step.entry])
    found = opcodes(compiled.cubin, tmp_path)
    assert {"HMMA", "LDSM", "LDGSTS"} <= found
    assert not found & LOCAL_MEMORY
    assert compiled.warnings == []
    resources = compiled.resources(step.entry)
    blocks = arch.blocks_per_multiprocessor(row.num_threads, resources.registers, row.shared_bytes)
    assert blocks >= row.min_blocks


@needs_nvdisasm
@pytest.mark.parametrize(("number", "head_dim"), [(80, 128), (86, 64), (90, 64), (120, 96)])
def test_backward_code_has_tensor_core_products_and_no_local_memory(number: int, head_dim: int, tmp_path) -> None:
    call = key(ARCHS[number], head_dim, head_dim, Features(has_band=True, has_lengths=True), grads=GRADS)
    row = BACKWARD.select("bwd_sm80", call)
    (step,) = BACKWARD.launch_row(row, call, CallLayout("bhsd", ())).steps
    compiled = cache.compile_cached(step.unit, call.arch.name, [step.entry])
    found = opcodes(compiled.cubin, tmp_path)
    assert {"HMMA", "LDSM", "LDGSTS"} <= found
    assert found & {"RED", "REDG", "ATOMG"}
    assert not found & LOCAL_MEMORY
    assert compiled.warnings == []
