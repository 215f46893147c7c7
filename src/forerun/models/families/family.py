"""What a description of a model family says: its type, the names of norms, and rules for which layer has what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Slides = Callable[[Mapping[str, Any], int], bool]
RecurrentKind = Literal["short_conv", "delta_net", "mamba2"]


class Norms(NamedTuple):
    """What the files call a layer's norms; None = there is no norm in that place."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


BEFORE = Norms()
SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
ONLY_AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
GLM4_NORMS = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def in_every_layer(values: Mapping[str, Any], layer: int) -> bool:
    return True


def but_every_nth(values: Mapping[str, Any], layer: int) -> bool:
    return bool((layer + 1) % int(values["sliding_window_pattern"]))


def but_the_first_of_four(values: Mapping[str, Any], layer: int) -> bool:
    return layer % 4 > 0


def from_a_layer_on(values: Mapping[str, Any], layer: int) -> bool:
    return bool(layer >= values["max_window_layers"])


def in_the_first_even_layers(values: Mapping[str, Any], layer: int) -> bool:
    return bool(layer % 2 == 0 and layer < values["max_window_layers"])


def without_positions(values: Mapping[str, Any], layer: int) -> bool:
    return not rotates(values, layer)


def rotates(values: Mapping[str, Any], layer: int) -> bool:
    """Has this layer rotary positions? SmolLM3 leaves some out; its list says 1 where they are *in*."""
    if "no_rope_layer_interval" not in values:
        return True
    listed = values.get("no_rope_layers")
    return bool(listed[layer] if listed else (layer + 1) % int(values["no_rope_layer_interval"]))


@dataclass(frozen=True, slots=True)
class Family:
    """One family; settings are those of config.json, by their names there."""

    class_name: str  # transformers'
    settings: Mapping[str, Any] = field(default_factory=dict)  # that it reads, and their values where the file has none
    norms: Norms = BEFORE
    norm_offset: bool = False  # norms multiply by 1 + weight
    scaled_embedding: bool = False  # by the root of the width
    qk_norm: Literal["head", "all"] | None = None  # queries and keys are normed head by head, or all heads at once
    slides: Slides | None = None  # which layers have the sliding window, where no layer_types say so
    local_rope: bool = False  # layers with a window have a rope of their own
    rope_in_windows: bool = False  # layers without a window have no positions, where there is a window
    rope_pairs: Literal["halves", "neighbours"] = "halves"  # which dimensions rotate together
    sinks: bool = False  # every query head has a learned score that takes weight and brings no value
    experts: Literal["mixtral", "qwen", "gpt_oss", "granite", "deepseek", "gemma"] | None = None
    shared_gate: bool = True  # what its shared expert gives is multiplied by a sigmoid of the row
    varied: bool = False  # layers of two sizes, some of which read the keys and values of earlier ones (Gemma 4)
    latent: bool = False  # keys and values of all heads are made of one short row per token (MLA)
    recurrent: RecurrentKind | None = None  # what the layers that layer_types calls neither full nor sliding are
    gated_attention: bool = False  # what attention finds is multiplied by a sigmoid of the layer's input
    gated: bool = True  # feed-forward layers multiply an opened gate by a second product
    only: Mapping[str, Any] = field(default_factory=dict)  # settings that must be this, where the file has them
    spellings: Mapping[str, str] = field(default_factory=dict)  # its own names of common settings, and ours
    names: tuple[tuple[str, str], ...] = ()  # parts of the names of weights: ours, and those in its files
    gguf: str | None = None  # llama.cpp's name of the architecture
    gguf_interleaves: bool = False  # its converter makes neighbours of the halves that rotate together


# What a config.json means where it says nothing. Everything else must be in the file.
COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
