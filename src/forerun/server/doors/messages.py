"""`/v1/messages`: Anthropic's Messages API, and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from forerun.api.completion import Completion
from forerun.server.doors.base import (
    Block,
    BlockAnswer,
    Door,
    Turns,
    blocks_of,
    object_of,
    only_type,
    refuse,
    refuse_type,
    text_of,
    thoughts_of,
)
from forerun.server.errors import MESSAGES, ApiError
from forerun.server.generation import speculation_of
from forerun.server.parsers import Found
from forerun.server.schemas import TOOLS, Body, Stop, Whole, between
from forerun.server.sse import as_event

SIGNATURE = "unsigned"  # of what was thought: the API's clients send it back, and nobody checks it
_TEXT = {"type": "object", "required": ["type", "text"], "properties": {
    "type": {"const": "text"}, "text": {"type": "string"}}}  # fmt: skip
_SAID = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT}]}
_MESSAGE = {"type": "object", "required": ["role", "content"], "properties": {
    "role": {"enum": ["user", "assistant"]}, "content": _SAID}}  # fmt: skip
_MESSAGES = {"type": "array", "minItems": 1, "items": _MESSAGE}
_USER = {"text", "tool_result"}
_ASSISTANT = {"text", "tool_use", "thinking", "redacted_thinking"}


class MessagesTool(Body):
    neutral: ClassVar[dict[str, Any]] = {"defer_loading": False, "allowed_callers": ["direct"]}
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = Field(None, description="not shown to the model")


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    neutral: ClassVar[dict[str, Any]] = {"display": "summarized"}
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = between(0)


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] | bool = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(Door):
    """What both routes take."""

    neutral: ClassVar[dict[str, Any]] = {"container": None, "speed": "standard", "diagnostics": None, "thread": None}
    messages: Annotated[list[Any], Field(fail_fast=True), WithJsonSchema(_MESSAGES)]
    system: Annotated[Any, WithJsonSchema(_SAID)] = None
    tools: Annotated[list[Annotated[MessagesTool, only_type("custom")]], TOOLS] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = Field(None, description="changes nothing: all prompts are cached")

    def chat_fields(self) -> dict[str, Any]:
        config, choice = self.output_config or OutputConfig(), self.tool_choice
        functions = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
            for tool in self.tools or ()
        ]
        form = None if config.format is None else {"name": "answer", "schema": config.format.schema_}
        messages = messages_of(self.messages, self.system)
        return {
            "messages": messages,
            "continue_final_message": True if messages and messages[-1]["role"] == "assistant" else None,
            "tools": [{"type": "function", "function": function} for function in functions] or None,
            "tool_choice": None if choice is None else _choice_of(choice),
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "response_format": None if form is None else {"type": "json_schema", "json_schema": form},
            **_thinking_of(self.thinking, config.effort, self.max_thinking_tokens),
        }


class MessagesRequest(CountRequest):
    max_tokens: Whole = Field(json_schema_extra={"minimum": 1})
    stop_sequences: Stop | None = None
    metadata: dict[str, Any] | None = Field(None, description="changes nothing")
    inference_geo: str | None = Field(None, description="changes nothing")

    def chat_fields(self) -> dict[str, Any]:
        return {**super().chat_fields(), "max_tokens": self.max_tokens, "stop": self.stop_sequences}


def _thinking_of(asked: Thinking | None, effort: str | None, most: int | None) -> dict[str, Any]:
    """How a chat says the same; where nothing is said, a model thinks as it does in a chat."""
    if asked is not None and asked.type == "disabled":
        return {"reasoning_effort": "none"}
    if asked is None or asked.type == "adaptive":
        return {"reasoning_effort": effort}
    if asked.budget_tokens is None:
        refuse("thinking.budget_tokens", "give a number of tokens, as type is 'enabled'")
    return {"reasoning_effort": effort, "max_thinking_tokens": asked.budget_tokens if most is None else most}


def _choice_of(choice: ToolChoice) -> str | dict[str, Any]:
    """`tool_choice` of a chat."""
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def messages_of(given: Sequence[Any], system: Any) -> list[dict[str, Any]]:
    """The messages of a chat for those of a request."""
    turns = Turns()
    if system is not None and system != []:
        turns.say("system", system if isinstance(system, str) else _texts(system, "system"))
    for i, message in enumerate(given):
        place = f"messages[{i}]"
        item = object_of(message, place)
        role, content = item.get("role"), item.get("content")
        if role not in ("user", "assistant"):
            refuse(f"{place}.role", f"{str(role)[:80]!r} is neither user nor assistant; `system` is a field of its own")
        if isinstance(content, str):
            turns.say(role, content)
        elif isinstance(content, list):
            _add_blocks(turns, role, content, f"{place}.content")
        else:
            refuse(f"{place}.content", "give text, or a list of blocks")
    last = turns.messages[-1] if turns.messages else {}
    if last.get("role") == "assistant" and (last.get("tool_calls") or not isinstance(last.get("content"), str)):
        refuse("messages", "the last one is the assistant's and no plain text: only text is gone on with")
    return turns.messages


def _add_blocks(turns: Turns, role: str, blocks: Sequence[Any], place: str) -> None:
    """A message in blocks: what is said in a row is one message, and what functions returned are others."""
    said = list[Any]()
    known, before = (_USER if role == "user" else _ASSISTANT), len(turns.messages)
    for i, given in enumerate(blocks):
        block, here = object_of(given, place), f"{place}[{i}]"
        kind = block.get("type")
        if not isinstance(kind, str) or kind not in known:
            refuse_type(here, kind, ", ".join(sorted(known)))
        if kind == "text":
            said.append({"type": "text", "text": text_of(block.get("text"), f"{here}.text")})
            continue
        if kind.endswith("thinking"):  # what was redacted cannot be read
            turns.think(text_of(block.get("thinking"), f"{here}.thinking") if kind == "thinking" else "")
            continue
        if said:
            turns.say(role, said)
            said = []
        if kind == "tool_use":
            key, name = (text_of(block.get(each), f"{here}.{each}") for each in ("id", "name"))
            arguments = json.dumps(object_of(block.get("input"), f"{here}.input"), ensure_ascii=False)
            turns.call(key, name, arguments)
        else:
            content = block.get("content") or ""
            key = text_of(block.get("tool_use_id"), f"{here}.tool_use_id")
            turns.returned(key, content if isinstance(content, str) else _texts(content, f"{here}.content"))
    if said or len(turns.messages) == before:
        turns.say(role, said)


def _texts(parts: Any, place: str) -> list[Any]:
    """The text blocks of a list that may hold no others."""
    if not isinstance(parts, list):
        refuse(place, "give text, or a list of blocks of text")
    found = list[Any]()
    for part in parts:
        block = object_of(part, place)
        if block.get("type") != "text":
            refuse_type(place, block.get("type"), "text")
        found.append({"type": "text", "text": text_of(block.get("text"), f"{place}.text")})
    return found


@dataclass(slots=True)
class MessagesAnswer(BlockAnswer):
    """A message, whole or in events."""

    prefix = "msg"

    def whole(self, done: Sequence[Completion], found: Sequence[Found] = ()) -> dict[str, Any]:
        ended, parts = _checked(done[0]), found[0]
        blocks = blocks_of(parts)
        return {
            **self._head_of([_block(block, block.text) for block in blocks]),
            **self._stop(ended, bool(parts.calls)),
            "usage": self._usage(ended, blocks),
            "seed": ended.seed,
            "metrics": {"speculative_decoding": speculation_of([ended])},
        }

    def failed(self, error: ApiError) -> bytes:
        return as_event(error.body(MESSAGES))

    def opening(self, index: int) -> list[bytes]:
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        message = {**self._head_of([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [as_event({"type": "message_start", "message": message}), as_event({"type": "ping"})]

    def ending(self, index: int, done: Completion, called: bool = False) -> list[bytes]:
        delta = {"type": "message_delta", "delta": self._stop(_checked(done), called)}
        lines = self.close_blocks(done)
        usage = self._usage(done, self.blocks)
        return [*lines, as_event({**delta, "usage": usage}), as_event({"type": "message_stop"})]

    def opened(self, block: Block) -> list[bytes]:
        return [self._event("content_block_start", content_block=_block(block, ""))]

    def grown(self, block: Block, text: str) -> bytes:
        kind, name = _DELTAS[block.kind]
        return self._event("content_block_delta", delta={"type": kind, name: text})

    def closed(self, block: Block, complete: bool) -> list[bytes]:
        signed = {"type": "signature_delta", "signature": SIGNATURE}
        lines = [self._event("content_block_delta", delta=signed)] if block.kind == "reasoning" else []
        return [*lines, self._event("content_block_stop")]

    def _event(self, kind: str, **facts: Any) -> bytes:
        return as_event({"type": kind, "index": len(self.blocks) - 1, **facts})

    def _head_of(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}

    def _stop(self, done: Completion, called: bool) -> dict[str, Any]:
        """Why it ended, and at which stop sequence, if it was one."""
        stopped = None
        if done.finish_reason == "length":
            reason = "max_tokens"
        elif called:
            reason = "tool_use"
        else:
            stopped = self._stopped_at(done)
            reason = "end_turn" if stopped is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _stopped_at(self, done: Completion) -> str | None:
        """The stop sequence that ended a text: its tokens go on with it."""
        given = self.body.stop
        stops = [given] if isinstance(given, str) else given or []
        rest = self.tokenizer.decode(done.token_ids).removeprefix(done.text) if stops else ""
        return next((stop for stop in stops if stop and rest.startswith(stop)), None)

    def _usage(self, done: Completion, blocks: Sequence[Block]) -> dict[str, Any]:
        return {
            "input_tokens": done.prompt_tokens - done.cached_tokens,
            "cache_read_input_tokens": done.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": done.tokens,
            "output_tokens_details": {"thinking_tokens": self.thinking_tokens(thoughts_of(blocks))},
        }


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _checked(done: Completion) -> Completion:
    """The API has no word for a text that broke off, as a schema can make it: it is an error."""
    if done.error is not None:
        raise ApiError(400, done.error)
    return done


def _block(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": SIGNATURE if text else ""}
    if block.kind == "content":
        return {"type": "text", "text": text}
    assert block.call is not None
    given: Mapping[str, Any] = json.loads(text) if text else {}
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": given}
