"""Messages between the ranks of a group: posted together, waited for one by one, with errors that name the peer.

On a GPU messages have streams of their own, which wait for what a message needs and for nothing else: a kernel of
attention fills the GPU, so that a message which becomes ready together with it would come behind it. Backends with
device tensors (NCCL) make the current stream wait, not the host. Gloo takes CPU tensors alone, so tensors on a GPU pass
through pinned memory, and the host waits, while kernels that were launched before keep running.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from flashtile.arguments import number
from flashtile.errors import type_error, value_error
from flashtile.problem import is_checking

Message = tuple[int, Tensor]  # rank in the group; contiguous
Mark = Any  # an event of a stream; None on a CPU


# Of a name, which operators take in place of a group
_resolve_process_group: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]


class PeerError(RuntimeError):
    """A peer did not deliver: it died, hangs, or called with other arguments."""


class Channel:
    """The messages of one pass over one group."""

    def __init__(self, group_name: str, device: torch.device, timeout: float, what: str):
        self.group: Any = _resolve_process_group(group_name)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.timeout, self.what, self.device = timeout or _own_timeout(self.group), what, device
        self.is_staged = device.type == "cuda" and not _takes_cuda(self.group)
        self.stream = _stream(device, "outgoing") if device.type == "cuda" else None
        self.landing = _stream(device, "incoming") if self.is_staged else None
        self.waits_on_host = self.stream is None or self.is_staged
        if device.type == "cuda" and not self.is_staged:
            _warm_up(self.group, device)

    def peers(self) -> list[int]:
        """The other ranks, the next one first."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def check_same(self, options: dict[str, Any]) -> None:
        """Under FLASHTILE_CHECK=1: raises on all ranks if one of them has another value."""
        if not is_checking() or self.size == 1:
            return
        # The function comes first: those of another have other options
        found = self._gathered({"function": self.what} | options)
        for rank, theirs in enumerate(found):
            for name, value in found[0].items():
                if theirs[name] != value:
                    raise value_error(name, f"{theirs[name]} on rank {rank}", f"{value}, as on rank 0")

    def _gathered(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        own = torch.frombuffer(bytearray(json.dumps(value), "utf-8"), dtype=torch.uint8).to(self.device)
        lengths = self._swapped(own.new_tensor([own.numel()], dtype=torch.int64), dict.fromkeys(self.peers(), 1))
        texts = self._swapped(own, {peer: int(length) for peer, length in lengths.items()}) | {self.rank: own}
        return [json.loads(bytes(texts[rank].tolist())) for rank in range(self.size)]

    def _swapped(self, own: Tensor, sizes: dict[int, int]) -> dict[int, Tensor]:
        """Sends the same tensor to all peers and returns what each of them sent."""
        received = {peer: own.new_empty(size) for peer, size in sizes.items()}
        self.post([(peer, own) for peer in received], list(received.items()), _CHECKS).wait()
        return received

    def mark(self) -> Mark:
        """Marks the place behind what has been launched on the current stream so far."""
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0, behind: Mark = None) -> Pending:
        """Starts sending and receiving, behind a mark, or behind what has been launched on the current stream so far.
        Messages of one tag between two ranks arrive in the order in which they were posted."""
        count = sum(tensor.numel() * tensor.element_size() for _, tensor in sends)
        bytes_sent[self.group.group_name] = bytes_sent.get(self.group.group_name, 0) + count
        ready_at = _slow.arrival(sends, receives) if _slow is not None else 0.0
        pending = self._post(sends, receives, tag, self.mark() if behind is None else behind)
        pending.ready_at = ready_at
        return pending

    def _post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, behind: Mark) -> Pending:
        if self.stream is None:
            return Pending(self, self._start(sends, receives, tag))
        if self.is_staged:
            return self._post_staged(sends, receives, tag, behind)
        self.stream.wait_event(behind)
        with torch.cuda.stream(self.stream):
            for _, tensor in (*sends, *receives):
                tensor.record_stream(self.stream)
            return Pending(self, self._start(sends, receives, tag))

    def staged(self, tensor: Tensor) -> Tensor:
        """Returns what is handed to the backend: a copy in pinned memory where it takes no tensors of this device."""
        if not self.is_staged:
            return tensor
        copy, copied = self._to_host(tensor)
        copied.synchronize()
        return copy

    def _to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """A copy in pinned memory, and the event behind it."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            tensor.record_stream(self.stream)
            return copy, self.stream.record_event()

    def _post_staged(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, behind: Mark) -> Pending:
        """Tensors in host memory are sent now; those on the device when `wait` is called, since the host would have to
        wait for the kernels before them."""
        ready = [message for message in sends if message[1].device.type == "cpu"]
        copies = [(peer, *self._to_host(tensor)) for peer, tensor in sends if tensor.device.type != "cpu"]
        arriving = [(peer, torch.empty_like(tensor, device="cpu", pin_memory=True)) for peer, tensor in receives]
        landing = self.landing
        assert landing is not None

        def send() -> list[Started]:
            for _, _, copied in copies:
                copied.synchronize()
            return self._start([(peer, copy) for peer, copy, _ in copies], [], tag)

        def land() -> None:
            # Not when it is posted: messages that land before would wait, too
            landing.wait_event(behind)
            with torch.cuda.stream(landing):
                for (_, pinned), (_, tensor) in zip(arriving, receives, strict=True):
                    tensor.copy_(pinned, non_blocking=True)
                    tensor.record_stream(landing)
            torch.cuda.current_stream(self.device).wait_stream(landing)

        return Pending(self, self._start(ready, arriving, tag), send, land)

    def _start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> list[Started]:
        posted: list[tuple[str, Any, int, Tensor]] = [("send to", dist.isend, *message) for message in sends]
        posted += [("receive from", dist.irecv, *message) for message in receives]
        if not posted:
            return []
        operations = [dist.P2POp(op, tensor, None, self.group, tag, peer) for _, op, peer, tensor in posted]
        doing = [f"{verb} rank {peer}" for verb, _, peer, _ in posted]
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self.error(" and ".join(doing), error) from error
        if len(works) != len(doing):  # NCCL: one for all
            doing = [" and ".join(doing)] * len(works)
        tensors = [tensor for _, tensor in (*sends, *receives)]
        return [Started(one, work, tensors) for one, work in zip(doing, works, strict=True)]

    def error(self, doing: str, cause: Exception) -> PeerError:
        reason = str(cause).strip().partition("\n")[0]
        return PeerError(
            f"{self.what}: rank {self.rank} of {self.size} could not {doing} within {self.timeout:g} s. That rank has "
            f"died, hangs, or called with other arguments. {reason}"
        )


class Started(NamedTuple):
    """A message that the backend has."""

    doing: str
    work: Any
    tensors: list[Tensor]  # kept until it has arrived


class Pending:
    """Messages under way. send: starts those that could not be sent yet; land: what is done once they are there."""

    def __init__(
        self,
        channel: Channel,
        started: list[Started],
        send: Callable[[], list[Started]] | None = None,
        land: Callable[[], None] | None = None,
    ):
        self.channel, self.started, self.send, self.land = channel, started, send, land
        self.ready_at = 0.0

    def wait(self) -> None:
        """Lets what is launched on the current stream from now on wait until everything is there."""
        if self.send is not None:
            self.started += self.send()
        limit = datetime.timedelta(seconds=self.channel.timeout)
        for doing, work, _ in self.started:
            try:
                # NCCL: makes the current stream wait; with a limit it might make the host wait
                work.wait(limit) if self.channel.waits_on_host else work.wait()
            except RuntimeError as error:
                raise self.channel.error(doing, error) from error
        if self.ready_at:
            time.sleep(max(0.0, self.ready_at - time.monotonic()))
        if self.land is not None:
            self.land()
        self.started, self.send, self.land = [], None, None


class _SlowLink:
    """A link that carries one message at a time in each direction, at this speed."""

    def __init__(self, bytes_per_s: float, latency_s: float):
        self.bytes_per_s, self.latency_s, self.free_at = bytes_per_s, latency_s, 0.0

    def arrival(self, sends: Sequence[Message], receives: Sequence[Message]) -> float:
        """Returns when messages that are posted now have arrived."""
        sizes = [sum(tensor.numel() * tensor.element_size() for _, tensor in some) for some in (sends, receives)]
        if not any(sizes):
            return 0.0
        self.free_at = max(time.monotonic(), self.free_at) + self.latency_s + max(sizes) / self.bytes_per_s
        return self.free_at


_slow: _SlowLink | None = None


@contextlib.contextmanager
def slow_link(bytes_per_s: float, latency_s: float) -> Iterator[None]:
    """Messages arrive no sooner than over such a link: for comparing runs with predictions."""
    global _slow
    before, _slow = _slow, _SlowLink(bytes_per_s, latency_s)
    try:
        yield
    finally:
        _slow = before


bytes_sent: dict[str, int] = {}  # by group name, since the start of the process: for tests and reports


def _takes_cuda(group: Any) -> bool:
    try:
        return "nccl" in type(group._get_backend(torch.device("cuda"))).__name__.lower()
    except RuntimeError:
        return False


@functools.cache
def _stream(device: torch.device, direction: str) -> Any:
    return torch.cuda.Stream(device)


# Not by name: a group that is made after destroy_process_group may have the name of one before
_warm_devices: weakref.WeakKeyDictionary[Any, set[torch.device]] = weakref.WeakKeyDictionary()


def _warm_up(group: Any, device: torch.device) -> None:
    """NCCL's first call of a group must be made by all of its ranks; messages may concern a few."""
    devices = _warm_devices.setdefault(group, set())
    if device not in devices:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        devices.add(device)


