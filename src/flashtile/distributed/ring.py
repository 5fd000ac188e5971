"""Ring attention: queries stay, keys and values travel.

In step t rank r sends the keys that rank r + t needs and gets those it needs from rank r - t, directly, so that what a
causal mask or a window hides is not sent. The messages of step t + 1 are under way while step t is computed. Each step
gives a partial output in float32 and its lse; they are joined as the parts of split keys are. In the backward pass the
keys travel again, and the gradients of each step go back to the owner of the keys, who adds them in float32 in the
order of the steps.

    transport "p2p"      as above
    transport "gather"   all messages at once, then one call for each range of queries: fewer calls, no overlap
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from flashtile import ops
from flashtile.distributed.pieces import Band, Piece, needed, pieces
from flashtile.distributed.sharding import Ranges, Shards, coalesced, local_rows, num_rows, take
from flashtile.distributed.transport import Channel, Mark, define_operator, library, schema
from flashtile.errors import unsupported, value_error
from flashtile.problem import AttentionArgs, head_axis, lse_dtype, row_axis, softmax_scale

TRANSPORTS = ("auto", "p2p", "gather")
GATHER_BYTES = 4 << 20  # of all keys and values: up to here a call for each step costs more than overlap saves
_GROUP = 8  # keys that share a Philox call


class RingArgs(NamedTuple):
    """The arguments of `flashtile::ring_forward`. Shapes are those of the rank's own rows; bias and mask have its own
    rows and all keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mask: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    rng_state: Tensor | None
    cu_seqlens: Tensor | None  # of the whole packed sequence
    scale: float | None
    causal: str
    window_left: int
    window_right: int
    softcap: float
    dropout_p: float
    first_head: int
    total_heads: int
    deterministic: bool | None
    layout: str
    backend: str | None
    group: str
    sharding: str
    seqlen_q: int  # of all ranks
    seqlen_k: int
    merged: int  # ranks of the sharding whose rows each rank of the ring holds
    transport: str
    timeout: float


# Room for keys. Those of step t + 1 go where those of step t - 2 were: with one slot less the message and the kernel of
# step t would become ready together, and the kernel would take the GPU first
_SLOTS = 3
_GRADIENTS = 1  # tag of messages that may be sent behind later ones with keys


