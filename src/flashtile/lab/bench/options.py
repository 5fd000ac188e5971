"""The options of a call that the `options` and `cpu` grids measure, by the name in the column `option`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Option:
    """Arguments of a call beside q, k, v and a causal mask."""

    entry: str = "attention"  # the function of ours: attention, sdpa, kvcache, serving or packed (bench/serving.py)
    window: int | None = None  # keys to the left of the query's own
    softcap: float = 0.0
    dropout_p: float = 0.0
    has_alibi: bool = False
    has_bias: bool = False  # (1, heads, seqlen_q, seqlen_k), in the dtype of q
    is_bias_per_sequence: bool = False  # (batch, heads, seqlen_q, seqlen_k)
    has_bias_grad: bool = False
    mask: str = ""  # padding, lengths: (batch, 1, 1, seqlen_k); dense: (batch, 1, seqlen_q, seqlen_k); heads: of each
    hidden: float = 0.0  # fraction of the mask that is False, at random; of lengths: at the end of the first sequence
    page_size: int | None = None  # of a cache in pages
    short_keys: int | None = None  # of all sequences of a cache but the first
    is_packed: bool = False  # queries of all sequences one behind the other
    has_tiny_row: bool = False  # the first row of v times 2^-40: two float16 parts cannot hold all of v

    @property
    def changes_scores(self) -> bool:
        """True if scores are changed or hidden, other than by a causal mask."""
        return bool(self.window is not None or self.softcap or self.has_alibi or self.has_bias or self.mask)


PLAIN = Option()
TINY_ROW = "one row of V times 2^-40"
LENGTHS, PACKED = "padding to lengths S/2 to S", "packed"
OPTIONS = {
    "bias (1,H,S,S)": Option(has_bias=True),
    "bias with gradient": Option(has_bias=True, has_bias_grad=True),
    "padding mask (B,1,1,S)": Option(mask="padding", hidden=0.1),
    LENGTHS: Option(mask="lengths", hidden=0.5),
    "bool mask (B,1,S,S)": Option(mask="dense", hidden=0.2),
    "dropout 0.1": Option(dropout_p=0.1),
    "softcap 30 causal": Option(softcap=30.0),
    "ALiBi causal": Option(has_alibi=True),
    "window 1024 causal": Option(window=1024),
    "BEiT B256 S197 bias": Option(has_bias=True),
    "Swin B4096 S49 bias": Option(has_bias=True),
    "Swin B4096 S64 bias": Option(has_bias=True),
    TINY_ROW: Option(has_tiny_row=True),
    "SDPA facade": Option(entry="sdpa"),
    "kvcache step": Option(entry="kvcache"),
    "kvcache step Sk128": Option(entry="kvcache"),
    "kvcache step B4": Option(entry="kvcache"),
    PACKED: Option(entry="packed", is_packed=True),
}
_OF_RANDOM_CALLS = {
    "random mask (B,1,S,S)": Option(mask="dense", hidden=0.3),
    "random mask (B,H,S,S)": Option(mask="heads", hidden=0.3),
    "bias (B,H,S,S)": Option(has_bias=True, is_bias_per_sequence=True),
}
OPTIONS |= _OF_RANDOM_CALLS
MASKS_AND_BIASES = (*_OF_RANDOM_CALLS, "bias (1,H,S,S)", LENGTHS)  # those of random calls
PAGE_SIZES, SHORT_KEYS = (1, 16, 64, 256), 512


def _serving_options() -> dict[str, Option]:
    """Returns the options of calls over a dense cache and over pages, by name."""
    found = {}
    for kind, plain in {
        "decode": Option(entry="serving"),
        "mixed": Option(entry="serving", short_keys=SHORT_KEYS),
        "speculative": Option(entry="serving"),
        "chunk": Option(entry="serving", is_packed=True),
    }.items():
        found[kind] = plain
        found |= {f"{kind}, page {size}": replace(plain, page_size=size) for size in PAGE_SIZES}
    return found


OPTIONS |= _serving_options()


@dataclass(frozen=True)
class Extras:
    """The tensors of an option. All copies of the inputs share them."""

    bias: Tensor | None = None
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.bias, self.mask, self.alibi_slopes) if tensor is not None]


def shapes(option: Option, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the option's tensors, by their names in Extras."""
    found: dict[str, tuple[int, ...]] = {}
    if option.has_bias:
        found["bias"] = (batch if option.is_bias_per_sequence else 1, heads, seqlen_q, seqlen_k)
    if option.mask:
        rows = seqlen_q if option.mask in ("dense", "heads") else 1
        found["mask"] = (batch, heads if option.mask == "heads" else 1, rows, seqlen_k)
    if option.has_alibi:
        found["alibi_slopes"] = (heads,)
    return found


def make_extras(
    option: Option, sizes: dict[str, tuple[int, ...]], dtype: torch.dtype, generator: torch.Generator
) -> Extras:
    """Random normal bias, random mask or evenly spaced lengths, slopes from 1/2 to 1/256 over the heads."""
    made, device = dict[str, Tensor](), generator.device
    for name, shape in sizes.items():
        if name == "bias":
            made[name] = torch.randn(shape, dtype=dtype, device=device, generator=generator)
        elif name == "mask" and option.mask == "lengths":
            batch, seqlen_k = shape[0], shape[-1]
            lengths = torch.linspace(seqlen_k * (1 - option.hidden), seqlen_k, batch, device=device).round()
            made[name] = torch.arange(seqlen_k, device=device) < lengths.view(batch, 1, 1, 1)
        elif name == "mask":
            made[name] = torch.rand(shape, device=device, generator=generator) >= option.hidden
        else:
            made[name] = torch.logspace(-1, -8, shape[0], base=2.0, device=device)
    return Extras(**made)
