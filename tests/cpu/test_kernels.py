"""Every kernel compiles without a GPU, keeps its registers, fits its architecture, and agrees with Python about its
layout."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flashtile import families
from flashtile.cli import compile as compile_command
from flashtile.cli import kernel_jobs
from flashtile.families import assemble
from flashtile.families.fwd_sm90.family import stores_by_tma
from flashtile.plans.arch import ARCHS
from flashtile.plans.params import Params
from flashtile.plans.spec import DTYPES, CallLayout, Features, PlanKey
from flashtile.runtime import cache, nvrtc, toolchain
from flashtile.runtime.nvrtc import CompileError

HEAD_DIMS = tuple(head_dim for head_dim, _ in families.find("fwd_simt").head_dims)
pytestmark = pytest.mark.usefixtures("kept_kernels")
# Under xdist the workers already share the cores
NUM_THREADS = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
MAIN_ARCH = ARCHS[90]
# Architectures with the limits of an earlier one take the same tiles: a third of the head dims is enough there
DISTINCT = {arch.shared_bytes: arch for arch in reversed(ARCHS.values())}.values()
NVRTC_12 = next(
    (path for folder in sys.path for path in Path(folder).glob("nvidia/cuda_nvrtc/lib/libnvrtc.so.12")), None
)
NVRTC_NEWEST = next(Path(sys.prefix).glob("nvrtc-newest/nvidia/cu13/lib/libnvrtc.so.13"), None)


def assert_clean(jobs):
    results = list(compile_command.compile_jobs(jobs, NUM_THREADS))
    assert len(results) == len(jobs) > 0
    problems = [f"{result.job}: {problem}" for result in results for problem in result.problems]
    assert not problems, "\n" + "\n".join(problems)
    for result in results:
        assert 0 < result.registers <= 255, result.job
        assert result.shared_bytes <= result.job.key.arch.shared_bytes, result.job
        assert result.blocks > 0, result.job


# One test for each architecture and half of the head dims, so that workers share the load


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("arch", [arch for arch in ARCHS.values() if arch.number >= 75], ids=lambda arch: arch.name)
def test_plain_float32(arch, half, seed):
    """A fifth of the kernels, drawn anew in each run."""
    head_dims = HEAD_DIMS[half::2] if arch in DISTINCT else (HEAD_DIMS[(2 * half + arch.number) % len(HEAD_DIMS)],)
    jobs = kernel_jobs.plain_jobs([arch], ["float32"], head_dims)
    assert_clean(random.Random(seed).sample(jobs, -(-len(jobs) // 5)))


def test_plain_16_bit(seed):
    """Half of the kernels of a head dim and a dtype, drawn anew in each run: the dtypes differ in conversions only."""
    rng = random.Random(seed)
    dtypes = rng.sample([dtype for dtype in DTYPES if dtype != "float32"], 1)
    jobs = kernel_jobs.plain_jobs([MAIN_ARCH], dtypes, rng.sample(HEAD_DIMS, 1))
    assert_clean(rng.sample(jobs, -(-len(jobs) // 2)))


@pytest.mark.parametrize("part", range(4))
def test_features_in_pairs(part, seed):
    """A twelfth of the variants, drawn anew in each run; `make compile-all` compiles all."""
    # The two 16-bit dtypes differ in conversions only
    jobs = kernel_jobs.covering_jobs([MAIN_ARCH], ["float32", "bfloat16"], crosses_head_dims=False)
    assert {job.kernel for job in jobs} >= {kernel for family in families.all_families() for kernel in family.kernels}
    some = jobs[part::4]
    assert_clean(random.Random(seed).sample(some, -(-len(some) // 12)))


@pytest.mark.parametrize("part", range(2))
def test_few_options_on_the_largest_tiles(part, seed):
    """A fifth of the variants, drawn anew in each run."""
    some = kernel_jobs.edge_jobs([MAIN_ARCH], ["float32"])[part::2]
    assert_clean(random.Random(seed).sample(some, -(-len(some) // 5)))


# The machine code of the Hopper family


NVDISASM = next(
    (path for folder in sys.path for path in Path(folder).glob("triton/backends/nvidia/bin/nvdisasm")),
    shutil.which("nvdisasm"),
)
needs_nvdisasm = pytest.mark.skipif(
    NVDISASM is None and sys.platform != "linux",
    reason="nvdisasm comes with Triton, which has packages for Linux alone",
)


def opcodes(cubin, folder):
    """What a kernel is made of: the names of its instructions, without their suffixes."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    text = subprocess.run([str(NVDISASM), "-c", str(file)], capture_output=True, text=True, check=True).stdout
    return {
        name.split(".")[0]
        for name in re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\w[\w.]*)", text, re.MULTILINE)
    }


