"""tools/sanitize.py without a GPU: it reaches every row of the table, reads what the tools say, and says what is
missing."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fake_gpu
import pytest
import torch
from ptx import ptx_of

from flashtile import families
from flashtile.backends import executor, native
from flashtile.cli.kernel_jobs import head_dims
from flashtile.lab.bench import device as facts
from flashtile.lab.check.trial import Trial
from flashtile.plans import mutation
from flashtile.plans.arch import ARCHS
from flashtile.plans.mutation import mutations
from flashtile.plans.spec import DTYPES, CallLayout, Features
from flashtile.runtime import cache, extension

TOOL = Path(__file__).resolve().parents[2] / "tools" / "sanitize.py"
ARCH = ARCHS[90]


@pytest.fixture
def sanitize(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: divmod(ARCH.number, 10))
    spec = importlib.util.spec_from_file_location("sanitize", TOOL)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sanitize", module)
    spec.loader.exec_module(module)
    return module


def test_every_row_is_chosen(sanitize) -> None:
    """Every family's whole table, as far as it fits, with a second tile of keys, and of queries where those are walked
    over."""
    chosen = set()
    for job in sanitize.all_jobs(ARCH, DTYPES, head_dims()):
        if job.row is None:
            continue
        family, case = families.find(job.family), job.trial.case
        dtype = str(case.dtype).removeprefix("torch.")
        key = sanitize.key_of(dtype, (case.head_dim, case.head_dim_v), ARCH, job.grads)
        with sanitize.choosing(family, job.row):
            for step in family.launch(key, CallLayout("bhsd", ())).steps:
                kernel = step.name.removesuffix("_kernel")
                if kernel in family.kernels:
                    row = family.select(kernel, key)
                    assert case.seqlen_q > row.num_queries or "dkdv" in kernel or family.few_queries
                    assert case.seqlen_k > 2 * row.num_keys
                    chosen.add(row.with_options(Features()))
    expected = {
        row
        for family in families.all_families()
        for dtype in family.dtypes
        for row in family.every_row(dtype)
        if row.with_options(Features(bias_dtype=dtype if "dbias" in row.kernel else None)).unfit(ARCH) is None
        and not row.knobs.get("packs", False)
        and not row.knobs.get("single", False)  # has no second tile of keys
        # Spills there, or is for calls that allow TF32 alone
        and not row.tile.is_refused(frozenset({f"sm_{ARCH.number}", "highest"}))
    }
    assert chosen == expected


def test_few_queries_are_launched_for_every_pair_of_head_dims(sanitize) -> None:
    """Heads that share a KV head then share a tile."""
    jobs = [job for job in sanitize.all_jobs(ARCH, ["bfloat16"], head_dims()) if job.trial.case.seqlen_q == 3]
    found = {(job.trial.case.head_dim, job.trial.case.head_dim_v) for job in jobs if job.family == "fwd_sm90"}
    assert found > set(families.find("fwd_sm90").head_dims)  # and those of the special calls


def test_no_job_of_a_family_for_few_queries_is_refused(sanitize) -> None:
    """One that its family refuses launches nothing. Crowds are an exception: some have more queries."""
    jobs = sanitize.all_jobs(ARCH, ["bfloat16"], [128], ["decode_sm90"])
    assert {job.family for job in jobs} == {"decode_sm90"}
    cases = [job.trial.case for job in jobs]
    assert {case.kind for case in cases} >= {"dense", "used", "cache", "paged", "padded", "varlen"}
    for case in cases:
        is_crowd = case.heads == 60
        assert is_crowd or case.seqlen_q * case.heads // case.heads_kv <= 64


@pytest.fixture
def recorder(sanitize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_gpu.Recorder]:
    make = Trial.make
    monkeypatch.setattr(Trial, "make", lambda trial, _: make(trial, "cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(executor, "loaded", set())
    yield fake_gpu.plug_in(fake_gpu.build(tmp_path), monkeypatch.setattr)
    fake_gpu.unplug()


def test_compiling_launches_nothing_and_teaches_nothing(sanitize, recorder: fake_gpu.Recorder) -> None:
    units = sanitize.units_of(sanitize.all_jobs(ARCH, ["float32"], [64])[:2])
    assert units
    assert sanitize.compile_units({"memcheck": units}, ARCH, sanitize.Run())
    assert not recorder.launches()
    assert extension.executor().num_plans() == 0


def test_compiling_ends_in_time(sanitize, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(cache, "compile_cached", lambda *_: is_over.wait(600))
    assert not sanitize.compile_units({"memcheck": [("", "a")]}, ARCH, sanitize.Run(sanitize.KILL_S + 0.3))
    is_over.set()


def test_kernels_are_built_for_the_tool_that_watches(sanitize, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(cache, "compile_cached", lambda unit, arch, names, defines: compiled.append((*names, *defines)))
    unaligned = "flashtile::fwd_sm80_kernel<X, flashtile::Load<false>>"
    causal = "flashtile::fwd_sm80_f32_kernel<X, flashtile::Mask<true, false>, flashtile::Load<true>>"
    names = ["flashtile::fwd_sm90_kernel<X>", unaligned, causal, "flashtile::fwd_simt_kernel<flashtile::Load<false>>"]
    expected = {tool: [(name,) for name in names] for tool in sanitize.TOOLS}
    expected["racecheck"][0] += ("FT_LANE_ARRIVALS",)
    expected["memcheck"][1] += ("FT_EXACT_COPIES",)
    expected["synccheck"][2] += ("FT_ONE_BARRIER",)
    for tool in sanitize.TOOLS:
        compiled.clear()
        with sanitize.built_for(tool):
            for name in names:
                cache.compile_cached("", "sm_90a", [name])
        assert compiled == expected[tool]
        compiled.clear()
        assert sanitize.compile_units({tool: [("", name) for name in names]}, ARCH, sanitize.Run())
        assert sorted(compiled) == sorted(expected[tool])


PIPELINE = """
#include "device/tile/pipeline.cuh"
namespace flashtile {
static_assert(kArrivalWeight == WEIGHT && kCopiesExactly == IS_EXACT);
__global__ void arrivals_kernel(const u16* from, i32 count) {
  __shared__ u64 barriers[4];
  __shared__ u32 to[32];
  for (i32 x = 0; x < 4; ++x) mbarrier_init(barriers[x], 1);
  __syncthreads();
  arrive_warp(barriers[0]);
  mbarrier_arrive(barriers[1]);
  mbarrier_arrive_expect(barriers[2], 4);
  cp_async<4>(shared_address(to + threadIdx.x), from, count);
  arrive_after_copies(shared_address(&barriers[3]));
}
}
"""


def test_builds_for_tools_compile_and_differ() -> None:
    def cubin(weight: int, is_exact: str, *defines: str) -> bytes:
        source = PIPELINE.replace("WEIGHT", str(weight)).replace("IS_EXACT", is_exact)
        compiled = cache.compile_cached(source, "sm_90a", ["flashtile::arrivals_kernel"], defines)
        assert not compiled.warnings
        return compiled.cubin

    cubins = {
        cubin(1, "false"),
        cubin(32, "false", "FT_LANE_ARRIVALS"),
        cubin(1, "true", "FT_EXACT_COPIES"),
    }
    assert len(cubins) == 3


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize(
    ("family", "barrier", "expected"),
    [
        ("decode_sm90", r"bar\.sync \t0;", (3, 1)),
        # Before and after a part is stored, and in the join
        ("decode_sm90", r"bar\.sync %r\d+, %r\d+;", (6, 3)),
        # That of a block without keys stays in both
        ("fwd_sm80", r"bar\.sync \t0;", (3, 2)),
        ("fwd_sm80_f32", r"bar\.sync \t0;", (3, 2)),
    ],
)
def test_all_warps_meet_in_one_place_for_synccheck(
    sanitize, family: str, barrier: str, expected: tuple[int, int]
) -> None:
    """Barriers of a causal kernel, without and with the define."""
    jobs = sanitize.all_jobs(ARCH, ["bfloat16", "float32"], [64], [family])
    (job, *_) = (job for job in jobs if job.trial.case.causal == "bottom_right")
    ((unit, entry), *_) = sanitize.units_of([job])
    found = [
        len(re.findall(barrier.encode(), ptx_of(text + unit, entry, "compute_90a")[0]))
        for text in ("", "#define FT_ONE_BARRIER\n")
    ]
    assert tuple(found) == expected


def test_what_is_compiled_is_what_the_shares_launch(sanitize, recorder: fake_gpu.Recorder) -> None:
    jobs, launched = sanitize.all_jobs(ARCH, DTYPES, head_dims()), set()
    compiled = {entry for _, entry in sanitize.units_of(jobs)}
    for which in range(4):
        executor.loaded.clear()
        fake_gpu.clear()
        launched |= sanitize.run_jobs(jobs[which::4])
    assert launched == compiled
    # Keys are split in both families, with and without lengths
    for dtype, lengths in itertools.product(("float", "flashtile::bf16_t"), ("true", "false")):
        assert f"flashtile::fwd_combine_kernel<{dtype}, flashtile::SeqInfo<{lengths}>>" in compiled


@pytest.mark.parametrize("family", families.all_families(), ids=lambda family: family.name)
def test_options_are_launched_for_each_family(sanitize, family) -> None:
    cases = [job.trial.case for job in sanitize.special_jobs(family, family.dtypes[0], ARCH)]
    options = {
        "bias": "bias_dtype",
        "mask": "has_bool_mask",
        "alibi": "has_alibi",
        "softcap": "has_softcap",
        "dropout_p": "has_dropout",
    }
    for name in ("has_sinks", *(name for name, feature in options.items() if feature in family.features)):
        assert any(getattr(case, name) for case in cases), name
    assert {case.kind for case in cases} >= ({"varlen", "padded"} if "has_lengths" in family.features else {"dense"})
    assert ("paged" in {case.kind for case in cases}) is ("is_paged" in family.features)
    assert family.op == "backward" or "has_lengths" not in family.features or any(case.num_splits for case in cases)


def test_families_that_do_not_run_there_have_no_jobs(sanitize) -> None:
    assert "fwd_sm90" not in {job.family for job in sanitize.all_jobs(ARCHS[80], ["bfloat16"], [64])}


def test_each_tool_has_a_fault_in_each_family(sanitize) -> None:
    known = {mutation.name: mutation.tool for mutation in mutations()}
    for tool in sanitize.TOOLS:
        simt, *others = sanitize.faults(tool, ARCH)
        assert known[simt] in (tool, None)
        # Threads that miss a barrier there would wait for each other for ever
        expected = [] if tool == "synccheck" else [(tool, "fwd_sm80"), (tool, "fwd_sm90")]
        assert [(known[name], name[: len("fwd_sm80")]) for name in others] == expected
        assert sanitize.faults(tool, ARCHS[75]) == sanitize.faults(tool, ARCHS[80]) == [simt, *others[:-1]]
        assert sanitize.faults(tool, ARCHS[61]) == [simt]


def test_what_is_launched_has_the_fault(sanitize, recorder: fake_gpu.Recorder) -> None:
    """Another family that takes the call would be clean."""
    for tool in sanitize.TOOLS:
        for name in sanitize.faults(tool, ARCH):
            with native.record_launches() as units:
                sanitize.run_fault(name)
            own = {unit.splitlines()[0] for unit, _ in units if mutation.is_broken(unit)}
            assert own == {f"#define FT_MUTATION {name}"}


def test_the_flags_of_a_decode_step_are_written(sanitize, recorder: fake_gpu.Recorder, monkeypatch) -> None:
    layouts = list[executor.WorkspaceLayout]()
    allocate = executor.WorkspaceLayout.allocate
    monkeypatch.setattr(
        executor.WorkspaceLayout, "allocate", lambda found, device: layouts.append(found) or allocate(found, device)
    )
    (job, *_) = sanitize.all_jobs(ARCH, ["bfloat16"], [128], ["decode_sm90"])
    job.run()
    (layout,) = layouts
    (flags,) = layout.zeroed
    assert flags.start == layout.offsets["partial_stats"]
    assert 0 <= layout.num_bytes - flags.stop < 256


def test_no_call_starts_when_the_time_is_over(sanitize, recorder, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = sanitize.all_jobs(ARCH, ["float32"], [64])[:2]
    sanitize.run_jobs(jobs, time.time() - 1.0)
    assert capsys.readouterr().out == ""
    sanitize.run_jobs(jobs)
    assert capsys.readouterr().out == "".join(f"calling {job.family}\nwatched {job.family}\n" for job in jobs)


def test_after_a_failure_the_next_family_is_watched(sanitize, tmp_path: Path, monkeypatch, recorder, capsys) -> None:
    jobs = [
        job for family in ("fwd_simt", "bwd_simt") for job in sanitize.all_jobs(ARCH, ["float32"], [64], [family])[:2]
    ]

    def run(job):
        if job.family == "fwd_simt":
            raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(sanitize.Job, "run", run)
    with pytest.raises(RuntimeError):
        sanitize.run_jobs(jobs)
    assert capsys.readouterr().out == "calling fwd_simt\nfailed fwd_simt; next is 2\n"
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        "#!/bin/sh\ncase \"$*\" in *'--first 0'*)\n"
        "echo 'failed fwd_simt; next is 2'; echo '========= ERROR SUMMARY: 5 errors';;\n"
        " *'--first 2'*) echo 'watched bwd_simt'; echo '========= ERROR SUMMARY: 0 errors';; esac\n"
    )
    program.chmod(0o755)
    found = sanitize.watch_share(str(program), "memcheck", "1/1", [], 60.0, tmp_path)
    assert found["errors"] == 5
    assert found["calls"] == {"bwd_simt": 1}
    assert len(list(tmp_path.glob("*.log"))) == 1


def test_every_tool_has_a_process(sanitize, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize.os, "cpu_count", lambda: 16)
    assert sanitize.num_shares(list(sanitize.TOOLS)) == {"memcheck": 2, "racecheck": 8, "initcheck": 2, "synccheck": 2}
    monkeypatch.setattr(sanitize.os, "cpu_count", lambda: 1)
    assert set(sanitize.num_shares(list(sanitize.TOOLS)).values()) == {1}


@pytest.mark.parametrize(
    ("tool", "output", "errors"),
    [
        ("memcheck", "watched x\nwatched x\nlaunched a<1>\nlaunched b<2>\n========= ERROR SUMMARY: 0 errors", 0),
        (
            "memcheck",
            "========= COMPUTE-SANITIZER\n========= Invalid __global__ write\n"
            "=========     at void flashtile::fwd_simt_kernel<flashtile::X>+0x60\n========= ERROR SUMMARY: 3 errors",
            3,
        ),
        ("racecheck", "========= RACECHECK SUMMARY: 7 hazards displayed (7 errors, 0 warnings)", 7),
        ("synccheck", "Device not supported", None),
    ],
)
def test_what_a_tool_says(sanitize, tmp_path: Path, tool: str, output: str, errors: int | None) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    program.chmod(0o755)
    found = sanitize.watch(str(program), tool, ["--share", "1/2"], 60.0)
    assert found["errors"] == errors
    assert found["kernels"] == (["a<1>", "b<2>"] if "launched" in output else [])
    assert found["calls"] == ({"x": 2} if "launched" in output else {})
    assert found["in"] == (["fwd_simt"] if errors == 3 else [])
    assert bool(found["said"]) == (errors != 0)


def test_a_process_has_its_time(sanitize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, communicate = tmp_path / "compute-sanitizer", subprocess.Popen.communicate
    program.write_text("#!/bin/sh\necho watched fwd_simt\ntouch $0.started\nsleep 600 &\nwait\n")
    program.chmod(0o755)

    def communicate_once_started(process, text=None, timeout=None):
        wait_for(tmp_path / "compute-sanitizer.started")
        return communicate(process, text, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_once_started)
    found = sanitize.watch(str(program), "memcheck", [], 0.5)
    assert found["errors"] is None
    assert found["calls"] == {"fwd_simt": 1}
    assert found["said"].endswith("not done in 0.5 s")
    assert found["seconds"] < 600


def wait_for(path: Path) -> None:
    end = time.monotonic() + 600
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert path.exists()


def test_reports_are_counted_by_family(sanitize) -> None:
    """Also of a process that was killed, whose tool had no last word."""
    output = """========= COMPUTE-SANITIZER
