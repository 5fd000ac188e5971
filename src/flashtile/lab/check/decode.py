"""Problems of serving: few queries over a cache, dense or in pages, of sequences of very different lengths.

Drawn are the options of a decode step (dtype, head dims, GQA ratio, band, softcap, ALiBi, sinks, left padding, class of
page size) and, for several problems of each set, lengths, page sizes, strengths and values. NaN stands behind every
length, in left padding and in pages of nobody; entries of the table that hold no key of their sequence are out of
bounds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from flashtile.lab.check.draw import LEFT, MAX_SCORES, Drawer, Options, shrink_to
from flashtile.lab.check.trial import Trial
from flashtile.problem import LAYOUTS
from flashtile.testing import Case

_DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float16, torch.float32)
_KINDS = ("cache", "cache", "cache", "cache", "padded", "paged")
_HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (128, 128), (192, 192), (192, 128), (256, 256))
_GROUPS = (1, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 12, 16, 32, 64)
# Pages of whole groups of 8 rows; of other sizes; one page for a sequence, as by batch index
_PAGE_SIZES = {"whole": (8, 16, 32, 64, 128, 256), "odd": (1, 1, 2, 3, 4, 5, 7, 12, 24, 100, 255), "row": ()}
_PAGES = ("whole", "whole", "whole", "odd", "odd", "row")
_MAX_KEY_ELEMENTS = 1 << 22  # of k and v together: they are drawn on the host, which takes longer than all else


class DecodeDrawer(Drawer):
    """Draws such problems: forward passes alone."""

    pages = _PAGES[0]  # the class of page sizes in the present set of options

    def options(self) -> Options:
        pick = self.pick
        kind, dims = pick.choice(_KINDS), pick.choice(_HEAD_DIMS)
        if self.chance(0.15):
            dims = self.head_dim(), self.head_dim()
        self.pages = pick.choice(_PAGES)
        plain = Case(
            dtype=pick.choice(_DTYPES),
            layout=pick.choice((*LAYOUTS, "bshd")),
            kind=kind,
            memory=pick.choice(("contiguous", "contiguous", "contiguous", "swapped", "sliced", "offset")),
            head_dim=dims[0],
            head_dim_v=dims[1],
            alibi=pick.choice(("h", "bh")) if self.chance(0.15) else None,
            has_sinks=self.chance(0.25),
            has_leftpad=self.chance(0.3),
            is_out_float32=self.chance(0.1),
            deterministic=True if self.chance(0.2) else None,
        )
        band = ("none", False, False)
        if self.chance(0.6):
            band = pick.choice((("bottom_right", False, False), ("bottom_right", True, False), ("none", True, True)))
        return Options(
            plain=plain,
            has_backward=False,
            group=pick.choice(_GROUPS),
            band=band,
            is_scale_negative=self.chance(0.05),
            has_softcap=self.chance(0.2),
            has_dropout=False,
        )

    def trial(self, options: Options) -> Trial:
        pick, plain, group = self.pick, options.plain, options.group
        heads_kv = pick.choice((1, 1, 2, 3, 8)) if group < 16 else 1
        sizes = {
            "batch": pick.choice((1, 1, 2, 3, 5, 8, 33)),
            "heads": heads_kv * group,
            "heads_kv": heads_kv,
            "seqlen_q": pick.choice((1, 1, 1, 1, 1, 2, 3, 4, 8, pick.randint(9, 64))),
            "seqlen_k": max(1, pick.choice((self.length(), pick.randint(1, 600), pick.randint(300, 5000)))),
        }
        shrink_to(sizes, MAX_SCORES[self.device])
        _shrink_keys(sizes, plain.head_dim + plain.head_dim_v)
        scale = self.scale(options)
        changes: dict[str, Any] = {
            **sizes,
            "page_size": pick.choice(_PAGE_SIZES[self.pages] or (max(1, sizes["seqlen_k"]),)),
            "has_junk_pages": plain.kind in ("cache", "paged") and self.chance(0.8),
            "causal": options.band[0],
            "window": self.window(options, (*LEFT, 513)),
            "scale": None if self.chance(0.8) and not options.is_scale_negative else scale,
            "softcap": self.softcap(options),
            "has_max_lengths": self.chance(0.5),
            "num_splits": pick.choice((0, 0, 0, 0, 1, pick.randint(2, 9))),
            "values": pick.choice(("normal", "normal", "normal", *self.values(options))),
        }
        return Trial(dataclasses.replace(plain, **changes), pick.randrange(1 << 31), False)


def _shrink_keys(sizes: dict[str, int], dims: int) -> None:
    """Makes k and v small enough: fewer sequences first, then heads, then shorter ones."""
    group = sizes["heads"] // sizes["heads_kv"]
    while sizes["batch"] * sizes["heads_kv"] * sizes["seqlen_k"] * dims > _MAX_KEY_ELEMENTS:
        if sizes["batch"] > 1:
            sizes["batch"] -= 1
        elif sizes["heads_kv"] > 1:
            sizes["heads_kv"] -= 1
            sizes["heads"] = group * sizes["heads_kv"]
        else:
            sizes["seqlen_k"] //= 2
