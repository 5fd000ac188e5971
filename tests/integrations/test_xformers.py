"""The names of xformers: every bias against float64 formulas over its stored mask, the masks against the package's."""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interfaces import imported, outline, recorded

import flashtile
from flashtile.integrations import xformers as ours
from flashtile.integrations.xformers.ops import fmha
from flashtile.integrations.xformers.ops.fmha import attn_bias

INTERFACE = recorded("xformers-0.0.35")
PAGE = 4


def _named(where: Any, name: str) -> Any:
    for part in name.split("."):
        where = getattr(where, part)
    return where


# The interface


def test_interface() -> None:
    for name, parameters in INTERFACE.items():
        owner = fmha if hasattr(fmha, name.partition(".")[0]) else attn_bias
        assert (name, outline(_named(owner, name))) == (name, parameters)


@pytest.fixture
def theirs() -> Any:
    """The package's own fmha. Without its compiled part it has the bias classes and little else."""
    return imported("xformers.ops.fmha")


def test_the_recorded_interface_is_the_packages(theirs: Any) -> None:
    for name, parameters in INTERFACE.items():
        owner = theirs if hasattr(theirs, name.partition(".")[0]) else theirs.attn_bias
        assert (name, outline(_named(owner, name))) == (name, parameters)


def test_every_class_of_the_package_is_served_or_refused(theirs: Any) -> None:
    base = theirs.attn_bias.AttentionBias
    classes = {n for n, c in vars(theirs.attn_bias).items() if inspect.isclass(c) and issubclass(c, base)}
    assert classes - {"AttentionBias"} == attn_bias._BANDS.keys() | {n for n in classes if "Gappy" in n}
    assert all(hasattr(attn_bias, name) for name in classes)


# Biases: each maker draws one, from our classes or the package's


def lengths(draw: random.Random, smallest: int, largest: int, count: int) -> list[int]:
    return [draw.randint(smallest, largest) for _ in range(count)]


def dense(make: Callable[[Any, random.Random], Any]) -> Any:
    def maker(kinds: Any, draw: random.Random) -> tuple[Any, int, int, int]:
        rows = draw.randint(1, 12)
        return make(kinds, draw), draw.randint(1, 3), rows, draw.randint(rows, 19)

    return maker


def blocks(make: Callable[[Any, random.Random, list[int], list[int]], Any]) -> Any:
    def maker(kinds: Any, draw: random.Random) -> tuple[Any, int, int, int]:
        count = draw.randint(1, 4)
        queries = lengths(draw, 1, 7, count)
        keys = [draw.randint(length, 11) for length in queries]
        return make(kinds, draw, queries, keys), 1, sum(queries), sum(keys)

    return maker


def padded(make: Callable[[Any, random.Random, list[int], int, list[int]], Any]) -> Any:
    def maker(kinds: Any, draw: random.Random) -> tuple[Any, int, int, int]:
        count, padding = draw.randint(1, 4), draw.choice([8, 12])
        queries = lengths(draw, 1, 5, count)
        keys = [draw.randint(length, padding) for length in queries]
        bias = make(kinds, draw, queries, padding, keys)
        return bias, 1, sum(queries), count * padding

    return maker


def paged(name: str) -> Any:
    def maker(kinds: Any, draw: random.Random) -> tuple[Any, int, int, int]:
        count, width = draw.randint(1, 3), draw.randint(2, 3)
        queries = lengths(draw, 1, 5, count)
        keys = [draw.randint(length, width * PAGE) for length in queries]
        table = torch.tensor(draw.sample(range(count * width), count * width), dtype=torch.int32).view(count, width)
        bias = getattr(kinds, name).from_seqlens(queries, keys, table, PAGE, device=torch.device("cpu"))
        return bias, 1, sum(queries), count * width * PAGE

    return maker


