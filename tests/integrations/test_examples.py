"""The examples that need transformers, small."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtile.integrations import transformers as ours

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEVICE = ["--device", os.environ.get("FLASHTILE_TEST_DEVICE", "cpu")]
MODEL = [*DEVICE, "--layers=1", "--width=128", "--batch=2", "--length=24", "--new=6", "--rounds=1"]
LORA = [*DEVICE, "--layers=1", "--documents=3", "--length=32", "--steps=3"]


@pytest.fixture(autouse=True)
def wide_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    torch.set_default_device(None)  # the examples name theirs


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def table(printed: str) -> list[list[str]]:
    """Returns the cells of the rows of a printed table, without its head."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("huggingface", "--rounds 0", "--rounds: got 0; accepted: 1 or more"),
        ("huggingface", "--width 100", "--width: got 100; accepted: multiples of 128"),
        ("finetune_lora", "--length 1", "--length: got 1; accepted: 2 or more"),
        ("finetune_lora", "--device tpu", "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    name: str, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        load(name).main(words.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["huggingface", "finetune_lora"])
def test_help_shows_the_whole_description(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = load(name)
    with pytest.raises(SystemExit):
        example.main(["--help"])
    assert example.__doc__ is not None
    assert example.__doc__.strip() in capsys.readouterr().out


def test_a_model_generates_and_trains_alike(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("huggingface")
    options = example.parse(MODEL)
    ours.register()
    assert len(example.Way("sdpa", options).generate().unique()) > 6  # one token over and over would show nothing
    assert example.main(MODEL) == 0
    printed = capsys.readouterr().out
    rows = {name: cells for name, *cells in table(printed)}
    assert list(rows) == ["sdpa", "flashtile", "install()"]
    for speed, step_ms, memory, loss, difference, same in rows.values():
        assert float(speed) > 0
        assert float(step_ms) >= 0
        assert float(memory) > 0
        assert float(loss) == pytest.approx(float(rows["sdpa"][3]), rel=1e-4 if DEVICE[1] == "cpu" else 0.05)
        assert float(difference) <= (1e-5 if DEVICE[1] == "cpu" else 0.05)
        assert same == "12 of 12" or DEVICE[1] != "cpu"
    assert "none left to torch" in printed


@pytest.mark.skipif(DEVICE[1] != "cpu", reason="bounds are those of float32")
def test_another_attention_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    attention = ours.attention

    def wrong(*tensors: Any, **options: Any) -> Any:
        return attention(*tensors, **options | {"scale": 0.9 * options["scale"]})

    monkeypatch.setattr(ours, "attention", wrong)
    assert load("huggingface").main(MODEL) == 1
    rows = table(capsys.readouterr().out)
    assert [float(row[5]) > 1e-4 for row in rows] == [False, True, False]


def test_calls_that_install_does_not_serve_are_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert load("huggingface").main(MODEL) == 1
    assert "MATH is the only backend that is switched on" in capsys.readouterr().out


def check_lora(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert load("finetune_lora").main(words) == 0
    printed = capsys.readouterr().out
    (_, *padded), (_, *packed) = table(printed)
    count = int(printed.splitlines()[-1].split()[0])
    assert int(padded[0]) == 3 * 3 * 32 > count == int(packed[0])
    bound = 1e-4 if DEVICE[1] == "cpu" else 0.02
    for one, other in zip(padded[4:], packed[4:], strict=True):
        assert float(one) == pytest.approx(float(other), rel=bound)
    assert all(float(number) > 0 for number in (*padded, *packed))


def test_packed_documents_train_as_padded_ones(capsys: pytest.CaptureFixture[str]) -> None:
    check_lora(LORA, capsys)


def test_adapters_of_peft(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    check_lora([*LORA, "--peft"], capsys)


def test_adapters_alone_are_trained() -> None:
    example = load("finetune_lora")
    options = example.parse(LORA)
    ours.register()
    run = example.Run("flashtile", example.packed, options)
    before = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
    run.step(example.draw(options)[0])
    changed = {name for name, weight in run.model.named_parameters() if not torch.equal(weight, before[name])}
    assert len(changed) == 8
    assert all(name.endswith((".up", ".down")) for name in changed)


@pytest.mark.skipif(DEVICE[1] != "cpu", reason="the bound is that of float32")
def test_attention_across_documents_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("finetune_lora")
    packed = example.packed

    def across(documents: list[torch.Tensor]) -> Any:
        inputs, labels = packed(documents)
        rows = labels.numel()
        ends = torch.tensor([0, rows], dtype=torch.int32)
        lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": rows, "max_length_k": rows}
        return inputs | lengths, labels

    monkeypatch.setattr(example, "packed", across)
    assert example.main(LORA) == 1
