"""Prompt lookup: what is found, what is not, and how it learns to trust itself."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from forerun.core.types import Budget, Scores, TreeBatch, Verdict
from forerun.drafters.base import LookupDrafter
from forerun.drafters.heads.growth import TreeBuilder
from forerun.drafters.lookup import ngram
from forerun.drafters.lookup.ngram import CANDIDATES, NgramDrafter
from forerun.testing import FakeSeq, check_drafter


def draft(tokens: list[int], budget: Budget, **fields: object) -> tuple[list[int], list[int]]:
    drafter = NgramDrafter()
    trees = drafter.propose([FakeSeq(0, tokens, **fields)], [budget])  # type: ignore[arg-type]
    return trees.tokens.tolist(), trees.parents.tolist()


def test_the_contract() -> None:
    check_drafter(NgramDrafter, vocab_size=7)


def test_copies_what_followed_the_longest_match() -> None:
    # "2 3" was followed by 9 last, but "1 2 3" by 4
    assert draft([1, 2, 3, 4, 5, 7, 2, 3, 9, 1, 2, 3], Budget(3, 3))[0] == [3, 4, 5, 7]


def test_the_most_recent_of_equal_matches_wins() -> None:
    assert draft([1, 2, 5, 1, 2, 6, 8, 1, 2], Budget(2, 2))[0] == [2, 6, 8]


def test_of_many_occurrences_the_last_ones_are_looked_at() -> None:
    often = [1, 2, 7] * (2 * CANDIDATES)
    assert draft([*often, 1, 2, 9, 8, 1, 2], Budget(2, 2))[0] == [2, 9, 8]


def test_a_second_continuation_gets_what_the_first_leaves() -> None:
    """Both are tokens of one law: if the first is likely, the second is not."""
    tokens = [1, 2, 5, 6, 1, 2, 7, 8, 1, 2]
    rate = NgramDrafter().confidence(FakeSeq(0, tokens))
    assert 0.2 < rate < 1.0
    between = (rate + rate * (1.0 - rate)) / 2  # a node costs more than the second is worth, less than the first
    price = tuple(1.0 + between * n for n in range(3))
    assert draft(tokens, Budget(2, 1, width=2, price=price))[0] == [2, 7]
    cheap = tuple(1.0 + 0.9 * rate * (1.0 - rate) * n for n in range(3))
    assert draft(tokens, Budget(2, 1, width=2, price=cheap))[0] == [2, 7, 5]


def test_what_comes_after_a_miss_is_not_counted() -> None:
    """A guess beyond the first wrong one was made for another text, even where it happens to be right."""

    def rate_after(came: list[int]) -> float:
        drafter, seq = NgramDrafter(), FakeSeq(0, [1, 2, 3, 4, 5, 6, 1, 2])
        assert drafter.propose([seq], [Budget(3, 3)]).tokens.tolist() == [2, 3, 4, 5]
        others = TreeBatch.trees([([2, *came], [-1, 0, 1])])  # what another drafter has drafted stood
        drafter.observe([seq], others, Scores(None), Verdict.of([[1, 2]], [9], "cpu"))
        return drafter._sequences[0].rates.rate(3, drafter._all)

    assert rate_after([3, 4]) > rate_after([9, 7]) == rate_after([9, 4])


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3, 4], [4, 4, 5]])
def test_nothing_matches_nothing_is_drafted(tokens: list[int]) -> None:
    assert draft(tokens, Budget(4, 4)) == ([tokens[-1]], [-1])


def test_a_text_that_repeats_itself_is_drafted_past_its_end() -> None:
    assert draft([1, 2, 3, 1, 2, 3], Budget(7, 7))[0] == [3, 1, 2, 3, 1, 2, 3, 1]
    assert draft([7, 7], Budget(3, 3))[0] == [7, 7, 7, 7]


def test_several_continuations_make_a_tree() -> None:
    tokens, parents = draft([1, 2, 5, 6, 1, 2, 7, 8, 1, 2], Budget(4, 2, width=2))
    paths = {tokens[i]: tokens[parents[i]] for i in range(1, 5)}
    assert paths == {7: 2, 8: 7, 5: 2, 6: 5}


def test_stops_at_a_token_that_ends_the_text() -> None:
    tokens = [1, 2, 3, 0, 9, 9, 1, 2]
    assert draft(tokens, Budget(4, 4), stop_ids=frozenset({0}))[0] == [2, 3, 0]


def test_a_price_keeps_it_from_drafting_on_a_weak_match() -> None:
    steep = (1.0, 3.0, 3.1, 3.2, 3.3)
    assert draft([1, 5, 6, 7, 8, 1], Budget(4, 4, price=steep))[0] == [1]


def test_trust_grows_with_hits_and_falls_with_misses_without_drafting() -> None:
    """Nothing is put to the target, and yet the rates of what was looked up follow what came."""
    price = (1.0, 2.6, 2.7, 2.8, 2.9)

    def drafted_after(next_token: int) -> int:
        drafter, seq, rng = NgramDrafter(), FakeSeq(0, [1, 2, 3] * 5), random.Random(0)
        for _ in range(60):
            drafter.offer(seq)
            trees = drafter.propose([seq], [Budget(0, 0)])
            assert trees.is_plain()
            token = (seq.tokens[-1] % 3) + 1 if next_token == 0 else rng.randrange(1, 6)
            drafter.observe([seq], trees, Scores(None), Verdict.of([[]], [token], "cpu"))
            seq.tokens.append(token)
        return len(drafter.propose([seq], [Budget(4, 4, price=price)]).tokens) - 1

    assert drafted_after(0) == 4
    assert drafted_after(1) == 0


def test_where_nothing_may_be_drafted_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, seqs = NgramDrafter(), [FakeSeq(i, [1, 2, 3, 1, 2]) for i in range(3)]
    looked = list[int]()
    monkeypatch.setattr(drafter, "_matches", lambda state, wide: (looked.append(1), [])[1])
    trees = drafter.propose(seqs, [Budget(0, 0)] * 3)
    assert trees.is_plain()
    assert trees.to_host() == ([2, 2, 2], [-1, -1, -1])
    drafter.observe(seqs, trees, Scores(None), Verdict.of([[]] * 3, [3, 3, 3], "cpu"))
    assert not looked
    assert not drafter._sequences
    drafter.propose(seqs, [Budget(0, 0), Budget(2, 2), Budget(0, 0)])
    assert len(looked) == 1


def test_a_guess_of_an_earlier_round_is_not_scored() -> None:
    """It was looked up two tokens ago: what came since is no answer to it."""
    drafter, seq = NgramDrafter(), FakeSeq(0, [1, 2, 3, 1, 2])
    drafter.offer(seq)
    drafter._looked_up.add(99)  # another sequence was asked in this round
    before = [*drafter._all.tries]
    seq.tokens += [7, 8]
    drafter.observe([seq], TreeBatch.chains([[8]]), Scores(None), Verdict.of([[]], [3], "cpu"))
    assert drafter._all.tries == before


@pytest.mark.parametrize("alphabet", [2, 3, 8])
def test_the_longest_match_and_of_equal_ones_the_last_by_brute_force(alphabet: int) -> None:
    pick = random.Random(alphabet)
    for _ in range(200):
        tokens = [pick.randrange(alphabet) for _ in range(pick.randrange(1, 40))]
        drafter = NgramDrafter(longest=6)
        drafter.offer(FakeSeq(0, tokens))
        matches = []
        for end in range(1, len(tokens)):
            length = 0
            while length < min(6, end) and tokens[end - 1 - length] == tokens[-1 - length]:
                length += 1
            if length:
                matches.append((length, end))
        assert drafter._sequences[0].found == ([max(matches)] if matches else [])


def test_chains_and_offers_are_those_of_the_general_rule() -> None:
    """A chain takes a short way: it must be what a tree builder cuts from the same tokens and rates."""
    pick = random.Random(5)
    cut = 0
    for _ in range(300):
        drafter, seq = NgramDrafter(longest=5), FakeSeq(0, [1], stop_ids=frozenset({0}))
        for _ in range(pick.randrange(4, 40)):
            seq.tokens.append(pick.randrange(4))
            price = tuple(1.0 + 0.15 * n for n in range(9)) if pick.random() < 0.7 else None
            budget = Budget(pick.randrange(7), pick.randrange(7), price=price)
            chain = list(drafter.chain(seq, budget.depth))
            assert drafter.offer(seq) == LookupDrafter.offer(drafter, seq)
            builder, node = TreeBuilder(seq.tokens[-1]), 0
            for token, rate in chain:
                node = builder.add(node, token, rate)
            wanted = builder.cut(budget.nodes, budget.price)
            trees = drafter.propose([seq], [budget])
            assert trees.to_host() == wanted
            cut += 0 < len(wanted[0]) - 1 < len(chain)
            drafter.observe([seq], trees, Scores(None), Verdict.of([[]], [pick.randrange(4)], "cpu"))
    assert cut > 50  # some were shortened by their price, and not to nothing


def test_forgets() -> None:
    drafter, seq = NgramDrafter(), FakeSeq(3, [1, 2, 1])
    drafter.propose([seq], [Budget(2, 2)])
    drafter.forget(seq)
    assert not drafter._sequences


def test_nodes_that_cannot_pay_are_left_out_and_trees_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, cases = random.Random(5), []
    for _ in range(200):
        steps = [rng.choice((0.02, 0.08, 0.3)) for _ in range(12)]
        price = tuple(accumulate([1.0, *steps]))
        tokens = [rng.randrange(6) for _ in range(rng.randrange(4, 40))]
        cases.append((tokens, Budget(12, rng.randrange(1, 9), rng.randrange(1, 4), price)))
    lean = [draft(*case) for case in cases]
    monkeypatch.setattr(ngram, "least_step", lambda price: 0.0)
    assert [draft(*case) for case in cases] == lean
    assert len({len(tokens) for tokens, _ in lean}) > 4  # trees of many sizes were compared
    monkeypatch.setattr(ngram, "least_step", lambda price: 0.5)  # a bound that is too high shows
    assert [draft(*case) for case in cases] != lean
