"""The ceilings, a profile and a timeline on a GPU."""

from __future__ import annotations

import io
import shutil
import statistics

import pytest
import torch
from rich.console import Console

from flashtile.lab.bench import device
from flashtile.lab.bench.providers import choose
from flashtile.lab.bench.rows import read
from flashtile.lab.profile import ceilings, command, gpu, measure, problems, timeline
from flashtile.lab.profile.rows import KernelRow


def test_ceilings_are_in_order():
    found = ceilings.measure()
    assert 0 < found.dram_ceiling_gb_per_s < found.l2_ceiling_gb_per_s < found.shared_ceiling_gb_per_s
    assert found.fma_ceiling_tflops > 1
    if gpu.current_arch().number >= 80:
        assert found.tensor_ceiling_tflops > 2 * found.fma_ceiling_tflops


def test_what_the_compiler_knows_fits_the_call():
    point = problems.parse(["B=2", "H=4", "S=1024", "d=64", "dtype=bf16"]).points[0]
    kernels = measure.compiled_kernels("cuda", point)
    assert kernels
    assert all(resources.registers > 0 for _, resources in kernels)


@pytest.mark.long(125)
@pytest.mark.skipif(shutil.which("ncu") is None, reason="Nsight Compute is not installed")
def test_a_profile(tmp_path):
    wanted = problems.parse(["B=2", "H=4", "S=512", "d=64", "dtype=bf16", "pass=fwd,bwd"])
    text = io.StringIO()
    env = device.environment("cuda", ["profile"])
    run = command.Run(wanted, choose("cuda,sdpa-flash", False), tmp_path, env, Console(file=text, width=200), False)
    assert run.start() == 0, text.getvalue()
    rows = read(tmp_path / f"{wanted.stem}.csv", KernelRow)
    if any(row.no_counters for row in rows):
        pytest.skip(rows[0].no_counters)
    for kernels in measure.by_call(rows).values():
        assert all(row.dram_bytes is not None and row.registers and row.stalls for row in kernels)
    ours = {row.kernel for row in rows if row.provider == "cuda"}
    known = {step.name for point in wanted.points for step, _ in measure.compiled_kernels("cuda", point)}
    assert ours <= known


WORK = {"fwd": {"issue", "exponentials", "copy_k"}, "bwd": {"issue", "exponentials", "gradient", "store"}}


@pytest.mark.skipif(not (torch.cuda.is_available() and gpu.current_arch().has_wgmma), reason="not a Hopper GPU")
@pytest.mark.parametrize("direction", WORK)
def test_a_timeline_of_a_hopper_kernel(direction):
    point = problems.parse(["B=4", "H=16", "S=4096", "d=128", f"pass={direction}"]).points[0]
    (found,) = timeline.record(point, "", device.environment("cuda", ["profile"]))
    assert found.kernel == f"{direction}_sm90_kernel"
    groups = {span.warp // 4 for span in found.spans}
    assert len(groups) >= (3 if direction == "fwd" else 2)  # consumers, and the producer of the forward
    # Other processes use the GPU: it may leave the kernel for milliseconds in the middle of a few spans
    assert statistics.median(span.end - span.start for span in found.spans) < 10**5
    assert {"wait_turn", *WORK[direction]} <= {span.phase for span in found.spans}
