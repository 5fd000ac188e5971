"""Installs flashtile in six ways, each in a virtual environment of its own, and looks at what came of it.

.venv/bin/python tools/try_install.py [way ...]        or: make test-install

    pip           `pip install .` where torch is installed: with the extension
    no-torch      where it is not: fails with one clear message, before anything of the dependencies is downloaded;
                  FLASHTILE_EXTENSION=0 installs pure Python
    uv            `uv pip install .` fails alike; with --no-build-isolation it installs the extension
    sdist         a source distribution, and the wheel built from it: with the extension
    wheels        the pure-Python wheel of `make wheels` and the one of the sdist side by side: pip takes the one with
                  the extension, and the pure one on another platform
    no-compiler   fails alike; FLASHTILE_EXTENSION=0 installs pure Python

Packages are not downloaded again: the environments link to those of the Python that runs this script, which needs
build and uv (requirements-dev.txt). Only what an isolated build asks for comes from the package index.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What a user's environment would not have, or what would decide the result
UNSET = ("PYTHONPATH", "FLASHTILE_EXTENSION", "FLASHTILE_ARCHS", "CXX", "CC", "VIRTUAL_ENV")
NOT_LINKED = ("flashtile", "__editable__", "__pycache__", "pip", "distutils-precedence")
# What Python before 3.12 puts into new environments
OLD = ("setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")
USE = """
import sys, torch, flashtile
from flashtile.runtime import extension
assert flashtile.__file__.startswith(sys.prefix), flashtile.__file__
q = torch.randn(1, 2, 8, 16)
out = flashtile.attention(q, q, q, causal=True)
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))
print("extension" if extension.missing() is None else "pure")
"""
NO_EXTENSION = "flashtile: the C++ extension cannot be built: "
WAY_OUT = "set FLASHTILE_EXTENSION=0."


class Unexpected(Exception):  # noqa: N818, what a way of installing may be
    """An installation came out other than it should."""


def expect(condition: bool, what: str, output: str = "") -> None:
    if not condition:
        raise Unexpected(f"{what}\n{output}" if output else what)


class Place:
    """A folder with a copy of the source, and virtual environments."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source = folder, folder / "source"
        tracked = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        for name in filter(None, tracked.split("\0")):
            if (ROOT / name).is_file() and not name.startswith("results/"):
                (self.source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.source / name)

    def environment(self, name: str, has_packages: bool = True) -> Path:
        """Creates an environment, with links to the packages of this one, and returns its Python."""
        where = self.folder / name
        subprocess.run([sys.executable, "-m", "venv", str(where)], check=True)
        python = where / "bin" / "python"
        if has_packages:
            site = subprocess.run(
                [str(python), "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"],
                capture_output=True, text=True, check=True,
            ).stdout.strip()  # fmt: skip
            for entry in Path(site).iterdir():
                if entry.name.startswith(OLD):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            for entry in Path(sysconfig.get_path("platlib")).iterdir():
                if not entry.name.startswith(NOT_LINKED):
                    (Path(site) / entry.name).symlink_to(entry)
        return python

    def run(self, *command: str | Path, folder: Path | None = None, **variables: str) -> tuple[int, str]:
        """Status and output of a command in the source folder."""
        environment = {name: value for name, value in os.environ.items() if name not in UNSET}
        environment |= {"UV_CACHE_DIR": str(self.folder / "uv-cache"), "OMP_NUM_THREADS": "1", **variables}
        done = subprocess.run(
            [str(part) for part in command], cwd=folder or self.source, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return done.returncode, done.stdout

    def install(self, *command: str | Path, **variables: str) -> None:
        status, output = self.run(*command, **variables)
        expect(status == 0, "the installation failed", output)

    def refused(self, *command: str | Path, reason: str, **variables: str) -> str:
        """The installation fails, and its output has the one line that says why and what to do. Returns the output."""
        status, output = self.run(*command, **variables)
        said = " ".join(output.split())
        expect(status != 0, "the installation succeeded without the extension", output)
        for words in (NO_EXTENSION, reason, WAY_OUT):
            expect(words in said, f"the output does not say {words!r}", output)
        return output

    def check(self, python: Path, has_extension: bool, is_used: bool = True) -> str:
        """What is installed is what the tag says, and works. Returns the tag."""
        files = "import importlib.metadata as m; d = m.distribution('flashtile'); print(d.locate_file(''))"
        status, output = self.run(python, "-I", "-c", files, folder=self.folder)
        expect(status == 0, "flashtile is not installed", output)
        installed = Path(output.strip())
        wheel = next(installed.glob("flashtile-*.dist-info/WHEEL")).read_text()
        tag = next(line.removeprefix("Tag: ") for line in wheel.splitlines() if line.startswith("Tag: "))
        expect(tag.startswith("cp310-abi3-") if has_extension else tag == "py3-none-any", f"its tag is {tag}")
        expect(bool(list((installed / "flashtile").glob("_C.*"))) == has_extension, "the extension is not as tagged")
        expect(not (installed / "flashtile" / "csrc").exists(), "it holds the C++ sources")
        if is_used:
            status, output = self.run(python, "-I", "-c", USE, folder=self.folder)
            expect(status == 0 and output.split()[-1] == ("extension" if has_extension else "pure"), "it fails", output)
            status, output = self.run(python.with_name("flashtile"), "--version", folder=self.folder)
            expect(status == 0 and output.startswith("flashtile "), "its command fails", output)
        return tag


def with_pip(place: Place) -> str:
    python = place.environment("pip")
    place.install(python, "-m", "pip", "install", ".")
    return place.check(python, has_extension=True)


def without_torch(place: Place) -> str:
    python = place.environment("no-torch", has_packages=False)
    command = (python, "-m", "pip", "install", ".")
    output = place.refused(*command, reason="torch 2.10 or newer is not there")
    expect("Collecting" not in output, "dependencies were looked at before the build failed", output)
    place.install(*command, "--no-deps", FLASHTILE_EXTENSION="0")
    return place.check(python, has_extension=False, is_used=False)


def with_uv(place: Place) -> str:
    python = place.environment("uv")
    command = (Path(sys.executable).with_name("uv"), "pip", "install", "--python", python, "--no-deps", ".")
    place.refused(*command, reason="`uv pip install --no-build-isolation .`")
    place.install(*command, FLASHTILE_EXTENSION="0")
    place.check(python, has_extension=False)
    # Not the wheel that uv has kept
    place.install(*command, "--no-build-isolation", "--reinstall-package", "flashtile")
    return place.check(python, has_extension=True)


def from_sdist(place: Place) -> str:
    python = place.environment("sdist")
    place.install(python, "-m", "build", "--no-isolation", "--outdir", place.folder / "dist")
    (archive,) = (place.folder / "dist").glob("flashtile-*.tar.gz")
    with tarfile.open(archive) as content:
        names = content.getnames()
    expect(any("/csrc/" in name and name.endswith(".cpp") for name in names), "the source distribution has no csrc/")
    expect(not any(name.endswith(".so") for name in names), "the source distribution holds a library")
    (wheel,) = (place.folder / "dist").glob("flashtile-*.whl")
    place.install(python, "-m", "pip", "install", wheel)
    return place.check(python, has_extension=True)


def from_wheels(place: Place) -> str:
    python, folder = place.environment("wheels"), place.folder / "wheels-dist"
    # The sdist of `sdist`, if that has run: it has built the wheel with the extension
    if not list((place.folder / "dist").glob("*.whl")):
        place.install(python, "-m", "build", "--no-isolation", "--wheel", "--outdir", place.folder / "dist")
    folder.mkdir()
    (built,) = (place.folder / "dist").glob("flashtile-*.whl")
    shutil.copy2(built, folder)
    build = ("setup.py", "--quiet", "build", "--build-base", place.folder / "pure", "bdist_wheel", "--dist-dir", folder)
    place.install(python, *build, FLASHTILE_EXTENSION="0")
    command = (python, "-m", "pip", "install", "--no-index", "--find-links", folder, "flashtile")
    place.install(*command)
    tag = place.check(python, has_extension=True)
    windows = ("--platform", "win_amd64", "--only-binary", ":all:", "--no-deps", "--target", place.folder / "windows")
    place.install(*command, *windows)
    expect((place.folder / "windows" / "flashtile" / "api.py").is_file(), "the pure wheel was not installed")
    expect(not list((place.folder / "windows" / "flashtile").glob("_C.*")), "Windows got the extension")
    return tag


def without_compiler(place: Place) -> str:
    python = place.environment("no-compiler")
    command = (python, "-m", "pip", "install", ".")
    path = str(python.parent)
    place.refused(*command, reason="there is no C++ compiler", PATH=path)
    place.install(*command, PATH=path, FLASHTILE_EXTENSION="0")
    return place.check(python, has_extension=False)


WAYS: dict[str, Callable[[Place], str]] = {
    "pip": with_pip,
    "no-torch": without_torch,
    "uv": with_uv,
    "sdist": from_sdist,
    "wheels": from_wheels,
    "no-compiler": without_compiler,
}


def main() -> int:
    chosen = sys.argv[1:] or list(WAYS)
    unknown = [name for name in chosen if name not in WAYS]
    if unknown:
        sys.exit(f"way: got {', '.join(unknown)}; accepted: {', '.join(WAYS)}.")
    num_failed = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        for name in chosen:
            start = time.monotonic()
            try:
                words = WAYS[name](place)
            except Unexpected as error:
                words, num_failed = f"FAILED: {error}", num_failed + 1
            print(f"{name}: {words} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{len(chosen) - num_failed} passed, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
