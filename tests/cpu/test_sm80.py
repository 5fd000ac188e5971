"""The mma.sync families without a GPU: which tile each architecture and call takes, and the machine code of it."""

from __future__ import annotations

import random
import subprocess
from dataclasses import replace

import pytest
from test_kernels import LOCAL_MEMORY, NVDISASM, needs_nvdisasm, opcodes

from flashtile import families
from flashtile.families import Row, speeds
from flashtile.plans.arch import ARCHS, Arch
from flashtile.plans.length_class import FewQueries, PackedHeads, RaggedQueries
from flashtile.plans.spec import CallLayout, Features, PlanKey
from flashtile.runtime import cache

pytestmark = pytest.mark.usefixtures("kept_kernels")
FORWARD, BACKWARD = families.find("fwd_sm80"), families.find("bwd_sm80")
WIDE_FORWARD, WIDE_BACKWARD = families.find("fwd_sm80_wide"), families.find("bwd_sm80_wide")
FLOAT32, FLOAT32_BACKWARD = families.find("fwd_sm80_f32"), families.find("bwd_sm80_f32")
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
                if family is BACKWARD and dims[0] > 128 and arch.shared_bytes < 128 * 1024:
                    assert family.refuse(call) == f"no tile of it fits {arch.name}"
                    assert WIDE_BACKWARD.refuse(call) is None
                    continue
                assert family.refuse(call) is None
                row = family.select(family.name, call)
                shared = row["blocks"] * (row.shared_bytes + arch.reserved_shared_bytes)
                assert shared <= arch.shared_bytes_per_multiprocessor
                assert row["is_exact"] is (head_dims == dims)


@pytest.mark.parametrize("arch", AMPERE_ON, ids=lambda arch: arch.name)
@pytest.mark.parametrize("features", [Features(), EVERYTHING], ids=("plain", "everything"))
def test_every_architecture_has_a_wide_tile_for_every_call(arch: Arch, features: Features) -> None:
    for family, grads in ((WIDE_FORWARD, None), (WIDE_BACKWARD, GRADS)):
        for dims in ((257, 257), (320, 320), (384, 384), (448, 448), (512, 512), (512, 40), (40, 512)):
            call = key(arch, *dims, features, grads=grads)
            assert family.refuse(call) is None
            for kernel in family.kernels:
                assert family.select(kernel, call).shared_bytes <= arch.shared_bytes


def test_turing_takes_float16_alone() -> None:
    turing = ARCHS[75]
    for family, grads in ((FORWARD, None), (WIDE_FORWARD, None), (BACKWARD, GRADS), (WIDE_BACKWARD, GRADS)):
        call = key(turing, 64, 64, grads=grads)
        assert family.refuse(call) == "sm_75 has no mma.sync of bfloat16"
        call = replace(call, dtype="float16", out_dtype="float16")
        assert family.refuse(call) is None
        for kernel in family.kernels:
            assert family.select(kernel, call).shared_bytes <= turing.shared_bytes
        assert family.refuse(replace(call, arch=ARCHS[61])) == "sm_61 has no mma.sync"
        wide = replace(call, head_dim=512, head_dim_v=512)
        assert family.refuse(wide) in ("no tile of it fits sm_75", f"head_dim 512, 512 is over its {over(family)}")


def over(family: families.Family) -> str:
    return ", ".join(map(str, family.head_dims[-1]))


def test_wide_rows_take_what_the_narrow_backward_refuses() -> None:
    for features, is_deterministic in ((Features(bias_dtype="float32"), False), (Features(), True)):
        call = key(ARCHS[80], 128, 128, features, grads=GRADS, is_deterministic=is_deterministic)
        assert BACKWARD.refuse(call) is not None
        assert WIDE_BACKWARD.refuse(call) is None
    steps = WIDE_BACKWARD.launch(
        key(ARCHS[80], 128, 128, Features(bias_dtype="float32"), grads=("dq", "dbias")), CallLayout("bhsd", ("bias",))
    ).steps
    assert [step.name for step in steps] == ["bwd_preprocess_kernel", "bwd_sm80_dq_kernel", "bwd_sm80_dbias_kernel"]


