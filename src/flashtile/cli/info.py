"""`flashtile info`: what was found, which backends work on which device here, and why not."""

from __future__ import annotations

import json
import os
import platform
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from flashtile.backends import registry
from flashtile.version import __version__

SWITCHES = {
    "FLASHTILE_STRICT": "1: a call that only a slower path can serve raises instead of warning",
}


def collect() -> dict[str, Any]:
    """Everything `info` shows, as plain data."""
    return {
        "flashtile": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cpu_threads": torch.get_num_threads(),
        "gpus": _gpus(),
        "backends": {
            backend.name: {device: _status(backend.devices, device) for device in ("cpu", "cuda")} for backend in registry.BACKENDS
        },
        "summaries": {backend.name: backend.summary for backend in registry.BACKENDS},
        "switches": {name: os.environ.get(name) for name in SWITCHES},
    }


def _gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
            }
        )
    return found


def _status(devices: tuple[str, ...], device: str) -> str:
    """The word works, or why not."""
    if device not in devices:
        return f"no: it runs on {' and '.join(devices)}"
    if device == "cuda" and torch.version.cuda is None:
        return "no: this torch was built without CUDA"
    if device == "cuda" and not torch.cuda.is_available():
        return "no: torch finds no GPU"
    return "works"


def show(as_json: bool) -> None:
    facts = collect()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    console = Console()
    found = Table("what", "found", title=f"flashtile {facts['flashtile']}", title_justify="left")
    found.add_row("python", f"{facts['python']} on {facts['platform']}")
    found.add_row("torch", f"{facts['torch']}, {facts['cpu_threads']} CPU threads")
    found.add_row("CUDA of torch", facts["torch_cuda"] or "none: a CPU build")
    for gpu in facts["gpus"] or [None]:
        found.add_row(
            "GPU",
            "none"
            if gpu is None
            else f"{gpu['name']}, compute capability {gpu['compute_capability']}, {gpu['memory_bytes'] / 2**30:.0f} GiB",
        )
    for name, meaning in SWITCHES.items():
        found.add_row(name, f"{facts['switches'][name] or 'not set'} ({meaning})")
    backends = Table("backend", "cpu", "cuda", "what it is", title="backends, the preferred first", title_justify="left")
    for name, status in facts["backends"].items():
        backends.add_row(name, status["cpu"], status["cuda"], facts["summaries"][name])
    console.print(found, backends)
