"""The examples, small and on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize("name", ["long_context", "serve", "train_gpt"])
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
