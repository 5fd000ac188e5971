"""The ladder without a GPU: rungs compile for their architectures, errors, counters, tables and figures."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from bench_fakes import ENV, SETTINGS, provider
from rich.console import Console
from test_bench_docs import make_docs
from test_kernels import needs_nvdisasm, opcodes
from typer.testing import CliRunner

from flashtile import Unsupported
from flashtile.cli.main import app
from flashtile.lab.bench import plots
from flashtile.lab.bench.points import Plan, Point
from flashtile.lab.bench.providers import Attend, Provider
from flashtile.lab.bench.rows import Row, Writer, read
from flashtile.lab.bench.sweep import Sweep
from flashtile.lab.ladder import command, counters, figures, launcher, measure, probe, rungs, tables
from flashtile.lab.ladder.probe import GUARD, KernelFault
from flashtile.lab.ladder.rows import Counters, HbmRow, RungRow
from flashtile.lab.ladder.rungs import Variables
from flashtile.lab.profile import gpu
from flashtile.lab.profile import ncu as profiler
from flashtile.lab.profile.ceilings import Ceilings
from flashtile.plans.arch import ARCHS
from flashtile.runtime import toolchain
from flashtile.runtime.nvrtc import CompileError

RUNGS = rungs.rungs()
IDS = [rung.name for rung in RUNGS]
NVRTC_12 = next(
    (path for folder in sys.path for path in Path(folder).glob("nvidia/cuda_nvrtc/lib/libnvrtc.so.12")), None
)
SIMPLE = """// own: a kernel for tests.
// launch: block_m=64 block_n=64|32 threads=64 shared=4*block_n*d arch=75
struct Params { const float *q, *k, *v; float* o; int seqlen, head_dim; float scale_log2; int is_causal; };
extern "C" __global__ void own_kernel(const Params p) { p.o[blockIdx.x] = p.q[threadIdx.x] * p.scale_log2; }
"""


@pytest.fixture(autouse=True)
def no_variables(kept_kernels, monkeypatch):
    """The FLASH_* variables of the caller are not seen."""
    for name in Variables().environment():
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def own(tmp_path) -> Path:
    path = tmp_path / "own.cu"
    path.write_text(SIMPLE)
    return path


def ladder(*arguments: str, **environment: str):
    return CliRunner().invoke(app, ["ladder", *arguments], env=environment)


# The files


def test_the_rungs_are_numbered_from_zero():
    assert [int(rung.name[:2]) for rung in RUNGS] == list(range(len(RUNGS)))
    assert len(RUNGS) >= 6


@pytest.mark.parametrize("rung", RUNGS, ids=IDS)
def test_every_file_says_what_it_does_and_what_was_expected(rung):
    assert rung.function == f"{rung.name[3:]}_kernel"
    assert rung.title.startswith(rung.name[3:].replace("_", " "))
    for word in ("Changed", "Why", "Predicted", "Measured"):
        assert len(rung.note(word)) > 20, word
    assert len(rung.source.splitlines()) <= 440
    # Readable alone
    assert "#include" not in rung.source


def assert_clean(rung, head_dim, arch, is_aligned16=None):
    kernel = launcher.compile_rung(rung, head_dim, arch, Variables(), is_aligned16)
    resources = kernel.resources
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)
    assert kernel.compiled.warnings == []
    assert kernel.tile.shared_bytes <= arch.shared_bytes
    assert kernel.occupancy > 0


@pytest.mark.parametrize("rung", RUNGS, ids=IDS)
def test_every_rung_compiles_without_a_spill(rung, seed):
    """For one of its head dims, drawn anew in each run."""
    if rung.has_maps:
        with pytest.raises(Unsupported, match=f"{rung.name}: got head_dim 33; accepted: rows on 16-byte boundaries"):
            launcher.compile_rung(rung, 33, ARCHS[90], Variables())
    head_dims = [64, 128] if rung.has_maps else [33, 64, 128]
    assert_clean(rung, random.Random(seed).choice(head_dims), ARCHS[90])


@pytest.mark.parametrize("number", [75, 80, 86, 100, 120])
def test_every_architecture(number):
    for rung in RUNGS:
        if rung.min_arch > number:
            with pytest.raises(
                Unsupported, match=f"{rung.name}: got sm_{number}; accepted: sm_{rung.min_arch} or newer"
            ):
                rung.tile(64, ARCHS[number], Variables())
        elif rung.max_arch < number:
            with pytest.raises(Unsupported, match=f"{rung.name}: got sm_{number}a?; accepted: sm_90 to sm_90"):
                rung.tile(64, ARCHS[number], Variables())
        else:
            assert_clean(rung, 64, ARCHS[number])


@pytest.mark.skipif(NVRTC_12 is None, reason="nvidia-cuda-nvrtc-cu12 is not installed; `make test` does it")
def test_the_first_rungs_for_sm_61():
    early = [rung.name for rung in RUNGS if rung.min_arch <= 61]
    assert len(early) >= 3
    arguments = ["ladder", "--list", "--json", "--arch", "sm_61", "--only", ",".join(early)]
    done = subprocess.run(
        [sys.executable, "-m", "flashtile", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"FLASHTILE_NVRTC": str(NVRTC_12)},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)["rungs"]
    assert [entry["rung"] for entry in found] == early
    for entry in found:
        assert (entry["arch"], entry["spill_bytes"]) == ("sm_61", 0), entry
        assert entry["shared_bytes"] <= ARCHS[61].shared_bytes


NEW_INSTRUCTIONS = {"09": "LDSM", "11": "LDGSTS", "14": "HGMMA", "15": "UTMALDG", "16": "USETMAXREG"}


@needs_nvdisasm
def test_each_step_brings_its_instruction(tmp_path):
    steps = [rung for rung in RUNGS if rung.dtype == "bf16"]
    code = [opcodes(launcher.compile_rung(rung, 64, ARCHS[90], Variables()).compiled.cubin, tmp_path) for rung in steps]
    assert "HMMA" in code[0]
    for number, name in NEW_INSTRUCTIONS.items():
        at = next(index for index, rung in enumerate(steps) if rung.name.startswith(number))
        assert name in code[at]
        assert name not in code[at - 1]


def test_params_with_tensor_maps_hold_every_byte(monkeypatch):
    """A tensor map has zeros inside."""
    images = [bytes([number, 0, 7] * 42 + [9, 9]) for number in range(3)]
    encoded = iter(images)
    monkeypatch.setattr(launcher.driver, "TensorMap", lambda *_: SimpleNamespace(encode=lambda address: next(encoded)))
    tensor = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    maps = [launcher._tensor_map(tensor, 128) for _ in images]
    params = launcher.MappedParams(*maps, launcher.Params(1, 2, 3, 4, 8, 64, 0.5, 1), 5)
    assert bytes(params)[: 3 * 128] == b"".join(images)
    assert (params.p.seqlen, params.p.is_causal, params.num_tiles) == (8, 1, 5)


def test_rungs_of_a_dtype():
    of = {dtype: measure.chosen(None, Variables(), dtype) for dtype in rungs.DTYPES}
    assert [rung.name[:2] for rung in of["fp32"]] == [f"{number:02}" for number in range(8)]
    assert [rung.name[:2] for rung in of["bf16"]] == [f"{number:02}" for number in range(8, len(RUNGS))]
    assert measure.dtype_of(RUNGS, None) == "fp32"
    assert measure.dtype_of(of["bf16"], "08,09") == "bf16"
    with pytest.raises(ValueError, match="--only: got '07,08', rungs of fp32 and bf16; accepted: rungs of one dtype"):
        measure.dtype_of(measure.chosen("07,08", Variables()), "07,08")
    with pytest.raises(ValueError, match="--only: got '07'; accepted: rungs of bf16"):
        measure.chosen("07", Variables(), "bf16")


def test_an_own_kernel_is_never_left_out_for_its_dtype(tmp_path):
    path = tmp_path / "mine.cu"
    path.write_text(next(rung for rung in RUNGS if rung.dtype == "bf16").source)
    variables = Variables(source=path)
    assert measure.dtype_of(measure.chosen(None, variables), None) == "bf16"
    assert measure.chosen(None, variables, "bf16")[-1].is_own
    with pytest.raises(ValueError, match="--dtype: got fp32; accepted: bf16, that of mine"):
        measure.chosen(None, variables, "fp32")


# Launch line and environment


@pytest.mark.parametrize(
    ("text", "value"),
    [("4 * (d + 1)", 260), ("(128 if d<=64 else 256)", 128), ("(1 if arch >= 100 else 2)", 2), ("d // 32 - 1", 1)],
)
def test_arithmetic(text, value):
    assert rungs.evaluate(text, {"d": 64, "arch": 90}) == value


@pytest.mark.parametrize("text", ["d(", "__import__('os')", "e", "d / 2", "2.5", "d // 0", "d < 1 < 2", ""])
def test_other_expressions_are_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011, each has its own message
        rungs.evaluate(text, {"d": 64})


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FLASH_DEBUG": "yes"}, "FLASH_DEBUG: got 'yes'; accepted: 0 or 1"),
        ({"FLASH_SMEM_KB": "0"}, "FLASH_SMEM_KB: got '0'; accepted: an integer >= 1"),
        ({"FLASH_SMEM_KB": "48k"}, "FLASH_SMEM_KB: got '48k'; accepted: an integer >= 1"),
        ({"FLASH_BLOCK_N": "-64"}, "FLASH_BLOCK_N: got '-64'; accepted: an integer >= 1"),
        (
            {"FLASH_KERNEL_SRC": "no/such.cu"},
            "FLASH_KERNEL_SRC: got no/such.cu, which is no file; accepted: the path of a .cu file",
        ),
        ({"FLASH_KERNEL_FN": "f"}, "FLASH_KERNEL_FN: got 'f' alone; accepted: FLASH_KERNEL_SRC too"),
    ],
)
def test_wrong_variables_are_explained(environment, words):
    result = ladder("--list", **environment)
    assert result.exit_code == 2
    assert words in result.output


def test_variables_reach_another_process(own):
    variables = Variables(True, 32, 16, own, "own_kernel")
    assert Variables.read(variables.environment()) == variables
    assert Variables.read(Variables().environment()) == Variables()
    path, *_ = variables.child_environment()["PYTHONPATH"].split(os.pathsep)
    assert (Path(path) / "flashtile" / "lab" / "ladder").is_dir()


def rung_of(text: str):
    return next(rung for rung in RUNGS if rung.name.startswith(text))


def test_the_first_tile_that_fits_is_chosen():
    rung = rung_of("04")
    assert rung.tile(64, ARCHS[90], Variables()).block_n == 64
    assert rung.tile(64, ARCHS[61], Variables()).block_n < 64
    small = rung.tile(64, ARCHS[90], Variables(shared_kb=48))
    assert small.block_n < 64
    assert small.shared_bytes <= 48 * 1024
    assert rung.tile(64, ARCHS[90], Variables(block_n=16)).block_n == 16


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            Variables(block_n=48),
            r"FLASH_BLOCK_N: got 48; accepted: 64, 32, 16 in 04_register_blocks.cu\. Its launch line lists",
        ),
        (
            Variables(block_n=64, shared_kb=48),
            r"FLASH_BLOCK_N: got 64, a tile of 69.0 KiB at head_dim 64, over the 48 KiB of FLASH_SMEM_KB",
        ),
        (
            Variables(shared_kb=500),
            r"FLASH_SMEM_KB: got 500 \(int\); accepted: at most 227, what a block of sm_90a may have",
        ),
        (
            Variables(shared_kb=4),
            r"04_register_blocks: got a tile of .* KiB at head_dim 64, its smallest, over the 4 KiB of FLASH_SMEM_KB",
        ),
    ],
)
def test_a_tile_that_does_not_fit_is_explained(variables, words):
    with pytest.raises((ValueError, Unsupported), match=words):
        rung_of("04").tile(64, ARCHS[90], variables)


def test_a_head_dim_that_is_too_large():
    with pytest.raises(Unsupported, match=r"head_dim: got 129 \(int\); accepted: 1 to 128 in the ladder"):
        rung_of("00").tile(129, ARCHS[90], Variables())


def test_rungs_without_the_tile_asked_for_are_left_out():
    fitting, refusals = command.with_tiles(RUNGS, 64, ARCHS[90], Variables(block_n=16))
    assert 0 < len(fitting) < len(RUNGS)
    assert len(refusals) == len(RUNGS) - len(fitting)
    with pytest.raises(ValueError, match="FLASH_BLOCK_N: got 3"):
        command.with_tiles(RUNGS, 64, ARCHS[90], Variables(block_n=3))


# The user's own kernel


def test_an_own_kernel_comes_after_the_rungs(own):
    result = ladder("--list", "--json", "--only", "00", FLASH_KERNEL_SRC=str(own))
    assert result.exit_code == 0, result.output
    assert [entry["rung"] for entry in json.loads(result.stdout)["rungs"]] == ["00_naive", "own"]
    with pytest.raises(ValueError, match="FLASH_BLOCK_N: got 16"):
        command.with_tiles([*RUNGS, rungs.own(Variables(source=own))], 64, ARCHS[90], Variables(block_n=16, source=own))


@pytest.mark.parametrize(
    ("old", "new", "function", "words"),
    [
        ("own_kernel", "own_kernel", "other", "FLASH_KERNEL_FN: got 'other'; accepted: a kernel of own.cu: own_kernel"),
        ("__global__", "", "", "FLASH_KERNEL_FN: got nothing, and own.cu has 0 kernels (none)"),
        (
            "// launch:",
            "// lunch:",
            "",
            "launch line: got own.cu with none; accepted: one that gives block_m, block_n, threads, shared, arch",
        ),
        (
            "threads=64 ",
            "",
            "",
            "launch line: got own.cu with block_m, block_n, shared, arch; accepted: one that gives",
        ),
        ("4*block_n*d", "4*block_n*e", "", "launch line: got '4*block_n*e' in own.cu"),
        ("p.q[threadIdx.x]", "nothing_there", "", 'own.cu(4): error: identifier "nothing_there" is undefined'),
        ("int seqlen, head_dim", "int head_dim, seqlen", "", "Params: seqlen as in the files of the ladder"),
        ("float scale_log2; ", "", "", 'class "Params" has no member "scale_log2"'),
        ("int is_causal;", "int is_causal, more[4];", "", "Params: as in the files of the ladder"),
    ],
)
def test_a_wrong_own_kernel_is_explained(own, old, new, function, words):
    own.write_text(SIMPLE.replace(old, new))
    result = ladder("--list", "--only", "00", FLASH_KERNEL_SRC=str(own), FLASH_KERNEL_FN=function)
    assert result.exit_code == 2
    assert words in result.output


def test_an_own_kernel_needs_a_name_of_its_own(tmp_path):
    path = tmp_path / "00_naive.cu"
    path.write_text(SIMPLE)
    result = ladder("--list", FLASH_KERNEL_SRC=str(path))
    assert result.exit_code == 2
    assert "FLASH_KERNEL_SRC: got 00_naive.cu, the name of a rung; accepted: a file of another name" in result.output


def test_a_compile_error_shows_the_whole_log(own):
    own.write_text(SIMPLE.replace("p.o[", "first_mistake; second_mistake; p.o["))
    with pytest.raises(CompileError) as refused:
        launcher.compile_rung(rungs.read(own, None), 64, ARCHS[90], Variables())
    for words in ("first_mistake", "second_mistake", "own.cu(4)", "sm_90"):
        assert words in str(refused.value)


def test_debug_prints_log_and_defines(own, capsys):
    launcher.compile_rung(rungs.read(own, None), 64, ARCHS[90], Variables(is_debug=True))
    text = capsys.readouterr().err
    for words in (str(own), "HEAD_DIM=64", "BLOCK_N=64", "Used", "registers"):
        assert words in text


# Faulty kernels


def attend(inputs, is_causal, out):
    out.copy_(F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=is_causal))


def outside(offset):
    def call(inputs, is_causal, out):
        attend(inputs, is_causal, out)
        torch.as_strided(out, (1,), (1,), GUARD + (out.numel() + offset - 1 if offset > 0 else offset)).fill_(0.0)

    return call


def wrong(inputs, is_causal, out):
    attend(inputs, False, out)


def unwritten(inputs, is_causal, out):
    attend(inputs, is_causal, out)
    out[..., -1, :] = torch.nan


def meddling(inputs, is_causal, out):
    attend(inputs, is_causal, out)
    inputs.k.view(-1)[0] = 7.0


def failing(inputs, is_causal, out):
    raise RuntimeError("an illegal memory access was encountered\nmore words")


def test_a_right_kernel_passes(seed):
    assert 0 <= probe.check_call(attend, "right", 8, "cpu") < 1e-5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (outside(1), r"it wrote out of bounds, 1 elements behind its output \(first at offset 0\)"),
        (outside(-3), r"it wrote out of bounds, 1 elements before its output \(first at offset -3\)"),
        (wrong, r"wrong numbers: out: off by .* \(largest error against float64 [\d.e-]+, plain fp32 has"),
        (unwritten, r"48 of 48 output values are NaN"),
        (meddling, "it changed its input k"),
        (failing, "the kernel failed: an illegal memory access was encountered$"),
    ],
)
def test_a_wrong_kernel_is_explained(call, words):
    with pytest.raises(KernelFault, match=words) as fault:
        probe.check_call(call, "own", 8, "cpu")
    assert str(fault.value).startswith("own at batch 2, heads 3, seqlen ")


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (
            subprocess.CompletedProcess([], 0, 'noise\n{"fault": "own at batch 2: it wrote out of bounds"}\n', ""),
            "it wrote out of bounds",
        ),
        (
            subprocess.CompletedProcess([], -11, "", "many\nSegmentation fault\n"),
            "the process that ran it ended with -11: Segmentation fault",
        ),
        (subprocess.TimeoutExpired([], 1), "it did not end within 120 s"),
    ],
)
def test_faults_in_the_child_process_are_reported(own, monkeypatch, outcome, words):
    def run(*arguments, **options):
        assert options["env"]["FLASH_KERNEL_SRC"] == str(own)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(probe.subprocess, "run", run)
    with pytest.raises(KernelFault, match=words):
        probe.check_apart(rungs.read(own, None), 64, Variables(source=own))


def test_the_child_process_reports_the_error_of_a_correct_kernel(own, monkeypatch):
    monkeypatch.setattr(
        probe.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, '{"max_error": 1e-7}', "")
    )
    assert probe.check_apart(rungs.read(own, None), 64, Variables(source=own)) == 1e-7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float16}, "q: got float16; accepted: float32"),
        ({"size": (2, 8, 4)}, "q: got shape"),
        ({}, "q: got it on cpu; accepted: one CUDA device"),
    ],
)
def test_tensors_are_checked(change, words):
    tensors = [
        torch.zeros(change.get("size", (1, 2, 8, 4)), dtype=change.get("dtype", torch.float32)) for _ in range(3)
    ]
    with pytest.raises((ValueError, Unsupported), match=words):
        launcher.kernel_for(RUNGS[0], *tensors, Variables())


# The command


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    result = ladder()
    assert result.exit_code == 2
    assert "flashtile ladder: got no GPU here; accepted: a GPU that torch sees." in result.output
    assert "`flashtile ladder --list` needs none" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "99"], "--only: got '99'; accepted: 00_naive"),
        (["--dtype", "fp16"], "--dtype: got fp16; accepted: fp32, bf16, float32, bfloat16: what the rungs compute"),
        (["--dtype", "int8"], "--dtype: got 'int8'; accepted: fp32"),
        (["--list", "--arch", "sm_12"], "--arch: got 'sm_12'; accepted: sm_61"),
        (["--arch", "sm_90"], "--arch: got sm_90; accepted: no --arch without --list"),
    ],
)
def test_wrong_options_are_explained(arguments, words):
    result = ladder(*arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_a_list_by_number_and_by_name():
    result = ladder("--list", "--only", f"0, {IDS[2]}")
    assert result.exit_code == 0
    assert IDS[0] in result.output
    assert IDS[2] in result.output
    assert IDS[1] not in result.output
    assert "│ naive: attention as it is written down" in result.output  # text starts at the left


def test_the_list_without_a_compiler_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> toolchain.Toolchain:
        raise Unsupported("NVRTC: none here.")

    monkeypatch.setattr(toolchain, "find", find)
    result = ladder("--list")
    assert result.exit_code == 0, result.output
    assert result.output.count("NVRTC: none here.") == 1
    assert all(rung_id in result.output for rung_id in IDS)


def test_the_plan_has_the_large_problem_first():
    points = measure.plan("fp32", None).points
    assert [(point.batch, point.heads, point.seqlen_q, point.is_causal) for point in points[:2]] == [
        (4, 16, 4096, False),
        (4, 16, 4096, True),
    ]
    for is_causal, count in ((None, 2), (False, 1), (True, 1)):
        plan = measure.plan("fp32", is_causal, 64)
        assert measure.large_points(plan) == list(plan.points[:count])
    assert {(point.batch, point.seqlen_q) for point in points[2:]} == {(1, 512), (1, 1024), (1, 1536), (1, 2048)}
    assert all(point.is_causal for point in measure.plan("fp32", True).points)
    wide = measure.plan("bf16", None, 128)
    assert {(point.head_dim, point.head_dim_v) for point in wide.points} == {(128, 128)}
    assert (measure.plan("bf16", None).stem, wide.stem) == ("ladder_bf16", "ladder_bf16_d128")


def test_a_head_dim_that_no_rung_takes_is_refused():
    result = ladder("--list", "--head-dim", "129")
    assert result.exit_code == 2
    assert "--head-dim: got 129; accepted: 1 to 128." in result.output


# Counters

HEADER = [
    "ID",
    "Kernel Name",
    "Metric A",
    *profiler.BYTES,
    *counters._METRICS.values(),
    *map(profiler.STALL.format, profiler.STALLS),
]


def csv_of(*kernels):
    lines = ['"' + '","'.join(HEADER) + '"', '"' + '","'.join("" for _ in HEADER) + '"']
    for name, value in kernels:
        cells = {"ID": "0", "Kernel Name": name, profiler.STALL.format("barrier"): "9"}
        lines.append('"' + '","'.join(cells.get(column, value) for column in HEADER) + '"')
    return "==PROF== Connected to process 1\n" + "\n".join(lines) + "\n==PROF== Disconnected\n"


MARKER = f"{profiler.MARKER}(int)"


@pytest.fixture
def ncu(monkeypatch):
    """Installs a fake profiler that returns the given output."""

    def answer(stdout="", stderr="", returncode=0):
        def run(command, **options):
            assert command[0] == "ncu"
            return subprocess.CompletedProcess(command, returncode, stdout, stderr)

        monkeypatch.setattr(profiler, "find", lambda: "ncu")
        monkeypatch.setattr(profiler.subprocess, "run", run)

    return answer


def test_counters_are_read(ncu):
    ncu(csv_of((MARKER, "1"), ("first", "1,234.5"), (MARKER, "1"), ("second", "2")))
    one, two = counters.profile(
        [profiler.Call("00_naive", Point()), profiler.Call("01_shared_tiles", Point())], Variables()
    )
    assert one.dram_bytes == 2469.0
    assert one.profiled_ms == 1234.5e-6
    assert two.achieved_occupancy == 0.02
    assert two.top_stall == "barrier"
    assert two.top_stall_share == pytest.approx(9 / (9 + 2 * (len(profiler.STALLS) - 1)))


def test_bytes_are_summed_over_the_kernels_of_a_call(ncu):
    ncu(csv_of((MARKER, "1"), ("a", "10"), ("b", "20"), (MARKER, "1"), ("c", "1")))
    calls = [profiler.Call("eager", Point()), profiler.Call("00_naive", Point())]
    assert counters.device_bytes(calls, Variables()) == [(60.0, 2), (2.0, 1)]


@pytest.mark.parametrize(
    ("stdout", "stderr", "returncode", "words"),
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission",
            "",
            1,
            "ERR_NVGPUCTRPERM.*Run as root, or load the driver",
        ),
        (
            "==ERROR== Failed to find metric x",
            "",
            1,
            r"got no counters from ncu \(exit status 1\): ==ERROR== Failed to find metric x",
        ),
        (csv_of((MARKER, "1")), "", 0, "got no counters"),
        ("", "Traceback: no module", 1, "no module"),
    ],
)
def test_a_profiler_that_does_not_answer(ncu, stdout, stderr, returncode, words):
    ncu(stdout, stderr, returncode)
    with pytest.raises(Unsupported, match=words):
        counters.profile([profiler.Call("00_naive", Point())], Variables())


def test_no_profiler(monkeypatch):
    monkeypatch.setattr(profiler.shutil, "which", lambda *_, **__: None)
    with pytest.raises(
        Unsupported, match=r"Nsight Compute: got no ncu on PATH; accepted: an installed one\. Install it"
    ):
        profiler.find()


# A run on the CPU in place of the GPU


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs fakes of the first two rungs on small problems, with a fake profiler."""
    point = Point(2, 2, 2, 32, 32, 16, 16)

    def attend(point, inputs):
        return Attend(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=point.is_causal))

    def fakes(names, is_baseline):
        return [Provider(name, is_baseline, attend) for name in names]

    def start(profiled=None, variables=None, **options):
        def profile(calls, variables):
            if isinstance(profiled, Exception):
                raise profiled
            return [Counters(**COUNTED) for _ in calls]

        monkeypatch.setattr(command, "gpu_settings", lambda *_: SETTINGS)
        plan = Plan(
            "ladder",
            "ladder_fp32",
            (point, replace(point, is_causal=True), replace(point, batch=1, heads=1, heads_kv=1)),
        )
        monkeypatch.setattr(measure, "plan", lambda dtype, is_causal, head_dim: plan)
        monkeypatch.setattr(
            measure, "rung_providers", lambda variables, chosen: fakes([rung.name for rung in chosen], False)
        )
        monkeypatch.setattr(measure, "baselines", lambda: fakes(["sdpa-math"], True))
        monkeypatch.setattr(command.ceilings, "measure", lambda: Ceilings(60.0, 4000.0, 30000.0))
        monkeypatch.setattr(probe, "check", lambda rung, head_dim, variables: 1e-7)
        monkeypatch.setattr(gpu, "current_arch", lambda index=0: ARCHS[90])
        monkeypatch.setattr(counters, "profile", profile)
        monkeypatch.setattr(counters, "device_bytes", lambda calls, variables: [(1e9, 3)] * len(calls))
        monkeypatch.setattr(figures, "draw", lambda source: [source.with_suffix(".png")])
        text = io.StringIO()
        job = command.Run(
            command.Options(**options),
            variables or Variables(),
            RUNGS[:2],
            tmp_path,
            ENV,
            Console(file=text, width=200),
        )
        return job.start(), text.getvalue(), {path.name for path in tmp_path.iterdir()}

    return start


