"""What `auto` drafts with once t(n) is known: on a CPU a head where it pays, else suffix or n-gram by t(1).

On a GPU a few more nodes cost a pass next to nothing, so a head that fits the target is always used there. On a CPU
it depends on the machine: t(n) is measured, a level of the head is timed, the head's own file says how often its tokens
were accepted on held-back text, and these three give the speed-up of a chain. Real rounds gain more, because
the head stops where it is not confident; so the head is chosen only where even the chain pays.

What levels take is kept in the file of t(n): where a head was far from paying, later starts do not even load it.

Without a head, suffix is used on a GPU where a plain pass takes 3 ms or more. Its trees take some of the host's time
and a few more rows: little beside such a pass. Replayed with shorter ones single tasks fall behind n-gram, and on a
CPU it is not ahead on every task.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from operator import mul
from pathlib import Path

from forerun.control.cost import CostModel
from forerun.core.errors import ForerunError
from forerun.core.params import SpeculativeConfig
from forerun.core.types import Budget, Offer, PlainSeq, TreeBatch, Verdict
from forerun.drafters.base import Drafter, Parts
from forerun.heads import HeadFolder, open_head
from forerun.models.base import Target

log = logging.getLogger(__name__)

WORTH_IT = 1.15  # estimated of a chain; measured over whole calls it was 0.05 less, as prompts are read too
SLOW_PASS = 3e-3  # seconds of a plain pass on a GPU: replayed with 2 ms, single tasks are at 0.95 of n-gram
NO_HEAD = "no head comes with the package for this model"
FAR = 0.9  # times that: below, what was timed at an earlier start is believed
_CONTEXT = 16  # tokens that the head has read when its levels are timed
_DRAFTS, _DEPTH = 5, 3  # rounds that are timed, and levels of each; the first warms up


@dataclass(frozen=True, slots=True)
class Prospect:
    """The expected speed-up of drafting with a head, and the numbers that it follows from."""

    drafter: str
    speedup: float  # over plain decoding, of the best chain
    depth: int  # of that chain
    passes: tuple[float, ...]  # seconds of a pass over 1, 2, ... nodes
    levels: tuple[float, ...]  # seconds of drafting 1, 2, ... levels
    survivals: tuple[float, ...]  # how often tokens 1, 2, ... of a chain are accepted

    @property
    def pays(self) -> bool:
        return self.speedup >= WORTH_IT

    def __str__(self) -> str:
        depth = max(1, self.depth)
        rates = ", ".join(f"{rate:.0%}" for rate in self.survivals[:3])
        return (
            f"{self.drafter} should gain {self.speedup:.2f}x with {depth} drafted; {WORTH_IT:g}x is asked for "
            f"(a pass takes {_ms(self.passes[0])}, with {depth} more {_ms(self.passes[depth])}, drafting "
            f"{depth} {_ms(self.levels[depth - 1])}; the first tokens are accepted {rates} of the time)"
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """The drafter that `auto` is, and why."""

    drafter: str
    why: str
    head: Drafter | None = None  # the drafter itself, where it was built to be weighed


def settle(parts: Parts, measure: Callable[[], CostModel], build: Callable[[str], Drafter]) -> Choice:
    """What `auto` is for this target: by what was given, what passes take, and where it runs."""
    if parts.draft is not None:
        return Choice("draft_model", "a draft model was given")
    if parts.speculative.draft_model is None:
        return choose_lookup(parts, measure)
    prospect, head = weigh_head(parts.speculative, parts.target, measure, parts.cost_file, build)
    if prospect is None:
        return Choice("ngram", "nothing is known of the head that comes with the package")
    return Choice("ngram" if head is None else prospect.drafter, str(prospect), head)


def choose_lookup(parts: Parts, measure: Callable[[], CostModel]) -> Choice:
    """suffix or n-gram, where there is no head: passes are timed only where that decides."""
    if not parts.opening or parts.speculative.controller != "adaptive":
        return Choice("ngram", _why_not_suffix(parts))
    seconds = measure().pass_seconds(1)
    said = f"{NO_HEAD}, and a plain pass takes {_ms(seconds)}; suffix is used from {_ms(SLOW_PASS)} on"
    return Choice("suffix" if seconds >= SLOW_PASS else "ngram", said)


def _why_not_suffix(parts: Parts) -> str:
    """Whatever a pass takes. Without an opening it would draft matches alone, which are no better than n-gram's."""
    if parts.target.source_rules is not None:
        return "an encoder-decoder copies from its source, which ngram looks up"
    if not parts.target.can.captures:
        return f"{NO_HEAD}, and on a CPU suffix is not faster on every task"
    return f"{NO_HEAD}, and suffix needs the adaptive controller and a tokenizer that says how answers begin"


