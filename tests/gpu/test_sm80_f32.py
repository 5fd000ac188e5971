"""The float32 kernels by mma.sync, forward and backward: every option by the error rule, lengths around their tiles,
rows that are aligned to nothing, numbers of other sizes, and the rows of an Ampere GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from family_tests import FEATURES, OTHERS, assert_accurate, forced, needs_ampere, taken_for

import flashtile
from flashtile import families
from flashtile.testing import Case

pytestmark = needs_ampere
forced_families = forced("fwd_sm80_f32")
KERNEL = "fwd_sm80_f32_kernel"
HEAD_DIMS = ((64, 64), (128, 128), (32, 32), (40, 72), (100, 128), (33, 33), (63, 65), (1, 1))
BACKWARD_KERNELS = "bwd_sm80_f32_dkdv_kernel", "bwd_sm80_f32_dq_kernel"
BACKWARD_LENGTHS = ((150, 300), (1, 700), (70, 700), (200, 64), (193, 1025), (370, 1), (1, 1), (129, 127))
# The backward refuses the gradient of a bias, and hidden keys that are not finite have none
TAKEN = {
    name: options for name, options in (FEATURES | OTHERS).items() if "bias" not in options and name != "hidden keys"
}
LENGTHS = ((150, 300), (70, 700), (200, 64), (193, 1025), (65, 1), (370, 700), (129, 127))  # it refuses 64 queries


def problem(number: int, head_dims: tuple[int, int], lengths: tuple[int, int], **options: object) -> tuple[Case, int]:
    sizes = {"head_dim": head_dims[0], "head_dim_v": head_dims[1], "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    layout = ("bhsd", "bshd")[number % 2]
    return Case(dtype=torch.float32, layout=layout, backend="cuda", **sizes | options), number  # type: ignore[arg-type]


@pytest.mark.parametrize("part", range(3))
def test_error_rule(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal mask meets every pair of head dims, each other feature two of them; lengths take turns."""
    problems = []
    for start, (feature, options) in enumerate((FEATURES | OTHERS).items()):
        for place, head_dims in enumerate(HEAD_DIMS):
            if feature == "causal" or (place - start) % len(HEAD_DIMS) in (0, 3):
                problems.append(problem(place + start, head_dims, LENGTHS[(place + start) % len(LENGTHS)], **options))
    assert_accurate(problems[part::3], KERNEL, monkeypatch)


@pytest.mark.smoke
def test_lengths_around_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (65, 66, 79, 81, 95, 97, 111, 127, 128, 129, 159, 191, 192, 193, 257)
    keys = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 129)
    features = ("plain", "causal", "top left", "window", "varlen", "gqa")
    problems = []
    for number, seqlen in enumerate(lengths):
        dim, options = (64, 128)[number % 2], FEATURES[features[number % len(features)]]
        problems.append(problem(number, (dim, dim), (seqlen, keys[number]), **options))
    assert_accurate(problems, KERNEL, monkeypatch)


def test_rows_of_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tiles, within its shared memory, compiled for the GPU at hand."""
    taken_for(monkeypatch, "sm_80")
    problems = []
    for start, feature in enumerate(("causal", "bias")):
        for place, head_dims in enumerate(HEAD_DIMS[:4]):
            problems.append(
                problem(place + start, head_dims, LENGTHS[(place + start) % len(LENGTHS)], **FEATURES[feature])
            )
    assert_accurate(problems, KERNEL, monkeypatch)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1e-15, 1.0), (1e15, 1.0), (1.0, 1e30), (1.0, 1e-25)])
def test_numbers_of_any_size(head_dim: int, sizes: tuple[float, float]) -> None:
    """Relative to float64 a few bits of float32, also where Q and K are tiny and huge, or V is."""
    skew, size_v = sizes
    q, k, v = (torch.randn(2, 3, 700, head_dim, device="cuda") for _ in range(3))
    q, k, v = q * skew, k / skew, v * size_v
    out = flashtile.attention(q, k, v, causal=True, backend="cuda").double()
    scores = q.double() @ k.double().transpose(-1, -2) * head_dim**-0.5
    scores = scores.masked_fill(torch.ones(700, 700, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
    want = scores.softmax(-1) @ v.double()
    assert (out - want).norm() <= 1e-6 * want.norm()


@pytest.mark.smoke
def test_nothing_behind_the_tails_is_read() -> None:
    """Rows and columns around q, k and v are NaN."""
    for head_dim, seqlen_q, seqlen_k in ((64, 100, 130), (128, 257, 300), (50, 77, 99), (33, 90, 65)):
        tensors = []
        for seqlen in (seqlen_q, seqlen_k, seqlen_k):
            around = torch.full((2, 3, seqlen + 70, head_dim + 40), float("nan"), device="cuda")
            tensors.append(around[:, :, 35:-35, 20:-20].normal_())
        assert torch.isfinite(flashtile.attention(*tensors, causal=True, backend="cuda")).all()


@pytest.fixture
def backward() -> Iterator[None]:
    """Any forward kernel: that of this file refuses few queries."""
    with families.forced("bwd_sm80_f32"):
        yield


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("part", range(3))
def test_error_rule_backward(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal mask meets every pair of head dims, each other feature two of them; lengths take turns."""
    problems = []
    for start, (feature, options) in enumerate(TAKEN.items()):
        for place, head_dims in enumerate(HEAD_DIMS):
            if feature == "causal" or (place - start) % len(HEAD_DIMS) in (0, 3):
                lengths = BACKWARD_LENGTHS[(place + start) % len(BACKWARD_LENGTHS)]
                problems.append(problem(place + start, head_dims, lengths, **options))
    assert_accurate(problems[part::3], BACKWARD_KERNELS[part % 2], monkeypatch, is_forward=False)


