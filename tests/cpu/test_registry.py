"""Selection: explain, forced backends, refusals, the warning for slower paths, strict mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import flashtile
from flashtile.backends import registry
from flashtile.backends.tiled import TiledBackend
from flashtile.families import speeds
from flashtile.plans.arch import ARCHS


class Picky(TiledBackend):
    """A fast backend that takes plain calls only."""

    name = "picky"
    summary = "plain calls only"
    devices = ("cpu",)

    def refuse(self, problem, op="forward"):
        return "softcap is not among its features" if problem.softcap else None

    def prepare(self, problem):
        self.prepared = problem


@pytest.fixture
def known_speeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Times by provider of small float32 calls on a CPU, instead of those of the table."""
    us = {"picky": 1.0, "cpu": 30.0, "tiled": 200.0, "sdpa-flash": 10.0}
    rows = tuple(
        speeds._Row("cpu", op, "float32", option, "small", 64, us)
        for op in speeds.OPS
        for option in (speeds.PLAIN, *speeds.OPTIONS)
    )
    for cached in (speeds._row, speeds.is_measured):
        cached.cache_clear()
    monkeypatch.setattr(speeds, "_table", lambda: rows)
    yield us
    for cached in (speeds._row, speeds.is_measured):
        cached.cache_clear()


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch, known_speeds: dict[str, float]) -> Picky:
    backend = Picky()
    monkeypatch.setattr(registry, "BACKENDS", [backend, *registry.BACKENDS])
    monkeypatch.setattr(registry, "_warned", set())
    return backend


def qkv(**options) -> list[torch.Tensor]:
    return [torch.randn(2, 4, 9, 8, **options) for _ in range(3)]


def test_explain_says_what_runs_and_why_not_the_rest(seed: int) -> None:
    q, k, v = qkv(requires_grad=True)
    answer = flashtile.explain(q, k, v, causal=True, softcap=3.0)
    assert answer.backend == "cpu"
    assert list(answer.refusals) == ["cuda", "triton", "tiled", "numba", "reference"]
    assert answer.refusals["cuda"] == "it runs on cuda, and q is on cpu"
    assert "only taken by name" in answer.refusals["reference"]
    text = str(answer)
    for piece in (
        "float32 on cpu",
        "forward and backward",
        "batch 2, heads 4 over 4",
        "causal bottom_right",
        "softcap 3.0",
        "instructions: ",
    ):
        assert piece in text


