"""Packed sequences whose longest nobody names (no max_seqlen), in memory of any kind: odd strides, offsets and
alignments of q, k, v, bias, mask and the gradient of the output, many sequences, many query heads to a key head."""

from __future__ import annotations

import dataclasses

from flashtile.lab.check.draw import MAX_SCORES, Drawer, Options, shrink_to
from flashtile.lab.check.trial import Trial
from flashtile.testing import DOUT_MEMORIES

_KINDS = ("varlen", "varlen", "varlen", "used", "paged")
_MEMORIES = ("ragged", "ragged", "ragged", "aligned", "sliced", "offset", "swapped", "contiguous")
_MAX_BATCH = 300


class PackedDrawer(Drawer):
    """Draws such problems."""

    def options(self) -> Options:
        options = super().options()
        kind = self.pick.choice(_KINDS)
        has_backward = options.has_backward and (kind != "paged" or self.chance(0.3))
        plain = dataclasses.replace(
            options.plain,
            kind=kind,
            memory=self.pick.choice(_MEMORIES),
            dout=self.pick.choice(DOUT_MEMORIES) if has_backward else "contiguous",
        )
        return dataclasses.replace(options, plain=plain, has_backward=has_backward)

    def group(self) -> int:
        return self.pick.choice((1, 1, 2, 3, 8)) if self.chance(0.75) else self.pick.randint(60, 140)

    def trial(self, options: Options) -> Trial:
        trial = super().trial(options)
        changes: dict[str, int] = {}
        if trial.case.values == "normal" and self.chance(0.4):
            # Many short sequences, and now and then a longer bound: most of them are far from the longest
            batch = round(_MAX_BATCH ** self.pick.random())
            most = max(1, int((MAX_SCORES[self.device] / (batch * trial.case.heads)) ** 0.5))
            changes = {
                "batch": batch,
                "heads": trial.case.heads,
                "heads_kv": trial.case.heads_kv,
                "seqlen_q": self.pick.randint(1, most),
                "seqlen_k": self.pick.randint(1, most),
            }
            shrink_to(changes, MAX_SCORES[self.device])
        case = dataclasses.replace(trial.case, has_max_lengths=False, **changes)  # type: ignore[arg-type]
        return dataclasses.replace(trial, case=case)