CPU = torch.device("cpu")
MAKERS: dict[str, Callable[[Any, random.Random], tuple[Any, int, int, int]]] = {
    "LowerTriangularMask": dense(lambda kinds, draw: kinds.LowerTriangularMask()),
    "LowerTriangularFromBottomRightMask": dense(lambda kinds, draw: kinds.LowerTriangularFromBottomRightMask()),
    "LowerTriangularFromBottomRightLocalAttentionMask": dense(
        lambda kinds, draw: kinds.LowerTriangularFromBottomRightMask().make_local_attention(draw.randint(1, 9))
    ),
    "LocalAttentionFromBottomRightMask": dense(
        lambda kinds, draw: kinds.LocalAttentionFromBottomRightMask(draw.randint(0, 6), draw.randint(0, 6))
    ),
    "BlockDiagonalMask": blocks(lambda kinds, draw, q, k: kinds.BlockDiagonalMask.from_seqlens(q, k, device=CPU)),
    "BlockDiagonalCausalMask": blocks(
        lambda kinds, draw, q, k: kinds.BlockDiagonalMask.from_seqlens(q, k, device=CPU).make_causal()
    ),
    "BlockDiagonalCausalFromBottomRightMask": blocks(
        lambda kinds, draw, q, k: kinds.BlockDiagonalMask.from_seqlens(q, k, device=CPU).make_causal_from_bottomright()
    ),
    "BlockDiagonalCausalLocalAttentionMask": blocks(
        lambda kinds, draw, q, k: kinds.BlockDiagonalMask.from_seqlens(q, k, device=CPU).make_local_attention(
            draw.randint(1, 6)
        )
    ),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": blocks(
        lambda kinds, draw, q, k: kinds.BlockDiagonalMask.from_seqlens(
            q, k, device=CPU
        ).make_local_attention_from_bottomright(draw.randint(1, 6))
    ),
    "BlockDiagonalPaddedKeysMask": padded(
        lambda kinds, draw, q, pad, k: kinds.BlockDiagonalPaddedKeysMask.from_seqlens(q, pad, k, device=CPU)
    ),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": padded(
        lambda kinds, draw, q, pad, k: kinds.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            q, pad, k, device=CPU
        )
    ),
    "BlockDiagonalLocalAttentionPaddedKeysMask": padded(
        lambda kinds, draw, q, pad, k: kinds.BlockDiagonalPaddedKeysMask.from_seqlens(
            q, pad, k, device=CPU
        ).make_local_attention(draw.randint(0, 4), draw.randint(0, 4))
    ),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": padded(
        lambda kinds, draw, q, pad, k: kinds.BlockDiagonalCausalLocalAttentionPaddedKeysMask(
            *_infos(kinds, q, pad, k), draw.randint(1, 6)
        )
    ),
    "PagedBlockDiagonalPaddedKeysMask": paged("PagedBlockDiagonalPaddedKeysMask"),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": paged("PagedBlockDiagonalCausalWithOffsetPaddedKeysMask"),
}


def _infos(kinds: Any, queries: list[int], padding: int, keys: list[int]) -> tuple[Any, Any]:
    whole = kinds.BlockDiagonalPaddedKeysMask.from_seqlens(queries, padding, keys, device=CPU)
    return whole.q_seqinfo, whole.k_seqinfo


def test_every_class_has_a_maker() -> None:
    assert MAKERS.keys() == attn_bias._BANDS.keys() - {"LowerTriangularMaskWithTensorBias"}


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Another one in each run, which a failure shows."""
    value = random.SystemRandom().randrange(2**32)
    request.node.user_properties.append(("seed", value))
    print("seed", value)
    return value


def attend(q: Any, k: Any, v: Any, mask: Any = 0.0, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The formulas, and the logsumexp. Tensors have any number of head dimensions after the rows."""
    q, k, v = (x.movedim(1, -2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale) + mask
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse.isneginf(), 0.0, lse)[..., None]).exp()
    return (weights @ v).movedim(-2, 1), lse


def inputs(batch: int, rows: int, keys: int, heads: tuple[int, ...], grad: bool) -> list[torch.Tensor]:
    sizes = ((rows, 8), (keys, 8), (keys, 5))
    return [torch.randn(batch, n, *heads, d, dtype=torch.float64, requires_grad=grad) for n, d in sizes]


def close(mine: Any, expected: Any) -> None:
    torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MAKERS)
def test_a_bias(name: str, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(3):
        bias, batch, rows, keys = MAKERS[name](attn_bias, draw)
        assert type(bias).__name__ == name
        heads = draw.choice([(3,), (2, 2)])
        q, k, v = inputs(batch, rows, keys, heads, grad=True)
        scale = draw.choice([None, 0.3])
        expected, lse = attend(q, k, v, bias.materialize((rows, keys), torch.float64), scale)
        out = fmha.memory_efficient_attention(q, k, v, bias, scale=scale)
        close(out, expected)
        close(fmha.memory_efficient_attention_forward(q, k, v, bias, scale=scale), expected.detach())
        saved = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, bias, scale=scale)
        close(saved, (expected.detach(), lse.detach()))
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(expected, (q, k, v), dout)
        close(torch.autograd.grad(out, (q, k, v), dout), grads)
        close(fmha.memory_efficient_attention_backward(dout, *saved, q, k, v, bias, scale=scale), grads)


