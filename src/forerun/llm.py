"""The object users hold.

llm = LLM("smollm2")
print(llm.chat("Why is the sky blue?", max_tokens=80).text)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from time import perf_counter
from typing import TYPE_CHECKING, Any, Unpack, overload

from forerun.call_options import Options, Params, in_shape, make_request, make_requests
from forerun.completion import Completion as Completion
from forerun.completion import completion_of
from forerun.engine.engine import Engine
from forerun.errors import InvalidInput
from forerun.load_engine import LoadOptions, load_engine
from forerun.prompts import (
    Conversation,
    Prompt,
    as_conversations,
    as_messages,
    as_prompts,
    as_token_list,
    check_text,
    is_chat,
)
from forerun.types import Event, Request, TokenLogprob

if TYPE_CHECKING:
    from forerun.engine.sequence import SequenceState
    from forerun.models.load.tokenizer import Tokenizer


@dataclass(slots=True)
class _Writing:
    """A request on its way to a Completion."""

    seq: SequenceState
    seconds: float = 0.0
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    unread: list[Event] = field(default_factory=list)

    def take(self, event: Event) -> None:
        self.text += event.text
        self.logprobs.extend(event.logprobs)
        self.unread.append(event)


class LLM:
    """A target, its tokenizer, and an engine that writes with them."""

    def __init__(
        self,
        model: str | PathLike[str] | Engine = "smollm2",
        tokenizer: Tokenizer | None = None,
        name: str = "",
        **options: Unpack[LoadOptions],
    ) -> None:
        """Load a model by known name, GGUF file, Hugging Face folder or hub id, and a drafter for it.

        `draft_model` is a smaller model or the folder of a trained head; a head that comes with the package is used
        where it fits. `speculative_config` also takes vLLM's names; `drafter` and `draft_model` override it. The other
        options are those of EngineConfig. An engine that is made already may come with its tokenizer instead.
        """
        if not isinstance(model, Engine):
            name = name or str(model)
            model, tokenizer = load_engine(model, options)
        elif tokenizer is None or options:
            raise InvalidInput(
                "an engine comes with its tokenizer and without options: LLM(engine, tokenizer)"
            )
        self.engine, self.tokenizer, self.name = model, tokenizer, name
        self._writings: dict[int, _Writing] = {}

    @classmethod
    def load(cls, model: str | PathLike[str] = "smollm2", **options: Unpack[LoadOptions]) -> LLM:
        """The same as `LLM(model, ...)`."""
        return cls(model, **options)

    def __repr__(self) -> str:
        return f"LLM({self.name!r}, drafter={self.engine.default_drafter!r})"

    @overload  # a string is also a sequence of strings: the first signature that fits is meant
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: Params | None = None, *, n: None = None, **options: Unpack[Options]
    ) -> Completion: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: Params | None = None, *, n: int, **options: Unpack[Options]
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        n: None = None,
        **options: Unpack[Options],
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        n: int,
        **options: Unpack[Options],
    ) -> list[list[Completion]]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Completion | list[Completion] | list[list[Completion]]:
        """A Completion for a prompt (text, token ids or chat messages), or a list of them for several prompts.

        Text is taken as it is; messages go through the model's chat template. Fields of SamplingParams may be given
        as keywords, over those of `params`; `drafter`, `verifier` and `budget` hold for this call only. Several
        prompts may share their parameters or bring a list of them. With `n`, each prompt gets a list of n texts: the
        first has the seed that was given, the i-th `noise.derived_seed(seed, i)`, and each says its own.
        """
        return self._answer(*as_prompts(prompts), params, n, options)

    @overload
    def chat(  # type: ignore[overload-overlap]
        self,
        messages: Conversation,
        params: Params | None = None,
        *,
        system: str | None = None,
        n: None = None,
        **options: Unpack[Options],
    ) -> Completion: ...
    @overload
    def chat(  # type: ignore[overload-overlap]
        self,
        messages: Conversation,
        params: Params | None = None,
        *,
        system: str | None = None,
        n: int,
        **options: Unpack[Options],
    ) -> list[Completion]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        params: Params | Sequence[Params] | None = None,
        *,
        system: str | None = None,
        n: None = None,
        **options: Unpack[Options],
    ) -> list[Completion]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        params: Params | Sequence[Params] | None = None,
        *,
        system: str | None = None,
        n: int,
        **options: Unpack[Options],
    ) -> list[list[Completion]]: ...
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params | Sequence[Params] | None = None,
        *,
        system: str | None = None,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Completion | list[Completion] | list[list[Completion]]:
        """Answer a chat, or several at once; a plain string is one user message. Options are `generate`'s."""
        conversations, several = as_conversations(messages, system)
        return self._answer(conversations, several, params, n, options)

    def stream(
        self, prompt: Prompt, params: Params | None = None, **options: Unpack[Options]
    ) -> Iterator[Event | Completion]:
        """Yield an Event per round as the text grows, then its Completion. Options are `generate`'s."""
        writing = self._start(make_request(prompt, params, options, self.encode))
        try:
            while not writing.seq.finished or writing.unread:
                if not writing.unread:
                    self._step()
                while writing.unread:
                    yield writing.unread.pop(0)
            yield self._complete(writing)
        finally:  # the caller may stop listening half-way
            self._end(writing)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids of a prompt in any of its forms."""
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(check_text(prompt)))
        if is_chat(prompt):
            return tuple(self.tokenizer.chat_ids(as_messages(prompt)))
        return as_token_list(prompt)

    def _answer(
        self,
        prompts: Sequence[Prompt],
        several: bool,
        params: Params | Sequence[Params] | None,
        n: int | None,
        options: Mapping[str, Any],
    ) -> Completion | list[Completion] | list[list[Completion]]:
        """What was asked for, in the shape it was asked in."""
        asked = make_requests(prompts, params, n, options, self.encode)
        done = self._write([request for requests in asked for request in requests])
        return in_shape(done, asked, several, n)

    def _start(self, request: Request) -> _Writing:
        seq = self.engine.find(self.engine.submit(request))
        assert seq is not None
        return self._writings.setdefault(seq.id, _Writing(seq))

    def _step(self) -> None:
        """One round for everybody; every text gets its own events, whoever asked for the round."""
        started = perf_counter()
        events = self.engine.step()
        spent = perf_counter() - started
        for event in events:
            if writing := self._writings.get(event.seq_id):
                writing.take(event)
                writing.seconds += spent

    def _write(self, requests: Sequence[Request]) -> list[Completion]:
        writings: list[_Writing] = []
        try:
            writings.extend(
                self._start(request) for request in requests
            )  # those started end, whatever follows
            while not all(writing.seq.finished for writing in writings):
                self._step()
            return [self._complete(writing) for writing in writings]
        finally:
            for writing in writings:
                self._end(writing)

    def _end(self, writing: _Writing) -> None:
        self.engine.abort(writing.seq.id)
        self._writings.pop(writing.seq.id, None)

    def _complete(self, writing: _Writing) -> Completion:
        exact = self.engine.verifiers.get(writing.seq.verifier).exact
        return completion_of(writing.seq, writing.text, writing.seconds, writing.logprobs, exact)
