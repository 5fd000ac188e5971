"""tools/speed_table.py: the table of speeds in README.md."""

from __future__ import annotations

import csv
import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "results" / "nvidia-h200"


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("speed_table", REPOSITORY / "tools" / "speed_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed(tmp_path: Path, provider: str, factor: float, **cells: str) -> Path:
    """Returns a copy of the folder of results in which some rows of one provider take `factor` times as long."""
    folder = tmp_path / "results" / "nvidia-h200"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.png", "*.json"))
    path = folder / "sdpa_paper_bf16_fwd.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["provider"] == provider and all(row[name] == value for name, value in cells.items()):
            row["median_ms"] = str(float(row["median_ms"]) * factor)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


def line(tool: ModuleType, folder: Path) -> str:
    root = folder.parent.parent
    return str(tool.table(folder.parent, root / "README.md").splitlines()[2])


def test_the_worst_point_is_named(tool: ModuleType, tmp_path: Path) -> None:
    folder = changed(tmp_path, "cuda", 10.0, seqlen_k="2048", head_dim="128", is_causal="yes")
    cells = line(tool, folder).split(" | ")
    assert cells[0] == "| [forward](docs/sm90.md#against-the-peers)"
    assert cells[2] == "36"
    assert cells[4].endswith("(d 128 causal, S 2048)")
    assert float(cells[4].split()[0]) == pytest.approx(0.12, abs=0.01)


def test_a_faster_peer_lowers_every_figure(tool: ModuleType, tmp_path: Path) -> None:
    before = [float(cell.split()[0]) for cell in line(tool, FOLDER).split(" | ")[3:6]]
    after = [float(cell.split()[0]) for cell in line(tool, changed(tmp_path, "sdpa-cudnn", 0.5)).split(" | ")[3:6]]
    assert after == pytest.approx([figure / 2 for figure in before], abs=0.006)


def test_peers_may_come_from_another_run(tool: ModuleType) -> None:
    one = next(one for one in tool.COMPARISONS if one.peers_csv)
    found = tool.measure(one, FOLDER)
    assert len(found.ratios) == 36
    assert len({env.commit for env in found.environments}) == 2


def test_a_comparison_without_points_is_an_error(tool: ModuleType) -> None:
    one = tool.COMPARISONS[0]._replace(peers=("nobody",))
    with pytest.raises(ValueError, match="no point of cuda and"):
        tool.measure(one, FOLDER)
