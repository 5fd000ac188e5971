"""`flashtile info`: what was found on this machine, and which backends work on which device."""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from flashtile import markup
from flashtile.backends import environment, native, registry
from flashtile.backends.base import Backend, device_arch
from flashtile.cli import cache as cache_command
from flashtile.cli import compile as compile_command
from flashtile.errors import Unsupported
from flashtile.lab.bench.files import writable_folder, write_whole
from flashtile.plans.arch import ARCHS
from flashtile.problem import Problem
from flashtile.runtime import driver, extension, nvrtc, toolchain
from flashtile.runtime.cache import KernelCache, embedded_archs
from flashtile.testing import Case
from flashtile.version import __version__


def collect() -> dict[str, Any]:
    """Everything that `info` shows, as plain data."""
    facts = {
        "flashtile": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cpu_threads": torch.get_num_threads(),
        "extension": _extension(),
        "executor": _executor(),
        "gpus": _gpus(),
        "driver": _driver(),
        "nvrtc": _nvrtc(),
        "cache": cache_command.facts(KernelCache.default()),
        "embedded": embedded_archs(),
        "archs": _archs(),
        "backends": {
            backend.name: {device: _status(backend, device) for device in ("cpu", "cuda")}
            for backend in registry.BACKENDS
        },
        "summaries": {backend.name: backend.summary for backend in registry.BACKENDS},
        "switches": {name: os.environ.get(name) for name in environment.MEANINGS},
    }
    return {"verdict": verdict(facts), **facts}


def verdict(facts: dict[str, Any]) -> list[str]:
    """Returns what calls run on here, in one line or two."""
    status = {device: {name: known[device] for name, known in facts["backends"].items()} for device in ("cpu", "cuda")}
    on_cpu = next((name for name in status["cpu"] if status["cpu"][name] == "works"), "nothing")
    isa = f" ({facts['extension']['instruction_sets'][0]})" if on_cpu == "cpu" else ""
    cpu = f"the backend {on_cpu}{isa} on {counted(facts['cpu_threads'], 'thread')}"
    compiler = facts["nvrtc"]
    if facts["gpus"]:
        names = ", ".join(dict.fromkeys(gpu["name"] for gpu in facts["gpus"]))
        on_gpu = next((name for name in status["cuda"] if status["cuda"][name] == "works"), "nothing")
        lines = [f"This machine: calls on {names} run on the backend {on_gpu}; calls on the CPU run on {cpu}."]
        if on_gpu != "cuda":
            lines.append(f"Not on the backend cuda: {status['cuda']['cuda'].removeprefix('no: ')}")
        return lines
    why = "this torch was built without CUDA" if facts["torch_cuda"] is None else "torch finds no GPU"
    lines = [f"This machine: no GPU ({why}); calls on the CPU run on {cpu}."]
    if compiler["version"]:
        lines.append(f"NVRTC {compiler['version']} is here: kernels can be compiled for GPUs of other machines.")
    return lines


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _extension() -> dict[str, Any]:
    """Path and instruction sets of the C++ extension, or why it is not available."""
    reason = extension.missing()
    return {
        "path": None if reason else extension.path(),
        "instruction_sets": [] if reason else list(extension.instruction_sets()),
        "reason": reason,
    }


def _executor() -> dict[str, Any]:
    """Says which language launches CUDA kernels and, if Python, why not C++."""
    reason = native.missing()
    return {"language": "c++" if reason is None else "python", "reason": reason}


def _gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
                "arch": getattr(device_arch(index), "label", None),
            }
        )
    return found


def _driver() -> dict[str, Any]:
    try:
        major, minor = driver.version()
    except (Unsupported, driver.DriverError) as error:
        return {"cuda": None, "reason": str(error)}
    return {"cuda": f"{major}.{minor}", "reason": None}


def _nvrtc() -> dict[str, Any]:
    path = None
    try:
        found = toolchain.find()
        path = found.path
        major, minor = found.version
    except Unsupported as error:
        return {"path": path, "version": None, "reason": str(error), "variables": nvrtc.variables()}
    return {"path": path, "version": f"{major}.{minor}", "reason": None, "variables": nvrtc.variables()}


def _archs() -> dict[str, str]:
    """Returns "works", or what is missing, for each architecture with kernels."""
    try:
        compiler = toolchain.find()
        known = compiler.archs
    except Unsupported:
        return {arch.name: "no: without NVRTC nothing can be compiled" for arch in ARCHS.values()}
    return {
        arch.name: "works" if arch.number in known else f"no: {compile_command.why_unknown(arch, compiler)}"
        for arch in ARCHS.values()
    }


