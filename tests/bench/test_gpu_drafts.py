"""The benchmark of drafts on a GPU, with a small target on the CPU: its texts, its menu and its count of graphs."""

from __future__ import annotations

import pytest

from forerun.bench.gpu.drafts import ChangingForms, captured, measure_menu, measure_texts
from forerun.bench.gpu.rounds import make_drafter, random_head
from forerun.build import make_engine
from forerun.drafters.eagle.cuda.menu import forms_for
from forerun.params import EngineConfig, SpeculativeConfig
from forerun.testing import FakeSeq
from tests.gpu.tiny import make_target


@pytest.mark.parametrize("layers", [1, 2])
def test_texts_with_changing_forms_equal_plain_ones(layers: int) -> None:
    target = make_target("llama", "cpu")
    drafter = make_drafter(target, random_head(target, layers=layers), None)
    assert len(drafter.draft.net.model.layers) == layers
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=3))
    engine.drafters.add("head", drafter)
    engine.controller = ChangingForms()
    menu = measure_menu(drafter, target, 4, 500)
    assert menu["graphs"] == sum(len(forms_for(bucket)) for bucket in (1, 2, 4))
    found = measure_texts(engine, drafter, target, 5, 3)
    assert (found["texts"], found["differing"]) == (5, 0)
    assert found["captured_late"] == captured(target, drafter) == {"drafts": 0, "passes": 0}


def test_forms_change_every_few_rounds() -> None:
    controller, seqs = ChangingForms(), [FakeSeq(0, [1, 2, 3])]
    sizes = [controller.plan(seqs)[0].nodes for _ in range(60)]
    assert sizes[:5] == [0] * 5
    assert set(sizes) == {0, *(form.nodes for form in forms_for(1))}