def row_of(**changes) -> Row:
    return FORWARD.select("fwd_sm80", key(ARCHS[90], 128, 128, **changes))


def test_what_a_call_changes_in_its_tile() -> None:
    assert row_of().owned == 128
    assert row_of()["is_scale_positive"]
    # Few queries, and options that need registers, take the small tile
    short = row_of(classes=((RaggedQueries(128, 64, 140), 1),))
    packed = row_of(classes=((PackedHeads(64, 128), 4),))
    assert (short.owned, short["packs_heads"]) == (64, False)
    assert (packed.owned, packed["packs_heads"]) == (64, True)
    negative = row_of(is_scale_positive=False)
    assert (negative.owned, negative["is_scale_positive"]) == (64, False)


def test_unaligned_rows_and_pages_with_a_bias_are_taken_by_this_family_alone_of_the_tensor_core_ones() -> None:
    pages = Features(is_paged=True, has_lengths=True, bias_dtype="bfloat16")
    for features in (pages, Features(is_aligned16=False)):
        call = key(ARCHS[90], 64, 64, features)
        assert families.find("fwd_sm90").refuse(call) is not None
        assert FORWARD.refuse(call) is None


def test_what_the_backward_refuses() -> None:
    def refuse(**changes) -> str | None:
        return BACKWARD.refuse(key(ARCHS[80], 64, 64, **({"grads": GRADS} | changes)))

    assert refuse() is None
    assert refuse(is_deterministic=True) == "deterministic sums"
    assert refuse(features=Features(bias_dtype="float32")) == "a bias"
    assert BACKWARD.refuse(key(ARCHS[80], 264, 264, grads=GRADS)) == "head_dim 264, 264 is over its 256, 256"
    assert FORWARD.refuse(key(ARCHS[80], 320, 320)) == "head_dim 320, 320 is over its 256, 256"


@needs_nvdisasm
@pytest.mark.parametrize("dims", FORWARD.head_dims, ids=str)
def test_forward_code_has_tensor_core_products_and_no_local_memory(dims, tmp_path, seed: int) -> None:
    """On an architecture that is drawn anew in each run; `make compile-all` compiles all."""
    arch = random.Random(seed).choice(AMPERE_ON)
    call = key(arch, *dims, Features(has_band=True, has_lengths=True))
    row = FORWARD.select("fwd_sm80", call)
    step = FORWARD.step(row, call, CallLayout("bhsd", ()))
    compiled = cache.compile_cached(step.unit, arch.name, [step.entry])
    found = opcodes(compiled.cubin, tmp_path)
    assert {"HMMA", "LDSM", "LDGSTS"} <= found
    assert not found & LOCAL_MEMORY
    assert compiled.warnings == []
    resources = compiled.resources(step.entry)
    blocks = arch.blocks_per_multiprocessor(row.num_threads, resources.registers, row.shared_bytes)
    assert blocks >= row["blocks"]


@needs_nvdisasm
@pytest.mark.parametrize(("number", "head_dim"), [(80, 128), (86, 64), (90, 64), (120, 96), (80, 256), (90, 256)])
def test_backward_code_has_tensor_core_products_and_no_local_memory(number: int, head_dim: int, tmp_path) -> None:
    call = key(ARCHS[number], head_dim, head_dim, Features(has_band=True, has_lengths=True), grads=GRADS)
    row = BACKWARD.select("bwd_sm80", call)
    step = BACKWARD.step(row, call, CallLayout("bhsd", ()))
    compiled = cache.compile_cached(step.unit, call.arch.name, [step.entry])
    found = opcodes(compiled.cubin, tmp_path)
    assert {"HMMA", "LDSM", "LDGSTS"} <= found
    assert found & {"RED", "REDG", "ATOMG"}
    assert not found & LOCAL_MEMORY
    assert compiled.warnings == []


