"""Every row of every kernel family under compute-sanitizer: memcheck, racecheck, initcheck, synccheck. Needs a GPU.

Each tool must be silent about our kernels, and must speak about the faults planted for it (core/mutation.cuh): a tool
that cannot see the kernels would be silent too. Problems are as small as a tile allows. Kernels are compiled before any
tool watches; then the tools run side by side, each in several processes. With --seconds, a process starts no call after
that time. sanitize.json says how many calls of each family every tool has watched.

python tools/sanitize.py [--tools memcheck,racecheck] [--families decode_sm90] [--head-dims 64,128] [--dtypes float32]
                         [--seconds 60] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
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
from flashtile.cli.kernel_jobs import head_dims
from flashtile.kernels import assemble, families
from flashtile.kernels.arch import Arch, arch_here
from flashtile.kernels.families import Family
from flashtile.kernels.mutation import mutations
from flashtile.kernels.plan import LaunchPlan
from flashtile.kernels.spec import DTYPES, CallLayout, Features, PlanKey
from flashtile.runtime.cache import KernelCache
from flashtile.testing import Case

# What a tool's last line looks like
TOOLS = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
    "initcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "synccheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
}
# The part of the processes that a tool gets: racecheck is the slowest
WEIGHTS = {"memcheck": 1, "racecheck": 3, "initcheck": 1, "synccheck": 1}
# initcheck must see what other kernels write, or all that they wrote would count as never written
UNFILTERED = ("initcheck",)
BACKEND = "cuda"
LIMIT_S = 600.0
GRAD_NAMES = GradNeeds._fields
# Of a block: racecheck and synccheck count for themselves, and miss barriers that are initialised in loops
NUM_MBARRIERS = 64
# Families whose blocks wait for flags in a workspace that nobody has written (kernels/decode_sm90.cuh, Parts). Here it
# is written, or initcheck would report each wait.
FLAGS = {"decode_sm90": "partial_stats"}
# Families that take few queries alone, and how many their jobs have
FEW_QUERIES = {"decode_sm90": 5}


@dataclass(frozen=True)
class Job:
    """One call of one family, whose kernels take the row at this index among those that would do, or the last."""

    trial: Trial
    family: str
    grads: tuple[str, ...] = ()  # of a backward family: those that are wanted
    row: int | None = None  # None: the rows that a call takes

    def run(self) -> None:
        backend, family = registry.find(BACKEND), families.find(self.family)
        with choosing(family, self.row), flags_written(family.name):
            if family.op == "forward" or not self.grads:
                warm(self.trial, backend, "cuda")
                return
            # These gradients alone: other families are reached by their own jobs
            inputs = self.trial.make("cuda")
            args = inputs.args._replace(needs_grad=True, needs_bias_grad="dbias" in self.grads)
            out, lse = map(torch.zeros_like, ops.empty_outputs(args))
            needs = [name in self.grads for name in GRAD_NAMES]
            with torch.no_grad():
                ops.backward(inputs.dout, inputs.dlse, *args._replace(backend=BACKEND), out, lse, needs)


@contextmanager
def choosing(family: Family[Any], row: int | None) -> Iterator[None]:
    """Calls take the family, and the row at this index for each of its kernels. Some families refuse deterministic
    calls."""
    rows = {} if row is None else dict.fromkeys(family.kernels, row)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    assemble.clear_plans()
    torch.use_deterministic_algorithms(False)
    try:
        with families.forced(family.name), families.forced_rows(rows):
            yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic)
        assemble.clear_plans()


@contextmanager
def flags_written(family: str) -> Iterator[None]:
    """Inside, the workspace with the family's flags is zeros."""
    if family not in FLAGS:
        yield
        return
    lay_out = executor.lay_out_workspaces

    def with_zeros(plan: LaunchPlan, values: dict[str, int]) -> executor.WorkspaceLayout:
        found = lay_out(plan, values)
        if (start := found.offsets.get(FLAGS[family])) is None:
            return found
        (part,) = (part for part in plan.workspaces if part.name == FLAGS[family])
        size = part.element_bytes * math.prod(values[name] for name in part.values)
        return found._replace(zeroed=(*found.zeroed, slice(start, start + size)))

    executor.lay_out_workspaces = with_zeros
    try:
        yield
    finally:
        executor.lay_out_workspaces = lay_out


