"""`flashtile profile` without a GPU: words of a problem, output of Nsight Compute, and the messages without a
profiler, without permission and without a GPU."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_fakes import ENV, SETTINGS, provider, right
from rich.console import Console
from test_bench_docs import make_docs
from typer.testing import CliRunner

from flashtile import Unsupported
from flashtile.cli.main import app
from flashtile.lab.bench.load import Load
from flashtile.lab.bench.points import Point
from flashtile.lab.bench.rows import read
from flashtile.lab.ladder import command as ladder_command
from flashtile.lab.profile import ceilings, command, figures, measure, ncu, problems, tables
from flashtile.lab.profile.ceilings import Ceilings
from flashtile.lab.profile.rows import KernelRow
from flashtile.plans.arch import ARCHS

pytestmark = pytest.mark.usefixtures("kept_kernels")
# The kernels of six calls: the forward pass of three providers, then the backward pass. Times in ns; the counters of
# fwd_sm90 are near those of results/nvidia-h200/tiles_bf16.csv, the others are made up
CALLS = (
    {"void flashtile::fwd_sm90_kernel<flashtile::Sm90Config<flashtile::bf16_t>>(flashtile::FwdSm90Params)": 766_000},
    {"void pytorch_flash::flash_fwd_kernel<pytorch_flash::Traits<(int)128>>(Flash_fwd_params)": 1_920_000},
    {"cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_kernel0_0": 1_010_000},
    {
        "void flashtile::bwd_sm90_preprocess_kernel<flashtile::bf16_t>(flashtile::Params)": 91_000,
        "void flashtile::bwd_sm90_kernel<flashtile::Sm90BwdConfig>(flashtile::BwdSm90Params)": 2_400_000,
        "void flashtile::bwd_convert_dq_kernel<flashtile::bf16_t>(flashtile::Params)": 80_000,
    },
    {"void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<int>(Flash_bwd_params)": 6_100_000},
    {"cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_kernel0_0": 2_700_000},
)  # fmt: skip
COUNTERS = {
    "dram__bytes_read.sum": "201,326,592",
    "dram__bytes_write.sum": "67,108,864",
    "lts__t_bytes.sum": "4,212,420,000",
    "launch__registers_per_thread": "168",
    "launch__block_size": "384",
    "launch__grid_size": "132",
    "launch__shared_mem_per_block_static": "0",
    "launch__shared_mem_per_block_dynamic": "164,864",
    "sm__maximum_warps_per_active_cycle_pct": "18.75",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "14.06",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "71.2",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum": "0",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum": "0",
    ncu.STALL.format("wait"): "0.9",
    ncu.STALL.format("gmma"): "0.6",
}


def ncu_output():
    """The raw page of ncu as CSV: lines of the tool, a header, a line of units, one line per kernel."""
    columns = ["ID", "Process ID", "Process Name", "Kernel Name", *ncu.BYTES, *measure.METRICS]
    table = [columns, ["" for _ in columns]]
    for kernels in CALLS:
        for name, time_ns in ({f"{ncu.MARKER}(int)": 1_200} | kernels).items():
            cells = COUNTERS | {"Process Name": "python3.12", "Kernel Name": name, "gpu__time_duration.sum": time_ns}
            table.append([str(cells.get(column, "0.1")) for column in columns])
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows(table)
    return f"==PROF== Connected to process 17 (/usr/bin/python3.12)\n{text.getvalue()}==PROF== Disconnected\n"


OUTPUT = ncu_output()
ROOFS = Ceilings(60.0, 4000.0, 30000.0, 7000.0, 800.0)
PROVIDERS = ("cuda", "sdpa-flash", "sdpa-cudnn")


# The words of a problem


def test_words_of_a_problem():
    found = problems.parse(["B=2", "H=8", "Hkv=4", "S=256,512", "d=64", "causal", "dtype=bfloat16", "pass=fwd,bwd"])
    assert found.stem == "profile_B2_H8_Hkv4_S256-512_d64_bf16_causal_fwd_bwd"
    assert [(point.seqlen_q, point.direction) for point in found.points] == [
        (256, "fwd"), (256, "bwd"), (512, "fwd"), (512, "bwd"),
    ]  # fmt: skip
    assert found.points[0] == Point(2, 8, 4, 256, 256, 64, 64, "bf16", True)


def test_what_is_left_out():
    assert problems.parse([]).points == (Point(4, 16, 16, 4096, 4096, 128, 128, "bf16"),)
    both = problems.parse(["full", "causal", "Sq=1", "Sk=9", "dv=32"])
    assert [point.is_causal for point in both.points] == [False, True]
    assert (both.points[0].seqlen_q, both.points[0].seqlen_k, both.points[0].head_dim_v) == (1, 9, 32)


def test_different_problems_have_different_file_names():
    words = [
        "",
        "causal",
        "full causal",
        "pass=bwd",
        "pass=fwd,bwd",
        "pass=fwd+bwd",
        "causal pass=bwd",
        "d=64",
        "dtype=fp16",
    ]
    stems = {problems.parse(one.split()).stem for one in words}
    assert len(stems) == len(words)
    assert {problems.parse(one.split()).stem for one in ("", "full", "pass=fwd", "S=4096")} <= stems
    assert not any("+" in stem for stem in stems)
    for text in ("", "B=1 H=8 Hkv=2 Sq=1 Sk=9 d=64 dv=32 causal dtype=fp16 pass=bwd"):
        (point,), stem = (found := problems.parse(text.split())).points, found.stem
        assert problems.stem(point) == stem


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("S=0", "S: got '0'; accepted: an integer from 1"),
        ("S=", "problem: got S=; accepted: S with a value"),
        ("L=4", "problem: got 'L=4'; accepted: words such as B=4"),
        ("causal=1", "problem: got 'causal=1'"),
        ("S=4 S=8", "problem: got S twice; accepted: each word once"),
        ("H=6 Hkv=4", "Hkv: got 4; accepted: a divisor of H, which is 6"),
        ("pass=back", "pass: got 'back'; accepted: fwd, bwd, fwd"),
        ("dtype=int8", "--dtype: got 'int8'"),
        ("--providers nobody", "--providers: got 'nobody'"),
        ("--arch sm_12", "--arch: got 'sm_12'; accepted: sm_61"),
    ],
)
def test_wrong_words_are_explained(words, message):
    result = CliRunner().invoke(app, ["profile", *words.split()])
    assert result.exit_code == 2
    assert message in result.output


# Names and metrics


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void flashtile::fwd_sm90_kernel<flashtile::Sm90Config<float, 1>, int>(flashtile::Params)", "fwd_sm90_kernel"),
        ("void pytorch_flash::flash_fwd_kernel<Traits<(int)128>>(pytorch_flash::Flash_fwd_params)", "flash_fwd_kernel"),
        ("cudnn_generated_sdpa_sm90_knob_7_kernel0_0", "cudnn_generated_sdpa_sm90_knob_7_kernel0_0"),
        ("void at::native::(anonymous namespace)::fill<4>(int)", "fill"),
    ],
)  # fmt: skip
def test_short_names(name, short):
    assert measure.short_name(name) == short


@pytest.fixture
def profiler(monkeypatch):
    """Installs a fake ncu that gives these answers, one after the other, and returns the commands it got."""

    def install(*answers):
        commands, left = [], list(answers)

        def run(line, **options):
            commands.append(line)
            status, stdout, stderr = left.pop(0)
            return subprocess.CompletedProcess(line, status, stdout, stderr)

        monkeypatch.setattr(ncu, "find", lambda: "ncu")
        monkeypatch.setattr(ncu.subprocess, "run", run)
        return commands

    return install


def calls(num=6):
    return [ncu.Call("cuda", Point())] * num


def test_the_output_of_ncu(profiler):
    commands = profiler((0, OUTPUT, ""))
    groups = ncu.run(calls(), measure.METRICS)
    assert len(groups) == 6
    assert all(groups)
    assert len(commands) == 1
    main = [max(group, key=lambda kernel: kernel.metrics["gpu__time_duration.sum"]) for group in groups]
    names = [measure.short_name(kernel.name) for kernel in main]
    assert names[0] == "fwd_sm90_kernel"
    assert names[1] == "flash_fwd_kernel"
    assert names[3] == "bwd_sm90_kernel"
    assert main[0].metrics["dram__bytes_read.sum"] == 201326592
    shares = ncu.stalls(main[0].metrics)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)


def test_output_that_ncu_wrote_on_an_h200(profiler):
    """Both passes of flashtile, sdpa-flash and sdpa-cudnn, a causal bfloat16 call of B=4 H=16 S=4096 d=128."""
    profiler((0, (Path(__file__).parent / "data/ncu_h200.csv").read_text(), ""))
    groups = ncu.run(calls(), measure.METRICS)
    names = [[measure.short_name(kernel.name) for kernel in group] for group in groups]
    assert [len(group) for group in names] == [1, 1, 1, 3, 5, 3]
    assert names[0] == ["fwd_sm90_kernel"]
    assert names[3] == ["bwd_sm90_preprocess_kernel", "bwd_sm90_kernel", "bwd_convert_dq_kernel"]
    for kernel in (kernel for group in groups for kernel in group):
        assert set(measure.METRICS) <= set(kernel.metrics), kernel.name
        assert sum(ncu.stalls(kernel.metrics).values()) == pytest.approx(1.0)
    (forward,), (flash,), _, (_, backward, _), *_ = groups
    assert forward.metrics["gpu__time_duration.sum"] < flash.metrics["gpu__time_duration.sum"]
    assert backward.metrics["launch__registers_per_thread"] == 168


def test_metrics_that_the_gpu_does_not_have_are_left_out(profiler):
    missing = ncu.STALL.format("gmma")
    commands = profiler((1, f"==ERROR== Failed to find metric {missing}\n", ""), (0, OUTPUT, ""))
    assert len(ncu.run(calls(), measure.METRICS)) == 6
    first, second = (line[line.index("--metrics") + 1].split(",") for line in commands)
    assert missing in first
    assert [name for name in first if name != missing] == second


def test_a_complaint_without_a_name_drops_what_is_optional(profiler):
    commands = profiler((1, "==ERROR== Failed to resolve metrics\n", ""), (0, OUTPUT, ""))
    assert len(ncu.run(calls(), measure.METRICS, optional=measure._OPTIONAL)) == 6
    first, second = (set(line[line.index("--metrics") + 1].split(",")) for line in commands)
    assert first - second == set(measure._OPTIONAL)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((1, "==ERROR== ERR_NVGPUCTRPERM - no permission", ""), "this user may not read the counters"),
        ((1, "==ERROR== The application returned an error code", "Traceback"), r"exit status 1\): Traceback"),
        ((0, "", ""), "got no counters from ncu"),
    ],
)  # fmt: skip
def test_a_profiler_that_fails(profiler, answer, words):
    profiler(answer)
    with pytest.raises(Unsupported, match=words):
        ncu.run(calls(), measure.METRICS)


def test_the_child_process_is_told_the_calls(profiler):
    commands = profiler((0, OUTPUT, ""))
    ncu.run([ncu.Call("sdpa-flash", Point(direction="bwd"))] * 6, ())
    *_, source, request = commands[0]
    assert source == "flashtile.lab.bench.providers"
    assert json.loads(request)[0]["provider"] == "sdpa-flash"
    path, *_ = ncu.device.child_environment({})["PYTHONPATH"].split(os.pathsep)
    assert (Path(path) / "flashtile" / "__init__.py").is_file()
    assert Point(**json.loads(request)[0]["point"]).direction == "bwd"


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_only_the_call_is_profiled(monkeypatch, direction):
    """The child process on the CPU: what runs between the start and the stop of the profiler."""
    events = []

    def attend(q, k, v):
        events.append("forward")
        return Watched.apply(right(q, k, v))

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(context, out):
            return out.clone()

        @staticmethod
        def backward(context, grad):
            events.append("backward")
            return grad

    class Marker:
        def launch(self, *_):
            events.append("marker")

    compiled = SimpleNamespace(cubin=b"", symbols={ncu.MARKER: ncu.MARKER})
    monkeypatch.setattr(ncu, "current_arch", lambda: ARCHS[90])
    monkeypatch.setattr(ncu.cache, "compile_cached", lambda *_: compiled)
    monkeypatch.setattr(ncu.driver, "load", lambda cubin: SimpleNamespace(function=lambda symbol: Marker()))
    monkeypatch.setattr(ncu.providers, "by_name", lambda name, known: provider(name, attend))
    monkeypatch.setattr(Point, "make", lambda point, device, seed, make=Point.make: make(point, "cpu", seed))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("release"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: events.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: events.append("stop"))
    call = ncu.Call("one", Point(seqlen_q=8, seqlen_k=8, direction=direction))
    ncu.child("flashtile.lab.bench.providers", json.dumps([asdict(call)]))
    profiled = events[events.index("start") + 1 : events.index("stop")]
    assert profiled == ["marker", "forward" if direction == "fwd" else "backward"]
    warm_up = events[: events.index("start")]
    # ncu saves all allocated memory for every kernel, so what the warm-up left is released
    assert warm_up == (["forward"] if direction == "fwd" else ["forward", "backward"]) + ["release"]


# Ceilings


@pytest.mark.parametrize("number", [75, 80, 90])
def test_the_kernels_of_the_ceilings_compile_without_a_spill(number):
    compiled = ceilings.compile_kernels(ARCHS[number])
    assert ("tensor_kernel" in compiled.symbols) == (number >= 80)
    for name in compiled.symbols:
        used = compiled.resources(name)
        assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0), name
    assert compiled.warnings == []


# The command


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    result = CliRunner().invoke(app, ["profile"])
    assert result.exit_code == 2
    assert "flashtile profile: got no GPU here; accepted: a GPU that torch sees. With --arch sm_90" in result.output
    result = CliRunner().invoke(app, ["profile", "--timeline"])
    assert result.exit_code == 2
    assert "accepted: a GPU that torch sees. A timeline is measured; without --timeline, --arch" in result.output


def test_a_launch_that_did_not_happen_has_threads_but_no_blocks():
    result = CliRunner().invoke(app, ["profile", "--arch", "sm_80", "B=1", "H=2", "S=64", "d=64", "dtype=fp32"])
    assert result.exit_code == 0, result.output
    assert re.search(r"^threads of a block +│ +\d+$", result.output, re.MULTILINE)
    assert not re.search(r"^blocks", result.output, re.MULTILINE)


def test_what_the_compiler_knows_needs_no_gpu():
    words = "-- B=1 H=2 S=64 d=64 dtype=fp32 pass=fwd,bwd --arch sm_80 --json"  # options may follow the --
    result = CliRunner().invoke(app, ["profile", *words.split()])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert {row["direction"] for row in rows} == {"fwd", "bwd"}
    for row in rows:
        assert row["registers"] > 0
        assert row["spill_bytes"] == 0
        assert 0 < row["occupancy"] <= 1
        assert row["kernel_ms"] is None
        assert row["no_counters"] == "compiled for sm_80, not run"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Profiles fakes on the CPU: the calls are timed, the counters are those of OUTPUT."""

    def refuse(q, k, v):
        raise Unsupported("not for this shape")

    def start(answer=(0, OUTPUT, ""), missing=False, refusing="", draws=False):
        if not draws:
            monkeypatch.setattr(figures, "draw", lambda path: [])
        if missing:
            monkeypatch.setattr(ncu.shutil, "which", lambda *_, **__: None)
        else:
            monkeypatch.setattr(ncu, "find", lambda: "ncu")
            done = subprocess.CompletedProcess([], *answer)
            monkeypatch.setattr(ncu.subprocess, "run", lambda *_, **__: done)
        known = measure.compiled_kernels

        def compiled(name, point, arch=None):
            small = replace(point, dtype="fp32", direction="fwd")  # one small kernel to compile
            return known(name, small, "sm_80")

        monkeypatch.setattr(measure, "compiled_kernels", compiled)
        monkeypatch.setattr(command, "gpu_settings", lambda *_: SETTINGS)
        events: list[str] = []
        monkeypatch.setattr(command, "Load", lambda where: events.append("load") or Load("cpu"))
        monkeypatch.setattr(ceilings, "measure", lambda: events.append("ceilings") or ROOFS)
        monkeypatch.setattr(command, "current_arch", lambda: ARCHS[90])
        text = io.StringIO()
        wanted = problems.parse(["B=1", "H=2", "S=64", "d=64", "dtype=bf16", "pass=fwd,bwd"])
        fakes = [provider(name, refuse if name == refusing else right, name != "cuda") for name in PROVIDERS]
        job = command.Run(wanted, fakes, tmp_path, ENV, Console(file=text, width=250), as_json=False)
        status = job.start()
        assert events == ["load", "ceilings"]  # its own work is not other work that keeps the GPU busy
        rows = read(tmp_path / f"{wanted.stem}.csv", KernelRow)
        return status, text.getvalue(), rows

    return start


