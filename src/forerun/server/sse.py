"""Server-sent events, one JSON object a message with `[DONE]` last, and how a connection of ours writes them.

Under load most of the front's time goes into messages of one token. Where the server is our own (`Connection` in
limits.py) messages go to the connection at once: the layers of the framework take three times as long. All messages
that came for a connection within one turn of the event loop are one chunk of HTTP and one write. Work whose client has
left is ended here, too.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from itertools import zip_longest
from json.encoder import encode_basestring
from typing import Any, Protocol, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from forerun.server.errors import ApiError, as_api_error

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_MARK = "\0 a text \0"  # no text that JSON would write as it is
PLACE = f"\0 {secrets.token_hex(8)} \0"  # no text that anybody knows


class EventStream(StreamingResponse):
    """Streams messages, the first of which is known. A client that leaves ends their generator; `ends` comes last."""

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes], ends: ExitStack, headers: dict[str, str], writer: WritesEnd
    ) -> None:
        self._rest, self._ends = rest, ends
        self._lines = _to_the_end(first, rest, writer)
        self._connection: OwnConnection | None = None
        super().__init__(self._lines, media_type="text/event-stream", headers=_HEADERS | headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Closes the generator itself: the framework leaves that to the garbage collector."""
        self._connection = connection_of(scope) if is_chunked(scope) else None
        with suppress(ClientLeft), self._ends:
            async with aclosing(self._rest):
                if self._connection is None:
                    await super().__call__(scope, receive, send)
                else:
                    await self._connection.while_open(self.stream_response(send))

    async def stream_response(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        async with aclosing(self._lines) as lines:
            await send(start)
            if self._connection is None:
                async for line in lines:
                    await send({"type": "http.response.body", "body": line, "more_body": True})
            else:
                await self._connection.send_body(lines)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class WritesEnd(Protocol):
    """How the streams of an API end."""

    @property
    def end(self) -> bytes:
        """Behind the last message, whatever that was."""

    def failed(self, error: ApiError) -> bytes:
        """The message of an error in the middle of a stream."""


async def _to_the_end(first: bytes, rest: AsyncGenerator[bytes], writer: WritesEnd) -> AsyncGenerator[bytes]:
    try:
        yield first
        async for line in rest:
            yield line
    except Exception as error:  # headers are sent: what is left is to say it in the stream
        yield writer.failed(as_api_error(error))
    if writer.end:
        yield writer.end


def encoded(chunk: dict[str, Any], parts: Sequence[str] = ()) -> bytes:
    """A chunk as JSON, with JSON that was made before in the places where it has `PLACE`."""
    if not parts:
        return encode(chunk).encode()
    pieces = encode(chunk).split(encode(PLACE))
    return "".join(each for pair in zip_longest(pieces, parts, fillvalue="") for each in pair).encode()


def as_line(chunk: dict[str, Any], parts: Sequence[str] = ()) -> bytes:
    return b"data: " + encoded(chunk, parts) + b"\n\n"


def as_event(chunk: dict[str, Any]) -> bytes:
    """A message under the name that its `type` is."""
    return b"event: %b\n%b" % (chunk["type"].encode(), as_line(chunk))


class TextLine:
    """A message of which only one text changes: all else in it is written once."""

    def __init__(self, chunk_of: Callable[[str], dict[str, Any]]) -> None:
        self._before, self._after = as_line(chunk_of(_MARK)).split(_quoted(_MARK))

    def with_text(self, text: str) -> bytes:
        return self._before + _quoted(text) + self._after


def _quoted(text: str) -> bytes:
    return encode_basestring(text).encode()


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

    async def while_open(self, work: Coroutine[Any, Any, T]) -> T:
        """Await some work; where the client leaves, it is cancelled and ClientLeft raised."""


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
        body = b"".join(lines)
        if body and not transport.is_closing():  # a chunk of length 0 would end the answer
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
