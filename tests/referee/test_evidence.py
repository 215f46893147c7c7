"""False alarms are as rare as stated, and biases are found with about as many tokens as stated."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forerun.referee.evidence import (
    FALSE_ALARMS,
    Coin,
    Drawn,
    Evidence,
    TwoSamples,
    smallest_found,
    tempered,
    towards_draft,
    usual_bettors,
)
from forerun.referee.tables import Contexts, Floats, Pair, Rules


def sampled(pair: Pair, rng: np.random.Generator, n: int, sampling: Floats | None = None, **rules: float) -> Drawn:
    """n tokens after random contexts, from the law of the rules, or from another function of the batch."""
    table = pair.target
    nothing = np.zeros((n, table.size))
    contexts = Contexts(rng.integers(0, table.size - 1, (n, 3)), nothing, nothing > 0)
    laws = table.laws(contexts, Rules(**rules))[0]  # type: ignore[arg-type]
    draft = pair.draft.laws(contexts, Rules())[0]
    none = np.zeros(n, dtype=np.int64)
    drawn = Drawn(contexts, laws, draft, none, np.arange(n) % 24, np.full(n, 0.5))
    law = laws if sampling is None else sampling(drawn)  # type: ignore[operator]
    tokens = np.minimum((law.cumsum(-1) < rng.random((n, 1))).sum(-1), table.end)
    return Drawn(contexts, laws, draft, tokens, drawn.position, drawn.before)


def p_values(pair: Pair, runs: int, batches: int, size: int, seed: int = 0) -> list[float]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(runs):
        evidence = Evidence()
        for _ in range(batches):
            drawn = sampled(pair, rng, size)
            evidence.take(drawn, np.ones(size, dtype=bool))
        found.append(evidence.p_value)
    return found


def test_every_bet_is_fair(pair: Pair) -> None:
    """Given the past, the expected factor of each bettor's wealth is at most 1, computed over all symbols."""
    rng = np.random.default_rng(3)
    bettors = usual_bettors()
    for _ in range(3):
        past = sampled(pair, rng, 300)
        for bettor in bettors:
            bettor.bet(past)
    drawn = sampled(pair, rng, 1)
    import copy

    for bettor in bettors:
        expected = 0.0
        for symbol, chance in enumerate(drawn.laws[0]):
            case = Drawn(drawn.contexts, drawn.laws, drawn.draft, np.array([symbol]), drawn.position, drawn.before)
            expected += chance * math.exp(float(copy.deepcopy(bettor).bet(case)[0]))
        assert expected == pytest.approx(1.0, abs=1e-9) or expected < 1, bettor.name


@pytest.mark.slow
def test_right_samples_are_rarely_doubted(pair: Pair) -> None:
    found = p_values(pair, runs=40, batches=4, size=400)
    assert min(found) > FALSE_ALARMS
    assert sum(p < 0.1 for p in found) <= 11  # 4 are due at most; 12 come once in 2,000 such tests


@pytest.mark.slow
@pytest.mark.long
def test_a_thousand_clean_runs_give_no_alarm(pair: Pair) -> None:
    """2,000 tokens each; the limit is that of one of the checks that share the false alarms."""
    alarms = FALSE_ALARMS / 13
    assert min(p_values(pair, runs=1000, batches=4, size=500, seed=5)) > alarms


@pytest.mark.parametrize("sampling", [tempered(1.25), tempered(0.85), towards_draft(0.3)], ids=["cold", "hot", "draft"])
def test_biases_are_found(pair: Pair, sampling: Floats) -> None:
    rng, evidence = np.random.default_rng(4), Evidence()
    while evidence.tokens < 12_000 and evidence.p_value > FALSE_ALARMS / 13:
        drawn = sampled(pair, rng, 500, sampling)
        evidence.take(drawn, np.ones(500, dtype=bool))
    assert evidence.p_value <= FALSE_ALARMS / 13


@pytest.mark.slow
def test_the_stated_power_holds(pair: Pair) -> None:
    """A bias of 4% towards the likeliest symbol is found within the tokens that are stated, nine times in ten."""
    distance = 0.04

    def biased(drawn: Drawn) -> Floats:
        best = np.eye(drawn.laws.shape[1])[drawn.laws.argmax(-1)]
        moved = distance / (1 - drawn.laws.max(-1, keepdims=True))
        return np.asarray((1 - moved) * drawn.laws + moved * best)

    rng, found = np.random.default_rng(6), 0
    stated = math.ceil((smallest_found(1, FALSE_ALARMS / 13) / distance) ** 2)
    for _ in range(10):
        evidence = Evidence()
        for _ in range(math.ceil(stated / 250)):
            evidence.take(sampled(pair, rng, 250, biased), np.ones(250, dtype=bool))  # type: ignore[arg-type]
        found += evidence.p_value <= FALSE_ALARMS / 13
    assert found >= 9


def test_a_forbidden_token_is_no_matter_of_chance(pair: Pair) -> None:
    rng = np.random.default_rng(7)
    drawn = sampled(pair, rng, 50, lambda d: np.full(d.laws.shape, 1 / 21), top_k=2)  # type: ignore[arg-type]
    evidence = Evidence()
    evidence.take(drawn, np.ones(50, dtype=bool))
    assert evidence.impossible is not None
    assert evidence.p_value == 0


def test_rows_that_are_not_clear_are_left_out(pair: Pair) -> None:
    rng = np.random.default_rng(7)
    drawn = sampled(pair, rng, 50, lambda d: np.full(d.laws.shape, 1 / 21), top_k=2)  # type: ignore[arg-type]
    evidence = Evidence()
    evidence.take(drawn, np.zeros(50, dtype=bool))
    assert evidence.impossible is None
    assert evidence.tokens == 0


def test_two_samples_of_one_law_look_alike_and_of_two_do_not() -> None:
    rng, alarms = np.random.default_rng(8), 0
    for _ in range(100):
        test = TwoSamples()
        for one, other in rng.integers(0, 6, (300, 2)):
            test.take(str(one), str(other))
        alarms += test.p_value < 0.01
    assert alarms <= 4
    test = TwoSamples()
    for one, other in zip(rng.integers(0, 6, 600), rng.integers(1, 6, 600), strict=True):
        test.take(str(one), str(other))
    assert test.p_value < 1e-6


def test_a_coin_that_falls_one_way_is_found_and_a_fair_one_is_not() -> None:
    rng, worst = np.random.default_rng(9), 1.0
    for _ in range(300):
        coin = Coin()
        for hit in rng.random(40) < 0.5:
            coin.take(bool(hit))
        worst = min(worst, coin.p_value)
    assert worst > 1e-4
    coin = Coin()
    for _ in range(20):
        coin.take(True)
    assert coin.p_value < 1e-4
