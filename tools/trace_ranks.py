"""Traces ring attention of several ranks that share one GPU, and shows how much of its messages is hidden behind
kernels.

    python tools/trace_ranks.py --ranks 4 --backend gloo --out results/nvidia-h200
    python tools/trace_ranks.py --draw results/nvidia-h200/distributed_trace_gloo.json   # the picture again

With gloo a message is a copy to pinned memory, bytes through a socket, and a copy back; the trace has both copies. With
NCCL it is one kernel that sends and receives. Writes distributed_trace_<backend>.json, which has every kernel and copy
of rank 0 in a forward and a backward pass, and a picture of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from flashtile.distributed import ring_attention
from flashtile.distributed.launch import on_ranks
from flashtile.lab.bench import device as facts
from flashtile.lab.bench import plots

COLOURS = {"compute": "#D55E00", "to host": "#0072B2", "from host": "#56B4E9", "NCCL": "#009E73"}
SMALL_US = 20.0  # shorter copies are of numbers, not of keys


def traced(group: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Kernels and copies of this rank: name, kind, stream, start and length in microseconds."""
    shapes = [
        (1, heads, options.rows, options.head_dim) for heads in (options.heads, options.heads_kv, options.heads_kv)
    ]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)

    def step() -> None:
        causal = not options.full
        out = ring_attention(q, k, v, group=group, causal=causal, transport="p2p", backend="cuda", timeout=60)
        assert isinstance(out, torch.Tensor)
        out.backward(torch.ones_like(out))

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    dist.barrier(group)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy")]
    start = min(one["ts"] for one in found)
    return [
        {
            "name": one["name"].partition("<")[0].partition("(")[0].strip()[:80],
            "kind": kind(one["name"], one["cat"]),
            "stream": one["args"]["stream"],
            "start_us": round(one["ts"] - start, 2),
            "us": round(one["dur"], 2),
        }
        for one in sorted(found, key=lambda one: one["ts"])
    ]


def kind(name: str, category: str) -> str:
    """Returns what an event does: "compute", or the part of a message."""
    if category == "kernel":
        return "NCCL" if "nccl" in name.lower() else "compute"
    return "to host" if "DtoH" in name else "from host" if "HtoD" in name else "compute"


def hidden_us(event: dict[str, Any], others: list[tuple[float, float]]) -> float:
    """Returns how long an event runs beside the others, which are sorted by their starts."""
    begin, end = event["start_us"], event["start_us"] + event["us"]
    total, at = 0.0, begin
    for first, last in others:
        first, last = max(first, at), min(last, end)
        if last > first:
            total, at = total + last - first, last
    return total


def summary(events: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns for each kind of message how many, how long, and which share of that a kernel runs beside."""
    compute = [(one["start_us"], one["start_us"] + one["us"]) for one in events if one["kind"] == "compute"]
    found: dict[str, dict[str, float]] = {}
    for event in events:
        if event["kind"] != "compute" and event["us"] >= SMALL_US:
            row = found.setdefault(event["kind"], {"count": 0, "us": 0.0, "hidden_us": 0.0})
            row["count"] += 1
            row["us"] += event["us"]
            row["hidden_us"] += hidden_us(event, compute)
    for row in found.values():
        row["hidden_share"] = row["hidden_us"] / row["us"]
    return found


@plots.drawing()
def draw(path: Path) -> Path:
    record = json.loads(path.read_text())
    events, options = record["events"], record["options"]
    kinds = [kind for kind in ("compute", "to host", "from host", "NCCL") if any(e["kind"] == kind for e in events)]
    figure = plots.new_figure(10, 0.6 * len(kinds) + 1.7)
    axes = figure.subplots()
    for row, kind_ in enumerate(kinds):
        bars = [(e["start_us"] / 1e3, e["us"] / 1e3) for e in events if e["kind"] == kind_]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolor=COLOURS[kind_])
    axes.set_yticks(range(len(kinds)), ["kernels" if kind == "compute" else kind for kind in kinds])
    axes.invert_yaxis()
    axes.set_xlabel("Time (ms)")
    axes.grid(False, axis="y")
    mask = "full" if options["full"] else "causal, zigzag"
    title = f"Rank 0 of {options['ranks']} on one GPU, {options['backend']}: forward and backward, {mask}"
    axes.set_title(f"{title}\n", loc="left", fontweight="bold")
    env = record["environment"]
    texts = (
        f"{env['device']}, torch {env['torch']}, {env['commit']}{', changed' if env['is_dirty'] else ''}",
        f"{options['rows']} rows of each rank, H={options['heads']}/{options['heads_kv']}, d={options['head_dim']}",
    )
    axes.text(0, 1.03, "; ".join(texts), transform=axes.transAxes, fontsize=8.5, color="#555555")
    return plots.save(figure, path, path.with_suffix(".png").name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--rows", type=int, default=16384, help="of each rank")
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--heads-kv", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="without a causal mask")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="folder to write into")
    where.add_argument("--draw", type=Path, help="a recorded trace: draw it, measure nothing")
    options = parser.parse_args()
    if options.draw is not None:
        draw(options.draw)
        return
    events = on_ranks(traced, options.ranks, options, device="cuda", backend=options.backend)
    found = summary(events)
    print(f"{'message':12}{'count':>6}{'ms':>9}{'beside kernels':>16}")
    for name, row in found.items():
        print(f"{name:12}{row['count']:6}{row['us'] / 1e3:9.2f}{row['hidden_share']:16.0%}")
    given = {name: value for name, value in vars(options).items() if name not in ("out", "draw")}
    environment = asdict(facts.environment("cuda", sys.argv[1:], "python tools/trace_ranks.py"))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"distributed_trace_{options.backend}.json"
    lines = ",\n  ".join(json.dumps(event) for event in events)
    head = json.dumps({"options": given, "environment": environment, "summary": found}, indent=1)
    path.write_text(f'{head[:-2]},\n "events": [\n  {lines}\n ]\n}}\n')
    if importlib.util.find_spec("matplotlib") is not None:
        draw(path)


if __name__ == "__main__":
    main()