_LENGTHS, _CHECKS = 2, 3  # tags of messages; keys have 0, gradients 1


def require_same_lengths(
    group: Any, lengths: tuple[int, int], device: torch.device, timeout: float | None, what: str
) -> None:
    """Raises on all ranks if they have other numbers of queries or keys and none said seqlen. Their messages would have
    other sizes than their receivers expect: gloo ends the process then. With NCCL the host would have to wait for the
    GPU, so nothing is compared there; FLASHTILE_CHECK=1 does (`Channel.check_same`)."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size == 1 or (device.type == "cuda" and _takes_cuda(group)):
        return
    own = torch.tensor(lengths)
    found = {peer: torch.empty_like(own) for peer in range(size) if peer != rank}
    channel = Channel(group.group_name, own.device, timeout_of(timeout), what)
    channel.post([(peer, own) for peer in found], list(found.items()), _LENGTHS).wait()
    first, *others = (rows.tolist() for _, rows in sorted((found | {rank: own}).items()))
    for other, theirs in enumerate(others, 1):
        if theirs != first:
            (queries, keys), (queries_0, keys_0) = ([length // size for length in one] for one in (theirs, first))
            raise value_error(
                "seqlen",
                f"None, {queries} queries and {keys} keys on rank {other}, {queries_0} and {keys_0} on rank 0",
                "the length of the whole sequence, where ranks have different numbers of rows",
            )


def group_of(mesh: Any, group: Any, dim: int = 0) -> Any:
    """The process group of a mesh dimension, of a group, or of all ranks."""
    if mesh is not None and group is not None:
        raise value_error("group", "it with mesh", "one of the two")
    if not dist.is_initialized():
        raise value_error("mesh" if group is None else "group", "no process group", "after init_process_group")
    if mesh is not None:
        return mesh.get_group(dim)
    if group is None:
        return dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise value_error("group", f"one without this rank ({dist.get_rank()})", "a group that this rank is in")
    if not isinstance(group, dist.ProcessGroup):
        raise type_error("group", group, "a torch.distributed.ProcessGroup", "Pass a DeviceMesh as mesh")
    return group


def timeout_of(timeout: float | None) -> float:
    """Returns the time limit as the operators take it: seconds, 0 = the group's own."""
    if timeout is None:
        return 0.0
    if not number("timeout", timeout) > 0.0:
        raise value_error("timeout", timeout, "seconds > 0, or None for the group's")
    return float(timeout)


def _own_timeout(group: Any) -> float:
    for device in ("cpu", "cuda"):
        try:
            limit: datetime.timedelta = group._get_backend(torch.device(device)).options._timeout
        except RuntimeError:
            continue
        return limit.total_seconds()
    return 1800.0


def group_size_and_rank(group_name: str) -> tuple[int, int]:
    group = _resolve_process_group(group_name)
    return dist.get_world_size(group), dist.get_rank(group)


# Operators

library = torch.library.Library("flashtile", "FRAGMENT")
_TYPES: dict[object, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    float: "float",
    float | None: "float?",
    bool | None: "bool?",
    str: "str",
    str | None: "str?",
}


def schema(arguments: type) -> str:
    """Returns the arguments of an operator that are the fields of a class."""
    return ", ".join(f"{_TYPES[hint]} {name}" for name, hint in get_type_hints(arguments).items())


def define_operator(name: str, schema: str, kernel: Any, fake: Any) -> Any:
    """Defines an operator that sends messages; torch.compile does not look into its kernel."""
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        library.impl(name, torch._disable_dynamo(kernel), device)  # type: ignore[attr-defined]
    torch.library.register_fake(f"flashtile::{name}", fake, lib=library)
    return getattr(torch.ops.flashtile, name).default