calling fwd_sm90
watched fwd_sm90
calling bwd_sm90
========= Error: Race reported between Read access at void flashtile::bwd_sm90_kernel<X>+0x10
=========     and Write access at void flashtile::bwd_sm90_kernel<X>+0x20 [64 hazards]
=========
========= Error: Race reported between Read access at void flashtile::bwd_sm90_kernel<X>+0x30
watched bwd_sm90
calling bwd_simt
not done in 3 s"""
    found = sanitize.read("racecheck", output)
    assert found["errors"] is None
    assert found["reports"] == {"bwd_sm90": 2}
    assert found["calls"] == {"fwd_sm90": 1, "bwd_sm90": 1}
    last = "\n========= Target application returned an error\n========= RACECHECK SUMMARY: 2 hazards displayed"
    assert sanitize.read("racecheck", output + last)["reports"] == {"bwd_sm90": 2}


@pytest.fixture
def run_main(sanitize, recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the script on one family, with this shell script for compute-sanitizer."""
    environment = facts.environment
    monkeypatch.setattr(facts, "environment", lambda _, *rest: environment("cpu", *rest))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize.shutil, "which", lambda *_, **__: str(tmp_path / "compute-sanitizer"))
    monkeypatch.setattr(sanitize.os, "cpu_count", lambda: 2)
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

    def run(script: str, *arguments: str) -> tuple[int, dict]:
        program = tmp_path / "compute-sanitizer"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        given = ["--families", "fwd_simt", "--head-dims", "64", "--dtypes", "float32", "--out", str(tmp_path)]
        status = sanitize.main([*given, *arguments])
        return status, json.loads((tmp_path / "sanitize.json").read_text())

    return run