def test_a_whole_run(run, tmp_path):
    status, text, rows = run(draws=True)
    assert status == 0, text
    stem = "profile_B1_H2_S64_d64_bf16_fwd_bwd"
    assert {path.name for path in tmp_path.iterdir()} == {f"{stem}.csv", f"{stem}.json", f"{stem}_roofline.png"}
    assert len({row.call for row in rows}) == 6
    for row in rows:
        assert row.kernel_ms > 0
        assert row.dram_bytes > 0
        assert 0 < row.achieved_occupancy <= row.occupancy * 1.05
        assert row.registers > 0
        assert 1 <= len(row.stall_shares()) <= 5
        assert row.num_kernels == sum(other.call == row.call for other in rows)
    main = measure.main_kernel([row for row in rows if row.provider == "cuda" and row.direction == "fwd"])
    assert main.tensor_percent > 30
    assert main.local_bytes == 0
    for words in (
        "Measured ceilings: 800 TFLOP/s of tensor cores, 60.0 of FMA",
        "fwd: B=1 H=2 S=64 d=64 bf16, full",
        "flashtile fwd_sm90",
        "bwd: B=1 H=2 S=64 d=64 bf16, full; other kernels",
        "tensor pipe busy",
        "stall 5",
        "occupancy, achieved",
    ):
        assert words in text
    stored = json.loads((tmp_path / f"{stem}.json").read_text())
    assert [row["kernel"] for row in stored["rows"]] == [row.kernel for row in rows]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"missing": True}, "Nsight Compute: got no ncu on PATH; accepted: an installed one. Install it"),
        ({"answer": (1, "==ERROR== ERR_NVGPUCTRPERM", "")}, "ERR_NVGPUCTRPERM: this user may not read the counters"),
    ],
)
def test_without_counters_times_and_what_the_compiler_knows_are_shown(run, options, words):
    status, text, rows = run(**options)
    assert status == 0, text
    assert "No counters, only times and what the compiler knows." in text
    assert words in text
    ours = [row for row in rows if row.provider == "cuda"]
    assert all(row.registers and row.kernel == "fwd_simt_kernel" for row in ours)
    assert all(row.call_ms and words in row.no_counters and row.kernel_ms is None for row in rows)
    assert "registers" in text
    assert "stall 1" not in text


