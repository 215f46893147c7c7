"""Completion: a finished text with its rounds, acceptance and timings; Stream and AsyncStream: a text as it grows.

with llm.stream("Once upon a time") as stream:
    for event in stream:
        print(event.text, end="", flush=True)
print(stream.completion.finish_reason)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from forerun.core.errors import ForerunError, GrammarFailed, brief
from forerun.core.request import Event, FinishReason, TokenLogprob
from forerun.drafters.lookup.alignment import counts_of
from forerun.engine.stats import RoundCounts, SequenceStats

if TYPE_CHECKING:
    from forerun.engine.sequence import SequenceState

SHOWN = 48  # characters of the text in a repr


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """A finished text, and how it was generated. `print` shows the text."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    rounds: int
    tokens_per_round: float
    accepted_per_position: list[float]
    drafted: int
    accepted: int
    drafter: str  # what drafted; `none` where the drafter failed before it had drafted anything
    verifier: str
    exact: bool
    seed: int | None  # passed back, it gives this text with any drafter; None where no seed does that
    seconds: float  # of the engine's work since it was admitted, including the rest of the batch
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of each token, if asked for
    queue_seconds: float = 0.0  # from its submission until its prompt was read
    reached: list[int] = field(default_factory=list)  # rounds whose draft reached depth 1, 2, ...
    kept: list[int] = field(default_factory=list)  # of these, rounds whose accepted path did
    cached_tokens: int = 0  # of the prompt: found in the prefix cache, and not computed again
    error: str | None = None  # why its text ends here, where finish_reason is "error"
    accepted_prediction_tokens: int = 0  # of the prediction: tokens that the text has
    rejected_prediction_tokens: int = 0  # and tokens that it does not have
    embedding: list[float] | None = None  # of the prompt, where `pooling` asked for it; its length is not 1
    prompt_logprobs: list[TokenLogprob | None] | None = None  # of each token of the prompt; the first has none

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything in it as plain values that JSON can hold."""
        plain = asdict(self)
        entries = [*plain["logprobs"], *filter(None, plain["prompt_logprobs"] or ())]
        for one in [top for entry in entries for top in (entry, *entry["top"])]:
            one["bytes"] = list(one["bytes"])
        return {**plain, "tokens": self.tokens, "tokens_per_second": self.tokens_per_second}

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN else f"{self.text[: SHOWN - 3]}..."
        rate = f"{self.tokens_per_round:.2f} tokens per round"
        exact = "" if self.exact else ", NOT EXACT"
        return f"Completion({text!r}, {self.tokens} tokens, {self.finish_reason!r}, {rate}{exact})"


# what a Completion has of the counts of its rounds
_COUNTED = ("rounds", "tokens_per_round", "accepted_per_position", "drafted", "accepted", "seconds", "reached", "kept")


class Ended(NamedTuple):
    """A sequence that has ended, in plain values: its rounds are added up by whoever wants the Completion."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    rounds: Sequence[RoundCounts]
    prompt_seconds: float
    drafter: str
    verifier: str
    exact: bool
    seed: int | None
    logprobs: list[TokenLogprob]
    queue_seconds: float
    cached_tokens: int
    error: str | None = None
    prediction: tuple[int, int] = (0, 0)  # predicted tokens that the text has, and those that it does not have
    embedding: list[float] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def completion(self) -> Completion:
        stats, own = SequenceStats.of(self.rounds, self.prompt_seconds), self._asdict()
        own |= {name: getattr(stats, name) for name in _COUNTED}
        accepted, rejected = own.pop("prediction")
        del own["prompt_seconds"]
        return Completion(**own, accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected)


def ended_of(seq: SequenceState, exact: bool) -> Ended:
    """A sequence that has ended; `exact` is its verifier's."""
    return Ended(
        text="".join(event.text for event in seq.events),
        token_ids=[*seq.tokens[seq.prompt_length :]],
        finish_reason=seq.finished or "aborted",
        prompt_tokens=len(seq.request.prompt),
        rounds=seq.rounds,
        prompt_seconds=seq.prompt_seconds,
        drafter=seq.drafted_by,
        verifier=seq.verifier,
        exact=exact,
        seed=seed_of(seq),
        logprobs=[entry for event in seq.events for entry in event.logprobs],
        queue_seconds=seq.queue_seconds or 0.0,
        cached_tokens=seq.cached_tokens,
        error=None if seq.error is None else str(seq.error),
        prediction=counts_of(seq.prediction, seq.tokens[seq.prompt_length :]) if seq.prediction else (0, 0),
        embedding=seq.embedding,
        prompt_logprobs=seq.prompt_logprobs,
    )


