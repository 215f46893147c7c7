"""What forms take that did not run yet; and that a slow start of the process ties the controller to no form."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from forerun.control.cost import CostModel, RoundOverhead
from forerun.control.forms import FormChooser
from forerun.control.prices import Allowance
from forerun.core.types import PLAIN, Form

SMALL, LARGE = Form(15, 6, 5), Form(59, 7, 10)
# of a 1.5B on an H200, in ms
PASSES = {1: 1.4, 2: 1.4, 4: 1.4, 8: 1.4, 16: 1.5, 32: 1.6, 48: 2.0, 64: 2.1}
DRAFTS = {SMALL: 0.26, Form(31, 6, 8): 0.28, LARGE: 0.35}
TOKENS = {SMALL: 2.8, Form(31, 6, 8): 3.1, LARGE: 3.6}


class _Menu:
    forms = tuple(DRAFTS)

    def seconds(self, form: Form, batch: int) -> float:
        return DRAFTS[form]

    def rows(self, form: Form, batch: int) -> int:
        return batch * (1 + form.nodes)

    def expected(self, form: Form) -> float:
        return TOKENS[form]


def test_a_plain_round_that_was_read_first_does_not_speak_for_those_that_would_follow() -> None:
    around = RoundOverhead()
    around.observe(PLAIN, 1, 5.0, 0.0)
    assert around.seconds(SMALL, 1, 0.26) == pytest.approx(5.26)  # nothing else is known
    around.observe(LARGE, 1, 0.5, 5.35, followed=True, drafting=0.35)
    assert around.seconds(PLAIN, 1, 0.0) == pytest.approx(0.15)
    assert around.seconds(SMALL, 1, 0.26) == pytest.approx(0.26 + 0.15)
    assert around.seconds(LARGE, 1, 0.35) == pytest.approx(0.5)
    assert around.seconds(SMALL, 8, 0.26) == pytest.approx(0.26)  # another size of batch
    around.observe(PLAIN, 1, 0.3, 0.15, followed=True)
    assert around.seconds(PLAIN, 1, 0.0) == pytest.approx(0.3)  # one that followed speaks for itself


def test_rounds_that_were_read_first_show_nothing_of_other_forms() -> None:
    around = RoundOverhead()
    around.observe(PLAIN, 1, 0.2, 0.0)
    around.observe(LARGE, 1, 3.0, 0.55, followed=False, drafting=0.35)
    assert around.seconds(SMALL, 1, 0.26) == pytest.approx(0.46)


def test_a_text_may_lose_what_any_may_as_long_as_texts_before_have_gained_it() -> None:
    allowance = Allowance()
    start = allowance.level
    allowance.book(-3.0)
    allowance.begin()
    assert allowance.level == start  # what was gained is not lost again at once,
    allowance.book(2.0)
    allowance.begin()
    assert allowance.level == start  # but it pays for what was lost
    allowance.book(2.5)
    allowance.begin()
    assert -allowance.floor < allowance.level < start


@pytest.mark.parametrize("start", [0.1, 3.0, 10.0])
def test_a_slow_first_round_ties_nobody_to_large_trees(start: float) -> None:
    """The best form here is the one of 31 nodes; trees of 59 are 15% slower."""
    cost, rng, used = CostModel(dict(PASSES)), random.Random(3), Counter[int]()
    chooser = FormChooser(_Menu(), cost, Allowance(), 60, 10)
    for i in range(400):
        promise = chooser.choose([0], 1)
        form = promise.form
        rate = TOKENS[form] / (1.0 + TOKENS[form]) if form.nodes else 0.0
        accepted = next((n for n in range(form.depth) if rng.random() > 1.08 * rate), form.depth)
        rows = next(size for size in PASSES if size > form.nodes)
        own = DRAFTS[form] if form.nodes else start
        seconds = {"pass": PASSES[rows], "host": own, "draft": 0.0, "verdict": 0.0}
        chooser.observe(promise, [0], [accepted], 1, seconds, followed=bool(form.nodes))
        cost.observe(rows, PASSES[rows])
        used[form.nodes] += i >= 100
    assert used[LARGE.nodes] < 0.2 * used.total(), used
