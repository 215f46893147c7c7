"""layer_skip through the real loop on real decoders: the plain text, the plan's file, and who is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.errors import DamagedFile, InvalidInput
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.drafters.model.layer_skip import ExitAdapter, LayerPlan, default_plan, read_plan, write_plan
from forerun.engine.engine import Engine
from forerun.models.base import LayerSubset
from forerun.models.decoder import Decoder
from forerun.testing import TableLM
from tests.exactness.harness import Letters, run
from tests.models.test_partial import KINDS, LAYERS, SKIPPED, decoder_of

PROMPTS = [(5, 6, 7, 8, 5, 6), (1, 2, 3, 1, 2, 3, 1), (9,), (4, 4, 4, 4), tuple(range(20)), tuple(range(19, -1, -1))]
REQUESTS = [
    Request(prompt, SamplingParams(max_tokens=12, temperature=0.9 * (i % 2), seed=i, ignore_eos=True))
    for i, prompt in enumerate(PROMPTS)
]
ADAPTER = ExitAdapter(
    *(torch.randn(shape, generator=torch.Generator().manual_seed(2)) for shape in (32, (6, 32), (32, 6), 32))
)


def engine_on(target: Decoder, drafter: str = "layer_skip", **settings: Any) -> Engine:
    speculative = SpeculativeConfig(drafter=drafter, controller="fixed", **{"budget": 4, **settings})
    return make_engine(target, frozenset({0}), speculative, EngineConfig(max_batch=3), Letters())


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("drafter", "width"), [("layer_skip", 1), ("layer_skip", 2), ("ngram>layer_skip", 1), ("ngram+layer_skip", 1)]
)
@pytest.mark.parametrize("plan", [LayerPlan(LayerSubset(2)), LayerPlan(SKIPPED), LayerPlan(LayerSubset(1), ADAPTER)])
def test_the_text_is_the_plain_one(kind: str, drafter: str, width: int, plan: LayerPlan, tmp_path: Path) -> None:
    """More sequences than run at once, greedy and sampled by a seed, in few slots."""
    write_plan(tmp_path / "plan.json", plan, LAYERS)
    target = decoder_of(kind, tmp_path / "model")
    wanted = run(engine_on(target, "none"), REQUESTS)
    engine = engine_on(target, drafter, width=width, draft_layers=str(tmp_path / "plan.json"))
    assert run(engine, REQUESTS) == wanted
    assert engine.stats.drafted > 50
    assert engine.drafters.get(drafter) is not None
    assert not engine.drafters._failed
    assert target.used_slots == 0
    assert not target.early_exits


@pytest.mark.parametrize("kind", KINDS)
def test_all_layers_draft_what_the_target_writes(kind: str, tmp_path: Path) -> None:
    """A draft that reads a wrong position, or stale keys, would still be exact: only its acceptance would tell."""
    target = decoder_of(kind, tmp_path)
    accepted = {}
    for layers in (LAYERS, 1):
        engine = engine_on(target, draft_layers=str(layers))
        run(engine, REQUESTS)
        accepted[layers] = engine.stats.accepted / engine.stats.drafted
    assert accepted[LAYERS] == 1.0
    assert accepted[1] < 0.5


def test_a_target_with_few_slots_sends_sequences_back_and_loses_none(tmp_path: Path) -> None:
    from tests.models.tiny_checkpoints import make_decoder, make_reference, save

    saved = save(make_reference("smollm2"), tmp_path)
    wanted = run(engine_on(make_decoder(*saved), "none"), REQUESTS)
    small = make_decoder(*saved, kv_slots=128)
    engine = engine_on(small, draft_layers="2")
    assert run(engine, REQUESTS) == wanted
    assert small.used_slots == 0


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = LayerPlan(SKIPPED, ADAPTER, {"model": "tiny", "tokens_per_round": 1.5})
    write_plan(tmp_path / "a.json", plan, LAYERS)
    read = read_plan(str(tmp_path / "a.json"), LAYERS)
    assert read.layers == SKIPPED
    assert read.notes["tokens_per_round"] == 1.5
    assert read.adapter is not None
    rows = torch.randn(5, 32)
    assert torch.allclose(read.adapter(rows), ADAPTER(rows), atol=2e-2)  # it is kept in 16 bits
    assert read_plan("2", LAYERS).layers == LayerSubset(2)
    assert default_plan(30).layers == LayerSubset(20)


def test_an_adapter_that_adds_nothing_is_the_targets_own_exit(tmp_path: Path) -> None:
    target = decoder_of("torch", tmp_path)
    norm, rows = target._final_norm, torch.randn(4, 32)
    eps = target.config.norm_eps
    stock = ExitAdapter(torch.ones(32), torch.randn(6, 32), torch.zeros(32, 6), norm, eps)
    assert torch.equal(stock(rows), target.final_norm_of(rows))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"format": "other"}, DamagedFile, "not a plan of layers"),
        ({"layers": 30}, InvalidInput, "was made for a model of 30 layers"),
        ({"exit": 4}, InvalidInput, "exit must be 1 to 3"),
        ({"exit": True}, InvalidInput, "exit must be 1 to 3"),
        ({"without_mlp": ["1"]}, InvalidInput, "whole numbers"),
        ({"without_mlp": [3]}, InvalidInput, "is not one of layers"),
        ({"adapter": "../x"}, DamagedFile, "a file beside it"),
        ({"adapter": "missing.safetensors"}, DamagedFile, "cannot be read"),
    ],
)
def test_a_plan_that_cannot_be_used_says_why(change: dict[str, Any], error: type, says: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, LayerPlan(LayerSubset(2)), LAYERS)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(error, match=says):
        read_plan(str(path), LAYERS)


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no such file"):
        read_plan(str(tmp_path / "none.json"), LAYERS)
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(DamagedFile, match="not JSON"):
        read_plan(str(tmp_path / "text.json"), LAYERS)
    (tmp_path / "bad.safetensors").write_bytes(b"123")
    with pytest.raises(DamagedFile, match="cannot be read"):
        ExitAdapter.read(tmp_path / "bad.safetensors")
    with pytest.raises(InvalidInput, match="32 wide"):
        ADAPTER.must_fit(8)


def test_a_target_whose_layers_cannot_run_apart_is_refused() -> None:
    for drafter in ("layer_skip", "ngram+layer_skip"):
        with pytest.raises(InvalidInput, match="layers can run apart"):
            make_engine(TableLM(8), frozenset(), SpeculativeConfig(drafter=drafter)).drafters.get(drafter)
