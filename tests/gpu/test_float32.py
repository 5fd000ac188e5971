"""float32 on Hopper by split operands: every option by the error rule, both kinds of parts, numbers of any range."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from family_tests import FEATURES, assert_accurate, forced, jitter, needs_hopper
from torch import Tensor

import flashtile
from flashtile import families
from flashtile.backends import native, registry
from flashtile.families import assemble
from flashtile.families.fwd_sm90_f32_direct import family as direct_family
from flashtile.families.fwd_sm90_f32_direct.family import FwdSm90F32Direct
from flashtile.lab.check.report import Settings
from flashtile.lab.check.runner import check
from flashtile.plans.length_class import ManyScores
from flashtile.plans.mutation import planted
from flashtile.testing import Case, disagreements, run

pytestmark = needs_hopper
forced_families = forced("fwd_sm90_f32", "bwd_sm90_f32")

HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (8, 8), (40, 72), (33, 65), (96, 96), (200, 136))
BACKWARD_HEAD_DIMS = ((64, 64), (128, 128), (40, 72), (33, 65), (256, 256), (200, 136), (129, 250))
LENGTHS = ((65, 1), (90, 700), (150, 300), (200, 64), (193, 1025), (1000, 513), (370, 700))
# Memory that the 16-bit kernel refuses
MORE: dict[str, dict] = {
    "offset": {"memory": "offset"},
    "sliced": {"memory": "sliced", "heads": 4, "heads_kv": 2},
}
VALUES = ("tiny", "huge", "rising", "dominant", "ties", "constant", "denormal", "overflow", "masked", "masked_keys")


def cases(feature: str, options: dict, num_dims: int) -> Iterator[tuple[Case, int]]:
    start = len(feature)
    for place in range(num_dims):
        number = place * 3 + start
        head_dim, head_dim_v = HEAD_DIMS[number % len(HEAD_DIMS)]
        seqlen_q, seqlen_k = LENGTHS[number % len(LENGTHS)]
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim, "head_dim_v": head_dim_v}
        yield Case(layout=("bhsd", "bshd")[number % 2], backend="cuda", **(sizes | options)), number


def test_error_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ("plain", "causal", "varlen")
    named = (FEATURES | MORE).items()
    problems = [one for feature, options in named for one in cases(feature, options, 4 if feature in plain else 1)]
    assert_accurate(problems, "fwd_sm90_f32_half_kernel", monkeypatch)


@pytest.mark.long(35)
def test_error_rule_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = []
    for number, (_, options) in enumerate((FEATURES | MORE).items()):
        seqlen_q, seqlen_k = LENGTHS[number % len(LENGTHS)]
        head_dim, head_dim_v = BACKWARD_HEAD_DIMS[number % len(BACKWARD_HEAD_DIMS)]
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim, "head_dim_v": head_dim_v}
        problems.append((Case(backend="cuda", **(sizes | options)), number))
    assert_accurate(problems, "bwd_sm90_f32_dq_half_kernel", monkeypatch, is_forward=False)


DIRECT_HEAD_DIMS = ((64, 64), (40, 64), (64, 8), (4, 60))


@pytest.fixture
def direct() -> Iterator[None]:
    """The kernel without a pre-pass, which refuses deterministic calls."""
    torch.use_deterministic_algorithms(False)
    with families.forced("fwd_sm90_f32_direct", "bwd_sm90_f32"):
        assemble.clear_plans()
        yield


@pytest.fixture(params=["half", "bf16"])
def direct_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel of long calls, which looks at the numbers first, and that of short ones, for calls of any length."""
    least = 1 if request.param == "half" else 62
    monkeypatch.setattr(direct_family, "_MANY", ManyScores(least))
    monkeypatch.setattr(FwdSm90F32Direct, "length_classes", (*FwdSm90F32Direct.length_classes, ManyScores(least)))
    return request.param


