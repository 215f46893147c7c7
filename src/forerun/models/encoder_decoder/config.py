"""EncoderDecoderConfig: the architecture of a T5 or Marian checkpoint, and its rules for sources and laws.

Read from config.json and generation_config.json, whose values go first where both have one, as in transformers.
A setting that is not understood raises UnsupportedModel: never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forerun.core.errors import DamagedFile, UnsupportedModel, brief
from forerun.core.request import LawRules, SourceRules

Activation = Literal["relu", "silu", "gelu", "gelu_tanh"]

T5 = ("t5", "mt5")
FAMILIES = (*T5, "marian")
# tokens of a source, or of an output, of families without a limit of their own: bounds the masks
NO_LIMIT = 4096
_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_LARGEST = 1 << 24


@dataclass(frozen=True, slots=True)
class StackConfig:
    layers: int
    heads: int
    inner: int


@dataclass(frozen=True, slots=True)
class RelativeConfig:
    """T5's positions: a bias for every head by the bucket of the distance between query and key."""

    buckets: int
    farthest: int  # distances from here on share a bucket


@dataclass(frozen=True, slots=True)
class EncoderDecoderConfig:
    """An encoder and a decoder that attends to it."""

    family: str
    vocab_size: int  # of the decoder
    source_vocab_size: int
    width: int
    head_dim: int
    encoder: StackConfig
    decoder: StackConfig
    activation: Activation
    gated: bool
    norms_first: bool  # a layer's parts norm what they read, and not what they leave
    norm_eps: float
    attention_scale: float
    embedding_scale: float
    head_scale: float  # of the rows that enter the LM head
    relative: RelativeConfig | None  # None = sinusoidal positions, added to the embedding
    max_length: int  # tokens of an output, the start token included
    source_rules: SourceRules

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> EncoderDecoderConfig:
        """Read the two files of a folder; UnsupportedModel says what about them we cannot run."""
        family = str(config.get("model_type"))
        values = {**config, **{key: value for key, value in generation.items() if value is not None}}
        try:
            return _t5(family, config, values) if family in T5 else _marian(config, values)
        except KeyError as missing:
            raise UnsupportedModel(
                f"config.json of {family} lacks {missing}: is it the model's own config?"
            ) from missing
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise DamagedFile(
                f"config.json of {family} has a value that cannot be ({brief(error)}); fetch it again"
            ) from error


def supports(config: Mapping[str, Any]) -> bool:
    """Is this the config.json of a family that runs here?"""
    return config.get("model_type") in FAMILIES


def _t5(family: str, config: Mapping[str, Any], values: Mapping[str, Any]) -> EncoderDecoderConfig:
    layers, heads = _size(config, "num_layers"), _size(config, "num_heads")
    width, vocab, inner = _size(config, "d_model"), _size(config, "vocab_size"), _size(config, "d_ff")
    kind = str(config.get("feed_forward_proj", "gated-gelu" if family == "mt5" else "relu"))
    name = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    # transformers scales unless the file says that the LM head is a table of its own
    tied = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", family == "t5")) is not False
    return EncoderDecoderConfig(
        family=family,
        vocab_size=vocab,
        source_vocab_size=vocab,
        width=width,
        head_dim=_size(config, "d_kv"),
        encoder=StackConfig(layers, heads, inner),
        decoder=StackConfig(_size(config, "num_decoder_layers", layers), heads, inner),
        activation=_activation(name),
        gated=kind.startswith("gated-"),
        norms_first=True,
        norm_eps=float(config.get("layer_norm_epsilon", 1e-6)),
        attention_scale=1.0,
        embedding_scale=1.0,
        head_scale=width**-0.5 if tied else 1.0,
        relative=RelativeConfig(
            _size(config, "relative_attention_num_buckets", 32), _size(config, "relative_attention_max_distance", 128)
        ),
        max_length=NO_LIMIT,
        source_rules=_rules(values, vocab, NO_LIMIT),
    )


def _marian(config: Mapping[str, Any], values: Mapping[str, Any]) -> EncoderDecoderConfig:
    width, heads = _size(config, "d_model"), _size(config, "decoder_attention_heads")
    if _size(config, "encoder_attention_heads") != heads or width % heads:
        raise UnsupportedModel(f"a Marian model {width} wide with {heads} heads cannot be run")
    vocab, longest = _size(config, "vocab_size"), _size(config, "max_position_embeddings")
    output = _size(config, "decoder_vocab_size", vocab)
    return EncoderDecoderConfig(
        family="marian",
        vocab_size=output,
        source_vocab_size=vocab,
        width=width,
        head_dim=width // heads,
        encoder=StackConfig(_size(config, "encoder_layers"), heads, _size(config, "encoder_ffn_dim")),
        decoder=StackConfig(_size(config, "decoder_layers"), heads, _size(config, "decoder_ffn_dim")),
        activation=_activation(config["activation_function"]),
        gated=False,
        norms_first=False,
        norm_eps=1e-5,
        attention_scale=(width // heads) ** -0.5,
        embedding_scale=width**0.5 if config.get("scale_embedding", True) else 1.0,
        head_scale=1.0,
        relative=None,
        max_length=longest,
        source_rules=_rules(values, output, longest),
    )


def _rules(values: Mapping[str, Any], vocab: int, longest: int) -> SourceRules:
    """Where decoding starts, and what transformers' own generation settings add to every law."""
    start = values.get("decoder_start_token_id")
    start = start if start is not None else values.get("pad_token_id")
    ends = values.get("eos_token_id")
    words = [tuple(word) for word in values.get("bad_words_ids") or ()]
    words = [word for word in words if word != (ends,)]  # as transformers: an end of text is never banned
    first, last = values.get("forced_bos_token_id"), values.get("forced_eos_token_id")
    for token in [start, *(token for word in words for token in word), *(t for t in (first, last) if t is not None)]:
        if type(token) is not int or not 0 <= token < vocab:
            raise ValueError(f"token {token!r:.40} in a vocabulary of {vocab}")
    if not all(words):
        raise ValueError("an empty bad word")
    laws = LawRules(tuple(words), first, last)
    return SourceRules(int(start or 0), longest, None if laws == LawRules() else laws)


def _activation(name: Any) -> Activation:
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r:.40} is not one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _size(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values[key] if default is None else values.get(key) or default
    if type(value) is not int or not 1 <= value <= _LARGEST:
        raise ValueError(f"{key} is {value!r:.40}, not a whole number from 1 to {_LARGEST}")
    return value
