"""Every row of every kernel family under compute-sanitizer: memcheck, racecheck, initcheck, synccheck. Needs a GPU.

Each tool must be silent about our kernels, and must speak about the faults planted for it (core/mutation.cuh): a tool
that cannot see the kernels would be silent too. Problems are as small as a tile allows. Kernels are compiled before any
tool watches; then the tools run side by side, each in several processes.

With --seconds the command ends by then, and SIGINT or SIGTERM end it at once. However it ends, it prints a summary and
writes sanitize.json: for each tool and family the calls watched and the reports. A later run of the same commit and
calls with other --tools adds to that file.

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
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashtile import families, ops
from flashtile.backends import executor, native, registry
from flashtile.backends.base import GradNeeds, device_arch
from flashtile.cli.kernel_jobs import head_dims
from flashtile.families import Family, assemble
from flashtile.lab.bench import device as facts
from flashtile.lab.check import mutants
from flashtile.lab.check.judge import warm
from flashtile.lab.check.trial import Trial
from flashtile.plans.arch import Arch
from flashtile.plans.mutation import Mutation, mutations
from flashtile.plans.plan import LaunchPlan
from flashtile.plans.spec import DTYPES, CallLayout, Features, PlanKey
from flashtile.runtime import cache
from flashtile.runtime.nvrtc import Compiled
from flashtile.testing import Case

# What a tool's last line looks like
TOOLS = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
    "initcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "synccheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
}
# The first line of a report. Its other lines are indented; the tool's remaining lines are these.
REPORT = re.compile(r"^========= (?!COMPUTE-SANITIZER|(?:ERROR|RACECHECK) SUMMARY|Target application)\S")
# The part of the processes that a tool gets: racecheck is the slowest
WEIGHTS = {"memcheck": 1, "racecheck": 3, "initcheck": 1, "synccheck": 1}
# initcheck must see what other kernels write, or all that they wrote would count as never written
UNFILTERED = ("initcheck",)
BACKEND = "cuda"
LIMIT_S = 600.0
CALLS_END_S = 6.0  # before the end of --seconds no call starts: the last one and its tool must come to their end
KILL_S = 2.5  # before the end of --seconds what still runs is killed
GRAD_NAMES = GradNeeds._fields


# How kernels that a tool misreads are compiled for it; families say which these are (Family.misread_by, docs/check.md)
DEFINES = {
    # Warps that meet at a barrier from several places count as divergent (ptx/block_barrier.cuh)
    "synccheck": "FT_ONE_BARRIER",
    # A copy of 2 out of 4 bytes counts as a read of 4 (ptx/cp_async.cuh)
    "memcheck": "FT_EXACT_COPIES",
    # An arrival orders the accesses of its own thread alone (ptx/mbarrier.cuh)
    "racecheck": "FT_LANE_ARRIVALS",
}
# Of a block: racecheck and synccheck count for themselves, and miss barriers that are initialised in loops
NUM_MBARRIERS = 64


@dataclass(frozen=True)
class Job:
    """One call of one family, whose kernels take the row at this index among those that would do, or the last."""

    trial: Trial
    family: str
    grads: tuple[str, ...] = ()  # of a backward family: those that are wanted
    row: int | None = None  # None: the rows that a call takes

    def run(self) -> None:
        backend, family = registry.find(BACKEND), families.find(self.family)
        with choosing(family, self.row), flags_written(family):
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
def choosing(family: Family, row: int | None) -> Iterator[None]:
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
def flags_written(family: Family) -> Iterator[None]:
    """Inside, the workspace with flags that the family's blocks wait for is zeros, which the Python executor writes:
    initcheck would report each wait."""
    if not family.flags_workspace:
        yield
        return
    lay_out = executor.lay_out_workspaces

    def with_zeros(plan: LaunchPlan, values: dict[str, int]) -> executor.WorkspaceLayout:
        found = lay_out(plan, values)
        if (start := found.offsets.get(family.flags_workspace)) is None:
            return found
        (part,) = (part for part in plan.workspaces if part.name == family.flags_workspace)
        size = part.element_bytes * math.prod(values[name] for name in part.values)
        return found._replace(zeroed=(*found.zeroed, slice(start, start + size)))

    executor.lay_out_workspaces = with_zeros
    try:
        with native.python_only():
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


def row_jobs(family: Family, dtype: str, dims: tuple[int, int], arch: Arch) -> Iterator[Job]:
    for grads in family.grad_sets or ((),):
        options: dict[str, Any] = {"bias": "hqk"} if "dbias" in grads else {}
        options |= {"seqlen_q": family.few_queries} if family.few_queries is not None else {}
        options |= {"has_sinks": True} if "dsinks" in grads else {}
        key = key_of(dtype, dims, arch, grads)
        launched = {step.name.removesuffix("_kernel") for step in family.launch(key, CallLayout("bhsd", ())).steps}
        found = [family.rows(kernel, key) for kernel in family.kernels if kernel in launched]
        for index in range(max(map(len, found))):
            rows = [some[min(index, len(some) - 1)] for some in found]
            tile = max(max(row.owned, row.streamed) for row in rows)
            yield Job(trial(dtype, *dims, tile, False, **options), family.name, grads, index)
            if family.op == "forward":  # a band has its own ways through the epilogue
                yield Job(trial(dtype, *dims, tile, False, causal="bottom_right", **options), family.name, grads, index)
    if family.op == "forward":  # few queries, whose heads may share a tile
        yield Job(trial(dtype, *dims, 128, False, seqlen_q=3), family.name)
        # Few keys, which one tile may hold
        yield Job(trial(dtype, *dims, 64, False, seqlen_q=family.few_queries or 67, seqlen_k=203), family.name)


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


def special_jobs(family: Family, dtype: str, arch: Arch) -> Iterator[Job]:
    """Lengths, pages, splits, narrow loads, masks and dropout, on the rows that a call would take."""
    rows = [row for row in family.every_row(dtype) if row.unfit(arch) is None]
    num_queries = family.few_queries or max(row.num_queries for row in rows) + 8
    sizes = {"seqlen_q": num_queries, "seqlen_k": 2 * max(row.num_keys for row in rows) + 44}
    plain = Case(batch=2, heads=2, heads_kv=1, head_dim=40, head_dim_v=24, dtype=getattr(torch, dtype), **sizes)
    is_forward = family.op == "forward"
    changes = list(SPECIAL)
    if is_forward:
        changes += FORWARD_SPECIAL
        if family.launch(key_of(dtype, family.head_dims[0], arch, ()), CallLayout("bhsd", ())).steps[0].max_blocks:
            changes += CROWDS
    for change in [change for change, features in changes if set(features) <= family.features]:
        yield Job(Trial(dataclasses.replace(plain, **change), 2, not is_forward), family.name)


def defines_for(tool: str, entry: str) -> list[str]:
    """Returns what the kernel of this name is compiled with for a tool."""
    misread = (family.misread_by.get(tool) for family in families.all_families())
    return [DEFINES[tool]] if any(pattern and re.search(pattern, entry) for pattern in misread) else []


@contextmanager
def built_for(tool: str) -> Iterator[None]:
    """Kernels that are compiled or loaded inside are those for this tool."""
    compile_cached = cache.compile_cached

    def compile_for_tool(source: str, arch: str, names: Sequence[str], defines: Sequence[str] = ()) -> Compiled:
        return compile_cached(source, arch, names, [*defines, *defines_for(tool, names[0])])

    cache.compile_cached = compile_for_tool
    try:
        yield
    finally:
        cache.compile_cached = compile_cached


def run_jobs(jobs: Sequence[Job], until: float = math.inf) -> frozenset[str]:
    """Makes the calls, none of them after that time of day; returns the kernels that were launched. After a call that
    fails the process cannot use the GPU any more: says where the next family begins."""
    torch.set_num_threads(1)
    for index, job in enumerate(jobs):
        if time.time() > until:
            break
        print(f"calling {job.family}", flush=True)
        try:
            job.run()
            torch.cuda.synchronize()
        except RuntimeError:
            others = [later for later in range(index, len(jobs)) if jobs[later].family != job.family]
            print(f"failed {job.family}; next is {others[0] if others else len(jobs)}", flush=True)
            raise
        print(f"watched {job.family}", flush=True)
    return registry.find(BACKEND).loaded_kernels()


class Run:
    """One run of this script: when it must end, and what it then has to kill."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.end = time.monotonic() + seconds
        self.ended_by = ""
        self._processes: set[subprocess.Popen[str]] = set()
        self._guard = threading.Lock()

    def remaining(self) -> float:
        """Seconds until everything is killed."""
        return 0.0 if self.ended_by else self.end - KILL_S - time.monotonic()

    def stop(self, reason: str) -> None:
        """Kills every process. None is started later."""
        with self._guard:
            self.ended_by = self.ended_by or reason
            for process in self._processes:
                _kill(process)

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Inside, SIGINT and SIGTERM stop the run instead of the interpreter."""
        numbers = signal.SIGINT, signal.SIGTERM
        before = [signal.signal(number, lambda caught, _: self.stop(signal.Signals(caught).name)) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def output(self, command: Sequence[str], limit_s: float) -> str:
        """Returns what a process prints until its end, its limit or that of the run."""
        limit_s = min(limit_s, self.remaining())
        with self._guard:
            if self.ended_by or limit_s <= 0:
                return "not started"
            # A group of their own: the tool's end is not that of the process it watches
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
            self._processes.add(process)
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            output, _ = process.communicate()
            output += f"not done in {limit_s:g} s"
        with self._guard:
            self._processes.discard(process)
        return output + (f"\nended by {self.ended_by}" if self.ended_by else "")


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):  # it has come to its end
        os.killpg(process.pid, signal.SIGKILL)


def units_of(jobs: Sequence[Job]) -> list[tuple[str, str]]:
    """(text, C++ name) of each kernel that the calls would launch."""
    with native.record_launches() as units:
        for job in jobs:
            job.run()
    return list(units)


def fault_units(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the units of the kernels with these faults."""
    with native.record_launches() as units:
        for name in names:
            run_fault(name)
    return list(units)