@pytest.mark.usefixtures("direct")
def test_error_rule_without_a_pre_pass(direct_parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = []
    features = FEATURES | {"many keys": {"causal": "top_left"}}
    if direct_parts == "half":  # takes a band and no other option
        features = {name: features[name] for name in ("plain", "causal", "top left", "window", "gqa", "many keys")}
    for number, (feature, options) in enumerate(features.items()):
        seqlen_q, seqlen_k = (130, 2500) if feature == "many keys" else LENGTHS[number % len(LENGTHS)]
        head_dim, head_dim_v = DIRECT_HEAD_DIMS[number % len(DIRECT_HEAD_DIMS)]
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim, "head_dim_v": head_dim_v}
        problems.append((Case(backend="cuda", deterministic=False, **(sizes | options)), number))
    assert_accurate(problems, f"fwd_sm90_f32_direct_{direct_parts}_kernel", monkeypatch)


@pytest.mark.usefixtures("direct", "direct_parts")
def test_lost_parts_are_seen_without_a_pre_pass() -> None:
    """A fault in the line that splits V."""
    inputs = Case(backend="cuda", seqlen_q=130, seqlen_k=300, head_dim=64, head_dim_v=64, deterministic=False).make(
        0, "cuda"
    )
    assert disagreements(run(inputs, has_backward=False), inputs) == []
    try:
        with planted("fwd_sm90_f32_direct_part"), native.python_only():
            assemble.clear_plans()
            assert disagreements(run(inputs, has_backward=False), inputs)
    finally:
        assemble.clear_plans()


@pytest.mark.smoke
@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("seqlen", [4096, 8192])
def test_without_a_pre_pass_there_is_no_workspace(seqlen: int) -> None:
    """Beyond the inputs: the output and lse, and what is known about the numbers."""
    q, k, v = (torch.randn(1, 1, seqlen, 64, device="cuda") for _ in range(3))
    flashtile.attention(q, k, v, backend="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flashtile.attention(q, k, v, backend="cuda")
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + 4 * seqlen + 1024


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("causal", [False, True])
def test_jitter_without_a_pre_pass_changes_no_bit(
    causal: bool, direct_parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (torch.randn(1, heads, 900, 64, device="cuda") for heads in (4, 2, 2))
    expected = flashtile.attention(q, k, v, causal=causal, backend="cuda")
    functions = jitter(monkeypatch)
    with native.python_only():
        for _ in range(20):
            assert torch.equal(flashtile.attention(q, k, v, causal=causal, backend="cuda"), expected)
    assert any(f"fwd_sm90_f32_direct_{direct_parts}_kernel" in unit for unit in functions)


@pytest.mark.long(25)
@pytest.mark.smoke
def test_lengths_around_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (65, 66, 95, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257)
    features = ("plain", "causal", "top left", "window", "varlen", "gqa")
    problems = []
    for number, seqlen in enumerate(lengths):
        head_dim = (64, 128, 256)[number % 3]
        sizes = {
            "seqlen_q": seqlen,
            "seqlen_k": lengths[-1 - number] - 64,
            "head_dim": head_dim,
            "head_dim_v": head_dim,
        }
        problems.append((Case(backend="cuda", **sizes | FEATURES[features[number % len(features)]]), number))
    assert_accurate(problems, "bwd_sm90_f32_dkdv_half_kernel", monkeypatch, is_forward=False)


@pytest.mark.parametrize("values", VALUES)
def test_values(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [
        (
            Case(
                backend="cuda",
                seqlen_q=130,
                seqlen_k=513,
                head_dim=head_dim,
                head_dim_v=head_dim,
                values=values,
                mask="bk" if values.startswith("masked") else None,
                bias="bhqk" if values == "masked" else None,
            ),
            head_dim,
        )
        for head_dim in (64, 128)
    ]
    assert_accurate(problems, "fwd_sm90_f32_bf16_kernel", monkeypatch)


# What stands in q, k and v, and which kernel does the work: "half" or "bf16"
RANGES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], str]] = {
    "normal": (lambda q, k, v: (q, k, v), "half"),
    "v 1e30": (lambda q, k, v: (q, k, v * 1e30), "half"),
    "v 1e-30": (lambda q, k, v: (q, k, v * 1e-30), "half"),
    "v 1e-35, all keys alike": (lambda q, k, v: (q, k * 1e-3, v * 1e-35), "half"),
    "q 1e30, k 1e-30": (lambda q, k, v: (q * 1e30, k * 1e-30, v), "half"),
    "q and k 1e-30": (lambda q, k, v: (q * 1e-30, k * 1e-30, v), "half"),
    "one row of v 1e-12": (lambda q, k, v: (q, k, _with_row(v, 1e-12)), "bf16"),
    "one row of v 1e12": (lambda q, k, v: (q, k, _with_row(v, 1e12)), "bf16"),
    "one row of k 1e6": (lambda q, k, v: (q * 1e-4, _with_row(k, 1e6), v), "bf16"),
    "rows of v from 1e-30 to 1e30": (lambda q, k, v: (q, k, v * _powers(v)), "bf16"),
    "zero rows": (lambda q, k, v: (q, _with_row(k, 0.0), _with_row(v, 0.0)), "half"),
}


