"""`flashtile bench`, called as a command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flashtile.cli.main import app
from flashtile.lab.bench import device, plots
from flashtile.lab.bench.rows import Row, read

SMALL = ["bench", "--seqlens", "48,32", "--seconds", "0.002", "--backends", "tiled,sdpa-math", "--call-limit", "1000"]


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_it_runs_on_the_cpu_and_says_so(tmp_path: Path):
    result = invoke(*SMALL, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert sum("running on the CPU" in line for line in result.output.splitlines()) == 1
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"sdpa_Lsweep_B1_H1_d64_fp32.csv", "latency_vs_L.png", "memory_vs_L.png", "throughput_vs_L.png"}
    rows = read(tmp_path / "sdpa_Lsweep_B1_H1_d64_fp32.csv", Row)
    assert [(row.provider, row.seqlen_k, row.status) for row in rows] == [
        ("tiled", 32, "ok"),
        ("sdpa-math", 32, "ok"),
        ("tiled", 48, "ok"),
        ("sdpa-math", 48, "ok"),
    ]
    assert "flashtile (tiled) over sdpa-math" in result.output
    assert all(plots.is_current(tmp_path / name) for name in names if name.endswith(".png"))
    assert str(tmp_path) not in (tmp_path / "sdpa_Lsweep_B1_H1_d64_fp32.csv").read_text()


def test_json_is_alone_on_stdout(tmp_path: Path):
    result = invoke(*SMALL, "--out", tmp_path, "--json", "--causal", "--pass", "bwd", "--dtype", "bfloat16")
    payload = json.loads(result.stdout)
    assert [row["status"] for row in payload["rows"]] == ["ok"] * 4
    assert payload["ratios"][0]["num_points"] == 2
    assert (tmp_path / "sdpa_Lsweep_B1_H1_d64_bf16_causal_bwd.csv").exists()


def test_without_matplotlib_the_csv_is_written_and_a_hint_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    result = invoke(*SMALL, "--out", tmp_path)
    assert result.exit_code == 0
    assert "pip install 'flashtile[bench]'" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["sdpa_Lsweep_B1_H1_d64_fp32.csv"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--device", "cuda"], "--device: got cuda, and"),
        (["--device", "tpu"], "--device: got 'tpu'; accepted: cpu or cuda"),
        (["--graph"], "--graph: got it on cpu"),
        (["--dtype", "int4"], "--dtype: got 'int4'"),
        (["--pass", "sideways"], "--pass: got 'sideways'; accepted: fwd, bwd, fwd+bwd"),
        (["--grid", "large"], "--grid: got 'large'; accepted: paper, decode"),
        (["--heads", "4", "--heads-kv", "3"], "--heads-kv: got 3 (int); accepted: a divisor of --heads 4"),
        (["--seqlens", "12,x"], "--seqlens: got '12,x'"),
        (["--seqlens", "12,\u00b2"], "--seqlens: got '12,\u00b2'"),
        (["--backends", "nobody"], "--backends: got 'nobody'"),
        (["--batch", "0"], "--batch: got 0"),
        (["--seconds", "nan"], "--seconds: got nan; accepted: a number of seconds above 0"),
        (["--seconds", "-1"], "--seconds: got -1"),
        (["--call-limit", "nan"], "--call-limit: got nan"),
        (["--compile-limit", "inf"], "--compile-limit: got inf"),
        (["--grid", "paper", "--causal"], "--causal: got it with --grid paper; accepted: a length sweep"),
        (["--grid", "decode", "--pass", "bwd"], "--pass: got 'bwd' with --grid decode; accepted: fwd"),
    ],
)
def test_what_it_cannot_do_is_refused_before_anything_is_measured(arguments: list[str], complaint: str, tmp_path: Path):
    result = invoke("bench", "--out", tmp_path / "new", *arguments)
    assert result.exit_code == 2
    assert complaint in result.output
    assert not (tmp_path / "new").exists()


def test_an_unwritable_folder_is_refused_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flashtile.lab.bench.command.run_sweep", lambda *_: pytest.fail("it measured"))
    (tmp_path / "file").write_text("")
    result = invoke(*SMALL, "--out", tmp_path / "file" / "results")
    assert result.exit_code == 2
    assert "--out: got " in result.output
    assert "accepted: a folder that can be written" in result.output


def test_lengths_that_do_not_fit_into_memory_are_rows_of_their_own(tmp_path: Path):
    result = invoke("bench", "--seqlens", "16,1000000000", *SMALL[3:], "--out", tmp_path)
    assert result.exit_code == 0, result.output
    rows = read(tmp_path / "sdpa_Lsweep_B1_H1_d64_fp32.csv", Row)
    assert [row.status for row in rows] == ["ok", "ok", "oom", "oom"]


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert invoke(*SMALL, "--out", "~/here").exit_code == 0
    assert (tmp_path / "here" / "sdpa_Lsweep_B1_H1_d64_fp32.csv").exists()


def test_two_runs_are_compared(tmp_path: Path):
    for name in ("a", "b"):
        assert invoke(*SMALL, "--out", tmp_path / name).exit_code == 0
    csv = "sdpa_Lsweep_B1_H1_d64_fp32.csv"
    result = invoke("bench", "--compare", tmp_path / "a" / csv, tmp_path / "b" / csv, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "geometric mean" in result.output
    (written,) = tmp_path.glob("compare_*.csv")
    assert len(written.read_text().splitlines()) == 5
    assert invoke("bench", "--compare", tmp_path / "a" / csv, tmp_path / "none.csv").exit_code == 2


def test_the_recorded_command_names_no_path_of_this_machine():
    recorded = device.command_line(["bench", "--out", "/home/me/x", "--out=/srv/y", "--backends", "ours", "results/a"])
    assert recorded == "flashtile bench --out x --out=y --backends ours results/a"
    assert device.command_line(["--out", "/home/me/a b"], "python tools/x.py") == "python tools/x.py --out 'a b'"


def test_the_commit_of_the_source_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FLASHTILE_COMMIT", raising=False)
    source = Path(device.__file__).parents[4]
    answers = {"--show-toplevel": str(source), "--porcelain": "", "HEAD": "0123456789ab"}
    monkeypatch.setattr(device, "_output", lambda command: next(answers[word] for word in command if word in answers))
    assert device._commit() == ("0123456789ab", False)
    answers["--show-toplevel"] = str(tmp_path)  # installed below somebody's own repository
    assert device._commit() == ("", False)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("Intel Xeon @ 2.80GHz", "cpu-intel-xeon-2.80ghz"),
        ("AMD EPYC 9554 64-Core", "cpu-amd-epyc-9554"),
    ],
)
def test_the_folder_is_named_after_the_device(name: str, slug: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "_cpu_name", lambda: name)
    assert device.slug("cpu") == slug
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert device.slug("cuda") == "nvidia-h200"