def trial(dtype: str, head_dim: int, head_dim_v: int, tile: int, has_backward: bool, **options: Any) -> Trial:
    """A tile of queries and a tail, two tiles of keys and a tail, heads that share keys."""
    sizes = {"seqlen_q": tile + 3, "seqlen_k": 2 * tile + 6, "head_dim": head_dim, "head_dim_v": head_dim_v}
    given = {"dtype": getattr(torch, dtype), "batch": 1, "heads": 2, "heads_kv": 1, **sizes, **options}
    return Trial(Case(**given), 1, has_backward)


def all_jobs(
    arch: Arch, dtypes: Sequence[str], head_dims: Sequence[int], names: Sequence[str] | None = None
) -> list[Job]:
    """Calls that launch every row of every family that the architecture can run, then every option once. `names`: of
    these families alone."""
    jobs: list[Job] = []
    for family in families.all_families():
        if not family.runs_on(arch) or (names is not None and family.name not in names):
            continue
        for dtype, dims in itertools.product(family.dtypes, family.head_dims):
            if dtype in dtypes and max(dims) in head_dims:
                jobs += row_jobs(family, dtype, dims, arch)
        if own := [dtype for dtype in family.dtypes if dtype in dtypes]:
            jobs += special_jobs(family, "float32" if "float32" in own else own[-1], arch)
    return jobs


def row_jobs(family: Family[Any], dtype: str, dims: tuple[int, int], arch: Arch) -> Iterator[Job]:
    for grads in family.grad_sets or ((),):
        options: dict[str, Any] = {"bias": "hqk"} if "dbias" in grads else {}
        options |= {"seqlen_q": FEW_QUERIES[family.name]} if family.name in FEW_QUERIES else {}
        options |= {"has_sinks": True} if "dsinks" in grads else {}
        key = key_of(dtype, dims, arch, grads)
        launched = {step.name.removesuffix("_kernel") for step in family.launch(key, CallLayout("bhsd", ())).steps}
        found = [family.rows(kernel, key) for kernel in family.kernels if kernel in launched]
        for index in range(max(map(len, found))):
            rows = [some[min(index, len(some) - 1)] for some in found]
            tile = max(max(row.block_m, row.block_n) for row in rows)
            yield Job(trial(dtype, *dims, tile, False, **options), family.name, grads, index)
            if family.op == "forward":  # a band has its own ways through the epilogue
                yield Job(trial(dtype, *dims, tile, False, causal="bottom_right", **options), family.name, grads, index)
    if family.op == "forward":  # few queries, whose heads may share a tile
        yield Job(trial(dtype, *dims, 128, False, seqlen_q=3), family.name)
        # Few keys, which one tile may hold
        yield Job(trial(dtype, *dims, 64, False, seqlen_q=FEW_QUERIES.get(family.name, 67), seqlen_k=203), family.name)


def key_of(dtype: str, dims: tuple[int, int], arch: Arch, grads: tuple[str, ...]) -> PlanKey:
    features = Features(bias_dtype=dtype if "dbias" in grads else None)
    return PlanKey(dtype, dtype, *dims, features, arch, grads or None)


