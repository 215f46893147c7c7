"""A head that is swapped while a text is written: that text keeps its head, others get the new one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.drafters.heads.eagle_head import write_head
from forerun.engine.driver import HeadSwap
from forerun.engine.engine import Engine
from tests.gpu.heads import make_head
from tests.gpu.tiny import make_target

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]


def write(engine: Engine, names: dict[int, list[int]]) -> None:
    for event in engine.step():
        assert event.error is None
        names[event.seq_id] += event.tokens


@pytest.mark.parametrize("device", DEVICES)
def test_texts_are_the_same_whenever_a_head_is_swapped(
    device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = make_target("llama", device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    config, weights = make_head(target, borrows=True)
    write_head(tmp_path / "a", config, weights)
    write_head(tmp_path / "b", config, {name: weight * 1.5 for name, weight in weights.items()})
    speculative = SpeculativeConfig(drafter="eagle3", draft_model=str(tmp_path / "a"), controller="fixed", budget=6)
    engine = make_engine(target, frozenset(), speculative)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = engine.submit(Request((3, 4, 5), params, drafter="none"))
    texts: dict[int, list[int]] = {plain: []}
    while engine.busy:
        write(engine, texts)
    first = engine.submit(Request((3, 4, 5), params))
    texts[first] = []
    for _ in range(3):
        write(engine, texts)
    order = HeadSwap(tmp_path / "b")
    order(engine)
    order.raise_error()
    running = engine.find(first)
    assert running is not None
    assert running.drafting == "eagle3@1"
    later = engine.submit(Request((3, 4, 5), params))
    texts[later] = []
    while engine.busy:
        write(engine, texts)
    assert texts[first] == texts[later] == texts[plain]
    assert "eagle3@1" not in engine.drafters._made
    assert "switched off" not in caplog.text
