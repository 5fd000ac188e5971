"""Tools that check results, for our tests and for yours: problems to draw, the fp64 oracle, the error rule, dropout
bits.

    case = Case(dtype=torch.bfloat16, seqlen_q=100, causal="bottom_right", bias="1hqk")
    inputs = case.make(seed=0)
    assert_agrees(run(inputs), inputs)

The error rule. `ref` is the math in float64, `yardstick` the same math in the input dtype. An output may be off by
twice the yardstick's largest error plus rounding, a gradient by three times; the same holds for each row's norm with
twice the factor. A yardstick may be right by luck. So an error is never wrong below the floor: four times the
root-mean-square error of a kernel that computes in float32, rounds P, dS and what it stores to the input dtype, and
makes every rounding as large as it can be (`testing.floor`: variances of roundings, carried from the scores to every
result in float64). Where the yardstick overflows (float16 q k^T before the scale), the floor alone judges.
"""

from flashtile.testing.cases import (
    DOUT_MEMORIES,
    FORWARD_ONLY,
    GRADS,
    KINDS,
    MEMORIES,
    OUTPUTS,
    VALUES,
    Case,
    Inputs,
    Result,
    dropout_mask,
)
from flashtile.testing.floor import rounding_floor
from flashtile.testing.rule import Expected, assert_agrees, disagreement, disagreements, expect, oracle, run, yardstick

__all__ = [
    "DOUT_MEMORIES",
    "FORWARD_ONLY",
    "GRADS",
    "KINDS",
    "MEMORIES",
    "OUTPUTS",
    "VALUES",
    "Case",
    "Expected",
    "Inputs",
    "Result",
    "assert_agrees",
    "disagreement",
    "disagreements",
    "dropout_mask",
    "expect",
    "oracle",
    "rounding_floor",
    "run",
    "yardstick",
]
