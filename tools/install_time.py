"""What `flashtile.install()` costs the host: a call of torch's attention operators with flashtile's kernels behind it.

python tools/install_time.py [--rounds 300] [--calls 20]

One batch, one head, 8 queries over 8 keys, d = 16, float32, one thread: a call of which little but the way to it is
left. Prints the least time of a call in microseconds over interleaved rounds: scaled_dot_product_attention on the CPU,
with torch's kernels and installed, beside `flashtile.attention`. Then torch's operators for CUDA on CPU tensors, with
flashtile's CUDA kernels behind a driver that launches nothing (tools/host_time.py has the same of others).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cpu"))
import fake_gpu

import flashtile
from flashtile.integrations import torch_ops

Calls = list[Callable[[], object]]
COLUMNS = ("no_grad", "grad", "both passes")


def three(attend: Callable[..., Tensor]) -> Calls:
    """The call without a gradient, to be differentiated, and with its backward pass."""
    inputs = [torch.randn(1, 1, 8, 16) for _ in range(3)]
    leaves, dout = [tensor.clone().requires_grad_() for tensor in inputs], torch.randn(1, 1, 8, 16)
    return [
        lambda: attend(*inputs),
        lambda: attend(*leaves),
        lambda: torch.autograd.grad(attend(*leaves), leaves, dout),
    ]


def least(calls: Calls, rounds: int, num_calls: int, before: Callable[[], None] = lambda: None) -> list[float]:
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


def show(name: str, times: list[float]) -> None:
    print(f"{name:46}" + "".join(f"{micros:>13.1f}" for micros in times))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=20, help="of a round")
    options = parser.parse_args()
    numbers = options.rounds, options.calls
    torch.set_num_threads(1)
    print(f"{'':46}" + "".join(f"{name:>13}" for name in COLUMNS))
    show("CPU: torch", least(three(F.scaled_dot_product_attention), *numbers))
    flashtile.install()
    show("CPU: torch's operator, installed", least(three(F.scaled_dot_product_attention), *numbers))
    flashtile.uninstall()
    show("CPU: flashtile.attention", least(three(flashtile.attention), *numbers))
    with tempfile.TemporaryDirectory() as folder:
        recorder = fake_gpu.plug_in(fake_gpu.build(Path(folder)), setattr)
        libraries = torch_ops.override(torch_ops.Report(), ("CUDA",), cuda_key="CPU")
        aten = torch.ops.aten
        for name, attend in (
            ("flash", lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v)[0]),
            ("efficient", lambda q, k, v: aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[0]),
            ("cudnn", lambda q, k, v: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[0]),
        ):
            show(f"CUDA: torch's {name} operator, installed", least(three(attend), *numbers, lambda: recorder.reset(0)))
        torch_ops.remove(libraries)
        forced = three(lambda q, k, v: flashtile.attention(q, k, v, backend="cuda"))
        show("CUDA: flashtile.attention", least(forced, *numbers, lambda: recorder.reset(0)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