def compile_units(units: dict[str, list[tuple[str, str]]], arch: Arch, run: Run) -> bool:
    """Compiles those of each tool as the tool needs them, in as many threads as there are cores; False if the time ends
    first."""
    wanted = dict.fromkeys(
        (unit, entry, *defines_for(tool, entry)) for tool, own in units.items() for unit, entry in own
    )

    def compile_one(unit: str, entry: str, *own: str) -> None:
        if run.remaining() > 0:
            cache.compile_cached(unit, arch.name, [entry], own)

    pool = ThreadPoolExecutor(os.cpu_count())
    compiling = [pool.submit(compile_one, *one) for one in wanted]
    unfinished = compiling
    while unfinished and run.remaining() > 0:  # in short steps: a signal must end it
        unfinished = list(wait(unfinished, min(0.2, run.remaining())).not_done)
    pool.shutdown(wait=False, cancel_futures=True)
    for done in set(compiling) - set(unfinished):
        done.result()
    return not unfinished


def faults(tool: str, arch: Arch, names: Sequence[str] | None = None) -> list[str]:
    """Returns what is planted for a tool: a fault in the kernels of every GPU, and one in those of a family where it
    runs. `names`: the first, and those of these families."""
    tools = {"missing_barrier": "racecheck"}
    reachable = [
        mutation
        for mutation in mutations()
        if families.is_reachable(mutation, arch) and (names is None or _family_name(mutation) in (None, *names))
    ]
    return [mutation.name for mutation in reachable if tools.get(mutation.name, mutation.tool) == tool]


