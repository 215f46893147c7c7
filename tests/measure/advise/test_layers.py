"""`forerun layers`: what is measured in windows is what real rounds accept, and the search finds what is useless."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.api.llm import LLM
from forerun.build.engine import make_engine
from forerun.cli import app
from forerun.control.cost import CostModel
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.drafters.model.layer_skip import LayerPlan, read_plan
from forerun.measure.advise import layers
from forerun.measure.advise.layers import (
    DEPTH,
    Judge,
    Shares,
    cut_windows,
    gains,
    neighbour,
    rank,
    release,
    search,
    sizes,
    sublayers,
    survivals,
    without,
)
from forerun.models.base import LayerSubset
from forerun.models.decoder import Decoder
from tests.exactness.harness import run
from tests.measure.conftest import Letters
from tests.models.tiny_checkpoints import make_decoder, make_reference, save

LAYERS = 3
FLAT = CostModel({1: 1.0, 2: 1.0, 64: 1.0})
PROMPTS = [(5, 6, 7, 8), (1, 2, 3), (9, 9), (30, 31, 32, 33, 34)]


@pytest.fixture
def target(tmp_path: Path) -> Decoder:
    """A decoder in which the second attention and the last MLP add nothing."""
    config, weights = save(make_reference("smollm2"), tmp_path)
    weights["model.layers.1.self_attn.o_proj.weight"].zero_()
    weights["model.layers.2.mlp.down_proj.weight"].zero_()
    return make_decoder(config, weights)


def texts_of(target: Decoder) -> list[tuple[tuple[int, ...], list[int]]]:
    engine = make_engine(target, frozenset(), SpeculativeConfig(drafter="none"))
    requests = [Request(prompt, SamplingParams(max_tokens=32, ignore_eos=True)) for prompt in PROMPTS]
    return list(zip(PROMPTS, run(engine, requests)[0], strict=True))


def judge_of(target: Decoder) -> Judge:
    return Judge(target, cut_windows(target, texts_of(target), 40), FLAT)


@pytest.mark.slow
def test_windows_count_what_a_round_would_accept(target: Decoder) -> None:
    """Against real rounds, one for each window, by the engine."""
    windows = cut_windows(target, texts_of(target), 12)
    assert len(windows) <= 12
    part = target.shared().partial
    assert part is not None
    reached = survivals(part(LayerSubset(2)), windows)
    accepted = []
    for window in windows:
        speculative = SpeculativeConfig(
            drafter="layer_skip", draft_layers="2", budget=DEPTH, width=1, controller="fixed"
        )
        engine = make_engine(target, frozenset(), speculative)
        engine.submit(Request(tuple(window.seq.tokens), SamplingParams(max_tokens=DEPTH + 1, ignore_eos=True)))
        event = engine.step()[0]
        accepted.append(event.accepted)
        while engine.busy:
            engine.step()
    assert reached == tuple(sum(n >= depth for n in accepted) / len(windows) for depth in range(1, DEPTH + 1))
    assert survivals(part(LayerSubset(LAYERS)), windows) == (1.0,) * DEPTH
    release(target, windows)
    assert target.used_slots == 0


@pytest.mark.slow
def test_the_search_leaves_out_what_adds_nothing(target: Decoder) -> None:
    judge = judge_of(target)
    assert set(rank(judge, lambda: True)[:2]) == {("attention", 1), ("mlp", 2)}
    judge.judge(LayerSubset(LAYERS))  # all of it would draft best, and is no part
    found = search(judge, seconds=3.0)
    parts = [one for one in judge.tried.values() if one.layers != LayerSubset(LAYERS)]
    assert found.gain == max(one.gain for one in parts)
    useless = LayerSubset(LAYERS, without_attention=frozenset({1}), without_mlp=frozenset({2}))
    assert judge.judge(useless).survivals == (1.0,) * DEPTH
    assert found.gain >= judge.judge(useless).gain > judge.judge(LayerSubset(LAYERS - 1)).gain
    assert {LayerSubset(1), LayerSubset(2)} <= set(judge.tried)


def test_a_search_without_time_still_answers(target: Decoder) -> None:
    assert search(judge_of(target), seconds=0.0).layers in (LayerSubset(1), LayerSubset(2))


def test_gains_by_hand() -> None:
    """Two of four layers, a head as large as a layer: a level costs 3/5, and an exit saves rows in the pass."""
    shares, cost = Shares(0.1, 0.1, 0.2), CostModel({1: 1.0, 2: 1.5, 3: 2.0})
    exits = gains(LayerSubset(2), (0.5, 0.25), shares, cost)
    assert exits == pytest.approx((1.5 / (0.4 + 0.6 * 1.5 + 0.6), 1.75 / (0.4 + 0.6 * 2.0 + 1.2)))
    noisy = CostModel({1: 1.0, 2: 0.5, 3: 0.6})  # a pass over more nodes is never cheaper
    assert gains(LayerSubset(2), (0.5,), shares, noisy) == pytest.approx((1.5 / (1.0 + 0.6),))
    skips = LayerSubset(4, without_attention=frozenset({0, 1}), without_mlp=frozenset({0, 1}))
    assert gains(skips, (0.5,), shares, cost) == pytest.approx((1.5 / (1.5 + 0.6),))
    assert Shares.of(make_config()).head + LAYERS * sum(shares_of(make_config())) == pytest.approx(1.0)


def make_config() -> Any:
    from forerun.models.config import DecoderConfig

    return DecoderConfig.from_hf(make_reference("smollm2").config.to_dict() | {"model_type": "llama"})


def shares_of(config: Any) -> tuple[float, float]:
    shares = Shares.of(config)
    return shares.attention, shares.mlp


def test_neighbours_differ_by_one() -> None:
    rng, start = random.Random(0), without(LAYERS, [("mlp", 1)])
    seen = {neighbour(start, LAYERS, rng) for _ in range(200)}
    assert LayerSubset(LAYERS) in seen  # one less
    assert without(LAYERS, [("mlp", 1), ("attention", 2)]) in seen  # one more
    assert without(LAYERS, [("attention", 0)]) in seen  # another
    assert all(abs(one.sublayers - start.sublayers) <= 1 for one in seen)
    assert neighbour(LayerSubset(2), LAYERS, rng).end == LAYERS  # an exit goes on as a skip set
    assert sizes(60)[0] >= 1
    assert sizes(60)[-1] < len(list(sublayers(30)))


@pytest.mark.slow
def test_the_commands(
    target: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine(target, frozenset(), SpeculativeConfig(drafter="none"), tokenizer=Letters())
    monkeypatch.setattr(layers, "load", lambda settings: (LLM(engine, Letters(), "tiny"), FLAT))  # type: ignore[arg-type]
    monkeypatch.setattr("forerun.cli.drafters.check_model", lambda model: None)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abcabc", "hello there")))
    plan = tmp_path / "plan.json"
    words = ["--prompts", str(prompts), "--max-tokens", "20"]
    assert command(monkeypatch, "layers", "search", "--out", str(plan), "--seconds", "0.5", *words) == 0
    assert "candidates" in capsys.readouterr().out
    found = read_plan(str(plan), LAYERS)
    assert found.notes["predicted_speedup"] > 0
    assert command(monkeypatch, "layers", "measure", str(plan), *words, "--json", "-") == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["accepted"] == found.notes["accepted"]
    assert command(monkeypatch, "layers", "measure", "9", *words) == 2
    assert "exit must be 1 to 3" in capsys.readouterr().err


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["forerun", *words])
    with pytest.raises(SystemExit) as ended:
        app.main()
    return int(ended.value.code or 0)


def test_a_plan_with_an_adapter_is_measured_with_it(target: Decoder) -> None:
    from forerun.drafters.model.layer_skip import ExitAdapter

    judge = judge_of(target)
    norm = target.shared().final_norm
    assert norm is not None
    silent = ExitAdapter(torch.ones(32), torch.zeros(4, 32), torch.zeros(32, 4), norm, target.config.norm_eps)
    flipped = ExitAdapter(torch.ones(32), torch.zeros(4, 32), torch.zeros(32, 4), -norm, target.config.norm_eps)
    bare, same, worse = (
        judge.measure(LayerPlan(LayerSubset(2), adapter)).survivals for adapter in (None, silent, flipped)
    )
    assert bare == same
    assert worse[0] < bare[0]