def test_a_whole_run(run):
    status, text, files = run(has_profile=True)
    assert status == 0, text
    assert files == {"ladder_fp32.csv", "ladder_kernels_fp32.csv", "ladder_hbm_fp32.csv"}
    assert "ladder_hbm_fp32.png" in text
    for words in (
        "largest errors: 00_naive 1e-07",
        "Measured ceilings: 60.0 TFLOP/s",
        "x sdpa-math",
        "Counters, causal",
        "S=8192",
    ):
        assert words in text


def test_a_partial_run_keeps_the_files_of_a_full_one(run):
    for options in ({"only": "00,01"}, {"is_causal": True}, {"variables": Variables(shared_kb=48)}):
        status, text, files = run(**options)
        assert status == 0, text
        assert files == {"ladder_fp32_part.csv", "ladder_kernels_fp32_part.csv"}


def test_a_run_without_counters_says_why(run):
    status, text, files = run(profiled=Unsupported("--profile: got ERR_NVGPUCTRPERM"), has_profile=True)
    assert status == 1
    assert "--profile: got ERR_NVGPUCTRPERM" in text
    assert "ladder_fp32.csv" in files
    assert "ladder_hbm_fp32.csv" not in files


def test_a_fault_ends_the_run(run, monkeypatch):
    def fault(*_):
        raise KernelFault("own at batch 2: it wrote out of bounds")

    monkeypatch.setattr(command.Run, "_check", fault)
    status, text, files = run()
    assert (status, files) == (1, set())
    assert "own at batch 2: it wrote out of bounds" in text


