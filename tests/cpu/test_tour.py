"""The notebook of examples/ runs from its first cell to its last, on the CPU."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import torch

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"


def run_cell(source, names):
    """Runs a cell as a notebook does. Returns the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "tour.ipynb", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "tour.ipynb", "eval"), names)


def test_every_cell_runs(capsys):
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names = {"__name__": "__main__"}
    with torch.random.fork_rng():
        values = [run_cell(source, names) for source in cells]
    pages = [value._repr_html_() for value in values if hasattr(value, "_repr_html_")]
    assert "<table" in pages[0]
    assert "fwd_sm90_kernel" in pages[1]
    assert "S=2048: eager" in capsys.readouterr().out
    # Beyond shapes there are asserts in the notebook itself
    assert sum(source.count("assert ") for source in cells) >= 5


def test_it_was_executed_before_it_was_saved():
    """Readers see results without running it."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    outputs = [output for cell in notebook["cells"] if cell["cell_type"] == "code" for output in cell["outputs"]]
    assert any("text/html" in output.get("data", {}) for output in outputs)
    assert all(output["output_type"] != "error" for output in outputs)
    assert not any("site-packages" in json.dumps(output) or ".venv" in json.dumps(output) for output in outputs)
