"""torch.export, AOTInductor and ONNX: models as they are loaded elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

import flashtile
from flashtile.integrations import export

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.3},
    "top_left": {"causal": "top_left", "softcap": 2.0},
    "window": {"window": (3, 1)},
    "mask": {"mask": torch.arange(9) % 3 > 0, "sinks": torch.tensor([0.5, -1.0])},
    "bias": {"bias": torch.linspace(-1, 1, 9), "alibi_slopes": torch.tensor([0.5, 0.1])},
}


class Model(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.project = torch.nn.Linear(32, 64)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).split([32, 16, 16], -1)
        q, k, v = (part.unflatten(-1, (-1, 16)) for part in (q, k, v))
        return flashtile.attention(q, k, v, layout="bshd", **self.options).flatten(-2)


def exported(model: torch.nn.Module, has_any_length: bool) -> torch.export.ExportedProgram:
    shapes = {"x": {1: torch.export.Dim("rows", min=2, max=64)}} if has_any_length else None
    with torch.no_grad():
        return torch.export.export(model.eval(), (torch.randn(2, 9, 32),), dynamic_shapes=shapes)


def test_export_keeps_the_operator(tmp_path: Path) -> None:
    model = Model(causal=True)
    program = exported(model, True)
    assert torch.ops.flashtile.forward.default in [node.target for node in program.graph.nodes]
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for rows in (9, 21):
        x = torch.randn(2, rows, 32)
        torch.testing.assert_close(loaded(x), model(x))


def test_aot_inductor(tmp_path: Path) -> None:
    model = Model(causal=True, window=(5, 0))
    path = torch._inductor.aoti_compile_and_package(exported(model, True), package_path=str(tmp_path / "model.pt2"))
    loaded = torch._inductor.aoti_load_package(path)
    for rows in (9, 21):
        x = torch.randn(2, rows, 32)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", OPTIONS)
def test_decomposition(name: str, layout: str) -> None:
    q, k, v = torch.randn(2, 2, 9, 16), torch.randn(2, 1, 9, 16), torch.randn(2, 1, 9, 16)
    if layout == "bshd":
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    seen = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.flashtile.forward.default:
                seen.append(args)
            return function(*args, **(kwargs or {}))

    with Recorder():
        expected = flashtile.attention(q, k, v, return_lse=True, layout=layout, **OPTIONS[name])
    torch.testing.assert_close(export.forward(*seen[0]), expected)


def test_decomposition_of_rows_without_keys() -> None:
    q = torch.randn(1, 2, 5, 16)
    args = flashtile.problem.AttentionArgs(q, q[:, :, :3], q[:, :, :3], causal="bottom_right")
    expected = flashtile.attention(q, q[:, :, :3], q[:, :, :3], causal=True, return_lse=True)
    torch.testing.assert_close(export.forward(*args), expected)
    with pytest.raises(flashtile.Unsupported, match=r"dropout_p: got 0.5; accepted: 0 in an exported graph"):
        export.forward(*args._replace(dropout_p=0.5))


@pytest.mark.parametrize("name", OPTIONS)
def test_onnx(name: str, tmp_path: Path) -> None:
    model = Model(**OPTIONS[name])
    has_any_length = name not in ("mask", "bias")
    program = exported(model, has_any_length)
    program = program.run_decompositions({**torch.export.default_decompositions(), **export.decompositions()})
    assert not [node for node in program.graph.nodes if "flashtile" in str(node.target)]
    torch.onnx.export(program, dynamo=True, verbose=False).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for rows in (9, 21) if has_any_length else (9,):
        x = torch.randn(2, rows, 32)
        (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(result), model(x).detach(), rtol=1e-4, atol=1e-5)
