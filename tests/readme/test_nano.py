"""examples/nano.py against the real engine, against its own plain loop, and its rule against the law."""

from __future__ import annotations

import runpy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.build.engine import make_engine
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from tests.readme.pages import ROOT

VOCAB, WIDTH, INNER = 24, 16, 24
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def nano() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "nano.py"))


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (WIDTH // 2, WIDTH)}
    shapes |= {"self_attn.v_proj": (WIDTH // 2, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH)}
    shapes |= {"mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER)}
    named = {"model.embed_tokens.weight": torch.randn(VOCAB, WIDTH, generator=generator)}
    named["model.norm.weight"] = torch.ones(WIDTH)
    for layer in range(2):
        for part, shape in shapes.items():
            named[f"model.layers.{layer}.{part}.weight"] = 0.4 * torch.randn(shape, generator=generator)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            named[f"model.layers.{layer}.{norm}.weight"] = torch.ones(WIDTH)
    return named


def drafters(nano: dict[str, Any]) -> dict[str, Any]:
    sample = partial(nano["sample"], size=VOCAB)
    return {"none": partial(nano["lookup"], depth=0), "lookup": nano["lookup"], "sample": sample}


def test_it_is_short() -> None:
    assert len((ROOT / "examples" / "nano.py").read_text().splitlines()) < 200


@pytest.mark.parametrize("drafter", ["none", "lookup", "sample"])
def test_greedy_text_is_the_engines(nano: dict[str, Any], weights: dict[str, Tensor], drafter: str) -> None:
    target = Decoder(DecoderConfig.from_hf(CONFIG), weights, dtype=torch.float32, device="cpu", kv_slots=None)
    engine = make_engine(target, frozenset(), SpeculativeConfig(drafter="none"))
    engine.submit(Request(tuple(PROMPT), SamplingParams(max_tokens=40)))
    wanted: list[int] = []
    while engine.busy:
        wanted += [token for event in engine.step() for token in event.tokens]
    llama = nano["Llama"](CONFIG, weights)
    tokens, rounds = nano["generate"](llama, PROMPT, drafters(nano)[drafter], max_tokens=40)
    assert tokens == wanted
    assert (rounds < 40) == (drafter != "none")


def test_stop_tokens_and_length_cut_an_accepted_path(nano: dict[str, Any], weights: dict[str, Tensor]) -> None:
    llama = nano["Llama"](CONFIG, weights)
    plain, _ = nano["generate"](llama, PROMPT, drafters(nano)["none"], max_tokens=40)
    for length in range(1, 20):
        assert nano["generate"](llama, PROMPT, nano["lookup"], max_tokens=length)[0] == plain[:length]
    end = plain[25]
    cut = nano["generate"](llama, PROMPT, nano["lookup"], max_tokens=40, stop=frozenset({end}))[0]
    assert cut == plain[: plain.index(end) + 1]


def committed(nano: dict[str, Any], p: Tensor, q: Tensor | None, texts: int = 3000) -> Tensor:
    """[V] how often each token came first when two siblings were drafted from q, or 0 and 1 were chosen."""
    rng, came = torch.Generator().manual_seed(1), torch.zeros(len(p))
    for _ in range(texts):
        tree = nano["chain"]([0])
        rest = torch.ones(len(p)) if q is None else q.clone()
        for choice in range(2):
            law = None if q is None else rest / rest.sum()
            child = choice if law is None else int(torch.multinomial(law, 1, generator=rng))
            tree.append(nano["Node"](child, 0, law))
            rest[child] = 0.0
        path, bonus = nano["verify"](tree, p.expand(3, -1), rng)
        came[tree[path[0]].token if path else bonus] += 1
    return came / texts


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("how", ["sampled", "chosen"])
def test_what_is_committed_has_the_targets_law(nano: dict[str, Any], how: str) -> None:
    p = torch.tensor([0.5, 0.1, 0.25, 0.15], dtype=torch.float64)
    q = torch.tensor([0.1, 0.6, 0.1, 0.2], dtype=torch.float64)
    assert (committed(nano, p, q if how == "sampled" else None) - p).abs().sum() / 2 < 0.025


@pytest.mark.slow
def test_negative_control_the_law_instead_of_the_residual_is_caught(nano: dict[str, Any]) -> None:
    p = torch.tensor([0.5, 0.1, 0.25, 0.15], dtype=torch.float64)
    q = torch.tensor([0.1, 0.6, 0.1, 0.2], dtype=torch.float64)
    scope = nano["verify"].__globals__
    right = scope["residual"]
    scope["residual"] = lambda p, q: p
    try:
        assert (committed(nano, p, q) - p).abs().sum() / 2 > 0.05
    finally:
        scope["residual"] = right
