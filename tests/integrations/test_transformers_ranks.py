"""A model of transformers over two and three ranks: every rank has its rows, the loss is that of the whole sequence."""

from __future__ import annotations

import itertools
import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.mistral import MistralConfig, MistralForCausalLM

import flashtile
from flashtile import distributed
from flashtile.integrations import transformers as ours

DECODER: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def models() -> list[Any]:
    torch.manual_seed(0)
    return [LlamaForCausalLM(LlamaConfig(**DECODER)), MistralForCausalLM(MistralConfig(**DECODER, sliding_window=7))]


def loss(model: Any, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def worker(rank: int, size: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    ours.register()
    tokens = torch.randint(0, 96, (1, 30), generator=torch.Generator().manual_seed(1))
    ids, labels = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(29)[None]
    for model in models():
        model.set_attn_implementation("eager")
        expected = loss(model, ids, labels, positions)
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        model.set_attn_implementation("flashtile")
        mine = [distributed.shard(tensor, 1) for tensor in (ids, labels, positions)]
        assert torch.equal(mine[2][0], distributed.position_ids(29))
        with distributed.context_parallel(seqlen=29, strategy="ring"):
            own = loss(model, *mine)
            with pytest.raises(flashtile.Unsupported, match="attention_mask: got padding"):
                model(input_ids=mine[0], attention_mask=torch.zeros_like(mine[0]))
        check_documents(model, ids, positions, mine)
        found = [own.detach(), *torch.autograd.grad(own, list(model.parameters()))]
        for tensor, theirs in zip(found, (expected.detach(), *gradients), strict=True):
            dist.all_reduce(tensor)
            torch.testing.assert_close(tensor, theirs, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


def check_documents(model: Any, ids: torch.Tensor, positions: torch.Tensor, mine: list[torch.Tensor]) -> None:
    """Documents by the call and by the context against each document by itself."""
    bounds = torch.tensor([0, 4, 5, 18, 29])
    logits = []
    with torch.no_grad():
        for first, end in itertools.pairwise(bounds):
            logits.append(
                model(input_ids=ids[:, first:end], position_ids=positions[:, first:end], use_cache=False).logits
            )
        given: dict[str, Any] = {"input_ids": mine[0], "position_ids": mine[2], "use_cache": False}
        restarting = {**given, "position_ids": mine[2] % 3}
        with (
            distributed.context_parallel(seqlen=29, strategy="ring"),
            pytest.raises(flashtile.Unsupported, match="position_ids: got positions that start again"),
        ):
            model(**restarting)
        with distributed.context_parallel(seqlen=29, strategy="ring", cu_seqlens=()):
            model(**restarting)
        with distributed.context_parallel(seqlen=29, strategy="ring"):
            model(**restarting, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
            by_call = model(**given, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds.clone()).logits
            with pytest.raises(flashtile.Unsupported, match="cu_seq_lens_k: got other bounds"):
                model(**given, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds.flip(0))
        with distributed.context_parallel(seqlen=29, strategy="ring", cu_seqlens=bounds.to(torch.int32)):
            by_context = model(**given).logits
    expected = distributed.shard(torch.cat(logits, 1), 1)
    torch.testing.assert_close(by_call, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(by_context, by_call)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks(size: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, args=(size, port), nprocs=size)
