"""The machine of a run: its device, its cache, and the environment that every row records."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from flashtile.errors import unsupported, value_error
from flashtile.lab.bench import timing
from flashtile.lab.bench.rows import Environment
from flashtile.lab.defaults import RESULTS
from flashtile.version import __version__

_PACKAGE_FOLDER = Path(__file__).resolve().parents[3]  # the folder that `import flashtile` needs
_FALLBACK_CACHE_BYTES = 32 * 2**20


def resolve(wanted: str | None) -> tuple[str, str]:
    """The device type to run on, and a line that describes it."""
    if wanted not in (None, "cpu", "cuda"):
        raise value_error("--device", repr(wanted), "cpu or cuda")
    if wanted == "cpu":
        return "cpu", f"Running on the CPU: {_cpu_name()}."
    if torch.cuda.is_available():
        return "cuda", f"Running on the GPU: {torch.cuda.get_device_name()}."
    why = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no GPU"
    if wanted == "cuda":
        raise unsupported(
            "--device",
            f"cuda, and {why}",
            "cpu here",
            "Drop --device, or install a CUDA build of torch and an NVIDIA driver",
        )
    return "cpu", f"No GPU ({why}): running on the CPU, {_cpu_name()}."


def cache_bytes(device: str) -> int:
    """Size of the last-level cache."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).L2_cache_size)
    sizes = [_size(path.read_text()) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=_FALLBACK_CACHE_BYTES)


def copy_gb_per_s(device: str) -> float:
    """The highest rate of a copy that is far larger than the cache: bytes read plus bytes written."""
    count = (2**31 if device == "cuda" else 2**28) // 4
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    contender = timing.Contender(
        "copy", [lambda: target.copy_(source)], timing.once(lambda: target.copy_(source), device)[1]
    )
    timing.interleave([contender], device, budget_s=0.05)
    return 2 * source.nbytes / min(contender.seconds) / 1e9


def _size(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KM]?)", text.strip()).groups()  # type: ignore[union-attr]
    return int(number) * {"": 1, "K": 2**10, "M": 2**20}[unit]


def free_bytes() -> int:
    """Memory available without swapping. Linux overcommits, so a larger allocation may succeed and be killed later."""
    if not Path("/proc/meminfo").exists():
        return 2**62
    match = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 2**62


def name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{_cpu_name()}, {threads} thread{'' if threads == 1 else 's'}"


def slug(device: str) -> str:
    """Name of the folder of results, such as nvidia-h200 or cpu-intel-xeon-2.80ghz."""
    text = torch.cuda.get_device_name() if device == "cuda" else f"cpu {_cpu_name()}"
    text = re.sub(r"\((r|tm|c)\)|\b(processor|cpu(?!$| )|@|\d+-core)", " ", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-.")


def own_results(device: str) -> Path:
    """Returns the folder of a run without --out."""
    return Path(RESULTS) / slug(device)


def _cpu_name() -> str:
    text = ""
    if Path("/proc/cpuinfo").exists():
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        text = match[1] if match else ""
    text = re.sub(r"\((R|TM|C)\)|\bProcessor\b|\bCPU\b", "", text or platform.processor() or platform.machine())
    return " ".join(text.split())


def environment(device: str, arguments: Sequence[str], program: str = "flashtile") -> Environment:
    commit, is_dirty = _commit()
    cudnn = torch.backends.cudnn.version() if device == "cuda" else None
    return Environment(
        device=name(device),
        driver=_driver() if device == "cuda" else "",
        torch=torch.__version__,
        cuda=(torch.version.cuda or "") if device == "cuda" else "",
        cudnn="" if cudnn is None else str(cudnn),
        triton=_version("triton"),
        python=platform.python_version(),
        flashtile=__version__,
        commit=commit,
        is_dirty=is_dirty,
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=command_line(arguments, program),
    )


def command_line(arguments: Sequence[str], program: str = "flashtile") -> str:
    """The command line, with paths of this machine reduced to their last part."""

    def portable(argument: str) -> str:
        option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
        is_path = Path(value).is_absolute() or value.startswith("~") or ".." in Path(value).parts
        return option + equals + (Path(value).name if is_path else value)

    return " ".join([program, *map(shlex.quote, map(portable, arguments))])


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a child process that imports this package, with these variables set."""
    path = os.pathsep.join(filter(None, (str(_PACKAGE_FOLDER), os.environ.get("PYTHONPATH"))))
    return os.environ | variables | {"PYTHONPATH": path}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _output(query).splitlines()[0] if _output(query) else ""


def _commit() -> tuple[str, bool]:
    """The commit of this source, and whether it has changes. FLASHTILE_COMMIT names it for a source copy."""
    if os.environ.get("FLASHTILE_COMMIT"):
        return os.environ["FLASHTILE_COMMIT"], False
    here = Path(__file__).resolve().parent
    root = _output(["git", "-C", str(here), "rev-parse", "--show-toplevel"])
    if not root or not (Path(root) / "src" / "flashtile" / "lab").is_dir():
        return "", False
    changes = _output(["git", "-C", root, "status", "--porcelain", "--", ".", ":(exclude)results"])
    return _output(["git", "-C", root, "rev-parse", "--short=12", "HEAD"]), bool(changes)


def _output(command: list[str]) -> str:
    """The output of a command, or "" if it cannot run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
