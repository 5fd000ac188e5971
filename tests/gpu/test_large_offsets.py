"""Tensors of more than 2^32 elements, and masks of more bits: every family, on both sides of the offsets that 32 bits
hold. Rows repeat with a period, so that float64 gives every number of a result at the cost of one period.

A test needs up to 110 GiB and is skipped where the GPU has less free. One test runs at a time, also beside the tests of
other workers. `pytest -s` shows what each covers.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import families
from flashtile.backends import native
from flashtile.families.assemble import clear_plans

DEVICE = "cuda"
ELEMENTS = 1 << 32  # of the large tensors, at least; float32 ones have half of them
PERIOD_Q, PERIOD_K = 997, 509
GIB = 1 << 30
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Memory for one test at a time."""
    with (Path(tempfile.gettempdir()) / "flashtile-large-offsets.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def need(gib: float) -> None:
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] / GIB
        if free < gib + 2:
            pytest.skip(f"needs {gib:.0f} GiB; {free:.0f} are free")


T = TypeVar("T")


def only(backend: str, names: tuple[str, ...], function: Callable[[], T]) -> T:
    """What the function gives where calls take these families. Another architecture's GPU skips the test."""
    if backend != "cuda":
        return function()
    try:
        with families.forced(*names):
            clear_plans()
            with native.record_launches() as units:  # nothing runs
                function()
            check_names([entry for _, entry in units], names)
            clear_plans()
            return function()
    except flashtile.Unsupported as error:
        if torch.cuda.get_device_capability() == (9, 0):
            raise
        pytest.skip(str(error))
    finally:
        clear_plans()


def check_names(entries: list[str], names: tuple[str, ...]) -> None:
    """Each family has launched one of its kernels."""
    for name in filter(None, names):
        kernels = next(family.kernels for family in families.all_families() if family.name == name)
        assert any(kernel in entry for kernel in kernels for entry in entries), (name, entries)


# Tensors whose rows repeat


