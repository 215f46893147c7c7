"""LLM: load a model, then `generate`, `chat` or `stream` with drafting; safe to share between threads.

llm = LLM("smollm2")
print(llm.chat("Why is the sky blue?", max_tokens=80).text)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack, overload

from forerun.call_options import Options, Params, in_shape, make_request, make_requests
from forerun.completion import Completion as Completion
from forerun.completion import ended_of, raised_by
from forerun.engine.driver import Driver
from forerun.engine.engine import Engine
from forerun.errors import InvalidInput
from forerun.load_engine import LoadOptions, load_engine
from forerun.models.base import ServedByProcesses
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
from forerun.types import Event

if TYPE_CHECKING:
    from forerun.engine.sequence import SequenceState
    from forerun.models.load.tokenizer import Tokenizer


class LLM:
    """A target, its tokenizer, and the engine that generates with them.

    Any number of threads may share one: their calls join the running batch, and each gets its own completion.
    """

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
        self.driver = Driver(model)

    @classmethod
    def load(cls, model: str | PathLike[str] = "smollm2", **options: Unpack[LoadOptions]) -> LLM:
        """The same as `LLM(model, ...)`."""
        return cls(model, **options)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that a model is split over; without any there is nothing to end."""
        if isinstance(self.engine.target, ServedByProcesses):
            self.engine.target.close()

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
        first has the seed that was given, the i-th `noise.derived_seed(seed, i)`, and each says its own. A request
        that cannot go on raises its error once the others of the call have finished.
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
        handle = self.driver.submit(make_request(prompt, params, options, self.encode))
        try:
            for _, event in self.driver.events({0: handle}):
                yield event
            yield self.completion_of(handle.seq)
        finally:  # the caller may stop iterating early
            self.driver.abort(handle)

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
        """Completions in the shape of the prompts: one, a list, or a list of lists."""
        asked = make_requests(prompts, params, n, options, self.encode)
        done = self.driver.write([request for requests in asked for request in requests])
        return in_shape([self.completion_of(seq) for seq in done], asked, several, n)

    def completion_of(self, seq: SequenceState) -> Completion:
        """A sequence that has ended as a Completion; raises the error that ended it, if one did."""
        if (error := raised_by(seq)) is not None:
            raise error
        return ended_of(seq, self.engine.verifiers.get(seq.verifier).exact).completion()
