"""LLM and AsyncLLM: load a model, then `generate`, `chat` or `stream` with drafting.

llm = LLM("smollm2")
print(llm.chat("Why is the sky blue?", max_tokens=80).text)

An LLM is safe to share between threads. AsyncLLM is the same for asyncio: the engine runs on one thread of its own, and
coroutines await their completions.

    async with AsyncLLM("smollm2") as llm:
        completion = await llm.generate("Once upon a time")
        async for event in llm.stream("Once upon a time"): ...

A coroutine that is cancelled, or a stream that is closed, drops its request before the next round. At most
`max_requests` are served at once; others wait for a place, or are refused with `Overloaded` where `refuse` is set.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from os import PathLike
from threading import Thread
from typing import Any, Self, Unpack

from forerun.api.calls import Call, Calls
from forerun.api.completion import AsyncStream, Completion, Item, Stream
from forerun.build.load import LoadOptions, load_engine
from forerun.core.errors import ForerunError, InvalidInput, Overloaded
from forerun.core.types import Request
from forerun.engine.driver import Driver, Handle, Waiter
from forerun.engine.engine import Engine
from forerun.engine.sequence import SequenceState
from forerun.engine.stats import seconds_of
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


log = logging.getLogger(__name__)
_One = Coroutine[Any, Any, Completion]
_Several = Coroutine[Any, Any, list[Completion]]
_Lists = Coroutine[Any, Any, list[list[Completion]]]


class AsyncLLM(Calls[_One, _Several, _Lists, AsyncStream]):
    """The calls of an LLM for the coroutines of one event loop: `await` them, or `async for` over their streams.

    `close` or `async with` ends its thread.
    """

    def __init__(
        self,
        model: str | PathLike[str] | Engine | LLM = "smollm2",
        tokenizer: Tokenizer | None = None,
        name: str = "",
        *,
        max_requests: int = 256,
        refuse: bool = False,
        **options: Unpack[LoadOptions],
    ) -> None:
        """Load a model as an LLM does, or serve an LLM that is loaded; threads may go on using it.

        Loading takes seconds, in which an event loop stands still: load before it starts, or in a thread.
        """
        if isinstance(model, LLM) and (tokenizer is not None or name or options):
            raise InvalidInput("an LLM is loaded already: give AsyncLLM(llm) no options of loading")
        self._owns_llm = not isinstance(model, LLM)
        if not isinstance(model, LLM | Engine):
            name = name or str(model)
            (model, tokenizer), options = load_engine(model, options), {}
        self.llm = model if isinstance(model, LLM) else LLM(model, tokenizer, name, **options)
        super().__init__(self.llm.engine, self.llm.tokenizer, self.llm.name, self.llm.driver)
        self.max_requests, self.refuse = max_requests, refuse
        self._places = asyncio.Semaphore(max_requests)
        self._is_closed = False
        self._broken: BaseException | None = None
        self._handles: set[Handle] = set()
        self._owner = Waiter(lambda: self._is_closed)
        self._waiting = _Coroutines(lambda: self._is_closed or self._broken is not None)
        self.driver.watch(self._waiting)
        self.llm.engine.captures.leave_to_thread()
        self._thread = Thread(target=self._serve, name="forerun-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, model: str | PathLike[str] = "smollm2", **options: Unpack[LoadOptions]) -> Self:
        """The same as `AsyncLLM(model, ...)`."""
        return cls(model, **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _answer(self, call: Callable[[], Call]) -> Completion | list[Completion] | list[list[Completion]]:
        asked = call()
        tasks = [asyncio.create_task(self._ended(request)) for request in asked.requests]
        try:
            done = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return asked.in_shape([self.completion_of(seq) for seq in done])

    async def _ended(self, request: Request) -> SequenceState:
        """Its sequence, once it has ended."""
        handle = await self._submit(request)
        try:
            await self._until(lambda: handle.is_finished)
            return self._seq_of(handle)
        finally:
            self._drop(handle)

    def _stream(self, request: Request) -> AsyncStream:
        return AsyncStream(self.items(request), self.tokenizer)

    async def items(self, request: Request, *, every_round: bool = True) -> AsyncGenerator[Item]:
        """What a stream reads, for servers: an event per round as the text grows, then the Completion.

        Without `every_round` the event of the first round comes, and the others with the Completion: for callers that
        want the whole text, because an event loop that wakes after every round takes time from the engine.
        """
        handle = await self._submit(request)
        try:
            news, end = (lambda: handle.has_news), (lambda: handle.is_finished)
            is_finished, wanted = False, news
            while not is_finished:
                await self._until(wanted)
                is_finished = handle.is_finished  # read first: no event comes after it is set
                wanted = news if every_round else end
                for event in handle.take():
                    yield event
            yield self.completion_of(self._seq_of(handle))
        finally:
            self._drop(handle)

    async def close(self, timeout: float | None = None) -> bool:
        """Drop all requests and end the thread; calls that still wait get an error.

        Waits for the thread, at most `timeout` seconds: did it end? A round that hangs cannot be ended. An LLM that
        was given is left open; one that was loaded here is closed.
        """
        self._end_all()
        loop = asyncio.get_running_loop()
        until = None if timeout is None else loop.time() + timeout
        while self._thread.is_alive() and (until is None or loop.time() < until):
            await asyncio.sleep(0.002)  # not in an executor: a thread of it that hangs would keep the process
        if self._owns_llm and not self._thread.is_alive():
            self.llm.close()
        return not self._thread.is_alive()

    def fail(self, error: BaseException) -> None:
        """Give up an engine that makes no progress: calls that wait, and later ones, get the error."""
        self._broken = error
        self._end_all()
        self.driver.wake_all()

    def _end_all(self) -> None:
        self._is_closed = True
        for handle in list(self._handles):
            self._drop(handle)
        self._owner.wake()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine's thread, or that it was given up with; None while it runs."""
        return self._broken

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the engine's thread so far; 0 once it has ended, or where the system does not tell."""
        return seconds_of(self._thread)

    @property
    def requests(self) -> int:
        """Requests that are being served or wait in the engine."""
        return len(self._handles)

    async def _submit(self, request: Request) -> Handle:
        handle = Handle(request)
        if request.params.structure is not None or request.adapter is not None:
            handle = await asyncio.to_thread(self.driver.prepared, request)
        if self.refuse and self._places.locked():
            raise Overloaded(f"{self.max_requests} requests are being served; try again later")
        await self._places.acquire()
        self._handles.add(handle)
        try:
            self._check_open()
            self.driver.post(handle.queue_in, at_once=False)
            await self._until(lambda: handle.is_decided)
            if handle.refused is not None:
                raise handle.refused
        except BaseException:
            self._drop(handle)
            raise
        return handle

    def _drop(self, handle: Handle) -> None:
        """The caller is gone: free its place, and end the request if it has not ended."""
        if handle in self._handles:
            self._handles.remove(handle)
            self._places.release()
            self.driver.abort(handle, at_once=False)

    def _seq_of(self, handle: Handle) -> SequenceState:
        if handle.is_dropped:
            self._check_open()
        return handle.seq

    async def _until(self, is_ready: Callable[[], bool]) -> None:
        """Wait for the engine's thread."""
        await self._waiting.until(is_ready)
        if not is_ready():
            self._check_open()

    def _check_open(self) -> None:
        if self._broken is not None:
            raise self._broken.with_traceback(None)  # it would keep what was on the stack each time before
        if self._is_closed:
            raise ForerunError("this AsyncLLM is closed; make a new one")

    def _serve(self) -> None:
        """The engine's thread."""
        try:
            self.driver.wait(self._owner)
        except BaseException as error:
            log.exception("the engine's thread ended with an error")
            self._broken = self._broken or error
        self.llm.engine.captures.has_thread = False
        self._waiting.wake()
        self.driver.ignore(self._waiting)
        self.driver.wake_all()


