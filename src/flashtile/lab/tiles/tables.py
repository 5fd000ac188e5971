"""The table of a study: what each tile takes, and what it reaches."""

from __future__ import annotations

from collections.abc import Sequence

from flashtile.lab.bench import join
from flashtile.lab.bench.tables import Table, known, number
from flashtile.lab.tiles.rows import TileRow

CHOSEN = "*"  # behind the speed of the tile that a plain call takes
_HEADER = (
    "", "registers", "spill bytes", "shared KiB", "blocks", "occupancy", "computed", "achieved", "FMA pipe %",
    "shared %", "waits most for",
    "TFLOP/s full", "TFLOP/s causal",
)  # fmt: skip


def study_table(rows: Sequence[TileRow]) -> Table:
    """A line for each tile, by head dim, the fastest first; the peer ends each head dim."""
    if not rows:
        return Table("", (), ())
    lines: list[tuple[str, ...]] = []
    for head_dim in sorted({row.head_dim for row in rows}):
        full, causal = (by_tile(rows, head_dim, is_causal) for is_causal in (False, True))
        for row in sorted(full.values(), key=lambda row: -(row.tflops or 0.0)):
            lines.append(
                (
                    f"d={head_dim} {row.tile}",
                    *_takes(row),
                    _speed(row),
                    _speed(causal[row.tile]) if row.tile in causal else "",
                )
            )
        speeds = [
            "" if not of or of[0].peer_tflops is None else number(of[0].peer_tflops)
            for of in map(_first, (full, causal))
        ]
        first = next(iter(full.values()))
        lines.append((f"d={head_dim} {first.peer}", *[""] * (len(_HEADER) - 3), *speeds))
    first = rows[0]
    reasons = "".join(
        f"; no counters: {reason}"
        for reason in dict.fromkeys(row.no_counters for row in rows if row.no_counters and not row.is_causal)
    )
    shape = f"{first.kernel} {first.dtype}, B={first.batch} S={first.seqlen}, H={_heads(rows)}"
    return Table(f"{shape}; {CHOSEN} = taken by {first.kernel}{''.join(reasons)}", _HEADER, tuple(lines))


def by_tile(rows: Sequence[TileRow], head_dim: int, is_causal: bool) -> dict[str, TileRow]:
    own = (row for row in rows if (row.head_dim, row.is_causal) == (head_dim, is_causal))
    return join.unique(own, lambda row: row.tile)


def _first(rows: dict[str, TileRow]) -> list[TileRow]:
    return list(rows.values())[:1]


def _heads(rows: Sequence[TileRow]) -> str:
    found = {row.head_dim: row.heads for row in rows}
    counts = sorted(set(found.values()))
    return (
        str(counts[0])
        if len(counts) == 1
        else ", ".join(f"{heads} (d={head_dim})" for head_dim, heads in sorted(found.items()))
    )


def _takes(row: TileRow) -> list[str]:
    if row.registers is None:
        return ["", "", f"{row.shared_bytes / 1024:.1f}", *[""] * 7]
    counted = row.achieved_occupancy is not None
    return [
        str(row.registers),
        str(row.spill_bytes),
        f"{row.shared_bytes / 1024:.1f}",
        str(row.blocks),
        percent(row.occupancy),
        percent(row.computed_occupancy),
        percent(row.achieved_occupancy) if counted else "not counted",
        known(row.fma_percent),
        known(row.shared_percent),
        row.top_stall.replace("_", " "),
    ]


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _speed(row: TileRow) -> str:
    if row.tflops is None or row.status != "ok":
        return row.status
    return number(row.tflops) + (f" {CHOSEN}" if row.is_chosen else "")
