"""HFTarget held to the contract of targets, one tiny random model per family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from forerun.core.errors import UnsupportedModel  # noqa: E402
from forerun.core.types import Needs  # noqa: E402
from forerun.models.hf import HFTarget  # noqa: E402
from forerun.testing import check_target  # noqa: E402

VOCAB = 96
LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 96, "initializer_range": 0.3,
}  # fmt: skip
GROUPED: dict[str, Any] = {**LLAMA_LIKE, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCAB, "n_positions": 96, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "initializer_range": 0.3,
    }),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", LLAMA_LIKE),
    "opt": ("OPTForCausalLM", "OPTConfig", {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 96, "init_std": 0.3,
    }),
    "bloom": ("BloomForCausalLM", "BloomConfig", {
        "vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3,
    }),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "falcon": ("FalconForCausalLM", "FalconConfig", {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "initializer_range": 0.3,
    }),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 8, "sliding_window": 5}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 5}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", GROUPED),
    "phi": ("PhiForCausalLM", "PhiConfig", LLAMA_LIKE),
}  # fmt: skip


def small(family: str) -> Any:
    torch.manual_seed(0)
    model_class, config_class, settings = FAMILIES[family]
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("family", FAMILIES)
def test_contract(family: str) -> None:
    model = small(family)
    check_target(lambda: HFTarget(model), vocab_size=VOCAB, needs=Needs((0, 1, -1)))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_contract_under_eager_attention(family: str) -> None:
    model = small(family)
    model.set_attn_implementation("eager")
    check_target(lambda: HFTarget(model), vocab_size=VOCAB, rounds=3)


def test_mamba_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(UnsupportedModel, match="mamba keeps a state that cannot be rolled back"):
        HFTarget(transformers.MambaForCausalLM(config))
