"""Helpers of the tools that measure on a GPU: the files they write, and kernels compiled ahead of the calls."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flashtile.backends import cuda, executor, native
from flashtile.lab.bench import device as facts
from flashtile.lab.bench.files import writable_folder
from flashtile.lab.bench.rows import Environment
from flashtile.lab.defaults import PROJECT_RESULTS

ROOT = Path(__file__).resolve().parent.parent


def results_file(name: str, folder: str | Path | None = None, device: str = "cuda") -> Path:
    """Returns the path of a file in a folder, or in that of the device under results/; creates the folder."""
    return writable_folder(Path(folder or ROOT / PROJECT_RESULTS / facts.slug(device))) / name


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], env: Environment) -> None:
    """Writes rows of the same keys, which are the columns, and behind each the environment."""
    machine = asdict(env)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*rows[0], *machine))
        writer.writerows((*row.values(), *machine.values()) for row in rows)


def compile_all(units: Iterable[tuple[str, str]]) -> None:
    """Compiles in as many threads as there are cores."""
    arch = cuda._arch(0)
    assert arch is not None
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda unit: executor.function(*unit, arch.name), units))


def compile_ahead(calls: Iterable[Callable[[], Any]], stream: torch.cuda.Stream) -> None:
    """Compiles what the calls would launch on the stream; launches nothing."""
    with native.record_launches() as units, torch.cuda.stream(stream):
        for call in calls:
            call()
    compile_all(units)