class _Coroutines:
    """All coroutines that wait for the engine: one call into their event loop wakes all that are ready after a round.

    Each call writes to a socket, and the engine's thread may lose the interpreter there: so one, not one for each.
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over  # nothing more will come: all are ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}  # changed by the loop's thread alone
        self._is_called = False  # and has not come yet: rounds may be quicker than the loop

    def is_ready(self) -> bool:
        """Asked by the engine's thread after every round; those that were woken and have not run yet do not count."""
        waiting = list(self._waiting.items())
        return self._is_over() or any(not woken.done() and is_ready() for woken, is_ready in waiting)

    def wake(self) -> None:
        if not self._is_called and self._loop is not None and not self._loop.is_closed():
            self._is_called = True
            self._loop.call_soon_threadsafe(self._wake_ready)

    def _wake_ready(self) -> None:
        self._is_called = False  # first: whatever comes from here on calls again
        is_over = self._is_over()
        for woken, is_ready in self._waiting.items():
            if not woken.done() and (is_over or is_ready()):
                woken.set_result(None)

    async def until(self, is_ready: Callable[[], bool]) -> None:
        """Return once that holds, or nothing more will come."""
        self._loop = asyncio.get_running_loop()
        while True:
            woken = self._loop.create_future()
            self._waiting[woken] = is_ready
            try:
                if is_ready() or self._is_over():  # asked once it waits: a round that ends meanwhile wakes it
                    return
                await woken
            finally:
                del self._waiting[woken]
