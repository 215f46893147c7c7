"""Would training a head pay on this machine? A prediction for a head not yet trained, and its assumptions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forerun.build.engine import needs_head
from forerun.measure.advise.decide import WORTH_IT
from forerun.measure.advise.evidence import Evidence, Prospect
from forerun.measure.advise.predict import Costs, at_acceptance
from forerun.models.base import Target

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
    layer = (
        config.width * config.head_dim * 2 * (config.heads + config.kv_heads)
        + 3 * config.width * config.inner
    )
    whole = config.layers * layer + config.vocab_size * config.width
    return (layer + min(config.vocab_size, VOCABULARY) * config.width) / whole


def _break_even(costs: Costs, share: float, nodes: int) -> float | None:
    """The acceptance above which a head gains anything; None where not even a perfect one does."""
    rates = [rate / 100 for rate in range(1, 101)]
    return next((rate for rate in rates if at_acceptance(rate, share, costs, 1, nodes)[1]), None)


def head_in_words(head: Mapping[str, Any]) -> Iterator[str]:
    """The same for a person."""
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
