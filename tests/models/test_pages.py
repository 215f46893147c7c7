"""The page pool: who holds which page, what is found again, and what goes first when pages run out."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.models import pages as pages_module
from forerun.models.pages import PAGE, Content, PagePool, digest_of, start_digest
from forerun.testing.faults import Fault, count_points

START = start_digest("")
TEXT = list(range(1000, 1000 + 5 * PAGE))


def name_all(
    pool: PagePool, owner: int, tokens: list[int], start: bytes = START, layers: frozenset[int] = frozenset()
) -> None:
    """Name the pages of an owner after these tokens, the last of them perhaps not full."""
    digest = start
    for i, page in enumerate(pool.held[owner]):
        some = tuple(tokens[i * PAGE : (i + 1) * PAGE])
        if some:
            pool.name(page, Content(digest, some, layers))
            digest = digest_of(digest, some)


def hold(pool: PagePool, owner: int, tokens: list[int], start: bytes = START) -> None:
    assert pool.take(owner, -(-len(tokens) // PAGE))
    name_all(pool, owner, tokens, start)


def check(pool: PagePool) -> None:
    """Every page is held, cached or free; the derived numbers are those of the truth."""
    holders = dict[int, int]()
    for pages in pool.held.values():
        assert len(set(pages)) == len(pages)
        for page in pages:
            holders[page] = holders.get(page, 0) + 1
    assert all(0 <= page < pool.size for page in [*holders, *pool.contents])
    assert all(count == 1 or page in pool.contents for page, count in holders.items()), "shared without a name"
    cached = [page for page in pool.contents if page not in holders]
    assert pool.available == pool.size - len(holders)
    assert (pool.used, pool.cached) == (len(holders), len(cached))
    assert all(pool.holders(page) == count for page, count in holders.items())


steps = st.lists(st.tuples(st.sampled_from("tsrnuxg"), st.integers(0, 4), st.integers(0, 7)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 9), steps)
def test_no_page_is_lost_and_none_has_two_owners_by_mistake(size: int, moves: list[tuple[str, int, int]]) -> None:
    pool = PagePool(size)
    for what, owner, n in moves:
        if what == "t":
            free, had = pool.available, len(pool.held.get(owner, ()))
            assert pool.take(owner, n % 4) == (n % 4 <= free)
            assert len(pool.held.get(owner, ())) == had + (n % 4 if n % 4 <= free else 0)
        elif what == "s" and owner not in pool.held:
            match = pool.find(START, TEXT[: PAGE * n + n])
            pool.share(owner, match.pages)
        elif what == "r":
            pool.release(owner)
        elif what == "n" and owner in pool.held:
            name_all(pool, owner, TEXT[: PAGE * n + n])
        elif what == "u" and owner in pool.held:
            for page in pool.held[owner]:
                if pool.holders(page) == 1:
                    pool.unname(page)
        elif what == "x" and pool.held.get(owner) and pool.available:
            index = n % len(pool.held[owner])
            old, new = pool.replace(owner, index) or (-1, -1)
            assert old != new
            assert pool.held[owner][index] == new
            assert pool.holders(new) == 1
            assert new not in pool.contents
        elif what == "g":
            pool.grow(n % 2)
        check(pool)
    for owner in range(5):
        pool.release(owner)
    assert pool.used == 0
    assert pool.available == pool.size


def test_the_same_start_is_found_and_nothing_else() -> None:
    pool = PagePool(8)
    hold(pool, 0, TEXT[: 2 * PAGE + 10])
    assert pool.find(START, TEXT).tokens == 2 * PAGE + 10
    assert pool.find(START, TEXT[: 2 * PAGE + 4]).tokens == 2 * PAGE + 4
    assert pool.find(START, TEXT[:PAGE]).tokens == PAGE
    other = [*TEXT[: PAGE + 5], 7, *TEXT[PAGE + 6 :]]
    found = pool.find(START, other)  # the first page whole, five positions of the second
    assert (found.pages, found.source, found.part) == (pool.held[0][:1], pool.held[0][1], 5)
    assert pool.find(START, [7, *TEXT[1:]]).tokens == 0
    assert pool.find(start_digest("another key"), TEXT).tokens == 0
    assert pool.find(start_digest("", "another rope"), TEXT).tokens == 0
    assert pool.find(START, TEXT, layers=(3,)).tokens == 0  # no hidden rows were kept


def test_a_digest_that_lies_is_a_miss() -> None:
    pool = PagePool(4)
    hold(pool, 0, TEXT[:PAGE])
    pool._whole[digest_of(START, TEXT[PAGE : 2 * PAGE])] = pool.held[0][0]  # a collision
    assert pool.find(START, TEXT[PAGE : 2 * PAGE]).tokens == 0


def test_hidden_layers_are_part_of_what_is_found() -> None:
    pool = PagePool(4)
    hold(pool, 0, TEXT[:PAGE])
    assert pool.take(1, 1)
    # more than the first has: it takes the name over
    name_all(pool, 1, TEXT[:PAGE], layers=frozenset({2, 5}))
    assert pool.find(START, TEXT, layers=(5,)).pages == pool.held[1]
    assert pool.find(START, TEXT).pages == pool.held[1]
    assert pool.find(START, TEXT, layers=(5, 6)).pages == ()
    name_all(pool, 0, TEXT[:PAGE], layers=frozenset({5}))
    assert pool.find(START, TEXT).pages == pool.held[1]
    check(pool)


def test_the_least_recently_held_goes_first_and_starts_go_last() -> None:
    pool = PagePool(4)
    hold(pool, 0, TEXT[: 2 * PAGE])
    hold(pool, 1, [5, *TEXT[: 2 * PAGE - 1]])
    first, second = pool.held[0], pool.held[1]
    pool.release(0)
    pool.release(1)
    assert pool.cached == 4
    pool.share(2, pool.find(START, TEXT[: 2 * PAGE]).pages)  # held again: now more recent than the other
    pool.release(2)
    taken = []
    for owner in range(3, 7):
        assert pool.take(owner, 1)
        taken += pool.held[owner]
    assert taken == [second[1], second[0], first[1], first[0]]
    assert not pool.take(9, 1)
    assert pool.cached == 0


def test_a_sequence_alone_lies_in_a_row() -> None:
    pool = PagePool(16)
    for _ in range(10):
        assert pool.take(0, 1)
    assert pool.held[0] == tuple(range(10))


def test_any_interrupt_leaves_a_sound_pool() -> None:
    """At every point of a session: afterwards all pages are accounted for, and a repeated session works."""

    def session(pool: PagePool) -> None:
        for owner in range(4):
            pool.release(owner)
        hold(pool, 0, TEXT[: 2 * PAGE + 3])
        match = pool.find(START, TEXT[: 2 * PAGE + 9])
        pool.share(1, (*match.pages, match.source))
        pool.replace(1, 2)
        pool.take(1, 1)
        pool.release(0)
        pool.take(2, 2)  # evicts
        pool.release(1)
        pool.release(2)

    points = count_points(lambda: session(PagePool(6)), ["forerun.models.pages"])
    assert points > 100
    for at in range(points):
        pool = PagePool(6)
        with suppress(KeyboardInterrupt), Fault(at, KeyboardInterrupt, ["forerun.models.pages"]):
            session(pool)
        check_after(pool)
        session(pool)
        check(pool)
        assert pool.used == 0


def check_after(pool: PagePool) -> None:
    assert pool.available == pool.size - len({page for pages in pool.held.values() for page in pages})
    check(pool)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.booleans(),
)
def test_the_longest_start_is_found_among_many(
    texts: list[list[int]], asked: list[int], kept: list[bool], rows: bool
) -> None:
    """Of all pages at a place that have the hidden rows, as if each were compared."""
    pool, layers = PagePool(20), [frozenset({3}) if has else frozenset() for has in kept]
    for owner, text in enumerate(texts):
        assert pool.take(owner, 1)
        name_all(pool, owner, text, layers=layers[owner])
    wanted = {3} if rows else set[int]()
    there = [content.tokens for content in pool.contents.values() if wanted <= content.layers]
    alike = [pages_module._alike(tokens, asked) for tokens in there]
    found = pool.find(START, asked, wanted)
    assert found.tokens == max(alike, default=0)
    assert not found.part or pool.contents[found.source].tokens[: found.part] == tuple(asked[: found.part])
    for owner in range(len(texts)):
        pool.release(owner)
    check(pool)


def test_many_texts_at_one_place_are_not_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one template share the start of their first page: each request looked at every cached text."""
    pool = PagePool(600)
    for owner in range(500):
        hold(pool, owner, [7, 7, 7, owner, 1])
        pool.release(owner)
    compared, alike = list[int](), pages_module._alike
    monkeypatch.setattr(pages_module, "_alike", lambda *both: compared.append(1) or alike(*both))
    assert pool.find(START, [7, 7, 7, 250, 2]).tokens == 4
    assert pool.find(START, [7, 7, 7, 900, 2]).tokens == 3
    assert len(compared) <= 8
