"""Providers that do what a test needs, and a sweep over small problems."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from flashtile.lab.bench.points import Plan, Point, length_sweep
from flashtile.lab.bench.providers import Attend, Provider
from flashtile.lab.bench.rows import Environment, Row
from flashtile.lab.bench.sweep import Settings, Sweep

ENV = Environment(
    "a device",
    "1.2",
    "2.13",
    "13.0",
    "9.1",
    "3.5",
    "3.11",
    "0.1",
    "0123456789ab",
    False,
    "2026-01-02T03:04:05Z",
    "flashtile bench",
)
SETTINGS = Settings("cpu", cache_bytes=0, budget_s=0.002, call_limit_s=1e3, compile_limit_s=1e3)


class Clock:
    """In place of `time` in bench/timing.py: calls say what they take, and a look at it takes a microsecond."""

    now_ns = 0

    def perf_counter_ns(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += int(1e9 * seconds)


def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def provider(name: str, call: Callable[[Tensor, Tensor, Tensor], Tensor] = right, is_baseline: bool = True) -> Provider:
    return Provider(name, is_baseline, lambda point, inputs: Attend(call))


def plan(*seqlens: int, direction: str = "fwd") -> Plan:
    return length_sweep(Point(head_dim=16, head_dim_v=16, direction=direction), seqlens)


def sweep(providers: list[Provider], *seqlens: int, settings: Settings = SETTINGS, direction: str = "fwd") -> Sweep:
    return Sweep(plan(*(seqlens or (32,)), direction=direction), providers, settings, ENV)


def rows(providers: list[Provider], *seqlens: int, settings: Settings = SETTINGS, direction: str = "fwd") -> list[Row]:
    return [row for found in sweep(providers, *seqlens, settings=settings, direction=direction).rows() for row in found]
