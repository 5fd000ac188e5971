"""Problems are drawn here. The same seed, device and passes give the same problems again.

Options decide which kernel runs, and every new set of them costs a compiler's time; sizes, values and seeds cost
nothing. So a set of options is drawn and kept for several problems, each with sizes, strengths, values and seeds of its
own.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flashtile.lab.check.trial import Trial
from flashtile.problem import LAYOUTS, MAX_HEAD_DIM
from flashtile.testing import DOUT_MEMORIES, FORWARD_ONLY, MEMORIES, VALUES, Case

PASSES = ("forward", "backward", "both")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16, torch.float16, torch.float64)
_KINDS = ("dense", "dense", "dense", "varlen", "varlen", "used", "padded", "paged", "cache")
_HEAD_DIMS = (16, 32, 40, 64, 64, 80, 96, 128, 128, 160, 192, 256)
LEFT = (0, 3, 17, 64, 100)  # keys that a window shows to the left
_PAGE_SIZES = (1, 7, 16, 16, 32, 64)
# Elements of the score matrices of a problem: what the fp64 oracle can do in a few milliseconds
MAX_SCORES = {"cpu": 1 << 16, "cuda": 1 << 20}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options that a set of problems shares: everything that changes the code of a kernel."""

    plain: Case  # dtype, layout, kind, memory, head dims, axes of mask and bias, and the like
    has_backward: bool
    group: int  # query heads for each key head
    band: tuple[str, bool, bool]  # causal, and whether a window ends to the left and to the right
    is_scale_negative: bool
    has_softcap: bool
    has_dropout: bool


def most_different(trials: Sequence[Trial]) -> list[Trial]:
    """Returns the trials of each set of options that are most likely to need kernels of their own: those with the
    largest and smallest grids."""
    sets: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in trials:
        case = trial.case
        shared = (
            case.dtype,
            case.layout,
            case.kind,
            case.memory,
            case.head_dim,
            case.head_dim_v,
            case.is_bias_float32,
            case.is_out_float32,
        )
        options = (
            case.causal != "none" or case.window != (-1, -1),
            case.softcap > 0,
            case.mask,
            case.bias,
            case.alibi,
            case.dropout_p > 0,
        )
        sets.setdefault(
            (*shared, *(bool(option) for option in options), case.has_sinks, trial.has_backward), []
        ).append(trial)
    chosen = dict[Trial, None]()
    for some in sets.values():
        for trial in (
            some[0],
            *(extreme(some, key=_num_rows) for extreme in (min, max)),
            max(some, key=lambda trial: trial.case.seqlen_k),
        ):
            chosen[trial] = None
    return list(chosen)


def _num_rows(trial: Trial) -> int:
    return trial.case.batch * trial.case.heads * trial.case.seqlen_q


