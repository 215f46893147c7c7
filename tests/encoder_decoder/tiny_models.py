"""Tiny random encoder-decoders, as transformers makes and saves them, and the same ones as targets."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import MarianConfig, MarianMTModel, T5Config, T5ForConditionalGeneration

from forerun.models.encoder_decoder.config import EncoderDecoderConfig
from forerun.models.encoder_decoder.target import EncoderDecoder
from forerun.models.native import library as native

VOCAB, PAD = 64, 63
NAMES = ("t5", "t5-gated", "marian")
_T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_MARIAN = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 96, "max_position_embeddings": 128,
    "pad_token_id": PAD, "eos_token_id": 0, "decoder_start_token_id": PAD, "scale_embedding": True,
    "activation_function": "swish",
}  # fmt: skip


@cache
def make_model(name: str, seed: int = 0) -> Any:
    """A model of transformers whose texts are lively: layers outweigh the embedding, which else repeats itself."""
    torch.manual_seed(seed)
    if name == "marian":
        model: Any = MarianMTModel(MarianConfig(**_MARIAN))
        model.generation_config.bad_words_ids = [[PAD], [5, 6]]
        model.generation_config.forced_eos_token_id = 0
    else:
        gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if name == "t5-gated" else {}
        model = T5ForConditionalGeneration(T5Config(**_T5, decoder_start_token_id=0, **gated))
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if weight.dim() > 1 and "positions" not in part:
                weight.normal_(0, _spread(name, part))
            if "fc2" in part and weight.dim() > 1:
                weight -= weight.mean(1, keepdim=True)  # what swish leaves on average says nothing
        if name == "marian":
            model.final_logits_bias.normal_(0, 0.3)
            model.final_logits_bias[0, PAD] = 4.0  # the start token would follow nearly everywhere
    model.tie_weights()
    return model.eval()


def _spread(name: str, part: str) -> float:
    if "shared" in part:
        return 0.3 if name == "marian" else 0.15
    return 0.15 if name == "marian" and ("attn" in part) else 0.7


@cache
def folder_of(name: str, seed: int = 0) -> Path:
    """The model as transformers saves it."""
    folder = Path(mkdtemp())
    make_model(name, seed).save_pretrained(folder)
    return folder


def config_of(name: str, seed: int = 0) -> EncoderDecoderConfig:
    folder = folder_of(name, seed)
    files = [json.loads((folder / file).read_text()) for file in ("config.json", "generation_config.json")]
    return EncoderDecoderConfig.from_hf(*files)


def make_target(name: str, *, in_torch: bool = False, seed: int = 0, **options: Any) -> EncoderDecoder:
    """By the native kernels where they are, and always in torch where that is asked for."""
    mode = "float32" if native.available() and not in_torch else None
    weights = load_file(folder_of(name, seed) / "model.safetensors")
    return EncoderDecoder(config_of(name, seed), weights, mode=mode, **options)


def eos_of(name: str) -> int:
    return int(make_model(name).generation_config.eos_token_id)


def sources(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Of mixed lengths, with an end token."""
    chosen = torch.Generator().manual_seed(seed)
    lengths = [3 + 5 * i % 17 for i in range(count)]
    return [(*torch.randint(2, PAD, (n,), generator=chosen).tolist(), 1) for n in lengths]


def reference(name: str, source: tuple[int, ...], max_tokens: int, seed: int = 0, **options: Any) -> list[int]:
    """What transformers itself writes, greedily."""
    found = make_model(name, seed).generate(
        torch.tensor([source]), num_beams=1, do_sample=False, max_new_tokens=max_tokens, **options
    )
    return [int(token) for token in found[0][1:]]
