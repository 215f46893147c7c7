"""Answers of chats and completions in the OpenAI API's shapes, whole or in chunks, and our figures beside them."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any, Literal

from forerun.api.completion import Completion, Spells, spelt
from forerun.core.request import Branch, Event, TokenLogprob
from forerun.drafters.lookup.alignment import Alignment
from forerun.models.load.tokenizer import Tokenizer
from forerun.server.errors import ApiError
from forerun.server.generation import speculation_of, usage_of
from forerun.server.metrics import RequestSpan
from forerun.server.parsers import Found, Piece, ToolCall
from forerun.server.schemas import Generation, StreamOptions
from forerun.server.sse import PLACE, TextLine, as_line, encode

Kind = Literal["chat.completion", "text_completion"]
_REASONS = {"stop": "stop", "length": "length", "aborted": "stop", "error": "error"}


@dataclass(slots=True)
class Answer:
    """What all messages of one answer have in common, and how far its texts are."""

    kind: Kind
    model: str
    tokenizer: Tokenizer
    body: Generation
    has_logprobs: bool
    span: RequestSpan
    prompts: int = 1
    arrived: float = field(default_factory=perf_counter)  # when the request came
    created: int = field(default_factory=lambda: int(time()))
    id: str = ""
    asked_by: dict[str, str] = field(default_factory=dict)  # for the log: the request's name and the caller's
    prompt_tokens: int = 0
    predicted: Sequence[int] = ()  # the request's prediction
    echoed: Sequence[tuple[int, ...]] = ()  # prompts that are repeated before their texts
    _lengths: dict[int, int] = field(default_factory=dict)  # characters sent, by choice
    _aligned: dict[int, Alignment] = field(default_factory=dict)  # with their prediction, by choice
    _thoughts: dict[int, list[str]] = field(default_factory=dict)  # pieces of what was thought, by choice
    _written: int = 0  # tokens so far, of all choices
    asked: StreamOptions = field(init=False)  # what the messages of a stream say
    _only_text: bool = False  # does nothing but the text differ between the pieces of a choice?
    _lines: dict[int, TextLine] = field(default_factory=dict)  # then: by choice

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.kind == "chat.completion" else "cmpl"
        self.id = self.id or f"{prefix}-{secrets.token_hex(12)}"
        asked = self.asked = self.body.stream_options or StreamOptions.model_construct()
        self._only_text = not (self.has_logprobs or asked.include_speculative or asked.continuous_usage_stats)

    @property
    def _place(self) -> str | None:
        """Where `spelt` of a text goes."""
        return PLACE if self.has_logprobs else None

    @property
    def _prompt_place(self) -> dict[str, str]:
        return {} if self.body.prompt_logprobs is None else {"prompt_logprobs": PLACE}

    def _echo(self, index: int) -> tuple[int, ...]:
        """The prompt that is repeated before the text of a choice."""
        return self.echoed[index // (self.body.n or 1)] if self.echoed else ()

    async def spelt(self, index: int, done: Completion) -> list[str]:
        """The log-probabilities of a whole text and its prompt, for the places that its choice has for them."""
        parts, known = [], done.prompt_logprobs or []
        if self.has_logprobs:
            first = [TokenLogprob(token, math.nan) for token in self._echo(index)[:1]]
            before = [*first, *filter(None, known)] if first else []
            parts.append(await as_json([*before, *done.logprobs], self.tokenizer, self.kind == "chat.completion"))
        in_place = self.kind != "chat.completion" or index + 1 == (self.body.n or 1)  # chats have one prompt
        if in_place and (most := self.body.prompt_logprobs) is not None:
            parts.append(await prompt_json(known, most, self.tokenizer))
        return parts

    def whole(self, done: Sequence[Completion], found: Sequence[Found] = ()) -> dict[str, Any]:
        """The answer of a request that does not stream; its log-probabilities come from `spelt`."""
        if self.kind == "chat.completion":
            parts = found or [Found(each.text) for each in done]
            choices = [self._message(i, *pair) for i, pair in enumerate(zip(done, parts, strict=True))]
        else:
            choices = [self._text(i, each) for i, each in enumerate(done)]
        metrics = {"speculative_decoding": speculation_of(done)}
        return {
            **self._head(self.kind), "choices": choices,
            **(self._prompt_place if self.kind == "chat.completion" else {}),
            "usage": self._used(done, [each.reasoning or "" for each in found]), "metrics": metrics,
        }  # fmt: skip

    def at_once(self, max_batch: int) -> int:
        """How many of its texts wait for the engine together; the others wait here."""
        return 1 << 30

    @property
    def end(self) -> bytes:
        """Behind the last message of a stream."""
        return b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        """The message of an error in the middle of a stream."""
        return as_line(error.body())

    def opening(self, index: int) -> list[bytes]:
        """The messages that open a choice."""
        if self.kind != "chat.completion":
            return [as_line(self._piece(index, self.tokenizer.decode(self._echo(index))))] if self.echoed else []
        return [as_line(self._delta(index, {"role": "assistant", "content": ""}))]

    def piece(self, index: int, event: Event) -> bytes:
        """The message of what one round added."""
        if self._only_text:
            line = self._lines.get(index)
            if line is None:
                line = self._lines[index] = TextLine(lambda text: self._piece(index, text))
            return line.with_text(event.text)
        self._written += len(event.tokens)
        at = self._lengths.get(index, 0)
        self._lengths[index] = at + len(event.text)
        chunk = self._piece(index, event.text, event.logprobs if self.has_logprobs else None, at)
        if self.asked.include_speculative:
            chunk["speculative"] = self._round(index, event)
        return as_line(chunk)

    def _round(self, index: int, event: Event) -> dict[str, Any]:
        """Which tokens of a round were drafted, and which were predicted by the request."""
        said: dict[str, Any] = {"tokens": list(event.tokens), "accepted": event.accepted}
        if self.predicted:
            if index not in self._aligned:
                self._aligned[index] = Alignment(self.predicted)
            said["predicted"] = [self._aligned[index].add(token) for token in event.tokens]
        if self.asked.include_rejected:
            said["rejected"] = [self._branch(each) for each in event.rejected]
        return said

    def _piece(
        self, index: int, text: str, entries: Sequence[TokenLogprob] | None = None, at: int = 0
    ) -> dict[str, Any]:
        """A chunk with more of a text, which so far has `at` characters."""
        if self.kind == "chat.completion":
            spelt = None if entries is None else for_chat(entries, self.tokenizer)
            return self._delta(index, {"content": text}, spelt)
        older = None if entries is None else for_completion(entries, self.tokenizer, at)
        return self._chunk([{"index": index, "text": text, "logprobs": older, "finish_reason": None}])

    def parsed(self, index: int, pieces: Sequence[Piece], event: Event | None = None) -> list[bytes]:
        """The messages of what a parser has found in what one round added; the first has the round's figures."""
        chunks = [self._delta(index, _delta_of(piece)) for piece in pieces]
        self._thoughts.setdefault(index, []).extend(piece.text for piece in pieces if piece.kind == "reasoning")
        if event is not None:
            self._written += len(event.tokens)
            if not chunks and (self.has_logprobs or self.asked.include_speculative):
                chunks = [self._delta(index, {})]
            if chunks and self.has_logprobs:
                chunks[0]["choices"][0]["logprobs"] = for_chat(event.logprobs, self.tokenizer)
            if chunks and self.asked.include_speculative:
                chunks[0]["speculative"] = self._round(index, event)
        return [as_line(chunk) for chunk in chunks]

    def ending(self, index: int, done: Completion, called: bool = False) -> list[bytes]:
        """The messages that end a choice."""
        reason = reason_of(done, called)
        empty: dict[str, Any] = {"delta": {}} if self.kind == "chat.completion" else {"text": ""}
        ends = {"index": index, **empty, "logprobs": None, "finish_reason": reason}
        return [as_line(self._chunk([{**ends, **_error_of(done)}]))]

    def closing(self, done: Sequence[Completion]) -> list[bytes]:
        """The messages behind all choices: usage, and what drafting came to, where they were asked for."""
        if not (self.asked.include_speculative or self.asked.include_usage):
            return []
        thoughts = ["".join(pieces) for pieces in self._thoughts.values()]
        chunk = {**self._chunk([]), "usage": self._used(done, thoughts)}
        if self.asked.include_speculative:
            chunk["metrics"] = {"speculative_decoding": speculation_of(done)}
        return [as_line(chunk)]

    def _used(self, done: Sequence[Completion], thoughts: Sequence[str]) -> dict[str, Any]:
        thought = self.thinking_tokens(thoughts) if self.kind == "chat.completion" else None
        return usage_of(done, self.prompts, thought)

    def thinking_tokens(self, thoughts: Sequence[str]) -> int:
        """Of what was thought, as its texts are tokenised."""
        return sum(len(self.tokenizer.encode(each, add_special=False)) for each in thoughts if each)

    def _branch(self, branch: Branch) -> dict[str, Any]:
        spelt = [self.tokenizer.token_text(token) for token in branch.tokens]
        return {"after": branch.after, "tokens": list(branch.tokens), "texts": spelt}

    def _message(self, index: int, done: Completion, found: Found) -> dict[str, Any]:
        text, calls, reasoning = found
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [call.as_json() for call in calls]
        reason = reason_of(done, bool(calls))
        return {
            "index": index,
            "message": message,
            "logprobs": self._place,
            "finish_reason": reason,
            "seed": done.seed,
            **_error_of(done),
        }

    def _text(self, index: int, done: Completion) -> dict[str, Any]:
        reason = reason_of(done)
        return {
            "index": index,
            "text": self.tokenizer.decode(self._echo(index)) + done.text,
            "logprobs": self._place,
            **self._prompt_place,
            "finish_reason": reason,
            "seed": done.seed,
            **_error_of(done),
        }

    def _delta(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | str | None = None) -> dict[str, Any]:
        return self._chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}])

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.kind == "chat.completion" else "text_completion"
        if choices and self.asked.continuous_usage_stats:
            read, own = self.prompt_tokens, self._written
            usage = {"prompt_tokens": read, "completion_tokens": own, "total_tokens": read + own}
            return {**self._head(kind), "choices": choices, "usage": usage}
        return {**self._head(kind), "choices": choices}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def _delta_of(piece: Piece) -> dict[str, Any]:
    """What a piece adds to a choice of a chat."""
    if piece.kind == "call":
        call = ToolCall(piece.text, "").as_json()
        return {"tool_calls": [{"index": piece.call, **call}]}
    if piece.kind == "arguments":
        return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}
    return {"reasoning_content" if piece.kind == "reasoning" else "content": piece.text}


