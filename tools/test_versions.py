"""The CPU tests and tests/integrations under several versions of torch, all from one wheel.

python tools/test_versions.py [version ...] [--jobs 2] [-- pytest options]        or: make test-versions

A version is one of torch (2.10.0), or `newest`. Each has an environment of its own, .venv-versions/<version>, with the
newest transformers and diffusers that work with it; every run asks the package index again. The first version builds
the wheel, all of them install it. Ends with a table and the reasons of what was skipped; exits 1 if a test failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from try_wheel import LOAD_CHECK

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS, BUILD = ROOT / ".venv-versions", ROOT / "build" / "versions"
NEWEST = "newest"
REQUIREMENTS = ("requirements-dev.txt", "requirements-integrations.txt")
# Of those, without their versions: the newest are wanted, or each torch has its own
NEWEST_OF = ("transformers", "diffusers")
TORCHS_OWN = ("triton", "setuptools", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
SHOWN = ("torch", "transformers", "diffusers")
RESULTS = ("passed", "failed", "skipped")
# Of tests/cpu. To these it makes no difference which torch is there: they compile or choose kernels, make tables
# or pages, or try the build
LEFT_OUT = """
    bench_docs bench_float32 bench_options bench_rows bench_serving cli_compile csv_tables embedded format_docs
    gpu_tests headers item_walk kernels key_order ladder markup mutations profile report runtime_cache runtime_nvrtc
    runtime_toolchain sanitize setup sm80 tile_order tiles timeline tools words
"""
# What would put another flashtile or other options in place of those that users get
UNSET = ("PYTHONPATH", "PYTEST_ADDOPTS")


def variables() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    return {name: value for name, value in kept.items() if not name.startswith("FLASHTILE_")} | {"OMP_NUM_THREADS": "1"}


def call(python: Path, *arguments: str | Path, **more: str) -> str:
    """Runs Python; the last line that it prints. Ends this script where it fails."""
    command = [str(python), *(str(argument) for argument in arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=variables() | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: failed\n{done.stdout}")
    return done.stdout.strip().rpartition("\n")[2]


def environment(version: str) -> Path:
    """The Python of the version's environment, with everything but flashtile installed."""
    python = ENVIRONMENTS / version / "bin" / "python"
    if not python.exists():
        call(Path(sys.executable), "-m", "venv", python.parent.parent)
    lines = {line for name in REQUIREMENTS for line in (ROOT / name).read_text().splitlines() if "==" in line}
    free = re.compile(rf"^({'|'.join(NEWEST_OF + TORCHS_OWN)})==[^;\s]+")
    torch = "torch" if version == NEWEST else f"torch=={version}"
    call(python, "-m", "pip", "install", "--quiet", "--upgrade", torch, *sorted(free.sub(r"\1", x) for x in lines))
    return python


def build(python: Path) -> Path:
    """A wheel, by this environment's torch."""
    shutil.rmtree(BUILD, ignore_errors=True)
    folders = ("--build-base", BUILD, "bdist_wheel", "--dist-dir", BUILD)
    call(python, "setup.py", "--quiet", "build", *folders, FLASHTILE_EXTENSION="1")
    (wheel,) = BUILD.glob("*.whl")
    return wheel


def install(python: Path, wheel: Path) -> list[str]:
    """Installs the wheel. Returns the versions of what is SHOWN."""
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel)
    call(python, "-m", "pip", "check")
    call(python, "-c", LOAD_CHECK, python.parent.parent)
    code = f"import importlib.metadata as m; print(*(m.version(name) for name in {SHOWN}))"
    return call(python, "-c", code).split()


def run(python: Path, version: str, jobs: str, options: list[str]) -> tuple[Counter[str], Counter[str]]:
    """Runs the tests. Returns the number of each result, and of each reason of a skip."""
    results, reasons = Counter[str](), Counter[str]()
    every = sorted((ROOT / "tests" / "cpu").glob("test_*.py"))
    unknown = set(LEFT_OUT.split()) - {path.stem.removeprefix("test_") for path in every}
    if unknown:
        sys.exit(f"LEFT_OUT: there is no {', '.join(sorted(unknown))} in tests/cpu.")
    chosen = [path for path in every if path.stem.removeprefix("test_") not in LEFT_OUT.split()]
    for name, paths in (("cpu", chosen), ("integrations", [ROOT / "tests" / "integrations"])):
        report = BUILD / f"{version}-{name}.xml"
        print(f"torch {version}, tests/{name}", flush=True)
        command = [
            *(python, "-m", "pytest", "-n", jobs, "--dist", "worksteal", "-p", "no:cacheprovider"),
            *(f"--junitxml={report}", *options, *paths),
        ]
        status = subprocess.run([str(part) for part in command], cwd=ROOT, env=variables()).returncode
        if status not in (0, 1, 5):  # all passed, some failed, options chose none
            sys.exit(f"pytest ended with status {status}")
        for case in ElementTree.parse(report).iter("testcase"):
            ends = {child.tag: child for child in case}
            skipped = ends.get("skipped")
            if skipped is not None:
                of_a_file = (skipped.text or "").partition("Skipped: ")[2].rstrip("\"')")
                reasons[of_a_file or skipped.get("message", "")] += 1
            is_failed = "failure" in ends or "error" in ends
            results["failed" if is_failed else "skipped" if skipped is not None else "passed"] += 1
    return results, reasons


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=["2.10.0", NEWEST], help="of torch, or newest")
    parser.add_argument("--jobs", default="2")
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    chosen, options = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    pythons = {version: environment(version) for version in chosen.versions}
    wheel = build(next(iter(pythons.values())))
    rows, skips = [], []
    for version, python in pythons.items():
        shown = install(python, wheel)
        results, reasons = run(python, version, chosen.jobs, options)
        rows.append([*shown, *(str(results[result]) for result in RESULTS)])
        skips += [f"{shown[0]}: {count} skipped: {reason}" for reason, count in reasons.most_common()]
    print("\n".join(skips), "", sep="\n")
    table = [[*SHOWN, *RESULTS], *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(value.rjust(width) for value, width in zip(row, widths, strict=True)))
    return int(any(row[len(SHOWN) + RESULTS.index("failed")] != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
