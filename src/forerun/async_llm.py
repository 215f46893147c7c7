"""An LLM for asyncio: the engine runs on one thread of its own, and coroutines await their completions.

    async with AsyncLLM(LLM.load("smollm2")) as llm:
        completion = await llm.generate("Once upon a time")
        async for step in llm.stream("Once upon a time"): ...

A coroutine that is cancelled, or a stream that is closed, drops its request before the next round. At most
`max_requests` are served at once; others wait for a place, or are refused with `Overloaded` where `refuse` is set.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Unpack

from forerun.call_options import Options, Params, make_request
from forerun.checks import shown
from forerun.completion import Completion
from forerun.engine.cpu_time import seconds_of
from forerun.engine.driver import Handle, Waiter
from forerun.errors import ForerunError, InvalidInput, Overloaded
from forerun.llm import LLM
from forerun.types import Event, Request

if TYPE_CHECKING:
    from forerun.prompts import Prompt

log = logging.getLogger(__name__)


class AsyncLLM:
    """Serves the coroutines of one event loop. Made inside of it; `close` or `async with` ends its thread."""

    def __init__(self, llm: LLM, *, max_requests: int = 256, refuse: bool = False) -> None:
        if not isinstance(llm, LLM):
            raise InvalidInput(f"{shown(llm)} is no loaded model; give one: AsyncLLM(LLM.load('smollm2'))")
        self.llm, self.max_requests, self.refuse = llm, max_requests, refuse
        self._places = asyncio.Semaphore(max_requests)
        self._is_closed = False
        self._broken: BaseException | None = None
        self._handles: dict[Handle, str | None] = {}  # with the names that callers gave them
        self._owner = Waiter(lambda: self._is_closed)
        self._waiting = _Coroutines(lambda: self._is_closed or self._broken is not None)
        llm.driver.watch(self._waiting)
        self._thread = Thread(target=self._serve, name="forerun-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """The Completion of a prompt; raises what ended it, if an error did. `request_id` is a name for `abort`."""
        handle = await self._submit(make_request(prompt, params, options, self.llm.encode), request_id)
        try:
            await self._until(lambda: handle.is_finished)
            return self._completion_of(handle)
        finally:
            self._drop(handle)

    async def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        request_id: str | None = None,
        every_round: bool = True,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Event | Completion]:
        """Yield an Event per round as the text grows, then its Completion.

        Without `every_round` the event of the first round comes, and the others with the Completion: for callers that
        want the whole text, because an event loop that wakes after every round takes time from the engine.
        """
        handle = await self._submit(make_request(prompt, params, options, self.llm.encode), request_id)
        try:
            news, end = (lambda: handle.has_news), (lambda: handle.is_finished)
            is_finished, wanted = False, news
            while not is_finished:
                await self._until(wanted)
                is_finished = handle.is_finished  # read first: no event comes after it is set
                wanted = news if every_round else end
                for event in handle.take():
                    yield event
            yield self._completion_of(handle)
        finally:
            self._drop(handle)

    def abort(self, request_id: str) -> None:
        """End the requests of that name before the next round, as "aborted", with what they have; never waits."""
        for handle, name in self._handles.items():
            if name == request_id:
                self.llm.driver.post(handle.drop_from, at_once=False)

    async def close(self, timeout: float | None = None) -> bool:
        """Drop all requests and end the thread; calls that still wait get an error.

        Waits for the thread, at most `timeout` seconds: did it end? A round that hangs cannot be ended.
        """
        self._end_all()
        loop = asyncio.get_running_loop()
        until = None if timeout is None else loop.time() + timeout
        while self._thread.is_alive() and (until is None or loop.time() < until):
            await asyncio.sleep(0.002)  # not in an executor: a thread of it that hangs would keep the process
        return not self._thread.is_alive()

    def fail(self, error: BaseException) -> None:
        """Give up an engine that makes no progress: calls that wait, and later ones, get the error."""
        self._broken = error
        self._end_all()
        self.llm.driver.wake_all()

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

    async def _submit(self, request: Request, name: str | None) -> Handle:
        if request.params.structure is not None:
            request = await asyncio.to_thread(self.llm.engine.grammars.compile, request)
        if self.refuse and self._places.locked():
            raise Overloaded(f"{self.max_requests} requests are being served; try again later")
        await self._places.acquire()
        handle = Handle(request)
        self._handles[handle] = name
        try:
            self._check_open()
            self.llm.driver.post(handle.queue_in, at_once=False)
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
            del self._handles[handle]
            self._places.release()
            self.llm.driver.abort(handle, at_once=False)

    def _completion_of(self, handle: Handle) -> Completion:
        if handle.is_dropped:
            self._check_open()
        return self.llm.completion_of(handle.seq)

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
            self.llm.driver.wait(self._owner)
        except BaseException as error:
            log.exception("the engine's thread ended with an error")
            self._broken = self._broken or error
        self._waiting.wake()
        self.llm.driver.ignore(self._waiting)
        self.llm.driver.wake_all()


class _Coroutines:
    """All coroutines that wait for the engine: one call into their event loop wakes all that are ready after a round.

    Each call writes to a socket, and the engine's thread may lose the interpreter there: so one, not one for each.
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over  # nothing more will come: all are ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[
            asyncio.Future[None], Callable[[], bool]
        ] = {}  # changed by the loop's thread alone
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
