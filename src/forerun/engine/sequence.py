"""SequenceState: one sequence of the engine, with its tokens, its text, its rules for ending, its events and counts.

`check_request` refuses requests that an engine cannot serve.

Drafters, targets and controllers get this object and cannot change it: its fields and its tokens are read-only. Only
`SequenceState.take` writes, the whole result of a round at once, and may be called again where it was interrupted:
a fault leaves a sequence as it was before a round or as it is after it.

`Detokenizer` makes text of tokens while they are generated. A token may hold a part of a character, and a stop string
may span tokens and rounds. So text is held back until it can no longer change: while its last character is incomplete,
and while its end could still grow into a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any, NamedTuple, NoReturn, Protocol, TypeGuard, runtime_checkable

from forerun.core.errors import InvalidInput, PromptTooLong, UnknownName
from forerun.core.params import SamplingParams
from forerun.core.request import LawRules, Pooling, SourceRules, TokenLogprob
from forerun.core.types import Adapters, Event, FinishReason, LoadedAdapter, Request, Traits
from forerun.engine.stats import RoundCounts, SequenceStats
from forerun.verify.base import CompilesGrammars


class Decodes(Protocol):
    def decode(self, ids: list[int], /) -> str: ...


@runtime_checkable
class DecodesPieces(Decodes, Protocol):
    """A tokenizer that knows what most tokens add to any text of whole characters."""

    def piece(self, token: int, /) -> str | None:
        """None where that depends on what comes before or behind it."""
        ...


class Detokenizer:
    __slots__ = (
        "_done", "_early_characters", "_from", "_ids", "_may_stop", "_piece", "_taken", "stops", "text", "tokenizer",
    )  # fmt: skip

    def __init__(self, tokenizer: Decodes | None, stops: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stops = tuple(stops)
        self.text = ""  # all that is decoded, cut at a stop string
        self._taken = 0  # characters already handed out
        self._may_stop = True  # whether stop strings counted at the last token
        self._ids: list[int] = []  # tokens that still influence what follows; never changed, only replaced
        self._from = 0  # ids before this one no longer do
        self._done = 0  # ids before this one are in `text`
        self._early_characters = 0  # characters of later ids that are in `text`: those before an incomplete one
        # of tokens whose text does not depend on others; None = there are stop strings to look for, too
        self._piece = _piece_of(tokenizer) if not self.stops else None

    def fork(self) -> Detokenizer:
        """A copy that continues from here, so that a round can be computed before it is written."""
        copy = Detokenizer.__new__(Detokenizer)
        copy.tokenizer, copy.stops, copy.text = self.tokenizer, self.stops, self.text
        copy._taken, copy._may_stop, copy._ids = self._taken, self._may_stop, self._ids
        copy._from, copy._done, copy._early_characters = self._from, self._done, self._early_characters
        copy._piece = self._piece
        return copy

    def behind(self, tokens: Sequence[int]) -> tuple[Detokenizer, str] | None:
        """What `fork`, `push` of each token and `take` come to, in few steps; None = they are not of the usual kind."""
        if self.tokenizer is None:
            return self, ""
        find = self._piece
        if find is None or self._early_characters or self._done != len(self._ids) or self._taken != len(self.text):
            return None
        if len(tokens) == 1:
            piece = find(tokens[0])
            if piece is None:
                return None
        else:
            pieces = [one for one in map(find, tokens) if one is not None]
            if len(pieces) < len(tokens) or not pieces:
                return None
            piece = "".join(pieces)
        copy = Detokenizer.__new__(Detokenizer)
        copy.tokenizer, copy.stops, copy._piece, copy._may_stop = self.tokenizer, (), find, True
        copy.text = text = self.text + piece
        copy._taken, copy._ids, copy._from, copy._done, copy._early_characters = len(text), [tokens[-1]], 0, 1, 0
        return copy, piece

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Add a token; True if it completes a stop string, which is then cut off."""
        if self.tokenizer is None:
            return False
        self._may_stop = may_stop
        self._ids = [*self._ids[self._from :], token]
        self._done, self._from = self._done - self._from, 0
        before = self.tokenizer.decode(self._ids[: self._done])
        after = self.tokenizer.decode(self._ids)
        known = len(before) + self._early_characters
        # an incomplete character: wait for the rest of it, not for what precedes it
        if after.endswith("\ufffd"):
            fresh = after.rstrip("\ufffd")[known:]
            self._early_characters += len(fresh)
        else:
            fresh = after[known:]
            self._from, self._done, self._early_characters = self._done, len(self._ids), 0
        if not self.stops:
            self.text += fresh
            return False
        return self._add(fresh)

    def _add(self, fresh: str) -> bool:
        """Add text and cut it at a stop string that it completes; one that was complete before stays."""
        before = len(self.text)
        self.text += fresh
        if not self._may_stop or not self.stops:
            return False
        starts = [(stop, max(0, before - len(stop) + 1)) for stop in self.stops]
        hits = [at for stop, start in starts if (at := self.text.find(stop, start)) >= 0]
        if hits:
            self.text = self.text[: min(hits)]
            self._from, self._done, self._early_characters = 0, len(self._ids), 0  # nothing follows
        return bool(hits)

    def take(self, final: bool) -> str:
        """The text that can no longer change and was not handed out yet."""
        if final:
            self.flush()
        end = len(self.text) if final or not self.stops else self._unchanging()
        text = self.text[self._taken : end]
        self._taken = max(self._taken, end)
        return text

    def _unchanging(self) -> int:
        """How much of the text can no longer become part of a stop string."""
        if not self.stops:
            return len(self.text)
        for start in range(max(0, len(self.text) - max(map(len, self.stops), default=0) + 1), len(self.text)):
            if any(stop.startswith(self.text[start:]) for stop in self.stops):
                return start
        return len(self.text)

    def flush(self) -> bool:
        """Give up waiting for the rest of a character, as the text has ended; True if a stop string is complete."""
        if self.tokenizer is None or self._done == len(self._ids):
            return False
        before = self.tokenizer.decode(self._ids[self._from : self._done])
        fresh = self.tokenizer.decode(self._ids[self._from :])[len(before) + self._early_characters :]
        self._from = self._done = len(self._ids)
        self._early_characters = 0
        return self._add(fresh)