# Tables and figures


def kernel_row(rung, is_causal, ms, **counted) -> RungRow:
    return RungRow(
        rung=rung.name, title=rung.title, dtype="fp32", is_causal=is_causal, batch=2, heads=2, seqlen=32,
        head_dim=16, arch="sm_90",
        block_m=64, block_n=64, num_threads=256, registers=100, spill_bytes=0, shared_bytes=70656, occupancy=0.25,
        median_ms=ms,
        tflops=10 / ms, flops=1e9, least_bytes=10**6, fma_ceiling_tflops=20.0, tensor_ceiling_tflops=600.0,
        dram_ceiling_gb_per_s=4000.0,
        shared_ceiling_gb_per_s=30000.0, env=ENV, **counted,
    )  # fmt: skip


COUNTED = {
    "profiled_ms": 1.0, "dram_bytes": 3e6, "l2_bytes": 9e9, "l2_percent": 12.0, "shared_loads": 1e7,
    "shared_wavefronts": 1e6,
    "shared_percent": 80.0, "bank_conflicts": 5e5, "achieved_occupancy": 0.2, "fma_percent": 40.0,
    "sectors_per_load": 16.0,
    "divergent_branches": 0.0, "top_stall": "mio_throttle", "top_stall_share": 0.5, "global_stall_share": 0.25,
}  # fmt: skip