def _error_of(done: Completion) -> dict[str, Any]:
    """Why a text broke off, where one did."""
    return {} if done.error is None else {"error": {"message": done.error}}


def reason_of(done: Completion, called: bool = False) -> str:
    return "tool_calls" if called and done.finish_reason == "stop" else _REASONS[done.finish_reason]


LOWEST = -9999.0  # JSON has no -inf
SLICE = 8  # tokens whose log-probabilities are written at once: with 64 others each, 3 to 5 ms


def for_chat(entries: Sequence[TokenLogprob], tokenizer: Spells) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    content = [
        {**_entry(each), "top_logprobs": [_entry(one) for one in each.top]} for each in spelt(entries, tokenizer)
    ]
    return {"content": content, "refusal": None}


def for_completion(entries: Sequence[TokenLogprob], tokenizer: Spells, offset: int = 0) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; `offset` is where the first token starts in the text."""
    entries = spelt(entries, tokenizer)
    offsets, at = [], offset
    for each in entries:
        offsets.append(at)
        at += len(each.text)
    return {
        "tokens": [each.text for each in entries],
        "token_logprobs": [None if math.isnan(each.logprob) else max(each.logprob, LOWEST) for each in entries],
        "top_logprobs": [
            None if math.isnan(each.logprob) else {one.text: max(one.logprob, LOWEST) for one in each.top}
            for each in entries
        ],
        "text_offset": offsets,
    }


async def as_json(entries: Sequence[TokenLogprob], tokenizer: Spells, of_chat: bool) -> str:
    """Either shape as JSON. Of a long text it is made in slices, between which others are served."""
    shape = for_chat((), tokenizer) if of_chat else for_completion((), tokenizer)
    columns: dict[str, list[str]] = {name: [] for name, value in shape.items() if value is not None}
    offset = 0
    for start in range(0, len(entries), SLICE):
        some = entries[start : start + SLICE]
        found = for_chat(some, tokenizer) if of_chat else for_completion(some, tokenizer, offset)
        offset += sum(map(len, found.get("tokens", ())))
        for name, pieces in columns.items():
            pieces.append(encode(found[name])[1:-1])
        await asyncio.sleep(0)
    texts = {name: f"[{','.join(columns[name])}]" if name in columns else "null" for name in shape}
    return "{" + ",".join(f'"{name}":{text}' for name, text in texts.items()) + "}"


async def prompt_json(known: Sequence[TokenLogprob | None], most: int, tokenizer: Spells) -> str:
    """`prompt_logprobs` as vLLM has it: of each token the likeliest and the token itself, by id. Made in slices."""
    parts = ["null"]
    for start in range(1, len(known), SLICE):
        for each in spelt(filter(None, known[start : start + SLICE]), tokenizer):
            ranked = {one.token: (one, rank) for rank, one in enumerate(each.top[:most], start=1)}
            found = {str(one.token): _ranked(one, rank) for one, rank in {each.token: (each, None), **ranked}.values()}
            parts.append(encode(found))
        await asyncio.sleep(0)
    return f"[{','.join(parts)}]"


def _ranked(one: TokenLogprob, rank: int | None) -> dict[str, Any]:
    return {"logprob": max(one.logprob, LOWEST), "rank": rank, "decoded_token": one.text}


def _entry(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.text, "logprob": max(one.logprob, LOWEST), "bytes": list(one.bytes)}
