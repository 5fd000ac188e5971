"""The C++ executor on a GPU: what it serves, bit for bit as the Python executor; streams, threads, graphs, lengths that
grow."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import flashtile
from flashtile import ops
from flashtile.backends import executor, native, registry
from flashtile.families import assemble
from flashtile.problem import AttentionArgs
from flashtile.runtime import extension
from flashtile.testing import Case

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

CASES = {
    "plain": Case(dtype=torch.bfloat16, head_dim=64, head_dim_v=64),
    "float32": Case(causal="bottom_right", seqlen_q=130, seqlen_k=300, mask="bhqk"),
    "split": Case(dtype=torch.bfloat16, seqlen_q=3, seqlen_k=900, head_dim=128, head_dim_v=128),
    "options": Case(window=(40, 7), softcap=3.0, bias="hqk", alibi="h", has_sinks=True, dropout_p=0.2),
    "odd rows": Case(dtype=torch.float16, head_dim=21, head_dim_v=40, memory="sliced"),
    "swapped": Case(dtype=torch.bfloat16, head_dim=128, head_dim_v=128, memory="swapped"),
    "varlen": Case(
        dtype=torch.bfloat16, kind="varlen", head_dim=64, head_dim_v=64, layout="bshd", batch=3, causal="bottom_right"
    ),
    "paged": Case(dtype=torch.bfloat16, kind="paged", head_dim=64, head_dim_v=64, batch=3),
    "padded": Case(kind="padded", batch=3),
}


def with_grad(args: AttentionArgs) -> AttentionArgs:
    names = [name for name in ("q", "k", "v", "bias", "sinks") if getattr(args, name) is not None]
    return args._replace(**{name: getattr(args, name).detach().requires_grad_() for name in names})


def results(case: Case) -> list[torch.Tensor]:
    inputs = case.make(3, "cuda")
    args = inputs.args._replace(deterministic=case.seqlen_k < 500)
    if case.kind == "paged":
        with torch.no_grad():
            return list(ops.attend(args))
    args = with_grad(args)
    leaves = [tensor for tensor in (args.q, args.k, args.v, args.bias, args.sinks) if tensor is not None]
    out, lse = ops.attend(args)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.smoke
def test_both_executors_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results(CASES[name])
    with monkeypatch.context() as patch:
        patch.setattr(registry, "select", None)  # nobody asks Python any more
        served = results(CASES[name])
    with native.python_only():
        expected = results(CASES[name])
    for one, other in zip(served, expected, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_lengths_never_seen_before_need_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assemble.clear_plans()
    q, cache = torch.randn(1, 4, 1, 64, device="cuda"), torch.randn(2, 1, 4, 3000, 64, device="cuda")
    flashtile.attention(q, cache[0, :, :, :2000], cache[1, :, :, :2000])
    monkeypatch.setattr(registry, "select", None)
    for length in range(2001, 2600):
        out = flashtile.attention(q, cache[0, :, :, :length], cache[1, :, :, :length])
        if length % 100 == 0:
            expected = torch.nn.functional.scaled_dot_product_attention(
                q, cache[0, :, :, :length], cache[1, :, :, :length]
            )
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_threads_with_streams_of_their_own_forward_and_backward() -> None:
    q, k, v = (torch.randn(2, 4, 400, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)

    def call() -> list[torch.Tensor]:
        out = flashtile.attention(q, k, v, causal=True, deterministic=True)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    expected = call()
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(25):
                last = call()
        stream.synchronize()
        found.append(last)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(one, other) for result in found for one, other in zip(result, expected, strict=True))


@pytest.mark.smoke
def test_it_launches_on_the_current_stream() -> None:
    """On a stream that sleeps first, the output is there only when the stream is done."""
    q, k, v = (torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    flashtile.attention(q, k, v)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)  # half a second: other processes keep the host busy
        out = flashtile.attention(q, k, v)
        event = torch.cuda.Event()
        event.record()
    assert not event.query()
    torch.cuda.current_stream().synchronize()
    assert not event.query()
    event.synchronize()
    assert torch.equal(out, flashtile.attention(q, k, v))


@pytest.mark.smoke
def test_forward_and_backward_in_a_graph() -> None:
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)

    def call() -> list[torch.Tensor]:
        out = flashtile.attention(q, k, v, causal=True)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = call()
    for _ in range(2):
        with torch.no_grad():
            q.normal_()
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(captured, call(), strict=True))


def test_a_cache_is_appended_to_by_both_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = (torch.randn(2, 1, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    angles = torch.rand(64, 16, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    lengths = torch.tensor([3, 9], dtype=torch.int32, device="cuda")

    def call() -> torch.Tensor:
        caches = torch.zeros(2, 2, 32, 4, 64, device="cuda", dtype=torch.bfloat16)
        ops.append_kv(caches[0], caches[1], k, v, lengths, None, cos, sin, True, "bshd")
        return caches

    call()
    with monkeypatch.context() as patch:
        patch.setattr(executor, "execute", None)
        served = call()
    with native.python_only():
        assert torch.equal(served, call())
    assert served.count_nonzero() > 0


def test_memory_that_torch_does_not_give_is_its_own_error() -> None:
    q = torch.randn(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    flashtile.attention(q, q, q)
    huge: Any = q.expand(1 << 22, 4, 256, 64)
    with pytest.raises(torch.OutOfMemoryError):
        flashtile.attention(huge, huge, huge)
    flashtile.attention(q, q, q)
    assert extension.executor().num_plans() > 0
