"""Thinking between tags (ThinkingParser) or in channels (HarmonyParser, gpt-oss); which parser an answer gets.

Harmony: `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`. A message with a
recipient, `to=functions.NAME`, is a call of that function, and its text is the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from forerun.core.thinking import HARMONY, TAIL, Start, ThinkingMarks
from forerun.models.load.tokenizer import Tokenizer
from forerun.server.parsers.tools import Kind, Parser, Piece, PlainParser, ToolParser, held_back
from forerun.server.schemas import ChatRequest, Generation


class ThinkingParser:
    """`inner` parses the answer."""

    def __init__(self, marks: ThinkingMarks, start: Start, inner: Parser) -> None:
        self._marks, self._inner = marks, inner
        self._mode, self._buffer, self._begun = start, "", False

    def feed(self, text: str) -> list[Piece]:
        if self._mode == "none":
            return self._answer(text)
        self._buffer += text
        if self._mode == "may":
            begin, said = self._marks.begin, self._buffer.lstrip()
            if begin.startswith(said[: len(begin)]) and len(said) < len(begin):
                return []
            if not said.startswith(begin):
                return self._start_answer(self._buffer)
            self._mode, self._buffer = "open", said[len(begin) :]
        thought, mark, rest = self._buffer.partition(self._marks.end)
        if mark:
            return [*self._thought(thought.rstrip()), *self._start_answer(rest)]
        kept = len(thought) - held_back(thought, [self._marks.end])
        kept = len(thought[:kept].rstrip())  # the space before the mark is no part of the thought
        self._buffer = thought[kept:]
        return self._thought(thought[:kept])

    def end(self) -> list[Piece]:
        if self._mode == "none":
            return self._inner.end()
        left, self._buffer = self._buffer, ""
        if self._mode == "open":
            return self._thought(left)
        return [*self._inner.feed(left), *self._inner.end()]

    def _thought(self, text: str) -> list[Piece]:
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        return [Piece("reasoning", text)] if text else []

    def _start_answer(self, text: str) -> list[Piece]:
        self._begun = self._mode == "may"
        self._mode, self._buffer = "none", ""
        return self._answer(text)

    def _answer(self, text: str) -> list[Piece]:
        """Behind a thought, the answer starts with its first character that is no space."""
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        return self._inner.feed(text) if text else []


_HEAD = re.compile(r"(?:<\|start\|>)?(?P<role>[^<]*)(?:<\|channel\|>(?P<channel>\w*)(?P<more>.*))?\Z", re.DOTALL)
_TO = re.compile(r"to=functions\.([\w.-]+)")
_BODY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")


class HarmonyParser:
    """Channels of gpt-oss; `known` are the functions that were offered, `inner` parses what the last channel says."""

    def __init__(self, start: Start, known: Container[str], inner: Parser) -> None:
        self._known, self._inner, self._buffer, self._calls = known, inner, "", 0
        # of the message that is being written; None = its header is
        self._kind: Kind | None = None if start == "open" else "content"

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        found = list[Piece]()
        while True:
            if self._kind is None:
                head, mark, rest = self._buffer.partition("<|message|>")
                if not mark:
                    return found
                self._buffer = rest
                found += self._open(head)
                continue
            ends = [at for mark in _BODY_ENDS if (at := self._buffer.find(mark)) >= 0]
            if not ends:
                kept = len(self._buffer) - held_back(self._buffer, _BODY_ENDS)
                found += self._said(self._buffer[:kept])
                self._buffer = self._buffer[kept:]
                return found
            found += self._said(self._buffer[: min(ends)])
            self._kind, self._buffer = (None, re.sub(r"\A<\|(?:end|call|return)\|>", "", self._buffer[min(ends) :]))

    def end(self) -> list[Piece]:
        left, self._buffer = self._buffer, ""
        said = self._said(left) if self._kind is not None else []
        return [*said, *self._inner.end()]

    def _open(self, head: str) -> list[Piece]:
        """A message begins; its header says what it is."""
        fields = _HEAD.match(head)
        channel = fields["channel"] if fields is not None else None
        called = _TO.search(head)
        if called is not None and called[1] in self._known:
            self._kind, self._calls = "arguments", self._calls + 1
            return [Piece("call", called[1], self._calls - 1)]
        self._kind = "reasoning" if channel == "analysis" or called is not None else "content"
        return []

    def _said(self, text: str) -> list[Piece]:
        assert self._kind is not None
        if self._kind == "content":
            return self._inner.feed(text)
        return [Piece(self._kind, text, self._calls - 1 if self._kind == "arguments" else 0)] if text else []


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
