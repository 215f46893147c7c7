"""Random loads: every text is what its request gives alone. A few here; `make fuzz` runs hundreds.

A scenario that fails is played again, smaller, by `python -m tests.fuzz --first SEED --count 1`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forerun.core.params import SamplingParams
from tests.fuzz.damage import (
    Damage,
    captures_that_run_twice,
    drafters_that_are_built_meanwhile,
    only_those_who_go_on_are_asked,
    pages_found_by_one_token_too_many,
    paths_that_are_not_moved,
    positions_of_an_unread_round,
    prompts_beside_trees_without_limit,
    roots_of_a_neighbour,
    rounds_that_are_not_rolled_back,
    shared_pages_that_are_written,
)
from tests.fuzz.play import Counts, Wrong, play
from tests.fuzz.play_async import play_async
from tests.fuzz.scenario import FOLLOW, FORMS, PLAIN, Scenario, make_scenario, with_predictions
from tests.fuzz.shrink import shrink

SEEDS = (3001, 3003, 3004, 3008, 3009, 3010, 3011, 3013, 3018)

EVEN: dict[str, Any] = {
    "batch": 4, "pages": 200, "follows": True, "controller": "forms", "repeats": 60, "captures": False,
    "drafters": ("eagle3",), "late": False, "most_rows": 1024, "words": 3, "context": 2048, "shape": "qwen2",
}  # fmt: skip


def even(seed: int, ends: bool = False, **setting: Any) -> Scenario:
    """Rounds that follow each other, in a setting of which only this differs; `ends`: beside texts of one token."""
    made = make_scenario(seed, ("eagle3",), "twin")
    names = {**EVEN, **setting}
    requests = [
        replace(one, drafter=names["drafters"][0], cache_salt="") if one.drafter != "none" else one
        for one in made.requests
    ]
    if ends:
        short, long = (
            SamplingParams(max_tokens=1, logprobs=2, presence_penalty=0.5),
            SamplingParams(max_tokens=20, ignore_eos=True),
        )
        requests = [replace(one, params=short if i % 2 else long) for i, one in enumerate(requests)]
    if len(names["drafters"]) > 1:
        requests[-1] = replace(requests[-1], drafter=names["drafters"][1])
    return replace(made, setting=replace(made.setting, **names), requests=tuple(requests))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5002, 5004, 5008])
def test_every_text_of_plain_rounds_that_follow_is_too(seed: int) -> None:
    """Prompts beside nearly all of them, few pages, passes captured on the way."""
    scenario = even(seed, drafters=("none",), pages=14, captures=True, prompt_rows=(16, 64))
    assert play(scenario).followed > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5002, 5004])
def test_every_text_that_an_mtp_layer_drafts_for_is_too(seed: int) -> None:
    counts = play(even(seed, drafters=("mtp",), forms=((6, 3, 3), (3, 3, 1)), captures=True))
    assert counts.followed > 20
    assert counts.accepted > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5002, 5004, 5008])
def test_every_text_is_too_where_forms_change_behind_unread_rounds(seed: int) -> None:
    scenario = even(seed, controller="switching", forms=(*FORMS, PLAIN, PLAIN), pages=14, prompt_rows=(16, 64))
    counts = play(scenario)
    assert counts.followed > 30
    assert counts.accepted > 10


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_text_is_what_its_request_gives_alone(seed: int) -> None:
    assert play(make_scenario(seed)).tokens > 0


@pytest.mark.parametrize("seed", [3003, 3008])
def test_every_text_is_too_where_some_are_predicted(seed: int) -> None:
    scenario = with_predictions(make_scenario(seed))
    assert any(one.prediction for one in scenario.requests)
    assert play(scenario).tokens > 0


@pytest.mark.slow
def test_these_do_what_they_are_for() -> None:
    """Else they would prove nothing."""
    total = Counts()
    for seed in (3003, 3008, 3020):
        total.add(play(make_scenario(seed)))
    assert total.followed > 30
    assert total.accepted > 50
    assert total.faults > 0


TREES, CHAINS = ((6, 3, 3),), ((3, 3, 1),)
CONTROLS: list[tuple[Damage, Scenario]] = [
    (prompts_beside_trees_without_limit, even(5019, most_rows=96, prompt_rows=(512,), forms=TREES)),
    (captures_that_run_twice, even(5002, captures=True, forms=(*TREES, *CHAINS), repeats=4)),
    (captures_that_run_twice, even(5001, captures=True, forms=(*TREES, *CHAINS), repeats=4)),
    (paths_that_are_not_moved, even(5019, forms=TREES)),
    (roots_of_a_neighbour, even(5019, drafters=("none",), captures=True)),
    (rounds_that_are_not_rolled_back, make_scenario(3002, FOLLOW, "twin")),
    (only_those_who_go_on_are_asked, even(5001, ends=True, forms=CHAINS)),
    (shared_pages_that_are_written, even(5009, forms=CHAINS)),
    (pages_found_by_one_token_too_many, make_scenario(3002, FOLLOW, "twin")),
    (positions_of_an_unread_round, even(5000, forms=TREES)),
    (
        drafters_that_are_built_meanwhile,
        even(5000, captures=True, late=True, forms=TREES, drafters=("eagle3", "narrow")),
    ),
]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("damage", dict.fromkeys(damage for damage, _ in CONTROLS))
def test_negative_control_a_mistake_is_found(damage: Damage) -> None:
    """By one of its scenarios: which rounds are captured moves with everything that a plan weighs."""
    scenarios = [scenario for name, scenario in CONTROLS if name is damage]
    for scenario in scenarios:
        play(scenario)
    assert any(_is_noticed(scenario, damage) for scenario in scenarios)


def _is_noticed(scenario: Scenario, damage: Damage) -> bool:
    try:
        play(scenario, damage)
    except Wrong:
        return True
    return False


def test_a_scenario_that_fails_is_made_smaller() -> None:
    """Whatever fails where a request asks for four tokens or more: one such request is left, and little else."""

    def fails(scenario: Scenario) -> bool:
        return any(one.params.max_tokens >= 4 for one in scenario.requests)

    found = shrink(make_scenario(3003), still=fails)
    assert len(found.requests) == 1
    assert found.requests[0].params.max_tokens < 8
    assert len(found.requests[0].prompt) <= 3
    assert [order.kind for orders in found.steps for order in orders] == ["submit"]
    assert not found.setting.captures


@pytest.mark.parametrize("seed", [3001, 3004])
def test_every_text_is_the_same_by_way_of_an_event_loop(seed: int) -> None:
    assert play_async(make_scenario(seed)) > 0


@pytest.mark.fuzz
@pytest.mark.parametrize("hundred", range(4))
def test_many_more(hundred: int) -> None:
    wrong = dict[int, str]()
    for seed in range(10_000 + 100 * hundred, 10_100 + 100 * hundred):
        try:
            play(make_scenario(seed))
        except Wrong as error:
            wrong[seed] = str(error)
    assert not wrong