# (what a case changes, the features that a family must take)
SPECIAL: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"kind": "varlen", "dropout_p": 0.2, "mask": "bhqk"}, ("has_lengths", "has_dropout", "has_bool_mask")),
    ({"kind": "padded", "softcap": 5.0, "alibi": "bh"}, ("has_lengths", "has_softcap", "has_alibi")),
    # A family without lengths takes a bias alone, and few keys
    ({"bias": "hqk", "has_sinks": True, "causal": "bottom_right"}, ("bias_dtype", "has_lengths")),
    ({"bias": "hqk", "seqlen_k": 190}, ("bias_dtype",)),
    ({"has_sinks": True, "causal": "top_left"}, ()),
    ({"memory": "offset", "head_dim": 37, "num_splits": 2}, ("is_aligned16",)),
    ({"kind": "cache", "num_splits": 3, "page_size": 7}, ("is_paged",)),
    ({"kind": "paged", "window": (20, 3)}, ("is_paged",)),
)
FORWARD_SPECIAL: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    # Long enough for splits of the largest tiles; the second has heads that share a tile
    ({"causal": "bottom_right", "num_splits": 2, "seqlen_k": 1100}, ("has_lengths",)),
    ({"kind": "used", "num_splits": 2, "seqlen_q": 3, "seqlen_k": 2000}, ("has_lengths",)),
    (
        {"mask": "qk", "softcap": 5.0, "alibi": "bh", "is_out_float32": True},
        ("has_bool_mask", "has_softcap", "has_alibi"),
    ),
)
# More than four work items for each block of a persistent grid: their slots are used again
CROWDS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"causal": "bottom_right", "batch": 10, "heads": 60, "heads_kv": 60, "seqlen_q": 180, "seqlen_k": 140}, ()),
    ({"batch": 10, "heads": 60, "heads_kv": 60, "seqlen_q": 180, "seqlen_k": 140}, ()),
    (
        {
            "kind": "varlen",
            "causal": "bottom_right",
            "batch": 20,
            "heads": 60,
            "heads_kv": 60,
            "seqlen_q": 40,
            "seqlen_k": 9,
        },
        ("has_lengths",),
    ),
)


def special_jobs(family: Family[Any], dtype: str, arch: Arch) -> Iterator[Job]:
    """Lengths, pages, splits, narrow loads, masks and dropout, on the rows that a call would take."""
    rows = [row for row in family.every_row(dtype) if row.unfit(arch) is None]
    num_queries = FEW_QUERIES.get(family.name, max(row.block_m for row in rows) + 8)
    sizes = {"seqlen_q": num_queries, "seqlen_k": 2 * max(row.block_n for row in rows) + 44}
    plain = Case(batch=2, heads=2, heads_kv=1, head_dim=40, head_dim_v=24, dtype=getattr(torch, dtype), **sizes)
    is_forward = family.op == "forward"
    changes = list(SPECIAL)
    if is_forward:
        changes += FORWARD_SPECIAL
        if family.launch(key_of(dtype, family.head_dims[0], arch, ()), CallLayout("bhsd", ())).steps[0].max_blocks:
            changes += CROWDS
    for change in [change for change, features in changes if set(features) <= family.features]:
        yield Job(Trial(dataclasses.replace(plain, **change), 2, not is_forward), family.name)


def run_jobs(jobs: Sequence[Job], seconds: float = math.inf) -> frozenset[str]:
    """Makes the calls, none of them later than that; returns the kernels that were launched. After a call that fails
    the process cannot use the GPU any more: says where the next family begins."""
    torch.set_num_threads(1)
    end = time.monotonic() + seconds
    for index, job in enumerate(jobs):
        if time.monotonic() > end:
            break
        try:
            job.run()
            torch.cuda.synchronize()
        except RuntimeError:
            others = [later for later in range(index, len(jobs)) if jobs[later].family != job.family]
            print(f"failed {job.family}; next is {others[0] if others else len(jobs)}", flush=True)
            raise
        print(f"watched {job.family}", flush=True)
    return registry.find(BACKEND).loaded_kernels()


def compile_jobs(jobs: Sequence[Job], arch: Arch) -> frozenset[str]:
    """Compiles what the calls would launch, in as many threads as there are cores; returns the kernels."""
    with native.record_launches() as units:
        for job in jobs:
            job.run()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda unit: executor.function(*unit, arch.name), units))
    return registry.find(BACKEND).loaded_kernels()


def faults(tool: str, arch: Arch, names: Sequence[str] | None = None) -> list[str]:
    """What is planted for a tool: a fault in the kernels of every GPU, and one in those of a family where it runs.
    `names`: the first, and those of these families."""
    tools = {"missing_barrier": "racecheck"}
    reachable = [
        mutation
        for mutation in mutations()
        if families.is_reachable(mutation, arch) and (names is None or mutation.family in (None, *names))
    ]
    return [mutation.name for mutation in reachable if tools.get(mutation.name, mutation.tool) == tool]


