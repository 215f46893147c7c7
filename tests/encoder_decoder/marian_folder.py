"""A tiny Marian model as its authors publish one: a pickled state, two sentencepiece files and a vocabulary."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch

from tests.encoder_decoder.tiny_models import PAD, VOCAB, make_model

WORDS = ["\u2581the", "\u2581cat", "\u2581sees", "\u2581a", "\u2581dog", "s", ".", "\u2581", "\u2581big", "ger"]
LETTERS = list("abcdefghijklmnopqrtuvwxyz")


def vocabulary() -> dict[str, int]:
    """Pieces to ids; the last is the padding, as in the real ones, and a piece of the source file is missing."""
    pieces = ["</s>", "<unk>", *WORDS, *LETTERS]
    spare = [f"\u2581spare{i}" for i in range(VOCAB - 1 - len(pieces))]
    return {piece: i for i, piece in enumerate([*pieces, *spare])} | {"<pad>": PAD}


def write_spm(path: Path) -> None:
    """A unigram model: every piece with a score; what matters is written, in protocol buffers' wire format."""
    scored = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    scored += [(piece, -2.0 - len(WORDS) + i / 7, 1) for i, piece in enumerate(WORDS)]
    scored += [(letter, -20.0, 1) for letter in LETTERS] + [("zebra", -3.0, 1)]
    data = b"".join(
        _field(1, _field(1, piece.encode()) + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind]))
        for piece, score, kind in scored
    )
    data += _field(2, bytes([0x18, 1]))  # trained as a unigram model
    path.write_bytes(data + _field(3, b"\x18\x01\x20\x01"))  # a space in front; no spaces twice


def make_folder(folder: Path, *, pickled: bool = True) -> Path:
    """The whole folder."""
    model = make_model("marian")
    model.save_pretrained(folder)
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    for name in ("source.spm", "target.spm"):
        write_spm(folder / name)
    (folder / "vocab.json").write_text(json.dumps(vocabulary()), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"source_lang": "en", "target_lang": "xx"}', encoding="utf-8")
    return folder


def _field(number: int, data: bytes) -> bytes:
    size, length = len(data), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data