@needs_nvdisasm
@pytest.mark.parametrize(("number", "head_dim"), [(80, 512), (86, 448), (120, 320)])
def test_wide_code_has_tensor_core_products_and_no_local_memory(number: int, head_dim: int, tmp_path) -> None:
    features = Features(has_band=True, has_lengths=True)
    for family, grads in ((WIDE_FORWARD, None), (WIDE_BACKWARD, GRADS)):
        for kernel in family.kernels:
            bias_dtype = "bfloat16" if kernel == "bwd_sm80_dbias" else None
            call = key(ARCHS[number], head_dim, head_dim, replace(features, bias_dtype=bias_dtype), grads=grads)
            step = family.step(family.select(kernel, call), call, CallLayout("bhsd", ()))
            compiled = cache.compile_cached(step.unit, call.arch.name, [step.entry])
            found = opcodes(compiled.cubin, tmp_path)
            assert {"HMMA", "LDSM", "LDGSTS"} <= found
            assert not found & {"RED", "REDG", "ATOMG"}
            assert not found & LOCAL_MEMORY
            assert compiled.warnings == []


def test_float32_where_three_tf32_products_are_faster_than_fma() -> None:
    def refuse(number: int, **changes) -> str | None:
        call = PlanKey("float32", "float32", 128, 128, Features(), ARCHS[number])
        return FLOAT32.refuse(replace(call, **changes))

    assert refuse(80) is None
    assert refuse(75) == "sm_75 has no TF32 products"
    assert refuse(86) == "FMA is as fast as three TF32 products on sm_86"
    assert refuse(80, head_dim=192) == "head_dim 192, 128 is over its 128, 128"
    assert refuse(80, features=Features(is_paged=True)) is not None
    assert refuse(80, classes=((FewQueries(64, 1), 4),)) == "at most 64 queries: most rows of its tiles would be empty"
    large = replace(PlanKey("float32", "float32", 128, 128, Features(), ARCHS[80]), classes=((speeds.SIZE, 1),))
    assert families.select(large) is FLOAT32
    assert families.select(replace(large, arch=ARCHS[90])).name == "fwd_sm90_f32"
    assert families.select(replace(large, arch=ARCHS[89])).name == "fwd_simt"


@needs_nvdisasm
@pytest.mark.parametrize(("number", "head_dim", "bias_dtype"), [(80, 64, None), (90, 128, None), (80, 128, "float32")])
def test_float32_code_has_tensor_core_products_and_no_local_memory(number, head_dim, bias_dtype, tmp_path) -> None:
    features = Features(has_band=True, bias_dtype=bias_dtype)
    call = PlanKey("float32", "float32", head_dim, head_dim, features, ARCHS[number])
    step = FLOAT32.step(FLOAT32.select("fwd_sm80_f32", call), call, CallLayout("bhsd", ()))
    compiled = cache.compile_cached(step.unit, call.arch.name, [step.entry])
    found = opcodes(compiled.cubin, tmp_path)
    assert {"HMMA", "LDSM", "LDGSTS"} <= found
    assert not found & LOCAL_MEMORY
    assert compiled.warnings == []


def float32_backward(number: int, head_dim: int, features: Features = Features(), **changes) -> PlanKey:  # noqa: B008
    call = PlanKey("float32", "float32", head_dim, head_dim, features, ARCHS[number], grads=GRADS)
    return replace(call, **changes)


def test_what_the_float32_backward_takes() -> None:
    for number in (80, 90, 100):
        for head_dim in (1, 32, 33, 64, 100, 128):
            for features in (Features(), EVERYTHING, replace(EVERYTHING, is_aligned16=False)):
                call = float32_backward(number, head_dim, features, is_deterministic=True)
                assert FLOAT32_BACKWARD.refuse(call) is None
                assert FLOAT32_BACKWARD.refuse(replace(call, is_scale_positive=False)) is None
                for kernel in FLOAT32_BACKWARD.kernels:
                    assert FLOAT32_BACKWARD.select(kernel, call).shared_bytes <= ARCHS[number].shared_bytes
    bias = Features(bias_dtype="float32")
    assert FLOAT32_BACKWARD.refuse(float32_backward(80, 64, bias, grads=("dq", "dbias"))) is None
    assert FLOAT32_BACKWARD.refuse(float32_backward(80, 64, Features(is_paged=True))) == "paged keys"
    assert FLOAT32_BACKWARD.refuse(float32_backward(80, 136)) == "head_dim 136, 136 is over its 128, 128"
    assert FLOAT32_BACKWARD.refuse(float32_backward(86, 64)) == "FMA is as fast as three TF32 products on sm_86"
    # On Hopper its own kernels stay the default
    large = float32_backward(90, 128, classes=((speeds.SIZE, 1),))
    assert families.select(large).name == "bwd_sm90_f32"


