"""What holds for every command: interrupts, exit statuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from flashtile.cli import check as check_command
from flashtile.cli.main import app

PROGRAM = [sys.executable, "-c", "from flashtile_command import main; main()"]


@pytest.mark.parametrize("seconds", [0.3, 1.0])
def test_an_interrupt_while_torch_is_imported_is_quiet(seconds: float) -> None:
    started = subprocess.Popen(
        [*PROGRAM, "check", "--device", "cpu"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    time.sleep(seconds)
    os.killpg(started.pid, signal.SIGINT)
    out, err = started.communicate(timeout=60)
    assert started.returncode == -signal.SIGINT
    assert (out, err) == (b"", b"")


def test_an_interrupt_while_workers_start_is_quiet() -> None:
    started = subprocess.Popen(
        [*PROGRAM, "check", "--device", "cpu", "--jobs", "2", "--backends", "reference"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert started.stdout is not None
    while "seed" not in started.stdout.readline():
        pass
    time.sleep(0.5)
    os.killpg(started.pid, signal.SIGINT)
    out, err = started.communicate(timeout=120)
    assert started.returncode == 130
    assert "Interrupted after 0 problems." in out
    assert "Nothing was checked" not in out
    assert "Traceback" not in out + err


def test_an_error_of_the_check_itself_is_not_a_backend_that_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("not thought of")

    monkeypatch.setattr(check_command, "check", fail)
    result = CliRunner().invoke(app, ["check", "--device", "cpu", "--problems", "1"])
    assert result.exit_code == 2
    assert "not thought of" in result.output
