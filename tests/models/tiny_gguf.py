"""Tiny GGUF files for the tests of loading: a model of a few kilobytes for each family that is mapped."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, EXPERTS = 64, 4, 2, 16, 96, 24, 3
ATTENTION = {
    "attn_norm": (WIDTH,),
    "attn_q": (HEADS * HEAD_DIM, WIDTH),
    "attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
    "attn_v": (KV_HEADS * HEAD_DIM, WIDTH),
    "attn_output": (WIDTH, HEADS * HEAD_DIM),
    "ffn_norm": (WIDTH,),
}
DENSE = {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
MOE = {
    "ffn_gate_inp": (EXPERTS, WIDTH),
    "ffn_gate_exps": (EXPERTS, INNER, WIDTH),
    "ffn_up_exps": (EXPERTS, INNER, WIDTH),
    "ffn_down_exps": (EXPERTS, WIDTH, INNER),
}
SHARED = {
    "ffn_gate_shexp": (32, WIDTH),
    "ffn_up_shexp": (32, WIDTH),
    "ffn_down_shexp": (WIDTH, 32),
    "ffn_gate_inp_shexp": (WIDTH,),
}
HEAD_NORMS = {"attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)}
PHI = {
    "attn_norm": (WIDTH,),
    "attn_qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH),
    "attn_output": (WIDTH, HEADS * HEAD_DIM),
    "ffn_norm": (WIDTH,),
    "ffn_up": (2 * INNER, WIDTH),
    "ffn_down": (WIDTH, INNER),
}
BIASES = {"attn_q": HEADS * HEAD_DIM, "attn_k": KV_HEADS * HEAD_DIM, "attn_v": KV_HEADS * HEAD_DIM}
GEMMA = {"post_attention_norm": (WIDTH,), "post_ffw_norm": (WIDTH,)}
OLMO = {name: shape for name, shape in ATTENTION.items() if not name.endswith("norm")} | GEMMA
OLMO |= {"attn_q_norm": (HEADS * HEAD_DIM,), "attn_k_norm": (KV_HEADS * HEAD_DIM,)}
GLM4 = {"ffn_up": (2 * INNER, WIDTH), "ffn_down": (WIDTH, INNER)} | GEMMA
EXPERT_KEYS = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": INNER}

FAMILIES: dict[str, tuple[str, dict[str, Any], bool, dict[str, Any]]] = {  # architecture, tensors, biases, keys
    "llama": ("llama", ATTENTION | DENSE, False, {}),
    "mixtral": ("llama", ATTENTION | MOE, False, EXPERT_KEYS),
    "qwen2": ("qwen2", ATTENTION | DENSE, True, {}),
    "qwen3": ("qwen3", ATTENTION | DENSE | HEAD_NORMS, False, {}),
    "qwen2_moe": ("qwen2moe", ATTENTION | MOE | SHARED, True, EXPERT_KEYS),
    "qwen3_moe": ("qwen3moe", ATTENTION | MOE | HEAD_NORMS, False, EXPERT_KEYS),
    "gemma3_text": (
        "gemma3",
        ATTENTION | DENSE | HEAD_NORMS | GEMMA,
        False,
        {"attention.sliding_window": 512, "attention.key_length": HEAD_DIM},
    ),
    "gemma2": (
        "gemma2",
        ATTENTION | DENSE | GEMMA,
        False,
        {
            "attention.sliding_window": 5,
            "attention.key_length": HEAD_DIM,
            "attn_logit_softcapping": 9.0,
            "final_logit_softcapping": 7.0,
        },
    ),
    "olmo2": ("olmo2", OLMO | DENSE, False, {}),
    "olmo3": ("olmo2", OLMO | DENSE, False, {"attention.sliding_window": 5}),
    "granite": (
        "granite",
        ATTENTION | DENSE,
        False,
        {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.3, "logit_scale": 2.5},
    ),
    "glm4": ("glm4", ATTENTION | GLM4, True, {"rope.dimension_count": HEAD_DIM // 2}),
    "phi3": ("phi3", PHI, False, {}),
    "smollm3": ("smollm3", ATTENTION | DENSE, False, {}),
}


def write_tiny(
    path: Path,
    family: str = "llama",
    layers: int = 2,
    extra: dict[str, np.ndarray] | None = None,
    keys: dict[str, Any] | None = None,
    drop: str | None = None,
) -> Path:
    """A model of a few kilobytes, with a byte-level tokenizer."""
    architecture, tensors, biases, more = FAMILIES[family]
    writer = gguf.GGUFWriter(str(path), architecture)
    numbers = np.random.default_rng(0)
    settings: dict[str, Any] = {
        "block_count": layers,
        "context_length": 128,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        **more,
        **(keys or {}),
    }
    for key, value in settings.items():
        name = f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    write_tokenizer(writer)
    writer.add_tensor("token_embd.weight", numbers.standard_normal((VOCAB, WIDTH), np.float32))
    writer.add_tensor("output_norm.weight", numbers.standard_normal(WIDTH, np.float32))
    for layer in range(layers):
        for part, shape in tensors.items():
            name = f"blk.{layer}.{part}.weight"
            if name == drop:
                continue
            weight = numbers.standard_normal(shape).astype(np.float32)
            if part in ("attn_q", "ffn_gate_exps"):  # some quantised, to see rows moved while packed
                packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
                writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            else:
                writer.add_tensor(name, weight)
            if biases and part in BIASES:
                bias = numbers.standard_normal(BIASES[part]).astype(np.float32)
                writer.add_tensor(f"blk.{layer}.{part}.bias", bias)
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer(writer: Any) -> None:
    tokens = ["<|end|>", "<|start|>", *"abcdefghijklmnopqr", "ab", "cd", "abcd", "Ġ"]
    assert len(tokens) == VOCAB
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (VOCAB - 2))
    writer.add_token_merges(["a b", "c d", "ab cd"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