def _status(backend: Backend, device: str) -> str:
    """Returns "works", or why it does not."""
    if device not in backend.devices:
        return f"no: it runs on {' and '.join(backend.devices)}"
    if device == "cuda" and torch.version.cuda is None:
        return "no: this torch was built without CUDA"
    if device == "cuda" and not torch.cuda.is_available():
        return "no: torch finds no GPU"
    reason = backend.refuse(_plain_problem(device))
    return "works" if reason is None else f"no: {reason}"


@functools.cache
def _plain_problem(device: str) -> Problem:
    """Returns a problem that every backend takes that works at all."""
    return Problem.of(Case(batch=1, heads=1, heads_kv=1).make(0, device).args)


def prepare(as_json: bool, html: Path | None) -> Callable[[], int]:
    """Checks the options and returns the job."""
    if html is not None:
        writable_folder(html.parent, "--html")
    return partial(_show, as_json, html)


def _show(as_json: bool, html: Path | None) -> int:
    facts = collect()
    if html is not None:
        write_whole(html, page(facts))
        print(f"Written: {html}", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(facts, indent=2))
    elif html is None:
        for line in facts["verdict"]:
            print(line)
        print()
        found = Table("what", "found", title=f"flashtile {facts['flashtile']}", title_justify="left")
        for line in found_lines(facts):
            found.add_row(*line)
        backends = Table(
            "backend", "cpu", "cuda", "what it is", title="backends, the preferred first", title_justify="left"
        )
        for name, cpu, cuda, what in backend_lines(facts):
            backends.add_row(name, cpu, cuda, what)
        # Wrap long paths and names of variables instead of truncating them
        for column in (*found.columns, *backends.columns):
            column.overflow = "fold"
        Console().print(found, backends)
    return 0


def page(facts: dict[str, Any]) -> str:
    """Returns the facts as an HTML page."""

    def status(text: str) -> markup.Raw:
        kind = "good" if text == "works" else "soft"
        return markup.Raw(f'<span class="{kind}">{markup.escape(text)}</span>')

    title = f"flashtile {facts['flashtile']}"
    backends = [(name, status(cpu), status(cuda), what) for name, cpu, cuda, what in backend_lines(facts)]
    body = "".join(f"<p>{markup.escape(line)}</p>" for line in facts["verdict"])
    body += markup.table(("what", "found"), found_lines(facts), title, is_numeric=False)
    body += markup.table(
        ("backend", "cpu", "cuda", "what it is"), backends, "backends, the preferred first", is_numeric=False
    )
    return markup.page(title, f'<main style="max-width:70rem;margin:1rem auto;padding:0 1rem">{body}</main>')


def found_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns what was found, as pairs of a name and a text."""
    built, launcher = facts["extension"], facts["executor"]
    lines = [
        ("python", f"{facts['python']} on {facts['platform']}"),
        ("torch", f"{facts['torch']}, {counted(facts['cpu_threads'], 'CPU thread')}"),
        (
            "C++ extension",
            f"none: {built['reason']}"
            if built["reason"]
            else f"{', '.join(built['instruction_sets'])}; {built['path']}",
        ),
        ("CUDA of torch", facts["torch_cuda"] or "none: a CPU build"),
    ]
    for gpu in facts["gpus"]:
        memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        text = f"{gpu['name']}, compute capability {gpu['compute_capability']}, {memory}"
        lines.append(("GPU", f"{text}; kernels: {gpu['arch'] or 'none'}"))
    if not facts["gpus"]:
        lines.append(("GPU", "none"))
    else:
        reason = f": {launcher['reason']}" if launcher["reason"] else ""
        lines.append(("CUDA kernels", f"launched by {launcher['language']}{reason}"))
    compiler, kept = facts["nvrtc"], facts["cache"]
    lines += [
        ("CUDA of the driver", facts["driver"]["cuda"] or f"none: {facts['driver']['reason']}"),
        (
            "NVRTC",
            f"{compiler['version']}, {compiler['path']}" if compiler["version"] else f"none: {compiler['reason']}",
        ),
        *(
            ("NVRTC reads", f"{variable}: kernels compiled with it are cached apart")
            for variable in compiler["variables"]
        ),
    ]
    embedded = ", ".join(f"{count} for {name}" for name, count in facts["embedded"].items())
    works = [name for name, status in facts["archs"].items() if status == "works"]
    lines += [
        ("kernel cache", f"{kept['directory'] or 'none'}, {kept['status']}, {cache_command.held(kept)}"),
        ("embedded kernels", embedded or "none: built without FLASHTILE_ARCHS"),
        ("compiles for", ", ".join(works) or "nothing"),
        *((name, status) for name, status in facts["archs"].items() if status != "works"),
        *(
            (name, f"{facts['switches'][name]} ({meaning})")
            for name, meaning in environment.MEANINGS.items()
            if facts["switches"][name]
        ),
    ]
    return lines


def backend_lines(facts: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    return [
        (name, status["cpu"], status["cuda"], facts["summaries"][name]) for name, status in facts["backends"].items()
    ]