def _with_row(x: Tensor, factor: float) -> Tensor:
    x = x.clone()
    x[:, :, 5] *= factor
    return x


def _powers(x: Tensor) -> Tensor:
    return 10.0 ** torch.linspace(-30, 30, x.shape[-2], device=x.device)[:, None]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", RANGES)
def test_any_range_is_float32_accurate(name: str, head_dim: int) -> None:
    assert_any_range(name, head_dim)


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("name", RANGES)
@pytest.mark.usefixtures("direct_parts")
def test_any_range_without_a_pre_pass(name: str) -> None:
    """Nothing scales tiny numbers: the third bfloat16 part of one below 2^-110 loses bits, up to 2^-133."""
    assert_any_range(name, 64, smallest=2.0**-133)


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("name", ["normal", "one row of v 1e-12"])
def test_a_long_head_without_a_pre_pass(name: str) -> None:
    """A head that is long enough for float16 parts, and one whose numbers they cannot hold."""
    torch.manual_seed(0)
    q, k, v = RANGES[name][0](*(torch.randn(1, 1, 8192, 64, device="cuda") for _ in range(3)))
    out = flashtile.attention(q, k, v, backend="cuda")
    rows = torch.arange(0, 8192, 37, device="cuda")
    expected = (q[:, :, rows].double() @ k.double().transpose(-1, -2) / 8).softmax(-1) @ v.double()
    assert (out[:, :, rows] - expected).norm() / expected.norm() < 6e-7


def assert_any_range(name: str, head_dim: int, smallest: float = 1e-44) -> None:
    """Element by element, with room for what float32 does to scores and to sums. The error of a score is that of its
    products, however small their sum is. It moves an output by up to its distance from the key's value. No part of a
    number is below `smallest`."""
    torch.manual_seed(0)
    q, k, v = RANGES[name][0](*(torch.randn(2, 3, 300, head_dim, device="cuda") for _ in range(3)))
    out = flashtile.attention(q, k, v, causal=True, backend="cuda").double()
    q, k, v, scale = q.double(), k.double(), v.double(), head_dim**-0.5
    is_hidden = torch.ones(300, 300, device="cuda", dtype=torch.bool).triu(1)
    p = (q @ k.transpose(-1, -2) * scale).masked_fill(is_hidden, -torch.inf).softmax(-1)
    expected = p @ v
    weight = p * (1 + q.abs() @ k.abs().transpose(-1, -2) * scale)
    room = weight @ v.abs() + weight.sum(-1, keepdim=True) * expected.abs()
    assert ((out - expected).abs() <= 2e-6 * room + smallest).all()


@pytest.mark.parametrize("name", RANGES)
def test_which_kernel_works(name: str) -> None:
    """The numbers decide, on the GPU; the other kernel returns at once."""
    assert_works(name, "fwd_sm90_f32")


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("direct_parts", ["half"], indirect=True)
@pytest.mark.parametrize("name", RANGES)
def test_which_kernel_works_without_a_pre_pass(name: str, direct_parts: str) -> None:
    assert_works(name, "fwd_sm90_f32_direct")


