"""Every row of the kernel table under compute-sanitizer: memcheck, racecheck, initcheck, synccheck. Needs a GPU.

Each tool must be silent about our kernels, and must speak about the faults planted for it (core/mutation.cuh): a tool that cannot see the
kernels would be silent too. Problems are as small as a tile allows. Kernels are compiled before any tool watches, then
the tools run side by side, each in several processes.

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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashtile import ops
from flashtile.backends import executor, native, registry
from flashtile.backends.base import GradNeeds
from flashtile.bench import device as facts
from flashtile.check import mutants
from flashtile.check.judge import warm
from flashtile.check.trial import Trial
from flashtile.kernels import plan as plans
from flashtile.kernels import table
from flashtile.kernels.arch import Arch, arch_of
from flashtile.kernels.mutation import mutations
from flashtile.kernels.spec import Features
from flashtile.runtime.cache import KernelCache
from flashtile.testing import Case

# What a tool's last line looks like
TOOLS = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
    "initcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "synccheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
}
# initcheck must see what other kernels write, or all that they wrote would count as never written
UNFILTERED = ("initcheck",)
BACKEND = "cuda"
LIMIT_S = 600.0
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Those that exist only with an option, those that a plain call launches, and the Hopper forward
BIAS_KERNELS = tuple(kernel for kernels in table.PASSES.values() for kernel in kernels if "dbias" in kernel)
PLAIN_KERNELS = tuple(kernel for kernels in table.PASSES.values() for kernel in kernels if kernel not in BIAS_KERNELS)
HOPPER = "fwd_sm90"


@dataclass(frozen=True)
class Job:
    """One call. `kernels` take the tile at this place among those that would do, or the last."""

    trial: Trial
    kernels: tuple[str, ...] = ()
    place: int = 0

    def run(self) -> None:
        backend = registry.find(BACKEND)
        with choosing(self.kernels, self.place):
            if self.kernels != BIAS_KERNELS:
                warm(self.trial, backend, "cuda")
                return
            # The gradient of the bias alone: the other kernels are reached without one
            inputs = self.trial.make("cuda")
            args = inputs.args._replace(needs_grad=True, needs_bias_grad=True)
            out, lse = map(torch.zeros_like, ops.empty_outputs(args))
            needs = GradNeeds(dq=False, dk=False, dv=False, dbias=True, dsinks=False)
            with torch.no_grad():
                ops.backward(inputs.dout, inputs.dlse, *args._replace(backend=BACKEND), out, lse, list(needs))


def trial(dtype: str, head_dim: int, head_dim_v: int, tile: int, has_backward: bool, **options: Any) -> Trial:
    """A tile of queries and a tail, two tiles of keys and a tail, heads that share keys."""
    sizes = {"seqlen_q": tile + 3, "seqlen_k": 2 * tile + 6, "head_dim": head_dim, "head_dim_v": head_dim_v}
    return Trial(Case(**{"dtype": DTYPES[dtype], "batch": 1, "heads": 2, "heads_kv": 1, **sizes, **options}), 1, has_backward)


def all_jobs(arch: Arch, dtypes: Sequence[str], head_dims: Sequence[int]) -> list[Job]:
    """Calls that launch every row of the table that the architecture can run, then every option once."""
    jobs = []
    for dtype, head_dim in itertools.product(dtypes, head_dims):
        for kernels, options in ((PLAIN_KERNELS, {"scale": -0.1}), (BIAS_KERNELS, {"bias": "hqk"})):
            # A negative scale is nothing that the Hopper forward takes
            found = [rows(kernel, dtype, head_dim, Features(bias_dtype=dtype if "bias" in options else None), arch) for kernel in kernels]
            for place in range(max(map(len, found))):
                tile = max(max(row.block_m, row.block_n) for some in found for row in some[min(place, len(some) - 1) :][:1])
                jobs.append(Job(trial(dtype, head_dim, head_dim, tile, True, **options), kernels, place))
    if arch.has_wgmma:
        for dtype in filter(table.SM90_DTYPES.__contains__, dtypes):
            jobs += hopper_jobs(dtype, head_dims)
    return jobs + [Job(one) for one in special_trials(arch, dtypes)]


def hopper_jobs(dtype: str, head_dims: Sequence[int]) -> Iterator[Job]:
    """Every tile of every pair of head dims, and that of a few queries, whose heads share a tile."""
    for head_dim, head_dim_v in dict.fromkeys(dims for dims, _, _ in table.all_sm90_tiles() if max(dims) in head_dims):
        for place, row in enumerate(table.sm90_rows(dtype, dtype, head_dim, head_dim_v, Features(), is_packed=False, is_ragged=False)):
            yield Job(trial(dtype, head_dim, head_dim_v, row.block_m, False), (HOPPER,), place)
            if row.stores_p:  # under a band O does not leave where a consumer has no queries
                yield Job(trial(dtype, head_dim, head_dim_v, row.block_m, False, causal="bottom_right"), (HOPPER,), place)
        yield Job(trial(dtype, head_dim, head_dim_v, 128, False, seqlen_q=3), (HOPPER,))


def special_trials(arch: Arch, dtypes: Sequence[str]) -> list[Trial]:
    """Lengths, pages, splits, narrow loads, masks and dropout, on the tile that a call would take."""
    plain = Case(batch=2, heads=2, heads_kv=1, seqlen_q=20, seqlen_k=150, head_dim=40, head_dim_v=24)
    changes: list[dict[str, Any]] = [
        {"kind": "varlen", "dropout_p": 0.2, "mask": "bhqk"},
        {"kind": "padded", "softcap": 5.0, "alibi": "bh"},
        {"kind": "cache", "num_splits": 3, "page_size": 7},
        {"kind": "paged", "window": (20, 3)},
        {"memory": "offset", "head_dim": 37, "num_splits": 2},
        {"bias": "hqk", "has_sinks": True, "causal": "bottom_right"},
    ]
    # Those that the Hopper forward takes, over more than one tile of its keys
    hopper: list[dict[str, Any]] = [
        {"kind": "varlen", "dropout_p": 0.2},
        {"kind": "padded", "bias": "hqk", "has_sinks": True},
        # Long enough for its splits; the second has heads that share a tile
        {"causal": "bottom_right", "num_splits": 2, "seqlen_k": 1100},
        {"kind": "used", "num_splits": 2, "seqlen_q": 3, "seqlen_k": 2000},
        {"mask": "qk", "softcap": 5.0, "alibi": "bh", "is_out_float32": True},
        # More tiles of work than four for each block: orders lie where others lay
        {"causal": "bottom_right", "batch": 10, "heads": 60, "heads_kv": 60, "seqlen_q": 180, "seqlen_k": 140},
        {"kind": "varlen", "causal": "bottom_right", "batch": 20, "heads": 60, "heads_kv": 60, "seqlen_q": 40, "seqlen_k": 9},
    ]
    kinds = [("float32", plain, changes)]
    if arch.has_wgmma:
        kinds.append(("bfloat16", dataclasses.replace(plain, seqlen_q=200, seqlen_k=300), hopper))
    trials = []
    for dtype, case, some in kinds:
        for change in some if dtype in dtypes else ():
            has_backward = dtype == "float32" and change.get("kind") not in ("cache", "paged")
            trials.append(Trial(dataclasses.replace(case, dtype=DTYPES[dtype], **change), 2, has_backward))
    return trials


def rows(kernel: str, dtype: str, head_dim: int, features: Features, arch: Arch) -> list[Any]:
    return [row for row in table.candidates(kernel, dtype, dtype, head_dim, features) if table.fits(row, arch)]


@contextmanager
def choosing(kernels: Sequence[str], place: int) -> Iterator[None]:
    """Calls take the tile at this place of the list of each of these kernels, or the last."""
    select, select_sm90 = table.select, table.select_sm90

    def choose(kernel: str, dtype: str, out_dtype: str, head_dim: int, features: Features, arch: Any, is_small: bool = False) -> Any:
        if kernel not in kernels:
            return select(kernel, dtype, out_dtype, head_dim, features, arch, is_small)
        found = [row for row in table.candidates(kernel, dtype, out_dtype, head_dim, features) if table.fits(row, arch)]
        return found[min(place, len(found) - 1)]

    def choose_hopper(*call: Any) -> Any:
        *kind, is_packed, _is_ragged = call
        found = table.sm90_rows(*kind, is_packed=is_packed, is_ragged=False)
        return found[min(place, len(found) - 1)] if HOPPER in kernels else select_sm90(*call)

    table.select, table.select_sm90 = choose, choose_hopper
    plans.forget()
    try:
        yield
    finally:
        table.select, table.select_sm90 = select, select_sm90
        plans.forget()


def run_jobs(jobs: Sequence[Job]) -> frozenset[str]:
    """Makes the calls; returns the kernels that were launched."""
    torch.set_num_threads(1)
    for job in jobs:
        job.run()
    torch.cuda.synchronize()
    return registry.find(BACKEND).loaded_kernels()


def compile_jobs(jobs: Sequence[Job], arch: Arch) -> frozenset[str]:
    """Compiles what the calls would launch, in as many threads as there are cores; returns the kernels."""
    with native.record_launches() as units:
        run_jobs(jobs)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda unit: executor.function(*unit, arch.name), units))
    return registry.find(BACKEND).loaded_kernels()


def faults(tool: str, arch: Arch) -> list[str]:
    """What is planted for a tool: a fault in the kernels of every GPU, and one in those of Hopper where they run."""
    tools = {"missing_barrier": "racecheck"}
    return [mutation.name for mutation in mutations() if mutation.is_on(arch) and tools.get(mutation.name, mutation.tool) == tool]


def run_fault(name: str) -> None:
    (mutation,) = (mutation for mutation in mutations() if mutation.name == name)
    dtype = "bfloat16" if mutation.is_hopper else "float32"
    with mutants.broken(name):
        warm(trial(dtype, 64, 64, 64, dtype == "float32"), registry.find(BACKEND), "cuda")
        torch.cuda.synchronize()


def watch(program: str, tool: str, arguments: Sequence[str], limit_s: float) -> dict[str, Any]:
    """This script under one tool: how many errors it reports, its first words about them, and the kernels it saw launched."""
    names = [] if tool in UNFILTERED else ["--kernel-name", "kns=flashtile"]
    command = [program, "--tool", tool, *names, "--report-api-errors", "no", "--print-limit", "3", sys.executable, __file__, *arguments]
    start = time.monotonic()
    # A group of their own: the tool's end is not that of the process it watches
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = running.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        return {"errors": None, "seconds": limit_s, "said": f"not done in {limit_s:g} s", "kernels": []}
    found = TOOLS[tool].search(output)
    lines = [line.strip("= ") for line in output.splitlines() if line.startswith("=========")]
    said = [line for line in lines if line not in ("", "COMPUTE-SANITIZER")]
    return {
        "errors": int(found[1]) if found else None,
        "kernels": re.findall(r"^launched (.*)$", output, re.MULTILINE),
        "seconds": round(time.monotonic() - start, 1),
        "said": "; ".join(said[:3])[:400] if found and int(found[1]) else ("" if found else output[-2000:]),
    }


def joined(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Processes under one tool as one: no errors only where each was seen to end without."""
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
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that one process under a tool may take")
    parser.add_argument("--share", help="launch one share of the rows, watched or not: 2/4 is the second of four")
    parser.add_argument("--fault", help="launch kernels with this fault, watched or not")
    options = parser.parse_args(arguments)
    tools, dtypes = options.tools.split(","), options.dtypes.split(",")
    head_dims = [int(text) for text in options.head_dims.split(",")]
    if not torch.cuda.is_available():
        print("sanitize: got no GPU; accepted: a machine with one", file=sys.stderr)
        return 2
    arch = arch_of(*torch.cuda.get_device_capability())
    assert arch is not None
    jobs = all_jobs(arch, dtypes, head_dims)
    if options.share:
        which, of = map(int, options.share.split("/"))
        print("\n".join(f"launched {kernel}" for kernel in sorted(run_jobs(jobs[which - 1 :: of]))), flush=True)
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
        kernels = compile_jobs(jobs, arch)
        print(f"{len(kernels)} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)
        # Side by side: most of the time goes into patching kernels, on the host
        num_shares = max(1, (os.cpu_count() or 1) // len(tools))
        chosen = ["--dtypes", options.dtypes, "--head-dims", options.head_dims]
        shares = [["--share", f"{which + 1}/{num_shares}", *chosen] for which in range(num_shares)]
        with ThreadPoolExecutor(num_shares * len(tools)) as pool:
            clean_runs = {tool: [pool.submit(watch, program, tool, share, options.limit) for share in shares] for tool in tools}
            fault_runs = {
                tool: {name: pool.submit(watch, program, tool, ["--fault", name], options.limit) for name in faults(tool, arch)}
                for tool in tools
            }
    report: dict[str, Any] = {"kernels": len(kernels), "tools": {}}
    is_good = True
    for tool in tools:
        clean = joined([run.result() for run in clean_runs[tool]])
        planted = {name: run.result() for name, run in fault_runs[tool].items()}
        is_clean = clean["errors"] == 0 and set(clean["kernels"]) == kernels
        is_good = is_good and is_clean and all(run["errors"] for run in planted.values())
        for run in (clean, *planted.values()):
            run["kernels"] = len(run["kernels"])
        report["tools"][tool] = {"clean": clean, "planted": planted}
        words = ["clean" if is_clean else f"NOT CLEAN: {clean}"]
        words += [f"{name} {'seen' if run['errors'] else f'NOT SEEN: {run}'}" for name, run in planted.items()]
        print(f"{tool:10} {', '.join(words)} ({clean['seconds']} s)", flush=True)
    folder = options.out or Path("results") / facts.slug("cuda")
    folder.mkdir(parents=True, exist_ok=True)
    given = sys.argv[1:] if arguments is None else arguments
    environment = dataclasses.asdict(facts.environment("cuda", given, "python tools/sanitize.py" if given else "make sanitize"))
    (folder / "sanitize.json").write_text(json.dumps(report | {"environment": environment}, indent=1) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
