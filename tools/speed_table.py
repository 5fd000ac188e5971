"""The table of speeds in README.md: one line for each kind of call and peer, with its worst and best point.

make_docs.py fills `<!-- bench:speeds -->` with it. Every number comes from a CSV under results/.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from flashtile.errors import value_error
from flashtile.lab.bench.points import Point
from flashtile.lab.bench.rows import Environment, Row, read

HEADER = "| call | peer | points | geometric mean | worst | best | commit |\n|---|---|--:|--:|---|---|---|"
PAPER = "sdpa_paper_bf16_fwd"
BACKWARD = "sdpa_paper_bf16_bwd"
OPTIONS = "sdpa_options_bf16"


class Comparison(NamedTuple):
    """Our time against that of the fastest of some peers, at every point where both are right."""

    call: str
    page: str  # that has every point
    peer: str
    csv: str
    peers: tuple[str, ...]
    ours: str = "cuda"
    direction: str = "fwd"
    options: tuple[str, ...] | None = None  # the names of the calls in a grid of options; None: all
    dtype: str = "bf16"
    peers_csv: str = ""  # where the peers are from another run


SHORT = ("ViT B256 S197", "BERT B64 S512", "SD cross Sk77")
STORED = ("bias (1,H,S,S)", "padding mask (B,1,1,S)", "bool mask (B,1,S,S)")
SCORES = ("softcap 30 causal", "ALiBi causal", "window 1024 causal")
FORWARD_PAGE, BACKWARD_PAGE = "docs/sm90.md#against-the-peers", "docs/sm90-backward.md#measured"
OPTIONS_PAGE, FLOAT32_PAGE = "docs/bench.md#calls-with-options", "docs/float32.md#measured"
PEERS_PAGE = "docs/bench.md#the-peers-on-an-nvidia-h200"
CUDNN, FLASH, EFFICIENT, FLEX = ("sdpa-cudnn",), ("sdpa-flash",), ("sdpa-efficient",), ("flex",)
COMPARISONS = (
    Comparison("forward", FORWARD_PAGE, "cuDNN", PAPER, CUDNN),
    Comparison(
        "forward", PEERS_PAGE, "cuDNN in another run, without flashtile", PAPER, CUDNN, peers_csv="sdpa_paper_bf16"
    ),
    Comparison("forward", FORWARD_PAGE, "SDPA's flash kernel", PAPER, FLASH),
    Comparison(
        "forward", "docs/sm90.md#flashattention-4", "FlashAttention-4 (4.0.0b36)", f"fa4/{PAPER}", ("flash-attn-4",)
    ),
    Comparison("backward", BACKWARD_PAGE, "cuDNN", BACKWARD, CUDNN, direction="bwd"),
    Comparison("backward", BACKWARD_PAGE, "SDPA's flash kernel", BACKWARD, FLASH, direction="bwd"),
    Comparison("forward + backward", BACKWARD_PAGE, "cuDNN", "sdpa_paper_bf16_fwdbwd", CUDNN, direction="fwd+bwd"),
    Comparison("forward, mask or bias", OPTIONS_PAGE, "cuDNN", OPTIONS, CUDNN, "flashtile", options=STORED),
    Comparison("backward, mask or bias", OPTIONS_PAGE, "cuDNN", OPTIONS, CUDNN, "flashtile", "bwd", STORED),
    Comparison(
        "forward, softcap, ALiBi, window", OPTIONS_PAGE, "FlexAttention", OPTIONS, FLEX, "flashtile", options=SCORES
    ),
    Comparison(
        "forward, ViT, BERT, cross-attention, by an older kernel",
        OPTIONS_PAGE,
        "cuDNN",
        OPTIONS,
        CUDNN,
        "flashtile",
        options=SHORT,
    ),
    Comparison(
        "float32 forward",
        FLOAT32_PAGE,
        "SDPA's memory-efficient kernel",
        "sdpa_float32",
        EFFICIENT,
        "flashtile",
        dtype="fp32",
    ),
    Comparison(
        "float32 backward",
        FLOAT32_PAGE,
        "SDPA's memory-efficient kernel",
        "sdpa_float32",
        EFFICIENT,
        "flashtile",
        "bwd",
        dtype="fp32",
    ),
    Comparison(
        "decoding: one query over a cache",
        "docs/decode.md#how-fast",
        "cuDNN",
        "sdpa_decode_bf16_graph",
        CUDNN,
        "flashtile",
        options=("",),
    ),
)


class Measured(NamedTuple):
    """The speeds of one comparison: peer's time over ours, from the worst point to the best."""

    ratios: list[tuple[float, Row]]
    environments: list[Environment]  # of our rows, then of the peers'


