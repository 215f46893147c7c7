"""What the doors share: requests that become chats, and answers made of blocks, whole or as they grow."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn

from pydantic import BeforeValidator

from forerun.api.completion import Completion
from forerun.core.request import Event
from forerun.server.answers import Answer
from forerun.server.errors import ApiError
from forerun.server.parsers import Found, Piece, ToolCall
from forerun.server.schemas import DoorRequest, FieldError, Sampling

BlockKind = Literal["reasoning", "content", "call"]


class Door(Sampling, ABC):
    """A request of another API. It may hold all fields that our own requests have beyond the OpenAI API's."""

    @abstractmethod
    def chat_fields(self) -> dict[str, Any]:
        """The fields of the same request as a chat, without those that have the same name here."""

    def echo(self) -> dict[str, Any]:
        """What the answer repeats of the request."""
        return {}

    def as_chat(self) -> DoorRequest:
        shared = {name: getattr(self, name) for name in Sampling.model_fields if name in self.model_fields_set}
        return DoorRequest(**{**shared, **self.chat_fields(), "echo": self.echo()})


def refuse(place: str, message: str) -> NoReturn:
    raise ApiError(400, f"{place}: {message}", param=place)


def refuse_type(place: str, kind: Any, served: str) -> NoReturn:
    """What a door does not serve, by its type."""
    refuse(place, f"the type {str(kind)[:80]!r} is not served here; there is {served}")


def only_type(served: str) -> BeforeValidator:
    """A check, before all others, that an object is of the type that is served, or says nothing of a type."""

    def check(value: Any) -> Any:
        if isinstance(value, Mapping) and (kind := value.get("type")) not in (served, None):
            raise FieldError("type", f"the type {str(kind)[:80]!r} is not served here; there is {served}")
        return value

    return BeforeValidator(check)


def text_of(value: Any, place: str) -> str:
    if not isinstance(value, str):
        refuse(place, "give text")
    return value


def object_of(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        refuse(place, "give an object")
    return value


class Turns:
    """The messages of a chat, to which those of another API are added one by one."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._thought: list[str] = []  # of the answer that comes next

    def say(self, role: str, content: Any) -> None:
        """A message; what an assistant said belongs to what it thought before, systems that come first are one."""
        message: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant" and self._thought:
            message["reasoning_content"], self._thought = "\n".join(self._thought), []
        last = self.messages[-1] if len(self.messages) == 1 else {}
        if role == "system" == last.get("role") and isinstance(content, str) and isinstance(last["content"], str):
            last["content"] += f"\n\n{content}"
        else:
            self.messages.append(message)

    def think(self, text: str) -> None:
        if text:
            self._thought.append(text)

    def call(self, key: str, name: str, arguments: Any) -> None:
        """A call of a function, which belongs to what the assistant said just before."""
        if not self.messages or self.messages[-1]["role"] != "assistant" or self._thought:
            self.say("assistant", "")
        call = {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def returned(self, key: str, content: Any) -> None:
        self.messages.append({"role": "tool", "tool_call_id": key, "content": content})


@dataclass(slots=True)
class Block:
    """A part of an answer: what was thought, what is said, or a call."""

    kind: BlockKind
    text: str = ""  # of a call its arguments
    call: ToolCall | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(12))


def blocks_of(found: Found) -> list[Block]:
    """The parts of a whole answer."""
    thought = [] if found.reasoning is None else [Block("reasoning", found.reasoning)]
    said = [Block("content", found.text or "")] if found.text or not found.calls else []
    return [*thought, *said, *(Block("call", call.arguments, call) for call in found.calls)]


def thoughts_of(blocks: Sequence[Block]) -> list[str]:
    return ["".join(block.text for block in blocks if block.kind == "reasoning")]


@dataclass(slots=True)
class BlockAnswer(Answer, ABC):
    """An answer in blocks, one behind the other. Each opens, grows and closes."""

    prefix: ClassVar[str]  # of its id
    blocks: list[Block] = field(default_factory=list)  # of a stream, so far; the last one is open

    def __post_init__(self) -> None:
        super(BlockAnswer, self).__post_init__()
        self.id = f"{self.prefix}_{self.id.partition('-')[2]}"

    @property
    def echo(self) -> dict[str, Any]:
        assert isinstance(self.body, DoorRequest)
        return self.body.echo

    @property
    def end(self) -> bytes:
        return b""

    def closing(self, done: Sequence[Completion]) -> list[bytes]:
        return []

    def piece(self, index: int, event: Event) -> bytes:
        return b"".join(self.parsed(index, [Piece("content", event.text)] if event.text else []))

    def parsed(self, index: int, pieces: Sequence[Piece], event: Event | None = None) -> list[bytes]:
        return [line for piece in pieces for line in self._take(piece)]

    def _take(self, piece: Piece) -> Iterator[bytes]:
        kind: BlockKind = "call" if piece.kind == "arguments" else piece.kind
        if piece.kind == "call" or not self.blocks or self.blocks[-1].kind != kind:
            yield from self._close_last()
            self.blocks.append(Block(kind, call=ToolCall(piece.text, "") if kind == "call" else None))
            yield from self.opened(self.blocks[-1])
        if piece.kind != "call" and piece.text:
            self.blocks[-1].text += piece.text
            yield self.grown(self.blocks[-1], piece.text)

    def _close_last(self, complete: bool = True) -> Iterator[bytes]:
        if self.blocks:
            yield from self.closed(self.blocks[-1], complete)

    def close_blocks(self, done: Completion) -> list[bytes]:
        """The messages that end the last block; an answer has one block at least."""
        empty = [] if self.blocks else [*self._take(Piece("content", ""))]
        return [*empty, *self._close_last(done.finish_reason not in ("length", "error"))]

    @abstractmethod
    def opened(self, block: Block) -> list[bytes]:
        """The messages that open a block, which is the last one."""

    @abstractmethod
    def grown(self, block: Block, text: str) -> bytes:
        """The message of more text of the last block."""

    @abstractmethod
    def closed(self, block: Block, complete: bool) -> list[bytes]:
        """The messages that end the last block; it is incomplete where the answer reached its limit."""
