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


def test_relatives_mean_what_they_leave_out() -> None:
    def read(model_type: str, **values: Any) -> DecoderConfig:
        plain = {key: SMOLLM2[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
        return DecoderConfig.from_hf({**plain, "model_type": model_type, "num_hidden_layers": 6, **values})

    heads = {"num_attention_heads": 32}
    cwm = read("cwm", **heads)
    assert cwm.windows == (None, 8192, 8192, 8192, None, 8192)
    assert [(rope.kind, rope.factor, rope.theta) for rope in cwm.ropes] == [("llama3", 16.0, 1e6)]
    assert read("gemma", hidden_act="gelu").activation == "gelu_tanh"  # the first files
    ministral3 = read("ministral3", **heads)
    assert (ministral3.ropes[0].kind, ministral3.max_length, ministral3.windows) == ("yarn", 16384, (None,) * 6)
    assert read("ministral", **heads).windows == (4096,) * 6
    exaone = read(
        "exaone4", sliding_window_pattern="LLLG", layer_types=["sliding_attention", "full_attention"] * 3, **heads
    )
    assert exaone.layer_ropes == (0, None) * 3
    assert read("exaone4", sliding_window=None, **heads).layer_ropes == (0,) * 6
    minimax = read("minimax_m2", head_dim=128, rotary_dim=64, **heads)
    assert (minimax.ropes[0].dims, minimax.ropes[0].theta) == (64, 5e6)
    assert read("minimax_m2", head_dim=128, **heads).ropes[0].dims == 128
    ernie = read("ernie4_5_moe", moe_layer_start_index=1, moe_layer_end_index=8, moe_layer_interval=2, **heads)
    assert ernie.sparse == (False, True, False, True, False, True)
    assert read("ernie4_5_moe", moe_layer_start_index=3, moe_layer_end_index=4, **heads).sparse.count(True) == 2
    lfm2 = read("lfm2_moe", layer_types=["conv", "full_attention"] * 3, moe_intermediate_size=64, **heads)
    assert lfm2.sparse == (False, False, True, True, True, True)
    shared = read("granitemoeshared", num_local_experts=4, num_experts_per_tok=2, **heads)
    assert shared.moe is not None
    assert shared.moe.shared_inner is None


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
        ({"model_type": "olmoe", "num_experts": 8, "clip_qkv": 8.0}, "clip_qkv=8.0 of olmoe: only None is supported"),
        ({"model_type": "lfm2_moe", "use_expert_bias": False}, "use_expert_bias=False of lfm2_moe"),
        ({"model_type": "ernie4_5_moe", "use_bias": True}, "use_bias=True of ernie4_5_moe"),
        ({"model_type": "ernie4_5_moe", "moe_norm_min": 0.5}, "moe_norm_min=0.5 of ernie4_5_moe"),
        ({"model_type": "minimax_m2", "scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"model_type": "arcee", "hidden_act": "silu"}, "hidden_act='silu'"),
        ({"model_type": "hunyuan_v1_dense"}, "model_type='hunyuan_v1_dense'"),
    ],
)
def test_what_we_cannot_run_is_said(change: dict[str, Any], said: str) -> None:
    config = {**SMOLLM2, **change}
    assert not supports(config)
    with pytest.raises(UnsupportedModel, match=said):
        DecoderConfig.from_hf(config)