LOCAL_MEMORY = {"LDL", "STL"}


HOPPER = families.find("fwd_sm90")
HOPPER_ROWS = [row for dtype in HOPPER.dtypes for row in HOPPER.every_row(dtype)]


def compiled_row(family, row, features):
    key = PlanKey(row.dtype, row.out_dtype, row.head_dim, row.head_dim_v, features, MAIN_ARCH)
    step = family.step(row, key, CallLayout("bhsd", ()))
    return cache.compile_cached(step.unit, MAIN_ARCH.name, [step.entry])


@needs_nvdisasm
@pytest.mark.parametrize("part", range(10))
def test_hopper_code_has_warpgroup_products_and_no_local_memory(part, tmp_path, seed):
    """With a band, and lengths where O is not stored by TMA. One of each ten rows, drawn anew in each run."""
    row = random.Random(seed).choice(HOPPER_ROWS[part::10])
    features = Features(has_band=True, has_lengths=not row["stores_p"])
    found = opcodes(compiled_row(HOPPER, row, features).cubin, tmp_path)
    assert {"HGMMA", "UTMALDG", "SYNCS"} <= found
    assert ("UTMASTG" in found) is stores_by_tma(row, features)
    assert not found & LOCAL_MEMORY


SHORT = families.find("fwd_sm90_short")
SHORT_ROWS = [row for index, dtype in enumerate(SHORT.dtypes) for row in list(SHORT.every_row(dtype))[2 + index :: 5]]


@needs_nvdisasm
@pytest.mark.parametrize("row", SHORT_ROWS, ids=lambda row: f"{row.dtype}-{row.head_dim}-{row.label}")
def test_short_code_has_warpgroup_products_and_no_local_memory(row, tmp_path):
    """With a bias where one tile holds all keys, else with a band."""
    features = Features(has_band=not row["single"], bias_dtype=row.dtype if row["single"] else None)
    key = PlanKey(row.dtype, row.out_dtype, row.head_dim, row.head_dim_v, features, MAIN_ARCH)
    step = SHORT.step(row, key, CallLayout("bhsd", ()))
    compiled = cache.compile_cached(step.unit, MAIN_ARCH.name, [step.entry])
    found = opcodes(compiled.cubin, tmp_path)
    assert {"HGMMA", "UTMALDG", "SYNCS"} <= found
    assert not found & LOCAL_MEMORY
    assert compiled.warnings == []


DECODE = families.find("decode_sm90")
DECODE_ROWS = [row for dtype in DECODE.dtypes for row in DECODE.every_row(dtype)]


@needs_nvdisasm
@pytest.mark.parametrize("part", range(4))
def test_decode_code_copies_boxes_and_rows_and_has_no_local_memory(part, tmp_path, seed):
    """One of each four rows, drawn anew in each run."""
    row = random.Random(seed).choice(DECODE_ROWS[part::4])
    compiled = compiled_row(DECODE, row, Features(has_band=True, has_lengths=True, is_paged=True, has_alibi=True))
    found = opcodes(compiled.cubin, tmp_path)
    assert {"HGMMA", "UTMALDG", "LDGSTS", "SYNCS"} <= found
    assert not found & (LOCAL_MEMORY | {"REDG", "ATOMG", "RED"})
    assert compiled.warnings == []


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (256, 256)])
def test_hopper_pages_take_no_local_memory(dims):
    """Also beside three consumers, which leave the producer 32 registers."""
    features = Features(has_band=True, has_lengths=True, is_paged=True)
    key = PlanKey("bfloat16", "bfloat16", *dims, features, MAIN_ARCH)
    step = HOPPER.launch(key, CallLayout("bhsd", ())).steps[0]
    assert step.owned == (128 if dims[0] > 128 else 192)
    compiled = cache.compile_cached(step.unit, MAIN_ARCH.name, [step.entry])
    used = compiled.resources(step.entry)
    assert used.spill_store_bytes == used.stack_bytes == 0
    assert compiled.warnings == []


