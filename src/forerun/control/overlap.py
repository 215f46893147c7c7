"""Overlap: is the next round launched before the last one is read, or is that read first, for a look-up or for an end?

A round that drafts on the device follows the last one at no cost. A look-up needs the last tokens, so that the round
before it must be read first, and the round behind it too. While a round is under way the host looks up what follows the
tokens that it knows. The match is expected to continue through the round under way as likely as its counts say.
Only if the tokens that it then promises are worth more than what the head would write in the same time, and in the gap,
is the round under way read first. Where there is no head, the same holds of plain rounds, which overlap too.

What look-ups can lose is bounded (`Allowance`): against plain decoding 1.5% over any 200 rounds, and what look-ups
have gained just before, up to 2.2 rounds; against the head alone 3%, as long as first matches are trusted as little
as they are. With higher first rates a text made to mislead them lost up to 13%, so these rates are part of the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from forerun.control.cost import MEMORY, Factor, presumed_gap
from forerun.control.forms import FormChooser, Promise
from forerun.control.lookups import FEW
from forerun.control.prices import BESIDE_HEAD, PRIOR_CHAIN, Allowance
from forerun.core.types import LOOKUP, PLAIN, Form, Offer, Seq

HALVINGS = 12  # of the rates between 0 and 1 while one is searched: to 1/4096
LEAST_PROMISED = 0.15  # tokens of a sequence behind the round under way, for its matches to be weighed at all
LEAST_GAIN_ON_HEAD = 1.0  # tokens that reading a round first must gain on a head; on plain rounds any gain will do
BETTER_THAN_HEAD = 1.3  # times the head's tokens per second, for look-ups in its place: matches are overrated

Chains = Callable[[Sequence[Offer], int], tuple[list[int], float]]  # offers, batch -> depths, tokens accepted


class _Matches(NamedTuple):
    """What look-ups promise behind the round under way."""

    holds: float  # how likely one of them goes on so far
    nodes: int
    accepted: float  # tokens of the batch, if they do


class Overlap:
    """Weighs look-ups against the form that the device drafts."""

    def __init__(self, chains: Chains) -> None:
        self.chains = chains
        self.allowance = Allowance(**BESIDE_HEAD)  # in rounds of the head alone
        # what a head's trees accept where look-ups promise more, by what was expected
        self._copied = Factor(PRIOR_CHAIN)
        self._promised = 0.0  # tokens by the look-ups of the round under way

    def note(self, offers: Sequence[Offer]) -> None:
        """What is offered for the coming round, or, asked meanwhile, for the one under way."""
        self._promised = sum([sum(offer.free) for offer in offers])

    def takes(self, chooser: FormChooser, head: Promise, free: Promise, batch: int) -> bool:
        """Is a round of look-ups better than the head's, where the last one was read in any case, and covered?"""
        better = BETTER_THAN_HEAD if head.form.nodes else 1.0
        if free.rate <= better * self._head_tokens(head, batch) / head.seconds:
            _forgive(chooser, batch)
            return False
        gain = free.tokens - self._head_tokens(head, batch) / head.seconds * free.seconds
        return self._covers(chooser, head, free, batch, gain / batch)

    def waits(self, chooser: FormChooser, head: Promise, offers: Sequence[Offer]) -> bool:
        """Should the next round wait until the one under way is read?"""
        batch = len(offers)
        self.note(offers)
        if not (head.form.nodes or chooser.overhead.follows(PLAIN, batch)):
            return False  # only an overlapping plain round shows what look-ups are compared with
        matches = self._behind(offers, head.tokens / batch)
        other = 0.0 if head.form.nodes else sum([offer.otherwise for offer in offers])
        if not matches.nodes and other <= LEAST_PROMISED * batch:
            return False
        free = lookup_promise(chooser, head, matches.nodes, batch, matches.accepted)
        gap, rate = _gap(chooser, head, batch), self._head_tokens(head, batch) / head.seconds
        gain = matches.holds * (free.tokens - rate * free.seconds) - rate * gap
        gain += (1.0 - matches.holds) * max(0.0, batch + other - rate * free.seconds)
        if gain <= (LEAST_GAIN_ON_HEAD * batch if head.form.nodes else 0.0):
            _forgive(chooser, batch)
            return False
        lost = gap / head.seconds
        if not self._covers(chooser, head, free, batch, gain / batch, lost):
            return False
        if head.form.nodes:
            self.allowance.book(lost)
        return True

    def _covers(
        self, chooser: FormChooser, head: Promise, free: Promise, batch: int, gain: float, lost: float = 0.0
    ) -> bool:
        """If nothing of the look-ups is accepted, may the head still draft, and is not too much lost against it?"""
        both = (free.seconds + head.seconds) / chooser.plain_seconds(batch) - 2.0
        worst = free.seconds / head.seconds - batch / head.tokens
        if not head.form.nodes:
            return chooser.allowance.covers_stake(lost + worst, gain)
        return chooser.allowance.covers(both) and self.allowance.covers(lost + worst)

    def _behind(self, offers: Sequence[Offer], written: float) -> _Matches:
        """The same matches `written` tokens further on, given that these tokens are right."""
        more = round(written)
        if sum([sum(offer.free[more:]) for offer in offers]) <= LEAST_PROMISED * len(offers):  # the usual case
            return _Matches(0.0, 0, 0.0)
        holds = 1.0 - prod([1.0 - offer.free[more - 1] for offer in offers if len(offer.free) > more])
        later = [Offer(free=tuple([one / holds for one in offer.free[more:]])) for offer in offers]
        depths, accepted = self.chains(later, len(offers))
        return _Matches(holds, sum(depths), accepted)

    def _head_tokens(self, head: Promise, batch: int) -> float:
        """Tokens of the head's round where look-ups promise more than it: copied text is easier for it too."""
        return batch + (head.tokens - batch) * max(1.0, self._copied.value())

    def observe(self, head: Promise, taken: Form, seconds: float, accepted: int, batch: int) -> None:
        """A round of the head's form, or of look-ups in its place: its seconds, and tokens accepted."""
        if taken.kind == "lookup":
            if head.form.nodes:
                self.allowance.book(seconds / head.seconds - (batch + accepted) / self._head_tokens(head, batch))
            return
        self.allowance.book(0.0)
        expected = head.tokens - batch
        if batch <= FEW and self._promised > expected > 0.0:
            self._copied.add(accepted, expected, MEMORY)
        self._promised = 0.0


