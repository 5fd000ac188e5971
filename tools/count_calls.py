"""Counts how much Python a call enters, without a GPU: the CUDA backend behind a driver that launches nothing, CPU
tensors in its calls, nothing compiled.

python tools/count_calls.py [--list CALL]

The call is `attention(q, k, v, causal=True)` of a Hopper GPU, bfloat16, d = 128. Prints for each call how often Python
functions of this package were entered, how many different ones, in how many files, and how often C++ handed the call to
Python. A comprehension, a generator expression and a lambda count as functions. "cold" is the first call of its kind in
the process, tables that are read once included. --list prints the functions of one call.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cpu"))
import fake_gpu

import flashtile
from flashtile.runtime import extension

PACKAGE = Path(flashtile.__file__).parent
EXPRESSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Trace(NamedTuple):
    """Functions that one call has entered."""

    codes: Counter[str]  # as file:line name
    num_fallbacks: int

    @property
    def functions(self) -> list[str]:
        return [name for name in self.codes if name.split()[1] not in EXPRESSIONS]

    @property
    def files(self) -> set[str]:
        return {name.partition(":")[0] for name in self.codes}


def trace(call: Callable[[], object]) -> Trace:
    codes: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes[frame.f_code] += 1

    before = extension.executor().num_fallbacks()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    names: Counter[str] = Counter()
    for code, count in codes.items():
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE):
            names[f"{path.relative_to(PACKAGE)}:{code.co_firstlineno} {code.co_name}"] += count
    return Trace(names, extension.executor().num_fallbacks() - before)


def traces() -> dict[str, Trace]:
    """Each call, in an order in which every cold one is the first of its kind."""
    q, k, v = (torch.randn(2, 8, 256, 128, dtype=torch.bfloat16) for _ in range(3))
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    dout = torch.randn_like(q)
    x = torch.ones(1, requires_grad=True)
    torch.autograd.grad(x * x, x)  # torch imports modules then
    outs: list[torch.Tensor] = []

    def forward(*tensors: torch.Tensor) -> None:
        outs.append(flashtile.attention(*tensors, causal=True))

    def backward() -> None:
        torch.autograd.grad(outs.pop(), leaves, dout)

    return {
        "cold forward": trace(lambda: forward(q, k, v)),
        "hot forward": trace(lambda: forward(q, k, v)),
        "first forward with grad": trace(lambda: forward(*leaves)),
        "cold backward": trace(backward),
        "hot forward with grad": trace(lambda: forward(*leaves)),
        "hot backward": trace(backward),
        "cold forward, window": trace(lambda: flashtile.attention(q, k, v, window=(64, 0))),
        "hot forward, window": trace(lambda: flashtile.attention(q, k, v, window=(64, 0))),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="CALL", help="print the functions that this call enters")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        fake_gpu.plug_in(fake_gpu.build(Path(folder)), setattr).reset(0)
        found = traces()
    print(f"{'':24}" + "".join(f"{name:>12}" for name in ("entered", "functions", "with more", "files", "handed over")))
    for name, one in found.items():
        numbers = sum(one.codes.values()), len(one.functions), len(one.codes), len(one.files), one.num_fallbacks
        print(f"{name:24}" + "".join(f"{number:>12}" for number in numbers))
    for name, count in sorted(found[options.list].codes.items()) if options.list else ():
        print(f"{count:>6} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