class Drawer:
    """Draws problems for one device. `edges` are lengths at which tiles end; `reuse` problems share a set of
    options."""

    def __init__(
        self, seed: int, device: str, direction: str = "both", edges: Sequence[int] = (), reuse: int = 1
    ) -> None:
        self.pick = random.Random(seed)
        self.device, self.direction, self.reuse = device, direction, max(1, reuse)
        self.lengths = sorted({max(0, edge + step) for edge in edges for step in (-1, 0, 1)}) or [1, 64]

    def __iter__(self) -> Iterator[Trial]:
        while True:
            options = self.options()
            for _ in range(self.reuse):
                yield self.trial(options)

    def chance(self, probability: float) -> bool:
        return self.pick.random() < probability

    def options(self) -> Options:
        pick = self.pick
        kind, dtype = pick.choice(_KINDS), pick.choice(_DTYPES)
        is_paged = kind in ("paged", "cache")
        # Few backends differentiate through pages
        has_backward = self.direction == "backward" or (
            self.direction == "both" and self.chance(0.2 if is_paged else 0.6)
        )
        has_bias = kind != "cache" and self.chance(0.35)
        head_dim = self.head_dim()
        plain = Case(
            dtype=dtype,
            layout=pick.choice(LAYOUTS),
            kind=kind,
            memory=pick.choice(("contiguous", *MEMORIES)),
            dout=pick.choice(("contiguous", *DOUT_MEMORIES)) if has_backward else "contiguous",
            head_dim=head_dim,
            head_dim_v=head_dim if self.chance(0.7) else self.head_dim(),
            mask=self.axes() if kind != "cache" and self.chance(0.35) else None,
            bias=self.axes() if has_bias else None,
            is_bias_float32=has_bias and self.chance(0.4),
            alibi=pick.choice(("h", "bh")) if self.chance(0.2) else None,
            has_sinks=self.chance(0.25),
            page_size=pick.choice(_PAGE_SIZES),
            is_out_float32=dtype in (torch.float16, torch.bfloat16) and self.chance(0.15),
            deterministic=True if self.chance(0.4) else None,
        )
        return Options(
            plain=plain,
            has_backward=has_backward,
            group=self.group(),
            band=self.band() if self.chance(0.5) else ("none", False, False),
            is_scale_negative=self.chance(0.2),
            has_softcap=self.chance(0.25),
            has_dropout=kind != "cache" and self.chance(0.3),
        )

    def group(self) -> int:
        return self.pick.choice((1, 1, 2, 3)) if self.chance(0.95) else self.pick.randint(60, 140)

    def head_dim(self) -> int:
        if self.chance(0.7):
            return self.pick.choice(_HEAD_DIMS)
        return self.pick.randint(1, 130) if self.chance(0.9) else self.pick.randint(130, MAX_HEAD_DIM)

    def trial(self, options: Options) -> Trial:
        pick, plain = self.pick, options.plain
        heads_kv = pick.choice((1, 1, 2, 3))
        sizes = {
            "batch": pick.choice((1, 1, 2, 3, 4)) if self.chance(0.98) else 0,
            "heads": heads_kv * options.group,
            "heads_kv": heads_kv,
            "seqlen_q": self.length(),
            "seqlen_k": self.length(),
        }
        if plain.kind in ("padded", "cache") and self.chance(0.5):
            sizes["seqlen_q"] = pick.randint(1, 4)  # decoding
        shape = pick.random()
        if shape < 0.12:
            sizes["seqlen_k"] = pick.randint(300, 4000)  # enough for every kernel's splits, and many tiles without
        elif shape < 0.22:
            sizes |= self.crowd(options.group)
        shrink_to(sizes, MAX_SCORES[self.device])
        scale = self.scale(options)
        changes: dict[str, Any] = {
            **sizes,
            "causal": options.band[0],
            "window": self.window(options),
            "scale": None if self.chance(0.7) and not options.is_scale_negative else scale,
            "softcap": self.softcap(options),
            "dropout_p": pick.choice((0.1, 0.2, 0.5)) if options.has_dropout else 0.0,
            "has_max_lengths": self.chance(0.5),
            # Left to the backend, problems as small as these would be split until no block has a second tile
            "num_splits": pick.choice((0, 0, 0, 1, 1, pick.randint(2, 5))),
        }
        fit = self.values(options)
        changes["values"] = pick.choice(("normal", "normal", *fit, *(["huge"] * 3 if "huge" in fit else [])))
        if changes["values"] in ("huge", "rising"):
            # What they are for shows where one block walks over several tiles, or over very many
            if changes["values"] == "huge":
                sizes["seqlen_k"] = max(sizes["seqlen_k"], self.length(), self.length())
            else:
                sizes = {
                    "batch": pick.randint(1, 3),
                    "heads": options.group,
                    "heads_kv": 1,
                    "seqlen_q": pick.randint(1, 4),
                }
                sizes["seqlen_k"] = pick.randint(500, MAX_SCORES[self.device] // 64)
            shrink_to(sizes, MAX_SCORES[self.device])
            changes |= {**sizes, "num_splits": pick.choice((1, 1, changes["num_splits"]))}
        if changes["values"] == "overflow":
            changes["dropout_p"] = min(changes["dropout_p"], 0.2)
        seed = pick.randrange(1 << 31)
        if options.has_dropout and seed % 2:
            # A part of a larger problem
            changes["origin"] = (seed % 1000, seed % 500 * 8, seed % 11, changes["heads"] + seed % 5)
        return Trial(dataclasses.replace(plain, **changes), seed, options.has_backward)

    def scale(self, options: Options) -> float:
        # Logits of a few units: with larger ones a handful of rows is too small a sample to judge a factor of two by
        return (-1 if options.is_scale_negative else 1) * self.pick.uniform(0.1, 2) / options.plain.head_dim**0.5

    def window(self, options: Options, left: Sequence[int] = LEFT) -> tuple[int, int]:
        _, has_left, has_right = options.band
        return self.pick.choice(left) if has_left else -1, self.pick.choice((0, 5, 33)) if has_right else -1

    def softcap(self, options: Options) -> float:
        return self.pick.choice((2.0, 15.0, 30.0)) if options.has_softcap else 0.0

    def values(self, options: Options) -> list[str]:
        """The kinds of values that mean something under these options."""
        unfit = set[str]()
        if options.has_backward:
            unfit.update(FORWARD_ONLY)
        if options.plain.dtype in (torch.float16, torch.bfloat16):
            unfit.add("wide")
        if options.plain.dtype == torch.float64:
            unfit.add("overflow")  # no sum comes near its largest number, and no rounding of the oracle's is smaller
        if not (options.plain.mask and options.plain.bias):
            unfit.add("masked")
        if not (options.plain.mask and options.plain.kind == "dense"):
            unfit.add("masked_keys")
        return [name for name in VALUES if name not in unfit]

    def crowd(self, group: int) -> dict[str, int]:
        """Short sequences of many heads: more tiles than there are persistent blocks, each of which takes several."""
        heads_kv, batch = self.pick.randint(40, 60), self.pick.randint(12, 20)
        # A tile may hold the queries of a whole group, which therefore adds no tiles
        seqlen_q, seqlen_k = (self.pick.randint(1, max(1, 30 // group)) for _ in range(2))
        return {
            "batch": batch,
            "heads": heads_kv * group,
            "heads_kv": heads_kv,
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_k,
        }

    def length(self) -> int:
        draw = self.pick.random()
        if draw < 0.03:
            return 0
        if draw < 0.25:
            return self.pick.randint(1, 9)
        return self.pick.choice(self.lengths) if draw < 0.7 else self.pick.randint(1, 300)

    def band(self) -> tuple[str, bool, bool]:
        causal = self.pick.choice(("none", "bottom_right", "top_left"))
        if causal != "none" and self.chance(0.5):
            return causal, False, False
        has_left, has_right = self.pick.choice(((True, True), (True, True), (True, False), (False, True)))
        return causal, has_left, has_right

    def axes(self) -> str:
        return self.pick.choice(("bhqk", "hqk", "qk", "bk", "k", "q", "h", "bhq", "1"))


def shrink_to(sizes: dict[str, int], most: int) -> None:
    """Makes the score matrices small enough: fewer sequences first, then heads, then shorter ones."""
    while sizes["batch"] * sizes["heads"] * sizes["seqlen_q"] * sizes["seqlen_k"] > most:
        if sizes["batch"] > 1:
            sizes["batch"] -= 1
        elif sizes["heads"] > sizes["heads_kv"]:
            sizes["heads"] -= sizes["heads_kv"]
        elif sizes["heads_kv"] > 1:
            sizes["heads"] = sizes["heads_kv"] = sizes["heads_kv"] - 1
        else:
            longest = max(("seqlen_q", "seqlen_k"), key=lambda name: sizes[name])
            sizes[longest] //= 2
