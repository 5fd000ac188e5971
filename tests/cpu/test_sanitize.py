"""tools/sanitize.py without a GPU: it reaches every row of the table, reads what the tools say, and says what is missing."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch

from flashtile.kernels import table
from flashtile.kernels.arch import ARCHS
from flashtile.kernels.mutation import mutations
from flashtile.kernels.spec import Features

TOOL = Path(__file__).resolve().parents[2] / "tools" / "sanitize.py"
ARCH = ARCHS[90]


@pytest.fixture
def sanitize(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: divmod(ARCH.number, 10))
    spec = importlib.util.spec_from_file_location("sanitize", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_row_is_chosen(sanitize, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = set()

    def warm(trial, backends, device):
        case = trial.case
        dtype = str(case.dtype).removeprefix("torch.")
        for kernel in sanitize.BIAS_KERNELS if case.bias else sanitize.PLAIN_KERNELS:
            features = Features(bias_dtype=dtype if case.bias else None)
            chosen.add(table.select(kernel, dtype, dtype, case.head_dim, features, ARCH))

    monkeypatch.setattr(sanitize, "warm", warm)
    monkeypatch.setattr(sanitize, "special_trials", list)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    select = table.select
    sanitize.run_rows(table.DTYPES, table.HEAD_DIMS, 1)
    assert table.select is select
    expected = set()
    for dtype, head_dim, kernels in itertools.product(table.DTYPES, table.HEAD_DIMS, table.PASSES.values()):
        for kernel in kernels:
            features = Features(bias_dtype=dtype if "dbias" in kernel else None)
            expected |= {row for row in table.candidates(kernel, dtype, dtype, head_dim, features) if table.fits(row, ARCH)}
    assert chosen == expected


def test_each_tool_has_a_fault(sanitize) -> None:
    tools = {mutation.name: mutation.tool for mutation in mutations()}
    for tool, (fault, _) in sanitize.TOOLS.items():
        assert tools[fault] in (tool, None)


@pytest.mark.parametrize(
    ("tool", "output", "errors"),
    [
        ("memcheck", "launched a<1>\nlaunched b<2>\n========= ERROR SUMMARY: 0 errors", 0),
        ("memcheck", "========= COMPUTE-SANITIZER\n========= Invalid __global__ write\n========= ERROR SUMMARY: 3 errors", 3),
        ("racecheck", "========= RACECHECK SUMMARY: 7 hazards displayed (7 errors, 0 warnings)", 7),
        ("synccheck", "Device not supported", None),
    ],
)
def test_what_a_tool_says(sanitize, tmp_path: Path, tool: str, output: str, errors: int | None) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    program.chmod(0o755)
    found = sanitize.watch(str(program), tool, ["--rows"])
    assert found["errors"] == errors
    assert found["kernels"] == (["a<1>", "b<2>"] if "launched" in output else [])
    assert bool(found["said"]) == (errors != 0)


def test_runs_of_one_tool_count_as_one(sanitize) -> None:
    runs = [
        {"errors": errors, "kernels": kernels, "seconds": 1.0, "said": ""} for errors, kernels in ((0, ["a"]), (2, ["a", "b"]), (None, []))
    ]
    assert sanitize.joined(runs[:2]) == {"errors": 2, "kernels": ["a", "b"], "seconds": 1.0, "said": ""}
    assert sanitize.joined(runs)["errors"] is None


def test_what_is_missing(sanitize, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sanitize.main([]) == 2
    assert "no GPU" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize.shutil, "which", lambda *_, **__: None)
    assert sanitize.main([]) == 2
    assert "compute-sanitizer: not found. It comes with the CUDA toolkit; put its bin folder on PATH." in capsys.readouterr().err
    assert sanitize.main(["--tools", "valgrind"]) == 2
    assert "--tools: got valgrind; accepted: memcheck, racecheck, initcheck, synccheck." in capsys.readouterr().err
