"""tools/make_docs.py fills pages from results/ and reports differences."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from bench_fakes import provider, sweep
from rich.console import Console
from typer.testing import CliRunner

from flashtile.cli.main import app
from flashtile.lab.bench import plots
from flashtile.lab.bench.command import run_sweep
from flashtile.lab.check.mutants import Hunt
from flashtile.lab.check.report import Report
from flashtile.plans.mutation import Mutation

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = REPOSITORY / "tools" / "make_docs.py"
STEM = "sdpa_Lsweep_B1_H1_d16_fp32"
NAMES = (f"box/{STEM}:latency", f"box/{STEM}:ratios", f"box/latency_vs_L_{STEM.removeprefix('sdpa_Lsweep_')}.png")


class Done(NamedTuple):
    returncode: int
    stderr: str


def make_docs(root: Path, *arguments: str) -> Done:
    spec = importlib.util.spec_from_file_location("make_docs", TOOL)
    tool = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOL.parent)
        spec.loader.exec_module(tool)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        status = tool.main(["--root", str(root), *arguments])
    return Done(status, stderr.getvalue())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small repository: one run's results, a README with markers and a page without."""
    (tmp_path / "results" / "box").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "plain.md").write_text("nothing marked\n")
    run_sweep(
        sweep([provider("ours", is_baseline=False), provider("peer")], 32, 48),
        tmp_path / "results" / "box",
        Console(file=io.StringIO()),
    )
    parts = "\n".join(f"<!-- bench:{name} -->\nold\n<!-- /bench:{name} -->\n" for name in NAMES)
    (tmp_path / "README.md").write_text(f"before\n{parts}after\n")
    return tmp_path