BACKWARD = families.find("bwd_sm90")
BACKWARD_ROWS = [
    row
    for index, dtype in enumerate(BACKWARD.dtypes)
    for row in [row for row in BACKWARD.every_row(dtype) if row.kernel == "bwd_sm90"][index::2]
]
# Those that take the most registers at head_dim 128, each with a band and lengths
BACKWARD_OPTIONS = {
    "mask": Features(has_bool_mask=True),
    "softcap": Features(has_softcap=True),
    "dropout": Features(has_dropout=True),
    "bias": Features(bias_dtype="bfloat16"),
    "float32 bias": Features(bias_dtype="float32"),
    "bias and dropout": Features(bias_dtype="bfloat16", has_dropout=True),
}


@needs_nvdisasm
@pytest.mark.parametrize("row", BACKWARD_ROWS, ids=lambda row: f"{row.dtype}-{row.head_dim}-{row.label}")
def test_hopper_backward_has_bulk_reductions_and_no_local_memory(row, tmp_path):
    compiled = compiled_row(BACKWARD, row, Features(has_band=True, has_lengths=True))
    found = opcodes(compiled.cubin, tmp_path)
    assert {"HGMMA", "UTMALDG", "UBLKRED", "SYNCS"} <= found
    assert not found & (LOCAL_MEMORY | {"ATOMG"})
    assert compiled.warnings == []


WIDE = families.find("bwd_sm90_wide")
WIDE_ROWS = [row for index, dtype in enumerate(WIDE.dtypes) for row in list(WIDE.every_row(dtype))[6 - index :: 3]]


@needs_nvdisasm
@pytest.mark.parametrize("row", WIDE_ROWS, ids=lambda row: f"{row.kernel}-{row.dtype}-{row.head_dim}-{row.head_dim_v}")
def test_wide_backward_has_one_owner_for_each_sum_and_no_local_memory(row, tmp_path):
    """No atomics and no reductions: results have the same bits in every run."""
    compiled = compiled_row(WIDE, row, Features(has_band=True, has_lengths=True))
    found = opcodes(compiled.cubin, tmp_path)
    assert {"HGMMA", "UTMALDG", "SYNCS"} <= found
    assert not found & (LOCAL_MEMORY | {"REDG", "ATOMG", "RED", "UBLKRED"})
    assert compiled.warnings == []


# Those that take the most registers at head_dim 256, and calls that are common
WIDE_OPTIONS = BACKWARD_OPTIONS | {
    "mask and bias": Features(has_bool_mask=True, bias_dtype="bfloat16"),
    "three": Features(has_softcap=True, has_dropout=True, bias_dtype="float32"),
    "all": Features(has_bool_mask=True, has_softcap=True, has_alibi=True, has_dropout=True, bias_dtype="float32"),
}


@needs_nvdisasm
@pytest.mark.parametrize("third", range(3))
def test_options_of_the_wide_backward_use_no_local_memory(third, tmp_path, seed):
    """A bias is loaded in words of two elements, by the kernel of dK and dV asynchronously. One of three sets of
    options each, drawn anew in each run."""
    name = random.Random(seed).choice(list(WIDE_OPTIONS)[third::3])
    features = replace(WIDE_OPTIONS[name], has_band=True, has_lengths=True)
    key = PlanKey("bfloat16", "bfloat16", 256, 256, features, MAIN_ARCH, ("dq", "dk", "dv"))
    launch = WIDE.launch(key, CallLayout("bhsd", ()))
    steps = [step for step in launch.steps if step.shared_bytes > 0]
    assert [step.name for step in steps] == ["bwd_sm90_dkdv_kernel", "bwd_sm90_dq_kernel"]
    assert any("mask_bits" in step.entry for step in launch.steps) is features.has_bool_mask
    for step in steps:
        compiled = cache.compile_cached(step.unit, MAIN_ARCH.name, [step.entry])
        used, found = compiled.resources(step.entry), opcodes(compiled.cubin, tmp_path)
        assert used.spill_store_bytes == used.stack_bytes == 0
        assert not found & LOCAL_MEMORY
        assert ("LDGSTS" in found) is ("dkdv" in step.name and features.bias_dtype is not None)
        assert compiled.warnings == []


@needs_nvdisasm
@pytest.mark.parametrize("half", range(2))
def test_options_of_the_hopper_backward_use_no_local_memory(half, tmp_path, seed):
    """Two sets of options in three, drawn anew in each run."""
    for name in random.Random(seed).sample(list(BACKWARD_OPTIONS)[half::2], 2):
        assert_no_local_memory(name, tmp_path)


