"""What simulations share: the rounds of a run, and texts that are known and followed token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.core.types import PlainSeq, Seq, TreeBatch, Verdict
from forerun.verify.greedy import follow

Text = tuple[Sequence[int], Sequence[int]]  # prompt and answer
NEVER_COMES = -1


@dataclass(frozen=True, slots=True)
class SimulatedRound:
    """One round: sequences, the form, tokens, its seconds, and those of a plain round of the same batch."""

    batch: int
    nodes: int
    tokens: int
    seconds: float
    plain: float

    @property
    def plain_equivalent(self) -> float:
        """Seconds that plain decoding takes for the same tokens."""
        return self.tokens * self.plain / self.batch


@dataclass(slots=True)
class History:
    """The rounds of a run."""

    rounds: list[SimulatedRound] = field(default_factory=list)

    def speed(self, first: int = 0, last: int | None = None) -> float:
        """How many times as fast as plain decoding."""
        some = self.rounds[first:last]
        return sum(one.plain_equivalent for one in some) / sum(one.seconds for one in some)

    def worst_window(self, length: int = 200) -> float:
        """The lowest speed over any so many rounds in a row."""
        starts = range(max(1, len(self.rounds) - length + 1))
        return min(self.speed(start, start + length) for start in starts)


class KnownTexts:
    """Texts that are written one behind the other, and what a target says along them."""

    def __init__(self, texts: Sequence[Text] = ()) -> None:
        self.texts, self.started = texts, 0
        self.whole: dict[int, list[int]] = {}

    def start(self, text: Text | None = None, skip: int = 0) -> PlainSeq:
        """A sequence at the start of a text, or so many tokens further; of the next text where none is named."""
        prompt, answer = self.texts[self.started % len(self.texts)] if text is None else text
        whole = [*prompt, *answer]
        seq = PlainSeq(self.started, whole[: len(prompt) + skip], len(prompt), max_length=len(whole))
        self.whole[seq.id], self.started = whole, self.started + 1
        return seq

    def end(self, seq: Seq) -> None:
        del self.whole[seq.id]

    def after(self, seq: Seq, count: int) -> list[int]:
        """What the text says next: so many tokens, or all that are left."""
        return self.whole[seq.id][len(seq.tokens) : len(seq.tokens) + count]

    def says(self, seq: Seq) -> Callable[[int, int], int]:
        """The token behind a node, by its depth, as long as the nodes above it are right."""
        whole, at = self.whole[seq.id], len(seq.tokens)
        return lambda node, depth: whole[at + depth] if at + depth < len(whole) else NEVER_COMES

    def verdict(self, seqs: Sequence[Seq], trees: TreeBatch) -> Verdict:
        """The greedy one."""
        tokens, paths, bonus = trees.to_host()[0], list[list[int]](), list[int]()
        for seq, first, shape in zip(seqs, trees.starts, trees.topology(), strict=False):
            path, token = follow(tokens[first : first + len(shape)], shape.children, self.says(seq))
            paths.append(path)
            bonus.append(token)
        return Verdict.of(paths, bonus, "cpu")
