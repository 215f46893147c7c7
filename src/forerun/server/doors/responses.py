"""`/v1/responses`: the OpenAI API's Responses, of which nothing is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import time
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
from forerun.server.errors import ApiError
from forerun.server.generation import speculation_of, usage_of
from forerun.server.parsers import Found
from forerun.server.schemas import TOOLS, Body, Effort, Stop, Whole, between
from forerun.server.sse import as_event

_ITEMS = "message, function_call, function_call_output and reasoning"
_TEXT = {"type": "object", "required": ["type", "text"], "properties": {
    "type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}}}  # fmt: skip
_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"anyOf": [
    {"type": "object", "required": ["role", "content"], "properties": {
        "type": {"const": "message"}, "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT}]}}},
    {"type": "object", "required": ["type", "call_id", "name", "arguments"], "properties": {
        "type": {"const": "function_call"}, "call_id": {"type": "string"}, "name": {"type": "string"},
        "arguments": {"type": "string"}}},
    {"type": "object", "required": ["type", "call_id", "output"], "properties": {
        "type": {"const": "function_call_output"}, "call_id": {"type": "string"}, "output": {"type": "string"}}},
]}}]}  # fmt: skip


class ResponseTool(Body):
    type: Literal["function"] = "function"
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="changes nothing")


class Reasoning(Body):
    neutral: ClassVar[dict[str, Any]] = {"context": "auto", "mode": "standard"}
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="all that was thought is told")
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(Door):
    neutral: ClassVar[dict[str, Any]] = {
        "store": False, "background": False, "previous_response_id": None, "conversation": None, "prompt": None,
        "truncation": "disabled", "max_tool_calls": None, "context_management": None, "top_logprobs": 0,
        "moderation": None,
    }  # fmt: skip
    input: Annotated[Any, WithJsonSchema(_INPUT)]
    instructions: str | None = None
    max_output_tokens: Whole | None = between(1)
    stop: Stop | None = None
    tools: Annotated[list[Annotated[ResponseTool, only_type("function")]], TOOLS] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = Field(
        None, description="taken, and nothing is encrypted: reasoning items hold what was thought"
    )
    stream_options: Body | None = None  # none that changes anything
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    def chat_fields(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools or ()]
        return {
            "messages": messages_of(self.input, self.instructions),
            "max_tokens": self.max_output_tokens,
            "stop": self.stop,
            "tools": tools or None,
            "tool_choice": _choice_of(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._format(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }

    def _format(self) -> dict[str, Any] | None:
        asked = None if self.text is None else self.text.format
        if asked is None or asked.type != "json_schema":
            return None if asked is None else {"type": asked.type}
        if asked.schema_ is None:
            refuse("text.format.schema", "give the schema, as type is 'json_schema'")
        own = {"name": asked.name or "answer", "schema": asked.schema_, "strict": asked.strict}
        return {"type": "json_schema", "json_schema": own}

    def echo(self) -> dict[str, Any]:
        asked = self.model_dump(
            include={"tools", "text", "reasoning"}, by_alias=True, exclude_none=True, exclude_unset=False
        )
        effort = {"effort": None, "summary": None} | asked.get("reasoning", {})
        return {
            "instructions": self.instructions, "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {}, "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None, "reasoning": effort, "store": False, "background": False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": {"type": "text"}} | asked.get("text", {}), "tool_choice": self.tool_choice or "auto",
            "tools": asked.get("tools", []), "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled", "user": self.user, "service_tier": "default",
            "safety_identifier": self.safety_identifier, "prompt_cache_key": self.prompt_cache_key,
        }  # fmt: skip


def _choice_of(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """`tool_choice` of a chat."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        return {"type": "allowed_tools", "allowed_tools": choice}
    if choice.get("type") != "function":
        refuse_type("tool_choice", choice.get("type"), "function")
    return {"type": "function", "function": {"name": choice.get("name")}}


