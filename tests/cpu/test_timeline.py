"""`flashtile profile --timeline` without a GPU: marks are free in an ordinary build, and become spans and pictures."""

from __future__ import annotations

import io
import json
import os
import re

import pytest
import torch
from bench_fakes import ENV
from rich.console import Console
from test_bench_docs import make_docs
from test_mutations import machine_code

from flashtile import Unsupported
from flashtile.lab.bench import plots
from flashtile.lab.bench.points import Point
from flashtile.lab.profile import command, problems, timeline
from flashtile.lab.profile.timeline import Span, Timeline
from flashtile.runtime import nvrtc

pytestmark = pytest.mark.usefixtures("kept_kernels")
ENTRY = "loop_kernel"
UNIT = """#include "device/core/timeline.cuh"
extern "C" __global__ void loop_kernel(float* x) {
  for (int step = 0; step < 4; ++step) {
    MARK
    x[threadIdx.x] *= 1.5f;
    __syncthreads();
  }
}
"""
MARKED = UNIT.replace("MARK", "flashtile::mark(flashtile::Phase::exponentials, step);")


def test_a_mark_is_nothing_in_an_ordinary_build():
    plain = machine_code((UNIT.replace("MARK", ""), ENTRY))
    assert machine_code((MARKED, ENTRY)) == plain
    assert machine_code((f"#define FT_TIMELINE 0x7f0000000000ull\n{MARKED}", ENTRY)) != plain


def test_kernels_with_marks_are_found():
    assert timeline.has_marks(MARKED.replace("flashtile::mark(flashtile::Phase", "mark(Phase"))
    assert timeline.has_marks('#include "families/fwd_sm90/fwd_sm90.cuh"\n')
    assert timeline.has_marks('#include "families/bwd_sm90/bwd_sm90.cuh"\n')
    assert not timeline.has_marks('#include "families/steps/bwd_sm90_steps.cuh"\n')
    for kernel in ("fwd_sm90", "bwd_sm90"):  # producer and consumers
        text = (nvrtc.INCLUDE / "families" / kernel / f"{kernel}.cuh").read_text()
        assert {"wait_k_stage", "copy_k", "wait_turn", "issue"} <= set(re.findall(r"mark\(Phase::(\w+)", text))
    assert not timeline.has_marks('#include "device/core/timeline.cuh"\n')


def test_the_phases_are_read_from_the_header():
    phases, num_steps = timeline.header_constants()
    names = [phase.name for phase in phases]
    assert names[:3] == ["wait_tile", "wait_turn", "issue"]
    assert names[-1] == "end"  # the enum's next entry is its count
    assert "count" not in names
    assert [phase.is_wait for phase in phases] == [name.startswith("wait") for name in names]
    assert num_steps == 64
    text = timeline._HEADER.read_text()
    assert text.index("  end,") < text.index("  count,")
    assert all(phase.is_wait or phase.name in timeline.COLOURS for phase in phases)


PHASES = timeline.header_constants()[0]
NUMBER = {phase.name: index for index, phase in enumerate(PHASES)}


def clocks_of(marks):
    clocks = torch.zeros(32, 64, len(PHASES), dtype=torch.int32)
    for warp, step, phase, clock in marks:
        clocks[warp, step, NUMBER[phase]] = clock - 2**32 if clock >= 2**31 else clock
    return clocks


def test_a_phase_lasts_until_the_next_mark_of_its_warp():
    marks = [(0, 2, "wait_tile", 1000), (0, 2, "issue", 1010), (4, 2, "issue", 1005), (0, 3, "wait_tile", 1050)]
    assert timeline.spans_of(clocks_of(marks), PHASES) == [
        Span(0, 2, "wait_tile", 0, 10),
        Span(0, 2, "issue", 10, 50),
    ]
    assert timeline.spans_of(clocks_of([]), PHASES) == []


def test_a_clock_that_overflows():
    marks = [(0, 0, "wait_tile", 2**32 - 100), (0, 0, "issue", 20), (0, 1, "wait_tile", 50)]
    assert timeline.spans_of(clocks_of(marks), PHASES) == [
        Span(0, 0, "wait_tile", 0, 120),
        Span(0, 0, "issue", 120, 150),
    ]