@pytest.fixture
def results(tmp_path) -> Path:
    """The three CSVs of a small run on the CPU with fake kernels."""
    point = Point(2, 2, 2, 32, 32, 16, 16)
    plan = Plan(
        "ladder",
        "ladder_fp32",
        (point, replace(point, is_causal=True), Point(head_dim=16, head_dim_v=16, seqlen_q=32, seqlen_k=32)),
    )

    def call_for(point, inputs):
        return provider("x", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=point.is_causal)).build(
            point, inputs
        )

    names = [(rung.name, False) for rung in RUNGS[:2]] + [("cuda", False), ("sdpa-math", True)]
    fakes = [replace(provider(name, is_baseline=is_baseline), build=call_for) for name, is_baseline in names]
    rows = [row for found in Sweep(plan, fakes, SETTINGS, ENV).rows() for row in found]
    kernels = [
        kernel_row(rung, causal, ms, **COUNTED)
        for causal in (False, True)
        for rung, ms in zip(RUNGS, (4.0, 2.0), strict=False)
    ]
    hbm = [
        HbmRow(name, "fp32", 4, 16, size, 64, 3, factor * size, 100 * size, size * size, ENV)
        for name, factor in (("eager", 1e5), ("last", 1e3))
        for size in (512, 1024)
    ]
    for stem, kind, found in (
        ("ladder_fp32", Row, rows),
        ("ladder_kernels_fp32", RungRow, kernels),
        ("ladder_hbm_fp32", HbmRow, hbm),
    ):
        with Writer(tmp_path / f"{stem}.csv", kind) as writer:
            writer.add(found)
        assert read(tmp_path / f"{stem}.csv", kind)[0].env == ENV
    return tmp_path