def test_a_provider_that_refuses_is_listed(run, monkeypatch):
    groups = ncu.group(ncu.parse(OUTPUT))
    monkeypatch.setattr(ncu, "run", lambda asked, metrics, optional: groups[: len(asked)])
    status, text, rows = run(refusing="sdpa-flash")
    assert status == 0, text
    assert "Not profiled" in text
    assert {row.status for row in rows if row.provider == "sdpa-flash"} == {"refused"}
    assert len({row.call for row in rows if row.kernel}) == 4


def test_small_kernels_are_in_the_sums_but_not_in_the_table(run):
    _, _, rows = run()
    kernels = [row for row in rows if row.provider == "cuda" and row.direction == "fwd"]
    main = measure.main_kernel(kernels)
    tiny = replace(main, kernel="tiny_kernel", kernel_ms=main.kernel_ms / 100, dram_bytes=3.0 * main.least_bytes)
    one, two = (tables.table(some) for some in ([main], [replace(main, num_kernels=2), tiny]))
    assert one.header == two.header
    before, after = (
        float(next(cell for name, cell in shown.lines if name == "HBM bytes over least")) for shown in (one, two)
    )
    assert after == pytest.approx(before + 3, rel=0.01)


def test_a_kernel_without_tensor_cores_is_under_the_roof_of_shared_memory(run):
    _, _, rows = run()
    main = measure.main_kernel([row for row in rows if row.provider == "cuda"])
    assert set(figures.levels(main)) == {"device memory", "L2"}
    assert "shared memory" in figures.levels(replace(main, tensor_percent=0.0, shared_wavefronts=1e6))