def made(num_steps=20):
    """Two consumers that take turns, and a producer."""
    spans = []
    for step in range(num_steps):
        at = 1000 * step
        for warp, shift in ((0, 0), (1, 0), (4, 500)):
            spans += [
                Span(warp, step, "wait_turn", at + shift, at + shift + 100),
                Span(warp, step, "issue", at + shift + 100, at + shift + 400),
                Span(warp, step, "exponentials", at + shift + 400, at + shift + 1000),
            ]
        spans.append(Span(8, step, "wait_k_stage", at, at + 900))
    return Timeline("fwd_sm90_kernel", "fwd: B=1", tuple(spans), ENV)


def test_one_warp_of_each_warpgroup_is_drawn(tmp_path):
    shown = timeline.drawn(made().spans)
    assert {span.warp for span in shown} == {0, 4, 8}
    assert {span.step for span in shown} == set(range(8, 14))
    # Every lane is drawn over the same clocks: warp 4 begins last, warp 8 ends first
    assert (min(span.start for span in shown), max(span.end for span in shown)) == (8500, 13900)
    assert {(span.phase, span.end) for span in shown if span.warp == 0 and span.end < 9100} == {("exponentials", 9000)}
    path = tmp_path / "timeline_x.json"
    written = timeline.write(made(), path)
    assert [one.name for one in written] == ["timeline_x.json", "timeline_x.png"]
    assert plots.is_current(written[1])
    assert timeline.read(path) == made()
    path.write_text(json.dumps({"kernel": "x"}))
    with pytest.raises(ValueError, match="accepted: what `flashtile profile --timeline` wrote"):
        timeline.read(path)


def test_medians_of_each_phase():
    shown = timeline.table(made())
    assert shown.header[1:4] == ("warpgroup 0", "warpgroup 1", "producer")
    assert {line[0]: line[1:4] for line in shown.lines} == {
        "wait turn": ("100", "100", ""),
        "issue": ("300", "300", ""),
        "exponentials": ("600", "600", ""),
        "wait k stage": ("", "", "900"),
    }


def test_kernels_with_an_address_are_not_kept(monkeypatch):
    monkeypatch.setenv("FLASHTILE_CACHE", "1")
    with timeline._uncached():
        assert os.environ["FLASHTILE_CACHE"] == "0"
    assert os.environ["FLASHTILE_CACHE"] == "1"
    monkeypatch.delenv("FLASHTILE_CACHE")
    with timeline._uncached():
        pass
    assert "FLASHTILE_CACHE" not in os.environ


def test_the_command(tmp_path, monkeypatch):
    def record(point: Point, problem: str, env):
        if point.direction == "bwd":
            raise Unsupported("--timeline: got a call whose kernels have no marks")
        return [made()]

    monkeypatch.setattr(timeline, "record", record)
    text = io.StringIO()
    wanted = problems.parse(["S=64", "d=64,128", "pass=fwd,bwd"])
    assert command._timeline(wanted, tmp_path, ENV, Console(file=text, width=200)) == 0
    assert "no marks" in text.getvalue()
    assert "exponentials, sums and rounding" in text.getvalue()
    stems = [f"timeline_fwd_sm90_B4_H16_S64_d{head_dim}_bf16" for head_dim in (64, 128)]
    expected = {f"{stem}{end}" for stem in stems for end in (".json", ".png")}
    assert {path.name for path in tmp_path.iterdir()} == expected
    only_backward = problems.parse(["S=64", "pass=bwd"])
    assert command._timeline(only_backward, tmp_path, ENV, Console(file=text, width=200)) == 1


def test_the_medians_go_into_the_docs(tmp_path):
    folder = tmp_path / "results" / "gpu"
    folder.mkdir(parents=True)
    timeline.write(made(), folder / "timeline_x.json")
    marks = "<!-- bench:gpu/{0} -->\n<!-- /bench:gpu/{0} -->\n"
    (tmp_path / "README.md").write_text(marks.format("timeline_x:timeline") + marks.format("timeline_x.png"))
    assert make_docs(tmp_path).returncode == 0
    filled = (tmp_path / "README.md").read_text()
    assert "| exponentials | 600 | 600 |  | works: exponentials, sums and rounding |" in filled
    assert "![timeline x](results/gpu/timeline_x.png)" in filled
