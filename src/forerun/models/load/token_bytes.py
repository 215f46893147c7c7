"""The bytes that the tokens of a vocabulary stand for, by how it spells them. A character may be in several tokens."""

from __future__ import annotations

from functools import cache

SENTENCEPIECE_SPACE = "\u2581"


def from_byte_level(token: str) -> bytes:
    """In vocabularies that have a character for each byte."""
    known = _byte_of()
    return bytes(known[c] for c in token) if all(c in known for c in token) else token.encode()


def from_sentencepiece(token: str) -> bytes:
    """In vocabularies of text, where bytes that no token has are spelt <0xE2>."""
    if is_one_byte(token):
        return bytes([int(token[3:5], 16)])
    return token.replace(SENTENCEPIECE_SPACE, " ").encode()


def is_one_byte(token: str) -> bool:
    """Is it spelt <0xE2>?"""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


@cache
def _byte_of() -> dict[str, int]:
    """The characters by which byte-level vocabularies spell bytes: themselves if printable, else from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
