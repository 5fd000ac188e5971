"""scaled_dot_product_attention with FLASH_ATTENTION pinned: torch's kernels and, through torch's registry of flash
attention implementations, flashtile's, in turns. bfloat16, causal. Needs a GPU.

PYTHONPATH=src python tools/time_registry.py [FOLDER]      writes registry_bf16.csv there, or to results/<device>
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from measuring import results_file
from torch import Tensor
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel

from flashtile.integrations import torch_flash
from flashtile.lab.bench import device as facts
from flashtile.lab.bench.rows import Environment, Writer
from flashtile.lab.bench.timing import median_ms

SHAPES = ((4, 16, 2048, 64), (4, 16, 4096, 128), (4, 8, 4096, 256))  # batch, heads, seqlen, head_dim
ROUNDS = 15


@dataclass(frozen=True)
class RegistryRow:
    direction: str  # fwd or fwd+bwd
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    torch_ms: float
    flashtile_ms: float
    env: Environment


def attend(q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None) -> Any:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        if dout is None:
            with torch.no_grad():
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), dout)


def activated(call: Callable[[], Any]) -> Any:
    activate_flash_attention_impl(torch_flash.NAME)
    try:
        return call()
    finally:
        restore_flash_attention_impl()


def times(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds with torch's kernels and with flashtile's. Activation takes host time, so it is outside of both."""
    found: dict[str, list[float]] = {"torch": [], "flashtile": []}
    for _ in range(ROUNDS):
        found["torch"].append(median_ms({"call": call}, 1)["call"])
        found["flashtile"].append(activated(lambda: median_ms({"call": call}, 1)["call"]))
    medians = [sorted(values)[len(values) // 2] for values in found.values()]
    return medians[0], medians[1]


def main() -> None:
    torch_flash.register()
    env = facts.environment("cuda", sys.argv[1:], "python tools/time_registry.py")
    with Writer(results_file("registry_bf16.csv", *sys.argv[1:2]), RegistryRow) as writer:
        for shape in SHAPES:
            q, k, v, dout = (
                torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=index < 3) for index in range(4)
            )
            for direction, given in (("fwd", None), ("fwd+bwd", dout)):
                row = RegistryRow(direction, *shape, *times(partial(attend, q, k, v, given)), env)
                writer.add([row])
                print(direction, *shape, f"{row.torch_ms:.3f} {row.flashtile_ms:.3f}", flush=True)


if __name__ == "__main__":
    main()