def assert_no_local_memory(name, tmp_path):
    features = replace(BACKWARD_OPTIONS[name], has_band=True, has_lengths=True)
    grads = ("dq", "dk", "dv", "dbias") if features.bias_dtype else ("dq", "dk", "dv")
    key = PlanKey("bfloat16", "bfloat16", 128, 128, features, MAIN_ARCH, grads)
    steps = [step for step in BACKWARD.launch(key, CallLayout("bhsd", ())).steps if step.shared_bytes > 0]
    assert len(steps) == len(grads) - 2
    for step in steps:
        compiled = cache.compile_cached(step.unit, MAIN_ARCH.name, [step.entry])
        assert not opcodes(compiled.cubin, tmp_path) & LOCAL_MEMORY
        assert compiled.warnings == []


@needs_nvdisasm
def test_local_memory_would_be_seen(tmp_path):
    unit = """extern "C" __global__ void spill(float* out, int index) {
      float kept[64];
      for (int i = 0; i < 64; ++i) kept[i] = out[i * 7];
      kept[index] = 1.0f;
      for (int i = 0; i < 64; ++i) out[i] = kept[(i * index) % 64];
    }"""
    compiled = nvrtc.compile_source(toolchain.find(), unit, MAIN_ARCH.name, [])
    found = opcodes(compiled.cubin, tmp_path)
    assert found >= LOCAL_MEMORY
    assert "HGMMA" not in found


# Other compilers, each in a process of its own


def compile_by(library, *options):
    environment = os.environ | {"FLASHTILE_NVRTC": str(library)}
    command = [
        sys.executable,
        "-m",
        "flashtile",
        "compile",
        "--json",
        "--jobs",
        str(NUM_THREADS),
        "--dtype",
        "float32",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)["kernels"]


@pytest.mark.skipif(NVRTC_12 is None, reason="nvidia-cuda-nvrtc-cu12 is not installed; `make test` does it")
def test_sm_61_by_nvrtc_12():
    kernels = compile_by(NVRTC_12, "--arch", "sm_61")
    assert {kernel["head_dim"] for kernel in kernels} == {*HEAD_DIMS, 0}  # 0: append_kv, which takes any
    assert all(kernel["shared_bytes"] <= ARCHS[61].shared_bytes for kernel in kernels)


@pytest.mark.skipif(
    NVRTC_NEWEST is None, reason="no newer NVRTC in nvrtc-newest/ of this environment; `make test` puts it there"
)
def test_one_head_dim_by_the_newest_nvrtc():
    kernels = compile_by(NVRTC_NEWEST, "--arch", MAIN_ARCH.name, "--head-dim", "64")
    assert "fwd_simt" in {kernel["kernel"] for kernel in kernels}


# Python and C++ agree, or nothing compiles


def refusal(unit, entry):
    with pytest.raises(CompileError) as refused:
        nvrtc.compile_source(toolchain.find(), unit, MAIN_ARCH.name, [entry])
    return str(refused.value)


def mirror(fields):
    return type("Params", (ctypes.Structure,), {"_fields_": fields})


def plain_step():
    key = PlanKey("float32", "float32", 64, 64, Features(), MAIN_ARCH)
    assemble.clear_plans()
    return families.find("fwd_simt").launch(key, CallLayout("bhsd", ())).steps[0]


@pytest.mark.parametrize("change", ["swapped", "narrower", "missing"])
def test_layout_drift_is_a_compile_error(monkeypatch, change):
    fields = list(Params._fields_)
    index = next(i for i, (name, *_) in enumerate(fields) if name == "batch")
    if change == "swapped":
        fields[index], fields[index + 1] = fields[index + 1], fields[index]
    elif change == "narrower":
        fields[index : index + 2] = [("batch", ctypes.c_int16), ("heads", ctypes.c_int16)]
    else:
        del fields[index]
    drifted = mirror(fields)
    family = families.find("fwd_simt")
    kernels = tuple(replace(kernel, struct=drifted) for kernel in family.kernel_types)
    monkeypatch.setattr(family, "kernel_types", kernels)
    step = plain_step()
    assemble.clear_plans()
    log = refusal(step.unit, step.entry)
    assert "static assertion failed" in log
    assert {"swapped": "Params: batch", "narrower": "Params: heads", "missing": "Params: heads"}[change] in log


def test_wrong_shared_bytes_are_a_compile_error():
    step = plain_step()
    wrong = step.unit.replace(f"== {step.shared_bytes},", f"== {step.shared_bytes + 16},")
    assert wrong != step.unit
    assert '"shared bytes"' in refusal(wrong, step.entry)
