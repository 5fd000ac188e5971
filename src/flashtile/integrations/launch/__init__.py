"""Starts a program whose code cannot be changed, with flashtile in its place in every Python process of it.

    python -m flashtile.integrations.launch [options] command [arguments]
    python -m flashtile.integrations.launch --transformers trl sft --attn_implementation flashtile ...

    --transformers    registers attn_implementation="flashtile"; what is done without an option
    --install         flashtile.install(): torch's attention operators
    --flash-attn      flash_attn.install(): `import flash_attn`
    --xformers        xformers.install(): `import xformers`
    --print-env       prints the variables that do it, for a shell's eval, instead of starting a command

A command that is a .py file or begins with -m is run by this Python. The processes that it starts get the environment
with it: those of torchrun, accelerate, multiprocessing and Ray on this machine. Python started with -E, -I or -S does
not look at it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flashtile.backends.environment import LAUNCHED
from flashtile.errors import value_error

# What startup/sitecustomize.py reads
VARIABLE = "FLASHTILE_LAUNCH"
STARTUP = Path(__file__).parent / "startup"
OPTIONS = {f"--{door.replace('_', '-')}": door for door in LAUNCHED}


def variables(doors: Sequence[str], path: str) -> dict[str, str]:
    """The environment variables that open these doors; path: PYTHONPATH before."""
    return {VARIABLE: ",".join(doors), "PYTHONPATH": os.pathsep.join(filter(None, [str(STARTUP), path]))}


def parsed(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Returns the doors to open, whether to print the variables, and the command."""
    doors, rest, prints = [], list(arguments), False
    while rest and rest[0].startswith("--"):
        option = rest.pop(0)
        if option == "--":
            break
        if option == "--print-env":
            prints = True
        elif option in OPTIONS:
            doors.append(OPTIONS[option])
        else:
            raise value_error("option", option, f"{', '.join(OPTIONS)}, --print-env, and then a command")
    if prints == bool(rest):
        raise value_error("command", repr(shlex.join(rest)), "a command, or --print-env without one")
    return list(dict.fromkeys(doors)) or ["transformers"], prints, rest


def command_line(command: Sequence[str]) -> list[str]:
    """The command as the system starts it."""
    is_pythons = command[0] == "-m" or command[0].endswith(".py")
    return [sys.executable, *command] if is_pythons else list(command)


def main(arguments: Sequence[str]) -> int:
    if list(arguments) in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    try:
        doors, prints, command = parsed(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    added = variables(doors, os.environ.get("PYTHONPATH", ""))
    if prints:
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in added.items()))
        return 0
    line, environment = command_line(command), os.environ | added
    sys.stdout.flush()
    if os.name == "nt":  # exec would end this process before the program does
        return subprocess.call(line, env=environment)
    try:
        os.execvpe(line[0], line, environment)
    except OSError as error:
        print(f"{line[0]}: {error.strerror}", file=sys.stderr)
        return 127