def assert_works(name: str, family: str) -> None:
    """Of the two kernels of a family the one that the numbers call for takes longer. The shortest of its runs counts:
    others use the GPU at the same time."""
    expected = RANGES[name][1]
    torch.manual_seed(0)
    q, k, v = RANGES[name][0](*(torch.randn(1, 2, 256, 64, device="cuda") for _ in range(3)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            flashtile.attention(q, k, v, backend="cuda")
        torch.cuda.synchronize()
    events = profile.events() or []
    us = {
        part: min(event.device_time for event in events if f"{family}_{part}" in event.name)
        for part in ("half", "bf16")
    }
    assert max(us, key=us.__getitem__) == expected, us


def test_numbers_of_very_different_sizes(seed: int) -> None:
    """A few problems of `flashtile check --float32`, for each family."""
    torch.use_deterministic_algorithms(False)
    settings = Settings([registry.find("cuda")], "cuda", seed=seed % 100000, problems=40, reuse=10, is_float32=True)
    report = check(settings)
    assert report.ran["cuda"] + sum(report.refused.get("cuda", {}).values()) == 40
    assert report.families
    assert not report.failures, report.failures


def gradients(tensors: list[Tensor], dout: Tensor, **options: object) -> list[Tensor]:
    """The output and the gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = flashtile.attention(*leaves, **options)  # type: ignore[arg-type]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("part", [pytest.param("half", marks=pytest.mark.long(75)), "bf16"])  # by the same kernels
def test_jitter_changes_no_bit(part: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of random length before every barrier, copy and product. Several work items for each block."""
    tensors = [torch.randn(2, heads, 500, head_dim, device="cuda") for heads in (64, 32, 32)]
    if part == "bf16":
        tensors[2] = _with_row(tensors[2], 1e-12)
    dout = torch.randn(2, 64, 500, head_dim, device="cuda")
    causal = head_dim != 128  # the compiler takes a minute for the kernels of one mask
    expected = gradients(tensors, dout, causal=causal, backend="cuda")
    functions = jitter(monkeypatch)
    with native.python_only():
        for _ in range(20):
            found = gradients(tensors, dout, causal=causal, backend="cuda")
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert any(f"bwd_sm90_f32_dq_{part}_kernel" in unit for unit in functions)


@pytest.mark.smoke
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_some_gradients(wanted: tuple[int, ...]) -> None:
    """Bit by bit those of a call that wants all."""
    tensors = [torch.randn(1, 2, 200, 64, device="cuda") for _ in range(3)]
    dout = torch.randn_like(tensors[0])
    expected = gradients(tensors, dout, backend="cuda")[1:]
    leaves = [tensor.detach().requires_grad_(index in wanted) for index, tensor in enumerate(tensors)]
    found = torch.autograd.grad(flashtile.attention(*leaves, backend="cuda"), [leaves[index] for index in wanted], dout)
    for index, one in zip(wanted, found, strict=True):
        assert torch.equal(one, expected[index])


@pytest.mark.smoke
def test_matmul_precision() -> None:
    """One float16 product for "high" and "medium", which keeps as many bits as TF32. No plan serves another word."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    expected = [(wide[0] @ wide[1].transpose(-1, -2) / 8).softmax(-1) @ wide[2]]
    expected += torch.autograd.grad(expected[0], wide, dout.double())
    before = torch.get_float32_matmul_precision()
    try:
        for word in ("highest", "high", "highest", "medium", "high"):
            torch.set_float32_matmul_precision(word)
            out = flashtile.attention(q, k, v, backend="cuda")
            found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
            low, high = (0.0, 7e-7) if word == "highest" else (1e-5, 1e-3)
            for one, other in zip(found, expected, strict=True):
                assert low <= (one.double() - other).norm() / other.norm() <= high, word
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.smoke
def test_refusals_name_their_reason() -> None:
    q, k, v = (torch.randn(1, 4, length, 64, device="cuda") for length in (64, 300, 300))
    assert "fwd_sm90_f32: at most 64 queries" in str(flashtile.explain(q, k, v))
