"""`flashtile explain`: every option reaches the function, names of GPUs, refusals in the words of the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import flashtile
from flashtile.cli.main import app
from flashtile.plans.arch import ARCHS, GPUS, arch_named, gpu_named, typical_multiprocessors


def ask(text: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["explain", *text.split()])
    assert result.exit_code == status, result.output
    return result.output


def meta(*sizes: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta", requires_grad=grad)


def test_it_prints_what_the_function_says() -> None:
    q, k, v = meta(2, 8, 512, 96, grad=True), meta(2, 2, 640, 96, grad=True), meta(2, 2, 640, 64, grad=True)
    wanted = flashtile.explain(q, k, v, causal="top_left", window=(64, -1), softcap=3.0, dropout_p=0.1, arch="A100")
    sizes = "--batch 2 --heads 8 --heads-kv 2 --seqlen-q 512 --seqlen-k 640 --head-dim 96 --head-dim-v 64"
    options = "--causal-top-left --window 64,-1 --softcap 3 --dropout-p 0.1 --pass fwd+bwd --gpu a100"
    assert ask(f"{sizes} {options}") == f"{wanted}\n"
    assert "on A100 (sm_80), layout bhsd, forward and backward" in str(wanted)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("--causal --gpu sm_90a", "causal bottom_right"),
        ("--dtype float32 --mask 1,1,4096,4096 --gpu L40S", "mask yes"),
        ("--bias 16,1,4096 --alibi --sinks --gpu cpu", "bias bfloat16, alibi yes, sinks yes"),
        ("--varlen --page-size 64 --batch 3 --gpu cpu", "varlen yes, page size 64"),
        ("--varlen --layout bshd --gpu H200", "varlen yes"),
        ("--cache --seqlen-q 1 --gpu H100", "key lengths yes"),
        ("--page-size 16 --seqlen-q 1 --seqlen-k 1000 --gpu T4 --dtype half", "key lengths yes, page size 16"),
        ("--deterministic --pass fwd+bwd --gpu cpu", "deterministic yes"),
    ],
)
def test_options(options: str, wanted: str) -> None:
    found = json.loads(ask(f"{options} --json"))
    assert wanted in found["options"]
    assert found["backend"] in ("cuda", "triton", "cpu")
    assert found["backend"] not in found["refusals"]


def test_sizes_of_packed_sequences_and_pages() -> None:
    for options in ("--varlen", "--varlen --page-size 16", "--cache", "--page-size 16"):
        given = f"{options} --batch 3 --seqlen-q 64 --seqlen-k 96 --heads-kv 4 --gpu cpu --json"
        sizes = json.loads(ask(given))["sizes"]
        assert sizes == "batch 3, heads 16 over 4, seqlen 64 x 96, head_dim 128 / 128", options


def test_a_page(tmp_path: Path) -> None:
    page = tmp_path / "explain.html"
    assert ask(f"--html {page} --gpu H100") == f"Written: {page}\n"
    assert "H100 (sm_90)" in page.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--gpu rtx4091", "--gpu: got 'rtx4091'; accepted: cpu, sm_61, "),
        ("--head-dim 600", "q: got head_dim 600; accepted: 1 to 512."),
        ("--batch 0", "--batch: got 0; accepted: an integer >= 1."),
        ("--seqlen-q -1", "--seqlen-q: got -1; accepted: an integer >= 0."),
        ("--page-size 0", "--page-size: got 0; accepted: an integer >= 1."),
        ("--dtype int8", "--dtype: got 'int8'; accepted: fp32"),
        ("--window 3", "--window: got '3'; accepted: left,right"),
        ("--mask 4xx", "--mask: got '4xx'; accepted: a shape such as"),
        ("--mask 3,4", "--mask: got shape (3, 4); accepted: "),
        ("--pass bwd", "--pass: got 'bwd'; accepted: fwd, fwd+bwd."),
        ("--causal --causal-top-left", "--causal: got it with --causal-top-left"),
        ("--cache --varlen", "--varlen: got it with --cache; accepted: one of the two"),
        ("--page-size 8 --mask 1,1,1,1", "--mask: got it with --page-size"),
        ("--cache --pass fwd+bwd", "--pass fwd+bwd: got it with --cache"),
        ("--backend numba --gpu H100", "backend: got 'numba', which refuses: it computes and stores float32"),
    ],
)
def test_refusals(options: str, words: str) -> None:
    assert words in ask(options, status=2)


def test_names_of_gpus() -> None:
    for name in ("RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "rtx-4090"):
        gpu = gpu_named(name)
        assert gpu is not None
        assert (gpu.name, gpu.number, gpu.multiprocessors) == ("RTX 4090", 89, 128)
    assert {gpu.number for gpu in GPUS} == set(ARCHS)
    assert arch_named("Tesla T4") == ARCHS[75]
    assert gpu_named("") is gpu_named("sm_90") is arch_named("V100") is None
    typical = {number: typical_multiprocessors(arch) for number, arch in ARCHS.items()}
    assert typical == {61: 28, 75: 40, 80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 170}


def test_a_named_gpu_counts_with_its_own_multiprocessors() -> None:
    """72 tiles nearly fill the 78 multiprocessors of an H20; for the 132 of an H200 smaller tiles are better."""
    q, k = meta(1, 12, 1024, 128), meta(1, 12, 4096, 128)
    small, large = (flashtile.explain(q, k, k, arch=name, deterministic=False) for name in ("H20", "H200"))
    assert small.problem.arch == large.problem.arch == "sm_90"
    assert small.details != large.details
