"""Predicted outputs: where a text stands in its prediction, what is drafted of it, and that it changes no text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from forerun.core.errors import InvalidInput
from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Request
from forerun.drafters.lookup.alignment import NEAR, Alignment, counts_of
from forerun.drafters.lookup.prediction import ASLEEP, AWAKE, PATIENCE, PredictionDrafter
from forerun.engine.engine import Engine
from forerun.testing import FakeSeq
from tests.exactness.harness import DRAFTERS, VERIFIERS, engine_for, run

VOCAB = 24
CODE = random.Random(5).choices(range(1000), k=200)  # tokens that rarely come twice


def edited(*edits: tuple[int, int, Sequence[int]]) -> list[int]:
    """The code with tokens replaced: from here to there, by these."""
    text = [*CODE]
    for start, end, by in reversed(edits):
        text[start:end] = by
    return text


@pytest.mark.parametrize(
    ("text", "least"),
    [
        (CODE, 200),
        (edited((50, 51, [2001])), 199),  # a token replaced
        (edited((50, 53, [2001, 2002, 2003])), 195),
        (edited((50, 50, [2001, 2002, 2003, 2004, 2005])), 198),  # inserted
        (edited((50, 60, [])), 188),  # deleted
        (edited((50, 170, [])), 78),
        (edited((10, 10, [7] * 40), (50, 90, [2001]), (120, 122, [2002, 2003])), 150),
        ([2001, 2002, 2003, *CODE], 198),  # a word before the prediction begins
        ([*CODE[100:], *CODE[:100]], 190),  # moved
    ],
)
def test_a_text_is_found_again_behind_every_difference(text: list[int], least: int) -> None:
    alignment = Alignment(CODE)
    hits = sum(alignment.add(token) for token in text)
    assert hits >= least - 4
    accepted, rejected = counts_of(CODE, text)
    assert accepted >= least
    assert accepted + rejected == len(CODE)


def test_another_text_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And tokens that its prediction does not have are not looked for: each would take the host as long as a hit."""
    looked, look_up = list[str](), Alignment._look_up
    monkeypatch.setattr(Alignment, "_look_up", lambda self: looked.append(self._tail) or look_up(self))
    assert counts_of(CODE, [2000 + token for token in CODE]) == (0, 200)
    assert not looked
    assert counts_of(CODE, [2000, *CODE[90:96], 2001])[0] >= 4
    assert 1 <= len(looked) <= 4
    assert counts_of(CODE, []) == (0, 200)
    assert counts_of([], CODE) == (0, 0)


def test_behind_single_tokens_that_were_replaced_the_next_is_guessed_for_a_while() -> None:
    alignment = Alignment(CODE)
    for token in (*CODE[:50], 2001):
        alignment.add(token)
    assert (alignment.guesses, alignment.at) == (True, 51)
    alignment.add(2002)
    assert (alignment.guesses, alignment.at) == (True, 52)
    alignment.add(2003)
    assert not alignment.guesses, "so many are no replaced tokens"


def test_tokens_that_were_found_again_count_once_the_next_one_agrees() -> None:
    assert counts_of(CODE, [2001, *CODE[60:63]]) == (3, 197)
    assert counts_of(CODE, [2001, CODE[60]]) == (0, 200), "one token may stand there by chance"


def test_a_single_token_is_looked_for_nearby_alone() -> None:
    prediction = range(300)
    for found, token in ((True, 20 + NEAR), (False, 100)):
        alignment = Alignment(prediction)
        for written in (*range(20), 2001, token):
            alignment.add(written)
        assert (alignment.at == token + 1) is found


def test_what_stands_there_twice_is_found_behind_the_last_certain_place() -> None:
    words = [[*range(i, i + 10), 500, 501, *range(i + 10, i + 20)] for i in (100, 200)]
    alignment = Alignment([*words[0], *words[1]])
    for token in (*words[0], *words[1][:10], 2001, 500, 501):
        alignment.add(token)
    assert alignment.tokens[alignment.at] == 210


def test_only_the_output_is_aligned_and_nothing_is_kept_of_a_sequence_that_ended() -> None:
    drafter, seq = PredictionDrafter(), FakeSeq(0, [*CODE[:9]], prediction=CODE)
    assert drafter.propose([seq], [Budget(1, 1)]).tokens.tolist()[1:] == CODE[:1]
    assert drafter.needs is AWAKE
    drafter.forget(seq)
    assert (drafter.needs, drafter._sequences) == (ASLEEP, {})


def drafted(drafter: PredictionDrafter, seq: FakeSeq, text: Sequence[int], nodes: int = 8) -> tuple[int, int]:
    """Write a text round by round, as a target would that had this text to write: tokens drafted, and rounds."""
    count = rounds = 0
    for_seq = [*text]
    while for_seq:
        chain = drafter.propose([seq], [Budget(nodes, nodes)]).tokens.tolist()[1:]
        right = 0
        while right < min(len(chain), len(for_seq) - 1) and chain[right] == for_seq[right]:
            right += 1
        count, rounds = count + len(chain), rounds + 1
        seq.tokens.extend(for_seq[: right + 1])
        for_seq = for_seq[right + 1 :]
    return count, rounds