def test_the_float32_backward_launches_what_is_wanted() -> None:
    def names(*grads: str) -> list[str]:
        call = float32_backward(80, 64, grads=grads)
        return [step.name for step in FLOAT32_BACKWARD.launch(call, CallLayout("bhsd", ())).steps]

    assert names("dq") == ["bwd_preprocess_kernel", "bwd_sm80_f32_dq_kernel"]
    assert names("dv") == ["bwd_preprocess_kernel", "bwd_sm80_f32_dkdv_kernel"]
    assert names("dq", "dk", "dv", "dsinks") == [
        "bwd_preprocess_kernel",
        "bwd_dsinks_kernel",
        "bwd_sm80_f32_dkdv_kernel",
        "bwd_sm80_f32_dq_kernel",
    ]


@needs_nvdisasm
@pytest.mark.parametrize(
    ("number", "head_dim", "bias_dtype"),
    [(80, 64, None), (80, 128, None), (90, 64, None), (90, 128, None), (100, 128, None), (80, 128, "float32")],
)
def test_float32_backward_has_tensor_core_products_and_one_owner(number, head_dim, bias_dtype, tmp_path) -> None:
    call = float32_backward(number, head_dim, Features(has_band=True, bias_dtype=bias_dtype))
    for kernel in FLOAT32_BACKWARD.kernels:
        row = FLOAT32_BACKWARD.select(kernel, call)
        step = FLOAT32_BACKWARD.step(row, call, CallLayout("bhsd", ()))
        compiled = cache.compile_cached(step.unit, call.arch.name, [step.entry])
        found = opcodes(compiled.cubin, tmp_path)
        assert {"HMMA", "LDSM", "LDGSTS"} <= found
        assert not found & {"RED", "REDG", "ATOMG"}
        assert not found & LOCAL_MEMORY
        assert compiled.warnings == []
        registers = compiled.resources(step.entry).registers
        assert call.arch.blocks_per_multiprocessor(row.num_threads, registers, row.shared_bytes) >= row["blocks"]


@needs_nvdisasm
@pytest.mark.parametrize(("family", "head_dim"), [(FORWARD, 64), (BACKWARD, 64), (WIDE_BACKWARD, 128)])
def test_turing_code_has_tensor_core_products_and_no_local_memory(family, head_dim: int, tmp_path) -> None:
    call = key(ARCHS[75], head_dim, head_dim, Features(has_band=True), grads=GRADS if family.op == "backward" else None)
    call = replace(call, dtype="float16", out_dtype="float16")
    kernel = family.kernels[0]
    step = family.step(family.select(kernel, call), call, CallLayout("bhsd", ()))
    compiled = cache.compile_cached(step.unit, "sm_75", [step.entry])
    found = opcodes(compiled.cubin, tmp_path)
    assert {"HMMA", "LDSM"} <= found
    assert "LDGSTS" not in found
    assert not found & LOCAL_MEMORY
    assert compiled.warnings == []


@needs_nvdisasm
@pytest.mark.parametrize(("family", "grads"), [(FORWARD, None), (BACKWARD, GRADS)], ids=("forward", "backward"))
def test_marks_read_the_clock_in_a_build_for_a_timeline_alone(family, grads, tmp_path) -> None:
    call = key(ARCHS[90], 64, 64, grads=grads)
    row = family.select(family.name, call)
    step = family.step(row, call, CallLayout("bhsd", ()))
    found = []
    for define in ("", "#define FT_TIMELINE 0x7f0000000000ull\n"):
        file = tmp_path / "kernel.cubin"
        file.write_bytes(cache.compile_cached(define + step.unit, "sm_90a", [step.entry]).cubin)
        code = subprocess.run([str(NVDISASM), "-c", str(file)], capture_output=True, text=True, check=True).stdout
        found.append(code.count("SR_CLOCK"))
    assert found[0] == 0
    assert found[1] >= 6
