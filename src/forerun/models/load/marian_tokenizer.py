"""MarianTokenizer: a source.spm that cuts text, and a vocab.json that numbers the pieces of source and output.

The .spm file is a sentencepiece unigram model: one message in protocol buffers' wire format, of which the pieces with
their scores and the rules of normalisation are read here. The package `sentencepiece` is not needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.models import Unigram

from forerun.core.errors import DamagedFile, InvalidInput, UnsupportedModel, brief
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


SPACE = "\u2581"  # how pieces spell a space
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of the file
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_MODEL_TYPE, _UNIGRAM = 3, 1
_CHARSMAP, _DUMMY_PREFIX, _REMOVES_SPACES = 2, 3, 4
_UNKNOWN = 2  # the type of the piece that stands for what no piece spells


def read_pieces(path: Path) -> tokenizers.Tokenizer:
    """The model as a tokenizer whose tokens are pieces; their ids mean nothing outside the file."""
    try:
        return _read(path.read_bytes())
    except UnsupportedModel:
        raise
    except Exception as error:  # a damaged message, or pieces that `tokenizers` refuses with a bare Exception
        raise DamagedFile(f"{path} is no sentencepiece model ({brief(error)}); fetch it again") from None


def _read(data: bytes) -> tokenizers.Tokenizer:
    pieces: list[tuple[str, float]] = []
    unknown, charsmap, prefix, removes = 0, b"", True, True
    for field, value in _fields(data):
        if field == _PIECES:
            inner = dict(_fields(_bytes(value)))
            if inner.get(_PIECE_TYPE, 1) == _UNKNOWN:
                unknown = len(pieces)
            pieces.append((_bytes(inner[_PIECE_TEXT]).decode(), _float(inner.get(_PIECE_SCORE, b"\0" * 4))))
        elif field == _TRAINER:
            if dict(_fields(_bytes(value))).get(_MODEL_TYPE, _UNIGRAM) != _UNIGRAM:
                raise UnsupportedModel("this sentencepiece model is not a unigram model; add a tokenizer.json")
        elif field == _NORMALIZER:
            inner = dict(_fields(_bytes(value)))
            charsmap = _bytes(inner.get(_CHARSMAP, b""))
            prefix, removes = bool(inner.get(_DUMMY_PREFIX, 1)), bool(inner.get(_REMOVES_SPACES, 1))
    if not pieces:
        raise ValueError("it holds no pieces")
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if removes:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    made = tokenizers.Tokenizer(Unigram(pieces, unknown, byte_fallback=False))
    made.normalizer = normalizers.Sequence(steps)
    made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always" if prefix else "never", split=False)
    return made


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: whole numbers, or bytes (of text, of inner messages, of floats)."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of wire type {kind}")
        if at + size > len(data):
            raise ValueError("it ends in the middle of a field")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number is too long")


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number stands where bytes belong")
    return value


def _float(value: int | bytes) -> float:
    return float(struct.unpack("<f", _bytes(value))[0])