class Spells(Protocol):
    """How single tokens read: a Tokenizer."""

    def token_text(self, index: int, /) -> str: ...

    def token_bytes(self, index: int, /) -> bytes: ...


def spelt(entries: Iterable[TokenLogprob], tokenizer: Spells) -> list[TokenLogprob]:
    """Log-probabilities with the text and the bytes of their tokens; entries that have them stay as they are."""

    def one(entry: TokenLogprob) -> TokenLogprob:
        if entry.bytes:
            return entry
        text, raw = tokenizer.token_text(entry.token), tokenizer.token_bytes(entry.token)
        return replace(entry, text=text, bytes=raw, top=tuple(map(one, entry.top)))

    return [one(entry) for entry in entries]


def raised_by(seq: SequenceState) -> Exception | None:
    """The error of a sequence that has ended, for its caller; a grammar's failure comes with the text that there is."""
    return None if isinstance(seq.error, GrammarFailed) else seq.error


def seed_of(seq: SequenceState) -> int | None:
    """The seed that gives the same text again with any drafter; None where there is none: see docs/library.md."""
    if seq.shares_noise:
        return seq.seed
    return seq.params.seed if seq.params.is_greedy else None


Item = Event | Completion  # what a request comes to: an event per round, then the Completion


class _Reader:
    """What is known of a text that is being read."""

    def __init__(self, tokenizer: Spells) -> None:
        self._tokenizer = tokenizer
        self._completion: Completion | None = None
        self._missing = "its text has not ended; read the stream to its end first"

    @property
    def completion(self) -> Completion:
        """The whole text and how it was generated, as `generate` returns it; a ForerunError before the last event."""
        if self._completion is None:
            raise ForerunError(f"this stream has no completion: {self._missing}")
        return self._completion

    def _take(self, item: Item) -> Event | None:
        """The event to hand out; None at the end."""
        if isinstance(item, Completion):
            self._completion = item
            return None
        return replace(item, logprobs=tuple(spelt(item.logprobs, self._tokenizer))) if item.logprobs else item

    def _fail(self, error: BaseException) -> None:
        self._missing = f"its text ended with an error: {brief(error) or type(error).__name__}"

    def _leave(self) -> None:
        self._missing = "it was closed before its text ended; the events that were read have the text so far"


class Stream(_Reader, Iterator[Event]):
    """An iterator over the events of one text: their texts join to the whole; then `completion` has the rest.

    The request starts with the first event that is read. A stream that is closed, or left by `with`, drops it.
    """

    def __init__(self, items: Generator[Item], tokenizer: Spells) -> None:
        super().__init__(tokenizer)
        self._items = items

    def __next__(self) -> Event:
        try:
            event = self._take(next(self._items))
            if event is not None and _is_last(event):
                self._take(next(self._items))  # the completion is there with the last event
            if self._completion is not None:
                self._items.close()
        except StopIteration:
            raise
        except BaseException as error:
            self._fail(error)
            self._items.close()  # an interrupt that came between two items drops the request too
            raise
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """Drop the request, unless its text has ended."""
        self._leave()
        self._items.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(_Reader, AsyncIterator[Event]):
    """A Stream for `async for`, `async with` and `await stream.close()`."""

    def __init__(self, items: AsyncGenerator[Item], tokenizer: Spells) -> None:
        super().__init__(tokenizer)
        self._items = items

    async def __anext__(self) -> Event:
        try:
            event = self._take(await anext(self._items))
            if event is not None and _is_last(event):
                self._take(await anext(self._items))
            if self._completion is not None:
                await self._items.aclose()
        except StopAsyncIteration:
            raise
        except BaseException as error:
            self._fail(error)
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    async def close(self) -> None:
        """Drop the request, unless its text has ended."""
        self._leave()
        await self._items.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _is_last(event: Event) -> bool:
    """Does the Completion come behind it, and no error?"""
    return event.finished not in (None, "error")
