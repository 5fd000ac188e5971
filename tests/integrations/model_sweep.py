"""One model type under attn_implementation="flashtile" against transformers' own eager attention."""

from __future__ import annotations

import copy
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tiny_models
import torch
from tiny_models import BATCH, FIRST_TOKEN, ROWS
from torch import Tensor

import flashtile
from flashtile.integrations import transformers as ours

TOLERANCE = 2e-4  # of the largest value


@dataclass
class Result:
    outcome: str  # right, refused, wrong, without attention, not made
    detail: str = ""
    calls: int = 0
    seen: dict[str, str] = field(default_factory=dict)


@contextmanager
def counting(counts: Counter[str]) -> Iterator[None]:
    """Calls of flashtile, and of the eager attention functions of transformers' modules."""
    originals: list[tuple[Any, str, Any]] = []

    def count(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            counts[label] += 1
            return original(*args, **options)

        originals.append((owner, name, original))
        setattr(owner, name, counted)

    count(ours, "attention", "flashtile")
    count(ours, "attention_varlen", "flashtile")
    count(ours, "_packed", "packed")
    for key, module in list(sys.modules.items()):
        if key.startswith("transformers.models.") and "eager_attention_forward" in vars(module):
            count(module, "eager_attention_forward", "eager")
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def run(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(2)
    with torch.no_grad():
        return {key: value.clone() for key, value in tiny_models.tensors_of(model(**inputs))}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor], mask: Tensor | None = None) -> float:
    """The largest, as part of the largest value of its tensor; at tokens where there is padding."""
    if found.keys() != expected.keys():
        return float("inf")
    worst = 0.0
    of_rows = {k for k, v in expected.items() if mask is not None and v.shape[:2] == mask.shape}
    for name, value in expected.items():
        other = found[name]
        if other.shape != value.shape:
            return float("inf")
        if of_rows:
            if name not in of_rows:
                continue
            value, other = value[mask.bool()], other[mask.bool()]
        known = value.isfinite()
        if value.numel() == 0 or not known.any():
            continue
        if not other[known].isfinite().all():
            return float("inf")
        error = (other - value)[known].abs().max() / value[known].abs().max().clamp(min=1e-6)
        worst = max(worst, error.item())
    return worst


def padding(side: str) -> Tensor:
    columns, lengths = torch.arange(ROWS), torch.tensor([ROWS, 7])[:BATCH, None]
    return (columns < lengths if side == "right" else columns >= ROWS - lengths).long()


def is_refusal(error: Exception) -> bool:
    """True for an error of flashtile, or of a model that refuses every name with "flash" in it."""
    return isinstance(error, ValueError) and (
        "got 'flashtile' for" in str(error) or "='flashtile'` is not" in str(error)
    )


def refused(function: Callable[[], Any]) -> str | None:
    try:
        function()
    except Exception as error:
        if not is_refusal(error):
            raise
        return str(error)
    return None


def check(name: str, task: str = "") -> Result:
    try:
        getattr(tiny_models.model_class(name, task), "config_class")  # noqa: B009, raises where a package is missing
    except LookupError as error:
        return Result("no model", str(error))
    except ImportError as error:
        return Result("not made", " ".join(str(error).split())[:120])
    reasons = []
    for few in (False, True):
        result = checked(name, task, few)
        if result.outcome != "not made":
            return result
        reasons.append(result.detail)
    return Result("not made", " | ".join(dict.fromkeys(reasons)))


def checked(name: str, task: str, few: bool) -> Result:
    def make(implementation: str) -> Any:
        return tiny_models.tiny_model(name, task, few, attn_implementation=implementation)

    eager, reason = None, ""
    try:
        eager = make("eager")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    models: list[Any] = []
    try:
        refusal = refused(lambda: models.append(make("flashtile")))
    except Exception as error:
        if eager is None:
            return Result("not made", reason)
        return Result("wrong", f"making it: {type(error).__name__}: {error}")
    if refusal is not None and eager is not None:
        later = refused(lambda: eager.set_attn_implementation("flashtile"))
        if "got 'flashtile' for" not in refusal:  # the model itself does not like "flash" in a name
            models.append(eager)
            eager = make("eager")
        elif later is None:
            return Result("wrong", "refused when it is made, accepted by set_attn_implementation")
    if refusal is not None and not models:
        return Result("refused", refusal)
    if eager is None:
        return Result("not made", reason)
    for inputs in tiny_models.inputs_of(eager):
        try:
            expected = run(eager, inputs)
            if not expected or not all(value.isfinite().any() for value in expected.values()):
                raise ValueError(f"no finite output of {type(eager).__name__}")
        except Exception as error:
            shapes = {key: tuple(value.shape) for key, value in inputs.items() if isinstance(value, Tensor)}
            reason = reason or f"{type(error).__name__}: {error} {shapes}"
            continue
        return compared(eager, models[0], inputs, expected)
    return Result("not made", reason or "no inputs")


def compared(eager: Any, model: Any, inputs: dict[str, Any], expected: dict[str, Tensor]) -> Result:
    result = Result("right")
    counts: Counter[str] = Counter()
    try:
        with counting(counts):
            error = difference(run(model, inputs), expected)
        result.calls = counts["flashtile"]
        result.seen["plain"] = f"{error:.1e}"
        if error > TOLERANCE and error > roundings(eager, inputs, expected):
            return Result("wrong", f"plain: {error:.1e}", result.calls)
        for way, detail in with_tokens(eager, model, inputs):
            result.seen[way] = detail
            if detail.startswith("wrong"):
                return Result("wrong", f"{way}: {detail}", result.calls)
    except flashtile.Unsupported as refusal:
        return Result("refused", f"when run: {refusal}", result.calls)
    except Exception:
        return Result("wrong", traceback.format_exc(), result.calls)
    if not result.calls:
        return Result("without attention", "", 0, result.seen)
    with spoiled():
        error = difference(run(model, inputs), expected)
    return result if error > 10 * TOLERANCE else Result("not seen", f"{error:.1e}", result.calls)


