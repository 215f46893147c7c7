"""ProcessBackend: the engine of another process as a server's Backend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import monotonic, process_time, thread_time
from typing import Any

from forerun.api.calls import as_token_list, make_request
from forerun.api.completion import Completion
from forerun.core.errors import ForerunError
from forerun.core.request import Event, TokenLogprob
from forerun.models.load.tokenizer import Tokenizer
from forerun.server.backends.base import CLOSING, Backend, EngineHangs, Load, ProgressWatch, Restarted, why_ended
from forerun.server.backends.start import EngineLost, EngineProcess
from forerun.server.backends.wire import Facts, Packed, Report, pack_request, unpack_ended, unpack_error, unpack_event

log = logging.getLogger(__name__)
LONGEST_HOLD = 0.002  # seconds that orders are kept back so that others go with them
LONGEST_PAUSE = 60.0  # seconds between two attempts to start an engine that cannot be loaded


class _Text:
    """What has come of a text and was not read yet."""

    __slots__ = ("error", "items", "logprobs", "woken")

    def __init__(self) -> None:
        self.items: list[Event | Completion] = []
        self.logprobs: list[TokenLogprob] = []  # of all events
        self.error: BaseException | None = None  # behind the items
        self.woken: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(None)

    async def take(self) -> list[Event | Completion]:
        """What is there, at least one item; raises what ended the text."""
        while not self.items:
            if self.error is not None:
                raise self.error
            self.woken = asyncio.get_running_loop().create_future()
            await self.woken
        items, self.items = self.items, []
        return items


class ProcessBackend(Backend):
    """An engine whose process was started and has loaded its model. Made inside the event loop that uses it."""

    patience = 1.0  # seconds for an answer about how the engine is

    def __init__(self, engine: EngineProcess, facts: Facts, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, facts.vocab_size, facts.max_length, facts.has_encoder)
        self._engine, self._facts, self._report = engine, facts, facts.report
        self._loop = asyncio.get_running_loop()
        self._texts: dict[int, _Text] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count(1)
        self._orders: list[Packed] = []  # not sent yet
        self._held_since = 0.0
        self._asked: asyncio.Future[Any] | None = None  # for a report
        self._failure: BaseException | None = None
        self._progress, self._pause = ProgressWatch(), 1.0
        self._is_closed = False
        # loaded (from a folder) and unloaded (None) since it was started: again after a restart
        self._adapters: list[tuple[str, str | None]] = []
        self._loop.add_reader(engine.channel.fileno(), self._read)

    @property
    def max_batch(self) -> int:
        return self._facts.max_batch

    @property
    def drafter(self) -> str:
        return self._report.drafter

    async def stream(
        self, prompt: tuple[int, ...], *, every_round: bool = True, **options: Any
    ) -> AsyncGenerator[Event | Completion]:
        packed = pack_request(make_request(prompt, None, options, as_token_list))
        if self._failure is not None:
            raise _told(self._failure)
        key, text = next(self._numbers), _Text()
        self._texts[key] = text
        self._send("write", key, every_round, packed)
        try:
            while True:
                for item in await text.take():
                    yield item
                    if isinstance(item, Completion):
                        return
        finally:
            if self._texts.pop(key, None) is not None:
                self._send("abort", key)

    async def refresh(self) -> None:
        """As the seam says; an engine that does not answer is what `looks_hung` is for."""
        if self._failure is not None:
            return
        if self._asked is None or self._asked.done():
            self._asked = self._ask("report")
        try:
            packed = await asyncio.wait_for(asyncio.shield(self._asked), self.patience)
        except (TimeoutError, ForerunError):
            self._asked = None  # an answer that was lost must not end all later ones
            return
        self._report = Report.unpacked(packed)

    def load(self) -> Load:
        return self._report.load

    def cpu_seconds(self) -> dict[str, float]:
        """Of both processes; the engine's as of the last report."""
        front, engine, its = thread_time(), self._report.engine_seconds, self._report.process_seconds
        return {"engine": engine, "front": front, "others": max(0.0, process_time() - front + its - engine)}

    @property
    def failure(self) -> BaseException | None:
        lost = self._report.lost_process
        return self._failure or (None if lost is None else EngineLost(lost))

    @property
    def problem(self) -> str | None:
        return self._report.lost_process if self._failure is None else why_ended(self._failure)

    def looks_hung(self, patience: float) -> bool:
        has_work = bool(self._texts) and self._failure is None
        return self._progress.stands_still(self._report.progress, has_work, patience)

    def give_up(self) -> None:
        """Whoever waits gets an error, and its process is killed."""
        self._end(EngineHangs())
        self._engine.kill()

    async def swap_head(self, folder: Path) -> None:
        await self._ask("swap", str(folder))

    async def change_adapter(self, name: str, folder: str | None) -> None:
        if folder is not None:
            await self._ask("adapter", name, folder)
            self._adapters.append((name, folder))
            return
        later = [each for each in self._adapters if each[0] == name and each[1] is not None]
        if later:
            self._adapters.remove(later[0])
        else:
            self._adapters.append((name, None))  # noted first: an engine that has ended is started without it
        await self._ask("adapter", name, None)

    async def restart(self) -> Restarted:
        """Start a new process in place of the old one, which is killed if it still runs."""
        if self._is_closed:
            return "no"
        self._end(self.failure or EngineLost("the engine is started again"))
        self._engine.kill()
        self._engine.channel.release()
        try:
            self._engine = EngineProcess(self._engine.loader, self._engine.trace)
            self._facts = await asyncio.to_thread(self._engine.wait_until_ready)
            self.max_length = self._facts.max_length
        except (ForerunError, OSError) as error:
            await self._wait_after(error)
            return "no"
        self._pause, self._report, self._failure = 1.0, self._facts.report, None
        self._loop.add_reader(self._engine.channel.fileno(), self._read)
        # asked for before any text: the engine's process takes both in their order
        asked = [(name, self._ask("adapter", name, folder)) for name, folder in self._adapters]
        for name, reply in asked:
            try:
                await reply
            except ForerunError as error:
                log.error("the adapter %r could not be loaded again: %s", name, error)
        return "yes"

    async def _wait_after(self, error: Exception) -> None:
        """Before the next attempt, if there is to be one."""
        if self._is_closed:
            return
        log.error("the engine could not be started again, next try in %g s: %s", self._pause, error)
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    async def close(self) -> None:
        """End its process: by itself within a while, or else by force."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._end_process(ForerunError("the engine was closed"))

    async def sleep(self) -> None:
        """As the seam says: its process ends."""
        await self._end_process(EngineLost("the engine sleeps"))
        idle = replace(self._report.load, running=0, waiting=0, used_slots=0, cached_slots=0)
        self._report = self._report._replace(load=idle)

    async def _end_process(self, why: ForerunError) -> None:
        self._end(why)
        self._engine.channel.close()
        until = self._loop.time() + CLOSING
        while self._engine.process.poll() is None and self._loop.time() < until:
            await asyncio.sleep(0.005)
        if self._engine.process.poll() is None:
            log.error("the engine's process does not end and is killed")
        self._engine.kill()

    def _send(self, *order: Any) -> None:
        """Have it sent with whatever else comes in this turn of the event loop, unless that turn takes long."""
        now = monotonic()
        if not self._orders:
            self._loop.call_soon(self._send_all)
            self._held_since = now
        self._orders.append(order)
        if now - self._held_since > LONGEST_HOLD:
            self._send_all()

    def _send_all(self) -> None:
        orders, self._orders = self._orders, []
        if orders and self._failure is None:
            self._engine.channel.send(orders)

    def _ask(self, what: str, *given: Any) -> asyncio.Future[Any]:
        """An order that is answered."""
        number, reply = next(self._numbers), self._loop.create_future()
        if self._failure is not None:
            _refuse(reply, EngineLost(why_ended(self._failure)))
            return reply
        self._replies[number] = reply
        self._send(what, number, *given)
        return reply

    def _read(self) -> None:
        """Called by the event loop when the engine has sent something, or is gone."""
        messages = self._engine.channel.receive_ready()
        if messages is None:
            self._end(EngineLost(self._engine.how_it_ended()))
            log.error("%s", self.problem)
            return
        for what, *given in messages:
            if what == "texts":
                self._take_news(*given)
            elif what == "reply":
                self._take_reply(*given)
            else:  # it ends because of an error
                self._end(unpack_error(*given))

    def _take_news(self, news: list[Packed]) -> None:
        for key, events, ended, error in news:
            text = self._texts.get(key)
            if text is None:  # dropped meanwhile
                continue
            fresh = [unpack_event(key, each) for each in events]
            text.items += fresh
            text.logprobs += [entry for event in fresh for entry in event.logprobs]
            if ended is not None:
                text.items.append(unpack_ended(ended, text.logprobs))
            if error is not None:
                text.error = unpack_error(error)
            if ended is not None or error is not None:
                del self._texts[key]
            text.wake()

    def _take_reply(self, number: int, value: Any, error: Packed | None) -> None:
        reply = self._replies.pop(number)
        if error is not None:
            _refuse(reply, unpack_error(error))
        elif not reply.done():
            reply.set_result(value)

    def _end(self, why: BaseException) -> None:
        """The engine's process sends nothing more: all waiting calls get an error."""
        if self._failure is not None:
            return
        self._failure = why
        self._loop.remove_reader(self._engine.channel.fileno())
        for text in self._texts.values():
            text.error = _told(why)
            text.wake()
        self._texts.clear()
        for reply in self._replies.values():
            _refuse(reply, EngineLost(why_ended(why)))
        self._replies.clear()
        self._orders = []


def _told(failure: BaseException) -> BaseException:
    """What ends a request because the engine has ended; raised for many, it keeps nothing of the others."""
    return EngineLost(why_ended(failure)) if isinstance(failure, EngineLost) else failure.with_traceback(None)


def _refuse(reply: asyncio.Future[Any], error: Exception) -> None:
    """Answer a call with an error, unless the caller has stopped waiting."""
    if not reply.done():
        reply.set_exception(error)
        reply.exception()