def test_an_edited_text_takes_few_rounds() -> None:
    text = edited((10, 11, [2001]), (80, 80, [2002, 2003]), (120, 140, [2004]))
    _, rounds = drafted(PredictionDrafter(), FakeSeq(0, [1], prediction=CODE), text)
    assert rounds < len(text) / 4


@pytest.mark.parametrize("seed", range(3))
def test_a_useless_prediction_drafts_next_to_nothing(seed: int) -> None:
    """Another text, of the same few hundred words: many tokens agree by chance."""
    rng = random.Random(seed)
    words = [min(int(rng.expovariate(0.02)), 900) for _ in range(2000)]
    drafter = PredictionDrafter()
    few, _ = drafted(drafter, FakeSeq(0, [1], prediction=words[:1000]), words[1000:])
    assert few < 0.15 * 1000
    more, _ = drafted(drafter, FakeSeq(1, [1], prediction=words[:1000]), [5000 + i for i in range(1000)])
    assert more < 30, "nothing agrees: all that is drafted are the first guesses"


def test_it_sleeps_while_nothing_agrees() -> None:
    drafter, seq = PredictionDrafter(), FakeSeq(0, [1], prediction=CODE)
    assert drafter.needs is ASLEEP
    drafter.offer(seq)
    assert drafter.needs is AWAKE
    seq.tokens.extend([3000] * (PATIENCE + 1))
    drafter.offer(seq)
    assert drafter.needs is ASLEEP
    seq.tokens.extend(CODE[40:46])
    assert len(drafter.offer(seq).free) > 4, "it is found again"
    assert drafter.needs is AWAKE
    drafter.forget(seq)
    assert drafter.needs is ASLEEP


def predictions(right: Sequence[int]) -> list[tuple[int, ...]]:
    """Of a text: right, nearly right, begun late, wrong, adversarial, empty and huge."""
    rng = random.Random(3)
    wrong = [1 + rng.randrange(VOCAB - 1) for _ in right]
    near = [token if i % 5 else 1 + token % (VOCAB - 1) for i, token in enumerate(right)]
    tempting = [token for pair in zip(right, wrong, strict=True) for token in pair]
    every = [*right, *right[:3]] * 40
    return [tuple(p) for p in (right, near, right[4:], wrong, tempting, [0] * 9, (), every[:1000])]


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_prediction_changes_no_text(drafter: str, verifier: str) -> None:
    """Alone and in a batch, greedy and with a seed; the same texts as without a prediction."""
    greedy, drawn = (SamplingParams(max_tokens=40, temperature=t, seed=7, ignore_eos=True) for t in (0.0, 1.0))
    for params in (greedy, drawn) if verifier == "coupled" else (greedy,):
        asked = Request((3, 5, 2), params)
        (text,), _ = run(engine_for("none", verifier, "chain", VOCAB), [asked])
        requests = [replace(asked, prediction=each) for each in predictions(text)]
        engine = engine_for(drafter, verifier, "chain", VOCAB)
        together, _ = run(engine, [*requests, asked])
        assert together == [text] * (len(requests) + 1)
        alone, _ = run(engine, requests[:1])
        assert alone == [text]


def counted(engine: Engine, request: Request) -> tuple[int, int]:
    """Rounds and drafted tokens of a text."""
    before = engine.stats.rounds, engine.stats.drafted
    run(engine, [request])
    return engine.stats.rounds - before[0], engine.stats.drafted - before[1]


def test_a_right_prediction_saves_rounds_and_a_wrong_one_drafts_little() -> None:
    engine = engine_for("recycling", "exact", "chain", VOCAB)
    asked = Request((3, 5, 2), SamplingParams(max_tokens=64, ignore_eos=True), drafter="prediction")
    (text,), _ = run(engine, [asked])
    assert counted(engine, asked) == (64, 0), "without a prediction there is nothing to draft"
    rounds, _ = counted(engine, replace(asked, prediction=tuple(text)))
    assert rounds <= 64 / 4
    other = tuple(1 + token % (VOCAB - 1) for token in text)
    assert counted(engine, replace(asked, prediction=other))[1] < 64


def test_drafting_that_is_off_stays_off() -> None:
    engine = engine_for("ngram", "exact", "chain", VOCAB)
    asked = Request((3, 5, 2), SamplingParams(max_tokens=20), drafter="none", prediction=(1, 2, 3))
    assert counted(engine, asked)[1] == 0


@pytest.mark.parametrize(
    ("prediction", "said"), [((VOCAB,), "outside the vocabulary"), ((-1,), "prediction"), ((1,) * 200, "shorten it")]
)
def test_what_is_no_prediction_is_refused(prediction: tuple[int, ...], said: str) -> None:
    engine = engine_for("ngram", "exact", "chain", VOCAB)
    engine.max_length = 100
    with pytest.raises(InvalidInput, match=said):
        engine.submit(Request((1,), prediction=prediction))
