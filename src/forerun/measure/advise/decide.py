"""Decide by intervals what `forerun advise` recommends: to draft, not to draft, or that nobody can tell yet.

A gain whose interval reaches below plain decoding may be chance, and so may be the lead of one drafter over another:
a run a minute later would say otherwise. Only drafters whose own interval is above plain decoding are recommended. Of
those that cannot be told apart the default is taken, so that nothing needs to be set, else the simplest one; and none
is set in place of a default from which it cannot be told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from forerun.core import registry
from forerun.measure.advise.evidence import Prospect

Verdict = Literal["draft", "do not draft", "cannot tell"]

WORTH_IT = 1.05  # a predicted gain below this is not worth a setting
STOP = 1.02  # a drafter that gains less at some batch size need not draft there


@dataclass(frozen=True, slots=True)
class Decision:
    """What is recommended for one sequence at a time, and for how many at once that holds."""

    verdict: Verdict
    best: Prospect | None = None  # what is recommended; None = nothing
    equals: tuple[Prospect, ...] = ()  # others that pay and cannot be told from it, or from the default
    by_batch: Mapping[int, Verdict] | None = None  # of what is recommended

    @property
    def off_from(self) -> int | None:
        """The first batch size for which it is not recommended; None = there is none."""
        sizes = self.by_batch or {1: self.verdict}
        return next((batch for batch, verdict in sizes.items() if verdict != "draft"), None)


def judge(found: Prospect, least: float = WORTH_IT) -> Verdict:
    """Does a drafter gain at least so much, and is it sure to gain anything?"""
    gain = found.speedup
    if found.rests or (gain.high is not None and gain.high < least):
        return "do not draft"
    if gain.low is not None and gain.low >= 1.0 and gain.value >= least:
        return "draft"
    return "cannot tell"


def decide(by_batch: Mapping[int, Sequence[Prospect]], auto: str) -> Decision:
    """From the prospects of every batch size, of which 1 is the first; `auto` is the default drafter."""
    found = by_batch[1]
    sure = [one for one in found if judge(one) == "draft"]
    if not sure:
        unsure = any(judge(one) == "cannot tell" for one in found)
        return Decision("cannot tell" if unsure else "do not draft")
    fastest = sure[0]  # they are sorted
    default = next((one for one in found if one.drafter == auto), None)
    if default is not None and default not in sure and not _is_slower(default, fastest):
        return Decision("cannot tell", equals=tuple(sure))  # nothing to set: the default may be as fast
    equals = [one for one in sure if not _is_slower(one, fastest)]
    best = min(equals, key=lambda one: (one.drafter != auto, _parts(one.drafter)))
    by_size = {
        batch: judge(
            next(one for one in some if one.drafter == best.drafter), WORTH_IT if batch == 1 else STOP
        )
        for batch, some in by_batch.items()
    }
    return Decision("draft", best, tuple(one for one in equals if one is not best), by_size)


def _is_slower(one: Prospect, other: Prospect) -> bool:
    """Clearly, by the same prompts?"""
    high = one.over(other).high
    return one is not other and high is not None and high < 1.0


def _parts(drafter: str) -> tuple[bool, int, str]:
    """What must be there for it: a checkpoint, and how many drafters; by name where that is the same."""
    spec = registry.drafters.spec(drafter)
    return spec.needs != "nothing", len(spec.members), drafter
