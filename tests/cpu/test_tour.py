"""The notebook of examples/ runs from its first cell to its last, on the CPU."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import torch

import flashtile

GPU_CELLS = 3
NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"


def run_cell(source, names):
    """Runs a cell as a notebook does. Returns the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "tour.ipynb", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "tour.ipynb", "eval"), names)


class FakeEvent:
    """A CUDA event: a millisecond lies between any two."""

    def __init__(self, **_):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1.0


def test_cells_for_a_gpu_hold_no_mistakes(monkeypatch, capsys):
    """They run on small tensors of the CPU, told that there is a GPU."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    cells = [source for source in cells if "torch.cuda.is_available()" in source]
    assert len(cells) == GPU_CELLS
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *_, device, **options: randn(1, 2, 64, 16, **options))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    names = {"torch": torch, "F": torch.nn.functional, "flashtile": flashtile}
    for source in cells:
        run_cell(source, names)
    printed = capsys.readouterr().out
    assert printed.startswith("a GPU\n")
    assert "flashtile: forward 1.000 ms, 275 TFLOP/s; both passes 1.000 ms" in printed
    errors = ast.literal_eval(printed.splitlines()[-1])
    assert 0 < float(errors["flashtile"]) < 0.05


def test_every_cell_runs(capsys):
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names = {"__name__": "__main__"}
    with torch.random.fork_rng():
        values = [run_cell(source, names) for source in cells]
    pages = [value._repr_html_() for value in values if hasattr(value, "_repr_html_")]
    assert "<table" in pages[0]
    assert "fwd_sm90_kernel" in pages[1]
    printed = capsys.readouterr().out
    assert "S=2048: eager" in printed
    assert printed.count("No GPU here. With one:") == (0 if torch.cuda.is_available() else GPU_CELLS)
    # Beyond shapes there are asserts in the notebook itself
    assert sum(source.count("assert ") for source in cells) >= 5


def test_it_was_executed_before_it_was_saved():
    """Readers see results without running it."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    outputs = [output for cell in notebook["cells"] if cell["cell_type"] == "code" for output in cell["outputs"]]
    assert any("text/html" in output.get("data", {}) for output in outputs)
    assert all(output["output_type"] != "error" for output in outputs)
    assert not any("site-packages" in json.dumps(output) or ".venv" in json.dumps(output) for output in outputs)
