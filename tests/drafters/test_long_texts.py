"""Look-ups in texts of 128,000 tokens: the same matches, and as little work a round as in short texts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from forerun.core.types import Budget
from forerun.drafters.lookup import ngram
from forerun.drafters.lookup.ngram import TAIL, NgramDrafter, Text
from forerun.testing import FakeSeq

WORDS = 3000
LONG = 128_000


def words(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(WORDS), k=count)


class Counted(list[int]):
    """Counts the tokens that are read."""

    read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.read += len(found) if isinstance(key, slice) else 1
        return found


def work_of(length: int, width: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Of 200 rounds behind a text in which runs repeat: tokens read, characters searched, texts sorted."""
    tokens = words(1, length)
    for place in range(100, length - 100, 90):
        tokens[place : place + 6] = tokens[40:46]  # a frequent run
    drafter, seq = NgramDrafter(), FakeSeq(0, tokens, max_length=1 << 20)
    drafter.offer(seq)
    text, sorts, searched = drafter._sequences[0].text, list[int](), list[int]()
    counted = text.tokens = Counted(text.tokens)
    sort, find = Text._sort, Text.last_before
    monkeypatch.setattr(Text, "_sort", lambda self: (sorts.append(1), sort(self)))
    monkeypatch.setattr(
        Text, "last_before", lambda self, *asked: (searched.append(len(self.tail)), find(self, *asked))[1]
    )
    for i in range(200):
        seq.tokens.append(tokens[40 + i % 6] if i % 8 else words(i, 1)[0])
        drafter.offer(seq)
        drafter.propose([seq], [Budget(16, 16, width)])
    monkeypatch.undo()
    assert type(text.tokens) is Counted
    return counted.read, sum(searched), len(sorts)


@pytest.mark.parametrize("width", [1, 4])
def test_a_round_does_no_more_work_in_a_long_text(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read, searched, sorts = work_of(LONG, width, monkeypatch)
    less, shorter, _ = work_of(3 * TAIL, width, monkeypatch)
    assert read < 1.2 * less
    assert searched < 1.2 * shorter
    assert sorts <= 1  # once in TAIL tokens
    monkeypatch.setattr(ngram, "TAIL", 1 << 20)  # the negative control: all of the text is a string
    assert work_of(LONG, width, monkeypatch)[1] > 5 * shorter


def test_matches_far_back_are_found_and_go_on() -> None:
    tokens = words(2, LONG)
    drafter, seq = NgramDrafter(), FakeSeq(0, [*tokens, *tokens[500:503]], max_length=1 << 20)
    drafter.offer(seq)
    assert all(match < 3 for match, _ in drafter._sequences[0].found)  # three: in the last few thousand alone
    for place in range(503, 540):
        seq.tokens.append(tokens[place])
        assert drafter.offer(seq).free
        match, end = drafter._sequences[0].found[0]
        assert (match, end) == (min(16, place - 499), place + 1)
        assert [token for token, _ in drafter.chain(seq, 4)] == tokens[place + 1 : place + 5]


@pytest.mark.parametrize("seed", range(4))
def test_long_texts_have_the_matches_that_a_whole_search_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four tokens or more; against a drafter that keeps all of the text as a string."""
    rng, few = random.Random(seed), words(seed, 60)
    tokens = list[int]()
    for i in range(120):
        at = rng.randrange(50)
        tokens += [*few[at : at + rng.randrange(3, 10)], *words(1000 * seed + i, 3)]
    found = list[list[Any]]()
    for tail in (1 << 20, 64):
        monkeypatch.setattr(ngram, "TAIL", tail)
        drafter, seq = NgramDrafter(), FakeSeq(0, tokens[:200], max_length=1 << 20)
        own = list[Any]()
        for token in tokens[200:]:
            drafter.offer(seq)
            state = drafter._sequences[0]
            own.append(state.found[0] if state.found and state.found[0][0] >= 4 else None)
            seq.tokens.append(token)
        found.append(own)
    whole, cut = found
    assert sum(one is not None for one in whole) > 50
    assert cut == whole


def test_a_text_that_is_cut_is_as_if_it_had_never_been_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "TAIL", 16)
    tokens = words(3, 90) + words(3, 8)
    for length in (98, 94, 60, 33, 5, 0):
        text = Text(tokens)
        text.extend(words(4, 3))
        text.cut(length)
        assert text.tokens == tokens[:length]
        assert text.tail == "".join(map(chr, tokens[len(tokens[:length]) - len(text.tail) : length]))
        text.extend(tokens[length:])
        again = Text(tokens)
        assert [end for end in text.far_ends(9) if end <= 82] == again.far_ends(9) == [8]