def test_the_tables_of_a_profile_go_into_the_docs(run, tmp_path):
    run(draws=True)
    (tmp_path / "results" / "gpu").mkdir(parents=True)
    stem = "profile_B1_H2_S64_d64_bf16_fwd_bwd"
    for path in tmp_path.glob(f"{stem}*"):
        path.rename(tmp_path / "results" / "gpu" / path.name)
    marked = f"<!-- bench:gpu/{stem}:profile -->\n<!-- /bench:gpu/{stem}:profile -->\n"
    (tmp_path / "README.md").write_text(marked)
    assert make_docs(tmp_path).returncode == 0
    filled = (tmp_path / "README.md").read_text()
    assert "| tensor pipe busy |" in filled
    assert filled.count("fwd: B=1") == 1
    assert filled.count("bwd: B=1") == 2
    assert filled.count("; other kernels:") == 1
    assert make_docs(tmp_path, "--check").returncode == 0


def test_a_roofline_point_is_a_whole_call(run):
    """A backward pass may compute dK and dV in one kernel and dQ in another."""
    _, _, rows = run()
    kernels = [row for row in rows if row.provider == "cuda" and row.direction == "bwd"]
    assert len(kernels) > 1
    (point,) = figures.roofline_points(kernels)
    assert point.kernel_ms == sum(row.kernel_ms for row in kernels)
    assert point.dram_bytes == sum(row.dram_bytes for row in kernels)
    tflops = point.flops / point.kernel_ms / 1e9
    assert figures.kernel_tflops(point) == tflops < figures.kernel_tflops(measure.main_kernel(kernels))