class _Pass:
    """State and steps that the two passes of one rank share."""

    def __init__(self, args: RingArgs, what: str):
        self.args = args
        self.row, self.head = row_axis(args.layout), head_axis(args.layout)
        self.channel = Channel(args.group, args.q.device, args.timeout, what)
        self.rank, self.size = self.channel.rank, self.channel.size
        self.channel.check_same(self._shared_options())
        self.offset = 0 if args.causal == "top_left" else args.seqlen_k - args.seqlen_q
        self.band = Band.of(args.window_left, args.window_right if args.causal == "none" else 0, self.offset)
        self.bounds = None if args.cu_seqlens is None else bounds_of(args.cu_seqlens, args.seqlen_q)
        self.heads = args.q.shape[self.head]
        self.total_heads = args.total_heads or self.heads
        self.queries = [self._ranges(args.seqlen_q, rank) for rank in range(self.size)]
        self.keys = [self._ranges(args.seqlen_k, rank) for rank in range(self.size)]
        self._check_rows()
        self.has_dropout = args.dropout_p > 0.0
        has_scores = args.bias is not None or args.mask is not None
        self.has_positions = has_scores or args.alibi_slopes is not None or self.has_dropout
        self.is_wide = args.q.dtype == torch.float64
        self.sum_dtype = torch.float64 if self.is_wide else torch.float32
        self._packed: dict[Ranges, Tensor] = {}
        self.slots: list[Tensor] = []  # room for the keys of a step; the steps take turns
        self.free_behind: list[Mark] = []  # by slot; the first are also behind the messages with keys

    def _shared_options(self) -> dict[str, Any]:
        """Returns the options that must be the same on all ranks."""
        args, first = self.args, RingArgs._fields.index("scale")
        options = {name: value for name, value in args._asdict().items() if name in RingArgs._fields[first:-1]}
        sizes = {
            name: str(_with_rows(tensor, 0, self.row)) for name, tensor in (("q", args.q), ("k", args.k), ("v", args.v))
        }
        documents = None if args.cu_seqlens is None else args.cu_seqlens.tolist()
        return options | sizes | {"dtype": str(args.q.dtype), "cu_seqlens": documents}

    def _ranges(self, seqlen: int, rank: int) -> Ranges:
        merged = self.args.merged
        shards = Shards(seqlen, self.size * merged, self.args.sharding)
        return shards.union(range(rank * merged, (rank + 1) * merged))

    def _check_rows(self) -> None:
        for name, tensor, ranges in (("q", self.args.q, self.queries), ("k", self.args.k, self.keys)):
            own, total = num_rows(ranges[self.rank]), self.args.seqlen_q if name == "q" else self.args.seqlen_k
            if tensor.shape[self.row] != own:
                raise value_error(
                    name,
                    f"{tensor.shape[self.row]} rows on rank {self.rank}",
                    f"{own} of {total} over {self.size * self.args.merged} ranks ({self.args.sharding})",
                    "Give seqlen, the length of the whole sequence",
                )

    @property
    def is_gathered(self) -> bool:
        """True if keys are gathered. All ranks must agree: only what they share may decide."""
        args = self.args
        if args.transport != "auto":
            return args.transport == "gather"
        if self.size == 1:
            return False
        per_row = args.k.shape[self.head] * (args.k.shape[-1] + args.v.shape[-1]) * args.k.element_size()
        batch = args.k.shape[0] if args.k.dim() == 4 else 1
        return batch * args.seqlen_k * per_row <= GATHER_BYTES

    # Messages

    def wanted(self, receiver: int, sender: int) -> Ranges:
        """The keys of one rank that another needs."""
        return needed(self.queries[receiver], self.keys[sender], self.band, self.bounds)

    def outgoing(self, receiver: int) -> list[tuple[int, Tensor]]:
        wanted = self.wanted(receiver, self.rank)
        if not wanted:
            return []
        if wanted not in self._packed:
            rows = local_rows(self.keys[self.rank], wanted)
            parts = [take(tensor, rows, self.row).reshape(-1) for tensor in (self.args.k, self.args.v)]
            self._packed[wanted] = self.channel.staged(torch.cat(parts))
        return [(receiver, self._packed[wanted])]

    def pack(self) -> None:
        """Makes room, and the messages with keys, before anything is computed, so that they need not wait for
        kernels."""
        if self.is_gathered:
            return
        others = self.channel.peers()
        most = max((num_rows(self.wanted(self.rank, other)) for other in others), default=0)
        self.slots = [self.buffer(most) for _ in others[:_SLOTS]]
        if self.channel.stream is not None:
            for other in others:
                self.outgoing(other)
        self.free_behind = [self.channel.mark()] * len(self.slots)

    def buffer(self, num_keys: int) -> Tensor:
        """Room for that many keys and values."""
        return self.args.k.new_empty(self.message_size(num_keys))

    def message_size(self, num_keys: int) -> int:
        return sum(_numel(_with_rows(tensor, num_keys, self.row)) for tensor in (self.args.k, self.args.v))

    def unpacked(self, buffer: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
        shapes = [_with_rows(tensor, num_keys, self.row) for tensor in (self.args.k, self.args.v)]
        sizes = [_numel(shape) for shape in shapes]
        k, v = buffer.split(sizes)
        return k.view(shapes[0]), v.view(shapes[1])

    def request(self, step: int) -> _Block | None:
        """Starts the messages of a step; None behind the last."""
        if step >= self.size:
            return None
        source, receiver = (self.rank - step) % self.size, (self.rank + step) % self.size
        wanted = self.wanted(self.rank, source)
        num_keys = num_rows(wanted)
        behind: Mark = None
        if self.is_gathered:
            buffer = self.buffer(num_keys)
        else:
            slot = step % len(self.slots)
            buffer, behind = self.slots[slot][: self.message_size(num_keys)], self.free_behind[slot]
        pending = self.channel.post(self.outgoing(receiver), [(source, buffer)] if wanted else [], behind=behind)
        return _Block(self, source, wanted, buffer, pending)

    def release(self, step: int) -> None:
        """The room of a step may be filled again behind what has been launched so far."""
        self.free_behind[step % len(self.slots)] = self.channel.mark()

    def gathered(self) -> tuple[list[_Block], Ranges, Tensor, Tensor]:
        """The blocks of all ranks by rank, and their keys together in the order of the sequence."""
        blocks = [block for step in range(1, self.size) if (block := self.request(step)) is not None]
        own = _Block(self, self.rank, self.wanted(self.rank, self.rank), None, None)
        blocks = sorted([own, *blocks], key=lambda block: block.source)
        parts = sorted(
            ((rows.start, rows, place) for block in blocks for rows, place in block.places()), key=lambda part: part[0]
        )
        keys = [place[0] for _, _, place in parts]
        values = [place[1] for _, _, place in parts]
        ranges = tuple(rows for _, rows, _ in parts)
        if self.bounds is None and self.args.alibi_slopes is None:
            ranges = coalesced(ranges)
        if not keys:
            return blocks, (), self.args.k.narrow(self.row, 0, 0), self.args.v.narrow(self.row, 0, 0)
        return blocks, ranges, torch.cat(keys, self.row), torch.cat(values, self.row)

    # One piece

    def pieces(self, keys: Ranges) -> tuple[Piece, ...]:
        return pieces(self.queries[self.rank], keys, self.band, self.bounds, self.has_positions, self.has_dropout)

    def call(self, piece: Piece, k: Tensor, v: Tensor, needs_grad: bool) -> _Call:
        """The piece as a call of the ops."""
        args = self.args
        q = args.q.narrow(self.row, piece.q.start, len(piece.q))
        k, v = (tensor.narrow(self.row, piece.k.start, len(piece.k)) for tensor in (k, v))
        bias, mask = (self._scores(tensor, piece) for tensor in (args.bias, args.mask))
        options: dict[str, Any] = {}
        pad = 0
        if self.has_dropout:
            first_key = piece.first_key - piece.document_start
            # The bits of eight neighbouring keys come together: start at a multiple of 8, hidden keys in front
            pad = first_key % _GROUP
            if pad:
                k, v = (_padded(tensor, pad, self.row) for tensor in (k, v))
                mask = _hiding(mask, pad, len(piece.k), args.q.device)
                bias = None if bias is None else _padded(bias, pad, 3) if bias.shape[3] != 1 else bias
            options = {
                "rng_state": args.rng_state,
                "dropout_p": args.dropout_p,
                "first_query": piece.first_query - piece.document_start,
                "first_key": first_key - pad,
                "first_head": args.first_head + piece.document * self.total_heads,
                "total_heads": self.total_heads,
            }
        shift = None
        slopes = args.alibi_slopes
        if slopes is not None:
            delta = piece.first_query + self.offset - piece.first_key
            if piece.lengths or delta == len(piece.k) - len(piece.q):
                options["alibi_slopes"] = slopes
            else:
                column, shift = _alibi(slopes.to(self.sum_dtype), delta, len(piece.q), len(piece.k))
                column = _padded(column, pad, 3) if pad else column
                bias = column if bias is None else bias.to(self.sum_dtype) + column
        if piece.lengths:
            cu_seqlens = _cumulative(piece.lengths, args.q.device)
            longest = max(piece.lengths)
            options |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
            options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        elif q.dim() == 3:
            q, k, v = q[None], k[None], v[None]
        left, right = piece.window
        call = AttentionArgs(
            *(q, k, v),
            bias=bias,
            mask=mask,
            scale=softmax_scale_of(args),
            causal="bottom_right" if right == 0 else "none",
            window_left=left,
            window_right=right,
            softcap=args.softcap,
            deterministic=args.deterministic,
            out_dtype=self.sum_dtype if not needs_grad and not self.is_wide else None,
            layout=args.layout,
            backend=args.backend,
            needs_grad=needs_grad,
            **options,
        )
        return _Call(call, pad, shift, is_unpacked=q.dim() == 4 and args.q.dim() == 3)

    def _scores(self, tensor: Tensor | None, piece: Piece) -> Tensor | None:
        if tensor is None:
            return None
        if tensor.shape[2] != 1:
            tensor = tensor.narrow(2, piece.q.start, len(piece.q))
        if tensor.shape[3] != 1:
            tensor = tensor.narrow(3, piece.first_key, len(piece.k))
        return tensor

    def rows_of(self, tensor: Tensor, piece: Piece, axis: int) -> Tensor:
        return tensor.narrow(axis, piece.q.start, len(piece.q))


class _Call(NamedTuple):
    args: AttentionArgs
    pad: int  # hidden keys in front
    shift: Tensor | None  # of the lse: what ALiBi takes off a whole row; (batch or 1, heads, rows)
    is_unpacked: bool  # one sequence of a packed call: the op has a batch of 1


class _Block:
    """The keys and values that a rank got from another, or its own."""

    def __init__(self, own: _Pass, source: int, keys: Ranges, buffer: Tensor | None, pending: Any):
        self.own, self.source, self.keys, self.buffer, self.pending = own, source, keys, buffer, pending

    def wait(self) -> tuple[Tensor, Tensor]:
        if self.buffer is None:
            rows = local_rows(self.own.keys[self.own.rank], self.keys)
            return take(self.own.args.k, rows, self.own.row), take(self.own.args.v, rows, self.own.row)
        self.pending.wait()
        return self.own.unpacked(self.buffer, num_rows(self.keys))

    def places(self) -> list[tuple[range, tuple[Tensor, Tensor]]]:
        k, v = self.wait()
        found, first = [], 0
        for rows in self.keys:
            part = [tensor.narrow(self.own.row, first, len(rows)) for tensor in (k, v)]
            found.append((rows, (part[0], part[1])))
            first += len(rows)
        return found


# Forward


class _Forward(_Pass):
    def __init__(self, args: RingArgs):
        super().__init__(args, "ring_attention")
        self.plain = AttentionArgs(args.q, args.k, args.v, layout=args.layout)
        self.sums: tuple[Tensor, Tensor] | None = None  # out and lse so far; None before the first piece

    def empty(self) -> tuple[Tensor, Tensor]:
        """out and lse of rows that see no keys."""
        sizes, lse_sizes = ops.output_sizes(self.plain)
        out = self.args.q.new_zeros(sizes, dtype=self.sum_dtype)
        return out, self.args.q.new_full(lse_sizes, -torch.inf, dtype=lse_dtype(self.plain))

    def run(self) -> tuple[Tensor, Tensor]:
        self.pack()
        if self.is_gathered:
            _, ranges, k, v = self.gathered()
            self.attend(ranges, k, v)
        else:
            block = self.request(1)
            self.attend(self.keys[self.rank], self.args.k, self.args.v)
            step = 1
            while block is not None:
                following = self.request(step + 1)
                self.attend(block.keys, *block.wait())
                self.release(step)
                block, step = following, step + 1
        out, lse = self.sums or self.empty()
        if self.args.sinks is not None:
            out, lse = self.with_sinks(out, lse, self.args.sinks)
        return out.to(self.args.q.dtype).contiguous(), lse

    def attend(self, keys: Ranges, k: Tensor, v: Tensor) -> None:
        for piece in self.pieces(keys):
            call = self.call(piece, k, v, needs_grad=False)
            out, lse = ops.forward(*call.args)
            if call.is_unpacked:
                out, lse = out[0], lse[0]
            if call.shift is not None:
                lse = lse + (call.shift[0] if call.is_unpacked else call.shift)
            self.join(piece, out, lse)

    def join(self, piece: Piece, out: Tensor, lse: Tensor) -> None:
        """Adds a partial result to the rows of the piece."""
        if self.sums is None and len(piece.q) == self.args.q.shape[self.row]:
            self.sums = out, lse
            return
        self.sums = self.sums or self.empty()
        own_out, own_lse = self.rows_of(self.sums[0], piece, self.row), self.rows_of(self.sums[1], piece, -1)
        # The share of the new part, exp(lse) / (exp(own) + exp(lse)); 0 where it has no keys
        weight = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - own_lse)).to(own_out.dtype)
        own_out.lerp_(out.to(own_out.dtype), self.by_rows(weight))
        own_lse.copy_(torch.logaddexp(own_lse, lse))

    def by_rows(self, stats: Tensor) -> Tensor:
        """(..., heads, rows) as it broadcasts to the output."""
        return (stats.transpose(-1, -2) if self.args.layout == "bshd" else stats)[..., None]

    def with_sinks(self, out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        """A sink is a key without a value: it joins the denominator only."""
        whole = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        factor = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - whole))
        return out * self.by_rows(factor.to(out.dtype)), whole