def run_fault(name: str) -> None:
    (mutation,) = (mutation for mutation in mutations() if mutation.name == name)
    dtype = "float32" if mutation.family is None else families.find(mutation.family).dtypes[-1]
    has_backward = mutation.family is None or families.find(mutation.family).op == "backward"
    with mutants.broken(name):
        warm(trial(dtype, 64, 64, 64, has_backward), registry.find(BACKEND), "cuda")
        torch.cuda.synchronize()


def watch(
    program: str, tool: str, arguments: Sequence[str], limit_s: float, folder: Path | None = None
) -> dict[str, Any]:
    """This script under one tool: how many errors it reports, its first words about them and the kernels in them, the
    kernels it saw launched, and how many calls of each family. A process that is killed has the calls it made. What is
    not clean is kept in the folder."""
    names = [] if tool in UNFILTERED else ["--kernel-name", "kns=flashtile"]
    command = [
        program,
        "--tool",
        tool,
        *names,
        *(["--num-cuda-barriers", str(NUM_MBARRIERS)] if tool in ("racecheck", "synccheck") else []),
        "--report-api-errors",
        "no",
        "--print-limit",
        "30",
        sys.executable,
        __file__,
        *arguments,
    ]
    start = time.monotonic()
    # A group of their own: the tool's end is not that of the process it watches
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = running.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        output, _ = running.communicate()
        output += f"not done in {limit_s:g} s"
    found = TOOLS[tool].search(output)
    if folder is not None and not (found and int(found[1]) == 0):
        name = "_".join([tool, *arguments[:4]]).replace("/", "_").replace("--", "")
        (folder / f"{name}.log").write_text(output)
    lines = [line.strip("= ") for line in output.splitlines() if line.startswith("=========")]
    said = [line for line in lines if line not in ("", "COMPUTE-SANITIZER")]
    return {
        "errors": int(found[1]) if found else None,
        "kernels": re.findall(r"^launched (.*)$", output, re.MULTILINE),
        "calls": dict(Counter(re.findall(r"^watched (.*)$", output, re.MULTILINE))),
        "next": int(failed[1]) if (failed := re.search(r"^failed \w+; next is (\d+)$", output, re.MULTILINE)) else None,
        "in": sorted({name for line in lines for name in re.findall(r"flashtile::(\w+)_kernel", line)}),
        "seconds": round(time.monotonic() - start, 1),
        "said": "; ".join(said[:3])[:400] if found and int(found[1]) else ("" if found else output[-2000:]),
    }


def watch_share(
    program: str, tool: str, share: str, arguments: Sequence[str], limit_s: float, folder: Path
) -> dict[str, Any]:
    """One share of the rows. Where a call fails, a new process goes on with the next family."""
    runs, first, end = list[dict[str, Any]](), 0, time.monotonic() + limit_s
    while first is not None and (limit := end - time.monotonic()) > 0:
        begin = ["--share", share, "--first", str(first)]
        runs.append(watch(program, tool, [*begin, *arguments], limit, folder))
        first = None if runs[-1]["next"] is None else first + runs[-1]["next"]
    return joined(runs)


def num_shares(tools: Sequence[str]) -> dict[str, int]:
    """How many processes each tool gets: as many as there are cores, at least one each."""
    part = (os.cpu_count() or 1) / sum(WEIGHTS[tool] for tool in tools)
    return {tool: max(1, int(part * WEIGHTS[tool])) for tool in tools}


