"""Decide by intervals what `forerun advise` recommends: to draft, not to draft, or that nobody can tell yet.

A gain whose interval reaches below plain decoding may be chance, and so may be the lead of one drafter over another:
a run a minute later would say otherwise. Only drafters whose own interval is above plain decoding are recommended. Of
those that cannot be told apart the default is taken, so that nothing needs to be set, else the simplest one; and none
is set in place of a default from which it cannot be told.

Whether training a head would pay is predicted too, with the assumptions of the prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forerun.build.engine import needs_head
from forerun.core import registry
from forerun.measure.advise.evidence import Evidence, Prospect
from forerun.measure.advise.predict import Costs, at_acceptance
from forerun.models.base import Target

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
        batch: judge(next(one for one in some if one.drafter == best.drafter), WORTH_IT if batch == 1 else STOP)
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


ACCEPTANCE = (0.55, 0.7)  # what small heads reach on text unlike, and like, their training data
VOCABULARY = 16384  # tokens that a draft head needs to rank
TOKENS = 2_000_000  # of the target's own answers, to train one
SHARE = 0.1  # of a plain pass, where the model's shape is not known


def head_prospect(evidence: Evidence, best: Prospect | None, target: Target) -> dict[str, Any]:
    """What a one-layer head would gain, if it got the acceptance that such heads get."""
    share = _level_share(target)
    gains = [at_acceptance(rate, share, evidence.costs, 1, evidence.nodes)[0] for rate in ACCEPTANCE]
    today = best.speedup.value if best is not None else 1.0
    hours = TOKENS / evidence.prompt_rate / 3600 if evidence.prompt_rate else None
    return {
        "trained": [name for name in evidence.draftings if needs_head(name)],
        "level_share": round(share, 4),
        "acceptance": list(ACCEPTANCE),
        "speedup": [round(gain, 4) for gain in gains],
        "break_even": _break_even(evidence.costs, share, evidence.nodes),
        "pays": gains[0] > max(WORTH_IT, 1.05 * today),
        "tokens": TOKENS,
        "capture_hours": None if hours is None else round(hours, 2),
    }


def _level_share(target: Target) -> float:
    """What one level of a one-layer head with a trimmed vocabulary costs, in plain passes, by bytes read."""
    shared = target.shared()
    config = None if shared is None else shared.config
    if config is None or config.moe is not None:
        return SHARE
    layer = config.width * config.head_dim * 2 * (config.heads + config.kv_heads) + 3 * config.width * config.inner
    whole = config.layers * layer + config.vocab_size * config.width
    return (layer + min(config.vocab_size, VOCABULARY) * config.width) / whole


def _break_even(costs: Costs, share: float, nodes: int) -> float | None:
    """The acceptance above which a head gains anything; None where not even a perfect one does."""
    rates = [rate / 100 for rate in range(1, 101)]
    return next((rate for rate in rates if at_acceptance(rate, share, costs, 1, nodes)[1]), None)


def head_in_words(head: Mapping[str, Any]) -> Iterator[str]:
    if head["trained"]:
        yield f"A trained head exists already and was measured: {', '.join(head['trained'])}."
        return
    if head["break_even"] is None:
        yield "Training a head would not pay: even a perfect one would not, at what passes cost here."
        return
    low, high = head["speedup"]
    verdict = "would pay" if head["pays"] else "would gain less than 5%"
    yield (
        f"Training a head {verdict}: {low:.2f} to {high:.2f} times plain at an acceptance of "
        f"{head['acceptance'][0]} to {head['acceptance'][1]}; it breaks even at {head['break_even']:.2f}."
    )
    if head["pays"] and head["capture_hours"] is not None:
        yield (
            f"It takes {head['tokens']:,} tokens of the model's own answers: about "
            f"{head['capture_hours']:.1f} hours of passes on this machine, and as long again to train."
        )
