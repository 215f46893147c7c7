"""ReaderProcess: reads large bodies beside the front, one at a time, in a process of its own with a low priority.

It is started by the first request that needs it: `python -m forerun.server.reader_process FD`. What takes too long is
given up, and its process ended; the next request gets a new one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
from heapq import heappop, heappush
from itertools import count
from subprocess import Popen
from typing import Any

from forerun.models.load.tokenizer import Tokenizer, TokenizerParts
from forerun.server.engine_process.channel import Channel
from forerun.server.engine_process.child import take_channel
from forerun.server.engine_process.start import start_child
from forerun.server.errors import ApiError, as_api_error
from forerun.server.reading import ReaderFacts, RequestReader, What
from forerun.server.settings import LOG_FORMAT

log = logging.getLogger(__name__)
LONGEST = 60.0  # seconds that a body may take
MOST_WAITING = 64 << 20  # bytes of bodies
NICENESS = 5  # a third of the time that a thread of the engine gets on the same core


class ReaderProcess:
    """The front's side. To be used inside one event loop."""

    def __init__(self, tokenizer: Tokenizer, facts: ReaderFacts) -> None:
        self._tokenizer, self._facts = tokenizer, facts
        self._child: tuple[Popen[bytes], Channel] | None = None
        self._numbers = count()
        # a heap: the smallest is read next
        self._waiting: list[tuple[int, int, Any, asyncio.Future[Any]]] = []
        self._reading: tuple[asyncio.Future[Any], asyncio.TimerHandle] | None = None

    async def read(self, what: What, raw: bytes, context: int) -> Any:
        """As `RequestReader.read` does; nothing is read for a caller that has stopped waiting by then."""
        waiting = sum(size for size, _, _, reply in self._waiting if not reply.done())
        if waiting + len(raw) > MOST_WAITING:
            said = "too many large requests wait to be read; try again soon"
            raise ApiError(429, said, "rate_limit_error", code="queue_full", headers={"Retry-After": "1"})
        reply = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (len(raw), next(self._numbers), (what, raw, context), reply))
        self._read_next()
        return await reply

    def close(self) -> None:
        """End the process; whoever waits gets an error."""
        waiting, self._waiting = self._waiting, []
        leaving = ApiError(503, "the server is shutting down", "server_error")
        for *_, reply in waiting:
            _settle(reply, leaving)
        self._end(leaving)

    def _read_next(self) -> None:
        while self._reading is None and self._waiting:
            *_, order, reply = heappop(self._waiting)
            if not reply.done():
                self._channel().send(order)
                late = ApiError(400, f"the request could not be read within {LONGEST:g} s; shorten it")
                self._reading = reply, asyncio.get_running_loop().call_later(LONGEST, self._end, late)

    def _channel(self) -> Channel:
        if self._child is None:
            self._child = start_child(__name__)
            channel = self._child[1]
            channel.send((tuple(self._tokenizer.parts()), tuple(self._facts), log.getEffectiveLevel()))
            asyncio.get_running_loop().add_reader(channel.fileno(), self._take, channel)
        return self._child[1]

    def _take(self, channel: Channel) -> None:
        """Called by the event loop when the process has sent something, or is gone."""
        messages = channel.receive_ready()
        if messages is None:
            log.error("the process that reads large requests has ended")
            self._end(ApiError(500, "the process that reads large requests has ended", "server_error"))
        for answer in messages or ():
            self._settle_current(pickle.loads(answer))
            self._read_next()

    def _end(self, why: ApiError) -> None:
        """End the process, and the request that it reads."""
        if self._child is not None:
            process, channel = self._child
            self._child = None
            asyncio.get_running_loop().remove_reader(channel.fileno())
            process.kill()
            process.wait()
            channel.release()
        self._settle_current(why)
        self._read_next()

    def _settle_current(self, found: Any) -> None:
        if self._reading is not None:
            (reply, timer), self._reading = self._reading, None
            timer.cancel()
            _settle(reply, found)


def _settle(reply: asyncio.Future[Any], found: Any) -> None:
    """Answer a call, unless the caller has stopped waiting."""
    if reply.done():
        return
    if isinstance(found, ApiError):
        reply.set_exception(found)
    else:
        reply.set_result(found)


def main(number: int) -> int:
    """The whole life of the process; `number` is the socket that the front has left open for it."""
    channel = take_channel(number)
    orders = channel.receive()
    first = next(orders, None)
    if first is None:
        return 0
    parts, facts, level = first
    logging.basicConfig(level=level, format=LOG_FORMAT)
    reader = RequestReader(TokenizerParts(*parts).tokenizer(), ReaderFacts(*facts))
    os.nice(NICENESS)  # from here on: the first request waits for the imports
    for what, raw, context in orders:
        try:
            found = reader.read(what, raw, context)
        except Exception as error:
            found = as_api_error(error)
        channel.send(pickle.dumps(found))
        found = raw = None  # nothing is kept while it waits
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
