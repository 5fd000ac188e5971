"""The files of a results folder, read by their names. What cannot be read is listed with its reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashtile.errors import value_error
from flashtile.lab.bench.rows import ColdRow, Environment, OverheadRow, Row, read
from flashtile.lab.ladder.rows import HbmRow, RungRow
from flashtile.lab.profile import timeline
from flashtile.lab.profile.rows import KernelRow
from flashtile.lab.profile.timeline import Timeline
from flashtile.lab.tiles.rows import TileRow

# Prefix of the file name -> row; the first that fits
KINDS: tuple[tuple[str, type[Any]], ...] = (
    ("sdpa_", Row),
    ("ladder_hbm_", HbmRow),
    ("ladder_kernels_", RungRow),
    ("ladder_", Row),
    ("tiles_", TileRow),
    ("profile_", KernelRow),
    ("overhead_", OverheadRow),
    ("cold_", ColdRow),
)
RECORDS = ("check", "check_decode", "check_float32", "mutations", "sanitize", "sanitize_latest", "sanitize_simt")
NOTES = "notes.json"  # what a reader must know of a file that its rows do not say
_OF_A_TOOL = "written by a tool; the documentation has it"


@dataclass(frozen=True)
class ResultCsv:
    stem: str
    rows: Sequence[Any]

    @property
    def env(self) -> Environment:
        env = self.rows[0].env
        assert isinstance(env, Environment)
        return env


@dataclass
class DeviceResults:
    """The results of one device: CSVs by the prefix of their name, and the records of checks."""

    name: str  # of the folder
    variant: str = ""  # of the folder inside it, such as mma-sync
    files: dict[str, list[ResultCsv]] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    timelines: list[Timeline] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)  # pattern of the stems of files -> a remark
    skipped: list[tuple[str, str]] = field(default_factory=list)  # file and reason

    def of(self, prefix: str) -> list[ResultCsv]:
        return self.files.get(prefix, [])

    @property
    def all_files(self) -> list[ResultCsv]:
        return [one for found in self.files.values() for one in found]

    @property
    def title(self) -> str:
        device = self.all_files[0].env.device if self.all_files else self.name
        return f"{device}, {self.variant}" if self.variant else device


def collect(folder: Path) -> list[DeviceResults]:
    """The devices of a results folder, the GPUs first. A folder inside a device's is a variant: results of the same
    device with other kernels."""
    if not folder.is_dir():
        raise value_error("--results", f"{folder}, which is no folder", "a folder that `flashtile bench` wrote")
    devices = [
        _device(path, variant)
        for path in sorted(folder.iterdir())
        if path.is_dir()
        for variant in ("", *sorted(inner.name for inner in path.iterdir() if inner.is_dir()))
    ]
    found = [device for device in devices if device.files or device.records]
    if not found:
        raise value_error("--results", f"{folder} without results", "results/<device>/*.csv", "Run `flashtile bench`")
    return sorted(found, key=lambda device: device.name.startswith("cpu"))


def _device(device: Path, variant: str) -> DeviceResults:
    folder, found = device / variant, DeviceResults(device.name, variant)
    for path in sorted(folder.glob("*.csv")):
        kind = next(((prefix, row) for prefix, row in KINDS if path.name.startswith(prefix)), None)
        if kind is None:
            found.skipped.append((path.name, _OF_A_TOOL))
            continue
        try:
            rows = read(path, kind[1])
        except ValueError as error:
            found.skipped.append((path.name, str(error)))
            continue
        if rows:
            found.files.setdefault(kind[0], []).append(ResultCsv(path.stem, rows))
        else:
            found.skipped.append((path.name, "no rows"))
    for path in sorted(folder.glob("*.json")):
        try:
            if path.name.startswith("timeline_"):
                found.timelines.append(timeline.read(path))
            elif path.name == NOTES:
                found.notes = {str(stem): str(text) for stem, text in json.loads(path.read_text("utf-8")).items()}
            elif path.stem in RECORDS:
                found.records[path.stem] = json.loads(path.read_text(encoding="utf-8"))
            elif not path.with_suffix(".csv").exists():  # a CSV has the same rows
                found.skipped.append((path.name, _OF_A_TOOL))
        except (OSError, ValueError, AttributeError) as error:  # the last: JSON that is no object
            found.skipped.append((path.name, str(error)))
    return found
