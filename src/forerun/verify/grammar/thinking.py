"""ThinkingLaw: a budget of thinking and the grammar behind it, as part of the law, node by node.

Where thinking has used up its budget, the only tokens that can follow are those that close it. A grammar holds behind
the end of thinking, wherever that is in a path; until then no token can end the text. Both are functions of the
output's tokens alone, so they hold under any drafter.

The end of thinking is found in the text of the tokens, however it was tokenised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.core.params import Forces, LawProcessor, Prefix
from forerun.core.thinking import TAIL, ThinkingMarks
from forerun.verify.processors import IMPOSSIBLE, AllowByState


@runtime_checkable
class Thinks(Protocol):
    """A tokenizer of a model that may think."""

    @property
    def thinking(self) -> ThinkingMarks | None: ...

    def encode(self, text: str, /, add_special: bool) -> list[int]: ...

    def decode(self, ids: list[int], /, skip_special: bool) -> str: ...

    def token_text(self, index: int, /) -> str: ...


class Thinking:
    """The marks of one tokenizer, in tokens; shared by all its texts."""

    def __init__(self, tokenizer: Thinks, marks: ThinkingMarks, vocab_size: int) -> None:
        self.marks, self._tokenizer, self._size = marks, tokenizer, vocab_size
        self.begin = tuple(tokenizer.encode(marks.begin, False))
        self.close = tuple(tokenizer.encode(marks.close, False))
        self._text: dict[int, str] = {}

    def starts(self, prompt: Sequence[int]) -> str:
        return self.marks.start_of(self._tokenizer.decode(list(prompt[-TAIL:]), False))

    def text_of(self, token: int) -> str:
        text = self._text.get(token)
        if text is None:
            text = self._text[token] = self._tokenizer.token_text(token)
        return text

    @cached_property
    def overrunning(self) -> Mapping[str, list[int]]:
        """By what is written of the end mark: tokens that complete it and write on, which a grammar could not read."""
        end = self.marks.end
        texts = [self.text_of(token) for token in range(self._size)]
        found: dict[str, list[int]] = {}
        for size in range(len(end)):
            rest = end[size:]
            found[end[:size]] = [
                token
                for token, text in enumerate(texts)
                if (text[len(rest) :] if size and text.startswith(rest) else text.partition(end)[2]).strip()
            ]
        return found


@dataclass(frozen=True, slots=True)
class _State:
    """How far a text is. Implements forerun.verify.processors.State; what is allowed is decided by the law."""

    of: Thinking
    mode: str  # may = nothing is written | opening | thinking | answer
    written: int = 0  # tokens
    thought: int = 0  # of these, in thinking
    tail: str = ""  # the last characters of thinking, of which the end mark may be completed
    closed: int = 0  # tokens of the forced close that are written
    answer: int = 0  # tokens before the answer
    budget: int | None = None

    def allowed(self) -> None:
        return None

    def after(self, token: int) -> _State:
        written = self.written + 1
        if self.mode in ("may", "opening"):
            begin = self.of.begin
            if self.written >= len(begin) or begin[self.written] != token:
                return replace(self, mode="answer", written=written)
            if written == len(begin):
                return replace(self, mode="thinking", written=written)
            return replace(self, mode="opening", written=written)
        if self.mode == "answer":
            return replace(self, written=written)
        text, end = self.tail + self.of.text_of(token), self.of.marks.end
        if end in text:
            return replace(self, mode="answer", written=written, answer=written, tail="")
        closing = self.is_over and token == self.of.close[self.closed]
        return replace(
            self,
            written=written,
            thought=self.thought + 1,
            tail=text[-len(end) + 1 :],
            closed=self.closed + 1 if closing and self.closed + 1 < len(self.of.close) else 0,
        )

    @property
    def is_over(self) -> bool:
        """Is its budget used up?"""
        return self.mode == "thinking" and self.budget is not None and self.thought >= self.budget


class ThinkingLaw(Forces):
    """Implements forerun.core.params.LawProcessor, for one text: `inner` holds behind the end of its thinking."""

    def __init__(
        self, thinking: Thinking, start: str, budget: int | None, inner: LawProcessor | None, ends: frozenset[int]
    ) -> None:
        self._thinking, self._inner, self._ends = thinking, inner, sorted(ends)
        first = _State(thinking, "thinking" if start == "open" else "may", budget=budget)
        self._states = AllowByState(first)

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        state = self._states.state(prefix)
        assert isinstance(state, _State)
        if state.is_over:
            return _only(logits, self._thinking.close[state.closed])
        if self._inner is None:
            return logits
        if state.mode == "answer":
            return self._inner(_behind(prefix, state.answer), logits)
        if state.mode == "opening":
            return _only(logits, self._thinking.begin[state.written])
        if state.mode == "may":
            first = self._thinking.begin[0]
            think = logits[first].clone()
            held = self._inner(prefix, logits)
            held[first] = torch.maximum(held[first], think)
            return held
        return self._while_thinking(state, logits)

    def forced(self, prefix: Prefix) -> Sequence[int]:
        """What closes thinking where it must end, what completes its beginning, or what the grammar leaves alone."""
        state = self._states.state(prefix)
        assert isinstance(state, _State)
        if state.is_over:
            return self._thinking.close[state.closed :]
        if self._inner is None:
            return ()
        if state.mode == "opening":
            return self._thinking.begin[state.written :]
        if state.mode == "answer" and isinstance(self._inner, Forces):
            return self._inner.forced(_behind(prefix, state.answer))
        return ()

    def choice(self, prefix: Prefix, top: int) -> int | None:
        state, thinking, inner = self._states.state(prefix), self._thinking, self._inner
        assert isinstance(state, _State)
        if state.is_over:
            return thinking.close[state.closed]
        if inner is None:
            return top
        if state.mode == "opening":
            return thinking.begin[state.written]
        if state.mode == "thinking":
            end = thinking.marks.end
            over = (thinking.overrunning[end[:size]] for size in self._begun(state))
            return None if top in self._ends or any(top in tokens for tokens in over) else top
        if state.mode == "may" and top == thinking.begin[0]:
            return top
        found = inner.choice(_behind(prefix, state.answer), top) if isinstance(inner, Forces) else None
        return found if state.mode == "answer" or found == top else None

    def _begun(self, state: _State) -> list[int]:
        """How many characters of the end mark may be written."""
        end = self._thinking.marks.end
        return [size for size in range(len(end)) if state.tail.endswith(end[:size])]

    def _while_thinking(self, state: _State, logits: Tensor) -> Tensor:
        """The text cannot end here, nor begin its answer in the token that ends thinking."""
        logits[[token for token in self._ends if token < len(logits)]] = IMPOSSIBLE
        end = self._thinking.marks.end
        for size in self._begun(state):
            logits[self._thinking.overrunning[end[:size]]] = IMPOSSIBLE
        return logits


def _only(logits: Tensor, token: int) -> Tensor:
    """The law of one token, whatever bans it."""
    forced = torch.full_like(logits, IMPOSSIBLE)
    forced[token] = 0.0
    return forced


def _behind(prefix: Prefix, skipped: int) -> Prefix:
    """The same prefix, as if its first `skipped` tokens of output were a part of the prompt."""
    written = len(prefix.committed) - prefix.prompt_length
    if skipped <= written:
        return Prefix(prefix.committed, prefix.prompt_length + skipped, prefix.path)
    return Prefix((), 0, prefix.path[skipped - written :])
