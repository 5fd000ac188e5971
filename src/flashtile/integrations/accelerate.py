"""Context parallelism of accelerate and of transformers' Trainer on `flashtile.distributed`.

    from flashtile.integrations.accelerate import register
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=8), ...)
    register(accelerator)  # before prepare; or register(trainer), before train

accelerate drops every mask and hands the sequence to torch's `context_parallel`: documents of a packed sequence attend
to each other, and models with windows are refused. Here `maybe_context_parallel` and the Trainer stay as they are, the
model's attention becomes flashtile's, and documents, padding and windows are those of one rank. Documents are read from
cu_seq_lens_q, or else from position_ids that start anew and from attention_mask.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, Trainer

from flashtile import distributed
from flashtile.errors import unsupported, value_error
from flashtile.integrations import transformers as models

_IGNORED_LABEL = -100
# What a Trainer's batch holds for each row of the sequence
_ROWS = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")


def register(target: Any, **options: Any) -> None:
    """Serves the context parallelism of an Accelerator, before `prepare`, or of a Trainer, before `train`. The options
    are those of `flashtile.distributed.context_parallel`: strategy, timeout."""
    for name in options:
        if name not in ("strategy", "timeout"):
            raise value_error(name, options[name], "strategy and timeout; the rest is accelerate's")
    if isinstance(target, Trainer):
        target._prepare_context_parallel_inputs = functools.partial(_prepare_inputs, target)
        target = target.accelerator
    if not hasattr(target, "_prepare_cp") or not hasattr(target, "maybe_context_parallel"):
        raise value_error("target", target, "an Accelerator of accelerate 1.10 or newer, or a Trainer")
    target._prepare_cp = functools.partial(_prepare, target, options)


def _prepare(accelerator: Any, options: dict[str, Any], *args: Any) -> Any:
    """`Accelerator._prepare_cp`, which `prepare` calls with all that it is given."""
    mesh = accelerator.torch_device_mesh["cp"]
    accelerator._cp_context = functools.partial(_sharded, mesh, options)
    for arg in args:
        if isinstance(arg, torch.nn.Module):
            serve(arg)
    return args


def serve(module: torch.nn.Module) -> list[RemovableHandle]:
    """Makes each model of transformers in a module attend by flashtile and find its documents, inside
    `flashtile.distributed.context_parallel`. Attention of other models is served where it calls torch's
    scaled_dot_product_attention, without documents."""
    models.register()
    found: list[PreTrainedModel] = []
    for part in module.modules():
        if isinstance(part, PreTrainedModel) and not any(part in set(one.modules()) for one in found):
            found.append(part)
    for model in found:
        model.set_attn_implementation(models.NAME)
    return [model.register_forward_pre_hook(_find_documents, with_kwargs=True, prepend=True) for model in found]


@contextlib.contextmanager
def _sharded(
    mesh: Any,
    options: dict[str, Any],
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """torch's `context_parallel`: cuts the buffers in place, and joins those that are to be restored at the end."""
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    if len(buffers) != len(dims):
        raise value_error("buffer_seq_dims", f"{len(dims)} of them", f"{len(buffers)}, one for each buffer")
    lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)}
    if len(lengths) > 1:
        raise value_error("buffers", f"lengths {sorted(lengths)} of the sequence", "one length")
    kept = {id(buffer) for buffer in no_restore_buffers or ()}
    wholes = []
    # A tensor that is given twice is cut once
    for buffer, dim in {id(buffer): (buffer, dim) for buffer, dim in zip(buffers, dims, strict=True)}.values():
        whole = buffer.detach().clone()
        wholes.append((buffer, whole))
        _put(buffer, distributed.shard(whole, dim, mesh=mesh))
    try:
        with distributed.context_parallel(mesh, seqlen=lengths.pop() if lengths else None, **options):
            yield
    finally:
        for buffer, whole in wholes:
            if id(buffer) not in kept:
                _put(buffer, whole)


