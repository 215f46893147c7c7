"""The benchmark of experts on a tiny model: its twins have one function, and its figures say what was measured."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.core.types import Budget
from forerun.models.load.checkpoint import open_checkpoint
from lab.inflate.model import PRESETS, Shape
from lab.moe.command import document, show_passes, show_rates
from lab.moe.passes import (
    ADAPTIVE,
    BUDGETS,
    NODES,
    Passes,
    Rate,
    Text,
    best_budget,
    measure_passes,
    measure_rates,
    pays_up_to,
)
from lab.moe.twins import Place, llm_of, make_mixture, make_twin
from tests.models.tiny_checkpoints import score_chain
from tests.models.tiny_gguf import VOCAB, write_tiny
from tests.native.blocks import needs_native

pytestmark = needs_native

PLACE = Place(mode="float32")


def _text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def test_twins_write_the_same_and_figures_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_checkpoint(str(write_tiny(tmp_path / "tiny.gguf", "llama")))
    mixture = make_mixture(opened, [_text(i, 40) for i in range(6)], 6, 2, PLACE)
    twin = make_twin(opened, 2, PLACE)
    got, wanted = (score_chain(target, _text(9, 30), 5, 60) for target in (mixture, twin))
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)

    texts = [Text(_text(50 + i, 6), _text(60 + i, 40)) for i in range(3)]
    passes = {"mixture": measure_passes(mixture, texts), "dense twin": measure_passes(twin, texts)}
    woken = passes["mixture"].woken
    assert woken[1] == 2
    assert woken[1] < woken[4] <= woken[32] <= 6
    assert passes["dense twin"].woken == {}
    assert mixture.used_slots == 0

    budgets = (0, 2, ADAPTIVE)
    rates = {}
    for name, target in (("mixture", mixture), ("dense twin", twin)):
        rates[name] = measure_rates(llm_of(opened, target, "ngram"), texts[:2], 12, budgets)
        assert rates[name][1]  # texts are equal
        assert rates[name][0][0].per_round == pytest.approx(1.0, abs=0.1)
    show_passes(passes, 6, 2)
    show_rates("mixture", *rates["mixture"])
    printed = capsys.readouterr().out
    assert "adaptive" in printed
    assert len(printed.splitlines()) == 1 + len(NODES) + 1 + len(budgets) + 1
    found = json.loads(json.dumps(document(passes, rates)))
    assert set(found["mixture"]["tokens_per_s"]) == {"0", "2", "-1"}


def test_a_larger_mixture_has_the_same_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "tiny", Shape(width=96, layers=4, heads=6, kv_heads=3, head_dim=16, inner=128))
    opened = open_checkpoint(str(write_tiny(tmp_path / "tiny.gguf", "llama")))
    texts, large = [_text(i, 40) for i in range(6)], Place(mode="float32", size="tiny")
    targets = [make_mixture(opened, texts, 6, 2, place) for place in (PLACE, large)]
    targets.append(make_twin(opened, 2, large))
    got = [score_chain(target, _text(9, 30), 5, 60) for target in targets]  # type: ignore[arg-type]
    torch.testing.assert_close(got[1], got[0], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(got[2], got[0], atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_what_runs_on_a_gpu_runs_in_torch_too(tmp_path: Path) -> None:
    """The same routers wake the same experts there; texts are equal at all settings."""
    opened = open_checkpoint(str(write_tiny(tmp_path / "tiny.gguf", "llama")))
    balanced, on_gpu = [_text(i, 40) for i in range(6)], replace(PLACE, plain_steps=True)
    targets = [make_mixture(opened, balanced, 6, 2, place) for place in (PLACE, on_gpu)]
    texts = [Text(_text(50 + i, 6), _text(60 + i, 40)) for i in range(3)]
    native, torched = (measure_passes(target, texts).woken for target in targets)
    assert native == torched
    assert set(native) == set(NODES)
    llm = llm_of(opened, targets[1], "ngram")
    rates, same = measure_rates(llm, texts[:2], 12, (0, 2, 5, ADAPTIVE), {5: Budget(5, 1, 5)})
    assert same
    assert rates[2].tokens == 24


def test_what_rates_say() -> None:
    def rate(per_second: float) -> Rate:
        return Rate(100, 50.0, 100 / per_second)

    speeds = dict(zip(BUDGETS, (10, 12, 14, 13, 11, 9, 8, 10.5, 7, 6), strict=True))
    rates = {budget: rate(speed) for budget, speed in speeds.items()} | {ADAPTIVE: rate(99)}
    assert best_budget(rates) == 2
    assert pays_up_to(rates) == 12
    poor = {budget: rate(10 - budget / 10) for budget in BUDGETS}
    assert (best_budget(poor), pays_up_to(poor)) == (0, 0)
    assert Passes({}, {1: 1.0}).woken == {}