@pytest.mark.smoke
@pytest.mark.usefixtures("backward")
def test_lengths_around_a_tile_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 97, 127, 128, 129, 191, 192, 193, 257)
    features = ("plain", "causal", "top left", "window", "varlen", "gqa")
    problems = []
    for number, seqlen in enumerate(lengths):
        dim, options = (64, 128, 32)[number % 3], FEATURES[features[number % len(features)]]
        problems.append(problem(number, (dim, dim), (seqlen, lengths[-1 - number]), **options))
    assert_accurate(problems, BACKWARD_KERNELS[0], monkeypatch, is_forward=False)


@pytest.mark.usefixtures("backward")
def test_rows_of_ampere_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tiles, within its shared memory, compiled for the GPU at hand."""
    taken_for(monkeypatch, "sm_80")
    problems = []
    for start, feature in enumerate(("causal", "dropout")):
        for place, head_dims in enumerate(HEAD_DIMS[:4]):
            lengths = BACKWARD_LENGTHS[(place + start) % len(BACKWARD_LENGTHS)]
            problems.append(problem(place + start, head_dims, lengths, **FEATURES[feature]))
    assert_accurate(problems, BACKWARD_KERNELS[1], monkeypatch, is_forward=False)


def gradients(*tensors: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = flashtile.attention(*leaves, backend="cuda", **options)  # type: ignore[arg-type]
    return torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(-1).cos())


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("head_dim", [64, 100, 128])
def test_bias_without_its_gradient(head_dim: int) -> None:
    q, k, v = (torch.randn(2, 3, length, head_dim, device="cuda") for length in (200, 300, 300))
    for bias in (torch.randn(3, 200, 300, device="cuda"), torch.randn(2, 1, 1, 300, device="cuda")):
        found = gradients(q, k, v, bias=bias, causal=True)
        wide = [tensor.double().requires_grad_() for tensor in (q, k, v)]
        scores = wide[0] @ wide[1].transpose(-1, -2) * head_dim**-0.5 + bias.double()
        hidden = torch.ones(200, 300, device="cuda", dtype=torch.bool).triu(101)
        out = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ wide[2]
        expected = torch.autograd.grad(out, wide, torch.ones_like(out).cumsum(-1).cos())
        for one, other in zip(found, expected, strict=True):
            assert (one.double() - other).norm() <= 2e-6 * other.norm()


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1e-15, 1.0), (1e15, 1.0), (1.0, 1e20), (1.0, 1e-20)])
def test_gradients_of_any_size(head_dim: int, sizes: tuple[float, float]) -> None:
    """Relative to float64 a few bits of float32, also where Q and K are tiny and huge, or V is."""
    skew, size_v = sizes
    q, k, v = (torch.randn(2, 3, 700, head_dim, device="cuda") for _ in range(3))
    q, k, v = q * skew, k / skew, v * size_v
    found = gradients(q, k, v, causal=True)
    wide = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    scores = wide[0] @ wide[1].transpose(-1, -2) * head_dim**-0.5
    scores = scores.masked_fill(torch.ones(700, 700, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
    out = scores.softmax(-1) @ wide[2]
    expected = torch.autograd.grad(out, wide, torch.ones_like(out).cumsum(-1).cos())
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= 2e-6 * other.norm()


@pytest.mark.smoke
@pytest.mark.usefixtures("backward")
def test_gradients_have_the_same_bits_every_time() -> None:
    for head_dim in (64, 128, 40):
        tensors = [torch.randn(2, heads, 513, head_dim, device="cuda") for heads in (6, 2, 2)]
        first = gradients(*tensors, causal=True)
        for _ in range(5):
            assert all(map(torch.equal, gradients(*tensors, causal=True), first))


@pytest.mark.smoke
@pytest.mark.usefixtures("backward")
def test_nothing_behind_the_tails_is_read_backward() -> None:
    """Rows and columns around q, k and v are NaN."""
    for head_dim, seqlen_q, seqlen_k in ((64, 100, 130), (128, 257, 300), (50, 77, 99), (33, 90, 65)):
        tensors = []
        for seqlen in (seqlen_q, seqlen_k, seqlen_k):
            around = torch.full((2, 3, seqlen + 70, head_dim + 40), float("nan"), device="cuda")
            tensors.append(around[:, :, 35:-35, 20:-20].normal_())
        assert all(torch.isfinite(grad).all() for grad in gradients(*tensors, causal=True))


@pytest.mark.smoke
@pytest.mark.usefixtures("backward")
def test_gradients_that_are_wanted_alone() -> None:
    """dK without dV and the like: the kernel for keys writes both."""
    tensors = [torch.randn(1, 2, 150, 64, device="cuda") for _ in range(3)]
    everything = gradients(*tensors)
    for wanted in ((0,), (1,), (2,), (0, 2), (1, 2)):
        leaves = [tensor.detach().requires_grad_(place in wanted) for place, tensor in enumerate(tensors)]
        out = flashtile.attention(*leaves, backend="cuda")
        found = torch.autograd.grad(out, [leaves[place] for place in wanted], torch.ones_like(out).cumsum(-1).cos())
        assert all(torch.equal(one, everything[place]) for one, place in zip(found, wanted, strict=True))
