"""A dense model made into experts keeps its function, and all of its experts are picked."""

import random
from pathlib import Path

import pytest
import torch

from forerun.core.errors import InvalidInput, UnsupportedModel
from forerun.models.layers import Experts
from lab.inflate.upcycle import UpcycledWeights, make_routers, upcycled_config
from tests.models.tiny_checkpoints import VOCAB, make_decoder, make_reference, save, score_chain


def _text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def test_logits_are_the_dense_models(tmp_path: Path) -> None:
    config, weights = save(make_reference("smollm2"), tmp_path)
    routers = make_routers(config, weights, [_text(seed, 40) for seed in range(8)], experts=5)
    upcycled = UpcycledWeights(weights, routers)
    mixture = make_decoder(upcycled_config(config, 5, 2), upcycled)  # type: ignore[arg-type]
    text = _text(99, 30)
    got, wanted = (score_chain(one, text, 10, 40) for one in (mixture, make_decoder(config, weights)))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
    for i, block in enumerate(mixture._blocks):
        assert isinstance(block.mlp, Experts)
        assert torch.equal(block.mlp.router, routers[i])
        assert block.mlp.gate_up[0].data_ptr() != block.mlp.gate_up[4].data_ptr()


def test_all_experts_are_picked_about_equally_often(tmp_path: Path) -> None:
    config, weights = save(make_reference("smollm2"), tmp_path)
    texts = [_text(seed, 40) for seed in range(12)]
    from lab.inflate.upcycle import _even_directions

    rows = torch.randn(600, 32) @ torch.randn(32, 32) + 5.0  # a mean, and directions of unlike spread
    even = _even_directions(rows, 6, torch.Generator().manual_seed(1))
    shares = torch.bincount((rows @ even.t()).argmax(-1), minlength=6) / 600
    assert float(shares.min()) > 0.4 / 6
    uneven = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    control = torch.bincount((rows @ uneven.t()).argmax(-1), minlength=6) / 600
    assert float(control.min()) < 0.1 / 6
    assert len(make_routers(config, weights, texts, experts=6)) == 3


@pytest.mark.slow
def test_what_cannot_be_upcycled_is_said(tmp_path: Path) -> None:
    config, _ = save(make_reference("llama2"), tmp_path)
    with pytest.raises(InvalidInput, match="3 of 2 experts"):
        upcycled_config(config, 2, 3)
    with pytest.raises(UnsupportedModel, match="only Llama"):
        upcycled_config({**config, "model_type": "qwen2"}, 4, 2)