# All at once, so that a signal cuts nothing off
REPORTS_AND_WAITS = """printf 'calling fwd_simt
watched fwd_simt
calling fwd_simt
========= Invalid __global__ read of size 4 bytes
=========     at void flashtile::fwd_simt_kernel<X>+0x60
'
case "$*" in *--fault*) ;; *) touch $0.started ;; esac
sleep 600 & wait"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_a_summary(run_main, tmp_path: Path, capsys, number: signal.Signals) -> None:
    def interrupt() -> None:
        wait_for(tmp_path / "compute-sanitizer.started")
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    threading.Thread(target=interrupt, daemon=True).start()
    status, report = run_main(REPORTS_AND_WAITS, "--tools", "memcheck")
    assert status == 1
    assert report["complaints"] == [f"ended by {number.name}"]
    clean = report["tools"]["memcheck"]["clean"]
    assert clean["errors"] is None
    assert clean["calls"]["fwd_simt"] == clean["reports"]["fwd_simt"] >= 1
    *_, family, verdict = capsys.readouterr().out.splitlines()
    assert family.startswith("fwd_simt ")
    assert verdict.startswith(f"sanitize: NOT CLEAN: ended by {number.name}; memcheck: memcheck ")
    assert signal.getsignal(number) is before


def test_the_run_ends_in_time_with_a_summary(run_main, sanitize, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more processes than cores, too, and whether or not they have started by then."""
    monkeypatch.setattr(sanitize, "compile_units", lambda *_: True)
    status, report = run_main(REPORTS_AND_WAITS, "--seconds", "6")
    assert status == 1
    assert list(report["tools"]) == ["memcheck", "racecheck", "initcheck", "synccheck"]
    assert all(re.search("not (done|started)", found["clean"]["said"]) for found in report["tools"].values())
    assert "sanitize: NOT CLEAN" in capsys.readouterr().out.splitlines()[-1]


