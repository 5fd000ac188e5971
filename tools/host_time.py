"""Host time of a call without a GPU: the CUDA backend behind a driver that launches nothing, CPU tensors in its calls.

python tools/host_time.py [--installed] [--rounds 600] [--calls 30]

One batch, one head, 64 queries over 64 keys, d = 64. Prints the least time of a call in microseconds over rounds of 30
calls (on a busy machine fewer are less often interrupted), interleaved: without a gradient, to be differentiated, with
both passes by `torch.autograd.grad`, and the same of an `autograd.Function` that does nothing. "registry" is torch's
flash attention operator, causal, with the CUDA kernels of `flashtile.integrations.torch_flash` in its place. Then steps
of `attention_kvcache`: 8 sequences, 32 heads over 8, d = 128, pages of 16; without new rows, with them, and with rotary
embedding. What a real driver takes to launch and autograd's way to a GPU's thread are not in it: `flashtile bench
--overhead` has both.

--installed: what `flashtile.install()` costs instead, on calls of which little but the way to them is left: 8 queries
over 8 keys, d = 16, float32. scaled_dot_product_attention on the CPU, with torch's kernels and installed, beside
`flashtile.attention`; then torch's operators for CUDA with flashtile's CUDA kernels behind them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cpu"))
import fake_gpu

import flashtile
from flashtile.integrations import torch_flash, torch_ops

Call = Callable[[], object]
COLUMNS = (
    *("no_grad", "grad", "fwd+bwd", "nothing, grad", "nothing, fwd+bwd"),
    *("registry, no_grad", "registry, grad", "registry, fwd+bwd"),
    *("read", "append", "append, rotary"),
)
INSTALLED_COLUMNS = ("no_grad", "grad", "both passes")


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, out: tuple[Any]) -> Any:
        return out[0].detach()

    @staticmethod
    def backward(ctx: Any, dout: Any) -> tuple[Any, ...]:
        return dout, dout, dout, None


def cases(dtype: torch.dtype) -> list[Call]:
    q, k, v = (torch.randn(1, 1, 64, 64, dtype=dtype) for _ in range(3))
    leaves = tuple(tensor.clone().requires_grad_() for tensor in (q, k, v))
    dout, out = torch.randn_like(q), (torch.randn_like(q),)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default._op
    apply = super(torch.autograd.Function, Nothing).apply
    return [
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


def steps(dtype: torch.dtype) -> list[Call]:
    q, k, v = (torch.randn(8, 1, heads, 128, dtype=dtype) for heads in (32, 8, 8))
    pages, table = torch.zeros(2, 128, 16, 8, 128, dtype=dtype), torch.arange(128, dtype=torch.int32).view(8, 16)
    lengths, angles = torch.full((8,), 100, dtype=torch.int32), torch.rand(256, 64, dtype=dtype)
    shared = {"cache_seqlens": lengths, "block_table": table, "causal": True, "backend": "cuda"}
    new, rotary = {"k": k, "v": v}, {"rotary_cos": angles, "rotary_sin": angles}
    return [partial(flashtile.attention_kvcache, q, *pages, **shared, **options) for options in ({}, new, new | rotary)]


def three(attend: Callable[..., Tensor]) -> list[Call]:
    """The call without a gradient, to be differentiated, and with its backward pass."""
    inputs = [torch.randn(1, 1, 8, 16) for _ in range(3)]
    leaves, dout = [tensor.clone().requires_grad_() for tensor in inputs], torch.randn(1, 1, 8, 16)
    return [
        lambda: attend(*inputs),
        lambda: attend(*leaves),
        lambda: torch.autograd.grad(attend(*leaves), leaves, dout),
    ]


def least(calls: Sequence[Call], rounds: int, num_calls: int, before: Call = lambda: None) -> list[float]:
    """Returns the least time of each call in microseconds. `before` runs ahead of each batch of them."""
    times = [float("inf")] * len(calls)
    for call in calls:
        call()  # makes the plans
    for _ in range(rounds):
        for place, call in enumerate(calls):
            before()
            start = time.perf_counter()
            for _ in range(num_calls):
                call()
            times[place] = min(times[place], (time.perf_counter() - start) / num_calls * 1e6)
    return times


@contextmanager
def driver() -> Iterator[Call]:
    """Plugs in a driver that launches nothing, and gives what empties its record."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = fake_gpu.plug_in(fake_gpu.build(Path(folder)), setattr)
        yield lambda: recorder.reset(0)


def show(name: str, cells: Iterable[float | str], widths: tuple[int, int]) -> None:
    first, other = widths
    texts = (cell if isinstance(cell, str) else f"{cell:.1f}" for cell in cells)
    print(f"{name:{first}}" + "".join(f"{text:>{other}}" for text in texts))


def print_calls(numbers: tuple[int, int]) -> None:
    widths = (9, 19)
    with driver() as reset:
        operators = torch_flash.Handle(torch_flash.put_cuda_kernels_in_place("CPU"))
        show("", COLUMNS, widths)
        for dtype in (torch.bfloat16, torch.float32):
            show(str(dtype)[6:], least(cases(dtype), *numbers, reset), widths)
        operators.remove()


def print_installed(numbers: tuple[int, int]) -> None:
    widths = (46, 13)
    show("", INSTALLED_COLUMNS, widths)
    show("CPU: torch", least(three(F.scaled_dot_product_attention), *numbers), widths)
    flashtile.install()
    show("CPU: torch's operator, installed", least(three(F.scaled_dot_product_attention), *numbers), widths)
    flashtile.uninstall()
    show("CPU: flashtile.attention", least(three(flashtile.attention), *numbers), widths)
    with driver() as reset:
        libraries = torch_ops.override(torch_ops.Report(), ("CUDA",), cuda_key="CPU")
        aten = torch.ops.aten
        for name, attend in (
            ("flash", lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v)[0]),
            ("efficient", lambda q, k, v: aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[0]),
            ("cudnn", lambda q, k, v: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[0]),
        ):
            show(f"CUDA: torch's {name} operator, installed", least(three(attend), *numbers, reset), widths)
        torch_ops.remove(libraries)
        forced = three(lambda q, k, v: flashtile.attention(q, k, v, backend="cuda"))
        show("CUDA: flashtile.attention", least(forced, *numbers, reset), widths)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--installed", action="store_true", help="what flashtile.install() costs")
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--calls", type=int, default=30, help="of a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    (print_installed if options.installed else print_calls)((options.rounds, options.calls))
    return 0


if __name__ == "__main__":
    sys.exit(main())
