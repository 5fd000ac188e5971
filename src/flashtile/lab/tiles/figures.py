"""The figure of a study: speed and occupancy of every tile side by side, a line of panels for each head dim."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashtile.errors import Unsupported
from flashtile.lab.bench import plots
from flashtile.lab.bench.rows import read
from flashtile.lab.bench.tables import number
from flashtile.lab.ladder.figures import OURS, PEER, STEP_BEFORE
from flashtile.lab.tiles.rows import TileRow
from flashtile.lab.tiles.tables import by_tile


@plots.drawing()
def draw(csv_path: Path) -> list[Path]:
    """Beside the CSV."""
    rows = [row for row in read(csv_path, TileRow) if row.status == "ok"]
    if not rows:
        raise Unsupported("plots: no tile was measured; there is nothing to draw. The reasons stand in the CSV.")
    return [_figure(csv_path, rows)]


def _figure(csv_path: Path, rows: Sequence[TileRow]) -> Path:
    dims = sorted({row.head_dim for row in rows})
    groups = [
        sorted((row for row in rows if row.head_dim == d and not row.is_causal), key=lambda row: -(row.tflops or 0.0))
        for d in dims
    ]
    heights = [len(group) + 1.6 for group in groups]
    figure = plots.new_figure(12.4, 0.36 * sum(heights) + 1.0)
    panels = figure.subplots(
        len(dims), 2, squeeze=False, sharex="col", gridspec_kw={"width_ratios": (3, 2), "height_ratios": heights}
    )
    for (speed, occupancy), group in zip(panels, groups, strict=True):
        causal = by_tile(rows, group[0].head_dim, is_causal=True)
        _speeds(speed, group, causal)
        _occupancies(occupancy, group)
        occupancy.sharey(speed)
        speed.invert_yaxis()
    panels[-1][0].set_xlabel("TFLOP/s: bar full, mark causal, line the peer (full)")
    panels[-1][1].set_xlabel("Occupancy (%): ring in theory, dot achieved")
    first = rows[0]
    title = (
        f"Tiles of {first.kernel}: {first.dtype}, B={first.batch} S={first.seqlen}; {first.env.device}, "
        f"torch {first.env.torch}"
    )
    plots.add_title(figure, f"{title}; in orange what {first.kernel} takes", fontsize=11)
    return plots.save(figure, csv_path, f"{csv_path.stem}.png")


def _speeds(axes: Any, group: Sequence[TileRow], causal: dict[str, TileRow]) -> None:
    peer = group[0].peer_tflops
    for place, row in enumerate(group):
        masked = causal.get(row.tile)
        is_chosen = row.is_chosen or (masked is not None and masked.is_chosen)
        axes.barh(place, row.tflops, color=OURS if is_chosen else STEP_BEFORE, height=0.66)
        if masked is not None:
            axes.plot(masked.tflops, place, marker="|", color="#000000", markersize=11, markeredgewidth=2)
        spills = f", spills {row.spill_bytes} bytes" if row.spill_bytes else ""
        axes.text(
            (row.tflops or 0.0) * 0.02,
            place,
            f"{number(row.tflops or 0.0)}{spills}",
            va="center",
            fontsize=8.5,
            color="black",
        )
    if peer is not None:
        axes.axvline(peer, color=PEER, linewidth=1.5)
        axes.text(peer, 1.02, f" {group[0].peer}", transform=axes.get_xaxis_transform(), color=PEER, fontsize=8.5)
    axes.set_yticks(range(len(group)), [row.tile for row in group], fontsize=9.5)
    axes.grid(False, axis="y")
    axes.set_title(f"d={group[0].head_dim}, H={group[0].heads}", loc="left")


def _occupancies(axes: Any, group: Sequence[TileRow]) -> None:
    for place, row in enumerate(group):
        axes.plot(
            100 * (row.occupancy or 0.0), place, "o", markersize=9, markerfacecolor="none", markeredgecolor="#000000"
        )
        if row.achieved_occupancy is not None:
            axes.plot(100 * row.achieved_occupancy, place, "o", markersize=5, color=OURS if row.is_chosen else PEER)
        takes = f"{row.registers} registers, {row.shared_bytes / 1024:.0f} KiB"
        axes.text(1.02, place, takes, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5, color="#555555")
    axes.set_xlim(left=0)
    axes.tick_params(labelleft=False)
    axes.grid(False, axis="y")
