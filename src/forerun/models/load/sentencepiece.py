"""Reads a sentencepiece unigram model (.spm) and cuts text into its pieces, over the `tokenizers` library.

The file is one message in protocol buffers' wire format, of which only a few fields matter here: the pieces with their
scores, and how text is normalised first. The package `sentencepiece` is not needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import Unigram

from forerun.core.errors import DamagedFile, UnsupportedModel, brief

SPACE = "\u2581"  # how pieces spell a space
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of the file
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_MODEL_TYPE, _UNIGRAM = 3, 1
_CHARSMAP, _DUMMY_PREFIX, _REMOVES_SPACES = 2, 3, 4
_UNKNOWN = 2  # the type of the piece that stands for what no piece spells


def read_pieces(path: Path) -> Tokenizer:
    """The model as a tokenizer whose tokens are pieces; their ids mean nothing outside the file."""
    try:
        return _read(path.read_bytes())
    except UnsupportedModel:
        raise
    except Exception as error:  # a damaged message, or pieces that `tokenizers` refuses with a bare Exception
        raise DamagedFile(f"{path} is no sentencepiece model ({brief(error)}); fetch it again") from None


def _read(data: bytes) -> Tokenizer:
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
                raise UnsupportedModel(
                    "this sentencepiece model is not a unigram model; add a tokenizer.json"
                )
        elif field == _NORMALIZER:
            inner = dict(_fields(_bytes(value)))
            charsmap = _bytes(inner.get(_CHARSMAP, b""))
            prefix, removes = bool(inner.get(_DUMMY_PREFIX, 1)), bool(inner.get(_REMOVES_SPACES, 1))
    if not pieces:
        raise ValueError("it holds no pieces")
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if removes:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    made = Tokenizer(Unigram(pieces, unknown, byte_fallback=False))
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
