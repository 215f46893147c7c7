"""Menus offer trees that a pass can hold, however few rows passes have (random loads cut them to 96)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forerun.core.offer import Form
from forerun.drafters.device import eagle_plan as draft_plan
from forerun.drafters.device import eagle_plan as menu
from forerun.drafters.device import model_graphs as chain_menu
from forerun.drafters.device import model_graphs as chain_plan
from forerun.models.cuda import plan
from tests.fuzz.world import limit_rows

HEAD, MODEL = (menu.forms_for, draft_plan.BUCKETS), (chain_menu.forms_for, chain_plan.BUCKETS)


@pytest.mark.parametrize(("forms_for", "buckets"), [HEAD, MODEL])
@pytest.mark.parametrize("most", [96, 128, 256, plan.MAX_ROWS])
def test_trees_of_a_menu_fit_a_pass(
    forms_for: Callable[[int], tuple[Form, ...]],
    buckets: tuple[int, ...],
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_rows(most, monkeypatch)
    for bucket in buckets:
        forms = forms_for(bucket)
        assert all(bucket * (form.nodes + 1) <= most for form in forms)
        assert forms or 2 * bucket > most, "a chain of one fits"


@pytest.mark.parametrize(("name", "batch"), [("head", 24), ("model", 32)])
def test_forms_that_do_not_fit_are_not_ready(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_rows(96, monkeypatch)
    made = menu.DraftMenu() if name == "head" else chain_menu.ChainMenu()
    ready = [form for form in made.forms if made.seconds(form, batch) < float("inf")]
    assert ready == [form for form in made.forms if batch * (form.nodes + 1) <= 96 and form.width == 1]
