"""Which parser an answer gets: by the model's chat template, its prompt, and the tools that were offered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forerun.core.thinking import HARMONY, TAIL
from forerun.server.parsers.pieces import Parser, PlainParser
from forerun.server.parsers.thinking import HarmonyParser, ThinkingParser
from forerun.server.parsers.tools import ToolParser
from forerun.server.schemas import ChatRequest, Generation

if TYPE_CHECKING:
    from forerun.models.load.tokenizer import Tokenizer


def parser_of(body: Generation, tokenizer: Tokenizer, prompt: Sequence[int]) -> Parser | None:
    """The parser of one text; None where all of it is the answer."""
    if not isinstance(body, ChatRequest):
        return None
    tools = offered(body)
    inner = ToolParser(tools, body.parallel_tool_calls is not False) if tools else PlainParser()
    marks = tokenizer.thinking
    if marks is None:
        return inner if tools else None
    start = marks.start_of(tokenizer.decode(list(prompt[-TAIL:]), skip_special=False))
    if marks is HARMONY:
        return HarmonyParser(start, tools, inner)
    return ThinkingParser(marks, start, inner)


def offered(body: ChatRequest) -> Mapping[str, Mapping[str, Any]]:
    """The functions that may be called, and the JSON schemas of their parameters."""
    if body.tool_choice == "none":
        return {}
    return {tool.function.name: tool.function.parameters or {} for tool in body.tools or ()}
