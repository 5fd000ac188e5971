"""tools/sanitize.py without a GPU: it reaches every row of the table, reads what the tools say, and says what is
missing."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_gpu
import pytest
import torch

from flashtile.backends import executor, native
from flashtile.check.trial import Trial
from flashtile.cli.kernel_jobs import head_dims
from flashtile.kernels import families, mutation
from flashtile.kernels.arch import ARCHS
from flashtile.kernels.mutation import mutations
from flashtile.kernels.spec import DTYPES, CallLayout
from flashtile.runtime import extension

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
                    assert case.seqlen_q > row.block_m or "dkdv" in kernel or family.name in sanitize.FEW_QUERIES
                    assert case.seqlen_k > 2 * row.block_n
                    chosen.add(row)
    expected = {
        row
        for family in families.all_families()
        for dtype in family.dtypes
        for row in family.every_row(dtype)
        if row.unfit(ARCH) is None
        and not row.spills(ARCH)
        and not getattr(row, "packs_heads", False)
        and not getattr(row, "is_single", False)  # has no second tile of keys
        and getattr(row, "num_parts", 2) > 1  # a row of calls that allow TF32 alone
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
    assert sanitize.compile_jobs(sanitize.all_jobs(ARCH, ["float32"], [64])[:2], ARCH)
    assert not recorder.launches()
    assert extension.executor().num_plans() == 0


def test_what_is_compiled_is_what_the_shares_launch(sanitize, recorder: fake_gpu.Recorder) -> None:
    jobs, launched = sanitize.all_jobs(ARCH, DTYPES, head_dims()), set()
    compiled = sanitize.compile_jobs(jobs, ARCH)
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
    sanitize.run_jobs(jobs, seconds=-1.0)
    assert capsys.readouterr().out == ""
    sanitize.run_jobs(jobs)
    assert capsys.readouterr().out == "".join(f"watched {job.family}\n" for job in jobs)


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
    assert capsys.readouterr().out == "failed fwd_simt; next is 2\n"
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


def test_a_process_has_its_time(sanitize, tmp_path: Path) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text("#!/bin/sh\necho watched fwd_simt\nsleep 60 &\nwait\n")
    program.chmod(0o755)
    found = sanitize.watch(str(program), "memcheck", [], 0.5)
    assert found["errors"] is None
    assert found["calls"] == {"fwd_simt": 1}
    assert found["said"].endswith("not done in 0.5 s")
    assert found["seconds"] < 30


def test_runs_of_one_tool_count_as_one(sanitize) -> None:
    runs = [
        {"errors": errors, "kernels": kernels, "calls": dict.fromkeys(kernels, 1), "in": [], "seconds": 1.0, "said": ""}
        for errors, kernels in ((0, ["a"]), (2, ["a", "b"]), (None, []))
    ]
    joined = {"errors": 2, "kernels": ["a", "b"], "calls": {"a": 2, "b": 1}, "in": [], "seconds": 1.0, "said": ""}
    assert sanitize.joined(runs[:2]) == joined
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
