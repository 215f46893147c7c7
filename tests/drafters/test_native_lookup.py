"""Look-ups of the native library are those of Python, to the last bit."""

from __future__ import annotations

import gc
import random
import weakref
from array import array

import pytest
import torch

from forerun.core.types import Budget, Scores, Verdict
from forerun.drafters.base import AT_HAND
from forerun.drafters.lookup import suffix_match as places
from forerun.drafters.lookup.suffix import SuffixDrafter
from forerun.drafters.lookup.suffix_index import HitRates
from forerun.drafters.lookup.suffix_match import History, NativeLookup, PlaceLookup
from forerun.drafters.lookup.suffix_table import Fill, Successors
from forerun.models.native import library as native_library
from forerun.testing import FakeSeq
from tests.drafters.rounds import as_lists

needs_library = pytest.mark.skipif(not native_library.available(), reason="no native library")
STOPS = frozenset({3, 70})


def random_rates(rng: random.Random) -> HitRates:
    rates = HitRates(16, 1.0)
    for i in range(len(rates.tries)):
        rates.tries[i], rates.hits[i] = rng.uniform(1.0, 30.0), rng.uniform(0.0, 1.0)
        rates.hits[i] *= rates.tries[i]
    return rates


def random_table(rng: random.Random, letters: int) -> Successors:
    shares = torch.tensor([sorted((rng.random() for _ in range(4)), reverse=True) for _ in range(letters)])
    tokens = torch.tensor([rng.sample(range(max(4, letters)), 4) for _ in range(letters)])
    return Successors(tokens % letters if letters < 4 else tokens, shares / 4)


def pair(rng: random.Random, shortest: int, fill: Fill | None) -> tuple[NativeLookup, PlaceLookup]:
    own, shared = ([random_rates(rng) for _ in range(3)] for _ in range(2))
    return NativeLookup(own, shared, shortest, STOPS, fill), PlaceLookup(own, shared, shortest, None, None)


