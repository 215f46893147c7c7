"""Drafters on a GPU's twin: the same captured drafts serve the row that draws above T=0 and the row that chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forerun.api.llm import LLM
from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Request
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.eagle import HeadDraft
from forerun.measure.bench.settings import DrafterSetup
from lab.spec.load import Builder, Shape
from tests.gpu.heads import both_drafters
from tests.gpu.tiny import make_target
from tests.measure.conftest import Letters

FORM = Budget(5, 5)


@pytest.fixture
def built(tmp_path: Path) -> tuple[Builder, OnDevice[HeadDraft]]:
    target = make_target("llama", "cpu", kernels="torch")
    device, plain = both_drafters(target)
    drawing = OnDevice(device.draft, lambda: plain, sampled=True)
    engine = make_engine(target, frozenset(), SpeculativeConfig("ngram", controller="fixed"), EngineConfig(max_batch=1))
    builder = Builder(LLM(engine, Letters(), "tiny"), Shape(), tmp_path)  # type: ignore[arg-type]
    builder._kept["eagle3", "head", False] = drawing
    return builder, drawing


def test_rows_that_choose_draft_on_the_device_above_t_0(
    built: tuple[Builder, OnDevice[HeadDraft]], monkeypatch: pytest.MonkeyPatch
) -> None:
    builder, drawing = built
    setup = DrafterSetup("eagle3", "eagle3", None, "head")
    chosen = builder._build(setup, chosen=True)
    assert isinstance(chosen, OnDevice)
    assert chosen.draft is drawing.draft
    engine, grown = builder.llm.engine, list[str]()
    launch = drawing.draft.launch
    for name, drafter in (("drawn", drawing), ("chosen", chosen)):
        engine.drafters.add(name, drafter)

        def noting(*args: Any, name: str = name) -> object:
            grown.append(name)
            return launch(*args)

        monkeypatch.setattr(drawing.draft, "launch", noting)
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
        request = Request(tuple(range(3, 20)), params, name, "exact", FORM, cache_salt=None)
        (seq,) = builder.llm.driver.write([request])
        assert len(seq.tokens) == 25
        assert seq.drafting == name  # it was not switched off
    assert set(grown) == {"chosen"}


def test_a_composition_is_made_of_the_row_s_own_drafter(built: tuple[Builder, OnDevice[HeadDraft]]) -> None:
    builder, drawing = built
    both = builder._build(DrafterSetup("ngram+eagle3", "ngram+eagle3", None, "head"))
    assert isinstance(both, HybridDrafter)
    assert both.second is drawing
    assert both.first is builder.llm.engine.drafters.get("ngram")
