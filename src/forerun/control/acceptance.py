"""Acceptance of a menu's forms: what is expected of each by how easy the text is, and by sequence.

A drafter's files say how often its tokens are accepted on average, level by level. A text is easier or harder than
that, and then deep trees and shallow ones, chains and trees do not gain by the same factor: where nearly all is
accepted a tree of ten levels brings half as much again as one of six, elsewhere hardly more. So rounds of any form are
read as evidence of one number, by how much the odds of every level differ from those in the files, and from that
follows what each form brings. On top comes a factor per sequence, within bounds. There is none per form: forms are left
in bad stretches, so that each that was left would keep a bad name, and whichever runs would stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from forerun.offers import Form, Menu

ODDS = tuple(2.0 ** (step / 2) for step in range(-14, 21))  # of a level, times those in the files
RECENT = 0.7  # memory of the text's odds, per round: short, since loops and copies start and end at once
USUAL = 0.98  # and of those that are usual
OWN = 0.95  # memory of a sequence's factor, per round
FEW = 2.0  # expected tokens that a prior counts for


@dataclass(slots=True)
class Factor:
    """Observed over expected, with a memory, starting from 1."""

    weight: float  # expected tokens that the start counts for
    observed: float = 0.0
    expected: float = 0.0

    def add(self, observed: float, expected: float, memory: float) -> None:
        self.observed = self.observed * memory + observed
        self.expected = self.expected * memory + expected

    def value(self, start: float = 1.0) -> float:
        return (self.observed + self.weight * start) / (self.expected + self.weight)


class Ease:
    """How easy the text is: the odds at which as many tokens are expected as were accepted in the last few rounds.

    A few rounds may have little to show; they start from what was usual over many, and that from the files.
    """

    def __init__(self, curves: Iterable[Sequence[float]]) -> None:
        """`curves` are what each form is expected to bring at each of ODDS."""
        at_one = ODDS.index(1.0)
        shares = [[tokens / curve[at_one] for tokens in curve] for curve in curves if curve[at_one]]
        shares = shares or [[1.0] * len(ODDS)]
        self._mean = [sum(column) / len(shares) for column in zip(*shares, strict=True)]  # over all forms
        self._recent, self._usual = _Evidence(RECENT), _Evidence(USUAL)
        self.place = float(at_one)  # among ODDS

    def add(self, observed: float, curve: Sequence[float], count: float) -> None:
        """So many tokens were accepted of `count` drafts of which `curve` was expected."""
        self._usual.add(observed, curve, count)
        self._recent.add(observed, curve, count)
        usual = self._usual.place(self._mean, 1.0)
        self.place = self._recent.place(self._mean, read_off(self._mean, usual))


class _Evidence:
    """Tokens accepted, and those expected at each of ODDS, with a memory."""

    def __init__(self, memory: float) -> None:
        self.memory, self.observed, self.expected = memory, 0.0, [0.0] * len(ODDS)

    def add(self, observed: float, curve: Sequence[float], count: float) -> None:
        memory = self.memory
        self.observed = self.observed * memory + observed
        self.expected = [
            before * memory + count * tokens for before, tokens in zip(self.expected, curve, strict=True)
        ]

    def place(self, curve: Sequence[float], observed: float) -> float:
        """Where among ODDS as much is expected as was observed; FEW drafts like `curve` come on top of both."""
        seen, below = self.observed + FEW * observed, 0.0
        for i, (expected, one) in enumerate(zip(self.expected, curve, strict=True)):
            above = expected + FEW * one
            if above >= seen:
                return i - (above - seen) / (above - below) if i and above > below else float(i)
            below = above
        return float(len(ODDS) - 1)


def read_off(curve: Sequence[float], place: float) -> float:
    """The value of a curve between two of its places."""
    low = int(place)
    share = place - low
    return curve[low] * (1.0 - share) + curve[low + 1] * share if share else curve[low]


@dataclass(slots=True)
class Acceptance:
    """What is accepted of each form, as rounds have shown."""

    curves: dict[Form, tuple[float, ...]]  # tokens by ODDS
    ease: Ease = field(init=False)
    _sequences: dict[int, tuple[float, float]] = field(default_factory=dict)  # observed, expected
    _own: dict[int, float] = field(default_factory=dict)  # a sequence's factor

    def __post_init__(self) -> None:
        self.ease = Ease(curve for form, curve in self.curves.items() if form.nodes)

    @classmethod
    def of_menu(cls, menu: Menu, forms: Iterable[Form]) -> Acceptance:
        return cls({form: tuple([menu.expected(form, odds) for odds in ODDS]) for form in forms})

    def expected(self, form: Form) -> float:
        """Tokens of one average sequence."""
        return min(read_off(self.curves[form], self.ease.place), 0.98 * form.depth)

    def weight(self, ids: Sequence[int]) -> float:
        """How many average sequences these are together."""
        own = self._own
        return sum([own.get(seq_id, 1.0) for seq_id in ids])

    def observe(self, form: Form, ids: Sequence[int], accepted: Sequence[int]) -> None:
        """A round of this form: tokens accepted of each sequence."""
        batch, total, each = len(ids), sum(accepted), self.expected(form)
        self.ease.add(total, self.curves[form], batch)
        if batch == 1:
            return  # the common odds are its own
        counts, own = self._sequences, self._own
        for seq_id, tokens in zip(ids, accepted, strict=True):  # plain numbers: once per sequence and round
            seen, hoped = counts.get(seq_id, (FEW, FEW))
            seen, hoped = seen * OWN + tokens, hoped * OWN + each
            counts[seq_id] = seen, hoped
            own[seq_id] = min(max((seen + FEW) / (hoped + FEW), 0.25), 2.0)

    def forget(self, seq_id: int) -> None:
        self._sequences.pop(seq_id, None)
        self._own.pop(seq_id, None)
