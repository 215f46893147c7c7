"""Stream and AsyncStream: the events of one text as it grows, and its Completion once it has ended.

with llm.stream("Once upon a time") as stream:
    for event in stream:
        print(event.text, end="", flush=True)
print(stream.completion.finish_reason)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from dataclasses import replace
from typing import Self

from forerun.api.completion import Completion, Spells, spelt
from forerun.core.errors import ForerunError, brief
from forerun.core.request import Event

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
