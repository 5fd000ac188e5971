"""Problems of float32 by tensor cores: most have numbers of very different sizes, on which it depends how operands are
split.

A set of options is for one family of such kernels and each pass. They must run, though on problems as small as these
others are faster. On a device without such families the same problems are for whatever it has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from flashtile import families
from flashtile.backends.base import device_arch
from flashtile.families import Family
from flashtile.lab.check.draw import Drawer, Options, shrink_to
from flashtile.lab.check.trial import Trial
from flashtile.plans.arch import Arch, typical_multiprocessors
from flashtile.problem import LAYOUTS, Problem
from flashtile.testing import Case

_MAX_SCORES = 1 << 16  # of a problem: what the oracle does in some 20 ms on one core
_MIN_QUERIES = 65  # of a head; calls with fewer are for other families
_KINDS = ("dense", "dense", "dense", "varlen", "varlen", "used", "padded")
_MEMORIES = ("contiguous", "contiguous", "contiguous", "swapped", "sliced", "offset")
_HEAD_DIMS = (32, 40, 64, 64, 64, 64, 80, 96, 128, 128, 128, 192, 256, 256)


def split_families(op: str, arch: Arch | None) -> list[Family]:
    """The families of an op for float32 alone: those that split operands for tensor cores."""
    found = [family for family in families.all_families(op) if family.dtypes == ("float32",)]
    return [family for family in found if arch is not None and family.runs_on(arch)]


class Float32Drawer(Drawer):
    """Draws such problems, on a GPU for its architecture."""

    chosen: tuple[Family, ...] = ()  # in the present set of options: of the forward pass, of the backward pass

    @property
    def arch(self) -> Arch | None:
        return device_arch() if self.device == "cuda" else None

    def options(self) -> Options:
        """Draws a set of options that the chosen families take. Families are chosen first, so that those which refuse
        most options get as many sets as others."""
        has_backward = self.direction == "backward" or (self.direction == "both" and self.chance(0.5))
        ops = ("forward", "backward") if has_backward else ("forward",)
        self.chosen = tuple(self.pick.choice(found) for op in ops if (found := split_families(op, self.arch)))
        while not self._is_taken(self.trial(options := self._any_options(has_backward))):
            pass
        return options

    def _any_options(self, has_backward: bool) -> Options:
        pick = self.pick
        has = {name: self.chance(0.2) for name in ("mask", "bias", "alibi", "sinks", "softcap", "dropout")}
        head_dim = pick.choice(_HEAD_DIMS)
        plain = Case(
            layout=pick.choice(LAYOUTS),
            kind=pick.choice(_KINDS),
            memory=pick.choice(_MEMORIES),
            head_dim=head_dim,
            head_dim_v=head_dim if self.chance(0.8) else pick.choice(_HEAD_DIMS),
            mask=self.axes() if has["mask"] else None,
            bias=self.axes() if has["bias"] else None,
            alibi=pick.choice(("h", "bh")) if has["alibi"] else None,
            has_sinks=has["sinks"],
            deterministic=self.chance(0.2),  # whatever torch.use_deterministic_algorithms says
        )
        return Options(
            plain=plain,
            has_backward=has_backward,
            group=pick.choice((1, 1, 1, 2, 3)),
            band=self.band() if self.chance(0.4) else ("none", False, False),
            is_scale_negative=False,
            has_softcap=has["softcap"],
            has_dropout=has["dropout"],
        )

    def _is_taken(self, trial: Trial) -> bool:
        """True if the chosen families take the call."""
        if not self.chosen or (arch := self.arch) is None:
            return True
        args = trial.make("cpu").args
        problem = Problem.of(args._replace(needs_grad=trial.has_backward))
        for family in self.chosen:
            grads = None if family.op == "forward" else tuple(_grads(trial.case))
            key = families.key_of(problem, grads, arch, typical_multiprocessors(arch))
            if family.refuse(key) is not None:
                return False
        return True

    def trial(self, options: Options) -> Trial:
        pick, plain = self.pick, options.plain
        heads_kv = pick.choice((1, 1, 2))
        sizes = {
            "batch": pick.choice((1, 1, 2, 3)),
            "heads": heads_kv * options.group,
            "heads_kv": heads_kv,
            "seqlen_q": pick.choice((pick.randint(_MIN_QUERIES, 300), max(_MIN_QUERIES, pick.choice(self.lengths)))),
            "seqlen_k": pick.choice((self.length(), pick.randint(1, 600))),
        }
        shrink_to(sizes, _MAX_SCORES)
        changes: dict[str, Any] = {
            **sizes,
            "causal": options.band[0],
            "window": self.window(options),
            "scale": None if self.chance(0.7) else self.scale(options),
            "softcap": self.softcap(options),
            "dropout_p": pick.choice((0.1, 0.2, 0.5)) if options.has_dropout else 0.0,
            "has_max_lengths": True,
            "num_splits": pick.choice((0, 0, 1, pick.randint(2, 5))),
            "values": "wide" if self.chance(0.8) else pick.choice(self.values(options)),
        }
        if changes["values"] == "overflow":
            changes["dropout_p"] = min(changes["dropout_p"], 0.2)
        names = tuple(family.name for family in self.chosen)
        return Trial(dataclasses.replace(plain, **changes), pick.randrange(1 << 31), options.has_backward, names)


def _grads(case: Case) -> Iterator[str]:
    """Yields the gradients that a backward pass of the case computes."""
    yield from ("dq", "dk", "dv")
    if case.bias:
        yield "dbias"
    if case.has_sinks:
        yield "dsinks"
