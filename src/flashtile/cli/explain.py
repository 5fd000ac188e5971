"""`flashtile explain`: what `flashtile.explain` says of a call that is described by its sizes. No memory is used."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile import markup
from flashtile.backends.registry import Explanation
from flashtile.cli.options import ExplainOptions as Options
from flashtile.errors import Unsupported, renamed, value_error
from flashtile.lab.bench.files import writable_folder, write_whole
from flashtile.lab.dtypes import DTYPES, dtype_key

_PASSES = ("fwd", "fwd+bwd")
# Arguments of the functions whose options have other names
_NAMES = {
    "arch": "--gpu",
    "window": "--window",
    "mask": "--mask",
    "bias": "--bias",
    "softcap": "--softcap",
    "dropout_p": "--dropout-p",
    "layout": "--layout",
}


def prepare(options: Options) -> Callable[[], int]:
    """Asks for the explanation and returns the job, which shows it."""
    if options.direction not in _PASSES:
        raise value_error("--pass", repr(options.direction), ", ".join(_PASSES))
    if options.is_causal and options.is_top_left:
        raise value_error("--causal", "it with --causal-top-left", "one of the two")
    if options.html is not None:
        writable_folder(options.html.parent, "--html")
    tensors, given = call(options)
    try:
        answer = flashtile.explain(*tensors, arch=options.gpu, **given)
    except (ValueError, TypeError, Unsupported) as error:
        raise renamed(error, _NAMES) from None
    return partial(_show, answer, options)


def call(options: Options) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Meta tensors q, k and v of those sizes, and the options of the function that is called."""
    dtype, needs_grad = DTYPES[dtype_key(options.dtype)], options.direction != "fwd"
    batch, heads, head_dim = options.batch, options.heads, options.head_dim
    heads_kv = heads if options.heads_kv is None else options.heads_kv
    rows = options.seqlen_q
    keys = rows if options.seqlen_k is None else options.seqlen_k
    head_dim_v = head_dim if options.head_dim_v is None else options.head_dim_v
    for name, size, least in (
        *(("--batch", batch, 1), ("--heads", heads, 1), ("--heads-kv", heads_kv, 1), ("--seqlen-q", rows, 0)),
        *(("--seqlen-k", keys, 0), ("--head-dim", head_dim, 1), ("--head-dim-v", head_dim_v, 1)),
    ):
        if size < least:
            raise value_error(name, str(size), f"an integer >= {least}")
    if options.page_size is not None and options.page_size < 1:
        raise value_error("--page-size", str(options.page_size), "an integer >= 1")
    is_cache = options.is_cache or (options.page_size is not None and not options.is_varlen)
    layout = options.layout or ("bshd" if is_cache else "bhsd")

    def tensor(*sizes: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(sizes, dtype=of, device="meta", requires_grad=needs_grad and of.is_floating_point)

    def rows_of(first: tuple[int, ...], length: int, count: int, dim: int) -> Tensor:
        inner = (length, count, dim) if layout == "bshd" else (count, length, dim)
        return tensor(*first, *inner)

    given: dict[str, Any] = {"layout": layout, "backend": options.backend, "softcap": options.softcap}
    given |= {"causal": "top_left" if options.is_top_left else options.is_causal, "window": _window(options.window)}
    if options.has_alibi:
        given["alibi_slopes"] = torch.empty(heads, device="meta")
    if options.has_sinks:
        given["sinks"] = tensor(heads, of=torch.float32)
    first: tuple[int, ...] = (batch,)
    first_q, first_k = rows, keys
    if is_cache:
        given["cache_seqlens"] = tensor(batch, of=torch.int32)
        _refuse_beside_cache(options)
    else:
        given |= {"dropout_p": options.dropout_p, "deterministic": options.is_deterministic or None}
        given["mask"] = None if options.mask is None else tensor(*_sizes("--mask", options.mask), of=torch.bool)
        given["bias"] = None if options.bias is None else tensor(*_sizes("--bias", options.bias))
    if options.is_varlen:
        if options.is_cache:
            raise value_error("--varlen", "it with --cache", "one of the two", "With --page-size it reads pages")
        given |= {name: tensor(batch + 1, of=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        given |= {"max_seqlen_q": rows, "max_seqlen_k": keys}
        first, first_q, first_k = (), batch * rows, batch * keys
    q = rows_of(first, first_q, heads, head_dim)
    if options.page_size is not None:
        pages = -(-keys // options.page_size)
        given["block_table"] = tensor(batch, pages, of=torch.int32)
        first, first_k = (batch * pages,), options.page_size
    k, v = (rows_of(first, first_k, heads_kv, dim) for dim in (head_dim, head_dim_v))
    return (q, k, v), given


def _refuse_beside_cache(options: Options) -> None:
    """Refuses the options that `attention_kvcache` does not have."""
    for name, is_given in (
        *(("--mask", options.mask is not None), ("--bias", options.bias is not None)),
        *(("--dropout-p", options.dropout_p != 0), ("--deterministic", options.is_deterministic)),
        ("--pass fwd+bwd", options.direction != "fwd"),
    ):
        if is_given:
            cache = "--cache" if options.is_cache else "--page-size"
            raise value_error(name, f"it with {cache}", "a call without a cache, or with --varlen", f"Drop {name}")


def _window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.removeprefix("-").isdecimal() for part in parts):
        raise value_error("--window", repr(text), "left,right: keys before and behind the diagonal, -1 = unbounded")
    return int(parts[0]), int(parts[1])


def _sizes(option: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise value_error(option, repr(text), "a shape such as 1,1,4096,4096")
    return tuple(map(int, parts))


def _show(answer: Explanation, options: Options) -> int:
    if options.html is not None:
        body = f'<main style="max-width:70rem;margin:1rem auto;padding:0 1rem">{answer._repr_html_()}</main>'
        write_whole(options.html, markup.page("flashtile explain", body))
        print(f"Written: {options.html}", file=sys.stderr if options.as_json else sys.stdout)
    if options.as_json:
        print(json.dumps(answer.as_dict(), indent=2))
    elif options.html is None:
        print(answer)
    return 0
