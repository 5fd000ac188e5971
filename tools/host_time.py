"""Host time of a call without a GPU: the CUDA backend behind a driver that launches nothing, CPU tensors in its calls.

python tools/host_time.py [--rounds 600] [--calls 30]

One batch, one head, 64 queries over 64 keys, d = 64. Prints the least time of a call in microseconds over rounds of 30
calls (on a busy machine fewer are less often interrupted), interleaved: without a gradient, to be differentiated, with
both passes by `torch.autograd.grad`, and the same of an `autograd.Function` that does nothing. "registry" is torch's
flash attention operator, causal, with the CUDA kernels of `flashtile.integrations.torch_flash` in its place. Then steps
of `attention_kvcache`: 8 sequences, 32 heads over 8, d = 128, pages of 16; without new rows, with them, and with rotary
embedding. What a real driver takes to launch and autograd's way to a GPU's thread are not in it: `flashtile bench
--overhead` has both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cpu"))
import fake_gpu

import flashtile
from flashtile.integrations import torch_flash

COLUMNS = (
    *("no_grad", "grad", "fwd+bwd", "nothing, grad", "nothing, fwd+bwd"),
    *("registry, no_grad", "registry, grad", "registry, fwd+bwd"),
    *("read", "append", "append, rotary"),
)


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, out: tuple[Any]) -> Any:
        return out[0].detach()

    @staticmethod
    def backward(ctx: Any, dout: Any) -> tuple[Any, ...]:
        return dout, dout, dout, None


def cases(dtype: torch.dtype) -> list[Callable[[], object]]:
    q, k, v = (torch.randn(1, 1, 64, 64, dtype=dtype) for _ in range(3))
    leaves = tuple(tensor.clone().requires_grad_() for tensor in (q, k, v))
    dout, out = torch.randn_like(q), (torch.randn_like(q),)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default._op
    apply = super(torch.autograd.Function, Nothing).apply
    found = [
        lambda: flashtile.attention(q, k, v, backend="cuda"),
        lambda: flashtile.attention(*leaves, backend="cuda"),
        lambda: torch.autograd.grad(flashtile.attention(*leaves, backend="cuda"), leaves, dout),
        lambda: apply(*leaves, out),
        lambda: torch.autograd.grad(apply(*leaves, out), leaves, dout),
        lambda: flash(q, k, v, 0.0, True),
        lambda: flash(*leaves, 0.0, True),
        lambda: torch.autograd.grad(flash(*leaves, 0.0, True)[0], leaves, dout),
        *steps(dtype),
    ]
    for call in found:
        call()  # makes the plans
    return found


def steps(dtype: torch.dtype) -> list[Callable[[], object]]:
    q, k, v = (torch.randn(8, 1, heads, 128, dtype=dtype) for heads in (32, 8, 8))
    pages, table = torch.zeros(2, 128, 16, 8, 128, dtype=dtype), torch.arange(128, dtype=torch.int32).view(8, 16)
    lengths, angles = torch.full((8,), 100, dtype=torch.int32), torch.rand(256, 64, dtype=dtype)
    shared = {"cache_seqlens": lengths, "block_table": table, "causal": True, "backend": "cuda"}
    new, rotary = {"k": k, "v": v}, {"rotary_cos": angles, "rotary_sin": angles}
    return [partial(flashtile.attention_kvcache, q, *pages, **shared, **options) for options in ({}, new, new | rotary)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--calls", type=int, default=30, help="of a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        recorder = fake_gpu.plug_in(fake_gpu.build(Path(folder)), setattr)
        operators = torch_flash.Handle(torch_flash.put_cuda_kernels_in_place("CPU"))
        print(f"{'':9}" + "".join(f"{name:>19}" for name in COLUMNS))
        for dtype in (torch.bfloat16, torch.float32):
            calls = cases(dtype)
            least = [float("inf")] * len(calls)
            for _ in range(options.rounds):
                for place, call in enumerate(calls):
                    recorder.reset(0)
                    start = time.perf_counter()
                    for _ in range(options.calls):
                        call()
                    least[place] = min(least[place], (time.perf_counter() - start) / options.calls * 1e6)
            print(f"{str(dtype)[6:]:9}" + "".join(f"{micros:>19.1f}" for micros in least))
        operators.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())