def test_names_in_a_figure_say_what_differs(run):
    _, _, rows = run()
    points = figures.roofline_points(rows)
    assert set(tables.point_labels(points)) == {
        f"{name} {one}" for name in ("flashtile", "sdpa-flash", "sdpa-cudnn") for one in ("fwd", "bwd")
    }
    causal = [replace(row, is_causal=True, head_dim=128) for row in points if row.direction == "fwd"]
    plain = [row for row in points if row.direction == "fwd"]
    assert tables.point_labels([plain[0], causal[0]]) == ["flashtile d=64 full", "flashtile d=128/64 causal"]


def test_labels_of_a_roofline_stay_apart_and_under_the_roof():
    heights = [1.0, 2.9, 2.95, 2.97]
    places = figures._under(3.0, heights, 0.1)
    assert places[0] == 1.0
    assert all(place <= height for place, height in zip(places, heights, strict=True))
    assert all(upper - lower >= 0.1 - 1e-9 for lower, upper in itertools.pairwise([*places, 3.0]))


def test_commands_of_the_write_up_that_need_no_gpu(monkeypatch):
    # test_ladder.py compiles the rungs
    monkeypatch.setattr(ladder_command.launcher, "compile_rung", lambda *_, **__: None)
    monkeypatch.setattr(ladder_command, "_list", lambda *_: 0)
    page = (Path(__file__).resolve().parents[2] / "docs" / "writeup.md").read_text(encoding="utf-8")
    commands = re.findall(r"`flashtile ([^`]+)`", page.partition("\nWithout a GPU:")[2])
    assert len(commands) >= 2
    for one in commands:
        result = CliRunner().invoke(app, one.split())
        assert result.exit_code == 0, f"{one}: {result.output}"
