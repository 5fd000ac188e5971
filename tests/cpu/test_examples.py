"""The examples, small and on the CPU."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flashtile.integrations import flash_attn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ["--device", "cpu", "--layers", "1", "--width", "32", "--requests", "6", "--new", "6", "--prompt", "12"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look their types up
    spec.loader.exec_module(module)
    return module


def table(printed: str) -> list[list[str]]:
    """Returns the cells of the rows of printed tables, without the heads."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setenv("COLUMNS", "200")
    yield load("replace_flash_attn")
    flash_attn.uninstall()


@pytest.mark.parametrize("name", ["long_context", "replace_flash_attn", "serve", "train_gpt"])
def test_help_shows_the_whole_description(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit):
        example.main()
    assert example.__doc__ is not None
    assert example.__doc__.strip() in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--tokens", "--ranks", "--steps", "--layers"])
def test_a_long_context_of_nothing_is_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("long_context")
    monkeypatch.setattr(sys, "argv", ["long_context.py", "--tokens", "8", "--steps", "1", option, "0"])
    monkeypatch.setattr(example, "train", lambda *_, **__: pytest.fail("training began"))
    with pytest.raises(SystemExit):
        example.main()
    assert f"{option}: got 0; accepted: 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("replace_flash_attn", "--new 0", "--new: got 0; accepted: 1 or more"),
        ("replace_flash_attn", "--heads 3 --heads-kv 2", "--heads: got 3; accepted: multiples of --heads-kv, 2"),
        ("replace_flash_attn", "--head-dim 5", "--head-dim: got 5; accepted: even numbers"),
        ("serve", "--device cpu --slots 0", "--slots: got 0; accepted: 1 or more"),
        ("serve", "--device cpu --page-size 0", "--page-size: got 0; accepted: 1 or more"),
        ("serve", "--device cpu --heads 3", "--heads: got 3; accepted: multiples of --heads-kv, 2"),
        ("serve", "--device cpu --width 60", "--width: got 60; accepted: multiples of twice the heads, 8"),
        ("serve", "--device cpu --memory nan", "--memory: got nan; accepted: 0 or more"),
        ("train_gpt", "--device cpu --steps 0", "--steps: got 0; accepted: 1 or more"),
        ("train_gpt", "--device cpu --width 65", "--width: got 65; accepted: multiples of --heads, 4"),
        ("train_gpt", "--device cpu --attentions sdpa,no", "--attentions: got no; accepted: flashtile, sdpa,"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    name: str, words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words.split()])
    with pytest.raises(SystemExit) as stop:
        example.main()
    flash_attn.uninstall()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["long_context", "replace_flash_attn", "serve", "train_gpt"])
def test_a_gpu_that_is_not_here_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--device", "cuda"])
    with pytest.raises(SystemExit):
        example.main()
    flash_attn.uninstall()
    assert "--device: got cuda; accepted: cpu, since torch finds no GPU here" in capsys.readouterr().err


def test_training_by_flashtile_and_by_sdpa_gives_one_loss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "train_gpt.py --device cpu --layers 1 --width 32 --heads 2 --length 48 --steps 12"
    monkeypatch.setattr(sys, "argv", words.split())
    example = load("train_gpt")
    heads = torch.randn(3, 2, 4, 48, 16).unbind()
    torch.testing.assert_close(example.by_flashtile(*heads), example.by_sdpa(*heads))
    example.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["flashtile", "sdpa"]
    losses = [float(row[1]) for row in rows]
    assert losses[0] == pytest.approx(losses[1], abs=0.01)
    assert 4 < losses[0] < 6  # log(256) is 5.5


SMALL_REPLACE = ["--device=cpu", "--batch=3", "--length=40", "--new=5", "--heads=4", "--heads-kv=2", "--head-dim=16"]


def test_code_for_flash_attn_gives_what_torch_gives(replace: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert replace.flash_attn_varlen_func.__module__.startswith("flashtile.")
    assert replace.main(SMALL_REPLACE) == 0
    rows = table(capsys.readouterr().out)
    assert [name.split(": ")[1] for name, _, _ in rows] == ["output", "dq", "dk", "dv", "prompt", "5 steps"]
    assert all(0 < float(difference) < 1e-5 for _, _, difference in rows)
    packed, padded = (int(count) for count in re.findall(r"\d+", rows[0][0]))
    assert 40 < packed < padded == 120


@pytest.mark.parametrize("name", ["flash_attn_varlen_func", "flash_attn_with_kvcache"])
def test_a_difference_from_torch_is_noticed(
    name: str, replace: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    function = getattr(replace, name)
    monkeypatch.setattr(replace, name, lambda *args, **options: function(*args, **options | {"causal": False}))
    assert replace.main(SMALL_REPLACE) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["1", "4", "16"])
def test_served_tokens_are_those_of_a_dense_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer pages than slots could use, so that requests wait for those of others."""
    serve = load("serve")
    assert serve.main([*SMALL, "--page-size", page, "--memory", "0.5", "--slots", "3"]) == 0
    speed, verdict = capsys.readouterr().out.splitlines()
    count = speed.split()[0]
    assert "tokens/s" in speed
    assert verdict == f"{count} of {count} tokens are those of the dense run"
    assert int(count) > 6


def test_a_wrong_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = load("serve")
    attend = serve.PagedCache.attend

    def wrong(self: Any, layer: int, slots: slice, **step: Any) -> Any:
        return attend(self, layer, slots, **step | {"k": -step["k"]})

    monkeypatch.setattr(serve.PagedCache, "attend", wrong)
    assert serve.main(SMALL) == 1


@torch.inference_mode()
def test_a_token_depends_on_the_whole_prompt() -> None:
    """Or else a wrong cache would go unnoticed."""
    serve = load("serve")
    options = serve.parse(SMALL)
    torch.manual_seed(0)
    model, changed = serve.Llama(options), 0
    for place in range(12):
        prompt = torch.randint(options.vocabulary, (1, 12))
        other = prompt.clone()
        other[0, place] = (prompt[0, place] + 1) % options.vocabulary
        found = [
            model(tokens, serve.DenseCache(options), slice(0, 1), torch.zeros(1, dtype=torch.int32))
            for tokens in (prompt, other)
        ]
        changed += not torch.equal(*found)
    assert changed > 4


def test_pages_go_back_when_a_request_is_done() -> None:
    serve = load("serve")
    options = serve.parse([*SMALL, "--page-size", "4"])
    pages = serve.Pages(options)
    count = len(pages.free)
    assert pages.take(1, 9)
    assert len(pages.free) == count - 3
    assert not pages.take(0, 4 * count)
    pages.leave(1)
    assert sorted(pages.free) == list(range(options.slots, pages.num_pages))
