"""transformers on the weights of an inflated model: the same function as our decoder's, and only timed when warm."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from forerun.core.errors import UnsupportedModel
from forerun.core.types import Needs, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.testing import FakeSeq
from lab.inflate.model import InflatedWeights, Shape
from lab.peers import transformers_gpu
from lab.peers.transformers_gpu import load_inflated, time_transformers
from tests.measure.conftest import CONFIG, random_weights

LARGER = Shape(width=48, layers=3, heads=4, kv_heads=2, head_dim=16, inner=64)
IDS = [3, 9, 27, 4, 12, 36]


@pytest.fixture(scope="module")
def weights() -> InflatedWeights:
    return InflatedWeights(CONFIG, random_weights(), LARGER, dtype=torch.float32)


def our_logits(weights: InflatedWeights) -> torch.Tensor:
    """Of our own decoder, behind every token."""
    config, device = DecoderConfig.from_hf(weights.config), torch.device("cpu")
    target = Decoder(config, weights, dtype=torch.float32, device=device, kv_slots=2000)
    seq = FakeSeq(1, IDS[:1], max_length=20)
    target.prefill([seq], Needs())
    logits = target.score([seq], TreeBatch.chains([IDS]), Needs()).logits
    assert logits is not None
    return logits


def their_logits(weights: InflatedWeights) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = load_inflated(weights)(torch.tensor([IDS])).logits[0]
    return logits


def test_it_is_the_same_model_as_ours(weights: InflatedWeights) -> None:
    torch.testing.assert_close(their_logits(weights), our_logits(weights), rtol=0, atol=1e-4)


def test_positions_are_not_those_of_the_meta_device(weights: InflatedWeights) -> None:
    rotary = [module.inv_freq for module in load_inflated(weights).modules() if hasattr(module, "original_inv_freq")]
    assert rotary
    assert all(one.device.type == "cpu" and bool(one.isfinite().all()) and float(one[0]) == 1.0 for one in rotary)


def test_weights_that_do_not_fit_are_refused() -> None:
    short = InflatedWeights(CONFIG, random_weights(), LARGER, dtype=torch.float32)
    short._names = short._names[:-2]
    with pytest.raises(UnsupportedModel, match="does not fit"):
        load_inflated(short)


def test_only_the_second_time_is_timed(weights: InflatedWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lengths = count(), []
    model = load_inflated(weights)
    generate = model.generate

    def counted(ids: Any, **options: Any) -> Any:
        text = generate(ids, **options)
        lengths.append(text.shape[1] - ids.shape[1])
        return text

    model.generate = counted
    monkeypatch.setattr(transformers_gpu, "load_inflated", lambda weights: model)
    monkeypatch.setattr(transformers_gpu, "perf_counter", lambda: float(next(clock)))
    prompts = [tuple(IDS), tuple(IDS[:3]), (5,)]
    # the clock ticks once a look: a cold call is looked at once, a warm one twice, one tick apart
    assert time_transformers(weights, prompts, tokens=7) == pytest.approx(7.0)
    assert lengths == [7] * 6
