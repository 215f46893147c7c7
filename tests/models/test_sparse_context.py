"""SparseContext: which pages draft passes read, and what a pass over them is."""

from __future__ import annotations

import random

import pytest

from forerun.core.tree import chain_of
from forerun.models.attention import SINKS, Span, SparseContext, Text
from forerun.models.pages import PAGE
from forerun.testing import FakeSeq

WANTED = 6  # pages


def seq_of(tokens: list[int]) -> FakeSeq:
    return FakeSeq(1, tokens, max_length=100_000)


def span_of(length: int, nodes: int = 1) -> Span:
    pages = range(1000, 1000 + length // PAGE + 2)
    return Span(0, nodes, tuple(pages), length, chain_of(nodes))


@pytest.mark.parametrize("length", [1, PAGE, WANTED * PAGE - 1])
def test_a_context_that_has_no_more_pages_is_read_whole(length: int) -> None:
    context, span = SparseContext(WANTED * PAGE), span_of(length)
    assert context.pages == WANTED
    assert context.narrow(seq_of([0] * (length + 1)), length, span) is span


@pytest.mark.parametrize("length", [WANTED * PAGE, 40 * PAGE, 40 * PAGE + 17, 41 * PAGE - 1])
def test_a_longer_one_is_read_from_a_few_pages_and_written_where_it_was(length: int) -> None:
    context, span = SparseContext(WANTED * PAGE), span_of(length, 5)
    found = context.narrow(seq_of([0] * (length + 1)), length, span)
    assert found.slots == span.slots
    assert found.length + found.skipped == length
    assert found.skipped % PAGE == 0
    kept = [page - 1000 for page in found.pages]
    assert kept == sorted({*kept})
    assert kept[:SINKS] == [*range(SINKS)]
    inside = [page for page in kept if page * PAGE < length]
    assert WANTED - 1 <= len(inside) <= WANTED
    assert kept[-1] == len(span.pages) - 1


def test_pages_stay_until_something_is_committed() -> None:
    """All passes of one draft read the same context, and what they drafted themselves."""
    length, rng = 30 * PAGE + 60, random.Random(1)
    context, seq = SparseContext(WANTED * PAGE), seq_of([rng.randrange(50) for _ in range(length + 1)])
    first = context.narrow(seq, length, span_of(length))
    seq.tokens += [1, 2, 3, 4, 5, 6]
    behind = context.narrow(seq, length, Span(0, 1, span_of(length).pages, length + 6, chain_of(1)))
    assert behind.pages == first.pages
    assert behind.length == first.length + 6
    seq.tokens += [7] * 2 * PAGE
    later = context.narrow(seq, length + 2 * PAGE, span_of(length + 2 * PAGE))
    assert later.skipped == first.skipped + 2 * PAGE


def test_pages_behind_the_longest_matches_are_found_first() -> None:
    rng = random.Random(2)
    tokens = [rng.randrange(100, 1000) for _ in range(40 * PAGE)]
    tokens[7 * PAGE - 4 : 7 * PAGE] = [1, 2, 3, 4]  # what followed is on page 7
    tokens[20 * PAGE + 10 : 20 * PAGE + 12] = [3, 4]
    tokens[30 * PAGE + 3] = 4
    tokens[-4:] = [1, 2, 3, 4]
    text = Text()
    text.read(tokens, len(tokens) - 300)
    text.read(tokens, len(tokens))
    assert text.pages_alike(1, 35, 3) == [7, 20, 30]
    assert text.pages_alike(1, 35, 5) == [7, 20, 30, 34, 33]
    assert text.pages_alike(8, 35, 1) == [20]


def test_a_sequence_that_ends_leaves_nothing() -> None:
    context, length = SparseContext(WANTED * PAGE), 30 * PAGE
    context.narrow(seq_of([0] * (length + 1)), length, span_of(length))
    context.forget(1)
    context.forget(1)
    assert not context._texts
    assert not context._chosen