def _piece_of(tokenizer: Decodes | None) -> Callable[[int], str | None] | None:
    return tokenizer.piece if tokenizer is not None and _knows_pieces(tokenizer) else None


def _knows_pieces(tokenizer: Decodes) -> TypeGuard[DecodesPieces]:
    return _kind_knows_pieces(type(tokenizer))


@cache
def _kind_knows_pieces(kind: type) -> bool:
    """Asked once: to compare a class with a protocol takes long."""
    return issubclass(kind, DecodesPieces)


SWITCHED_OFF = ""  # what drafts for a sequence whose own drafter has failed
TURN = 8  # admissions, or preemptions, after which a request that was passed over has aged


class Tokens(list[int]):
    """A list that reads like any other and refuses to be changed: slices and sums of it are plain lists."""

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("the tokens of a sequence are read-only; copy them with list(seq.tokens)")

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse


@dataclass(frozen=True, slots=True, eq=False)
class SequenceState:
    """The engine's own view of a request; others see it as `forerun.core.types.Seq`."""

    id: int
    request: Request
    seed: int
    max_length: int
    stop_ids: frozenset[int]
    drafter: str  # as asked for
    verifier: str
    shares_noise: bool
    detokenizer: Detokenizer
    traits: Traits
    tokens: Tokens
    prompt_length: int
    drafting: str  # the drafter's name, or the plain one's where it has failed
    source_rules: SourceRules | None = None  # the target's: its prompt is then what the encoder reads
    adapter: LoadedAdapter | None = None
    rounds: list[RoundCounts] = field(default_factory=list)  # the counts of each
    events: list[Event] = field(default_factory=list)  # all so far
    made: float = 0.0  # when it was submitted, by the target's clock
    queue_seconds: float | None = None  # until its prompt was first read; None = it waits
    prompt_seconds: float = 0.0
    cached_tokens: int = 0  # of its prompt, found in the prefix cache
    finished: FinishReason | None = None
    error: Exception | None = None
    failures: int = 0  # rounds that failed since one succeeded
    passed_over: int = 0  # times it gave its slots to others; TURN = it has aged
    embedding: list[float] | None = None  # of its prompt
    prompt_logprobs: list[TokenLogprob | None] | None = None  # of its prompt, once it is read
    # what every round asks for, kept: a property is a call
    params: SamplingParams = field(init=False)
    source: tuple[int, ...] = field(init=False)
    rules: LawRules | None = field(init=False)

    def __post_init__(self) -> None:
        own = self.source_rules
        _set(self, "params", self.request.params)
        _set(self, "source", () if own is None else self.request.prompt)
        _set(self, "rules", None if own is None else own.laws)

    @property
    def cache_salt(self) -> str | None:
        return self.request.cache_salt

    @property
    def prediction(self) -> tuple[int, ...]:
        return self.request.prediction

    @property
    def pooling(self) -> Pooling | None:
        return self.request.pooling

    @property
    def scores_prompt(self) -> bool:
        """Are the log-probabilities of its prompt asked for, and not known yet?"""
        return self.params.prompt_logprobs is not None and self.prompt_logprobs is None

    @property
    def rank(self) -> float:
        """Its priority; one that has aged is as urgent as can be."""
        return self.request.priority if self.passed_over < TURN else -inf

    @property
    def stats(self) -> SequenceStats:
        """What was counted so far, added up on reading."""
        return SequenceStats.of(self.rounds, self.prompt_seconds)

    @property
    def drafted_by(self) -> str:
        """Its drafter; `none` where that failed before it had drafted anything."""
        failed = self.drafting == SWITCHED_OFF and not any(counts.drafted for counts in self.rounds)
        return "none" if failed else self.drafter

    @property
    def room(self) -> int:
        """Tokens it may still write."""
        return self.max_length - len(self.tokens)

    def extended(self, tokens: list[int]) -> tuple[int, Detokenizer, FinishReason | None]:
        """How many of these tokens it takes, up to the one that ends it, the detokenizer then, and why it ends."""
        detokenizer = self.detokenizer
        if detokenizer.tokenizer is not None:
            detokenizer = detokenizer.fork()
        written, least = len(self.tokens) - self.prompt_length, self.request.params.min_tokens
        most = self.max_length - self.prompt_length
        for token in tokens:
            written += 1
            may_stop = written >= least
            if (may_stop and token in self.stop_ids) or detokenizer.push(token, may_stop):
                return written - len(self.tokens) + self.prompt_length, detokenizer, "stop"
            if written >= most:
                why: FinishReason = "stop" if detokenizer.flush() else "length"
                return written - len(self.tokens) + self.prompt_length, detokenizer, why
        return len(tokens), detokenizer, None

    def take(self, advance: Advance) -> None:
        """Write the result of a round; a second call changes nothing."""
        _write(self.tokens, slice(advance.length, None), advance.tokens)
        if self.detokenizer is not advance.detokenizer:
            _set(self, "detokenizer", advance.detokenizer)
        if advance.counts is not None:
            self.rounds[advance.rounds :] = (advance.counts,)
        if advance.event is not None:
            self.events[advance.events :] = (advance.event,)
        if self.failures:
            _set(self, "failures", 0)
        if advance.finished is not None:
            _set(self, "error", advance.error)
            _set(self, "finished", advance.finished)  # last: a waiting thread finds everything else written

    def ended(self, why: FinishReason, error: Exception | None = None) -> Advance:
        """What ends it here and now, with an event if it is an error."""
        detokenizer = self.detokenizer.fork()
        text = detokenizer.take(final=True)
        event = Event(self.id, (), 0, text, (), why, error) if why == "error" else None
        return Advance(self, len(self.tokens), [], detokenizer, 0, None, len(self.events), event, why, error)

    def note_failure(self) -> None:
        _set(self, "failures", self.failures + 1)

    def note_preemption(self) -> None:
        """It gave its slots to others."""
        _set(self, "passed_over", self.passed_over + 1)

    def note_aged(self) -> None:
        """It waited longest, and no priority is above its own from now on."""
        _set(self, "passed_over", TURN)

    def note_prompt(self, started: float, seconds: float) -> None:
        """A chunk of its prompt was prefilled from `started` on, in `seconds` seconds."""
        if self.queue_seconds is None:
            _set(self, "queue_seconds", max(0.0, started - self.made))
        _set(self, "prompt_seconds", self.prompt_seconds + seconds)

    def note_reuse(self, tokens: int) -> None:
        """So many tokens of its prompt were found in the prefix cache."""
        _set(self, "cached_tokens", tokens)

    def note_embedding(self, embedding: list[float]) -> None:
        """What the rows of its prompt come to."""
        _set(self, "embedding", embedding)

    def note_prompt_logprobs(self, entries: list[TokenLogprob | None]) -> None:
        """Of every token of its prompt; the first has none."""
        _set(self, "prompt_logprobs", entries)

    def draft_with(self, name: str = SWITCHED_OFF) -> None:
        _set(self, "drafting", name)


