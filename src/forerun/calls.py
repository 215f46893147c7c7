"""The calls that LLM and AsyncLLM share: one signature and one check of arguments for both.

How results come is theirs: an LLM returns them, an AsyncLLM returns what is awaited for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, overload

from forerun.call_options import Call, Options, Params, make_request
from forerun.completion import Completion, ended_of, raised_by, spelt
from forerun.engine.engine import Engine
from forerun.errors import InvalidInput
from forerun.prompts import (
    Conversation,
    Prompt,
    as_conversations,
    as_messages,
    as_prompts,
    as_token_list,
    as_variables,
    check_text,
    is_chat,
)
from forerun.types import Request

if TYPE_CHECKING:
    from forerun.engine.driver import Driver
    from forerun.engine.sequence import SequenceState
    from forerun.models.load.tokenizer import Tokenizer

One = TypeVar("One")  # a Completion
Several = TypeVar("Several")  # a list of them
Lists = TypeVar("Lists")  # a list of such lists
Streamed = TypeVar("Streamed")  # a Stream or an AsyncStream


class Calls(ABC, Generic[One, Several, Lists, Streamed]):
    """What a loaded model can be asked for."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, name: str, driver: Driver) -> None:
        self.engine, self.tokenizer, self.name, self.driver = engine, tokenizer, name, driver

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, drafter={self.engine.default_drafter!r})"

    @overload  # a string is also a sequence of strings: the first signature that fits is meant
    def generate(
        self, prompts: Prompt, params: Params | None = None, *, n: None = None, **options: Unpack[Options]
    ) -> One: ...
    @overload
    def generate(
        self, prompts: Prompt, params: Params | None = None, *, n: int, **options: Unpack[Options]
    ) -> Several: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        n: None = None,
        **options: Unpack[Options],
    ) -> Several: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        n: int,
        **options: Unpack[Options],
    ) -> Lists: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """A Completion for a prompt (text, token ids or chat messages), or a list of them for several prompts.

        Text is taken as it is; messages go through the model's chat template. Fields of SamplingParams may be given
        as keywords, over those of `params`; `drafter`, `verifier` and `budget` hold for this call only. Several
        prompts may share their parameters or bring a list of them. With `n`, each prompt gets a list of n texts: the
        first has the seed that was given, the i-th `noise.derived_seed(seed, i)`, and each says its own. A request
        that cannot go on raises its error once the others of the call have finished.
        """
        return self._answer(lambda: Call.of(*as_prompts(prompts), params, n, options, self.encode))

    @overload
    def chat(
        self,
        messages: Conversation,
        params: Params | None = None,
        *,
        system: str | None = None,
        n: None = None,
        **options: Unpack[Options],
    ) -> One: ...
    @overload
    def chat(
        self,
        messages: Conversation,
        params: Params | None = None,
        *,
        system: str | None = None,
        n: int,
        **options: Unpack[Options],
    ) -> Several: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        params: Params | Sequence[Params] | None = None,
        *,
        system: str | None = None,
        n: None = None,
        **options: Unpack[Options],
    ) -> Several: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        params: Params | Sequence[Params] | None = None,
        *,
        system: str | None = None,
        n: int,
        **options: Unpack[Options],
    ) -> Lists: ...
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params | Sequence[Params] | None = None,
        *,
        system: str | None = None,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Answer a chat, or several at once; a plain string is one user message. Options are `generate`'s."""
        return self._answer(
            lambda: Call.of(*as_conversations(messages, system), params, n, options, self.encode)
        )

    def stream(self, prompt: Prompt, params: Params | None = None, **options: Unpack[Options]) -> Streamed:
        """Continue one prompt, event by event: an Event per round as the text grows. Options are `generate`'s."""
        return self._stream(make_request(prompt, params, options, self.encode))

    def stream_chat(
        self,
        messages: Conversation,
        params: Params | None = None,
        *,
        system: str | None = None,
        **options: Unpack[Options],
    ) -> Streamed:
        """Answer one chat, event by event; a plain string is one user message. Options are `generate`'s."""
        return self._stream(make_request(as_messages(messages, system), params, options, self.encode))

    def encode(
        self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """The token ids of a prompt in any of its forms; variables reach the chat template that writes messages."""
        if is_chat(prompt):
            return tuple(self.tokenizer.chat_ids(as_messages(prompt), **as_variables(chat_template_kwargs)))
        if chat_template_kwargs:
            raise InvalidInput(
                "chat_template_kwargs are for chats: give messages, or use chat() and stream_chat()"
            )
        return (
            tuple(self.tokenizer.encode(check_text(prompt)))
            if isinstance(prompt, str)
            else as_token_list(prompt)
        )

    def abort(self, request_id: str) -> None:
        """End the requests of that name before the next round, as "aborted", with what they have; never waits."""

        def end(engine: Engine) -> None:
            for seq in [*engine.running, *engine.reading, *engine.waiting]:
                if seq.request.request_id == request_id:
                    engine.abort(seq.id)

        self.driver.post(end, at_once=False)

    @abstractmethod
    def _answer(self, call: Callable[[], Call]) -> Any:
        """The completions of a call, in its shape."""

    @abstractmethod
    def _stream(self, request: Request) -> Streamed: ...

    def completion_of(self, seq: SequenceState) -> Completion:
        """A sequence that has ended as a Completion; raises the error that ended it, if one did."""
        if (error := raised_by(seq)) is not None:
            raise error
        ended = ended_of(seq, self.engine.verifiers.get(seq.verifier).exact)
        return ended._replace(logprobs=spelt(ended.logprobs, self.tokenizer)).completion()
