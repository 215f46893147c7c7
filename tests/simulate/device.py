"""A clock that is counted, and answers that are drawn: what simulations in tests give the lab's simulated device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from forerun.core.types import Seq, TreeBatch, TreeForm, Verdict
from forerun.drafters.device.plan import form_of
from lab.simulate.device import walked
from lab.simulate.speeds import draw_accepted

WORDS = 1009  # of the vocabulary of drawn texts


@dataclass(slots=True)
class SimulatedClock:
    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds

    def spend(self, seconds: float) -> None:
        self.seconds += seconds

    def wait_until(self, when: float) -> None:
        self.seconds = max(self.seconds, when)


@dataclass(slots=True)
class DrawnAnswers:
    """Some word at every place, and how many tokens of a grown tree are accepted is drawn."""

    rate: float = 0.7  # how likely the head's likeliest token is right
    vocab_size: int = WORDS

    def start(self, seq: Seq) -> None:
        """Nothing is known of a text."""

    def forget(self, seq: Seq) -> None:
        """Nothing was known."""

    def verdict(self, seqs: Sequence[Seq], trees: TreeBatch, starting: Collection[int]) -> Verdict:
        form = trees.form
        if form is None and not trees.is_plain():
            return walked(seqs, trees, self.word)
        if form is None:
            return Verdict.of([()] * len(seqs), [self.word(seq, 0) for seq in seqs], trees.device)
        parents = [-1, *range(form.depth), *[0] * (form.nodes - form.depth - 1)]
        tokens, paths, bonus = list[int](), list[range](), list[int]()
        for seq in seqs:
            count = 0 if seq.id in starting else self.accepted(seq, form)
            right = [self.word(seq, depth) for depth in range(count)]
            tokens += [seq.tokens[-1], *right, *[0] * (form.nodes - 1 - count)]
            paths.append(range(1, count + 1))
            bonus.append(self.word(seq, count))
        trees.note_host(tokens, parents * len(seqs))
        return Verdict.of(paths, bonus, trees.device)

    def word(self, seq: Seq, depth: int) -> int:
        return 1 + (seq.id * 7919 + (len(seq.tokens) + depth) * 104729) % (WORDS - 1)

    def accepted(self, seq: Seq, form: TreeForm) -> int:
        draw = lambda level: _chance(seq.id, len(seq.tokens) + level)  # noqa: E731
        return draw_accepted(form_of(form), self.rate, form.depth, draw)


def _chance(seq_id: int, position: int) -> float:
    """A number below 1 for every position of every text, always the same."""
    mixed = (seq_id * 1_000_003 + position * 7_368_787 + 12_345) & 0xFFFFFFFF
    for _ in range(2):
        mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)) / 2**32
