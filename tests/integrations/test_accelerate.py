"""accelerate's context parallelism, and a Trainer's, over two ranks on the CPU against one rank: documents, padding and
windows. accelerate allows context parallelism on GPUs only, so `on_cpu` lifts its check and names FSDP2."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flashtile
from flashtile import distributed
from flashtile.distributed.launch import on_ranks

pytest.importorskip("accelerate", exc_type=ImportError)

from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Trainer, TrainingArguments

from flashtile.integrations import accelerate as ours
from flashtile.integrations import transformers as models

ROWS = 24
DECODER: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# Lengths of the documents of each row of the batch
DOCUMENTS = {
    "whole": [[ROWS], [ROWS]],
    "packed": [[5, 1, 11, 7], [20, 4]],
    "padded": [[ROWS], [17, -7]],
    "left": [[-5, 19], [ROWS]],
}


def model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "window":
        return MistralForCausalLM(MistralConfig(**DECODER, sliding_window=6))
    return LlamaForCausalLM(LlamaConfig(**DECODER))


def batch(kind: str) -> dict[str, Tensor]:
    """What a collator returns: position_ids begin anew with each packed document and go on through padding, which has
    negative lengths."""
    lengths = DOCUMENTS[kind]
    ids = torch.randint(0, 96, (2, ROWS), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "labels": ids.clone()}
    given["position_ids"] = torch.stack([torch.cat([torch.arange(abs(n)) for n in row]) for row in lengths])
    mask = torch.stack([torch.cat([torch.full((abs(n),), int(n > 0)) for n in row]) for row in lengths])
    if kind in ("padded", "left"):
        given |= {"attention_mask": mask, "position_ids": torch.arange(ROWS).expand(2, -1).contiguous()}
    given["labels"][mask == 0] = -100
    for row, parts in zip(given["labels"], lengths, strict=True):
        row[torch.tensor([0, *torch.tensor(parts).abs().cumsum(0)])[:-1]] = -100  # no document predicts the next one
    return given


def shifted(labels: Tensor) -> Tensor:
    return torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()


def expected(kind: str, which: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of the losses of each document by itself, by "eager", and its gradients."""
    whole, given = model(which), batch(kind)
    whole.set_attn_implementation("eager")
    loss = torch.zeros(())
    for row, lengths in enumerate(DOCUMENTS[kind]):
        first = 0
        for length in lengths:
            part = slice(first, first + abs(length))
            first += abs(length)
            if length > 0:
                ids, labels = given["input_ids"][row : row + 1, part], given["labels"][row : row + 1, part]
                logits = whole(input_ids=ids, use_cache=False).logits[0]
                loss = loss + torch.nn.functional.cross_entropy(
                    logits, shifted(labels)[0], reduction="sum", ignore_index=-100
                )
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in whole.named_parameters()}