@pytest.mark.parametrize("name", MAKERS)
def test_a_bias_of_the_package(name: str, theirs: Any, seed: int) -> None:
    for _ in range(5):
        (mine, batch, rows, keys), (other, *_) = (
            MAKERS[name](kinds, random.Random(seed)) for kinds in (attn_bias, theirs.attn_bias)
        )
        shape = (batch, rows, keys)
        assert torch.equal(mine.materialize(shape), other.materialize(shape))
        q, k, v = inputs(batch, rows, keys, (2,), grad=False)
        assert torch.equal(*(fmha.memory_efficient_attention(q, k, v, bias) for bias in (mine, other)))
        seed += 1


def test_no_bias_and_three_dimensions() -> None:
    for heads in ((), (3,), (2, 3)):
        q, k, v = inputs(2, 5, 7, heads, grad=True)
        out, saved = (
            fmha.memory_efficient_attention(q, k, v),
            fmha.memory_efficient_attention_forward_requires_grad(q, k, v),
        )
        expected, lse = attend(q, k, v)
        close(out, expected)
        close(saved[1].reshape(lse.shape), lse.detach())
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(expected, (q, k, v), dout)
        close(torch.autograd.grad(out, (q, k, v), dout), grads)
        close(fmha.memory_efficient_attention_backward(dout, *saved, q, k, v), grads)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [(), (3,), (2, 3)])
def test_a_tensor_and_its_gradient(heads: tuple[int, ...], is_causal: bool) -> None:
    q, k, v = inputs(2, 5, 5, heads, grad=True)
    bias = torch.randn(2, *heads, 5, 5, dtype=torch.float64, requires_grad=True)
    given: Any = attn_bias.LowerTriangularMask().add_bias(bias) if is_causal else bias
    mask = given.materialize(bias.shape, torch.float64) if is_causal else bias
    expected, out = attend(q, k, v, mask)[0], fmha.memory_efficient_attention(q, k, v, given)
    close(out, expected)
    dout = torch.randn_like(out)
    close(*(torch.autograd.grad(x, (q, k, v, bias), dout) for x in (out, expected)))


def test_a_tensor_bias_of_the_package(theirs: Any) -> None:
    q, k, v = inputs(1, 5, 5, (2,), grad=False)
    bias = torch.randn(1, 2, 5, 5, dtype=torch.float64)
    pair = [kinds.LowerTriangularMask().add_bias(bias) for kinds in (attn_bias, theirs.attn_bias)]
    assert torch.equal(*(fmha.memory_efficient_attention(q, k, v, x) for x in pair))
    assert torch.equal(*(x.materialize((1, 2, 5, 5), torch.float64) for x in pair))


