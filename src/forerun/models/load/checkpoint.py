"""A checkpoint by name: a known model, a .gguf file, a Hugging Face folder, an adapter's, or an id on the hub.

Opening is cheap: configuration and tensor names are read, weights and tokenizer are loaded when asked for.
Nothing is ever unpickled, but for tensors of an encoder-decoder (weights.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from forerun.core.errors import DamagedFile, UnsupportedModel
from forerun.models.adapters import AdaptedWeights, Adapter, is_adapter
from forerun.models.config import DecoderConfig, supports
from forerun.models.encoder_decoder.config import supports as is_encoder_decoder
from forerun.models.families import FAMILIES, WRAPPED
from forerun.models.load.catalog import cache_folder, find_model
from forerun.models.load.gguf import GgufFile, Metadata
from forerun.models.load.gguf_families import config_of, in_keys
from forerun.models.load.gguf_names import origins_of
from forerun.models.load.marian_tokenizer import MarianTokenizer
from forerun.models.load.quantized.layouts import QuantizedWeights
from forerun.models.load.quantized.scheme import is_quantised, quantization_of
from forerun.models.load.quantized.unstacked import unstack
from forerun.models.load.tokenizer import Tokenizer, read_json, tokenizer_from_folder, tokenizer_from_gguf
from forerun.models.load.weights import FILE, GgufWeights, PickledWeights, SafetensorsWeights, Weights

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    name: str  # what the user asked for
    path: Path
    config: dict[str, Any]  # Hugging Face style
    weights: Weights
    load_tokenizer: Callable[[], Tokenizer] = field(repr=False, compare=False)
    adapted_from: str = ""  # the base that an adapter changes: another target, whose texts are not the base's

    def tokenizer(self) -> Tokenizer:
        return self.load_tokenizer()


def open_checkpoint(name: str) -> Checkpoint:
    """Open a checkpoint by known name, path or hub id."""
    path = find_model(name)
    if not path.is_dir():
        return _open_gguf(name, path)
    return _open_adapter(name, path) if is_adapter(path) else _open_folder(name, path)


def _open_adapter(name: str, folder: Path) -> Checkpoint:
    adapter = Adapter.read(folder)
    under = find_model(adapter.base)
    if under.is_dir() and is_adapter(under):
        raise UnsupportedModel(f"{name} is an adapter of another adapter ({adapter.base}); merge that one first")
    base = open_checkpoint(adapter.base)
    log.warning(
        "%s is %s with a LoRA of rank %d: another target, whose texts are not %s's",
        name, adapter.base, adapter.rank, adapter.base,
    )  # fmt: skip
    weights = AdaptedWeights(base.weights, adapter)
    return Checkpoint(name, folder, base.config, weights, base.load_tokenizer, adapted_from=adapter.base)


def _open_gguf(name: str, path: Path) -> Checkpoint:
    file = GgufFile(path)
    config, metadata = config_of(file), Metadata.of(file)
    try:
        DecoderConfig.from_hf(config)
    except (DamagedFile, UnsupportedModel) as error:
        raise type(error)(in_keys(error, metadata)) from None
    weights = GgufWeights(file, origins_of(file, config), FAMILIES[config["model_type"]])
    return Checkpoint(name, path, config, weights, cache(lambda: tokenizer_from_gguf(metadata, cache_folder())))


def _open_folder(name: str, folder: Path) -> Checkpoint:
    config = read_json(folder / "config.json")
    weights = _weights_of(folder, config)
    if str(config.get("model_type")) in WRAPPED:
        log.warning("%s (%s) runs as a language model: text only, no images", name, config["model_type"])
        # releases of the same class differ in what they mean where they do not say it
        config.setdefault("tie_word_embeddings", not any(key.endswith("lm_head.weight") for key in weights))
    return Checkpoint(name, folder, config, weights, cache(lambda: _tokenizer_of(folder, config)))


def _weights_of(folder: Path, config: dict[str, Any]) -> Weights:
    pickled = (folder / FILE).is_file() and not any(folder.glob("*.safetensors"))
    if pickled and is_encoder_decoder(config):
        return PickledWeights(folder)
    weights = SafetensorsWeights(folder)
    ours = supports(config)
    if not is_quantised(config) or not (ours or is_encoder_decoder(config)):
        found: Weights = weights  # transformers reads the formats of other families itself
        if ours:
            weights.check_kinds()
    else:
        found = QuantizedWeights(weights, quantization_of(config))
    return unstack(config["model_type"], found) if ours else found


def _tokenizer_of(folder: Path, config: dict[str, Any]) -> Tokenizer:
    if (folder / "source.spm").is_file() and not (folder / "tokenizer.json").is_file():
        return MarianTokenizer(folder, config)
    nested = config.get("text_config")
    return tokenizer_from_folder(folder, {**nested, **config} if isinstance(nested, dict) else config)