def test_tables(results):
    rows, kernels = read(results / "ladder_fp32.csv", Row), read(results / "ladder_kernels_fp32.csv", RungRow)
    assert kernels[0].dram_bytes == 3e6
    table = tables.of(rows, kernels, "ladder")
    assert table.header[:6] == ("", "ms", "TFLOP/s", "of FMA ceiling", "x step before", "x sdpa-math")
    first, second, ours, baseline = table.lines
    assert first[:5] == ("00_naive", "4", "2.5", "12 %", "")
    assert second[:5] == ("01_shared_tiles", "2", "5", "25 %", "2")
    assert second[-4:] == ("100", "0", "69.0", "25 %")
    assert ours[0] == "flashtile"
    assert baseline[0] == "sdpa-math"
    assert "causal" in tables.of(rows, kernels, "ladder-causal").title
    counted = tables.of(rows, kernels, "counters").lines[0]
    assert counted[1:7] == ("3", "9", "12", "80", "0.64", "50 %")
    assert counted[-1] == "mio_throttle 50 %"
    assert tables.of(rows, [replace(kernel, **vars(Counters())) for kernel in kernels], "counters").lines == ()
    hbm = tables.hbm_table(read(results / "ladder_hbm_fp32.csv", HbmRow))
    assert hbm.lines[0] == ("S=512", "0.0512", "51.2", "0.512")
    with pytest.raises(ValueError, match="table: got 'x'"):
        tables.of(rows, kernels, "x")