def test_expanded_keys_are_read_once() -> None:
    """The heads of a group share a key head, as in the package's example. With a gradient each has its own."""
    q = torch.randn(2, 5, 2, 4, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 7, 2, 1, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    wide = [x.expand(2, 7, 2, 4, 8) for x in (k, v)]
    expected = attend(q, *wide)[0]
    with torch.no_grad():
        close(fmha.memory_efficient_attention(q, *wide), expected)
    assert fmha._prepare(q, *wide, None, 0.0, None, shares_heads=True).tensors[1].shape == (2, 7, 2, 8)
    flat = [x[:, :, :1, 0].expand(2, 7, 3, 8) for x in (k, v)]
    assert fmha._prepare(q[:, :, 0, :3], *flat, None, 0.0, None, shares_heads=True).tensors[1].shape == (2, 7, 1, 8)
    close(fmha.memory_efficient_attention_forward(q[:, :, 0, :3], *flat), attend(q[:, :, 0, :3], *flat)[0].detach())
    dout = torch.randn_like(expected)
    inner = [*wide, k, v]
    out = fmha.memory_efficient_attention(q, *wide)
    close(*(torch.autograd.grad(x, inner, dout) for x in (out, expected)))


def test_parts_and_their_merge() -> None:
    for heads in ((3,), (2, 2)):
        q, k, v = inputs(2, 5, 9, heads, grad=False)
        whole = fmha.memory_efficient_attention_forward_requires_grad(q, k, v)
        parts = [fmha.memory_efficient_attention_partial(q, k[:, span], v[:, span]) for span in (slice(4), slice(4, 9))]
        outs, lses = ([part[index] for part in parts] for index in (0, 1))
        close(fmha.merge_attentions(outs, lses), whole)
        close(fmha.merge_attentions(torch.stack(outs), torch.stack(lses), write_lse=False), (whole[0], None))
    unseen = torch.full_like(lses[0], -torch.inf)
    merged, lse = fmha.merge_attentions([outs[0] * 0] * 2, [unseen, unseen])
    assert not merged.any()
    assert lse is not None
    assert lse.isneginf().all()
    leaves = [x.requires_grad_() for x in (*outs, *lses)]
    assert torch.autograd.gradcheck(lambda a, b, c, d: fmha.merge_attentions([a, b], [c, d]), leaves)


def test_dtypes_of_results() -> None:
    q, k, v = (torch.randn(2, 33, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    expected = attend(*(x.double() for x in (q, k, v)))[0]
    out = fmha.memory_efficient_attention(q, k, v, output_dtype=torch.float32)
    assert out.dtype == torch.float32
    rounded = fmha.memory_efficient_attention(q, k, v)
    assert rounded.dtype == torch.bfloat16
    assert (out - expected).abs().max() < (rounded - expected).abs().max()
    assert fmha.memory_efficient_attention_partial(q, k, v)[0].dtype == torch.float32
    assert fmha.memory_efficient_attention_forward(q, k, v, output_dtype=torch.float16).dtype == torch.float16
    # The gradient of a float32 result
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(out)
    saved = fmha.memory_efficient_attention_forward_requires_grad(*leaves, output_dtype=torch.float32)
    grads = torch.autograd.grad(fmha.memory_efficient_attention(*leaves, output_dtype=torch.float32), leaves, dout)
    assert all(grad.dtype == torch.bfloat16 for grad in grads)
    torch.testing.assert_close(fmha.memory_efficient_attention_backward(dout, *saved, q, k, v), grads)


def test_dropout() -> None:
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    torch.manual_seed(3)
    out = fmha.memory_efficient_attention(q, k, v, p=0.4)
    torch.manual_seed(3)
    assert torch.equal(out, flashtile.attention(q, k, v, dropout_p=0.4, layout="bshd"))
    for function in (fmha.memory_efficient_attention_forward_requires_grad, fmha.memory_efficient_attention_partial):
        with pytest.raises(flashtile.Unsupported, match=r"p: got 0\.4 \(float\); accepted: 0\.0\. Call memory_eff"):
            function(q, k, v, p=0.4)


def test_lists_of_tensors_there_and_back() -> None:
    tensors = [torch.randn(n, rows, 2, 8) for n, rows in ((1, 3), (2, 5), (1, 1))]
    bias, packed = attn_bias.BlockDiagonalMask.from_tensor_list(tensors)
    assert packed.shape == (1, 14, 2, 8)
    for part, tensor in zip(bias.split(packed), tensors, strict=True):
        assert torch.equal(part, tensor)
    out = bias.make_causal().split(fmha.memory_efficient_attention(packed, packed, packed, bias.make_causal()))
    torch.testing.assert_close(out[1], flashtile.attention(*[tensors[1]] * 3, causal=True, layout="bshd"))
    assert bias.to("meta").split(packed)[0].shape == tensors[0].shape
    keys = [torch.randn(x.shape[0], x.shape[1] + 2, 2, 8) for x in tensors]
    bias, q, k, v = attn_bias.BlockDiagonalMask.from_tensor_lists_qkv(tensors, keys, keys)
    assert (q.shape[1], k.shape[1]) == (14, 22)
    assert v is not None
    assert [x.shape[:2] for x in bias.split_kv(k)] == [x.shape[:2] for x in keys]
    with pytest.raises(ValueError, match="accepted: queries and keys of the same lengths"):
        bias.split(q)
    table = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32)
    whole = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([2, 1], 8, [5, 7], device=CPU)
    kind = attn_bias.PagedBlockDiagonalPaddedKeysMask
    pages = whole.make_paged(table, PAGE, kind)
    same = kind.from_seqlens([2, 1], [5, 7], table, PAGE, device=CPU)
    assert torch.equal(*(x.materialize((3, 16)) for x in (pages, same)))


def test_lengths_in_place() -> None:
    bias = attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1, 1], 8, [5, 7], device=CPU)
    starts, used = bias.q_seqinfo.seqstart, bias.k_seqinfo.seqlen
    bias.k_seqinfo.from_seqlens_padded_inplace([6, 2])
    bias.q_seqinfo.from_seqlens_inplace([1, 1])
    assert (bias.k_seqinfo.seqlen is used, used.tolist(), starts.tolist()) == (True, [6, 2], [0, 1, 2])
    q, k, v = inputs(1, 2, 16, (2,), grad=False)
    mask = bias.materialize((2, 16), torch.float64)
    assert mask.isfinite().sum(-1).tolist() == [6, 2]
    close(fmha.memory_efficient_attention(q, k, v, bias), attend(q, k, v, mask)[0])
    with pytest.raises(ValueError, match=r"seqlens: got .*; accepted: 2 lengths up to 7, as before"):
        bias.k_seqinfo.from_seqlens_padded_inplace([8, 1])