@needs_library
@pytest.mark.parametrize("shortest", [1, 3])
@pytest.mark.parametrize("table", [None, "whole", "half"])
@pytest.mark.parametrize("letters", [1, 2, 5, 60, 2000])
def test_both_find_the_same(letters: int, table: str | None, shortest: int) -> None:
    """With a table of every token, or of the first ones alone."""
    rng = random.Random(letters)
    known = random_table(rng, letters)
    if table == "half":
        known = Successors(known.tokens[: (letters + 1) // 2], known.shares[: (letters + 1) // 2])
    fill = None if table is None else Fill(known)
    lookups, seq, grown = pair(rng, shortest, fill), FakeSeq(0, [], stop_ids=STOPS), 0
    for _ in range(150):
        fresh = [rng.randrange(letters) for _ in range(rng.randint(1, 3))]
        if len(seq.tokens) > 30 and rng.random() < 0.5:  # copied
            at = rng.randrange(len(seq.tokens) - 20)
            fresh = seq.tokens[at : at + rng.randint(3, 20)]
        seq.tokens += fresh
        most = rng.choice([places.ALWAYS, AT_HAND])
        for one in lookups:
            one.read(seq, fresh, most)
        native, python = lookups
        assert native.match() == python.match()
        assert list(native.steps(99)) == list(python.steps(99))
        assert list(native.survivals()) == list(python.survivals())
        assert native.tokens(5) == python.tokens(5)
        if fill is not None:
            fill.factors = [rng.random(), rng.random()]
        size = rng.choice([(24, 24, 8), (60, 24, 10), (5, 5, 1), (200, 40, 3), (0, 0, 1), (7, 1, 8)])
        steep = tuple([rng.choice([0.0, 0.02]) * n for n in range(rng.choice([10, 61]))])
        price = rng.choice([None, steep])
        trees = [one.grow(seq, fill, size, 0.01, price) for one in lookups]
        assert trees[0] == trees[1]
        assert list(native.matched) == list(python.matched)
        grown += len(trees[0].tokens) > 3
    assert grown > 25, "the texts have something to compare"


@needs_library
def test_a_difference_would_be_seen() -> None:
    """The control: with one rate changed on one side the chains differ."""
    rng = random.Random(5)
    native, _ = pair(rng, 1, None)
    python = PlaceLookup([random_rates(rng) for _ in range(3)], [random_rates(rng) for _ in range(3)], 1, None, None)
    seq = FakeSeq(0, [1, 2, 5, 1, 2, 5, 1, 2])
    for one in (native, python):
        one.read(seq, seq.tokens, AT_HAND)
    assert list(native.steps(9)) != list(python.steps(9))


@needs_library
@pytest.mark.parametrize("with_table", [False, True])
def test_drafts_do_not_depend_on_the_library(with_table: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is learnt while writing is the same too."""
    rng = random.Random(8)
    text = [rng.randrange(12) for _ in range(120)]
    text += text[20:80] + [rng.randrange(12) for _ in range(40)] + text[90:150]
    table = random_table(rng, 12) if with_table else None

    def drafted() -> list[object]:
        drafter, found = SuffixDrafter(successors=table), list[object]()
        seq = FakeSeq(0, text[:10], stop_ids=frozenset({11}))
        for i, token in enumerate(text[10:]):
            price = tuple([0.02 * (i % 3) * n for n in range(61)])
            found.append(drafter.offer(seq))
            trees = drafter.propose([seq], [Budget(60, 20, 1 + 9 * (i % 2), price)])
            found += as_lists(trees)
            verdict = Verdict.of([[1] if trees.nodes > 1 and trees.to_host()[0][1] == token else []], [token], "cpu")
            drafter.observe([seq], trees, Scores(None), verdict)
            seq.tokens.append(token)
        return found

    native = drafted()
    monkeypatch.setattr(native_library, "available", lambda: False)
    assert drafted() == native


@needs_library
def test_other_texts_are_searched_in_python() -> None:
    drafter = SuffixDrafter(history=History(50))
    drafter.offer(FakeSeq(0, [1, 2, 1]))
    assert isinstance(drafter._sequences[0].lookup, PlaceLookup)
    assert drafter.needs.match_length is None
    alone = SuffixDrafter()
    alone.offer(FakeSeq(0, [1, 2, 1]))
    assert isinstance(alone._sequences[0].lookup, NativeLookup)


@needs_library
def test_a_text_is_freed_with_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = list[int]()
    library = native_library.library()

    class Counting:
        def __getattr__(self, name: str) -> object:
            return freed.append if name == "fr_suffix_free" else getattr(library, name)

    monkeypatch.setattr(native_library, "library", Counting)
    drafter, seq = SuffixDrafter(), FakeSeq(0, [1, 2, 1])
    drafter.offer(seq)
    held = weakref.ref(drafter._sequences[0].lookup)
    drafter.forget(seq)
    gc.collect()
    assert held() is None
    assert len(freed) == 1
    library.fr_suffix_free(freed[0])


@needs_library
def test_large_texts_and_token_ids() -> None:
    rng = random.Random(1)
    text = [rng.choice([0, 1, 2**31 - 1, 151_935]) for _ in range(3000)]
    native, python = pair(rng, 1, None)
    seq = FakeSeq(0, text)
    for one in (native, python):
        one.read(seq, text, AT_HAND)
    assert list(native.steps(24)) == list(python.steps(24))
    size = (256, 24, 10)
    assert native.grow(seq, None, size, 0.0, None) == python.grow(seq, None, size, 0.0, None)


def test_rates_lie_where_the_library_reads_them() -> None:
    rates = HitRates(16)
    where = rates.hits.buffer_info()
    for _ in range(100):
        rates.count(0, 40, True, 0.9)
    assert isinstance(rates.hits, array)
    assert rates.hits.buffer_info() == where