def messages_of(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """The messages of a chat for what a request is to answer."""
    turns = Turns()
    if instructions:
        turns.say("system", instructions)
    if isinstance(given, str):
        turns.say("user", given)
        return turns.messages
    if not isinstance(given, list) or not given:
        refuse("input", "give text, or a list of items that is not empty")
    for i, item in enumerate(given):
        _add(turns, object_of(item, f"input[{i}]"), f"input[{i}]")
    return turns.messages


def _add(turns: Turns, item: Mapping[str, Any], place: str) -> None:
    match item.get("type", "message"):
        case "message":
            role = text_of(item.get("role"), f"{place}.role")
            if role not in ("user", "assistant", "system", "developer"):
                refuse(f"{place}.role", f"{role[:80]!r} is not user, assistant, system or developer")
            turns.say("system" if role == "developer" else role, _content(item.get("content"), f"{place}.content"))
        case "function_call":
            key, name, given = (text_of(item.get(each), f"{place}.{each}") for each in ("call_id", "name", "arguments"))
            turns.call(key, name, given)
        case "function_call_output":
            key = text_of(item.get("call_id"), f"{place}.call_id")
            turns.returned(key, _content(item.get("output"), f"{place}.output"))
        case "reasoning":
            parts = item.get("content") or []
            if not isinstance(parts, list):
                refuse(f"{place}.content", "give a list of parts")
            texts = [object_of(part, f"{place}.content").get("text") for part in parts]
            turns.think("\n".join(text_of(text, f"{place}.content.text") for text in texts))
        case kind:
            refuse_type(place, kind, _ITEMS)


def _content(content: Any, place: str) -> Any:
    """Text, or parts that a chat knows."""
    if not isinstance(content, str | list):
        refuse(place, "give text, or a list of parts")
    if isinstance(content, str):
        return content
    said = [object_of(part, place) for part in content]
    return [{"type": "text", "text": part.get("refusal")} if part.get("type") == "refusal" else part for part in said]


@dataclass(slots=True)
class ResponsesAnswer(BlockAnswer):
    """A response, whole or in events that are numbered."""

    prefix = "resp"
    _number: int = 0

    def whole(self, done: Sequence[Completion], found: Sequence[Found] = ()) -> dict[str, Any]:
        return self._response(done[0], blocks_of(found[0]))

    def failed(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code or error.kind, message=error.message, param=error.param)

    def opening(self, index: int) -> list[bytes]:
        return [
            self._event(f"response.{what}", response=self._response(None, [])) for what in ("created", "in_progress")
        ]

    def ending(self, index: int, done: Completion, called: bool = False) -> list[bytes]:
        lines, response = self.close_blocks(done), self._response(done, self.blocks)
        return [*lines, self._event(f"response.{response['status']}", response=response)]

    def opened(self, block: Block) -> list[bytes]:
        item = {**_item(block, "in_progress"), **({} if block.kind == "call" else {"content": []})}
        lines = [self._event("response.output_item.added", output_index=len(self.blocks) - 1, item=item)]
        if block.kind != "call":
            lines.append(self._event("response.content_part.added", **self._part_place(block), part=_part(block)))
        return lines

    def grown(self, block: Block, text: str) -> bytes:
        return self._event(f"{_EVENTS[block.kind]}.delta", **self._place_in(block), delta=text)

    def closed(self, block: Block, complete: bool) -> list[bytes]:
        name = "arguments" if block.kind == "call" else "text"
        lines = [self._event(f"{_EVENTS[block.kind]}.done", **self._place_in(block), **{name: block.text})]
        if block.kind != "call":
            lines.append(self._event("response.content_part.done", **self._part_place(block), part=_part(block)))
        item = _item(block, "completed" if complete else "incomplete")
        return [*lines, self._event("response.output_item.done", output_index=len(self.blocks) - 1, item=item)]

    def _place_in(self, block: Block) -> dict[str, Any]:
        if block.kind == "call":
            assert block.call is not None
            return {"item_id": _item_id(block), "output_index": len(self.blocks) - 1, "name": block.call.name}
        return {**self._part_place(block), **({"logprobs": []} if block.kind == "content" else {})}

    def _part_place(self, block: Block) -> dict[str, Any]:
        return {"item_id": _item_id(block), "output_index": len(self.blocks) - 1, "content_index": 0}

    def _event(self, kind: str, **facts: Any) -> bytes:
        self._number += 1
        return as_event({"type": kind, "sequence_number": self._number - 1, **facts})

    def _response(self, done: Completion | None, blocks: Sequence[Block]) -> dict[str, Any]:
        """The response with what it has so far; `done` is None until all is written."""
        head = {"id": self.id, "object": "response", "created_at": self.created, "model": self.model}
        if done is None:
            own: dict[str, Any] = {"status": "in_progress", "error": None, "incomplete_details": None, "usage": None}
            return {**head, **self.echo, **own, "output": []}
        why = _WHY.get(done.finish_reason, "completed")
        broken = None if done.error is None else {"code": "server_error", "message": done.error}
        short = {"reason": "max_output_tokens"} if why == "incomplete" else None
        items = [_item(block, "completed") for block in blocks]
        if why != "completed" and items:
            items[-1]["status"] = "incomplete"
        return {
            **head, **self.echo, "status": why, "error": broken, "incomplete_details": short, "output": items,
            "completed_at": int(time()) if why == "completed" else None, "usage": self._usage(done, blocks),
            "seed": done.seed, "metrics": {"speculative_decoding": speculation_of([done])},
        }  # fmt: skip

    def _usage(self, done: Completion, blocks: Sequence[Block]) -> dict[str, Any]:
        used = usage_of([done], 1, self.thinking_tokens(thoughts_of(blocks)))
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used["completion_tokens_details"],
            "total_tokens": used["total_tokens"],
        }


_WHY = {"length": "incomplete", "error": "failed"}
_EVENTS = {
    "reasoning": "response.reasoning_text",
    "content": "response.output_text",
    "call": "response.function_call_arguments",
}
_PREFIX = {"reasoning": "rs", "content": "msg", "call": "fc"}


def _item_id(block: Block) -> str:
    return f"{_PREFIX[block.kind]}_{block.id}"


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _item(block: Block, status: str) -> dict[str, Any]:
    head = {"id": _item_id(block), "status": status}
    if block.kind == "reasoning":
        return {**head, "type": "reasoning", "summary": [], "content": [_part(block)]}
    if block.kind == "content":
        return {**head, "type": "message", "role": "assistant", "content": [_part(block)]}
    assert block.call is not None
    return {**head, "type": "function_call", "call_id": block.call.id, "name": block.call.name, "arguments": block.text}
