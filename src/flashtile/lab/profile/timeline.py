"""Timelines of the warps of one block, what they do and wait for: a build of our kernels that stores the clock at every
mark (core/timeline.cuh), run once, as JSON and as a picture."""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashtile.backends import cuda, executor
from flashtile.backends.base import Grads
from flashtile.backends.executor import Launch
from flashtile.errors import Unsupported, unsupported, value_error
from flashtile.lab.bench import files, plots
from flashtile.lab.bench.points import Point
from flashtile.lab.bench.rows import Environment
from flashtile.lab.bench.tables import Table
from flashtile.plans.plan import Step
from flashtile.problem import AttentionArgs
from flashtile.runtime import nvrtc

_HEADER = nvrtc.INCLUDE / "device" / "core" / "timeline.cuh"
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_PHASE = re.compile(r"^  (\w+), +// (wait|work): (.*)$", re.MULTILINE)
_MAX_WARPS = 32
DRAWN_STEPS = 6
_FIRST_DRAWN = 8  # the pipeline is full by then
# Okabe and Ito, with a dark green for black, which a dark page would hide. Waits are grey and hatched
COLOURS = {
    "issue": "#D55E00", "issue_scores": "#E69F00", "maximum": "#56B4E9", "exponentials": "#0072B2",
    "gradient": "#009E73", "store": "#CC79A7", "add_dq": "#F0E442", "copy_k": "#767676", "copy_v": "#117733",
    "end": "#ffffff",
}  # fmt: skip
WAIT_COLOUR = "#c9c9c9"
_PRODUCER_PHASES = ("wait_k_stage", "copy_k", "wait_v_stage", "copy_v", "end")


@dataclass(frozen=True)
class Phase:
    name: str
    is_wait: bool
    what: str


@dataclass(frozen=True)
class Span:
    """A phase of a warp in one step of its loop, in clocks from the first mark of the block."""

    warp: int
    step: int
    phase: str
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """The marks of one kernel."""

    kernel: str
    problem: str
    spans: tuple[Span, ...]
    env: Environment


def header_constants() -> tuple[list[Phase], int]:
    """The phases in the order of their numbers, and the steps that are kept."""
    text = _HEADER.read_text(encoding="utf-8")
    phases = [Phase(name, kind == "wait", what) for name, kind, what in _PHASE.findall(text)]
    match = re.search(r"kTimelineSteps = (\d+)", text)
    assert match is not None
    return phases, int(match[1])


def record(point: Point, problem: str, env: Environment) -> list[Timeline]:
    """Runs one call with instrumented kernels. Raises Unsupported if none of them has marks."""
    phases, num_steps = header_constants()
    buffer = torch.zeros((_MAX_WARPS, num_steps, len(phases)), dtype=torch.int32, device="cuda")
    found = []
    for launch in _launches(point):
        for step in launch.plan.steps:
            if not isinstance(step, Step) or not has_marks(step.unit):
                continue
            buffer.zero_()
            _execute_marked(launch, step, buffer.data_ptr())
            torch.cuda.synchronize()
            if spans := spans_of(buffer.cpu(), phases):
                found.append(Timeline(step.name, problem, tuple(spans), env))
    if not found:
        raise unsupported(
            "--timeline", "a call whose kernels have no marks", "one of fwd_sm90, bwd_sm90, fwd_sm80 or bwd_sm80"
        )
    return found


def has_marks(source: str) -> bool:
    """The source, or a header that it includes, calls mark()."""
    pending, seen = [source], set[str]()
    while pending:
        text = pending.pop()
        if "mark(Phase::" in text:
            return True
        found = [name for name in _INCLUDE.findall(text) if name not in seen]
        seen.update(found)
        pending += [(nvrtc.INCLUDE / name).read_text(encoding="utf-8") for name in found]
    return False


def _launches(point: Point) -> Iterator[Launch]:
    """The passes of the point, each ready to be executed."""
    inputs = point.make("cuda", 0)
    causal = "top_left" if point.is_causal else "none"
    args = AttentionArgs(inputs.q, inputs.k, inputs.v, causal=causal)
    out = torch.empty(*inputs.q.shape[:3], point.head_dim_v, dtype=inputs.q.dtype, device="cuda")
    lse = torch.empty(inputs.q.shape[:3], dtype=torch.float32, device="cuda")
    forward = cuda.forward_launch(args, out, lse)
    if point.direction != "bwd":
        yield forward
    if point.direction != "fwd":
        executor.execute(forward)
        grads: dict[str, Tensor] = {f"d{name}": torch.empty_like(getattr(inputs, name)) for name in "qkv"}
        yield cuda.backward_launch(args, inputs.dout, None, out, lse, Grads(**grads, dbias=None, dsinks=None))


def _execute_marked(launch: Launch, marked: Step, address: int) -> None:
    """Executes all steps, one of them instrumented."""
    unit = f"#define FT_TIMELINE {address:#x}ull\n{marked.unit}"
    steps = tuple(replace(step, unit=unit) if step is marked else step for step in launch.plan.steps)
    with _uncached():
        executor.execute(launch._replace(plan=replace(launch.plan, steps=steps)))


