"""Shows that a change of the sources leaves the kernels as they are: the PTX of a fixed list, before and after.

python tools/compare_kernels.py --write before.csv     # of this tree
python tools/compare_kernels.py --against before.csv   # exits 1 and names every kernel that differs

The list: each kernel of each family without options and causal, with each option alone and with all together, on one
GPU of each generation; head dims and dtypes take turns where an option is on. Names of C++ functions and types are
masked, virtual registers numbered anew and constants that no instruction reads left out, so that a renamed type or a
new trait is no difference. Equal PTX is equal machine code: ptxas sees nothing else. Needs NVRTC, no GPU. --sample
takes a part of the list.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path

from flashtile import families
from flashtile.cli.kernel_jobs import keys_of_all_lengths
from flashtile.families import Family
from flashtile.plans.arch import Arch, arch_named
from flashtile.plans.spec import CallLayout, Features, PlanKey

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from ptx import ptx_of

ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
FIELDS = ("arch", "family", "kernel", "step", "dtype", "head_dims", "options", "sha256")
PLAIN = Features()
Row = tuple[str, ...]  # FIELDS but for the last
Unit = tuple[str, str, str]  # text, C++ name of the kernel, virtual architecture
# Mangled and internal names, which differ where a type or a file has another name
_NAME = re.compile(rb"_Z\w+|_INTERNAL_\w+|__unnamed_\d+")
_COMMENT = re.compile(rb"//[^\n]*")
_REGISTER = re.compile(rb"%([a-z]+)\d+\b")
_REGISTERS = re.compile(rb"(\.reg [^\n]*)<\d+>")  # how many of a kind
_WORD = re.compile(rb"[\w$]+")
_CONSTANT = re.compile(rb"^\.global (?:\.align \d+ )?\.\w+ ([\w$]+)[^\n]*;\n", re.MULTILINE)


def features_in_turn(family: Family) -> Iterator[Features]:
    """Each option alone, a band with lengths, and all that the family takes."""
    own = [field for field in fields(Features) if field.name in family.features and field.name != "bias_dtype"]
    options = {field.name: True for field in own if field.default is False}
    bias = {"bias_dtype": "own"} if "bias_dtype" in family.features else {}
    yield from (Features(**{name: True}) for name in options if name != "has_band")
    if bias:
        yield Features(**bias)
    if "is_aligned16" in family.features:
        yield Features(is_aligned16=False)
    yield Features(**{name: True for name in ("has_band", "has_lengths") if name in options})
    yield Features(**options, **bias)


def keys(family: Family, arch: Arch) -> Iterator[PlanKey]:
    """The calls whose kernels are compared."""
    grad_sets: tuple[tuple[str, ...] | None, ...] = family.grad_sets or (None,)
    bands = (False, True) if "has_band" in family.features else (False,)
    cases = [
        (dtype, dims, Features(has_band=has_band))
        for dtype, dims, has_band in itertools.product(family.dtypes, family.head_dims, bands)
    ]
    turns = itertools.product(family.head_dims, family.dtypes)
    cases += [(dtype, dims, some) for some, (dims, dtype) in zip(features_in_turn(family), itertools.cycle(turns))]
    for (dtype, dims, some), grads in itertools.product(cases, grad_sets):
        has_bias = some.bias_dtype is not None or grads == ("dbias",)
        features = replace(some, bias_dtype=dtype if has_bias else None)
        key = PlanKey(dtype, dtype, *dims, features, arch, grads)
        yield from (found for found in keys_of_all_lengths(family, key) if family.refuse(found) is None)


def listed(archs: Sequence[Arch]) -> Iterator[tuple[Row, Unit]]:
    for arch in archs:
        for family in families.all_families():
            for key in keys(family, arch) if family.runs_on(arch) else ():
                for turn, step in enumerate(family.launch(key, CallLayout("bhsd", ())).steps):
                    options = {field.name: getattr(key.features, field.name) for field in fields(Features)}
                    changed = [f"{name}={value}" for name, value in options.items() if value != getattr(PLAIN, name)]
                    words = [*changed, *(f"{which}={value}" for which, value in key.classes), "+".join(key.grads or ())]
                    dims = f"{key.head_dim}x{key.head_dim_v}"
                    row = (arch.name, family.name, step.name, str(turn), key.dtype, dims, " ".join(words))
                    yield row, (step.unit, step.entry, f"compute_{arch.own_name.removeprefix('sm_')}")


def masked(ptx: bytes) -> bytes:
    """The PTX with names and registers numbered in their order, without constants that are not read."""
    numbers: dict[bytes, bytes] = {}
    registers: dict[bytes, bytes] = {}
    ptx = _COMMENT.sub(b"", ptx)
    uses = Counter(_WORD.findall(ptx))
    ptx = _CONSTANT.sub(lambda found: b"" if uses[found[1]] == 1 else found[0], ptx)
    ptx = _NAME.sub(lambda found: numbers.setdefault(found[0], b"name_%d" % len(numbers)), ptx)
    ptx = _REGISTERS.sub(rb"\1", ptx)
    return _REGISTER.sub(lambda found: registers.setdefault(found[0], b"%%%s_%d" % (found[1], len(registers))), ptx)


def digest(unit: Unit) -> str:
    return hashlib.sha256(masked(ptx_of(*unit)[0])).hexdigest()[:24]


def digests(archs: Sequence[Arch], sample: float, jobs: int) -> dict[Row, str]:
    """The sample goes by what a kernel is, so that before and after draw the same."""
    drawn = {row: unit for row, unit in listed(archs) if random.Random(repr(row)).random() < sample}
    units = sorted(set(drawn.values()))
    with ProcessPoolExecutor(jobs) if jobs > 1 else nullcontext() as pool:
        found = {}
        results = pool.map(digest, units, chunksize=4) if pool else map(digest, units)
        for unit, value in zip(units, results, strict=True):
            found[unit] = value
            if len(found) % 100 == 0:
                print(f"{len(found)} of {len(units)}", file=sys.stderr, flush=True)
    return {row: found[unit] for row, unit in drawn.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path, help="the file of digests to write")
    parser.add_argument("--against", type=Path, help="a file of digests to compare with")
    parser.add_argument("--archs", default=",".join(ARCHS))
    parser.add_argument("--sample", type=float, default=1.0, help="the part of the list that is compiled")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    archs = [arch for name in given.archs.split(",") if (arch := arch_named(name)) is not None]
    now = digests(archs, given.sample, given.jobs)
    if given.write:
        with given.write.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(FIELDS)
            writer.writerows((*row, value) for row, value in now.items())
        print(f"{len(now)} kernels, {len(set(now.values()))} different")
    if not given.against:
        return 0
    with given.against.open(newline="") as file:
        before = {tuple(row[:-1]): row[-1] for row in itertools.islice(csv.reader(file), 1, None)}
    both = [row for row in now if row in before]
    differ = [row for row in both if now[row] != before[row]]
    for row in differ:
        print("differs:", " ".join(row))
    print(f"{len(both)} compared, {len(differ)} differ")
    print(f"{len(before) - len(both)} only before, {len(now) - len(both)} only now")
    return 0 if both and not differ else 1


if __name__ == "__main__":
    sys.exit(main())