def test_tools_of_one_commit_share_a_record(run_main, sanitize, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = sanitize.all_jobs(ARCH, ["float32"], [64], ["fwd_simt"])
    entries = sorted({entry for _, entry in sanitize.units_of(jobs)})
    watched = "\n".join([*(f"watched {job.family}" for job in jobs), *(f"launched {entry}" for entry in entries)])
    script = f"""count=0
case "$*" in *--fault*) count=3;;
*'--share 1/'*) cat <<'END'
{watched}
END
esac
echo "========= RACECHECK SUMMARY: $count hazards"; echo "========= ERROR SUMMARY: $count errors\""""
    for tool in ("memcheck", "racecheck"):
        status, report = run_main(script, "--tools", tool)
        assert (status, capsys.readouterr().out.splitlines()[-1]) == (0, "sanitize: clean")
    assert list(report["tools"]) == ["memcheck", "racecheck"]
    monkeypatch.setenv("FLASHTILE_COMMIT", "0123456789ab")
    assert list(run_main(script, "--tools", "synccheck")[1]["tools"]) == ["synccheck"]


def test_runs_of_one_tool_count_as_one(sanitize) -> None:
    runs = [
        {"errors": errors, "kernels": kernels, "calls": dict.fromkeys(kernels, 1), "reports": {"a": errors or 0}}
        | {"in": [], "seconds": 1.0, "said": ""}
        for errors, kernels in ((0, ["a"]), (2, ["a", "b"]), (None, []))
    ]
    joined = {"errors": 2, "kernels": ["a", "b"], "calls": {"a": 2, "b": 1}, "reports": {"a": 2}}
    assert sanitize.joined(runs[:2]) == joined | {"in": [], "seconds": 1.0, "said": ""}
    assert sanitize.joined(runs)["errors"] is None


def test_what_is_missing(sanitize, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sanitize.main([]) == 2
    assert "no GPU" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize.shutil, "which", lambda *_, **__: None)
    assert sanitize.main([]) == 2
    assert (
        "compute-sanitizer: not found. It comes with the CUDA toolkit; put its bin folder on PATH."
        in capsys.readouterr().err
    )
    assert sanitize.main(["--tools", "valgrind"]) == 2
    assert "--tools: got valgrind; accepted: memcheck, racecheck, initcheck, synccheck." in capsys.readouterr().err