def lookup_promise(chooser: FormChooser, head: Promise, nodes: int, batch: int, accepted: float) -> Promise:
    """A round that drafts `nodes` nodes from look-ups. The round before it is read first, and so is this one."""
    free = chooser.promise_of(LOOKUP, batch + nodes, batch, batch + accepted)
    if chooser.overhead.is_known(LOOKUP, batch) or not chooser.overhead.follows(PLAIN, batch):
        return free
    return free._replace(seconds=free.seconds + _gap(chooser, head, batch))


def _forgive(chooser: FormChooser, batch: int) -> None:
    """Look-ups that are not drafted for what their rounds once took: in time they are tried again."""
    overhead = chooser.overhead
    gap = chooser.gap(batch) if overhead.follows(PLAIN, batch) else 0.0
    overhead.lower(LOOKUP, batch, overhead.seconds(PLAIN, batch, 0.0) + gap)
    overhead.note_avoided_gap(batch)


def _gap(chooser: FormChooser, head: Promise, batch: int) -> float:
    """Seconds that the next round takes longer if this one is read first."""
    return chooser.gap(batch) or presumed_gap(head.seconds)


def within(offer: Offer, seq: Seq) -> Offer:
    """The same without what would lie behind the end of the sequence."""
    room = max(0, seq.max_length - len(seq.tokens) - 1)
    return offer if len(offer.free) <= room else replace(offer, free=offer.free[:room])


def ends(chooser: FormChooser, head: Promise, seqs: Sequence[Seq]) -> bool:
    """Does the round under way end all of these so likely that another, dropped then, costs more than the gap?"""
    likely, batch = 1.0, len(seqs)
    for seq in seqs:
        more = seq.max_length - len(seq.tokens) - 1  # tokens that must be accepted for it to end
        if more > head.form.depth:
            return False
        likely *= level_rate(head.tokens / batch - 1.0, head.form.depth) ** more
    return likely * head.seconds > (1.0 - likely) * _gap(chooser, head, batch)


def level_rate(accepted: float, depth: int) -> float:
    """The acceptance rate per level of a tree of `depth` levels, of which `accepted` tokens are accepted on average."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        below = sum([middle**i for i in range(1, depth + 1)]) < accepted
        low, high = (middle, high) if below else (low, middle)
    return low
