"""Faults on purpose: each changes the machine code of a kernel; planting none leaves it as if the source had no faults
in it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import fake_gpu
import pytest
import torch
from ptx import copy_headers, ptx_of

from flashtile import families
from flashtile.backends import native, registry
from flashtile.families import assemble
from flashtile.lab.check import mutants
from flashtile.lab.check.judge import warm
from flashtile.lab.check.report import Report, Settings
from flashtile.lab.check.runner import drawn
from flashtile.lab.check.trial import Trial
from flashtile.plans.arch import ARCHS
from flashtile.plans.mutation import is_broken, mutations, planted
from flashtile.plans.spec import CallLayout, Features, PlanKey
from flashtile.runtime import cache, nvrtc, toolchain

ARCH = ARCHS[90]
NAMES = [mutation.name for mutation in mutations()]
USE = re.compile(r"mutates\(Mutation::(\w+)\)")
# How a fault stands in the source: a line to be left out, or words before a statement
WRONG_LINE = re.compile(r"^ *if constexpr \(mutates\(Mutation::\w+\)\)\s[^;]*;\n", re.MULTILINE)
WORDS_BEFORE = re.compile(r"if constexpr \(!mutates\(Mutation::\w+\)\)\s+")
# NVRTC puts hashes of the text and its process into the names of symbols
PRIVATE = re.compile(rb"_INTERNAL_[0-9a-f]+_\d+_flashtile_cu_[0-9a-f]+_\d+")
# The options that a fault needs to matter at all, and no others: each costs seconds of compiling
NEEDED = {
    "mask_offset": Features(has_band=True),
    "window_edge": Features(has_band=True),
    "neighbour_length": Features(has_lengths=True),
    "packed_rest": Features(has_lengths=True),
    "page_index": Features(has_lengths=True, is_paged=True),
    "bias_row": Features(bias_dtype="float32"),
    "dbias_head": Features(bias_dtype="float32"),
    "alibi_offset": Features(has_alibi=True),
    "dropout_lane": Features(has_dropout=True),
    "dropout_origin": Features(has_dropout=True),
    "dropout_backward": Features(has_dropout=True),
    "softcap_derivative": Features(has_softcap=True),
    "fwd_sm90_mask_offset": Features(has_band=True),
    "fwd_sm90_tail": Features(has_lengths=True),
    "fwd_sm90_page": Features(has_lengths=True, is_paged=True),
    "fwd_sm90_dropout": Features(has_dropout=True),
    "fwd_sm90_mask_bits": Features(has_bool_mask=True),
    "fwd_sm90_mask_tiles": Features(has_bool_mask=True),
    "fwd_sm90_mask_row": Features(has_bool_mask=True),
    "fwd_sm90_bias_row": Features(bias_dtype="bfloat16"),
    "fwd_sm90_alibi": Features(has_alibi=True),
    "fwd_sm90_short_rescale": Features(has_band=True),
    "fwd_sm90_short_mask_offset": Features(has_band=True),
    "fwd_sm90_short_bias_row": Features(bias_dtype="bfloat16"),
    "decode_sm90_tail": Features(has_lengths=True),
    "fwd_sm80_skip": Features(has_band=True),
    "fwd_sm90_wide_tail": Features(has_lengths=True),
    "bwd_sm80_f32_mask_offset": Features(has_band=True),
    "bwd_sm80_wide_dq_mask": Features(has_band=True),
    "bwd_sm80_wide_dbias_head": Features(bias_dtype="bfloat16"),
    "bwd_sm80_mask_offset": Features(has_band=True),
    "bwd_sm80_softcap": Features(has_softcap=True),
    "bwd_sm90_mask_offset": Features(has_band=True),
    "bwd_sm90_tail": Features(has_lengths=True),
    "bwd_sm90_dropout": Features(has_dropout=True),
    "bwd_sm90_softcap": Features(has_softcap=True),
    "bwd_sm90_mask_row": Features(has_bool_mask=True),
    "bwd_sm90_bias_row": Features(bias_dtype="bfloat16"),
    "bwd_sm90_alibi": Features(has_alibi=True),
    "bwd_sm90_dbias_head": Features(bias_dtype="bfloat16"),
    "bwd_sm90_wide_dq_mask": Features(has_band=True),
    "bwd_sm90_wide_mask_offset": Features(has_band=True),
    "bwd_sm90_wide_tail": Features(has_lengths=True),
    "bwd_sm90_wide_softcap": Features(has_softcap=True),
    "bwd_sm90_wide_dropout": Features(has_dropout=True),
    "bwd_sm90_wide_mask_row": Features(has_bool_mask=True),
    "bwd_sm90_f32_softcap": Features(has_softcap=True),
    "bwd_sm90_f32_dropout": Features(has_dropout=True),
}
BIASED = Features(bias_dtype="float32")


def headers():
    return [path for path in nvrtc.INCLUDE.rglob("*.cuh") if path.name != "mutation.cuh"]


def write(features: Features, is_wide: bool = False, is_first: bool = False) -> dict[str, tuple[str, str]]:
    """(unit, entry) of each kernel on its smallest tile, which compiles fastest; with is_first on the first tile of its
    smallest head dims, with is_wide for its largest."""
    assemble.clear_plans()
    found = {}
    for grads in (None, *([] if features.is_paged else [("dq", "dk", "dv", "dsinks")])):
        for step in assemble.kernels(PlanKey("float32", "float32", 32, 32, features, ARCH, grads=grads)):
            found[step.name] = (step.unit, step.entry)
    assemble.clear_plans()
    for family in families.all_families():
        dtype, grads = (
            family.dtypes[-1] if "float32" not in family.dtypes else "float32",
            (family.grad_sets or (None,))[0],
        )
        for kernel in family.kernels:
            needed = BIASED if "dbias" in kernel else features
            key = PlanKey(dtype, dtype, *family.head_dims[-1 if is_wide else 0], needed, ARCH, grads)
            # It may take calls of some lengths alone
            lengths = itertools.product(*(which.values for which in family.length_classes))
            keys = (
                dataclasses.replace(key, classes=tuple(zip(family.length_classes, of, strict=True))) for of in lengths
            )
            key = next((one for one in keys if family.refuse(one) is None), key)
            if family.refuse(key) is None:
                rows = list(family.candidates(kernel, key))
                row = rows[0 if is_wide or is_first else -1]
                layout = CallLayout("bhsd", ())
                step = family.step(row, key, layout)
                found[step.name] = (step.unit, step.entry)
                for step in family.launch(key, layout).steps:
                    found.setdefault(step.name, (step.unit, step.entry))
    return found


def units(
    fault: str | None = None, features: Features = BIASED, is_wide: bool = False, is_first: bool = False
) -> dict[str, tuple[str, str]]:
    with planted(fault) if fault else nullcontext():
        return write(features, is_wide, is_first)


@functools.cache
def machine_code(unit: tuple[str, str]) -> bytes:
    return PRIVATE.sub(b"", nvrtc.compile_source(toolchain.find(), unit[0], ARCH.name, [unit[1]]).cubin)


def kernels_with(fault: str, features: Features) -> list[str]:
    """Kernels whose own header has the fault; one of those that share it, where it is in a shared header."""
    (owner,) = [path.stem for path in headers() if fault in USE.findall(path.read_text())]
    found = [name for name, (unit, _) in units(None, features).items() if f"/{owner}.cuh" in unit]
    family = next(families.fault_family(mutation) for mutation in mutations() if mutation.name == fault)
    return found or [f"{kernel}_kernel" for kernel in (family.kernels if family else ("fwd_simt",))]


def test_there_are_enough_and_each_is_planted_once():
    assert len(NAMES) == len(set(NAMES)) >= 16
    assert {mutation.tool for mutation in mutations()} == {None, "memcheck", "racecheck", "initcheck", "synccheck"}
    uses = Counter(name for path in headers() for name in USE.findall(path.read_text()))
    # A race shows where a warp is late: that one is in two lines
    assert uses == Counter([*NAMES, "missing_barrier"])


@pytest.mark.parametrize("part", range(4))
def test_faults_change_the_machine_code(part: int, seed: int) -> None:
    """A tenth of the faults, drawn anew in each run."""
    names = NAMES[part::4]
    for name in random.Random(seed).sample(names, -(-len(names) // 10)):
        features = NEEDED.get(name, Features())
        is_wide = "_f32_wide_" in name or name == "bwd_sm80_columns"  # two warps share keys in the first tile alone
        is_first = name == "fwd_sm90_guess"  # other tiles have a maximum of their own
        plain, broken = units(None, features, is_wide, is_first), units(name, features, is_wide, is_first)
        kernels = kernels_with(name, features)
        assert any(machine_code(broken[kernel]) != machine_code(plain[kernel]) for kernel in kernels), name


def plain_ptx(kernel: str) -> bytes:
    """Without a fault. The same PTX is the same machine code, and is made in half of the time."""
    return PRIVATE.sub(b"", ptx_of(*units()[kernel], f"compute_{ARCH.name.removeprefix('sm_')}")[0])


def test_without_faults_the_headers_give_the_same_ptx(tmp_path, monkeypatch, seed: int) -> None:
    """Of a third of the kernels, drawn anew in each run."""
    kernels = random.Random(seed).sample(sorted(units()), len(units()) // 3)
    expected = {name: plain_ptx(name) for name in kernels}
    copy_headers(tmp_path / "include")
    monkeypatch.setattr(nvrtc, "INCLUDE", tmp_path / "include")
    (tmp_path / "include" / "device" / "core" / "mutation.cuh").write_text("#pragma once\n")
    for path in headers():
        path.write_text(WORDS_BEFORE.sub("", WRONG_LINE.sub("", path.read_text())))
        assert "mutates" not in path.read_text()
    assert {name: plain_ptx(name) for name in kernels} == expected


def test_a_fault_has_its_own_place_in_the_cache(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_memory", {})
    tmp_path.chmod(0o700)
    name = "fwd_combine_kernel"
    for unit in (units()[name], units("combine_weight")[name]):
        cache.compile_cached(unit[0], ARCH.name, [unit[1]])
    assert len(list(tmp_path.glob("*.kernel"))) == 2


def test_plans_do_not_cross() -> None:
    key = PlanKey("float32", "float32", 64, 64, Features(), ARCH)
    before = assemble.kernels(key)
    with mutants.broken("skip_rescale"):
        broken = [step.name for step in assemble.kernels(key) if is_broken(step.unit)]
        assert broken == ["fwd_simt_kernel"]  # not fwd_combine, whose headers do not have it
    assert assemble.kernels(key) == before


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_gpu.Recorder]:
    make = Trial.make
    torch.use_deterministic_algorithms(False)  # which some families refuse
    monkeypatch.setattr(Trial, "make", lambda trial, _: make(trial, "cpu"))
    yield fake_gpu.plug_in(fake_gpu.build(tmp_path), monkeypatch.setattr)
    fake_gpu.unplug()


def test_every_fault_is_in_a_kernel_that_its_problems_launch(gpu: fake_gpu.Recorder, seed: int) -> None:
    """A call that another family took would show nothing."""
    backend = registry.find("cuda")
    settings = Settings([backend], "cuda", seed, problems=1, jobs=0, stops_at_failure=True)
    for fault in mutations():
        if fault.tool is not None:
            continue
        needs = mutants.needs_of(fault)
        with mutants.broken(fault.name):
            fits = (mutants.fitted(trial, fault, "cuda") for trial in itertools.islice(drawn(settings), 40))
            trial = next((fit for fit in fits if fit is not None), None)
            assert trial is not None, fault.name
            assert {name: getattr(trial.case, name) for name in needs} == needs, fault.name
            with native.record_launches() as launched:
                warm(trial, backend, "cuda")
            assert any(is_broken(unit) for unit, _ in launched), fault.name


def test_what_a_fault_needs_is_of_a_fault() -> None:
    assert set(mutants.NEEDS) <= {families.fault_kind(fault) for fault in mutations()}
    for family in families.all_families():
        own = {families.fault_kind(fault) for fault in mutations() if families.fault_family(fault) is family}
        assert set(family.fault_needs) <= own, family.name


def test_only_problems_that_reach_the_fault_are_judged(gpu: fake_gpu.Recorder, monkeypatch) -> None:
    judged = list[Trial]()
    monkeypatch.setattr(mutants, "is_alive", lambda _: True)
    monkeypatch.setattr(
        mutants, "check_trials", lambda trials, _: judged.extend(trials) or Report(num_problems=len(judged))
    )
    (fault,) = (fault for fault in mutations() if fault.name == "fwd_sm90_wide_tail")
    found = mutants.hunt_one(fault, Settings([registry.find("cuda")], "cuda", 3, problems=5))
    assert found.num_problems == len(judged) == 5
    assert not found.is_found
    assert {(trial.case.kind, trial.has_backward) for trial in judged} == {("used", False)}
    assert min(trial.case.head_dim for trial in judged) > 256


@pytest.mark.parametrize("name", ["fwd_sm80_rescale", "fwd_sm90_rescale", "fwd_sm90_f32_rescale"])
def test_a_fault_is_looked_for_in_its_family(name: str) -> None:
    dtype = "float32" if "f32" in name else "bfloat16"
    key = PlanKey(dtype, dtype, 64, 64, Features(), ARCH)
    with mutants.broken(name):
        assert name.startswith(families.select(key).name)
    with mutants.broken("skip_rescale"):
        assert families.forced_names() == ("fwd_simt", "bwd_simt")
