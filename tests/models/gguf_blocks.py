"""GGUF files of small models in mixtures of types, as llama.cpp writes them, with weights like those of real models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forerun.models.load.quants import LAYOUTS
from tests.models.tiny_gguf import VOCAB, write_tokenizer

gguf = pytest.importorskip("gguf")

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER = 512, 4, 2, 128, 768
SPREAD = 0.04  # of weights
SHAPES = {
    "attn_q": (HEADS * HEAD_DIM, WIDTH),
    "attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
    "attn_v": (KV_HEADS * HEAD_DIM, WIDTH),
    "attn_output": (WIDTH, HEADS * HEAD_DIM),
    "ffn_gate": (INNER, WIDTH),
    "ffn_up": (INNER, WIDTH),
    "ffn_down": (WIDTH, INNER),
}
MORE = {"attn_v": "Q6_K", "ffn_down": "Q6_K"}  # bits for some tensors of some layers
MIXTURES: dict[str, list[dict[str, str]]] = {  # of each layer: the type of a tensor, or of all others
    "Q4_K_M": [{"": "Q4_K", **MORE}, {"": "Q4_K"}],
    "Q5_K_M": [{"": "Q5_K", **MORE}, {"": "Q5_K"}],
    "Q6_K": [{"": "Q6_K"}] * 2,
    "Q8_0": [{"": "Q8_0"}] * 2,
    "Q4_0": [{"": "Q4_0", "attn_v": "Q8_0"}, {"": "Q4_0", "ffn_down": "Q5_0"}],
    "Q4_1": [{"": "Q4_1"}, {"": "Q4_1", "attn_v": "Q8_0", "ffn_gate": "F16"}],
}


def random_rows(name: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """[rows, bytes] of a type: weights around zero."""
    kind = gguf.GGMLQuantizationType[name]
    if not name.endswith("_K"):
        plain = (rng.standard_normal((rows, columns)) * SPREAD).astype(np.float32)
        found: np.ndarray = gguf.quants.quantize(plain, kind)
        return found.view(np.uint8)
    layout = LAYOUTS[int(kind)]
    blocks = rng.integers(0, 256, (rows * columns // layout.weights, layout.bytes), dtype=np.uint8)
    count, bits = len(blocks), int(name[1])
    step = SPREAD / (1 << bits) * 3.5  # numbers are spread evenly
    wavering = rng.uniform(0.7, 1.3, count)
    if name == "Q6_K":
        steps = rng.integers(20, 127, (count, 16)) * rng.choice([-1, 1], (count, 16))
        blocks[:, 192:208] = steps.astype(np.int8).view(np.uint8)
        blocks[:, 208:210] = _halves(step / 70 * wavering)
    else:
        steps = rng.integers(20, 64, (count, 8))
        lows = np.clip(steps + rng.integers(-3, 4, (count, 8)), 0, 63)
        blocks[:, 4:16] = _six_bits(steps, lows)
        blocks[:, 0:2] = _halves(step / 40 * wavering)
        blocks[:, 2:4] = _halves(step / 40 * wavering * ((1 << bits) - 1) / 2)
    return blocks.reshape(rows, -1)


def write_mixture(path: Path, mixture: str, family: str = "llama", head: str | None = "Q6_K") -> Path:
    """A model of two layers; without a `head` its embedding, in Q6_K, is the head."""
    rng = np.random.default_rng(len(mixture))
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_block_count(2)
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    write_tokenizer(writer)

    def add(name: str, kind: str, shape: tuple[int, int]) -> None:
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, random_rows(kind, *shape, rng), raw_dtype=number)

    def norm(size: int = WIDTH) -> np.ndarray:
        return (1 + rng.standard_normal(size) * SPREAD).astype(np.float32)

    add("token_embd.weight", "F16" if head else "Q6_K", (VOCAB, WIDTH))
    if head:
        add("output.weight", head, (VOCAB, WIDTH))
    writer.add_tensor("output_norm.weight", norm())
    for layer, types in enumerate(MIXTURES[mixture]):
        at = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{at}{name}.weight", norm())
        for name, shape in SHAPES.items():
            add(f"{at}{name}.weight", types.get(name, types[""]), shape)
            if family == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                writer.add_tensor(f"{at}{name}.bias", norm(shape[0]) - 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _halves(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).view(np.uint8).reshape(-1, 2)


def _six_bits(steps: np.ndarray, lows: np.ndarray) -> np.ndarray:
    """The 12 bytes of eight steps and eight lows, as llama.cpp packs them."""
    first = steps[:, :4] | (steps[:, 4:] >> 4) << 6
    second = lows[:, :4] | (lows[:, 4:] >> 4) << 6
    third = (steps[:, 4:] & 15) | (lows[:, 4:] & 15) << 4
    return np.concatenate((first, second, third), 1).astype(np.uint8)