def measure(one: Comparison, folder: Path) -> Measured:
    """Returns the speeds of a comparison. Raises ValueError if the CSVs have no point of both."""
    ours = _times(_rows(one, folder, one.csv), (one.ours,))
    peers = _times(_rows(one, folder, one.peers_csv or one.csv), one.peers)
    ratios = [(_ms(peers[point]) / _ms(row), row) for point, row in ours.items() if point in peers]
    if not ratios:
        raise value_error("speeds", f"no point of {one.ours} and {one.peers} in {one.csv}.csv", "a CSV that has some")
    environments = [rows[point].env for rows in (ours, peers) for point in ours if point in peers]
    return Measured(sorted(ratios, key=lambda pair: pair[0]), environments)


def table(results: Path, page: Path) -> str:
    """Returns the table for a page, and a line with what was measured on."""
    root = os.path.relpath(results.parent, page.parent)
    lines, machines = [HEADER], set()
    for one in COMPARISONS:
        ratios, environments = measure(one, results / "nvidia-h200")
        (low, lowest), (high, highest) = ratios[0], ratios[-1]
        mean = geometric_mean([ratio for ratio, _ in ratios])
        commits = ", ".join(dict.fromkeys(map(_commit, environments)))
        call = f"[{one.call}]({os.path.normpath(os.path.join(root, one.page))})"
        worst, best = f"{low:.2f} ({_name(lowest)})", f"{high:.2f} ({_name(highest)})"
        lines.append(f"| {call} | {one.peer} | {len(ratios)} | {mean:.2f} | {worst} | {best} | {commits} |")
        machines.update(
            f"{env.device}; torch {env.torch}, cuDNN {env.cudnn}, driver {env.driver}" for env in environments
        )
    return "\n".join(lines) + "\n\n" + "; ".join(sorted(machines))


def _rows(one: Comparison, folder: Path, stem: str) -> list[Row]:
    return [
        row
        for row in read(folder / f"{stem}.csv", Row)
        if row.is_ok
        and row.is_accurate is not False
        and (row.direction, row.dtype) == (one.direction, one.dtype)
        and (one.options is None or row.option in one.options)
    ]


def _times(rows: Iterable[Row], providers: tuple[str, ...]) -> dict[Point, Row]:
    """Returns the fastest row of these providers at each point."""
    found: dict[Point, Row] = {}
    for row in rows:
        if row.provider in providers and (row.point not in found or _ms(row) < _ms(found[row.point])):
            found[row.point] = row
    return found


def _commit(env: Environment) -> str:
    return f"{env.commit[:7]}{' with changes' if env.is_dirty else ''}"


def _ms(row: Row) -> float:
    assert row.median_ms is not None
    return row.median_ms


def _name(row: Row) -> str:
    if row.sweep == "decode":
        return f"B {row.batch}, {row.seqlen_k} keys"
    if row.sweep == "options" and row.option:
        return row.option
    what = f"d {row.head_dim}{' causal' if row.is_causal else ''}"
    return f"{what}, {row.option}" if row.option else f"{what}, S {row.seqlen_k}"
