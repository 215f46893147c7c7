"""Piece: a part of an answer, as parsers find it; and the answer that pieces add up to.

A parser gets a text piece by piece, and gives out what cannot change any more. The whole answer of a request that does
not stream is what the same parser makes of the whole text: both are always alike.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

Kind = Literal["reasoning", "content", "call", "arguments"]


class Piece(NamedTuple):
    """More of an answer. A call comes with its function's name, then come its arguments, in one piece or in several."""

    kind: Kind
    text: str
    call: int = 0  # which one, counted from 0


class Parser(Protocol):
    """Tells the parts of one text apart."""

    def feed(self, text: str) -> list[Piece]:
        """The text goes on."""

    def end(self) -> list[Piece]:
        """The text has ended."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Found(NamedTuple):
    text: str | None  # None where it only calls
    calls: Sequence[ToolCall] = ()
    reasoning: str | None = None


def found_in(parser: Parser, text: str) -> Found:
    pieces = [*parser.feed(text), *parser.end()]
    names = [piece.text for piece in pieces if piece.kind == "call"]
    arguments = [joined("arguments", pieces, call) for call in range(len(names))]
    calls = [ToolCall(*pair) for pair in zip(names, arguments, strict=True) if is_json(pair[1])]
    said, reasoning = joined("content", pieces), joined("reasoning", pieces) or None
    if calls:
        return Found(said.strip() or None, calls, reasoning)
    return Found(text if names and reasoning is None else said, calls, reasoning)  # a call that broke off is text


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class PlainParser:
    def feed(self, text: str) -> list[Piece]:
        return [Piece("content", text)] if text else []

    def end(self) -> list[Piece]:
        return []


def joined(kind: Kind, pieces: Iterable[Piece], call: int = 0) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind and piece.call == call)


def held_back(text: str, marks: Iterable[str]) -> int:
    """How many characters at the end of a text may be the beginning of one of these marks."""
    longest = max((len(mark) for mark in marks), default=0)
    for size in range(min(len(text), longest - 1), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0
