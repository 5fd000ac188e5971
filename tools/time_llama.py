"""A Llama of 1B shape with transformers' "sdpa" and with "flashtile": prefill and training step, timed in turns, and
where the time goes. Random weights, bfloat16. Needs transformers, and a GPU unless --tiny.

PYTHONPATH=src python tools/time_llama.py                      writes results/<device>/llama_bf16.csv
PYTHONPATH=src python tools/time_llama.py --rounds 5 --out .   fewer rounds, into another folder
PYTHONPATH=src python tools/time_llama.py --tiny               a small model on any device; prints, writes nothing
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import results_file
from torch.autograd import DeviceType
from transformers import LlamaConfig, LlamaForCausalLM

from flashtile.integrations.transformers import register
from flashtile.lab.bench import device as facts
from flashtile.lab.bench.rows import Environment, Writer
from flashtile.lab.bench.timing import quantile

ATTENTIONS = ("sdpa", "flashtile")
PREFILLS = ((8, 512), (4, 1024), (4, 2048), (2, 4096), (1, 8192))
STEPS = ((4, 2048), (1, 8192))
# What the names of attention kernels contain: flashtile's, and torch's own, cuDNN's
_ATTENTION_KERNELS = ("fwd_sm90", "bwd_sm90", "bwd_convert", "fwd_sm80", "bwd_sm80", "flash", "sdpa", "fmha")


@dataclass(frozen=True)
class ModelRow:
    """One pass of the model with one attention."""

    attention: str
    direction: str  # prefill or step
    batch: int
    seqlen: int
    median_ms: float
    p20_ms: float
    p80_ms: float
    num_rounds: int
    ratio: float  # median over rounds of this time over that of "sdpa" in the same round
    ratio_error: float  # standard error of that median
    attention_ms: float | None  # sum over the attention kernels of one pass, under torch's profiler
    other_ms: float | None  # the other kernels
    kernels: str  # names of the attention kernels
    env: Environment


def make_model(is_tiny: bool, device: str) -> LlamaForCausalLM:
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
    if is_tiny:
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    with torch.device(device):
        torch.manual_seed(0)
        config = LlamaConfig(**shape, **heads, max_position_embeddings=16384, tie_word_embeddings=True)
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


def prefill(model: LlamaForCausalLM, ids: torch.Tensor) -> Callable[[], Any]:
    """Returns the call that `generate` makes first: all tokens into an empty cache, logits of the last one."""

    def run() -> Any:
        with torch.no_grad():
            return model(ids, use_cache=True, logits_to_keep=1).logits

    return run


def step(model: LlamaForCausalLM, ids: torch.Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    def run() -> Any:
        optimizer.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


def seconds_of(run: Callable[[], Any]) -> float:
    """Times from an idle device to the end of its work, so that time of the host that the device waits for counts."""
    if not torch.cuda.is_available():
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def kernel_times(run: Callable[[], Any]) -> tuple[float | None, float | None, str]:
    """Milliseconds of the attention kernels and of the others, and the names of the former."""
    if not torch.cuda.is_available():
        return None, None, ""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    others = 0.0
    for event in profile.events():
        if event.device_type != DeviceType.CUDA:
            continue
        if any(word in event.name for word in _ATTENTION_KERNELS):
            found[event.name.removeprefix("void ").partition("<")[0].partition("(")[0]] += event.device_time / 1e3
        else:
            others += event.device_time / 1e3
    return sum(found.values()), others, " ".join(f"{name}={ms:.3f}" for name, ms in found.items())


def compare(
    model: LlamaForCausalLM,
    run: Callable[[], Any],
    direction: str,
    shape: tuple[int, int],
    rounds: int,
    env: Environment,
) -> list[ModelRow]:
    """Rounds with both attentions, whose order alternates."""
    seconds: dict[str, list[float]] = {name: [] for name in ATTENTIONS}
    kernels = {}
    for name in ATTENTIONS:
        model.set_attn_implementation(name)
        run()
        kernels[name] = kernel_times(run)
    for index in range(rounds):
        for name in ATTENTIONS[:: 1 if index % 2 else -1]:
            model.set_attn_implementation(name)
            seconds[name].append(seconds_of(run))
    rows = []
    for name, own in seconds.items():
        ratios = [mine / theirs for mine, theirs in zip(own, seconds["sdpa"], strict=True)]
        spread = 1.2533 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
        quantiles = {f"p{percent}_ms": 1e3 * quantile(own, percent / 100) for percent in (20, 80)}
        row = ModelRow(
            *(name, direction, *shape, 1e3 * statistics.median(own)),
            **quantiles,
            num_rounds=rounds,
            ratio=statistics.median(ratios),
            ratio_error=spread,
            attention_ms=kernels[name][0],
            other_ms=kernels[name][1],
            kernels=kernels[name][2],
            env=env,
        )
        rows.append(row)
        parts = "" if row.attention_ms is None else f"   attention {row.attention_ms:.3f} others {row.other_ms:.3f} ms"
        print(
            f"{direction:8s} {shape[0]:2d} x {shape[1]:5d} {name:10s} {row.median_ms:8.3f} ms"
            f"   ratio {row.ratio:.4f} +- {row.ratio_error:.4f}{parts}   {row.kernels}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description='A Llama of 1B shape with "sdpa" and "flashtile".')
    parser.add_argument("--rounds", type=int, default=25, help="of a prefill; a training step has a third")
    parser.add_argument("--out", type=Path, help="folder of the CSV instead of results/<device>")
    parser.add_argument("--tiny", action="store_true", help="a small model, also without a GPU; writes nothing")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        raise SystemExit("No GPU: this times kernels of a GPU. --tiny tries the script on the CPU.")
    register()
    env = facts.environment(device, sys.argv[1:], "python tools/time_llama.py")
    model = make_model(options.tiny, device)
    rows: list[ModelRow] = []

    def tokens(batch: int, seqlen: int) -> torch.Tensor:
        return torch.randint(model.config.vocab_size, (batch, seqlen), device=device)

    for shape in ((2, 16),) if options.tiny else PREFILLS:
        rows += compare(model.eval(), prefill(model, tokens(*shape)), "prefill", shape, options.rounds, env)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    for shape in ((2, 16),) if options.tiny else STEPS:
        run = step(model.train(), tokens(*shape), optimizer)
        rows += compare(model, run, "step", shape, max(2, options.rounds // 3), env)
    if not options.tiny:
        with Writer(results_file("llama_bf16.csv", options.out, device), ModelRow) as writer:
            writer.add(rows)


if __name__ == "__main__":
    main()
