"""Serves a small random Llama with continuous batching over a paged cache, and checks every token.

    python examples/serve.py                     # on a GPU: 8 layers, width 2048, 32 slots, bfloat16, CUDA graphs
    python examples/serve.py --no-graph          # the same, each step launched by the host
    python examples/serve.py --device cpu        # 2 layers, width 64, 4 slots, float32

Requests have prompts and answers of random lengths. A request that is done leaves its slot and its pages to the next
one, while the others go on. A step is one token for every slot; each layer is one call of `attention_kvcache`, which
rotates, appends to the pages and attends. The step is captured once as a CUDA graph: lengths, block table and tokens
are read on the device, so that one capture serves all steps.

Then every token is checked against a dense cache with one row of keys for each slot, found by batch index. The same
slots take the same requests. The dense run is given the tokens that were served, so one wrong token does not change
those after it. Each served token must have the largest logit of the dense run. A kernel may sum the keys of pages in
another order than those of a row, so the last bits differ, and of two nearly equal logits the other may win. Such a
token counts if it falls short by no more than SHORTFALL, which is less than one wrong key changes. Exits 1 otherwise.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashtile

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of a logit whose standard deviation is about 0.6. With 8 layers in bfloat16, attention by another backend makes tokens
# fall short by 0.02, noise of one bit in every output of attention by 0.06, and one lost row of one layer by 0.5
SHORTFALL = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.15}


@dataclass
class Request:
    """A prompt and how many tokens are wanted behind it."""

    prompt: list[int]
    num_new: int
    tokens: list[int] = field(default_factory=list)
    shortfalls: list[float] = field(default_factory=list)  # of a checked one: the largest logit less that of the token

    @property
    def num_rows(self) -> int:
        """Keys in the cache when it is done: the last token is never put in."""
        return len(self.prompt) + self.num_new - 1


# The cache


class Pages:
    """Pages of the cache: which are free, and which each slot has. Slots and their requests are the same for both
    caches."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.page_size, self.per_slot = options.page_size, -(-options.capacity // options.page_size)
        # Fewer than all slots could use: a request waits until there are enough. The first ones belong to the slots
        self.num_pages = options.slots + max(self.per_slot, int(self.per_slot * options.slots * options.memory))
        self.free = list(range(options.slots, self.num_pages))
        self.held: list[list[int]] = [[] for _ in range(options.slots)]

    def take(self, slot: int, num_rows: int) -> bool:
        """Pages for that many rows; False if there are too few."""
        count = -(-num_rows // self.page_size)
        if count > len(self.free):
            return False
        self.held[slot] = [self.free.pop() for _ in range(count)]
        return True

    def leave(self, slot: int) -> None:
        self.free += self.held[slot]
        self.held[slot] = []


class PagedCache(Pages):
    """Keys and values of every layer in pages, which belong to whoever has them in the table.

    A slot without a request has one page of its own, which its steps write to and nobody reads.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        sizes = (2, options.layers, self.num_pages, self.page_size, options.heads_kv, options.width // options.heads)
        self.pages = torch.zeros(sizes, dtype=options.dtype, device=options.device)
        own = torch.arange(options.slots, dtype=torch.int32, device=options.device)
        self.table = own[:, None].repeat(1, self.per_slot)

    def take(self, slot: int, num_rows: int) -> bool:
        if not super().take(slot, num_rows):
            return False
        self.table[slot, : len(self.held[slot])] = torch.tensor(self.held[slot], dtype=torch.int32)
        return True

    def leave(self, slot: int) -> None:
        super().leave(slot)
        self.table[slot] = slot

    def attend(self, layer: int, slots: slice, **step: Any) -> Any:
        return flashtile.attention_kvcache(
            k_cache=self.pages[0, layer], v_cache=self.pages[1, layer], block_table=self.table[slots], **step
        )


class DenseCache(Pages):
    """One row of the cache for each slot, found by batch index: the same kernels, without pages to gather."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        sizes = (options.slots, self.per_slot * self.page_size, options.heads_kv, options.width // options.heads)
        self.rows = torch.zeros((2, options.layers, *sizes), dtype=options.dtype, device=options.device)
        self.index = torch.arange(options.slots, dtype=torch.int32, device=options.device)

    def attend(self, layer: int, slots: slice, **step: Any) -> Any:
        return flashtile.attention_kvcache(
            k_cache=self.rows[0, layer], v_cache=self.rows[1, layer], cache_batch_idx=self.index[slots], **step
        )


# The model

Attend = Callable[..., Tensor]


class Block(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width, head_dim = options.width, options.width // options.heads
        self.shape = (options.heads, options.heads_kv, head_dim)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (options.heads + 2 * options.heads_kv) * head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        heads, heads_kv, head_dim = self.shape
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (heads + 2 * heads_kv, head_dim))
        q, k, v = qkv.split((heads, heads_kv, heads_kv), dim=-2)
        x = x + self.out(attend(q=q, k=k, v=v).flatten(-2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(options.vocabulary, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm, self.head = nn.RMSNorm(options.width), nn.Linear(options.width, options.vocabulary, bias=False)
        for block in self.blocks:
            # Sharp attention that outweighs the rest: or else a wrong cache would change few tokens
            nn.init.normal_(block.qkv.weight, std=2 * options.width**-0.5)
            nn.init.normal_(block.out.weight, std=2 * options.width**-0.5)
        nn.init.normal_(self.tokens.weight, std=0.5)
        half = options.width // options.heads // 2
        angles = torch.outer(torch.arange(options.capacity), 10000 ** -(torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, cache: PagedCache | DenseCache, slots: slice, lengths: Tensor) -> Tensor:
        """The logits of the next token: (batch, vocabulary), from tokens (batch, rows) that stand behind `lengths`."""
        x = self.tokens(tokens)
        step = {"cache_seqlens": lengths, "causal": True, "rotary_cos": self.cos, "rotary_sin": self.sin}
        for layer, block in enumerate(self.blocks):
            x = block(x, partial(cache.attend, layer, slots, rotary_interleaved=False, **step))
        return self.head(self.norm(x[:, -1]))


# Serving


class Server:
    """The slots, and a step of all of them."""

    def __init__(self, model: Llama, cache: PagedCache | DenseCache, options: argparse.Namespace) -> None:
        self.model, self.cache, self.device = model, cache, options.device
        self.slots: list[Request | None] = [None] * options.slots
        self.tokens = torch.zeros(options.slots, dtype=torch.int64, device=options.device)
        self.lengths, self.is_busy = (torch.zeros_like(self.tokens, dtype=torch.int32) for _ in range(2))
        self.step: Callable[[], None] = self._captured() if options.use_graph else self._step
        self.num_steps = 0

    def logits(self) -> Tensor:
        """Returns the logits of every slot, whose token is in the cache then."""
        found = self.model(self.tokens[:, None], self.cache, slice(0, len(self.slots)), self.lengths)
        self.lengths += self.is_busy
        return found

    def _step(self) -> None:
        self.tokens.copy_(self.logits().argmax(-1))

    def _captured(self) -> Callable[[], None]:
        """The step as a CUDA graph. Until a slot has a request, its steps write to a page of its own."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay

    def prefill(self, slot: int, request: Request) -> Tensor:
        """Puts the prompt into the cache; the logits of the first token."""
        self.slots[slot] = request
        prompt = torch.tensor([request.prompt], device=self.device)
        start = torch.zeros(1, dtype=torch.int32, device=self.device)
        logits = self.model(prompt, self.cache, slice(slot, slot + 1), start)
        self.lengths[slot], self.is_busy[slot] = len(request.prompt), 1
        return logits

    def admit(self, slot: int, request: Request) -> bool:
        """Finds the first token; False if the cache has no room."""
        if not self.cache.take(slot, request.num_rows):
            return False
        self.tokens[slot : slot + 1] = self.prefill(slot, request).argmax(-1)
        request.tokens.append(int(self.tokens[slot]))
        return True

    def advance(self) -> None:
        """A step, and a token for every request that is not done."""
        self.step()
        for request, token in zip(self.slots, self.tokens.tolist(), strict=True):
            if request is not None:
                request.tokens.append(token)

    def is_done(self, request: Request) -> bool:
        return len(request.tokens) == request.num_new

    def serve(self, requests: Sequence[Request]) -> None:
        waiting = deque(requests)
        while True:
            for slot in range(len(self.slots)):
                while True:
                    request = self.slots[slot]
                    if request is not None and self.is_done(request):
                        self.release(slot)
                    elif request is None and waiting and self.admit(slot, waiting[0]):
                        waiting.popleft()
                    else:
                        break
            if all(request is None for request in self.slots):
                return
            self.advance()
            self.num_steps += 1

    def release(self, slot: int) -> None:
        self.slots[slot] = None
        self.cache.leave(slot)
        self.lengths[slot] = self.is_busy[slot] = self.tokens[slot] = 0


class Checker(Server):
    """Serves requests that have their tokens, and notes by how much the logit of each falls short of the largest."""

    def note(self, logits: Tensor, slots: Sequence[int]) -> None:
        served = []
        for slot in slots:
            request = self.slots[slot]
            served.append(0 if request is None else request.tokens[len(request.shortfalls)])
        tokens = torch.tensor(served, device=self.device)
        self.tokens[torch.tensor(slots, device=self.device)] = tokens
        logits = logits.float()
        shortfalls = (logits.max(-1).values - logits.gather(-1, tokens[:, None])[:, 0]).tolist()
        for slot, shortfall in zip(slots, shortfalls, strict=True):
            request = self.slots[slot]
            if request is not None:
                request.shortfalls.append(shortfall)

    def admit(self, slot: int, request: Request) -> bool:
        if not self.cache.take(slot, request.num_rows):
            return False
        self.note(self.prefill(slot, request), [slot])
        return True

    def advance(self) -> None:
        self.note(self.logits(), range(len(self.slots)))

    def is_done(self, request: Request) -> bool:
        return len(request.shortfalls) == request.num_new


def make_requests(options: argparse.Namespace) -> list[Request]:
    rng = random.Random(options.seed)
    requests = []
    for _ in range(options.requests):
        prompt = [rng.randrange(options.vocabulary) for _ in range(rng.randint(1, options.prompt))]
        requests.append(Request(prompt, rng.randint(1, options.new)))
    return requests


def serve(model: Llama, options: argparse.Namespace) -> list[Request]:
    """Serves the requests from pages, and prints how fast."""
    server = Server(model, PagedCache(options), options)
    server.serve(make_requests(options)[: options.slots])  # first calls compile kernels
    requests, before = make_requests(options), server.num_steps
    begin = time.perf_counter()
    server.serve(requests)
    seconds, count = time.perf_counter() - begin, sum(request.num_new for request in requests)
    steps = server.num_steps - before
    print(
        f"{count} tokens of {len(requests)} requests in {seconds:.2f} s, {steps} steps: "
        f"{count / seconds:.0f} tokens/s, {count / max(steps, 1):.1f} tokens a step",
        flush=True,
    )
    return requests


def check(requests: Sequence[Request], model: Llama, options: argparse.Namespace) -> bool:
    """Returns whether the tokens are those of a dense cache, and prints how many are."""
    Checker(model, DenseCache(options), options).serve(requests)
    shortfalls = [shortfall for request in requests for shortfall in request.shortfalls]
    num_equal, bound = sum(shortfall == 0 for shortfall in shortfalls), SHORTFALL[options.dtype]
    num_near = sum(0 < shortfall <= bound for shortfall in shortfalls)
    print(
        f"{num_equal} of {len(shortfalls)} tokens are those of the dense run"
        + (f", {num_near} within {bound} of its largest logit" if num_near else "")
        + (f"; largest shortfall {max(shortfalls):.3g}" if num_equal < len(shortfalls) else "")
    )
    return num_equal + num_near == len(shortfalls)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES)
    for name in ("layers", "width", "heads", "heads-kv", "slots", "requests", "prompt", "new", "vocabulary"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--memory", type=float, default=0.7, help="pages over those that all slots could fill")
    parser.add_argument("--no-graph", dest="use_graph", action="store_false")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    is_gpu = options.device.startswith("cuda")
    if is_gpu and not torch.cuda.is_available():
        parser.error(f"--device: got {options.device}; accepted: cpu, since torch finds no GPU here")
    large = {"layers": 8, "width": 2048, "heads": 16, "heads_kv": 4, "slots": 32, "requests": 128, "prompt": 1000}
    small = {"layers": 2, "width": 64, "heads": 4, "heads_kv": 2, "slots": 4, "requests": 10, "prompt": 40}
    defaults = large | {"new": 300, "vocabulary": 32000} if is_gpu else small | {"new": 20, "vocabulary": 256}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in (*defaults, "page_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(options, name)}; accepted: 1 or more")
    if options.heads % options.heads_kv:
        parser.error(f"--heads: got {options.heads}; accepted: multiples of --heads-kv, {options.heads_kv}")
    if options.width % (2 * options.heads):
        parser.error(f"--width: got {options.width}; accepted: multiples of twice the heads, {2 * options.heads}")
    if not options.memory >= 0:
        parser.error(f"--memory: got {options.memory}; accepted: 0 or more")
    options.dtype = DTYPES[options.dtype or ("bfloat16" if is_gpu else "float32")]
    options.capacity = options.prompt + options.new
    options.use_graph = options.use_graph and is_gpu
    return options


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.manual_seed(options.seed)
    model = Llama(options).to(device=options.device, dtype=options.dtype).eval()
    return 0 if check(serve(model, options), model, options) else 1


if __name__ == "__main__":
    sys.exit(main())
