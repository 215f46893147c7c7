"""The plan of a pass: everything a rank needs to compute its part of it, as one list of integers.

Rank 0 alone knows requests, pages and verdicts. What the others need of them comes with each pass: the slots that were
copied since the last one (accepted paths, pages that became a sequence's own), then tokens, positions, ancestors and
pages of the rows. So there is one message a pass, and nothing to answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from forerun.core.tree import chain_of, topology_of
from forerun.models.attention import Span
from forerun.models.pages import pages_for

Copies = Sequence[tuple[int, int]]  # slots, as (from, to), read before any of them is written


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One pass, and what comes before it."""

    slots: int  # that the KV cache must have by now
    copies: Sequence[Copies]  # in order
    tokens: Sequence[int]
    spans: Sequence[Span]
    limits: Sequence[int]  # per span, how long its sequence may become: ropes may depend on it
    scored: int  # of the first rows the logits are computed
    ends_with_keys: bool  # of the last layer: nobody reads what leaves it

    def to_numbers(self) -> list[int]:
        numbers = [self.slots, self.scored, int(self.ends_with_keys), len(self.copies)]
        for copies in self.copies:
            numbers.append(len(copies))
            numbers += [slot for pair in copies for slot in pair]
        numbers += [len(self.tokens), *self.tokens, len(self.spans)]
        for span, limit in zip(self.spans, self.limits, strict=True):
            pages = span.pages[: pages_for(span.length + span.nodes)]
            numbers += [span.nodes, span.length, limit, len(pages), *pages, int(span.shape.is_chain)]
            if not span.shape.is_chain:
                numbers += span.shape.parents
        return numbers

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> PassPlan:
        """What `to_numbers` wrote."""
        rest = iter(numbers)
        slots, scored, ends = _take(rest, 3)
        copies = [_pairs(_take(rest, 2 * next(rest))) for _ in range(next(rest))]
        tokens = _take(rest, next(rest))
        spans, limits, first = list[Span](), list[int](), 0
        for _ in range(next(rest)):
            nodes, length, limit = _take(rest, 3)
            pages = _take(rest, next(rest))
            shape = chain_of(nodes) if next(rest) else topology_of(tuple(_take(rest, nodes)))
            spans.append(Span(first, first + nodes, pages, length, shape))
            limits.append(limit)
            first += nodes
        return cls(slots, copies, tokens, spans, limits, scored, bool(ends))


def _take(numbers: Iterator[int], count: int) -> list[int]:
    return list(islice(numbers, count))


def _pairs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))
