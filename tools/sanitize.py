"""Every row of the kernel table under compute-sanitizer: memcheck, racecheck, initcheck, synccheck. Needs a GPU.

Each tool must be silent about our kernels, and must speak about a fault planted for it (core/mutation.cuh): a tool that cannot see the
kernels would be silent too. Problems are tiny; kernels are compiled before any tool watches.

python tools/sanitize.py [--tools memcheck,racecheck] [--head-dims 64,128] [--dtypes float32] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flashtile.backends import registry
from flashtile.bench import device as facts
from flashtile.check import mutants
from flashtile.check.judge import warm
from flashtile.check.trial import Trial
from flashtile.kernels import table
from flashtile.kernels.arch import arch_of
from flashtile.kernels.spec import Features
from flashtile.runtime.cache import KernelCache
from flashtile.testing import Case

# The fault that each tool must see, and what its last line looks like
TOOLS = {
    "memcheck": ("out_of_bounds", re.compile(r"ERROR SUMMARY: (\d+) error")),
    "racecheck": ("missing_barrier", re.compile(r"RACECHECK SUMMARY: (\d+) hazard")),
    "initcheck": ("uninitialised", re.compile(r"ERROR SUMMARY: (\d+) error")),
    "synccheck": ("divergent_barrier", re.compile(r"ERROR SUMMARY: (\d+) error")),
}
# initcheck must see what other kernels write, or all that they wrote would count as never written
UNFILTERED = ("initcheck",)
BACKEND = "cuda"
TIMEOUT_S = 600
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


# One that exists only with an option, and those that a plain call launches
BIAS_KERNELS = [kernel for kernels in table.PASSES.values() for kernel in kernels if "dbias" in kernel]
PLAIN_KERNELS = [kernel for kernels in table.PASSES.values() for kernel in kernels if kernel not in BIAS_KERNELS]


def trial(dtype: str, head_dim: int, has_bias: bool) -> Trial:
    """Two tiles of keys and a tail, shared heads."""
    case = Case(DTYPES[dtype], batch=1, heads=2, heads_kv=1, seqlen_q=35, seqlen_k=70, head_dim=head_dim, head_dim_v=head_dim)
    changes: dict[str, Any] = {"bias": "hqk", "has_sinks": dtype == "float32"} if has_bias else {"causal": "bottom_right"}
    return Trial(dataclasses.replace(case, **changes), int(has_bias), True)


def special_trials() -> list[Trial]:
    """Lengths, pages, splits, narrow loads, masks and dropout, on the tile that a call would take."""
    plain = Case(batch=2, heads=2, heads_kv=1, seqlen_q=20, seqlen_k=150, head_dim=40, head_dim_v=24)
    changes: list[dict[str, Any]] = [
        {"kind": "varlen", "dropout_p": 0.2, "mask": "bhqk"},
        {"kind": "padded", "softcap": 5.0, "alibi": "bh"},
        {"kind": "cache", "num_splits": 3, "page_size": 7},
        {"kind": "paged", "window": (20, 3)},
        {"memory": "offset", "head_dim": 37, "num_splits": 2},
    ]
    return [Trial(dataclasses.replace(plain, **change), 2, change.get("kind") not in ("cache", "paged")) for change in changes]


def rows(kernel: str, dtype: str, head_dim: int, has_bias: bool) -> list[Any]:
    """Those of the table that this GPU can run."""
    arch = arch_of(*torch.cuda.get_device_capability())
    assert arch is not None
    features = Features(bias_dtype=dtype if has_bias else None)
    return [row for row in table.candidates(kernel, dtype, dtype, head_dim, features) if table.fits(row, arch)]


@contextmanager
def choosing(kernels: Sequence[str], place: int) -> Iterator[None]:
    """Calls take the tile at this place of the list of each of these kernels, or the last."""
    select = table.select

    def choose(kernel: str, dtype: str, out_dtype: str, head_dim: int, features: Features, arch: Any, is_small: bool = False) -> Any:
        if kernel not in kernels:
            return select(kernel, dtype, out_dtype, head_dim, features, arch, is_small)
        found = [row for row in table.candidates(kernel, dtype, out_dtype, head_dim, features) if table.fits(row, arch)]
        return found[min(place, len(found) - 1)]

    table.select = choose
    mutants.forget()
    try:
        yield
    finally:
        table.select = select
        mutants.forget()


def run_rows(dtypes: Sequence[str], head_dims: Sequence[int], num_threads: int) -> frozenset[str]:
    """Launches every row; returns the kernels that were."""
    backend = registry.find(BACKEND)
    torch.set_num_threads(1)
    with ThreadPoolExecutor(num_threads) as pool:
        for kernels, has_bias in ((PLAIN_KERNELS, False), (BIAS_KERNELS, True)):
            sizes = [(dtype, head_dim, has_bias) for dtype, head_dim in itertools.product(dtypes, head_dims)]
            num_places = {size: max(len(rows(kernel, *size)) for kernel in kernels) for size in sizes}
            for place in range(max(num_places.values())):
                with choosing(kernels, place):
                    list(pool.map(lambda size: warm(trial(*size), backend, "cuda"), [size for size in sizes if place < num_places[size]]))
        list(pool.map(lambda trial: warm(trial, backend, "cuda"), special_trials()))
    torch.cuda.synchronize()
    return backend.loaded_kernels()


def run_fault(name: str) -> None:
    with mutants.broken(name):
        for dtype in ("bfloat16", "float32"):
            warm(trial(dtype, 64, False), registry.find(BACKEND), "cuda")
            torch.cuda.synchronize()


def watch(program: str, tool: str, arguments: Sequence[str]) -> dict[str, Any]:
    """This script under one tool: how many errors it reports, its first words about them, and the kernels it saw launched."""
    names = [] if tool in UNFILTERED else ["--kernel-name", "kns=flashtile"]
    command = [program, "--tool", tool, *names, "--report-api-errors", "no", "--print-limit", "3", sys.executable, __file__, *arguments]
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        return {"errors": None, "seconds": TIMEOUT_S, "said": f"not done in {TIMEOUT_S} s", "kernels": []}
    found = TOOLS[tool][1].search(output)
    said = [line.lstrip("= ") for line in output.splitlines() if line.startswith("=========") and line.strip("= ")]
    return {
        "errors": int(found[1]) if found else None,
        "kernels": re.findall(r"^launched (.*)$", output, re.MULTILINE),
        "seconds": round(time.monotonic() - start, 1),
        "said": "; ".join(said[:3])[:400] if found and int(found[1]) else ("" if found else output[-2000:]),
    }


def joined(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Runs of one tool as one: no errors only where each run was seen to end without."""
    errors = [run["errors"] for run in runs]
    return {
        "errors": None if None in errors else sum(errors),
        "kernels": sorted({kernel for run in runs for kernel in run["kernels"]}),
        "seconds": max(run["seconds"] for run in runs),
        "said": "; ".join(filter(None, (run["said"] for run in runs))),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Every kernel under compute-sanitizer.")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"some of {', '.join(TOOLS)}")
    parser.add_argument("--head-dims", default=",".join(map(str, table.HEAD_DIMS)))
    parser.add_argument("--dtypes", default=",".join(table.DTYPES))
    parser.add_argument("--out", type=Path, help="folder to write sanitize.json into; default: results/<device>")
    parser.add_argument("--rows", action="store_true", help="launch every row, watched or not")
    parser.add_argument("--fault", help="launch kernels with this fault, watched or not")
    options = parser.parse_args(arguments)
    tools, dtypes = options.tools.split(","), options.dtypes.split(",")
    head_dims = [int(text) for text in options.head_dims.split(",")]
    if not torch.cuda.is_available():
        print("sanitize: got no GPU; accepted: a machine with one", file=sys.stderr)
        return 2
    if options.rows:
        print("\n".join(f"launched {kernel}" for kernel in sorted(run_rows(dtypes, head_dims, 1))), flush=True)
        return 0
    if options.fault:
        run_fault(options.fault)
        return 0
    unknown = [tool for tool in tools if tool not in TOOLS]
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if unknown:
        print(f"--tools: got {unknown[0]}; accepted: {', '.join(TOOLS)}.", file=sys.stderr)
        return 2
    if program is None:
        print("compute-sanitizer: not found. It comes with the CUDA toolkit; put its bin folder on PATH.", file=sys.stderr)
        return 2

    with tempfile.TemporaryDirectory() as folder_of_kernels:
        if KernelCache.default().directory is None:
            os.environ.update(FLASHTILE_CACHE_DIR=folder_of_kernels, FLASHTILE_CACHE="1")
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        start = time.monotonic()
        kernels = run_rows(dtypes, head_dims, os.cpu_count() or 1)
        print(f"{len(kernels)} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)
        # Side by side: most of the time goes into patching kernels, on the host
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1))) as pool:
            clean_runs = {
                tool: [
                    pool.submit(watch, program, tool, ["--rows", "--dtypes", dtype, "--head-dims", options.head_dims]) for dtype in dtypes
                ]
                for tool in tools
            }
            fault_runs = {tool: pool.submit(watch, program, tool, ["--fault", TOOLS[tool][0]]) for tool in tools}
    report: dict[str, Any] = {"kernels": len(kernels), "tools": {}}
    is_good = True
    for tool in tools:
        clean, planted, fault = joined([run.result() for run in clean_runs[tool]]), joined([fault_runs[tool].result()]), TOOLS[tool][0]
        is_clean, is_seen = clean["errors"] == 0 and set(clean["kernels"]) == kernels, bool(planted["errors"])
        is_good = is_good and is_clean and is_seen
        clean["kernels"], planted["kernels"] = len(clean["kernels"]), len(planted["kernels"])
        report["tools"][tool] = {"clean": clean, "fault": fault, "planted": planted}
        words = ["clean" if is_clean else f"NOT CLEAN: {clean}", f"{fault} {'seen' if is_seen else f'NOT SEEN: {planted}'}"]
        print(f"{tool:10} {words[0]} ({clean['seconds']} s), {words[1]} ({planted['seconds']} s)", flush=True)
    folder = options.out or Path("results") / facts.slug("cuda")
    folder.mkdir(parents=True, exist_ok=True)
    given = sys.argv[1:] if arguments is None else arguments
    command = f"python tools/sanitize.py {' '.join(given)}" if given else "make sanitize"
    environment = dataclasses.asdict(facts.environment("cuda", [])) | {"command": command}
    (folder / "sanitize.json").write_text(json.dumps(report | {"environment": environment}, indent=1) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