# Backward


class _Backward(_Pass):
    def __init__(
        self, args: RingArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
    ):
        super().__init__(args, "ring_attention (backward)")
        self.dout, self.dlse, self.out, self.lse, self.needs = dout, dlse, out, lse, needs
        self.needs_keys = needs[1] or needs[2]
        wide = functools.partial(torch.zeros_like, dtype=self.sum_dtype, memory_format=torch.contiguous_format)
        self.dq = wide(args.q) if needs[0] else None
        self.dk, self.dv = wide(args.k), wide(args.v)
        self.dbias = wide(args.bias) if needs[3] and args.bias is not None else None

    def run(self) -> tuple[Tensor, ...]:
        self.pack()
        if self.is_gathered:
            self._run_gathered()
        else:
            self._run_steps()
        args = self.args
        dsinks = self._sink_grads() if self.needs[4] and args.sinks is not None else None
        pairs = ((self.dq, args.q), (self.dk, args.k), (self.dv, args.v), (self.dbias, args.bias), (dsinks, args.sinks))
        return tuple(
            grad.to(like.dtype) if is_needed and grad is not None and like is not None else args.q.new_empty(0)
            for (grad, like), is_needed in zip(pairs, self.needs, strict=True)
        )

    def _run_gathered(self) -> None:
        blocks, ranges, k, v = self.gathered()
        dk, dv = self._attend(ranges, k, v)
        if not self.needs_keys:
            return
        sends, first = [], 0
        parts: dict[int, list[tuple[Tensor, Tensor]]] = {block.source: [] for block in blocks}
        held = sorted((rows.start, len(rows), block.source) for block in blocks for rows in block.keys)
        for _, length, source in held:
            parts[source].append((dk.narrow(self.row, first, length), dv.narrow(self.row, first, length)))
            first += length
        returns = []
        for block in blocks:
            own = parts[block.source]
            if not own:
                continue
            grads = [torch.cat([part[index] for part in own], self.row) for index in (0, 1)]
            if block.source == self.rank:
                self._add(block.keys, *grads)
            else:
                sends.append((block.source, self._message(*grads)))
        for step in range(1, self.size):
            receiver = (self.rank + step) % self.size
            wanted = self.wanted(receiver, self.rank)
            if wanted:
                returns.append((receiver, self.buffer(num_rows(wanted)), wanted))
        self.channel.post(sends, [(peer, buffer) for peer, buffer, _ in returns]).wait()
        for _, buffer, wanted in returns:
            self._add(wanted, *self.unpacked(buffer, num_rows(wanted)))

    def _run_steps(self) -> None:
        block = self.request(1)
        self._add(self.keys[self.rank], *self._attend(self.keys[self.rank], self.args.k, self.args.v))
        returning: Callable[[], None] | None = None
        step = 1
        while block is not None:
            following = self.request(step + 1)
            grads = self._attend(block.keys, *block.wait())
            self.release(step)
            sends = [(block.source, self._message(*grads))] if block.keys and self.needs_keys else []
            if returning is not None:
                returning()
            returning = self._returns(step, sends) if self.needs_keys else None
            block, step = following, step + 1
        if returning is not None:
            returning()

    def _returns(self, step: int, sends: list[tuple[int, Tensor]]) -> Callable[[], None]:
        """Sends the gradients of a step back, and receives those of this rank's keys."""
        receiver = (self.rank + step) % self.size
        wanted = self.wanted(receiver, self.rank)
        buffer = self.buffer(num_rows(wanted))
        pending = self.channel.post(sends, [(receiver, buffer)] if wanted else [], _GRADIENTS)

        def finish() -> None:
            pending.wait()
            if wanted:
                self._add(wanted, *self.unpacked(buffer, num_rows(wanted)))

        return finish

    def _message(self, dk: Tensor, dv: Tensor) -> Tensor:
        dtype = self.args.q.dtype
        return torch.cat([dk.to(dtype).reshape(-1), dv.to(dtype).reshape(-1)])

    def _add(self, keys: Ranges, dk: Tensor, dv: Tensor) -> None:
        """Adds gradients of these keys, which are this rank's."""
        first = 0
        for rows in local_rows(self.keys[self.rank], keys):
            for own, grad in ((self.dk, dk), (self.dv, dv)):
                own.narrow(self.row, rows.start, len(rows)).add_(grad.narrow(self.row, first, len(rows)))
            first += len(rows)

    def _attend(self, keys: Ranges, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """dk and dv of these keys; adds to dq and dbias."""
        dk, dv = (torch.zeros(tensor.shape, dtype=self.sum_dtype, device=k.device) for tensor in (k, v))
        for piece in self.pieces(keys):
            call = self.call(piece, k, v, needs_grad=True)
            out, dout = (self.rows_of(tensor, piece, self.row) for tensor in (self.out, self.dout))
            lse = self.rows_of(self.lse, piece, -1)
            dlse = None if self.dlse is None else self.rows_of(self.dlse, piece, -1)
            if call.is_unpacked:
                out, dout, lse = out[None], dout[None], lse[None]
                dlse = None if dlse is None else dlse[None]
            if call.shift is not None:
                lse = lse - call.shift
            needs = (self.needs[0], self.needs_keys, self.needs_keys, self.dbias is not None, False)
            args = call.args._replace(needs_bias_grad=needs[3])
            given = (dout, dlse, *args, out, lse.contiguous(), needs)
            dq_part, *key_parts, dbias_part, _ = ops.backward(*given)
            if self.dq is not None:
                self.rows_of(self.dq, piece, self.row).add_(dq_part[0] if call.is_unpacked else dq_part)
            if self.needs_keys:
                for whole, part in zip((dk, dv), key_parts, strict=True):
                    part = part[0] if call.is_unpacked else part
                    part = part.narrow(self.row, call.pad, len(piece.k))
                    whole.narrow(self.row, piece.k.start, len(piece.k)).add_(part)
            if self.dbias is not None:
                target = self._scores(self.dbias, piece)
                assert target is not None
                if call.pad and target.shape[3] != 1:
                    dbias_part = dbias_part.narrow(3, call.pad, len(piece.k))
                target.add_(dbias_part.to(target.dtype).sum_to_size(target.shape))
        return dk, dv

    def _sink_grads(self) -> Tensor:
        sinks = self.args.sinks
        assert sinks is not None
        wide = self.sum_dtype
        delta = (self.dout.to(wide) * self.out.to(wide)).sum(-1)
        if self.args.layout == "bshd":
            delta = delta.transpose(-1, -2)
        if self.dlse is not None:
            delta = delta - self.dlse.to(wide)
        is_alive = self.lse != -torch.inf
        share = torch.where(is_alive, torch.exp((sinks.to(wide)[:, None] - self.lse).clamp(max=0.0)), 0.0)
        total = share * torch.where(is_alive, delta, 0.0)
        return -total.sum(tuple(axis for axis in range(total.dim()) if axis != total.dim() - 2))


# Small things


def softmax_scale_of(args: RingArgs) -> float:
    return softmax_scale(AttentionArgs(args.q, args.k, args.v, scale=args.scale))


def _with_rows(tensor: Tensor, rows: int, axis: int) -> list[int]:
    shape = list(tensor.shape)
    shape[axis] = rows
    return shape


def _numel(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def bounds_of(cu_seqlens: Tensor, total: int) -> tuple[int, ...]:
    """Returns the bounds of the documents of a sequence, read by the host."""
    bounds = tuple(cu_seqlens.tolist())
    if not bounds or bounds[0] != 0 or bounds[-1] != total or list(bounds) != sorted(bounds):
        raise value_error("cu_seqlens", f"{bounds}", f"rising values from 0 to {total}, the length of the sequence")
    return bounds


@functools.lru_cache(maxsize=256)
def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return torch.tensor(bounds, dtype=torch.int32, device=device)


def _padded(tensor: Tensor, pad: int, axis: int) -> Tensor:
    return torch.cat([tensor.new_zeros(_with_rows(tensor, pad, axis)), tensor], axis)


def _hiding(mask: Tensor | None, pad: int, num_keys: int, device: torch.device) -> Tensor:
    """A mask that hides the first keys."""
    seen = torch.arange(pad + num_keys, device=device) >= pad
    if mask is None:
        return seen[None, None, None]
    if mask.shape[3] == 1:
        return mask & seen
    return torch.cat([mask.new_zeros(*mask.shape[:3], pad), mask], 3)


def _alibi(slopes: Tensor, delta: int, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """ALiBi over keys on one side of all queries is a term for each key and one for each row: a bias, and what is added
    to the lse. Both count from the nearest key, so that near keys lose no digits. Query i is at key i + delta."""
    slopes = (slopes if slopes.dim() == 2 else slopes[None])[..., None]
    rows, columns = (torch.arange(count, device=slopes.device) for count in (num_queries, num_keys))
    if delta >= num_keys - 1:
        bias, distance = slopes * (columns - (num_keys - 1)), rows + (delta - (num_keys - 1))
    elif delta + num_queries - 1 <= 0:
        bias, distance = -slopes * columns, -(rows + delta)
    else:
        raise unsupported("alibi_slopes", "queries among keys of another range", "as many queries as keys")
    return bias[:, :, None], -slopes * distance


# The operators


def _forward_kernel(*values: Any) -> tuple[Tensor, Tensor]:
    return _Forward(RingArgs(*values)).run()


def _forward_fake(*values: Any) -> tuple[Tensor, Tensor]:
    args = RingArgs(*values)
    plain = AttentionArgs(args.q, args.k, args.v, layout=args.layout)
    sizes, lse_sizes = ops.output_sizes(plain)
    return args.q.new_empty(sizes), args.q.new_empty(lse_sizes, dtype=lse_dtype(plain))


def _backward_kernel(dout: Tensor, dlse: Tensor | None, *values: Any) -> tuple[Tensor, ...]:
    *middle, out, lse, needs = values
    return _Backward(RingArgs(*middle), dout, dlse, out, lse, tuple(needs)).run()


def _backward_fake(dout: Tensor, dlse: Tensor | None, *values: Any) -> tuple[Tensor, ...]:
    *middle, _, _, needs = values
    args = RingArgs(*middle)
    inputs = (args.q, args.k, args.v, args.bias, args.sinks)
    return tuple(
        args.q.new_empty(tensor.shape, dtype=tensor.dtype) if need and tensor is not None else args.q.new_empty(0)
        for tensor, need in zip(inputs, needs, strict=True)
    )


_GRADS = "Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks"
_SCHEMA = schema(RingArgs)
forward_op = define_operator("ring_forward", f"({_SCHEMA}) -> (Tensor out, Tensor lse)", _forward_kernel, _forward_fake)
backward_op = define_operator(
    "ring_backward",
    f"(Tensor dout, Tensor? dlse, {_SCHEMA}, Tensor out, Tensor lse, bool[] needs) -> ({_GRADS})",
    _backward_kernel,
    _backward_fake,
)

_DIFFERENTIABLE = [RingArgs._fields.index(name) for name in ("q", "k", "v", "bias", "sinks")]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    count = RingArgs._fields.index("scale")
    ctx.save_for_backward(*inputs[:count], *output)
    ctx.options = inputs[count:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    needs = [ctx.needs_input_grad[index] for index in _DIFFERENTIABLE]
    dout = torch.zeros_like(out) if dout is None else dout
    grads = backward_op(dout, dlse, *tensors, *ctx.options, out, lse, needs)
    results: list[Tensor | None] = [None] * len(RingArgs._fields)
    for index, grad, is_needed in zip(_DIFFERENTIABLE, grads, needs, strict=True):
        results[index] = grad if is_needed else None
    return tuple(results)


def _no_second_derivative(ctx: Any, *grads: Tensor | None) -> NoReturn:
    raise unsupported("q", "a second derivative of ring attention", "first derivatives", "Use ulysses_attention")


torch.library.register_autograd(forward_op, _gradients, setup_context=_setup, lib=library)
torch.library.register_autograd(backward_op, _no_second_derivative, lib=library)
