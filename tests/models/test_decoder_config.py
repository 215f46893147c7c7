"""config.json in all its spellings: old and new ropes, left-out defaults, and what we refuse."""

from typing import Any

import pytest

from forerun.core.errors import UnsupportedModel
from forerun.models.config import DecoderConfig, supports

SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}


def test_a_plain_file() -> None:
    config = DecoderConfig.from_hf(SMOLLM2)
    assert (config.head_dim, config.kv_heads, config.tied, config.max_length) == (64, 3, True, 8192)
    assert config.ropes[0].theta == 100000
    assert config.windows == (None,) * 30
    assert config.layer_ropes == (0,) * 30


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
)
def test_old_and_new_spelling_of_ropes_agree(scaling: dict[str, Any]) -> None:
    old = DecoderConfig.from_hf({**SMOLLM2, "rope_scaling": scaling})
    new = {key: value for key, value in SMOLLM2.items() if key not in ("rope_theta", "rope_scaling")}
    kind = scaling.get("rope_type") or scaling.get("type")
    parameters = {**scaling, "rope_type": kind, "rope_theta": 100000}
    assert DecoderConfig.from_hf({**new, "rope_parameters": parameters}) == old
    assert old.ropes[0].kind == kind


def test_scaled_ropes_reach_further() -> None:
    def reach(**scaling: Any) -> int:
        return DecoderConfig.from_hf({**SMOLLM2, "rope_scaling": scaling}).max_length

    assert reach(type="linear", factor=2.0) == 16384
    assert reach(type="yarn", factor=4.0, original_max_position_embeddings=8192) == 32768
    assert reach(type="yarn", factor=4.0, original_max_position_embeddings=2048) == 8192
    assert reach(rope_type="llama3", factor=8.0, original_max_position_embeddings=8192) == 8192


def test_gemma_leaves_most_of_it_out() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = DecoderConfig.from_hf({"model_type": "gemma3", "text_config": text})
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert (config.tied, config.qk_norm, config.activation) == (True, "head", "gelu_tanh")
    assert None not in config.norms
    assert config.windows[:6] == (1024,) * 5 + (None,)
    assert [(rope.kind, rope.theta) for rope in config.ropes] == [("linear", 1e6), ("default", 1e4)]
    assert config.layer_ropes[4:6] == (1, 0)
    assert config.max_length == 131072


def test_windows_follow_each_family() -> None:
    def windows(**values: Any) -> tuple[int | None, ...]:
        return DecoderConfig.from_hf({**SMOLLM2, "num_hidden_layers": 4, **values}).windows

    assert windows(model_type="mistral") == (4096,) * 4
    assert windows(model_type="mistral", sliding_window=None) == (None,) * 4
    assert windows(model_type="qwen2", sliding_window=9) == (None,) * 4
    on = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}
    assert windows(model_type="qwen2", **on) == (None, None, None, 9)
    assert windows(model_type="qwen2", layer_types=["full_attention", "sliding_attention"] * 2, **on) == (
        None,
        9,
        None,
        9,
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba"}, "model_type='mamba'"),
        ({"hidden_act": "relu"}, "relu"),
        ({"rope_scaling": {"type": "mrope"}}, "mrope"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, "num_experts_per_tok"),
    ],
)
def test_what_we_cannot_run_is_said(change: dict[str, Any], said: str) -> None:
    config = {**SMOLLM2, **change}
    assert not supports(config)
    with pytest.raises(UnsupportedModel, match=said):
        DecoderConfig.from_hf(config)