def test_explain_of_a_forced_backend_and_of_varlen(seed: int) -> None:
    answer = flashtile.explain(*qkv(), backend="reference")
    assert answer.backend == "reference"
    assert "was asked for" in answer.refusals["tiled"]
    assert "128 queries x 256 keys" in str(flashtile.explain(*qkv(), backend="tiled"))
    assert "MiB for each score matrix" in str(answer)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    q = torch.randn(9, 4, 8)
    answer = flashtile.explain(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert answer.problem.is_varlen
    assert answer.problem.shape.batch == 2


def test_explain_of_meta_tensors_is_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    q, k, v = qkv(device="meta", requires_grad=True)
    answer = flashtile.explain(q, k, v, causal=True, dropout_p=0.1)
    here = flashtile.explain(*qkv(requires_grad=True), causal=True, dropout_p=0.1)
    assert (answer.backend, answer.problem, answer.details) == (here.backend, here.problem, here.details)
    assert flashtile.prewarm(q, k, v).backend == here.backend
    cache = torch.empty(2, 16, 4, 8, device="meta")
    lengths = torch.empty(2, dtype=torch.int32, device="meta")
    answer = flashtile.explain(cache[:, :1], cache, cache, cache_seqlens=lengths)
    assert answer.backend == "cpu"
    assert answer.problem.has_key_lengths


def test_explain_of_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = qkv()
        assert flashtile.explain(q, k, v).backend == "cpu"
        assert not flashtile.explain(q[..., 1:], k[..., 1:], v).problem.is_aligned16


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("number", ARCHS)
def test_explain_of_a_gpu_that_is_not_here(number: int, device: str) -> None:
    """On a machine without CUDA, and without Triton or a compiler where it must be so."""
    q, k, v = (torch.empty(2, 4, 4096, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    answer = flashtile.explain(q, k, v, arch=f"sm_{number}", causal=True)
    assert answer.problem.arch == f"sm_{number}"
    assert f"bfloat16 on sm_{number}, layout bhsd, forward and backward" in str(answer)
    assert answer.refusals["cpu"] == "it runs on cpu, and q is on cuda"
    named = flashtile.explain(q, k, v, arch=f"sm_{number}", backend="cuda")
    assert any(name.startswith("fwd_") and f"sm_{number}" in text for name, text in named.details.items())
    assert any(name.startswith("bwd_") for name in named.details)
    if number < 80:
        assert "is older than Triton's oldest (8.0)" in answer.refusals["triton"]
        with pytest.raises(flashtile.Unsupported, match="older than Triton's oldest"):
            flashtile.explain(q, k, v, arch=f"sm_{number}", backend="triton")
    else:
        assert "fwd_triton_kernel" in flashtile.explain(q, k, v, arch=f"sm_{number}", backend="triton").details


def test_explain_of_a_gpu_differs_from_another() -> None:
    q, k, v = qkv(dtype=torch.float16)
    hopper, turing = (flashtile.explain(q, k, v, arch=arch, backend="cuda") for arch in ("sm_90a", "sm_75"))
    assert "fwd_sm90_kernel" in hopper.details
    assert turing.details["not fwd_sm90"] == "sm_75 has no wgmma"
    assert flashtile.explain(q, k, v, arch="cpu").backend == "cpu"


def test_what_another_gpu_has_makes_no_path_slow() -> None:
    """float32 takes tensor cores on Hopper alone. Elsewhere the kernel that is there is not 5 times too slow."""
    q, k, v = (torch.empty(2, 16, 4096, 64, device="meta") for _ in range(3))
    hopper, ampere = (flashtile.explain(q, k, v, arch=arch) for arch in ("sm_90", "sm_80"))
    assert "fwd_sm90_f32_half_kernel" in hopper.details
    assert "fwd_sm90_f32_half_kernel" not in ampere.details
    assert hopper.slow_paths == ampere.slow_paths == ()


@pytest.mark.parametrize("arch", ["volta", "sm_50", "sm_", 80])
def test_explain_refuses_unknown_archs(arch: object) -> None:
    with pytest.raises(ValueError, match=r"^arch: got .*; accepted: cpu, sm_61, .* sm_120, or a GPU: .*, A100, "):
        flashtile.explain(*qkv(), arch=arch)


@pytest.mark.parametrize("ask", [flashtile.explain, flashtile.prewarm])
def test_explaining_dropout_draws_no_random_number(ask: Callable) -> None:
    tensors, before = qkv(), torch.get_rng_state()
    assert ask(*tensors, dropout_p=0.5).problem.dropout_p == 0.5
    q, cu = torch.zeros(4, 1, 8), torch.tensor([0, 4], dtype=torch.int32)
    assert ask(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, dropout_p=0.5).problem.dropout_p == 0.5
    assert torch.equal(torch.get_rng_state(), before)


def test_explain_of_a_cache_without_lengths() -> None:
    """Any option that only attention_kvcache has says that the call is one of its own."""
    q, pages = torch.zeros(1, 1, 2, 8), torch.zeros(3, 4, 2, 8)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    assert flashtile.explain(q, pages, pages, block_table=table).problem.page_size == 4
    with pytest.raises(ValueError, match="rotary_cos: got it without k and v"):
        flashtile.explain(q, pages[:1], pages[:1], rotary_cos=torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("variable", "options"), [("FLASHTILE_STRICT", {"softcap": 1.0}), ("FLASHTILE_CHECK", {"backend": "cpu"})]
)
def test_a_switch_is_0_or_1(variable: str, options: dict, picky: Picky, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "false")
    with pytest.raises(ValueError, match=f"{variable}: got 'false'; accepted: 0 or 1"):
        flashtile.attention(*qkv(), **options)


def test_explain_refuses_unknown_options() -> None:
    with pytest.raises(TypeError, match="is_causal: got an option that attention does not have; accepted: causal"):
        flashtile.explain(*qkv(), is_causal=True)


def test_the_fastest_that_takes_it_runs(picky: Picky, seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flashtile.attention(*qkv())
    assert flashtile.explain(*qkv()).backend == "picky"


SLOW = (
    r"'cpu' serves this call \(float32 forward, head_dim 8, softcap\) 30.0 times slower than picky, the fastest known; "
    r"'picky' refuses: softcap is not among its features"
)


def test_a_slow_path_warns_once(picky: Picky, seed: int) -> None:
    with pytest.warns(flashtile.SlowPathWarning, match=SLOW):
        flashtile.attention(*qkv(), softcap=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flashtile.attention(*qkv(), softcap=2.0)


def test_strict_mode_raises_instead(picky: Picky, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_STRICT", "1")
    flashtile.attention(*qkv())
    with pytest.raises(flashtile.Unsupported, match=r"'picky' refuses: softcap.*FLASHTILE_STRICT=1"):
        flashtile.attention(*qkv(), softcap=1.0)
    assert flashtile.attention(*qkv(), softcap=1.0, backend="tiled").shape == (2, 4, 9, 8)


def test_explain_is_silent_and_works_in_strict_mode(picky: Picky, monkeypatch: pytest.MonkeyPatch) -> None:
    for strict in ("0", "1"):
        monkeypatch.setenv("FLASHTILE_STRICT", strict)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            answer = flashtile.explain(*qkv(), softcap=1.0)
        assert answer.backend == "cpu"
        assert answer.slow_paths == (SLOW.replace("\\", ""),)
    monkeypatch.setenv("FLASHTILE_STRICT", "0")
    with pytest.warns(flashtile.SlowPathWarning):
        flashtile.attention(*qkv(), softcap=1.0)


def test_a_warning_made_an_error_comes_every_time(picky: Picky) -> None:
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(flashtile.SlowPathWarning):
                flashtile.attention(*qkv(), softcap=1.0)


def test_forward_and_backward_each_take_the_fastest(picky: Picky, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = lambda self, problem, op="forward": "no gradients" if op == "backward" else None  # noqa: E731
    monkeypatch.setattr(Picky, "refuse", refuse)
    q, k, v = qkv(requires_grad=True)
    answer = flashtile.explain(q, k, v)
    assert (answer.backend, answer.details["backward"]) == ("picky", "cpu")
    out = flashtile.attention(q, k, v)
    with pytest.warns(
        flashtile.SlowPathWarning, match=r"'cpu' serves this call \(float32 backward.*'picky' refuses: no gradients"
    ):
        out.sum().backward()
    with pytest.raises(flashtile.Unsupported, match="no gradients"):
        flashtile.attention(q, k, v, backend="picky")
    with torch.no_grad():
        assert "backward" not in flashtile.explain(q, k, v).details


def test_a_path_that_is_not_far_behind_is_silent(picky: Picky, known_speeds: dict[str, float]) -> None:
    known_speeds["picky"] = known_speeds["sdpa-flash"] = 15.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flashtile.attention(*qkv(), softcap=1.0)


def test_torch_is_among_the_fastest_known(
    picky: Picky, known_speeds: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "BACKENDS", registry.BACKENDS[1:])
    del known_speeds["picky"]
    known_speeds["cpu"] = 21.0
    with pytest.warns(flashtile.SlowPathWarning, match="2.1 times slower than sdpa-flash"):
        flashtile.attention(*qkv())


def test_unknown_speeds_leave_the_order_of_the_registry(picky: Picky, known_speeds: dict[str, float]) -> None:
    known_speeds.clear()
    assert flashtile.explain(*qkv()).backend == "picky"
    words = "'picky' refuses: softcap is not among its features; 'cpu' serves instead"
    assert flashtile.explain(*qkv(), softcap=1.0).slow_paths == (words,)


def test_explain_of_a_cache(seed: int) -> None:
    q, cache = torch.randn(2, 1, 4, 8), torch.randn(2, 10, 2, 8)
    answer = flashtile.explain(q, cache, cache, cache_seqlens=4, causal=True)
    assert answer.problem.has_key_lengths
    assert "key lengths yes" in str(answer)


def test_explain_shows_a_window_that_is_causal_in_effect(seed: int) -> None:
    assert "window (-1, 0)" in str(flashtile.explain(*qkv(), window=(-1, 0)))
    assert "window" not in str(flashtile.explain(*qkv(), causal=True))


def test_a_forced_backend_gives_its_reason(picky: Picky, seed: int) -> None:
    with pytest.raises(
        flashtile.Unsupported,
        match=r"backend: got 'picky', which refuses: softcap is not among its features; accepted: None",
    ):
        flashtile.attention(*qkv(), softcap=1.0, backend="picky")


def test_a_backend_for_another_device_is_passed_over(picky: Picky, known_speeds: dict[str, float], seed: int) -> None:
    picky.devices = ("cuda",)
    known_speeds["picky"] = known_speeds["cpu"]
    known_speeds["sdpa-flash"] = known_speeds["cpu"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flashtile.attention(*qkv())
    with pytest.raises(flashtile.Unsupported, match="it runs on cuda, and q is on cpu"):
        flashtile.attention(*qkv(), backend="picky")


def test_no_backend_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BACKENDS", [])
    with pytest.raises(flashtile.Unsupported, match=r"no backend takes this call\. none runs on cpu"):
        flashtile.attention(*qkv())


def test_prewarm_prepares_what_would_run(picky: Picky) -> None:
    answer = flashtile.prewarm(*qkv())
    assert answer.backend == "picky"
    assert picky.prepared == answer.problem


@pytest.mark.parametrize("switch", [None, True, False])
def test_deterministic_follows_torch_unless_told(switch: bool | None) -> None:
    torch.use_deterministic_algorithms(False)
    assert flashtile.explain(*qkv(), deterministic=switch).problem.deterministic is bool(switch)
    torch.use_deterministic_algorithms(True)
    assert flashtile.explain(*qkv(), deterministic=switch).problem.deterministic is (switch is not False)


def test_a_preferred_backend_whose_time_is_not_known_keeps_its_place(
    picky: Picky, known_speeds: dict[str, float]
) -> None:
    del known_speeds["picky"]
    assert flashtile.explain(*qkv()).backend == "picky"


def test_a_slower_backend_is_not_even_asked(picky: Picky, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking Triton imports it."""

    def refuse(self, problem, op="forward"):
        raise AssertionError("asked")

    monkeypatch.setattr(type(registry.find("cpu")), "refuse", refuse)
    flashtile.attention(*qkv())


def test_prewarm_prepares_the_backward_pass_of_another_backend(picky: Picky, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = []
    monkeypatch.setattr(
        Picky, "refuse", lambda self, problem, op="forward": "no gradients" if op == "backward" else None
    )
    for backend in (picky, registry.find("cpu")):
        monkeypatch.setattr(type(backend), "prepare", lambda self, problem: prepared.append(self.name))
    with pytest.warns(flashtile.SlowPathWarning):
        flashtile.prewarm(*qkv(requires_grad=True))
    assert prepared == ["picky", "cpu"]
