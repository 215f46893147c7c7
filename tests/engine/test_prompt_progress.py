"""How much of a prompt is cached while it is being read, pass by pass, on real decoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forerun.build.engine import make_engine
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.models import decoder as decoder_module
from forerun.models import hf as hf_module
from forerun.models.hf import HFTarget
from tests.models.tiny_checkpoints import make_decoder, make_reference, save

PROMPT, ROWS = tuple(range(1, 21)), 8  # 19 tokens are cached before the first round: 8, 8 and 3


@pytest.mark.parametrize("kind", ["decoder", "hf"])
def test_progress_grows_with_every_pass(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "CHUNK", ROWS)
    monkeypatch.setattr(hf_module, "CHUNK", ROWS)
    model = make_reference("qwen2")
    target: Any = make_decoder(*save(model, tmp_path)) if kind == "decoder" else HFTarget(model)
    engine = make_engine(target, frozenset(), SpeculativeConfig(drafter="none"))
    seen: list[tuple[int, int]] = []
    name = "_run" if kind == "decoder" else "_pass"
    run_pass = getattr(target, name)

    def watched(*given: Any, **more: Any) -> Any:
        seen.append(engine.scheduler.prefill_progress())
        return run_pass(*given, **more)

    monkeypatch.setattr(target, name, watched)
    assert engine.scheduler.prefill_progress() == (0, 0)
    engine.submit(Request(PROMPT, SamplingParams(max_tokens=2)))
    for _ in range(3):  # a pass a step; the last one comes with the first round
        engine.step()
    assert seen == [(0, 19), (8, 19), (16, 19), (19, 19)]  # before each of three passes, and before the round
    assert engine.scheduler.prefill_progress() == (0, 0)  # nothing is being read any more
