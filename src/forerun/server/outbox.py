"""What a connection of ours does past the web framework: it writes streams, and ends work whose client has left.

A round of the engine adds a message or two to every stream. What came for a connection within one turn of the event
loop is one chunk of HTTP and one write. Under another server the framework does both, with more work per message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
CONNECTION = "connection"  # where a request's state has it


class ClientLeft(Exception):
    """The client of a request has closed its connection."""


class OwnConnection(Protocol):
    """A connection of our own server, as requests see it."""

    async def send_body(self, lines: AsyncGenerator[bytes]) -> None:
        """Send a body in chunked encoding, between the start and the end that the framework sends.

        Waits while the client reads too slowly.
        """
        ...

    async def while_open(self, work: Coroutine[Any, Any, T]) -> T:
        """Await some work; where the client leaves, it is cancelled and ClientLeft raised."""
        ...


def connection_of(scope: Mapping[str, Any]) -> OwnConnection | None:
    """The connection of a request; None under another server."""
    found: OwnConnection | None = scope.get("state", {}).get(CONNECTION)
    return found


def is_chunked(scope: Mapping[str, Any]) -> bool:
    """Is an answer of unknown length sent in chunked encoding?"""
    return bool(scope["http_version"] == "1.1" and scope["method"] != "HEAD")


class Flow(Protocol):
    """Whether a connection's buffer is full."""

    write_paused: bool

    async def drain(self) -> None: ...


class Outbox:
    """What waits to be written, by connection."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.WriteTransport, list[bytes]] = {}

    async def send(self, lines: AsyncGenerator[bytes], transport: asyncio.WriteTransport, flow: Flow) -> None:
        """Everything that comes; all of it is written when this returns."""
        loop, waiting = asyncio.get_running_loop(), self._waiting
        try:
            async for line in lines:
                if flow.write_paused:
                    await flow.drain()
                if transport in waiting:
                    waiting[transport].append(line)
                    continue
                if not waiting:
                    loop.call_soon(self._write_all)
                waiting[transport] = [line]
        finally:
            self._write(transport, waiting.pop(transport, []))

    def _write_all(self) -> None:
        waiting = list(self._waiting.items())
        self._waiting.clear()
        for transport, lines in waiting:
            self._write(transport, lines)

    def _write(self, transport: asyncio.WriteTransport, lines: list[bytes]) -> None:
        if lines and not transport.is_closing():
            body = b"".join(lines)
            transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class Attendance:
    """Whether the client of a connection is there, and the task that works for it."""

    def __init__(self) -> None:
        self._left = asyncio.Event()
        self._works: asyncio.Task[Any] | None = None

    def end(self) -> None:
        """The client has left."""
        self._left.set()
        if self._works is not None:
            self._works.cancel()

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Await some work, unless the client leaves."""
        if self._left.is_set():
            work.close()
            raise ClientLeft
        task = self._works = asyncio.current_task()
        assert task is not None
        try:
            return await work
        except asyncio.CancelledError:
            if self._left.is_set() and task.uncancel() == 0:  # nobody else has cancelled it
                raise ClientLeft from None
            raise
        finally:
            self._works = None
