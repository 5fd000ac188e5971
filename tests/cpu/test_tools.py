"""The command line and the layer check."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from ptx import copy_headers
from typer.testing import CliRunner

import flashtile
from flashtile.cli.main import app
from flashtile.runtime import nvrtc

ROOT = Path(__file__).resolve().parents[2]


def test_info_names_every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_STRICT", "1")
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0
    for word in ("tiled", "reference", "torch", "FLASHTILE_STRICT", flashtile.__version__):
        assert word in result.output


def test_info_as_json() -> None:
    result = CliRunner().invoke(app, ["info", "--json"])
    facts = json.loads(result.output)
    assert facts["backends"]["tiled"]["cpu"] == "works"
    assert facts["backends"]["cpu"] == {"cpu": "works", "cuda": "no: it runs on cpu"}
    assert facts["extension"]["path"].endswith(".so")
    assert facts["extension"]["instruction_sets"][-1] == "baseline"
    assert facts["flashtile"] == flashtile.__version__


def test_info_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    facts = json.loads(CliRunner().invoke(app, ["info", "--json"]).output)
    assert facts["gpus"] == []
    assert facts["backends"]["tiled"]["cuda"].startswith("no: ")


def test_info_says_why_there_is_no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtile.runtime import extension

    monkeypatch.setattr(extension, "missing", lambda: "nobody built it")
    facts = json.loads(CliRunner().invoke(app, ["info", "--json"]).output)
    assert facts["extension"] == {"path": None, "instruction_sets": [], "reason": "nobody built it"}
    assert facts["backends"]["cpu"]["cpu"] == "no: nobody built it"
    assert "none: nobody built it" in CliRunner().invoke(app, ["info"]).output


def test_version_and_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "flashtile", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == f"flashtile {flashtile.__version__}"


def layers():
    spec = importlib.util.spec_from_file_location("check_layers", ROOT / "tools" / "check_layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_layers_are_clean() -> None:
    assert layers().check(ROOT / "src" / "flashtile") == []


@pytest.mark.parametrize(
    ("path", "line", "complaint"),
    [
        ("problem.py", "from flashtile.api import attention", "problem imports api"),
        ("problem.py", "from flashtile import attention", "problem imports __init__"),
        ("backends/tiled.py", "def f():\n    import flashtile.ops", "backends imports ops"),
        (
            "api.py",
            "import flashtile.runtime.nvrtc",
            "only backends, cli, lab.ladder, lab.profile, lab.tiles may import runtime",
        ),
        ("plans/host.py", "from flashtile.families import assemble", "plans imports families"),
        ("families/simt/__init__.py", "from flashtile.backends import cuda", "families imports backends"),
        ("families/fwd_simt/family.py", "import flashtile.runtime.nvrtc", "may import runtime"),
        ("api.py", "from . import ops", "relative import"),
        ("news.py", "import os", "news is in no layer"),
        ("lab/bench/run.py", "from flashtile.lab.ladder import steps", "lab.bench imports lab.ladder"),
        ("lab/check/draw.py", "from flashtile.lab import bench", "lab.check imports lab.bench"),
        ("lab/bench/run.py", "import flashtile.runtime.cache", "lab.tiles may import runtime"),
        ("lab/news.py", "import os", "lab.news is in no layer"),
        ("api.py", "from flashtile.lab.bench import rows", "api imports lab.bench"),
        ("api.py", "from flashtile.lab import bench", "api imports lab.bench"),
        ("integrations/vllm.py", "import flashtile.lab", "integrations imports lab.__init__"),
    ],
)
def test_the_layer_check_finds_violations(path: str, line: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "flashtile" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(line + "\n")
    (found,) = layers().check(tmp_path / "flashtile")
    assert complaint in found


def test_kernels_that_differ_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A planted fault changes the PTX of the mma.sync forward; another name of a kernel does not count."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    compare = importlib.import_module("compare_kernels")
    assert compare.masked(b".entry _Z3one(// _Z3one\n_Z3one _Z3two") == compare.masked(b".entry _Z1a(\n_Z1a _Z1b")
    assert compare.masked(b"_Z3one _Z3two") != compare.masked(b"_Z3one _Z3one")

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["", "--archs", "sm_80", "--sample", "0.005", "--jobs", "1", *arguments])
        return compare.main()

    before = str(tmp_path / "before.csv")
    assert run("--write", before) == 0
    assert run("--against", before) == 0
    headers = tmp_path / "include"
    copy_headers(headers)
    monkeypatch.setattr(nvrtc, "INCLUDE", headers)
    math = headers / "device" / "core" / "math.cuh"
    math.write_text(math.read_text().replace("ex2.approx.ftz.f32", "lg2.approx.ftz.f32"))
    assert run("--against", before) == 1
    assert "differs: sm_80" in capsys.readouterr().out