def weigh_head(
    speculative: SpeculativeConfig,
    target: Target,
    measure: Callable[[], CostModel],
    cost_file: Path | None,
    build: Callable[[str], Drafter],
) -> tuple[Prospect | None, Drafter | None]:
    """What the head of `draft_model` should gain on this CPU, and its drafter where that pays."""
    folder = open_head(Path(speculative.draft_model or ""))
    if folder is None or not folder.rates or speculative.controller != "adaptive":
        return None, None  # nothing is known of it, or nothing would stop it where it does not pay
    cost, kept = measure(), kept_levels(cost_file, folder)
    if kept is not None:
        found = prospect_of(folder.drafter, Offer(kept), cost, folder.rates)
        if found.speedup < FAR * WORTH_IT:
            return found, None
    try:
        drafter = build(folder.drafter)
        offer = time_levels(drafter, target)
    except ForerunError as error:
        log.warning("the head in %s cannot be used and is left out: %s", folder.path, error)
        return None, None
    found = prospect_of(folder.drafter, offer, cost, folder.rates)
    keep_levels(cost_file, folder, offer.seconds)
    return found, drafter if found.pays else None


def kept_levels(file: Path | None, head: HeadFolder) -> tuple[float, ...] | None:
    """What levels of this head took at an earlier start, by depth; None where that is not known."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        levels = json.loads(file.read_text())["levels"][_identity(head)] if file is not None else ()
        seconds = tuple(map(float, levels))
        if seconds and all(0.0 < each < inf for each in seconds):
            return seconds
    return None


def keep_levels(file: Path | None, head: HeadFolder, seconds: Sequence[float]) -> None:
    """Note for later starts what levels of this head take, beside t(n), with which they are forgotten."""
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):  # costs time, nothing else
        if file is not None:
            values = json.loads(file.read_text())
            file.write_text(json.dumps(values | {"levels": {_identity(head): list(seconds)}}))


def _identity(head: HeadFolder) -> str:
    changed = max([int(file.stat().st_mtime) for file in head.path.glob("*.safetensors")], default=0)
    return f"{head.path.resolve()} {head.size} {changed}"


def prospect_of(name: str, offer: Offer, cost: CostModel, rates: Sequence[float]) -> Prospect:
    """What a head should gain: `rates` has how often a level is right if those before it are, `offer` what it costs."""
    survivals = tuple(accumulate(rates, mul))
    measured = [cost.pass_seconds(1 + depth) for depth in range(len(survivals) + 1)]
    passes = tuple(accumulate(reversed(measured), min))[::-1]  # more nodes never cost less: that was a busy machine
    levels = tuple(offer.until(depth) for depth in range(1, len(survivals) + 1))
    tokens = accumulate(survivals, initial=1.0)
    seconds = zip(passes, (0.0, *levels), strict=True)
    gains = [
        written * passes[0] / (scored + drafted) for written, (scored, drafted) in zip(tokens, seconds, strict=True)
    ]
    best = max(range(1, len(gains)), key=gains.__getitem__)
    return Prospect(name, gains[best], best, passes, levels, survivals)


def time_levels(drafter: Drafter, target: Target) -> Offer:
    """The drafter's offer after a few rounds: it then knows what levels cost here.

    Rounds, and not drafts alone: a pass evicts the head's weights from the caches, and the first level reads the row of
    the round before. Without these, levels seemed to take two thirds of what they take.
    """
    length = max(2, min(_CONTEXT, target.max_length - _DEPTH - _DRAFTS - 2))
    tokens = [1 + i % (target.vocab_size - 1) for i in range(length)]
    probe = PlainSeq(-1, tokens, max_length=length + _DRAFTS + 1)
    try:
        trees, scores = target.prefill([probe], drafter.needs)
        drafter.observe([probe], trees, scores, Verdict.whole_chain(trees, [probe.tokens[-1]]))
        for token in tokens[:_DRAFTS]:
            drafter.propose([probe], [Budget(_DEPTH, _DEPTH, source="costly")])
            root = TreeBatch.chains([probe.tokens[-1:]], target.device)
            verdict, scores = (Verdict.of([[]], [token], target.device), target.score([probe], root, drafter.needs))
            target.commit([probe], root, verdict)
            drafter.observe([probe], root, scores, verdict)
            probe.tokens.append(token)
        return drafter.offer(probe)
    finally:
        drafter.forget(probe)
        target.release(probe)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