class Advance(NamedTuple):
    """What a round adds to a sequence: computed, not yet written."""

    seq: SequenceState
    length: int  # tokens before it
    tokens: list[int]
    detokenizer: Detokenizer
    rounds: int  # that came before it
    counts: RoundCounts | None
    events: int  # that came before it
    event: Event | None
    finished: FinishReason | None
    error: Exception | None = None


def check_request(
    request: Request, vocab: int, longest: int, has_tokenizer: bool, source: SourceRules | None = None
) -> None:
    """Raise unless an engine of this vocabulary and context can serve it; `source` is an encoder-decoder's."""
    length = len(request.prompt)
    if not length:
        raise InvalidInput("the prompt is empty; give at least one token")
    if source is not None and length > source.longest:
        raise PromptTooLong(f"the source has {length} tokens; the encoder reads {source.longest}: shorten it")
    if source is not None and request.pooling is not None:
        raise InvalidInput("an encoder-decoder has no embedding of its prompt here; leave pooling out")
    if source is not None and request.params.prompt_logprobs is not None:
        raise InvalidInput("an encoder-decoder has no log-probabilities of its prompt; leave prompt_logprobs out")
    if source is None and length >= longest:
        limit = f"the context of {longest} leaves no room to answer; shorten it"
        raise PromptTooLong(f"the prompt has {length} tokens; {limit}")
    if min(request.prompt) < 0 or max(request.prompt) >= vocab:
        raise InvalidInput(f"a prompt token lies outside the vocabulary of {vocab}; check the tokenizer")
    if len(request.prediction) > longest:
        raise InvalidInput(
            f"the prediction has {len(request.prediction)} tokens; the context holds {longest}: shorten it"
        )
    if request.prediction and not 0 <= min(request.prediction) <= max(request.prediction) < vocab:
        raise InvalidInput(f"a token of the prediction lies outside the vocabulary of {vocab}; check the tokenizer")
    params = request.params
    named = [*params.logit_bias, *(token for word in params.bad_words for token in word)]
    if not all(0 <= token < vocab for token in named):
        raise InvalidInput(f"logit_bias or bad_words name a token outside the vocabulary of {vocab}")
    if params.stop and not has_tokenizer:
        raise InvalidInput("stop strings need a tokenizer; pass one or use stop_token_ids")


_set, _write = object.__setattr__, list.__setitem__


def find_adapter(adapters: Adapters | None, name: str) -> LoadedAdapter:
    """The adapter that a request asks for by name."""
    if adapters is None:
        raise UnknownName(f"unknown adapter {name!r}; this engine was made without adapters")
    return adapters.get(name)


def compiled(grammars: CompilesGrammars, request: Request) -> Request:
    """The request held to the structure and the budget of thinking that it asks for, if any. Any thread may call."""
    params = request.params
    asks = params.structure is not None or params.max_thinking_tokens is not None
    return grammars.compile(request) if asks else request
