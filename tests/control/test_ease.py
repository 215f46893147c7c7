"""What is expected of forms that did not run, from those that did; and how much may be lost on them."""

from __future__ import annotations

import random

import pytest

from forerun.control.acceptance import Acceptance
from forerun.control.allowance import WindowAllowance
from forerun.control.around import PLAIN, Around
from forerun.drafters.eagle.cuda.menu import FORMS, DraftMenu, ranks_at
from forerun.offers import Form

RATES = (
    (0.48, 0.08, 0.04, 0.03),
    (0.56, 0.08, 0.04, 0.03),
    (0.64, 0.08, 0.04, 0.02),
    (0.7, 0.07, 0.03, 0.02),
)
SHALLOW, DEEP = Form(31, 5, 8), Form(63, 10, 8)


def after(*rounds: tuple[Form, int]) -> Acceptance:
    found = Acceptance.of_menu(DraftMenu(RATES), FORMS)
    for form, accepted in rounds:
        found.observe(form, [0], [accepted])
    return found


def ratio(found: Acceptance) -> float:
    return found.expected(DEEP) / found.expected(SHALLOW)


def test_before_any_round_a_form_brings_what_the_files_say() -> None:
    menu, found = DraftMenu(RATES), after()
    assert [found.expected(form) for form in FORMS] == pytest.approx([menu.expected(form) for form in FORMS])


def test_where_all_is_accepted_deep_trees_gain_more_than_shallow_ones() -> None:
    """One factor for all forms would leave their ratio as it is in the files."""
    easy, usual, hard = after(*[(SHALLOW, 5)] * 12), after(), after(*[(SHALLOW, 0)] * 12)
    assert ratio(hard) < ratio(usual) < 1.4
    assert ratio(easy) > 1.5
    assert easy.expected(DEEP) > 7.0
    assert easy.expected(SHALLOW) <= 5.0


def test_a_few_rounds_tell_of_a_loop_and_of_its_end() -> None:
    mixed = [(SHALLOW, 1), (SHALLOW, 3), (SHALLOW, 0), (SHALLOW, 2)] * 12
    before, within = after(*mixed), after(*mixed, *[(SHALLOW, 5)] * 4)
    behind = after(*mixed, *[(SHALLOW, 5)] * 4, *[(DEEP, 1)] * 3)
    assert within.expected(DEEP) > 1.8 * before.expected(DEEP)
    assert behind.expected(DEEP) < 1.4 * before.expected(DEEP)


def test_nothing_is_expected_where_nothing_was_accepted_for_long() -> None:
    """A plain round must not be thought worse than a draft that costs a twentieth of it."""
    found = after(*[(FORMS[0], 0)] * 250)
    assert found.expected(FORMS[0]) < 0.02
    assert found.expected(DEEP) < 0.06


def test_any_form_is_evidence_of_all_others() -> None:
    by_chain, by_tree = after(*[(FORMS[1], 2)] * 20), after(*[(DEEP, 10)] * 20)
    for found in (by_chain, by_tree):
        assert found.expected(Form(47, 6, 10)) > 4.5


@pytest.mark.parametrize("odds", [0.01, 0.5, 1.0, 3.0, 100.0])
def test_rates_at_other_odds_are_rates(odds: float) -> None:
    for level, ranks in enumerate(RATES):
        found = ranks_at(ranks, odds, level)
        assert all(0.0 < rate < 1.0 for rate in found)
        assert sum(found) <= 1.0
        assert (found[0] > ranks[0], found[0] < ranks[0]) == (odds > 1.0, odds < 1.0)
        assert all(other <= rate for other, rate in zip(found[1:], ranks[1:], strict=True))
    menu, tokens = DraftMenu(RATES), [DraftMenu(RATES).expected(form, odds) for form in FORMS]
    assert all(menu.expected(form, 2.0 * odds) > one for form, one in zip(FORMS, tokens, strict=True))
    assert all(one < form.depth for form, one in zip(FORMS, tokens, strict=True))


def test_what_was_lost_is_counted_over_every_stretch_of_the_window() -> None:
    rng, allowance, losses = random.Random(7), WindowAllowance(window=20), list[float]()
    for i in range(400):
        losses.append(rng.uniform(-1.0, 0.6) if i % 50 < 25 else rng.uniform(0.0, 0.5))
        allowance.book(losses[-1])
        stretches = [
            sum(losses[-length:]) for length in range(1, 20)
        ]  # and the coming round is the twentieth
        assert allowance.lost == pytest.approx(max(0.0, *stretches), abs=1e-9)


def test_no_stretch_of_200_rounds_loses_more_than_three() -> None:
    """A draft of which nothing is accepted whenever that is covered."""
    for cost in (0.07, 0.45, 0.9):
        allowance, losses = WindowAllowance(), list[float]()
        for _ in range(1000):
            losses.append(cost if allowance.covers(cost) else 0.0)
            allowance.book(losses[-1])
        assert max(sum(losses[i : i + 200]) for i in range(801)) <= 3.0
        assert sum(losses) > 4 * 2.0, "and drafting returns"


def test_five_large_trees_in_vain_stop_nothing_and_a_gain_makes_up_for_them() -> None:
    allowance = WindowAllowance()
    for _ in range(5):
        assert allowance.covers(0.5)
        allowance.book(0.5)
    assert not allowance.covers(0.5)
    assert not allowance.covers_trial(0.1)
    allowance.book(-3.0)
    assert allowance.covers_trial(0.5)


def test_plain_rounds_that_were_only_seen_read_first_are_taken_to_follow() -> None:
    around = Around()
    around.observe(PLAIN, 1, 0.7, 0.0)
    around.observe(SHALLOW, 1, 0.6, 0.0, followed=True)
    assert around.seconds(PLAIN, 1, 0.0) == 0.7, "no gap is known"
    around.observe(SHALLOW, 1, 1.1, 0.0, followed=False)
    assert around.gap(1) == pytest.approx(0.5)
    assert around.seconds(PLAIN, 1, 0.0) == pytest.approx(0.2)
    around.observe(PLAIN, 1, 0.3, 0.2, followed=True)
    assert around.seconds(PLAIN, 1, 0.0) == pytest.approx(0.3), "once some have followed, as they took"