class Rows(NamedTuple):
    """Row i of head h of sequence b is base[((b * heads + h) * length + i) % period]."""

    base: Tensor  # (period, dim), float64
    tensor: Tensor  # (batch, heads, length, dim)

    def number(self, b: int, h: int, i: int) -> int:
        _, heads, length, _ = self.tensor.shape
        return (b * heads + h) * length + i

    def row(self, b: int, h: int, i: int) -> int:
        """Of the base."""
        return self.number(b, h, i) % len(self.base)

    def counts(self, b: int, h: int, num_heads: int = 1) -> Tensor:
        """How often each row of the base comes in num_heads heads from h on."""
        first, last = self.number(b, h, 0), self.number(b, h + num_heads, 0)
        period = len(self.base)
        rest = (torch.arange(period, device=self.base.device) - first) % period < (last - first) % period
        return ((last - first) // period + rest).double()


def repeated(period: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, factor: float = 1.0) -> Rows:
    batch, heads, length, dim = sizes
    base = (torch.randn(period, dim, device=DEVICE) * factor).to(dtype)
    rows, count = torch.empty(batch * heads * length, dim, dtype=dtype, device=DEVICE), batch * heads * length
    whole = count // period * period
    rows[:whole].view(-1, period, dim).copy_(base.expand(whole // period, period, dim))
    rows[whole:].copy_(base[: count - whole])
    return Rows(base.double(), rows.view(sizes))


def edges(last: int, *near: int) -> list[int]:
    """Numbers up to `last`: the ends, those around `near`, and some between."""
    found = {0, last, *torch.randint(last + 1, (20,)).tolist()}
    found |= {number for middle in near for number in (middle - 1, middle, middle + 1) if 0 <= number <= last}
    return sorted(found)


def assert_near(what: str, ours: Tensor, ref: Tensor, dtype: torch.dtype) -> None:
    largest = ref.abs().max().item()
    limit = (0.03 if dtype != F32 else 3e-4) * largest
    error = (ours.double() - ref).abs().max().item()
    assert error <= limit, f"{what}: off by {error:.3e}, largest {largest:.3e}"


class Expected:
    """Attention of each row of a base of queries over keys that come `counts` times, in float64."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, counts: Tensor, bias: Tensor | None = None):
        self.scale = q.shape[-1] ** -0.5
        s = q @ k.T * self.scale + (0.0 if bias is None else bias)
        self.lse = torch.logsumexp(s + counts.log(), -1)
        self.p = torch.exp(s - self.lse[:, None])
        self.out = (self.p * counts) @ v
        self.ds = self.p * (dout @ v.T - (dout * self.out).sum(-1, keepdim=True))
        self.dq = self.scale * (self.ds * counts) @ k
        self.q, self.dout = q, dout

    def key_grads(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """dK and dV, where each query of the base comes `counts` times."""
        return self.scale * (self.ds * counts[:, None]).T @ self.q, (self.p * counts[:, None]).T @ self.dout


def covers(what: str, *tensors: Tensor) -> None:
    print(f"\n  {what}: tensors of", ", ".join(f"{tensor.numel():,}" for tensor in tensors), "elements")


# Large results: many queries


class Pair(NamedTuple):
    forward: str
    backward: str
    dtype: torch.dtype = BF16
    dim: int = 64


PAIRS = [
    Pair("fwd_sm90", "bwd_sm90"),
    Pair("fwd_sm90_short", "bwd_sm90_wide"),
    Pair("fwd_sm80", "bwd_sm80"),
    Pair("fwd_sm90_wide", "bwd_sm80_wide", dim=512),
    Pair("fwd_sm80_wide", "bwd_sm80_wide", dim=256),
    Pair("fwd_simt", "bwd_simt"),
    Pair("fwd_sm90_f32", "bwd_sm90_f32", F32),
    Pair("fwd_sm80_f32", "bwd_sm80_f32", F32),
    Pair("triton", ""),
]


def call(pair: Pair, inputs: list[Tensor], dout: Tensor, **options: object) -> list[Tensor]:
    """out, lse and the gradients of the inputs."""
    backend = "triton" if pair.forward == "triton" else DEVICE

    def run() -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        if len(leaves) > 3:
            options["bias"] = leaves[3]
        # Tests poison memory by torch's switch for deterministic algorithms, under which bwd_sm80 refuses
        out, lse = flashtile.attention(
            *leaves[:3],
            return_lse=True,
            backend=backend,
            deterministic=False,
            **options,  # type: ignore[arg-type]
        )
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]

    return only(backend, (pair.forward, pair.backward), run)


def call_forward(family: str, *inputs: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """out and lse. fwd_sm90_f32_direct refuses under torch's switch, as above."""
    options |= {"return_lse": True, "backend": DEVICE, "deterministic": False}
    return only(DEVICE, (family,), lambda: flashtile.attention(*inputs, **options))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.forward} {pair.backward} {pair.dim}".strip())
def test_many_queries(pair: Pair, seed: int) -> None:
    """Q, dO, O, dQ and the workspaces of the rows are large; heads share keys."""
    elements = ELEMENTS // (2 if pair.dtype == F32 else 1)
    gib = elements * pair.dtype.itemsize / GIB
    need((4.2 if pair.forward in ("fwd_simt", "triton") else 10.5) * gib if pair.dtype == F32 else 8.5 * gib)
    batch, heads, group, num_keys = 2, 256, 4, 61
    length = elements // (batch * heads * pair.dim) + 13
    q = repeated(PERIOD_Q, (batch, heads, length, pair.dim), pair.dtype)
    dout = repeated(PERIOD_Q, (batch, heads, length, pair.dim), pair.dtype)
    k, v = (torch.randn(batch, heads // group, num_keys, pair.dim, device=DEVICE).to(pair.dtype) for _ in range(2))
    out, lse, dq, dk, dv = call(pair, [q.tensor, k, v], dout.tensor)
    covers(f"{pair.forward}, {pair.backward}", q.tensor, out, lse, dq)
    flat = [tensor.view(batch * heads * length, -1) for tensor in (out, lse, dq)]
    by_keys: dict[tuple[int, int], Expected] = {}

    def expected(b: int, kv_head: int) -> Expected:
        if (b, kv_head) not in by_keys:
            ones = torch.ones(num_keys, dtype=torch.float64, device=DEVICE)
            keys = k[b, kv_head].double(), v[b, kv_head].double()
            by_keys[b, kv_head] = Expected(q.base, *keys, dout.base, ones)
        return by_keys[b, kv_head]

    wraps = [offset // pair.dim for offset in (ELEMENTS // 2, ELEMENTS)]
    for row in edges(batch * heads * length - 1, *wraps):
        b, h = row // (heads * length), row // length % heads
        ref, at = expected(b, h // group), row % PERIOD_Q
        for what, ours, wanted in zip(("out", "lse", "dq"), flat, (ref.out, ref.lse, ref.dq), strict=True):
            assert_near(f"{what}, row {row}", ours[row], wanted[at], pair.dtype)
    for b, kv_head in ((0, 0), (0, heads // group - 1), (1, 5), (1, heads // group - 1)):
        key_grads = expected(b, kv_head).key_grads(q.counts(b, kv_head * group, group))
        for what, ours, wanted in zip(("dk", "dv"), (dk, dv), key_grads, strict=True):
            assert_near(f"{what}, head {b}, {kv_head}", ours[b, kv_head], wanted, pair.dtype)


# Large inputs: many keys

ALL_PAIRS = [*PAIRS, Pair("decode_sm90", ""), Pair("fwd_sm90_f32_direct", "", F32)]
# That for short sequences takes up to 1024 keys
KEY_PAIRS = [pair._replace(forward="fwd_sm90") if pair.forward == "fwd_sm90_short" else pair for pair in ALL_PAIRS]


@pytest.mark.parametrize("pair", KEY_PAIRS, ids=lambda pair: f"{pair.forward} {pair.backward} {pair.dim}".strip())
def test_many_keys(pair: Pair, seed: int) -> None:
    """K, V, dK and dV and the workspaces of the keys are large."""
    elements = ELEMENTS // (2 if pair.dtype == F32 else 1)
    need((9 if pair.dtype == F32 else 4.5) * elements * pair.dtype.itemsize / GIB)
    batch, heads, group, num_queries = 2, 4, 2, 1 if pair.forward == "decode_sm90" else 67
    length = elements // (batch * heads * pair.dim) + 13
    k, v = (repeated(PERIOD_K, (batch, heads, length, pair.dim), pair.dtype, factor) for factor in (1.0, 4.0))
    q, dout = (torch.randn(batch, heads * group, num_queries, pair.dim, device=DEVICE).to(pair.dtype) for _ in range(2))
    if pair.backward or pair.forward == "triton":
        out, lse, dq, dk, dv = call(pair, [q, k.tensor, v.tensor], dout)
    else:
        out, lse = call_forward(pair.forward, q, k.tensor, v.tensor)
        dq = dk = dv = None
    covers(f"{pair.forward}, {pair.backward}", k.tensor, v.tensor)
    for b in range(batch):
        for kv_head in range(heads):
            own = slice(kv_head * group, (kv_head + 1) * group)
            rows = [tensor[b, own].flatten(0, 1).double() for tensor in (q, dout)]
            ref = Expected(rows[0], k.base, v.base, rows[1], k.counts(b, kv_head))
            where = f"head {b}, {kv_head}"
            assert_near(f"out, {where}", out[b, own].flatten(0, 1), ref.out, pair.dtype)
            assert_near(f"lse, {where}", lse[b, own].flatten(), ref.lse, pair.dtype)
            if dq is None or dk is None or dv is None:
                continue
            assert_near(f"dq, {where}", dq[b, own].flatten(0, 1), ref.dq, pair.dtype)
            key_grads = ref.key_grads(torch.ones(len(rows[0]), dtype=torch.float64, device=DEVICE))
            for what, ours, wanted in zip(("dk", "dv"), (dk, dv), key_grads, strict=True):
                picked = edges(length - 1)
                wanted = wanted[[k.row(b, kv_head, j) for j in picked]]
                assert_near(f"{what}, {where}", ours[b, kv_head, picked], wanted, pair.dtype)


# Strides


@pytest.mark.parametrize("pair", ALL_PAIRS, ids=lambda pair: f"{pair.forward} {pair.backward} {pair.dim}".strip())
@pytest.mark.parametrize("axis", ["batch", "head", "row"])
def test_wide_strides(pair: Pair, axis: str, seed: int) -> None:
    """The inputs are few rows in one large buffer: the offset of the last batch, head or row is over 2^32."""
    batch, heads, length = 5, 5, 4 if pair.forward == "decode_sm90" else 131
    count = {"batch": batch, "head": heads, "row": length}[axis]
    far = (ELEMENTS // (count - 1) // 64 + 1) * 64  # elements from one to the next
    slots = batch * heads * length * pair.dim
    need(((count - 1) * far + 4 * slots) * pair.dtype.itemsize / GIB + 1)
    buffer = torch.empty((count - 1) * far + 4 * slots, dtype=pair.dtype, device=DEVICE)
    # The other two axes are dense
    strides = {
        "batch": (far, length * pair.dim, pair.dim),
        "head": (length * pair.dim, far, pair.dim),
        "row": (heads * pair.dim, pair.dim, far),
    }[axis]
    views = [
        torch.as_strided(buffer, (batch, heads, length, pair.dim), (*strides, 1), slot * slots) for slot in range(4)
    ]
    dense = [torch.randn(view.shape, device=DEVICE).to(pair.dtype) for view in views]
    for view, values in zip(views, dense, strict=True):
        view.copy_(values)
    wide = [tensor.double().requires_grad_() for tensor in dense[:3]]
    ref = flashtile.attention(*wide, causal=True, backend="reference")
    wanted = [ref.detach()]
    if pair.backward or pair.forward == "triton":
        out, _, *grads = call(pair, views[:3], views[3], causal=True)
        wanted += torch.autograd.grad(ref, wide, dense[3].double())
    else:
        (out, _), grads = call_forward(pair.forward, *views[:3], causal=True), []
    covers(f"{pair.forward}, {pair.backward}, {axis}", buffer)
    for what, ours, other in zip(("out", "dq", "dk", "dv"), (out, *grads), wanted, strict=False):
        assert_near(what, ours, other, pair.dtype)


# Masks and biases

MASKED = [
    Pair("fwd_sm90", "bwd_sm90"),
    Pair("fwd_sm90", "bwd_sm90_wide", dim=256),
    Pair("fwd_sm80", "bwd_sm80"),
    Pair("fwd_sm90_f32", "bwd_sm90_f32", F32),
]


@pytest.mark.parametrize("pair", MASKED, ids=lambda pair: f"{pair.forward} {pair.backward} {pair.dim}")
def test_a_mask_of_many_bits(pair: Pair, seed: int) -> None:
    """A mask of one column, whose bits on Hopper are a word for each 32 keys: 2^32 words are 1.4e11 scores."""
    length_q = max(1 << 10, ELEMENTS // (1 << 13))
    length_k = max(640, ELEMENTS // length_q * 40)
    need(24 * ELEMENTS / (1 << 32) + 8)
    q, dout = (repeated(PERIOD_Q, (1, 1, length_q, pair.dim), pair.dtype) for _ in range(2))
    k, v = (repeated(PERIOD_K, (1, 1, length_k, pair.dim), pair.dtype) for _ in range(2))
    rows = torch.arange(length_q, device=DEVICE)
    is_seen = (rows // 64 % 16 == 15) & (rows % 3 != 0)
    out, lse, dq, dk, dv = call(pair, [q.tensor, k.tensor, v.tensor], dout.tensor, mask=is_seen.view(1, 1, -1, 1))
    covers(f"{pair.forward}, {pair.backward}: {length_q} x {length_k} scores, mask of {length_q}", k.tensor)
    ref = Expected(q.base, k.base, v.base, dout.base, k.counts(0, 0))
    seen = rows[is_seen]
    for what, ours, wanted in (("out", out, ref.out), ("lse", lse[..., None], ref.lse[:, None]), ("dq", dq, ref.dq)):
        assert_near(what, ours[0, 0, seen], wanted[seen % PERIOD_Q], pair.dtype)
        hidden = ours[0, 0, rows[~is_seen]]
        assert (hidden == (-torch.inf if what == "lse" else 0.0)).all(), what
    key_grads = ref.key_grads(torch.bincount(seen % PERIOD_Q, minlength=PERIOD_Q).double())
    picked = edges(length_k - 1)
    for what, ours, wanted in zip(("dk", "dv"), (dk, dv), key_grads, strict=True):
        assert_near(what, ours[0, 0, picked], wanted[[j % PERIOD_K for j in picked]], pair.dtype)


def test_a_mask_of_many_bits_for_packed_heads(seed: int) -> None:
    """Heads that share keys lie in one tile, whose rows have bits far from each other."""
    heads, num_queries, length = 64, 64, ELEMENTS // 4096 * 36 + 77
    need(4096 * (length // 128) * 16 / GIB + 2 * length * 64 * 2 / GIB + 2)
    q = torch.randn(1, heads, num_queries, 64, device=DEVICE).to(BF16)
    k, v = (repeated(PERIOD_K, (1, 1, length, 64), BF16, factor) for factor in (1.0, 4.0))
    is_seen = torch.rand(1, heads, num_queries, 1, device=DEVICE) < 0.5
    out, lse = call_forward("fwd_sm90", q, k.tensor, v.tensor, mask=is_seen)
    covers(f"fwd_sm90: {heads} heads of {num_queries} x {length} scores", k.tensor, v.tensor)
    rows = q.flatten(0, 2).double()
    ref = Expected(rows, k.base, v.base, torch.zeros_like(rows), k.counts(0, 0))
    seen = is_seen.flatten()
    assert_near("out", out.flatten(0, 2)[seen], ref.out[seen], BF16)
    assert_near("lse", lse.flatten()[seen], ref.lse[seen], BF16)
    assert (out.flatten(0, 2)[~seen] == 0).all()
    assert (lse.flatten()[~seen] == -torch.inf).all()


BIASED = [
    Pair("fwd_sm90", "bwd_sm90"),
    Pair("fwd_sm90", "bwd_sm90_wide", dim=256),
    Pair("fwd_sm80", "bwd_sm80_wide"),
    Pair("fwd_sm90_f32", "bwd_simt", F32),
    Pair("triton", ""),
]


@pytest.mark.parametrize("pair", BIASED, ids=lambda pair: f"{pair.forward} {pair.backward} {pair.dim}".strip())
def test_a_large_bias(pair: Pair, seed: int) -> None:
    """A bias of all queries and keys, and its gradient, where the family has it."""
    elements = ELEMENTS // (2 if pair.dtype == F32 else 1)
    need(2.5 * elements * pair.dtype.itemsize / GIB + 4)
    length_q = int(elements**0.5) // 64 * 64
    length_k = (elements // length_q // 64 + 3) * 64
    q, dout = (repeated(PERIOD_Q, (1, 1, length_q, pair.dim), pair.dtype) for _ in range(2))
    k, v = (repeated(PERIOD_K, (1, 1, length_k, pair.dim), pair.dtype) for _ in range(2))
    base = torch.randn(PERIOD_Q, PERIOD_K, device=DEVICE).to(pair.dtype)
    period = base.repeat(1, -(-length_k // PERIOD_K))[:, :length_k]
    bias = torch.empty(1, 1, length_q, length_k, dtype=pair.dtype, device=DEVICE)
    for first in range(0, length_q, PERIOD_Q):
        part = bias[0, 0, first : first + PERIOD_Q]
        part.copy_(period[: len(part)])
    has_dbias = pair.backward != "bwd_sm90_wide"
    inputs = [q.tensor, k.tensor, v.tensor, *([bias] if has_dbias else [])]
    out, lse, dq, dk, dv, *dbias = call(pair, inputs, dout.tensor, bias=bias)
    covers(f"{pair.forward}, {pair.backward}", bias, *dbias)
    ref = Expected(q.base, k.base, v.base, dout.base, k.counts(0, 0), base.double())
    rows, columns = edges(length_q - 1), edges(length_k - 1)
    at_q, at_k = [i % PERIOD_Q for i in rows], [j % PERIOD_K for j in columns]
    for what, ours, wanted in (("out", out, ref.out), ("lse", lse[..., None], ref.lse[:, None]), ("dq", dq, ref.dq)):
        assert_near(what, ours[0, 0, rows], wanted[at_q], pair.dtype)
    for what, ours, wanted in zip(("dk", "dv"), (dk, dv), ref.key_grads(q.counts(0, 0)), strict=True):
        assert_near(what, ours[0, 0, columns], wanted[at_k], pair.dtype)
    for found in dbias:
        assert_near("dbias", found[0, 0, rows][:, columns], ref.ds[at_q][:, at_k], pair.dtype)


# Pages, and rows of lse


@pytest.mark.parametrize("family", ["decode_sm90", "fwd_sm90", "fwd_sm80", "fwd_simt"])
def test_the_last_pages_of_a_large_pool(family: str, seed: int) -> None:
    """New rows are appended to pages whose offsets are over 2^32, and read from there."""
    page, heads_kv, group, dim, batch, per_sequence = 64, 2, 4, 64, 3, 4
    num_pages = ELEMENTS // (page * heads_kv * dim) + batch * per_sequence
    need(2 * num_pages * page * heads_kv * dim * 2 / GIB + 1)
    num_queries = 1 if family == "decode_sm90" else 70
    k_cache, v_cache = (torch.empty(num_pages, page, heads_kv, dim, dtype=BF16, device=DEVICE) for _ in range(2))
    last = torch.arange(num_pages - batch * per_sequence, num_pages, device=DEVICE)
    table = last[torch.randperm(len(last), device=DEVICE)].view(batch, per_sequence)
    for cache in (k_cache, v_cache):
        cache[last] = torch.randn(len(last), page, heads_kv, dim, device=DEVICE).to(BF16)
    lengths = torch.tensor([100, 170, 186], dtype=torch.int32, device=DEVICE)
    q = torch.randn(batch, num_queries, heads_kv * group, dim, device=DEVICE).to(BF16)
    new_k, new_v = (torch.randn(batch, num_queries, heads_kv, dim, device=DEVICE).to(BF16) for _ in range(2))
    keys = [cache[table].flatten(1, 2) for cache in (k_cache, v_cache)]
    for b, length in enumerate(lengths.tolist()):
        for rows, new in zip(keys, (new_k, new_v), strict=True):
            rows[b, length : length + num_queries] = new[b]
    tables = {"cache_seqlens": lengths, "block_table": table.to(torch.int32)}
    out = only(
        DEVICE,
        (family,),
        lambda: flashtile.attention_kvcache(q, k_cache, v_cache, k=new_k, v=new_v, causal=True, **tables),
    )
    covers(family, k_cache, v_cache)
    for b, length in enumerate(lengths.tolist()):
        own = [rows[b : b + 1, : length + num_queries].double() for rows in keys]
        ref = flashtile.attention(q[b : b + 1].double(), *own, causal=True, layout="bshd", backend="reference")
        assert_near(f"out, sequence {b}", out[b : b + 1], ref, BF16)
        for cache, rows in zip((k_cache, v_cache), keys, strict=True):
            assert torch.equal(cache[table[b]].flatten(0, 1)[: length + num_queries], rows[b, : length + num_queries])


@pytest.mark.parametrize("family", ["fwd_sm90", "fwd_sm90_short", "fwd_sm80"])
def test_many_rows_of_lse(family: str, seed: int) -> None:
    """Over 2^31 rows of lse, and 2^34 elements of out. Heads share queries and keys in memory."""
    heads, length, num_keys, dim = 4096, ELEMENTS // 8192 + 9, 16, 8
    need(heads * length * (2 * dim + 4) / GIB + 1)
    q = torch.randn(1, 1, length, dim, device=DEVICE).to(BF16)
    k, v = (torch.randn(1, 1, num_keys, dim, device=DEVICE).to(BF16) for _ in range(2))
    shared = [tensor.expand(1, heads, *tensor.shape[2:]) for tensor in (q, k, v)]
    out, lse = call_forward(family, *shared)
    covers(family, out, lse)
    wide = [tensor.double() for tensor in (q, k, v)]
    for head in (0, 1, heads // 2 - 1, heads // 2, heads - 2, heads - 1):
        picked = edges(length - 1)
        ref, ref_lse = flashtile.attention(wide[0][:, :, picked], *wide[1:], return_lse=True, backend="reference")
        assert_near(f"out, head {head}", out[0, head, picked], ref[0, 0], BF16)
        assert_near(f"lse, head {head}", lse[0, head, picked], ref_lse[0, 0], BF16)
