"""A tiny random model with a tokenizer of letters, as a Hugging Face folder that other processes can load."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.models.tiny_checkpoints import VOCAB, make_reference, save

LETTERS = ["<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz ?.,ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"][:VOCAB]


def make_tiny_folder(folder: Path, family: str = "mistral-no-window") -> str:
    """Write it; long enough a context for prompts of several passes."""
    config, _ = save(make_reference(family), folder)
    config |= {"max_position_embeddings": 4096}
    add_tokenizer(folder, config, LETTERS[1])
    return str(folder)


def add_tokenizer(folder: Path, config: dict[str, Any], eos: str) -> None:
    """Give a model's folder the tokenizer of letters, with this one as the end."""
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": LETTERS.index(eos)}))
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "unk_token": "<unk>"}))