def with_tokens(eager: Any, model: Any, inputs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "input_ids" not in inputs:
        return
    if "attention_mask" in inspect.signature(eager.forward).parameters:
        for side in ("left", "right"):
            yield side, padded(eager, model, inputs, side)
    for way in ("position_ids", "cu_seq_lens"):
        yield way, packed(eager, model, inputs, way)
    yield "causal", causal(eager, model, inputs)


@contextmanager
def spoiled() -> Iterator[None]:
    """Attention with other scores, which the comparison must see."""
    original = ours.attention

    def wrong(query: Tensor, *args: Any, **options: Any) -> Any:
        return original(query * 0.5, *args, **options)

    ours.attention = wrong
    try:
        yield
    finally:
        ours.attention = original


def padded(eager: Any, model: Any, inputs: dict[str, Any], side: str) -> str:
    mask = padding(side)
    given = {**inputs, "attention_mask": mask}
    try:
        expected = run(eager, given)
        other = dict(given)
        noise = torch.where(inputs["input_ids"] > FIRST_TOKEN, inputs["input_ids"] - 1, inputs["input_ids"] + 1)
        other["input_ids"] = torch.where(mask.bool(), inputs["input_ids"], noise)
        sees_padding = difference(run(eager, other), expected, mask) > TOLERANCE
    except Exception as error:
        return f"eager: {type(error).__name__}: {str(error)[:80]}"
    error = difference(run(model, given), expected, mask)
    if error <= TOLERANCE:
        return f"{error:.1e}"
    if error <= roundings(eager, given, expected, mask):
        return f"{error:.1e}, roundings"
    return f"eager sees padding; {error:.1e}" if sees_padding else f"wrong: {error:.1e}"


def roundings(eager: Any, inputs: dict[str, Any], expected: dict[str, Tensor], mask: Tensor | None = None) -> float:
    """Returns what a model that enlarges roundings may be off: ten times what float32 is off float64, and no more than
    1 %."""
    return min(0.01, 10 * difference(run(copy.deepcopy(eager).double(), doubled(inputs)), expected, mask))


def doubled(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


LENGTHS = (5, 4, 3)


def packed(eager: Any, model: Any, inputs: dict[str, Any], way: str) -> str:
    if "decoder_input_ids" in inputs or len(inputs) > 1:
        return "not tried"
    parameters = inspect.signature(eager.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if "position_ids" not in parameters or (way == "cu_seq_lens" and not takes_any):
        return "not taken"
    ids = inputs["input_ids"][:1]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    options = {"use_cache": False} if "use_cache" in parameters or takes_any else {}
    given = {"input_ids": ids, "position_ids": positions, **options}

    def parts(model: Any) -> Tensor:
        return torch.cat([first(run(model, {"input_ids": part})) for part in ids.split(LENGTHS, 1)], 1)

    try:
        expected = parts(eager)
        block = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        see = block[:, None] == block
        works = [relative(first(run(eager, given)), expected) <= TOLERANCE]
        is_causal = (
            relative(first(run(eager, {"input_ids": ids}))[:, : LENGTHS[0]], expected[:, : LENGTHS[0]]) <= TOLERANCE
        )
        if is_causal:
            see = see & torch.ones_like(see).tril()
        mask = torch.zeros(see.shape).masked_fill(~see, torch.finfo(torch.float32).min)[None, None]
        try:
            works.append(relative(first(run(eager, {**given, "attention_mask": mask})), expected) <= TOLERANCE)
        except Exception:
            works.append(False)
    except Exception as error:
        return f"eager: {type(error).__name__}: {str(error)[:80]}"
    if not any(works) or (way == "position_ids" and not works[0]):
        return "eager mixes sequences"
    if way == "cu_seq_lens":
        lengths = torch.tensor([0, *LENGTHS]).cumsum(0)
        given |= {
            "cu_seq_lens_q": lengths,
            "cu_seq_lens_k": lengths,
            "max_length_q": max(LENGTHS),
            "max_length_k": max(LENGTHS),
        }
    counts: Counter[str] = Counter()
    try:
        with counting(counts):
            error = relative(first(run(model, given)), expected)
    except flashtile.Unsupported as refusal:
        return f"refused: {refusal}"
    if way == "cu_seq_lens" and not counts["packed"]:
        return "not handed over"
    return f"{error:.1e}" if error <= TOLERANCE else f"wrong: {error:.1e}"


def first(output: dict[str, Tensor]) -> Tensor:
    return next(iter(output.values()))


def relative(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()


def causal(eager: Any, model: Any, inputs: dict[str, Any]) -> str:
    """Whether a change of the last token changes what came before: as in the eager model."""
    key = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    other = {**inputs, key: inputs[key].clone()}
    other[key][:, -1] = torch.where(other[key][:, -1] > FIRST_TOKEN, other[key][:, -1] - 1, other[key][:, -1] + 1)
    changes = []
    for each in (eager, model):
        before, after = first(run(each, inputs)), first(run(each, other))
        if before.dim() != 3 or before.shape[1] != inputs[key].shape[1]:
            return "no rows"
        changes.append(relative(after[:, :-1], before[:, :-1]))
    if changes[0] <= 1e-6 < TOLERANCE < changes[1]:
        return f"wrong: not causal, {changes[1]:.1e}"
    return "causal" if changes[0] <= 1e-6 else "two-sided"