def _family_name(mutation: Mutation) -> str | None:
    family = families.fault_family(mutation)
    return None if family is None else family.name


def run_fault(name: str) -> None:
    (mutation,) = (mutation for mutation in mutations() if mutation.name == name)
    family = families.fault_family(mutation)
    dtype = "float32" if family is None else family.dtypes[-1]
    has_backward = family is None or family.op == "backward"
    with mutants.broken(name):
        warm(trial(dtype, 64, 64, 64, has_backward), registry.find(BACKEND), "cuda")
        torch.cuda.synchronize()


def watch(
    program: str,
    tool: str,
    arguments: Sequence[str],
    limit_s: float,
    folder: Path | None = None,
    run: Run | None = None,
) -> dict[str, Any]:
    """This script under one tool; see `read` for what is returned. What is not clean is kept in the folder."""
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
        "--tools",
        tool,
        *arguments,
    ]
    start = time.monotonic()
    output = (run or Run()).output(command, limit_s)
    found = read(tool, output)
    if folder is not None and found["errors"] != 0:
        name = "_".join([tool, *arguments[:4]]).replace("/", "_").replace("--", "")
        (folder / f"{name}.log").write_text(output)
    return found | {"seconds": round(time.monotonic() - start, 1)}


def read(tool: str, output: str) -> dict[str, Any]:
    """Returns how many errors a tool counts in the end (None: it was killed before), its first words about them and the
    kernels in them, the reports it printed and the calls it has watched by family, and the kernels that were launched.
    """
    found = TOOLS[tool].search(output)
    lines = [line.strip("= ") for line in output.splitlines() if line.startswith("=========")]
    said = [line for line in lines if line not in ("", "COMPUTE-SANITIZER")]
    reports, family = Counter[str](), "none"
    for line in output.splitlines():
        if line.startswith("calling "):
            family = line.removeprefix("calling ")
        elif REPORT.match(line):
            reports[family] += 1
    return {
        "errors": int(found[1]) if found else None,
        "kernels": re.findall(r"^launched (.*)$", output, re.MULTILINE),
        "calls": dict(Counter(re.findall(r"^watched (.*)$", output, re.MULTILINE))),
        "reports": dict(reports),
        "next": int(failed[1]) if (failed := re.search(r"^failed \w+; next is (\d+)$", output, re.MULTILINE)) else None,
        "in": sorted({name for line in lines for name in re.findall(r"flashtile::(\w+)_kernel", line)}),
        "said": "; ".join(said[:3])[:400] if found and int(found[1]) else ("" if found else output[-2000:]),
    }