@contextmanager
def _uncached() -> Iterator[None]:
    """Keeps kernels that hold an address of this process out of the cache on disk."""
    before = os.environ.get("FLASHTILE_CACHE")
    os.environ["FLASHTILE_CACHE"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["FLASHTILE_CACHE"]
        else:
            os.environ["FLASHTILE_CACHE"] = before


def spans_of(clocks: Tensor, phases: Sequence[Phase]) -> list[Span]:
    """Marks (warp, step, phase) as spans. A phase lasts until the warp's next mark."""
    marks = [
        (warp, int(clocks[warp, step, phase]) & 0xFFFFFFFF, step, phase)
        for warp, step, phase in clocks.nonzero().tolist()
    ]
    if not marks:
        return []
    origin = min(clock for _, clock, _, _ in marks)
    if max(clock for _, clock, _, _ in marks) - origin > 2**31:  # the 32 bits of the clock overflowed
        marks = [(warp, (clock + 2**31) % 2**32, step, phase) for warp, clock, step, phase in marks]
        origin = min(clock for _, clock, _, _ in marks)
    found = []
    for warp in sorted({mark[0] for mark in marks}):
        own = sorted((clock - origin, step, phase) for other, clock, step, phase in marks if other == warp)
        for (start, step, phase), (end, _, _) in itertools.pairwise(own):
            found.append(Span(warp, step, phases[phase].name, start, end))
    return found


def lane_names(spans: Sequence[Span]) -> dict[int, str]:
    """The name of each warpgroup: a producer is one that only copies."""
    groups = sorted({span.warp // 4 for span in spans})
    return {
        group: "producer"
        if all(span.phase in _PRODUCER_PHASES for span in spans if span.warp // 4 == group)
        else f"warpgroup {group}"
        for group in groups
    }


def table(timeline: Timeline) -> Table:
    """Median clocks of each phase, over the steps after the pipeline is full, for each warpgroup."""
    phases = {phase.name: phase for phase in header_constants()[0]}
    groups = lane_names(timeline.spans)
    lines = []
    for name, phase in phases.items():
        cells = []
        for group in groups:
            own = [
                span.end - span.start
                for span in timeline.spans
                if (span.warp // 4, span.phase) == (group, name) and span.step >= _FIRST_DRAWN
            ]
            cells.append(f"{statistics.median(own):.0f}" if own else "")
        if any(cells) and name != "end":
            lines.append((name.replace("_", " "), *cells, f"{'waits' if phase.is_wait else 'works'}: {phase.what}"))
    header = ("median clocks", *groups.values(), "")
    return Table(f"{timeline.kernel}, {timeline.problem}", header, tuple(lines))


# Files


def write(timeline: Timeline, path: Path) -> list[Path]:
    """JSON and, with matplotlib, a picture beside it."""
    found = asdict(timeline) | {"spans": [astuple(span) for span in timeline.spans]}
    text = json.dumps(found, separators=(",", ":"))
    files.write_whole(path, text + "\n")
    written = [path]
    try:
        written += redraw(path)
    except Unsupported as error:
        print(error)
    return written


def read(path: Path) -> Timeline:
    """The timeline of a file that `write` wrote."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        spans = tuple(Span(*span) for span in found["spans"])
        return Timeline(found["kernel"], found["problem"], spans, Environment(**found["env"]))
    except (KeyError, TypeError) as error:
        raise value_error("file", f"{path.name} ({error})", "what `flashtile profile --timeline` wrote") from error


def redraw(path: Path) -> list[Path]:
    """The picture of a file, beside it."""
    return [draw(read(path), path)]


@plots.drawing()
def draw(timeline: Timeline, path: Path) -> Path:
    """A lane for each warpgroup, producer and consumers side by side, over a few steps of the loop."""
    from matplotlib.patches import Patch

    phases = {phase.name: phase for phase in header_constants()[0]}
    shown = drawn(timeline.spans)
    warps = sorted({span.warp for span in shown})
    start, end = min(span.start for span in shown), max(span.end for span in shown)
    figure = plots.new_figure(13.0, 0.42 * len(warps) + 2.1)
    axes = figure.add_subplot()
    for lane, warp in enumerate(warps):
        for span in (span for span in shown if span.warp == warp and span.phase != "end"):
            is_wait = phases[span.phase].is_wait
            axes.broken_barh(
                [(span.start - start, span.end - span.start)], (lane - 0.4, 0.8),
                facecolor=WAIT_COLOUR if is_wait else COLOURS[span.phase], edgecolor="#ffffff", linewidth=0.4,
                hatch="////" if is_wait else None,
            )  # fmt: skip
    names = lane_names(timeline.spans)
    axes.set_yticks(range(len(warps)), [names[warp // 4] for warp in warps])
    axes.set_xlim(0, end - start)
    axes.set_xlabel("clocks")
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    used = dict.fromkeys(span.phase for span in shown if span.phase != "end")
    handles: list[Any] = [
        Patch(facecolor=COLOURS[name], label=phases[name].what) for name in used if not phases[name].is_wait
    ]
    handles.append(Patch(facecolor=WAIT_COLOUR, hatch="////", label="waits"))
    figure.legend(handles=handles, ncols=3, fontsize=8.5, loc="outside lower center")
    plots.add_title(figure, f"{timeline.kernel}: {timeline.problem}; {timeline.env.device}", fontsize=11)
    return plots.save(figure, path, f"{path.stem}.png")


def drawn(spans: Sequence[Span]) -> list[Span]:
    """Returns what one warp of each warpgroup does in a few steps, once the pipeline is full: from the latest of their
    first marks to the earliest of their last ones."""
    last = max(span.step for span in spans)
    first = min(_FIRST_DRAWN, max(0, last - DRAWN_STEPS))
    leaders = {group: min(span.warp for span in spans if span.warp // 4 == group) for group in
               {span.warp // 4 for span in spans}}  # fmt: skip
    lanes = [[span for span in spans if span.warp == warp] for warp in sorted(leaders.values())]
    shown = [[span for span in lane if first <= span.step < first + DRAWN_STEPS] for lane in lanes]
    start = max(min(span.start for span in lane) for lane in shown if lane)
    end = min(max(span.end for span in lane) for lane in shown if lane)
    return [
        replace(span, start=max(span.start, start), end=min(span.end, end))
        for lane in lanes
        for span in lane
        if span.end > start and span.start < end
    ]
