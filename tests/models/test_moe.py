"""Models with experts: the text that transformers' `generate` writes, in torch and natively, drafted or not."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.build.engine import make_engine
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.models.base import Target
from forerun.models.config import DecoderConfig
from forerun.models.layers import Experts, gate, mix, route
from forerun.models.moe import MoeConfig
from forerun.models.native import library as native_library
from forerun.models.native.target import NativeDecoder
from tests.exactness.harness import run
from tests.models.tiny_checkpoints import VOCAB, make_decoder, make_reference, reference_logits, save, score_chain

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"]
PROMPTS = 3
NEW = 30


def _load(where: str, config: dict[str, Any], weights: dict[str, Tensor]) -> Target:
    if where == "torch":
        return make_decoder(config, weights)
    if not native_library.available():
        pytest.skip(f"no native kernels: {native_library.why_not()}")
    return NativeDecoder(DecoderConfig.from_hf(config), weights, mode="float32", kv_slots=None)


def _prompts() -> list[tuple[int, ...]]:
    rng = random.Random(7)
    return [tuple(rng.randrange(VOCAB) for _ in range(5 + 4 * i)) for i in range(PROMPTS)]


def _written(model: Any, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return out[0, len(prompt) :].tolist()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("where", ["torch", "native"])
@pytest.mark.parametrize("name", FAMILIES)
def test_texts_are_those_of_generate(name: str, where: str, tmp_path: Path) -> None:
    model = make_reference(name)
    target = _load(where, *save(model, tmp_path))
    wanted = [_written(model, prompt) for prompt in _prompts()]
    requests = [Request(prompt, SamplingParams(max_tokens=NEW)) for prompt in _prompts()]
    for drafter in ("none", "ngram", "recycling"):
        chosen = SpeculativeConfig(drafter, budget=8, width=3, controller="fixed")
        engine = make_engine(target, frozenset(), chosen)
        assert run(engine, requests)[0] == wanted, drafter


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", FAMILIES)
def test_another_routing_is_another_text(name: str, tmp_path: Path) -> None:
    """The control of the test above: a model whose routers pick otherwise writes otherwise."""
    model = make_reference(name)
    config, weights = save(model, tmp_path)
    routers = [key for key in weights if key.endswith(("gate.weight", "router.weight"))]
    assert routers
    target = make_decoder(config, {**weights, **{key: weights[key].flip(0) for key in routers}})
    requests = [Request(prompt, SamplingParams(max_tokens=NEW)) for prompt in _prompts()]
    found = run(make_engine(target, frozenset(), SpeculativeConfig("none")), requests)[0]
    assert found != [_written(model, prompt) for prompt in _prompts()]


def test_a_softmax_router_that_is_corrected(tmp_path: Path) -> None:
    """ERNIE's, in torch; the control leaves the correction out."""
    model = make_reference("ernie4_5_moe")
    config, weights = save(model, tmp_path)
    name = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
    assert weights[name].shape == (1, 6)
    text, off = list(range(20, 50)), list[float]()
    for correction in (weights[name], weights[name] * 0):
        decoder = make_decoder(config, {**weights, name: correction})
        off.append(float((score_chain(decoder, text, 5, 40) - reference_logits(model, text)[5:]).abs().max()))
    assert off[0] < 1e-4
    assert off[1] > 1e-2
    reason = NativeDecoder.reason_against(DecoderConfig.from_hf(config))
    assert reason is not None
    assert "corrected softmax routers" in reason


@pytest.mark.parametrize("renormalise", [True, False])
def test_mix_is_the_sum_over_picked_experts(renormalise: bool) -> None:
    """By the definition, row by row and expert by expert; the shared one too."""
    torch.manual_seed(0)
    config = MoeConfig(experts=7, per_token=3, inner=12, renormalise=renormalise, shared_inner=None)
    router, gate_up, down = torch.randn(7, 16), torch.randn(7, 24, 16), torch.randn(7, 16, 12)
    rows = torch.randn(9, 16)
    laws = (rows @ router.t()).softmax(-1)
    wanted = torch.zeros(9, 16)
    for m in range(9):
        best = laws[m].argsort(descending=True)[:3].tolist()
        total = sum(float(laws[m, e]) for e in best) if renormalise else 1.0
        for e in best:
            inner = gate((gate_up[e] @ rows[m])[None], "silu")[0]
            wanted[m] += float(laws[m, e]) / total * (down[e] @ inner)
    found = mix(rows, Experts(router, gate_up, down), config, "silu")
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    picked = route(rows, router, config)[1]
    assert bool((picked.diff(dim=-1) > 0).all())  # in order, and none twice