def watch_share(
    program: str, tool: str, share: str, arguments: Sequence[str], limit_s: float, folder: Path, run: Run | None = None
) -> dict[str, Any]:
    """One share of the rows. Where a call fails, a new process goes on with the next family."""
    run = run or Run()
    runs, end = list[dict[str, Any]](), time.monotonic() + limit_s
    first: int | None = 0
    while first is not None and (limit := end - time.monotonic()) > 0:
        begin = ["--share", share, "--first", str(first)]
        runs.append(watch(program, tool, [*begin, *arguments], limit, folder, run))
        first = None if runs[-1]["next"] is None else first + runs[-1]["next"]
    return joined(runs)


def num_shares(tools: Sequence[str]) -> dict[str, int]:
    """Returns how many processes each tool gets: as many as there are cores, at least one each."""
    part = (os.cpu_count() or 1) / sum(WEIGHTS[tool] for tool in tools)
    return {tool: max(1, int(part * WEIGHTS[tool])) for tool in tools}


def joined(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Processes under one tool as one: no errors only where each was seen to end without."""
    errors = [run["errors"] for run in runs]
    return {
        "errors": None if None in errors else sum(errors),
        "kernels": sorted({kernel for run in runs for kernel in run["kernels"]}),
        "calls": dict(sum((Counter(run["calls"]) for run in runs), Counter())),
        "reports": dict(sum((Counter(run["reports"]) for run in runs), Counter())),
        "in": sorted({kernel for run in runs for kernel in run["in"]}),
        "seconds": max(run["seconds"] for run in runs),
        "said": "; ".join(filter(None, (run["said"] for run in runs))),
    }


@dataclass
class Summary:
    """Record of what one run has seen so far: enough to print at any time."""

    calls: dict[str, int]  # of each family, that a tool has to watch
    kernels: int
    tools: dict[str, dict[str, Any]]
    complaints: list[str]  # why the run as a whole counts for nothing

    def add(self, tool: str, clean: dict[str, Any], planted: dict[str, dict[str, Any]], kernels: set[str]) -> None:
        is_clean = clean["errors"] == 0 and clean["calls"] == self.calls and set(clean["kernels"]) == kernels
        for one in (clean, *planted.values()):
            one["kernels"] = len(one["kernels"])
        self.tools[tool] = {"clean": clean, "planted": planted, "is_clean": is_clean}

    def is_good(self) -> bool:
        runs = self.tools.values()
        is_seen = all(one["errors"] for run in runs for one in run["planted"].values())
        return not self.complaints and is_seen and all(run["is_clean"] for run in runs)

    def lines(self) -> Iterator[str]:
        """One line for each tool, one for each family, and the verdict."""
        for tool, run in self.tools.items():
            words = ["clean" if run["is_clean"] else f"NOT CLEAN: {run['clean']}"]
            words += [
                f"{name} {'seen' if one['errors'] else f'NOT SEEN: {one}'}" for name, one in run["planted"].items()
            ]
            yield f"{tool:10} {', '.join(words)} ({run['clean']['seconds']} s)"
        for family, count in self.calls.items():
            yield f"{family:20} {count} calls: {', '.join(self._watched(tool, family) for tool in self.tools)}"
        problems = self.complaints + [
            f"{tool}: {self._watched(tool, family)} in {family}"
            for tool, run in self.tools.items()
            for family, count in self.calls.items()
            if run["clean"]["reports"].get(family) or run["clean"]["calls"].get(family, 0) != count
        ]
        yield "sanitize: clean" if self.is_good() else f"sanitize: NOT CLEAN: {'; '.join(problems) or 'see above'}"

    def _watched(self, tool: str, family: str) -> str:
        clean = self.tools[tool]["clean"]
        return f"{tool} {clean['calls'].get(family, 0)} watched, {clean['reports'].get(family, 0)} reports"

    def write(self, path: Path, environment: dict[str, Any]) -> None:
        """Other tools of a run of the same commit and calls stay in the file."""
        tools = dict[str, Any]()
        with suppress(OSError, ValueError):
            before = json.loads(path.read_text())
            is_same = before["environment"]["commit"] == environment["commit"] and before["calls"] == self.calls
            tools = before["tools"] if is_same else {}
        report = {"kernels": self.kernels, "calls": self.calls, "tools": tools | self.tools}
        report |= {"complaints": self.complaints, "environment": environment}
        path.write_text(json.dumps(report, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Every kernel under compute-sanitizer.")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"some of {', '.join(TOOLS)}")
    parser.add_argument("--families", help="some families; default: all")
    parser.add_argument("--head-dims", default=",".join(map(str, head_dims())))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--out", type=Path, help="folder to write sanitize.json into; default: results/<device>")
    parser.add_argument("--seconds", type=float, default=math.inf, help="when the command ends, with its summary")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that one process under a tool may take")
    parser.add_argument("--share", help="launch one share of the rows, watched or not: 2/4 is the second of four")
    parser.add_argument("--first", type=int, default=0, help="the first row of the share to launch")
    parser.add_argument("--until", type=float, default=math.inf, help="of a share: no call after this time of day")
    parser.add_argument("--fault", help="launch kernels with this fault, watched or not")
    options = parser.parse_args(arguments)
    run = Run(options.seconds)
    tools, dtypes = options.tools.split(","), options.dtypes.split(",")
    dims = [int(text) for text in options.head_dims.split(",")]
    if not torch.cuda.is_available():
        print("sanitize: got no GPU; accepted: a machine with one", file=sys.stderr)
        return 2
    if unknown := [tool for tool in tools if tool not in TOOLS]:
        print(f"--tools: got {unknown[0]}; accepted: {', '.join(TOOLS)}.", file=sys.stderr)
        return 2
    arch = device_arch()
    assert arch is not None
    names = options.families.split(",") if options.families else None
    jobs = all_jobs(arch, dtypes, dims, names)
    if options.share:
        which, of = map(int, options.share.split("/"))
        with built_for(tools[0]):
            launched = run_jobs(jobs[which - 1 :: of][options.first :], options.until)
        print("\n".join(f"launched {kernel}" for kernel in sorted(launched)), flush=True)
        return 0
    if options.fault:
        with built_for(tools[0]):
            run_fault(options.fault)
        return 0
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        print(
            "compute-sanitizer: not found. It comes with the CUDA toolkit; put its bin folder on PATH.", file=sys.stderr
        )
        return 2

    folder = options.out or Path("results") / facts.slug("cuda")
    chosen = ["--dtypes", options.dtypes, "--head-dims", options.head_dims]
    chosen += ["--families", options.families] if options.families else []
    if options.seconds < math.inf:
        chosen += ["--until", str(time.time() + options.seconds - CALLS_END_S)]
    with tempfile.TemporaryDirectory() as folder_of_kernels, run.stopped_by_signals():
        if cache.KernelCache.default().directory is None:
            os.environ.update(FLASHTILE_CACHE_DIR=folder_of_kernels, FLASHTILE_CACHE="1")
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        planted = {tool: faults(tool, arch, names) for tool in tools}
        summary = watch_all(program, jobs, planted, arch, chosen, options.limit, folder, run)
        for line in summary.lines():
            print(line, flush=True)
        given = sys.argv[1:] if arguments is None else arguments
        command = "python tools/sanitize.py" if given else "make sanitize"
        summary.write(folder / "sanitize.json", dataclasses.asdict(facts.environment("cuda", given, command)))
    return 0 if summary.is_good() else 1


def watch_all(
    program: str,
    jobs: Sequence[Job],
    planted: dict[str, list[str]],
    arch: Arch,
    chosen: Sequence[str],
    limit_s: float,
    folder: Path,
    run: Run,
) -> Summary:
    """Compiles, then watches the calls and the planted faults with each tool, side by side: most of the time goes into
    patching kernels, on the host."""
    start = time.monotonic()
    tools = list(planted)
    units = units_of(jobs)
    kernels = {entry for _, entry in units}
    summary = Summary(dict(Counter(job.family for job in jobs)), len(kernels), {}, [])
    if not compile_units({tool: [*units, *fault_units(planted[tool])] for tool in tools}, arch, run):
        summary.complaints.append(f"ended by {run.ended_by or '--seconds'} while kernels were compiled")
        return summary
    print(f"{len(kernels)} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)
    shares, logs = num_shares(tools), folder / "sanitize"
    logs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(sum(shares.values()) + sum(map(len, planted.values()))) as pool:
        clean_runs: dict[str, list[Future[dict[str, Any]]]] = {
            tool: [
                pool.submit(watch_share, program, tool, f"{which + 1}/{of}", chosen, limit_s, logs, run)
                for which in range(of)
            ]
            for tool, of in shares.items()
        }
        fault_runs = {
            tool: {
                name: pool.submit(watch, program, tool, ["--fault", name], limit_s, None, run) for name in planted[tool]
            }
            for tool in tools
        }
        # In short steps: where another thread receives a signal, its handler runs when this one wakes up
        runs = itertools.chain(*clean_runs.values(), *(of_tool.values() for of_tool in fault_runs.values()))
        unfinished = set(runs)
        while unfinished:
            unfinished = wait(unfinished, 0.2).not_done
        for tool in tools:
            clean = joined([one.result() for one in clean_runs[tool]])
            summary.add(tool, clean, {name: one.result() for name, one in fault_runs[tool].items()}, kernels)
    if run.ended_by:
        summary.complaints.append(f"ended by {run.ended_by}")
    return summary


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads that compile cannot be ended, and the interpreter would wait for them