def test_refusals() -> None:
    q, k, v = inputs(2, 4, 4, (2,), grad=False)

    class Own(attn_bias.LowerTriangularMask):
        pass

    for given, pattern in (
        ({"attn_bias": Own()}, "attn_bias: got Own; accepted: None, a tensor, LowerTriangularMask, "),
        ({"op": (int, None)}, "op: got .*; accepted: None. flashtile chooses its kernels by itself"),
    ):
        with pytest.raises(flashtile.Unsupported, match=pattern):
            fmha.memory_efficient_attention(q, k, v, **given)
    for name in ("BlockDiagonalGappyKeysMask", "PagedBlockDiagonalCausalWithOffsetGappyKeysMask"):
        kind = getattr(attn_bias, name)
        for make in (kind, kind.from_seqlens):
            with pytest.raises(flashtile.Unsupported, match=f"attn_bias: got {name}, whose keys start anywhere"):
                make([1], [0], [1])
    assert fmha.memory_efficient_attention(q, k, v, op=(None, None)).shape == q.shape[:-1] + v.shape[-1:]
    packed = attn_bias.BlockDiagonalMask.from_seqlens([4], device=CPU)
    with pytest.raises(ValueError, match="query: got batch 2; accepted: 1, with BlockDiagonalMask"):
        fmha.memory_efficient_attention(q, k, v, packed)
    with pytest.raises(ValueError, match=r"key: got .*; accepted: 5 dimensions of 1 groups of 2 heads, as query"):
        fmha.memory_efficient_attention(q[:, :, None], k[:, :, None, :1], v[:, :, None, :1])
    with pytest.raises(TypeError, match="value: got"):
        fmha.memory_efficient_attention(q, k, v.half())
    pages = attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens([4], [3], torch.zeros(1, 1).int(), 3, device=CPU)
    with pytest.raises(ValueError, match="key: got 4 rows; accepted: a multiple of page_size = 3, with PagedBlock"):
        fmha.memory_efficient_attention(q[:1], k[:1], v[:1], pages)


def test_a_gappy_bias_of_the_package_is_refused(theirs: Any) -> None:
    bias = theirs.attn_bias.BlockDiagonalGappyKeysMask.from_seqlens([4], [0, 4], [4], device=CPU)
    q, k, v = inputs(1, 4, 4, (2,), grad=False)
    with pytest.raises(flashtile.Unsupported, match="attn_bias: got BlockDiagonalGappyKeysMask; accepted"):
        fmha.memory_efficient_attention(q, k, v, bias)


def test_compiled() -> None:
    torch._dynamo.reset()
    bias = attn_bias.BlockDiagonalMask.from_seqlens([3, 6], device=CPU).make_causal()
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    for given in (None, attn_bias.LowerTriangularMask(), bias):
        compiled = torch.compile(fmha.memory_efficient_attention, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, k, v, given), fmha.memory_efficient_attention(q, k, v, given))


# The package's name


def test_install() -> None:
    assert "xformers" not in sys.modules
    ours.install()
    try:
        names: dict[str, Any] = {}
        exec(
            "import xformers, xformers.ops as xops\n"
            "from xformers.ops import fmha, LowerTriangularMask, memory_efficient_attention\n"
            "from xformers.ops.fmha.attn_bias import BlockDiagonalMask\n"
            "version = xformers.version.__version__",
            names,
        )
        assert names["xops"].memory_efficient_attention is fmha.memory_efficient_attention
        assert names["BlockDiagonalMask"] is names["fmha"].attn_bias.BlockDiagonalMask is attn_bias.BlockDiagonalMask
        assert names["version"] == names["xformers"].__version__ == "0.0.35"
        assert importlib.util.find_spec("xformers") is not None
        ours.install()  # a second time changes nothing
    finally:
        ours.uninstall()
    assert not [name for name in sys.modules if name.startswith("xformers")]


def test_an_installed_package_is_not_hidden(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xformers.py").write_text("ops = 'theirs'")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"xformers is installed; .*install\(replace=True\)"):
        ours.install()
    ours.install(replace=True)
    assert importlib.import_module("xformers").ops is ours.ops
    ours.uninstall()
    assert importlib.import_module("xformers").ops == "theirs"
    del sys.modules["xformers"]


def test_lengths_below_0_are_refused() -> None:
    with pytest.raises(ValueError, match="seqlens: got -1"):
        attn_bias.BlockDiagonalMask.from_seqlens([3, -1])