def test_figures(results):
    written = [
        path
        for stem in ("ladder_fp32", "ladder_kernels_fp32", "ladder_hbm_fp32")
        for path in figures.draw(results / f"{stem}.csv")
    ]
    names = {path.name for path in written}
    assert names == {
        "ladder_fp32_times.png",
        "ladder_roofline_fp32.png",
        "ladder_00_naive.png",
        "ladder_01_shared_tiles.png",
        "ladder_hbm_fp32.png",
    }
    assert all(plots.is_current(path) for path in written)


def test_our_default_is_named_by_its_kernel(results):
    kernel = "fwd_simt_kernel tile 128 x 64, head dim 64, 4 warps"
    rows = read(results / "ladder_fp32.csv", Row)
    rows = [replace(row, detail=kernel) if row.provider == "cuda" else row for row in rows]
    assert tables.labels(rows)["cuda"] == "flashtile (fwd_simt)"
    assert tables.labels(rows)["sdpa-math"] == "sdpa-math"


def test_our_default_is_called_flashtile_in_the_figure(results, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, csv_path, name: drawn.append(figure) or csv_path)
    figures.draw(results / "ladder_fp32.csv")
    names = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert names == [*(rung.name for rung in RUNGS[:2]), "flashtile", "sdpa-math"]


