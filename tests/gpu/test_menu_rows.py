"""Menus offer trees that a pass can hold, however few rows passes have (random loads cut them to 96)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from forerun.core.types import Form
from forerun.drafters.device import plan as menu
from forerun.models.cuda import plan
from forerun.models.cuda.graphs import Replays
from tests.fuzz.world import limit_rows

HEAD = menu.forms_for, menu.BUCKETS
MODEL = partial(menu.forms_for, forms=menu.CHAINS), menu.CHAIN_BUCKETS


@pytest.mark.parametrize(("forms_for", "buckets"), [HEAD, MODEL])
@pytest.mark.parametrize("most", [96, 128, 256, plan.MAX_ROWS])
def test_trees_of_a_menu_fit_a_pass(
    forms_for: Callable[[int], tuple[Form, ...]], buckets: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_rows(most, monkeypatch)
    for bucket in buckets:
        forms = forms_for(bucket)
        assert all(bucket * (form.nodes + 1) <= most for form in forms)
        assert forms or 2 * bucket > most, "a chain of one fits"


@pytest.mark.parametrize(("name", "batch"), [("head", 24), ("model", 32)])
def test_forms_that_do_not_fit_are_not_ready(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_rows(96, monkeypatch)
    made = menu.DraftMenu(chains=name == "model")
    ready = [form for form in made.forms if made.seconds(form, batch) < float("inf")]
    assert ready == [form for form in made.forms if batch * (form.nodes + 1) <= 96 and form.width == 1]


def test_a_draft_is_made_by_the_smallest_graph_that_holds_its_sequences() -> None:
    graphs = Replays(torch.device("cpu"), capture=True)
    made, form = menu.DraftMenu(graphs=graphs), Form(3, 3, 1)
    assert (made.bucket(form, 3), made.knows(form, 3)) == (4, False), "the one that it would be captured for"
    for bucket in (2, 8):
        made.note_captured(bucket, form)
    assert [made.bucket(form, batch) for batch in (1, 2, 3, 8, 9)] == [2, 2, 8, 8, 12]
    assert [made.knows(form, batch) for batch in (1, 2, 3, 8, 9)] == [True] * 4 + [False]
    assert made.trees(form, 3).trees == 8


def test_heads_switch_between_forms_and_draft_models_do_not() -> None:
    """A draft model has read the roots of its own chains alone."""
    assert [menu.DraftMenu(chains=chains).switches for chains in (False, True)] == [True, False]


def test_rows_are_those_of_the_graph_that_is_replayed() -> None:
    """Graphs of eight sequences come before those of four: until these are there, three are padded to eight."""
    graphs, form = Replays(torch.device("cpu"), capture=True), Form(3, 3, 1)
    made = menu.DraftMenu(graphs=graphs)
    assert made.rows(form, 3) == 4 * 4
    made.note_captured(8, form)
    assert made.rows(form, 3) == made.trees(form, 3).rows == 8 * 4
    made.note_captured(4, form)
    assert made.rows(form, 3) == made.trees(form, 3).rows == 4 * 4
