"""The suffix drafter: the automaton against brute force, what is drafted, what is learnt, and who may learn it."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from forerun.core.errors import InvalidInput
from forerun.core.params import SpeculativeConfig
from forerun.core.types import Budget, Scores, TreeBatch, Verdict
from forerun.drafters.base import Parts
from forerun.drafters.lookup import suffix_index as automaton
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.drafters.lookup.suffix import SuffixDrafter
from forerun.drafters.lookup.suffix_index import BREAK, SuffixAutomaton
from forerun.drafters.lookup.suffix_match import History
from forerun.testing import FakeSeq, TableLM, check_drafter

VOCAB = 50


def draft(tokens: list[int], budget: Budget, **fields: object) -> tuple[list[int], list[int]]:
    trees = SuffixDrafter().propose([FakeSeq(0, tokens, **fields)], [budget])  # type: ignore[arg-type]
    return trees.tokens.tolist(), trees.parents.tolist()


def followers(text: list[int], suffix: list[int]) -> Counter[int]:
    """What followed each occurrence of a suffix, by looking everywhere."""
    n = len(suffix)
    return Counter(text[i + n] for i in range(len(text) - n) if text[i : i + n] == suffix)


def longest_earlier(text: list[int], end: list[int]) -> int:
    """The longest suffix of `end` that occurs in a text and is followed by something there."""
    return max((n for n in range(1, len(end) + 1) if followers(text, end[-n:])), default=0)


@pytest.mark.parametrize("letters", [1, 2, 3, 8])
def test_the_automaton_knows_what_looking_everywhere_finds(letters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automaton, "CLIMB", 1 << 20)  # exact counts
    rng = random.Random(letters)
    text, built = list[int](), SuffixAutomaton()
    for _ in range(60):
        text += (piece := [rng.randrange(letters) for _ in range(rng.randint(1, 3))])
        built.extend(piece)
        state, length = built.shorten(*built.earlier())
        assert length == longest_earlier(text, text)
        wanted = followers(text, text[len(text) - length :]) if length else Counter[int]()
        assert {token: count for count, token in built.continuations(state) if length} == wanted


def test_counts_that_are_not_carried_far_are_too_low_and_nothing_else() -> None:
    """The control of the test above: on a text of one letter the links are as many as the tokens."""
    built = SuffixAutomaton([7] * 100)
    state, length = built.shorten(*built.earlier())
    assert length == 99
    assert built.continuations(state) == [(1, 7)]
    assert built.counts[built.nexts[0][7]] < 100


@pytest.mark.parametrize("letters", [2, 4])
def test_another_text_is_followed_through_the_automaton(letters: int) -> None:
    rng = random.Random(letters)
    text = [rng.randrange(letters) for _ in range(80)]
    built, other, state, length = SuffixAutomaton(text), list[int](), 0, 0
    for _ in range(120):
        other.append(rng.randrange(letters + 1))
        state, length = built.follow(state, length, other[-1])
        found = [n for n in range(1, len(other) + 1) if " ".join(map(str, other[-n:])) in " ".join(map(str, text))]
        assert length == max(found, default=0)


def test_the_contract() -> None:
    check_drafter(SuffixDrafter, vocab_size=7)
    check_drafter(lambda: SuffixDrafter(history=History(7)), vocab_size=7, rounds=20)


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3, 4], [4, 4, 5]])
def test_nothing_matches_nothing_is_drafted(tokens: list[int]) -> None:
    assert draft(tokens, Budget(4, 4)) == ([tokens[-1]], [-1])


def test_what_is_drafted() -> None:
    assert draft([1, 2, 3, 4, 5, 7, 2, 3, 9, 1, 2, 3], Budget(3, 3))[0] == [3, 4, 5, 7]  # the longest match
    often = [1, 2, 5, 1, 2, 5, 1, 2, 6, 8, 1, 2]
    assert draft(often, Budget(1, 1))[0] == [2, 5]  # the most frequent continuation
    assert draft([1, 2, 5, 1, 2, 6, 8, 1, 2], Budget(2, 2))[0] == [2, 6, 8]  # of equal ones the most recent
    assert draft([1, 2, 3, 1, 2, 3], Budget(7, 7))[0] == [3, 1, 2, 3, 1, 2, 3, 1]  # it repeats itself
    assert draft([7, 7], Budget(3, 3))[0] == [7, 7, 7, 7]
    ends = draft([1, 2, 3, 0, 9, 9, 1, 2], Budget(4, 4), stop_ids=frozenset({0}))
    assert ends[0] == [2, 3, 0]


def test_a_fixed_budget_is_drafted_whole_however_unlikely() -> None:
    """As prompt lookup does; what the offer promises ends where it is negligible."""
    tokens = [1, 2, 3, 4, 5, 6, 30, 1, 7, 8, 9, 10, 11, 31, 1]
    assert draft(tokens, Budget(5, 5))[0] == [1, 7, 8, 9, 10, 11]
    assert len(SuffixDrafter().offer(FakeSeq(0, tokens)).free) < 5


def test_continuations_that_disagree_make_a_tree() -> None:
    tokens, parents = draft([1, 2, 5, 6, 1, 2, 7, 8, 1, 2], Budget(4, 2, width=2))
    assert {tokens[i]: tokens[parents[i]] for i in range(1, 5)} == {7: 2, 8: 7, 5: 2, 6: 5}
    assert len(draft([1, 2, 5, 6, 1, 2, 7, 8, 1, 2], Budget(4, 2, width=1))[0]) == 3


def test_a_tree_branches_from_shorter_matches_too() -> None:
    text = [1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3]  # "1 2 3" was followed by 9, "2 3" by 8 as well
    assert draft(text, Budget(1, 1, width=2))[0] == [3, 9]
    assert sorted(draft(text, Budget(2, 1, width=2))[0]) == [3, 8, 9]
    assert draft(text, Budget(2, 1, width=1))[0] == [3, 9]


def test_agreement_is_trusted_more_than_a_single_occurrence_and_that_more_than_disagreement() -> None:
    def confidence(tokens: list[int]) -> float:
        return SuffixDrafter().confidence(FakeSeq(0, tokens))

    agree, once = [1, 2, 9, 1, 2, 8, 1, 2, 7, 1], [1, 2, 5, 6, 7, 1]
    divided = [1, 2, 9, 1, 3, 8, 1, 4, 7, 1]
    assert confidence(agree) > confidence(once) > confidence(divided) > 0
    survivals = SuffixDrafter().offer(FakeSeq(0, [1, 2, 3, 4] * 3)).free
    assert len(survivals) > 4
    assert list(survivals) == sorted(survivals, reverse=True)


def test_trust_follows_hits_and_misses_without_drafting() -> None:
    def confidence_after(right: bool) -> float:
        drafter, seq, rng = SuffixDrafter(), FakeSeq(0, [1, 2, 3] * 5), random.Random(0)
        for _ in range(60):
            drafter.offer(seq)  # as a controller asks in every round
            trees = drafter.propose([seq], [Budget(0, 0)])
            token = (seq.tokens[-1] % 3) + 1 if right else rng.randrange(1, 6)
            drafter.observe([seq], trees, Scores(None), Verdict.of([[]], [token], "cpu"))
            seq.tokens.append(token)
        return drafter.confidence(seq)

    assert confidence_after(True) > 0.9 > 0.5 > confidence_after(False)


def test_it_never_drafts_less_right_than_prompt_lookup_on_a_text_that_copies() -> None:
    """Both see one text; the suffix drafter may use all occurrences, prompt lookup the recent ones."""
    text = [*range(40), *range(10, 30), 3, 4, 5, *range(12, 25)]

    def right(drafter: SuffixDrafter | NgramDrafter) -> int:
        hits = 0
        for end in range(41, len(text)):
            tokens = drafter.propose([FakeSeq(end, text[:end])], [Budget(1, 1)]).tokens.tolist()
            hits += tokens[1:] == text[end : end + 1]
        return hits

    assert right(SuffixDrafter()) >= right(NgramDrafter()) > 20


def write(drafter: SuffixDrafter, seq: FakeSeq, came: list[int]) -> None:
    """A round that commits these tokens, and the end of the sequence."""
    drafter.propose([seq], [Budget(0, 0)])
    for token in came:
        trees = TreeBatch.chains([[seq.tokens[-1]]])
        drafter.observe([seq], trees, Scores(None), Verdict.of([[]], [token], "cpu"))
        seq.tokens.append(token)
        drafter.propose([seq], [Budget(0, 0)])
    drafter.forget(seq)


def built(**settings: object) -> SuffixDrafter:
    given = SpeculativeConfig(drafter="suffix", **settings)  # type: ignore[arg-type]
    return SuffixDrafter.build(Parts(TableLM(VOCAB), None, given))


@pytest.mark.parametrize("shared", [False, True])
def test_requests_learn_from_each_other_only_where_that_was_asked_for(shared: bool) -> None:
    drafter = built(shared=shared)
    write(drafter, FakeSeq(0, [1, 2], cache_salt=""), [30, 31, 32, 33, 34])
    later = drafter.propose([FakeSeq(1, [9, 30, 31], cache_salt="")], [Budget(3, 3)])
    assert later.tokens.tolist() == ([31, 32, 33, 34] if shared else [31])
    prompt = drafter.propose([FakeSeq(2, [9, 1, 2], cache_salt="")], [Budget(3, 3)])
    assert prompt.tokens.tolist() == [2]  # of what others wrote, not of what they asked


def test_tenants_never_see_each_other() -> None:
    history = History(VOCAB)
    history.add("a", [30, 31, 32])
    for tenant, length in (("a", 2), ("b", 0), ("", 0)):
        reader = history.reader(tenant)
        reader.read([30, 31])
        assert [place.length for place in reader.places()] == [length]


def test_a_reader_follows_what_is_added_while_it_reads() -> None:
    history = History(VOCAB, most=12)
    reader = history.reader("")
    reader.read([1, 2])
    history.add("", [1, 2, 3, 4])
    reader.read([3])
    # what was read before it was written is not looked up
    assert [place.length for place in reader.places()] == [1]
    for _ in range(4):
        history.add("", [1, 2, 3, 4])  # a new automaton: the old one's outputs are dropped
    reader.read([])
    assert max(place.length for place in reader.places()) == 3


def test_history_is_bounded() -> None:
    history = History(VOCAB, most=100)
    for i in range(200):
        history.add("", [i % VOCAB] * 7)
    for name in range(100):
        history.add(str(name), [1, 2, 3])
    assert len(history._tenants) <= 16
    assert all(text.size <= 100 for one in history._tenants.values() for text in one.texts)


def test_an_interrupted_change_of_the_history_costs_that_part_and_no_more() -> None:
    class Interrupts(list[int]):
        def __getitem__(self, key: object) -> list[int]:  # type: ignore[override]
            raise KeyboardInterrupt

    history = History(VOCAB)
    history.add("", [30, 31, 32])
    text = next(iter(history._tenants.values())).texts[-1]
    with pytest.raises(KeyboardInterrupt):
        text.extend(5 if i < 3 else Interrupts()[0] for i in range(9))  # type: ignore[misc]
    reader = history.reader("")
    reader.read([30, 31])
    assert reader.places() == []
    history.add("", [40, 41, 42])
    reader.read([40])
    assert [place.length for place in reader.places()] == [1]


def test_a_file_keeps_the_history(tmp_path: Path) -> None:
    file = tmp_path / "outputs.jsonl"
    write(built(shared=True, history=str(file)), FakeSeq(0, [1, 2], cache_salt="a"), [30, 31, 32, 33])
    with file.open("a") as more:
        more.write('{"tenant": "x", "tok')  # cut off
    again = built(shared=True, history=str(file))
    for salt, drafted in (("a", [31, 32, 33]), ("b", [31]), (None, [31])):
        seq = FakeSeq(1, [30, 31], cache_salt=salt)
        assert again.propose([seq], [Budget(2, 2)]).tokens.tolist() == drafted
        again.rewind(seq, 0)
    file.write_text(file.read_text().replace(f'"vocab_size": {VOCAB}', '"vocab_size": 51'))
    with pytest.raises(InvalidInput, match="no outputs of a model with 50 tokens"):
        built(shared=True, history=str(file))
    with pytest.raises(InvalidInput, match="shared=True"):
        SpeculativeConfig(history=str(file))


def test_nothing_crosses_from_one_text_of_the_history_to_the_next() -> None:
    history = History(VOCAB)
    history.add("", [1, 2])
    history.add("", [3, 4])
    reader = history.reader("")
    reader.read([1, 2])
    (place,) = reader.places()
    assert place.continuations() == []
    assert BREAK < 0


def test_forgets() -> None:
    drafter, seq = SuffixDrafter(), FakeSeq(3, [1, 2, 1])
    drafter.propose([seq], [Budget(2, 2)])
    drafter.forget(seq)
    assert not drafter._sequences