def test_pages_are_filled(results, tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    (root / "docs").mkdir()
    (root / "results").mkdir()
    (root / "results" / "box").symlink_to(results)
    names = [f"box/ladder_fp32:{kind}" for kind in tables.KINDS]
    names += ["box/ladder_hbm_fp32:hbm", "rung/00_naive", "box/ladder_fp32_times.png", "box/ladder_00_naive.png"]
    page = root / "docs" / "ladder.md"
    page.write_text("".join(f"<!-- bench:{name} -->\n<!-- /bench:{name} -->\n" for name in names))
    assert make_docs(root, "--check").returncode == 1
    done = make_docs(root)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    for words in (
        "| 01_shared_tiles | 2 | 5 |",
        "mio_throttle",
        "| S=512 | 0.0512 |",
        "**Predicted.** ",
        "ladder_fp32_times.png)",
    ):
        assert words in text
    assert make_docs(root, "--check").returncode == 0


def test_a_row_of_a_kernel(monkeypatch):
    monkeypatch.setattr(gpu, "current_arch", lambda index=0: ARCHS[90])
    rung, point = rung_of("04"), replace(measure.LARGE, is_causal=True)
    row = measure.rung_row(rung, point, Variables(), None, Ceilings(60.0, 4000.0, 30000.0), Counters(), ENV)
    assert (row.block_m, row.block_n, row.num_threads, row.shared_bytes) == (64, 64, 256, 70656)
    assert row.least_bytes == 4 * 4 * 16 * 4096 * 64 * 4
    assert row.median_ms is None
    assert row.top_stall == ""