@torch.no_grad()
def _put(buffer: Tensor, values: Tensor) -> None:
    buffer.resize_(values.shape)
    buffer.copy_(values)


def _find_documents(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Before each call of a model: hands it the documents of the whole sequence as cu_seq_lens_q, in the place of its
    mask, and the positions of this rank's rows where it is given none."""
    context = distributed.current()
    if context is None:
        return None
    if context.seqlen is None:
        raise value_error("buffers", "none", "input_ids and all that has a row for each token")
    kwargs = dict(kwargs)
    mask, positions = kwargs.pop("attention_mask", None), kwargs.get("position_ids")
    for name, tensor in (("attention_mask", mask), ("position_ids", positions)):
        if tensor is not None and tensor.dim() != 2:
            raise unsupported(name, tensor, "(batch, this rank's rows)")
    if positions is None:
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise unsupported("position_ids", f"a {type(model).__name__}, which takes none", "models that take them")
        device = next(x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        kwargs["position_ids"] = distributed.position_ids(context.seqlen, mesh=context.mesh, device=device)[None]
    given = kwargs.get("cu_seq_lens_q")
    if given is None:
        documents = _documents(positions, mask, context)
    elif isinstance(given, Tensor):
        documents = (given.to("cpu", torch.int32),)
    else:
        documents = tuple(given)
    kwargs["cu_seq_lens_q"] = kwargs["cu_seq_lens_k"] = documents
    return args, kwargs


def _documents(positions: Tensor | None, mask: Tensor | None, context: Any) -> tuple[Tensor, ...]:
    """The bounds of each row of the batch, on the CPU; none where every row is one document. A document begins where
    positions do not go on, or where the mask has another value than before: padding is a document of its own."""
    known = [tensor for tensor in (positions, mask) if tensor is not None]
    if not known:
        return ()
    batch = max(tensor.shape[0] for tensor in known)
    rows = torch.stack([tensor.to(torch.int64).expand(batch, -1) for tensor in known])
    whole = distributed.unshard(rows, 2, seqlen=context.seqlen, mesh=context.mesh).cpu()
    begins = torch.zeros(whole.shape[1:], dtype=torch.bool)
    for tensor, step in zip(whole, (1, 0) if positions is not None else (0,), strict=False):
        begins[:, 1:] |= tensor.diff() != step
    if not begins.any():
        return ()
    begins[:, 0] = True
    end = torch.tensor([context.seqlen])
    return tuple(torch.cat((row.nonzero()[:, 0], end)).to(torch.int32) for row in begins)


def _prepare_inputs(trainer: Trainer, model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """`Trainer._prepare_context_parallel_inputs`; the Trainer's own accepts attn_implementation="sdpa" alone."""
    config = getattr(trainer.accelerator, "parallelism_config", None)
    if config is None or not config.cp_enabled:
        return contextlib.nullcontext, inputs
    for name in _ROWS:
        if inputs.get(name) is not None and inputs[name].dim() != 2:
            raise unsupported(name, inputs[name], "(batch, rows)")
    if inputs.get("labels") is not None and inputs.get("shift_labels") is None:
        inputs["shift_labels"] = torch.nn.functional.pad(inputs["labels"], (0, 1), value=_IGNORED_LABEL)[
            :, 1:
        ].contiguous()
    if inputs.get("position_ids") is None:
        first = next(inputs[name] for name in _ROWS if inputs.get(name) is not None)
        positions = torch.arange(first.shape[1], device=first.device).expand(first.shape[0], -1)
        inputs["position_ids"] = positions.contiguous()
    buffers = [tensor for name in _ROWS if isinstance(tensor := inputs.get(name), Tensor)]
    context = functools.partial(
        trainer.accelerator.maybe_context_parallel,
        buffers=buffers,
        buffer_seq_dims=[1] * len(buffers),
        no_restore_buffers=set(buffers),
    )
    return context, inputs