def on_cpu(group: Any) -> None:
    warnings.simplefilter("ignore")
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), ACCELERATE_USE_CPU="true")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # the group is there already

    def validate(config: Any, accelerator: Any) -> None:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)

    ParallelismConfig._validate_accelerator = validate


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check(loss: Tensor, prepared: Any, kind: str, which: str, size: int) -> None:
    """FSDP2 takes the mean of the gradients."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    right, gradients = expected(kind, which)
    torch.testing.assert_close(total, right, rtol=1e-4, atol=1e-4)
    found = {name.replace("_checkpoint_wrapped_module.", ""): x.grad for name, x in prepared.named_parameters()}
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(
            full(gradient) * size, gradients[name], rtol=1e-3, atol=1e-5, msg=f"{kind} {which} {name}"
        )


def train_step(group: Any, kind: str, which: str, checkpointing: bool = False) -> None:
    size = dist.get_world_size(group)
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=size))
    ours.register(accelerator, strategy="ring")
    raw = model(which)
    if checkpointing:
        raw.train()
        raw.gradient_checkpointing_enable()
    prepared, _ = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    given = batch(kind)
    before = {name: tensor.clone() for name, tensor in given.items()}
    labels = given.pop("labels")
    target = shifted(labels)
    if kind == "whole":
        del given["position_ids"]
    buffers = [*given.values(), target]
    with accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers={target}
    ):
        assert given["input_ids"].shape == (2, ROWS // size)
        logits = prepared(**given, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=-100
        )
        loss.backward()
    assert target.shape == (2, ROWS // size)
    for name, tensor in given.items():
        assert torch.equal(tensor, before[name])
    check(loss, prepared, kind, which, size)


def with_trainer(group: Any, kind: str, which: str) -> None:
    size = dist.get_world_size(group)
    AcceleratorState._reset_state(True)
    rows = [{name: tensor[row] for name, tensor in batch(kind).items()} for row in range(2)]
    seen: list[Any] = []

    class Stopped(torch.optim.SGD):
        """The gradients before the step."""

        def step(self, closure: Any = None) -> None:
            seen.append({name: full(x.grad).clone() for name, x in trainer.model_wrapped.named_parameters()})

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            *(folder,), use_cpu=True, per_device_train_batch_size=2, max_steps=1, report_to=[], save_strategy="no",
            parallelism_config=ParallelismConfig(cp_size=size), max_grad_norm=0.0, remove_unused_columns=False,
            disable_tqdm=True, logging_strategy="no", average_tokens_across_devices=True, seed=0,
        )  # fmt: skip
        whole = model(which)
        trainer = Trainer(
            whole, arguments, train_dataset=rows, data_collator=stacked, optimizer_cls_and_kwargs=(Stopped, {"lr": 0.1})
        )
        ours.register(trainer)
        with contextlib.redirect_stdout(None):
            trainer.train()
    _, gradients = expected(kind, which)
    tokens = int(batch(kind)["labels"].ne(-100).sum())
    (found,) = seen
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            found[name] * tokens, gradient, rtol=1e-3, atol=1e-4, msg=f"Trainer, {kind} {which} {name}"
        )


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    rows = sorted(rows, key=lambda row: -int(row["input_ids"][0]))
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def ranks(group: Any) -> None:
    on_cpu(group)
    for kind in DOCUMENTS:
        train_step(group, kind, "causal")
    train_step(group, "packed", "window")
    train_step(group, "packed", "causal", checkpointing=True)
    with_trainer(group, "packed", "window")


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"target: got .*an Accelerator of accelerate"):
        ours.register(object())
    with pytest.raises(ValueError, match="sharding: got contiguous"):
        ours.register(object(), sharding="contiguous")
    rows = torch.zeros(1, 8)
    with (
        pytest.raises(ValueError, match="buffer_seq_dims: got 1 of them"),
        ours._sharded(None, {}, buffers=[rows, rows], buffer_seq_dims=[1]),
    ):
        pass
    with (
        pytest.raises(ValueError, match="buffers: got lengths \\[7, 8\\]"),
        ours._sharded(None, {}, buffers=[rows, rows[:, :7]], buffer_seq_dims=[1, 1]),
    ):
        pass
    assert rows.shape == (1, 8)


def test_models_outside_of_a_context_and_without_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model("causal")
    hooks = ours.serve(torch.nn.ModuleDict({"wrapped": plain}))
    assert len(hooks) == 1
    assert plain.config._attn_implementation == models.CONFIG_NAME
    given = batch("padded")
    mask = given["attention_mask"]
    assert plain(input_ids=given["input_ids"], attention_mask=mask).logits.isfinite().all()
    monkeypatch.setattr(distributed, "current", lambda: SimpleNamespace(seqlen=None))
    with pytest.raises(ValueError, match="buffers: got none"):
        plain(input_ids=given["input_ids"])
    monkeypatch.setattr(distributed, "current", lambda: SimpleNamespace(seqlen=ROWS))
    with pytest.raises(flashtile.Unsupported, match="attention_mask: got shape"):
        plain(input_ids=given["input_ids"], attention_mask=mask[:, None, None])
    plain.forward = lambda input_ids: None
    with pytest.raises(flashtile.Unsupported, match="position_ids: got a LlamaForCausalLM, which takes none"):
        plain(input_ids=given["input_ids"])


def test_accelerate_and_trainer() -> None:
    on_ranks(ranks, 2)
