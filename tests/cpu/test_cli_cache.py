"""`flashtile cache`: what it shows, what it removes, and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashtile.cli.main import app
from flashtile.runtime.cache import KernelCache
from flashtile.runtime.nvrtc import Compiled
from flashtile.version import __version__


def run(*options: str, status: int = 0, answer: str | None = None) -> str:
    result = CliRunner().invoke(app, ["cache", *options], input=answer)
    assert result.exit_code == status, result.output
    return result.stdout + result.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two kernels, a broken one, a toolchain's digest, what a process left unfinished, and a file of
    somebody else."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(folder))
    cache = KernelCache(folder)
    for text, arch in (("a", "sm_80"), ("b", "sm_90a")):
        cache.store(cache.key([text]), Compiled(arch, b"x" * 1000, {}, ""), "13.0")
    for name in (f"{'0' * 64}.kernel", f"{'1' * 64}.toolchain", f".{'2' * 64}.kernel.abc", "mine.kernel", "notes"):
        (folder / name).write_bytes(b"?")
    return folder


def test_it_shows_folder_size_and_versions(folder: Path) -> None:
    shown = run()
    assert shown.startswith(f"{folder}: usable\n4 kernels, 0.0 MB\n")
    facts = json.loads(run("--json"))
    assert (facts["directory"], facts["files"]) == (str(folder), 4)
    kernels = [(one["flashtile"], one["nvrtc"], one["arch"]) for one in facts["kernels"]]
    assert sorted(kernels) == [("", "", "")] * 2 + [(__version__, "13.0", "sm_80"), (__version__, "13.0", "sm_90a")]
    assert all(one["num_bytes"] > 1000 for one in facts["kernels"] if one["arch"])


def test_it_removes_what_it_wrote_and_nothing_else(folder: Path) -> None:
    assert run("--clear", "--yes") == "3 kernels removed.\n"
    assert sorted(path.name for path in folder.iterdir()) == ["mine.kernel", "notes"]
    assert json.loads(run("--clear", "--yes", "--json"))["removed"] == 0


def test_it_asks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--clear: got it where nobody can be asked" in run("--clear", status=2)
    assert "--yes: got it without --clear" in run("--yes", status=2)
    monkeypatch.setattr("flashtile.cli.cache._is_terminal", lambda: True)
    assert f"Remove 4 kernels, 0.0 MB from {folder}?" in run("--clear", status=1, answer="n\n")
    assert len(list(folder.iterdir())) == 7
    assert run("--clear", answer="y\n").endswith("3 kernels removed.\n")


def test_what_is_not_usable_is_not_touched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o755)
    assert "its mode 0755 lets others in" in run("--clear", "--yes")
    assert len(list(folder.iterdir())) == 7
    monkeypatch.setenv("FLASHTILE_CACHE", "0")
    assert run() == "no folder: off: FLASHTILE_CACHE=0\n0 kernels, 0.0 MB\n"
    monkeypatch.delenv("FLASHTILE_CACHE")
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(folder / "none"))
    folder.chmod(0o700)
    assert run().startswith(f"{folder / 'none'}: not there yet")
    assert not (folder / "none").exists()
