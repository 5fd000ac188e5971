"""Every model type of transformers with attn_implementation="flashtile": right or refused by name. FLASHTILE_MODELS
names the types to run, separated by commas; a table of the outcomes is printed at the end."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import model_sweep
import pytest
import tiny_models
import torch
import transformers
from tiny_models import BATCH, FIRST_TOKEN, ROWS, VOCABULARY, WIDTH

import flashtile
from flashtile.integrations import transformers as ours

ROOT = Path(__file__).parents[2]
IS_PINNED = f"transformers=={transformers.__version__}\n" in (ROOT / "requirements-integrations.txt").read_text()
ASKED = os.environ.get("FLASHTILE_MODELS")
CASES = [case for case in tiny_models.cases() if ASKED is None or case[0] in ASKED.split(",")]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    ours.register()
    yield
    ours.unregister()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "task"), CASES, ids=[f"{name}-{task}".strip("-") for name, task in CASES])
def test_model_type(name: str, task: str, record_property: Callable[[str, object], None]) -> None:
    if IS_PINNED and name in tiny_models.NOT_MADE:
        result = model_sweep.Result("not made", tiny_models.NOT_MADE[name])
    else:
        result = model_sweep.check(name, task)
    record_property("model_type", [result.outcome, name])
    if result.outcome in ("not made", "no model"):
        known = name in tiny_models.NOT_MADE or result.outcome == "no model" or not IS_PINNED
        assert known, f"cannot be made: {result.detail}"
        pytest.skip(f"{result.outcome}: {result.detail}"[:200])
    assert result.outcome in ("right", "refused", "without attention"), result.detail
    if result.outcome == "refused":
        assert re.search("got 'flashtile' for [A-Z]|got nothing from [A-Z]|='flashtile'` is not", result.detail)


# Why models are refused, by name

REFUSED: dict[str, tuple[str, str]] = {
    # Causal by a mask that their own attention adds
    **dict.fromkeys(
        ("bloom", "xglm", "codegen", "big_bird", "mpt"), ("does not call transformers' AttentionInterface", "")
    ),
    # Their own attention would add a boolean mask as 0 and 1
    **dict.fromkeys(
        ("megatron-bert", "mpnet", "rembert", "roformer", "convbert", "ibert", "nystromformer", "tapas", "longformer"),
        ("does not call transformers' AttentionInterface", ""),
    ),
    # Their modules say is_causal=False and rely on a stored mask
    **dict.fromkeys(("bigbird_pegasus", "nllb-moe", "pegasus_x"), ("needs a stored mask", "")),
    **dict.fromkeys(("gptj", "falcon", "gpt_neo"), ("is one of its own classes, chosen by name", "")),
    # Refused because of a part
    "sam": ("is one of its own classes, chosen by name", "SamVisionEncoder"),
    "vitmatte": ("does not call transformers' AttentionInterface", "VitDetBackbone"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    reason, part = REFUSED[name]
    kind, config = tiny_models.model_class(name), tiny_models.tiny_config(name)
    words = f"attn_implementation: got 'flashtile' for {part or kind.__name__}, whose attention {reason}; accepted: "
    with pytest.raises(ValueError, match=f"{words}models that transformers serves by position"):
        kind._from_config(config, attn_implementation="flashtile")
    model = kind._from_config(config, attn_implementation="eager")
    for asked in ("flashtile", "ftile"):
        with pytest.raises(ValueError, match=words):
            model.set_attn_implementation(asked)
    assert model.config._attn_implementation == "eager"


@pytest.mark.filterwarnings("ignore")
def test_the_other_parts_of_a_refused_model_can_be_served() -> None:
    model, other = (tiny_models.tiny_model("granite_speech", attn_implementation="eager") for _ in range(2))
    model.set_attn_implementation({"text_config": "flashtile"})
    assert model.config.text_config._attn_implementation == "ftile"
    assert model.config.encoder_config._attn_implementation == "eager"
    inputs = {"input_ids": ids_of(BATCH, ROWS)}
    counts: Counter[str] = Counter()
    with model_sweep.counting(counts):
        found = model_sweep.run(model, inputs)
    assert counts["flashtile"] > 0
    assert model_sweep.difference(found, model_sweep.run(other, inputs)) < model_sweep.TOLERANCE


# Masks that do not say what the modules say


def text_model(name: str, **changes: Any) -> Any:
    config = tiny_models.tiny_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    model = tiny_models.model_class(name)._from_config(config, attn_implementation="eager")
    tiny_models.sharpen(model)
    return model.eval()


def ids_of(batch: int, rows: int) -> torch.Tensor:
    return torch.randint(FIRST_TOKEN, VOCABULARY, (batch, rows))


@pytest.mark.parametrize("is_packed", [False, True])
def test_modernbert_keeps_its_two_sided_window(is_packed: bool) -> None:
    """Each layer against eager attention of the same sequences, padded."""
    lengths = (30, 17, 9)
    model = text_model("modernbert")
    assert model.config.sliding_window < min(lengths) // 2
    ids = ids_of(len(lengths), max(lengths))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask.long()).logits[mask]
        alone = model(input_ids=ids[:1, : lengths[0]]).logits[0]
        torch.testing.assert_close(alone, expected[: lengths[0]], rtol=1e-4, atol=1e-4)
        model.set_attn_implementation("flashtile")
        if is_packed:
            ends = torch.tensor([0, *lengths]).cumsum(0).int()
            longest = {"max_length_q": max(lengths), "max_length_k": max(lengths)}
            positions = torch.cat([torch.arange(n) for n in lengths])[None]
            found = model(
                input_ids=ids[mask][None], position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends, **longest
            ).logits[0]
        else:
            found = model(input_ids=ids, attention_mask=mask.long()).logits[mask]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def test_a_model_with_its_window_in_the_mask_cannot_be_packed() -> None:
    model = text_model("moshi")
    model.set_attn_implementation("flashtile")
    ends = torch.tensor([0, 5, ROWS]).int()
    with pytest.raises(flashtile.Unsupported, match="sliding_window: got nothing from MoshiAttention"):
        model(input_ids=ids_of(1, ROWS), cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_a_model_that_adds_numbers_to_its_scores_cannot_be_packed() -> None:
    model = text_model("doge")
    model.set_attn_implementation("flashtile")
    ends = torch.tensor([0, 5, ROWS]).int()
    with pytest.raises(flashtile.Unsupported, match="attention_mask: got numbers to add with cu_seq_lens_q"):
        model(input_ids=ids_of(1, ROWS), cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_paligemma_without_token_types_is_causal() -> None:
    """Its text model says is_causal=False, and its masks are causal."""
    model = tiny_models.tiny_model("paligemma", attn_implementation="eager")
    ids = ids_of(BATCH, ROWS)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        model.set_attn_implementation("flashtile")
        found = model(input_ids=ids).logits
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
        ends = torch.tensor([0, 5, ROWS]).int()
        with pytest.raises(flashtile.Unsupported, match="cu_seq_lens_q: got it with use_bidirectional_attention=True"):
            model(input_ids=ids[:1], cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_keys_may_have_any_strides() -> None:
    model = text_model("llama")
    module = model.model.layers[0].self_attn
    q, k, v = (torch.randn(1, 4, WIDTH // 4, ROWS).transpose(2, 3) for _ in range(3))
    found, _ = ours.attention_forward(module, q, k, v, None)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(found, expected)


def test_the_sweep_sees_another_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost mask, in three models."""
    original = ours.attention

    def without(*args: Any, **options: Any) -> Any:
        return original(*args, **{**options, "causal": False, "mask": None})

    monkeypatch.setattr(ours, "attention", without)
    assert [model_sweep.check(name).outcome for name in ("llama", "gpt2", "t5")] == ["wrong"] * 3
