"""What of a model's text is thinking, what is the answer, and what are calls of tools (`parser_of`).

A parser gets a text piece by piece, and gives out what cannot change any more (`Piece`). The whole answer of a request
that does not stream is what the same parser makes of the whole text: both are always alike.

`ToolParser` finds calls in the formats that chat templates teach:

| format | looks like |
|---|---|
| Hermes, Qwen, SmolLM | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` |
| GLM | `<tool_call>name <arg_key>k</arg_key><arg_value>v</arg_value></tool_call>` |
| Qwen-Coder | `<tool_call><function=name><parameter=k>v</parameter></function></tool_call>` |
| Mistral | `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, newer `[TOOL_CALLS]name[ARGS]{...}` |
| Llama 3 | `{"name": ..., "parameters": {...}}`, behind `<|python_tag|>` or alone; several by `;` |
| DeepSeek | `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name` and JSON in a fence, in V3.1 `name<｜tool▁sep｜>{...}` |
| DeepSeek V3.2 | `<｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter>` |

A text may hold several calls. What is no call of a function that was offered stays text.

Thinking is between tags (`ThinkingParser`) or in channels (`HarmonyParser`, gpt-oss):
`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`. There a message with a
recipient, `to=functions.NAME`, is a call of that function, and its text is the arguments.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from forerun.core.thinking import HARMONY, TAIL, Start, ThinkingMarks
from forerun.models.load.tokenizer import Tokenizer
from forerun.server.schemas import ChatRequest, Generation

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


Types = Mapping[str, Mapping[str, Any]]  # by function: the JSON schema of its parameters


class _Block(NamedTuple):
    """A part of a text between two marks."""

    begin: str
    ends: tuple[str, ...]  # the first of these ends it; () = the end of the text


_BLOCKS = (
    _Block("<tool_call>", ("</tool_call>",)),
    _Block("<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>",)),
    _Block("<｜DSML｜function_calls>", ("</｜DSML｜function_calls>",)),
    _Block("[TOOL_CALLS]", ("[TOOL_CALLS]",)),
    _Block("<|python_tag|>", ()),
)
_DROPPED = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # around all blocks
_MARKS = (*(block.begin for block in _BLOCKS), *_DROPPED)
# up to the value of the arguments, which is streamed
_HEADS = (
    re.compile(r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'),
    re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\]\s*(?=\{)"),
    re.compile(r"\s*(?:function<｜tool▁sep｜>(?P<name>[\w.-]+)\s*```json\s*)(?=\{)"),
    re.compile(r"\s*(?P<name>[\w.-]+)<｜tool▁sep｜>\s*(?=\{)"),
)
_GLM = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_CODER = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_DSML = re.compile(r'<｜DSML｜invoke name="([^"]+)">(.*?)(?:</｜DSML｜invoke>|\Z)', re.DOTALL)
_DSML_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="([^"]+)" string="(true|false)">(.*?)</｜DSML｜parameter>', re.DOTALL
)


class ToolParser:
    """`tools` are those that were offered; `parallel`: more than one call is taken."""

    def __init__(self, tools: Types, parallel: bool = True) -> None:
        self._tools, self._most = tools, None if parallel else 1
        self._buffer, self._calls, self._begun = "", 0, False
        self._block: _Block | None = None
        self._value: _JsonEnd | None = None  # of the arguments that are being sent
        self._rest: _JsonEnd | None = None  # of the object around arguments that were sent
        self._is_inside = False  # the arguments are a part of an object
        self._sent = 0  # characters of the block that are sent, with what comes before them
        self._alone = False  # the text is JSON from its first character

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        if not self._begun and (start := self._buffer.lstrip()):
            if any(len(start) < len(mark) and mark.startswith(start) for mark in _MARKS):
                return []
            self._begun, self._alone = True, start[0] in "{[" and not start.startswith(_MARKS)
            self._block = _BLOCKS[-1] if self._alone else None
        found = list[Piece]()
        while True:
            more, goes_on = self._in_block() if self._block is not None else self._outside()
            found += more
            if not goes_on:
                return found

    def end(self) -> list[Piece]:
        if self._block is None:
            return self._content(self._take(len(self._buffer)))
        return self._close(self._buffer, "")

    def _outside(self) -> tuple[list[Piece], bool]:
        places = [(at, mark) for mark in _MARKS if (at := self._buffer.find(mark)) >= 0]
        if not places:
            kept = len(self._buffer) - held_back(self._buffer, _MARKS)
            said = self._buffer[:kept]
            return self._content(self._take(len(said.rstrip()) if kept < len(self._buffer) else kept)), False
        at, mark = min(places)
        said = self._take(at)
        self._take(len(mark))
        self._block = next((block for block in _BLOCKS if block.begin == mark), None)
        return self._content(said), True

    def _in_block(self) -> tuple[list[Piece], bool]:
        """The pieces of the block under way, and whether it has ended."""
        block = self._block
        assert block is not None
        if self._rest is not None:
            self._take(self._rest.feed(self._buffer))
            if not self._rest.is_over:
                return [], False
            self._rest = None
        if self._value is None and (head := self._head()) is not None:
            self._value, self._sent, self._is_inside = _JsonEnd(), head.end(), head.re is _HEADS[0]
            pieces = [Piece("call", head["name"], self._calls)]
            self._calls += 1
            more, goes_on = self._arguments()
            return [*pieces, *more], goes_on
        if self._value is not None:
            return self._arguments()
        ends = [(at, mark) for mark in block.ends if (at := self._buffer.find(mark)) >= 0]
        if not ends:
            return [], False
        at, mark = min(ends)
        body = self._take(at)
        return self._close(body, mark), True

    def _head(self) -> re.Match[str] | None:
        """Where a call is that can be sent as it comes."""
        if self._most is not None and self._calls >= self._most:
            return None
        skipped = re.match(r"[\s,;\[]*", self._buffer)
        listed = self._alone or self._calls or self._buffer.lstrip().startswith("[")
        start = skipped.end() if skipped is not None and listed else 0
        for pattern in _HEADS:
            head = pattern.match(self._buffer, start)
            if head is not None and head["name"] in self._tools:
                return head
        return None

    def _arguments(self) -> tuple[list[Piece], bool]:
        """More of the arguments that are being sent, and whether something comes behind them."""
        assert self._value is not None
        rest = self._buffer[self._sent :]
        size = self._value.feed(rest)
        pieces = [Piece("arguments", rest[:size], self._calls - 1)] if size else []
        self._sent += size
        if not self._value.is_over:
            return pieces, False
        self._take(self._sent)
        self._value, self._sent = None, 0
        self._rest = _JsonEnd(depth=1) if self._is_inside else None
        return pieces, bool(self._buffer)

    def _close(self, body: str, mark: str) -> list[Piece]:
        """A block has ended: calls that are in it and were not sent, or its text where it has none."""
        block, self._block = self._block, None
        assert block is not None
        self._buffer = self._buffer if mark else ""
        if mark == block.begin:  # another block
            self._block = block
        self._take(len(mark) if mark and self._buffer.startswith(mark) else 0)
        if self._value is not None:  # it broke off: what there is has been sent
            self._value = None
            return []
        self._rest = None
        if self._calls and not body.strip(" \t\r\n,;[]`"):
            return []
        left = None if self._most is None else self._most - self._calls
        if left == 0:
            return []
        calls = calls_in(body, self._tools)[:left]
        if not calls:
            begin = "" if self._alone else block.begin
            return self._content(f"{begin}{body}{mark if mark != block.begin else ''}")
        pieces = list[Piece]()
        for call in calls:
            pieces += [Piece("call", call.name, self._calls), Piece("arguments", call.arguments, self._calls)]
            self._calls += 1
        return pieces

    def _take(self, size: int) -> str:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def _content(self, text: str) -> list[Piece]:
        text = text.lstrip() if self._calls and not text.strip() else text
        return [Piece("content", text)] if text else []


class _JsonEnd:
    """Finds where a JSON object ends that comes in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._quoted, self._escaped = depth, False, False
        self.is_over = False

    def feed(self, text: str) -> int:
        """How many of these characters are the object's."""
        for i, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = letter == "\\", letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    self.is_over = True
                    return i + 1
        return len(text)


