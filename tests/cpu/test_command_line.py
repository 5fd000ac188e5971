"""What holds for every command: interrupts, exit statuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flashtile
from flashtile.cli import check as check_command
from flashtile.cli.main import app

COMMANDS = (
    *("info", "compile", "check", "bench", "ladder", "profile", "report"),
    *("distributed", "distributed simulate", "distributed check"),
)
PROGRAM = [sys.executable, "-c", "from flashtile_command import main; main()"]


def test_the_commands_start_without_dynamo() -> None:
    """Its import takes longer than torch's own."""
    code = "import sys, flashtile.cli.main; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ("--help", 0, "Benchmark attention against its peers"),
        ("--version", 0, f"flashtile {flashtile.__version__}"),
        *((f"{name} --help", 0, "Usage: ") for name in COMMANDS),
        ("benhc", 2, "No such command 'benhc'"),
        ("distributed simulat", 2, "No such command 'simulat'"),
        ("bench --ful", 2, "No such option"),
        ("bench --batch one", 2, "'--batch'"),
        ("bench --compare a.csv", 2, "--compare"),
    ],
)
def test_the_parser_needs_no_torch(arguments: str, status: int, text: str) -> None:
    code = """
import sys
from flashtile_command import main
try:
    main()
except SystemExit as ended:
    assert not {"torch", "flashtile.errors"} & set(sys.modules)
    raise"""
    ended = subprocess.run([*PROGRAM[:-1], code, *arguments.split()], capture_output=True, text=True)
    assert ended.returncode == status, ended.stderr
    assert text in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.fixture
def interruptible():
    """Processes started inside do not ignore interrupts, as the background jobs of a shell do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("module", ["torch", "torch.nn", "flashtile.cli.check"])
def test_an_interrupt_while_torch_is_imported_is_quiet(module: str) -> None:
    """It comes as soon as the module is looked for."""
    code = f"""
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "{module}": os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
{PROGRAM[-1]}"""
    ended = subprocess.run([*PROGRAM[:-1], code, "check", "--device", "cpu", "--problems", "1"], capture_output=True)
    assert ended.returncode == -signal.SIGINT
    assert (ended.stdout, ended.stderr) == (b"", b"")


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_workers_start_is_quiet() -> None:
    """It comes to all processes when they are waited for."""
    code = f"""
import os, signal
from flashtile.lab.check import workers
as_done = workers.as_done
def interrupted(*arguments):
    os.killpg(0, signal.SIGINT)
    yield from as_done(*arguments)
workers.as_done = interrupted
{PROGRAM[-1]}"""
    ended = subprocess.run(
        [*PROGRAM[:-1], code, "check", "--device", "cpu", "--jobs", "2", "--backends", "reference"],
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    assert ended.returncode == 130, ended.stdout + ended.stderr
    assert "Interrupted after 0 problems." in ended.stdout
    assert "Nothing was checked" not in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


def test_an_error_of_the_check_itself_is_not_a_backend_that_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("not thought of")

    monkeypatch.setattr(check_command, "check", fail)
    result = CliRunner().invoke(app, ["check", "--device", "cpu", "--problems", "1"])
    assert result.exit_code == 2
    assert "not thought of" in result.output


def test_info_writes_a_page_and_prints_json(tmp_path: Path) -> None:
    page = tmp_path / "info.html"
    result = CliRunner().invoke(app, ["info", "--json", "--html", str(page)])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["executor"]["language"] in ("c++", "python")
    assert "<html" in page.read_text()
    assert f"Written: {page}" in result.stderr


def test_info_cuts_no_text_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0
    assert "FLASHTILE_FAMILY" in result.stdout
    assert "\N{HORIZONTAL ELLIPSIS}" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["check", "--device", "cpu", "--backends", "bogus"],
            "--backends: got 'bogus'; accepted: those for cpu here: ",
        ),
        (["distributed", "check", "--ranks", "1", "--seconds", "-1"], "--seconds: got -1.0; accepted: 0 or more."),
        (["distributed", "check", "--ranks", "1", "--seconds", "nan"], "--seconds: got nan; accepted: 0 or more."),
        (
            ["check", "--device", "cpu", "--case", "", "--problems", "3", "--seed", "0", "--pass", "forward"],
            "--case: got it with --problems, --seed, --pass; accepted: --case without them",
        ),
        (
            ["check", "--device", "cpu", "--case", "", "--decode", "--mutate", "all"],
            "--case: got it with --decode, --mutate; accepted: --case without them",
        ),
        (
            ["check", "--device", "cpu", "--case", "", "--float32"],
            "--case: got it with --float32; accepted: --case without them",
        ),
        (
            ["bench", "--compare", "a.csv", "b.csv", "--full"],
            "--compare: got options of a sweep beside it; accepted: --out and --json. Drop the others.",
        ),
        (["bench", "--compare", "a.csv", "b.csv", "--tiles"], "--compare: got options of a sweep beside it"),
        (["distributed", "simulate", "--head-dim", "600"], "--head-dim: got 600; accepted: 1 to 512."),
    ],
    ids=str,
)
def test_a_bad_option_is_refused_by_its_name(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(text)


@pytest.mark.parametrize("names", ["", " ,"])
def test_a_hunt_for_no_fault_is_refused(names: str) -> None:
    with pytest.raises(ValueError, match=r"--mutate: got '.*'; accepted: all, or some of "):
        check_command._faults(names, None)
