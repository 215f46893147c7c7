"""Recurrent hybrids and latent attention on a GPU, in torch and captured: bits of a fresh read of the same path."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Needs, Request, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.cuda.hybrid import CudaHybrid
from forerun.models.decoder import Decoder
from forerun.models.hybrid.target import torch_decoder
from forerun.models.load.shapes import expected_shapes
from forerun.testing import FakeSeq, check_target, extend, path_to, random_tree, random_verdict, tree_of
from forerun.verify.greedy import device_walk
from forerun.verify.sampled import SampledTokens
from tests.gpu.tiny import need_cuda

pytestmark = pytest.mark.gpu
VOCAB = 500
_SIZES = {"vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
_DELTA_NET = {"head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_hidden_layers": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_bias": False},
    "qwen3_5_text": _DELTA_NET,
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "shared_intermediate_size": 512,
        "mamba_n_heads": 16,
        "mamba_d_state": 64,
        "num_local_experts": 0,
        "tie_word_embeddings": True,
    },
    "qwen3_next": {
        **_DELTA_NET,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "global_head_dim": 128,
        "sliding_window": 40,
        "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "kv_lora_rank": 96,
        "q_lora_rank": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 128,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
}
HYBRIDS = ["lfm2", "qwen3_5_text", "granitemoehybrid", "qwen3_next"]


def make_target(name: str, dtype: torch.dtype = torch.bfloat16, *, in_torch: bool = True) -> Decoder | CudaHybrid:
    need_cuda()
    config, none = DecoderConfig.from_hf({"model_type": name, **_SIZES, **SETTINGS[name]}), dict[str, Any]()
    draws, weights = torch.Generator().manual_seed(1), dict[str, Tensor]()
    for key, shape in expected_shapes(config, none):  # type: ignore[arg-type]
        weight = torch.randn(shape, generator=draws)
        vector = len(shape) == 1
        weights[key] = weight * 0.1 + (not config.norm_offset) if vector else weight * shape[-1] ** -0.5
    if in_torch:
        return torch_decoder(config)(config, weights, dtype=dtype, device="cuda", kv_slots=20_000)
    walk = device_walk(torch.device("cuda"))
    return CudaHybrid(
        config, weights, dtype=dtype, device="cuda", kv_slots=20_000, greedy_walk=walk, sampling=SampledTokens()
    )


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SETTINGS)
def test_hybrids_are_targets_to_the_bit(name: str, dtype: torch.dtype) -> None:
    check_target(lambda: make_target(name, dtype), vocab_size=VOCAB, needs=Needs((-1, 1)), atol=0.0)


@pytest.mark.parametrize("name", HYBRIDS)
def test_captured_hybrids_are_targets_to_the_bit(name: str) -> None:
    make = partial(make_target, name, in_torch=False)
    check_target(make, vocab_size=VOCAB, needs=Needs((-1, 1)), nodes=40, atol=0.0)


@pytest.mark.parametrize(
    ("name", "in_torch"), [(name, True) for name in SETTINGS] + [(name, False) for name in HYBRIDS]
)
def test_long_texts_trees_and_turns_have_the_bits_of_a_fresh_read(name: str, in_torch: bool) -> None:
    target, plain, rng = (*(make_target(name, in_torch=in_torch) for _ in range(2)), random.Random(3))
    seqs = [FakeSeq(b, text(b, n), max_length=900, cache_salt="") for b, n in enumerate((300, 62, 127, 2))]
    target.prefill(seqs, Needs())

    def fresh(tokens: list[int]) -> Tensor:
        seq = FakeSeq(1000, tokens, max_length=900)
        plain.prefill([seq], Needs())
        logits = plain.score([seq], TreeBatch.chains([tokens[-1:]]), Needs()).required_logits[0]
        plain.release(seq)
        return logits

    for _ in range(3):
        trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, 20) for seq in seqs], device=target.device)
        logits = target.score(seqs, trees, Needs()).required_logits
        for b, seq in enumerate(seqs):
            tokens, parents = tree_of(trees, b)
            for node in (0, len(tokens) - 1):
                path = [tokens[i] for i in path_to(parents, node)]
                assert torch.equal(logits[trees.starts[b] + node], fresh(seq.tokens + path))
        verdict = random_verdict(rng, trees, VOCAB)
        target.commit(seqs, trees, verdict)
        extend(seqs, trees, verdict)
    for seq in seqs:
        target.release(seq)
        again = FakeSeq(seq.id + 10, [*seq.tokens, 5], max_length=900, cache_salt="")
        target.prefill([again], Needs())
        assert target.reused_tokens(again) == len(seq.tokens) - 1
        root = TreeBatch.chains([[5]], target.device)
        assert torch.equal(target.score([again], root, Needs()).required_logits[0], fresh(again.tokens))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("name", "in_torch"),
    [("lfm2", True), ("qwen3_next", True), ("deepseek_v3", True), *((one, False) for one in HYBRIDS)],
)
def test_drafted_texts_are_the_plain_ones(name: str, in_torch: bool, temperature: float) -> None:
    params, texts = SamplingParams(max_tokens=60, temperature=temperature, seed=1, ignore_eos=True), []
    for drafter in ("none", "ngram"):
        config = SpeculativeConfig(drafter=drafter, controller="fixed", budget=6)
        engine = make_engine(make_target(name, in_torch=in_torch), frozenset(), config, EngineConfig(device="cuda"))
        seqs = [engine.find(engine.submit(Request(tuple(text(b, 20) * 3), params))) for b in range(4)]
        while engine.busy:
            engine.step()
        texts.append([seq.tokens for seq in seqs if seq is not None])
        assert (engine.stats.drafted > 0) == (drafter == "ngram")
    assert texts[0] == texts[1]