def calls_in(body: str, tools: Types) -> list[ToolCall]:
    """The calls of a whole block; none where it holds anything else."""
    readers: tuple[Callable[[str, Types], list[ToolCall | None]], ...] = (
        _from_json,
        _from_tags,
        _from_coder,
        _from_dsml,
    )
    for read in readers:
        calls = read(body, tools)
        known = [call for call in calls if call is not None]
        if calls and len(known) == len(calls):
            return known
    return []


def _from_json(body: str, tools: Types) -> list[ToolCall | None]:
    decoder, at, found = json.JSONDecoder(), 0, list[Any]()
    while at < len(body):
        skipped = re.match(r"[\s,;]*", body[at:])
        at += skipped.end() if skipped is not None else 0
        if at == len(body):
            break
        try:
            value, at = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            return []
        found += value if isinstance(value, list) else [value]
    return [_as_call(value, tools) for value in found]


def _as_call(value: Any, tools: Types) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    body = inner if isinstance(inner, dict) else value
    name, arguments = body.get("name"), body.get("arguments", body.get("parameters", {}))
    if not isinstance(name, str) or name not in tools:
        return None
    if isinstance(arguments, str):
        return ToolCall(name, arguments) if _loaded(arguments) is not None else None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _from_tags(body: str, tools: Types) -> list[ToolCall | None]:
    name = body.partition("<arg_key>")[0].strip()
    if name not in tools:
        return []
    return [_typed(name, dict(_GLM.findall(body)), tools)]


def _from_coder(body: str, tools: Types) -> list[ToolCall | None]:
    return [
        _typed(name, dict(_PARAMETER.findall(inner)), tools) if name in tools else None
        for name, inner in _CODER.findall(body)
    ]


def _from_dsml(body: str, tools: Types) -> list[ToolCall | None]:
    """Each value says whether it is text or JSON."""
    found = list[ToolCall | None]()
    for name, inner in _DSML.findall(body):
        values = {
            key: text if is_text == "true" else _loaded(text) for key, is_text, text in _DSML_PARAMETER.findall(inner)
        }
        found.append(ToolCall(name, json.dumps(values, ensure_ascii=False)) if name in tools else None)
    return found


def _typed(name: str, texts: Mapping[str, str], tools: Types) -> ToolCall:
    """A call whose values are plain texts: those of parameters that are strings stay so, others are read as JSON."""
    known = tools[name].get("properties")
    properties: Mapping[str, Any] = known if isinstance(known, dict) else {}
    values: dict[str, Any] = {}
    for key, text in texts.items():
        schema = properties.get(key)
        is_text = isinstance(schema, dict) and schema.get("type") == "string"
        value = None if is_text else _loaded(text)
        values[key] = text if value is None and text.strip() != "null" else value
    return ToolCall(name, json.dumps(values, ensure_ascii=False))


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


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
