"""LLM: load a model, then `generate`, `chat` or `stream` with drafting; safe to share between threads.

llm = LLM("smollm2")
print(llm.chat("Why is the sky blue?", max_tokens=80).text)
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from os import PathLike
from typing import Self, Unpack

from forerun.api.calls import Call, Calls
from forerun.api.completion import Completion as Completion
from forerun.api.completion import Item, Stream
from forerun.build.load import LoadOptions, load_engine
from forerun.core.errors import InvalidInput
from forerun.core.types import Request
from forerun.engine.driver import Driver
from forerun.engine.engine import Engine
from forerun.models.base import ServedByProcesses
from forerun.models.load.tokenizer import Tokenizer


class LLM(Calls[Completion, list[Completion], list[list[Completion]], Stream]):
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
            model.captures.up_to(1)  # who loads an engine for a thread of its own lets that do it
        elif tokenizer is None or options:
            raise InvalidInput("an engine comes with its tokenizer and without options: LLM(engine, tokenizer)")
        super().__init__(model, tokenizer, name, Driver(model))

    @classmethod
    def load(cls, model: str | PathLike[str] = "smollm2", **options: Unpack[LoadOptions]) -> Self:
        """The same as `LLM(model, ...)`."""
        return cls(model, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that a model is split over; without any there is nothing to end."""
        if isinstance(self.engine.target, ServedByProcesses):
            self.engine.target.close()

    def _answer(self, call: Callable[[], Call]) -> Completion | list[Completion] | list[list[Completion]]:
        asked = call()
        done = self.driver.write(asked.requests)
        return asked.in_shape([self.completion_of(seq) for seq in done])

    def _stream(self, request: Request) -> Stream:
        return Stream(self._items(request), self.tokenizer)

    def _items(self, request: Request) -> Generator[Item]:
        handle = self.driver.submit(request)
        try:
            for _, event in self.driver.events({0: handle}):
                yield event
            yield self.completion_of(handle.seq)
        finally:  # the caller may stop iterating early
            self.driver.abort(handle)
