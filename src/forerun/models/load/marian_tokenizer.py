"""MarianTokenizer: a source.spm that cuts text, and a vocab.json that numbers the pieces of source and output.

An encoder reads a text's pieces and an end token. Outputs are joined from their pieces alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forerun.core.errors import DamagedFile, InvalidInput, UnsupportedModel
from forerun.models.load.sentencepiece import SPACE, read_pieces
from forerun.models.load.tokenizer import Tokenizer, read_json

_SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class MarianTokenizer(Tokenizer):
    """Ids are vocab.json's; pieces that it lacks are unknown."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        if (folder / "target_vocab.json").is_file():
            raise UnsupportedModel(f"{folder} has two vocabularies, one for sources: that is not supported")
        self._folder = folder
        self._vocabulary = _read_vocabulary(folder / "vocab.json")
        super().__init__(read_pieces(folder / "source.spm"), (), None, None, _SPECIAL)
        self._texts = {index: piece for piece, index in self._vocabulary.items()}
        missing = [token for token in ("</s>", "<unk>") if token not in self._vocabulary]
        if missing:
            raise DamagedFile(f"{folder / 'vocab.json'} lacks {missing[0]}; fetch it again")
        self._end, self._unknown = self._vocabulary["</s>"], self._vocabulary["<unk>"]
        self._hidden = frozenset(self.special_ids())
        own = config.get("eos_token_id")
        self.eos_ids = frozenset({self._end, *([own] if type(own) is int else [])})

    @property
    def vocab_size(self) -> int:
        return max(self._texts) + 1

    def save(self, folder: Path) -> None:
        for name in ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json"):
            if (self._folder / name).is_file():
                (folder / name).write_bytes((self._folder / name).read_bytes())

    def to_json(self) -> str:
        raise InvalidInput("a Marian tokenizer has no tokenizer.json; grammars need a model that has one")

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """The pieces of a text; `add_special` adds the end token. A code such as >>fr<< in front is one piece."""
        ids = list[int]()
        if text.startswith(">>") and (end := text.find("<<")) > 0:
            ids, text = [self._vocabulary.get(text[: end + 2], self._unknown)], text[end + 2 :]
        ids += [
            self._vocabulary.get(piece, self._unknown)
            for piece in self._backend.encode(text, add_special_tokens=False).tokens
        ]
        return [*ids, self._end] if add_special else ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        hidden = self._hidden if skip_special else frozenset[int]()
        pieces = [self._texts.get(index, "<unk>") for index in ids if index not in hidden]
        return "".join(pieces).replace(SPACE, " ").removeprefix(" ")

    def vocabulary(self) -> dict[str, int]:
        return dict(self._vocabulary)

    def special_ids(self) -> set[int]:
        return {self._vocabulary[token] for token in _SPECIAL.values() if token in self._vocabulary}

    def token(self, index: int) -> str | None:
        return self._texts.get(index)


def _read_vocabulary(path: Path) -> dict[str, int]:
    if not path.is_file():
        raise DamagedFile(f"there is no {path}; fetch the model's tokenizer files into its folder")
    found = read_json(path)
    if not found or not all(type(index) is int and 0 <= index < 1 << 31 for index in found.values()):
        raise DamagedFile(f"{path} is not a vocabulary (pieces to ids); fetch it again")
    return found