def joined(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Processes under one tool as one: no errors only where each was seen to end without."""
    errors = [run["errors"] for run in runs]
    return {
        "errors": None if None in errors else sum(errors),
        "kernels": sorted({kernel for run in runs for kernel in run["kernels"]}),
        "calls": dict(sum((Counter(run["calls"]) for run in runs), Counter())),
        "in": sorted({kernel for run in runs for kernel in run["in"]}),
        "seconds": max(run["seconds"] for run in runs),
        "said": "; ".join(filter(None, (run["said"] for run in runs))),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Every kernel under compute-sanitizer.")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"some of {', '.join(TOOLS)}")
    parser.add_argument("--families", help="some families; default: all")
    parser.add_argument("--head-dims", default=",".join(map(str, head_dims())))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--out", type=Path, help="folder to write sanitize.json into; default: results/<device>")
    parser.add_argument("--seconds", type=float, default=math.inf, help="when processes stop making calls")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that one process under a tool may take")
    parser.add_argument("--share", help="launch one share of the rows, watched or not: 2/4 is the second of four")
    parser.add_argument("--first", type=int, default=0, help="the first row of the share to launch")
    parser.add_argument("--fault", help="launch kernels with this fault, watched or not")
    options = parser.parse_args(arguments)
    tools, dtypes = options.tools.split(","), options.dtypes.split(",")
    dims = [int(text) for text in options.head_dims.split(",")]
    if not torch.cuda.is_available():
        print("sanitize: got no GPU; accepted: a machine with one", file=sys.stderr)
        return 2
    arch = arch_here(*torch.cuda.get_device_capability())
    assert arch is not None
    names = options.families.split(",") if options.families else None
    jobs = all_jobs(arch, dtypes, dims, names)
    if options.share:
        which, of = map(int, options.share.split("/"))
        launched = run_jobs(jobs[which - 1 :: of][options.first :], options.seconds)
        print("\n".join(f"launched {kernel}" for kernel in sorted(launched)), flush=True)
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
        print(
            "compute-sanitizer: not found. It comes with the CUDA toolkit; put its bin folder on PATH.", file=sys.stderr
        )
        return 2

    folder = options.out or Path("results") / facts.slug("cuda")
    with tempfile.TemporaryDirectory() as folder_of_kernels:
        if KernelCache.default().directory is None:
            os.environ.update(FLASHTILE_CACHE_DIR=folder_of_kernels, FLASHTILE_CACHE="1")
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        start = time.monotonic()
        kernels = compile_jobs(jobs, arch)
        print(f"{len(kernels)} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)
        # Side by side: most of the time goes into patching kernels, on the host
        chosen = ["--dtypes", options.dtypes, "--head-dims", options.head_dims, "--seconds", str(options.seconds)]
        chosen += ["--families", options.families] if options.families else []
        shares, logs = num_shares(tools), folder / "sanitize"
        logs.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(sum(shares.values()) + len(tools)) as pool:
            fault_runs = {
                tool: {
                    name: pool.submit(watch, program, tool, ["--fault", name], options.limit)
                    for name in faults(tool, arch, names)
                }
                for tool in tools
            }
            clean_runs = {
                tool: [
                    pool.submit(watch_share, program, tool, f"{which + 1}/{of}", chosen, options.limit, logs)
                    for which in range(of)
                ]
                for tool, of in shares.items()
            }
    calls = Counter(job.family for job in jobs)
    report: dict[str, Any] = {"kernels": len(kernels), "calls": dict(calls), "tools": {}}
    is_good = True
    for tool in tools:
        clean = joined([run.result() for run in clean_runs[tool]])
        planted = {name: run.result() for name, run in fault_runs[tool].items()}
        is_clean = clean["errors"] == 0 and clean["calls"] == calls and set(clean["kernels"]) == kernels
        is_good = is_good and is_clean and all(run["errors"] for run in planted.values())
        for run in (clean, *planted.values()):
            run["kernels"] = len(run["kernels"])
        report["tools"][tool] = {"clean": clean, "planted": planted}
        words = ["clean" if is_clean else f"NOT CLEAN: {clean}"]
        words += [f"{name} {'seen' if run['errors'] else f'NOT SEEN: {run}'}" for name, run in planted.items()]
        print(f"{tool:10} {', '.join(words)} ({clean['seconds']} s)", flush=True)
    for family, count in calls.items():
        watched = [f"{tool} {report['tools'][tool]['clean']['calls'].get(family, 0)}" for tool in tools]
        print(f"{family:20} {count} calls: {', '.join(watched)}")
    given = sys.argv[1:] if arguments is None else arguments
    environment = dataclasses.asdict(
        facts.environment("cuda", given, "python tools/sanitize.py" if given else "make sanitize")
    )
    (folder / "sanitize.json").write_text(json.dumps(report | {"environment": environment}, indent=1) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
