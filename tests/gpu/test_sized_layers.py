"""Layers of different sizes (Gemma 4) on the GPU decoder: what each part is for, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.errors import UnsupportedModel
from forerun.core.types import Needs, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.cuda.network import check_supported
from forerun.models.cuda.target import CudaDecoder
from forerun.testing import FakeSeq
from forerun.verify.greedy import device_walk
from tests.gpu.tiny import VOCAB, make_reference, make_target, weights_of

TOKENS = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
CPU = torch.device("cpu")


def _varied(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    assert config.varied is not None
    return replace(config, varied=replace(config.varied, **changes))


def _logits(config: DecoderConfig, weights: dict[str, Tensor]) -> Tensor:
    """Of the last ten tokens, behind a prompt."""
    walk = device_walk(CPU)
    target = CudaDecoder(config, weights, dtype=torch.float32, device=CPU, kv_slots=256, greedy_walk=walk)
    seq = FakeSeq(1, TOKENS[:31])
    target.prefill([seq], Needs())
    return target.score([seq], TreeBatch.chains([TOKENS[30:]]), Needs()).required_logits


CONTROLS: dict[str, tuple[str, Callable[[DecoderConfig], DecoderConfig]]] = {
    "nothing": ("zz-gemma4", lambda config: config),
    "another layer's keys": ("zz-gemma4", lambda config: _varied(config, sources=(0, 1, 2, 1, 0, 1))),
    "no inputs of layers": ("zz-gemma4", lambda config: _varied(config, input_width=0)),
    "a window that is one short": ("zz-gemma4", lambda c: replace(c, windows=tuple(w and w - 1 for w in c.windows))),
    "all pairs rotate": ("zz-gemma4", lambda c: replace(c, ropes=(replace(c.ropes[0], angles=16), c.ropes[1]))),
    "scaled scores": ("zz-gemma4-equal", lambda config: replace(config, attention_scale=0.25)),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_negative_control(control: str) -> None:
    name, change = CONTROLS[control]
    model = make_reference(name)
    config, weights = weights_of(model)
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS]), use_cache=False).logits[0, 30:]
    off = float((_logits(change(config), weights) - wanted).abs().max()) / float(wanted.std())
    assert off < 1e-4 if control == "nothing" else off > 1e-3


@pytest.mark.parametrize("part", ["layer_scalar", "per_layer_projection_norm", "embed_tokens_per_layer"])
def test_a_part_of_layer_inputs_that_is_left_out_is_caught(part: str) -> None:
    config, weights = weights_of(make_reference("zz-gemma4"))
    changed = {key: torch.ones_like(w) if "scalar" in part else w * 0 for key, w in weights.items() if part in key}
    assert changed
    assert not torch.allclose(_logits(config, weights | changed), _logits(config, weights), atol=1e-3)


def test_layers_do_not_run_apart_and_long_passes_are_not_tiled() -> None:
    shared, target = make_target("zz-gemma4", "cpu").shared(), make_target("zz-large-gemma4", "cpu")
    assert not shared.layers
    assert shared.partial is None
    assert target.grown.tiled_nodes == 0
    assert target.grown.group_nodes == 8  # of eight queries each


def test_sizes_without_kernels_are_named() -> None:
    config, _ = weights_of(make_reference("zz-gemma4"))
    with pytest.raises(UnsupportedModel, match="inputs of 40 numbers"):
        check_supported(_varied(config, input_width=40))
    with pytest.raises(UnsupportedModel, match="head_dim=24"):
        check_supported(_varied(config, sizes=((2, 16), (2, 24)) * 3))