def test_pages_are_filled_and_an_edit_is_found(root: Path):
    assert make_docs(root, "--check").returncode == 1
    assert make_docs(root).returncode == 0
    text = (root / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| ours over peer | fwd | 2 |" in text
    assert f"(results/{NAMES[2]})" in text
    done = make_docs(root, "--check")
    assert done.returncode == 0, done.stderr

    (root / "README.md").write_text(text.replace("| S=48 |", "| S=49 |"))
    done = make_docs(root, "--check")
    assert done.returncode == 1
    assert "README.md: differs from results/" in done.stderr


def test_the_alternative_text_of_a_figure_is_kept(root: Path):
    assert make_docs(root).returncode == 0
    page = root / "README.md"
    filled = page.read_text()
    default = f"![{Path(NAMES[2]).stem.replace('_', ' ')}](results/{NAMES[2]})"
    assert default in filled
    page.write_text(filled.replace(default, f"![Ours is faster](results/{NAMES[2]})"))
    assert make_docs(root, "--check").returncode == 0
    page.write_text(filled.replace(default, "![Ours is faster](results/other.png)"))
    assert make_docs(root).returncode == 0
    assert f"![Ours is faster](results/{NAMES[2]})" in page.read_text()


def test_a_stale_or_missing_figure_is_found_and_drawn_again(root: Path):
    assert make_docs(root).returncode == 0
    csv, figure = root / "results" / "box" / f"{STEM}.csv", root / "results" / NAMES[2]
    csv.write_text(csv.read_text().replace("peer,yes", "sdpa,yes"))
    assert not plots.is_current(figure)
    done = make_docs(root, "--check")
    assert done.returncode == 1
    assert f"results/{NAMES[2]}: missing, or drawn from another CSV" in done.stderr
    assert make_docs(root).returncode == 0
    assert make_docs(root, "--check").returncode == 0
    figure.unlink()
    assert make_docs(root, "--check").returncode == 1


def test_redraw_draws_current_figures_again(root: Path):
    assert make_docs(root).returncode == 0
    figure = root / "results" / NAMES[2]
    drawn = figure.read_bytes()
    entries = plots.metadata(figure)
    figure.write_bytes(drawn + b"changed")  # behind the last chunk, where no reader looks
    assert plots.is_current(figure)
    assert make_docs(root).returncode == 0
    assert figure.read_bytes() != drawn
    assert make_docs(root, "--redraw").returncode == 0
    assert plots.metadata(figure) == entries
    assert not figure.read_bytes().endswith(b"changed")


def test_a_marker_without_its_partner_or_its_csv_is_an_error(root: Path):
    (root / "docs" / "plain.md").write_text("<!-- bench:box/none:latency -->\n<!-- /bench:box/none:latency -->\n")
    done = make_docs(root)
    assert done.returncode == 1
    assert "docs/plain.md: file: got none.csv" in done.stderr
    (root / "docs" / "plain.md").write_text("<!-- bench:box/none:latency -->\n")
    done = make_docs(root)
    assert done.returncode == 1
    assert "docs/plain.md: a bench marker without its partner" in done.stderr


WRONG_ROWS = {
    "| `cuda` | no | yes |": ("| `cuda` | yes | yes |", "cuda, CPU: 'yes', but its devices are cuda"),
    "| no | yes | NVIDIA H200 |": ("| no | yes | NVIDIA A100 |", "cuda, run on: 'NVIDIA A100', but the records say"),
    "| sm_61 to sm_120 |": (
        "| sm_61 to sm_130 |",
        "cuda, compiled for: 'sm_61 to sm_130', but it is 'sm_61 to sm_120'",
    ),
    "| no kept record |": ("| NVIDIA H200 |", "numba, run on: 'NVIDIA H200', but the records say 'no kept record'"),
    "| all options | all but paged keys |": (
        "| all options | all options |",
        "cuda, backward: 'all options', but it takes",
    ),
    "| all but paged keys | as forward |": (
        "| all options | as forward |",
        "triton, forward: 'all options', but it takes",
    ),
    "float32 (head_dim to 256), f": ("float32 (head_dim to 512), f", "cuda: head_dim to 512, but it takes 256"),
    "for reading; by name only": ("for reading", "numba: 'by name only' is missing"),
    "| `tiled` | yes |": ("| `tile` | yes |", "its backends are cuda, triton, cpu, tile, numba, reference; there are"),
}


@pytest.mark.parametrize("right", WRONG_ROWS)
def test_the_table_of_backends_is_compared_with_the_code(right: str, root: Path):
    text, (wrong, complaint) = (REPOSITORY / "docs" / "support.md").read_text(), WRONG_ROWS[right]
    table = text[text.index("<!-- support -->") : text.index("<!-- /support -->") + len("<!-- /support -->\n")]
    (root / "README.md").write_text(table)
    assert make_docs(root, "--check").returncode == 0
    assert table.count(right) == 1
    (root / "README.md").write_text(table.replace(right, wrong))
    done = make_docs(root, "--check")
    assert done.returncode == 1
    assert f"README.md: table of backends: {complaint}" in done.stderr


def test_records_of_checks_are_filled_in(root: Path):
    folder, fault = root / "results" / "box", Mutation("skip_rescale", "not scaled down", None)
    assert (
        CliRunner()
        .invoke(app, ["check", "--device", "cpu", "--problems", "2", "--seed", "4", "--out", str(folder)])
        .exit_code
        == 0
    )
    env = json.loads((folder / "check.json").read_text())["environment"]
    hunts = [Hunt(fault, False, 7, Report()).as_dict()]
    (folder / "mutations.json").write_text(json.dumps({"mutations": hunts, "environment": env}))
    runs = {"clean": {"kernels": 12, "errors": 0}, "planted": {"out_of_bounds": {"errors": 5}}}
    (folder / "sanitize.json").write_text(json.dumps({"tools": {"memcheck": runs}, "environment": env}))
    names = ("check", "mutations", "sanitize")
    (root / "docs" / "plain.md").write_text(
        "".join(f"<!-- bench:box/{name}.json -->\n<!-- /bench:box/{name}.json -->\n" for name in names)
    )
    assert make_docs(root).returncode == 0
    text = (root / "docs" / "plain.md").read_text()
    assert "| tiled | 2 | 0 | 0 |  |" in text
    assert "seed 4, " in text
    assert "| `skip_rescale` | not scaled down | not found |  |" in text
    assert "| memcheck | 12 | 0 | `out_of_bounds`: 5 |" in text
    assert make_docs(root, "--check").returncode == 0
    (folder / "check.json").unlink()
    done = make_docs(root)
    assert done.returncode == 1
    assert "results: got no check.json" in done.stderr


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{page.name}: {link}")
    return broken


def test_links_between_pages_lead_somewhere(tmp_path: Path):
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    assert [link for page in pages for link in broken_links(page)] == []
    page = tmp_path / "page.md"
    page.write_text(
        "# A page: one\n[good](#a-page-one) [good](page.md) [bad](#b) [bad](none.md) [far](https://example.org/x)\n"
    )
    assert broken_links(page) == ["page.md: #b", "page.md: none.md"]
