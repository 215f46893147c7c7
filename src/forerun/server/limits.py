"""Limits: the size of a request, API keys, requests a minute, and how long a connection may stay idle.

`Guard` looks at every request first. `Gate` compares keys in constant time. A connection (`Connection`) whose
client takes nothing that was sent, or sends no request, is cut off. The framework stops writing chunks once 64 KiB wait
for a client, behind the `KERNEL_BYTES` that the kernel holds; closing such a connection in the usual way would wait for
the client to read the rest. Of the framework's parsers, h11 has a limit on the bytes of a path and headers;
httptools has none, and gets one here.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import json
import logging
import secrets
import socket
import sys
import termios
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from forerun.server.errors import ApiError
from forerun.server.metrics import Metrics
from forerun.server.sse import CONNECTION, Attendance, Outbox

HEAD_BYTES = 32 << 10  # of a request's path and headers


class Guard:
    """An ASGI layer around the application."""

    def __init__(self, app: ASGIApp, max_body: int, patience: float, metrics: Metrics) -> None:
        self.app, self.max_body, self.patience, self.metrics = app, max_body, patience, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = headers.get("x-request-id", "")[:64] or secrets.token_hex(8)
        state = scope.setdefault("state", {})
        state.update(id=name, arrived=perf_counter())
        left = self.max_body
        started = whole = False

        async def limited() -> Message:
            nonlocal left, whole
            try:  # behind the body, what comes is that the client has left
                async with asyncio.timeout(None if whole else self.patience):
                    message = await receive()
            except TimeoutError:
                said = f"the body did not come within {self.patience:g} s"
                raise ApiError(408, said, code="body_timeout", headers={"Connection": "close"}) from None
            whole = not message.get("more_body", False)
            left -= len(message.get("body", b""))
            if left < 0:
                raise ApiError(413, f"the body is larger than {self.max_body} bytes", code="body_too_large")
            return message

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = name
                self.metrics.count_answered(getattr(scope.get("route"), "path", "none"), message["status"])
            await send(message)

        try:
            if _head_size(scope) > HEAD_BYTES:
                raise head_too_large()
            if _length(headers) > self.max_body:
                raise ApiError(413, f"the body is larger than {self.max_body} bytes", code="body_too_large")
            await self.app(scope, limited, named)
        except ApiError as error:
            if started:
                raise
            await error.response(scope["path"])(scope, receive, named)


def head_too_large() -> ApiError:
    """The error for a request whose path and headers are too long."""
    said = f"the path and the headers have more than {HEAD_BYTES} bytes; send less, or send it in the body"
    return ApiError(431, said, code="headers_too_large", headers={"Connection": "close"})


def _head_size(scope: Scope) -> int:
    path = len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"])
    # with a colon, a space and the line's end
    return path + sum(len(name) + len(value) + 4 for name, value in scope["headers"])


def _length(headers: Headers) -> int:
    """What a request says of its body; 0 where it does not say."""
    text = headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdigit() else 0


MOST_CALLERS = 10_000  # whose last requests are remembered


@dataclass(slots=True)
class _Bucket:
    """Requests that a caller may still make now; it fills up steadily."""

    left: float
    at: float


class Gate:
    """Lets callers in by key and within their rate."""

    def __init__(self, keys: Sequence[str], per_minute: int | None, now: Callable[[], float] = monotonic) -> None:
        self._keys, self._per_minute, self._now = [key.encode() for key in keys], per_minute, now
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def check(self, authorization: str | None, address: str) -> str:
        """The caller's name for limits and caches; raises what turns a caller away."""
        caller = f"key {self._index(authorization)}" if self._keys else f"address {address}"
        self._count(caller)
        return caller

    def _index(self, authorization: str | None) -> int:
        scheme, _, given = (authorization or "").partition(" ")
        key = given.strip().encode()
        # every key is compared, so that the time taken does not tell which one matched
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            said = "no API key was given" if not key else "this API key is not known here"
            message = f"{said}; send it as `Authorization: Bearer KEY`"
            raise ApiError(
                401, message, "authentication_error", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return matches.index(True)

    def _count(self, caller: str) -> None:
        if self._per_minute is None:
            return
        now, rate = self._now(), self._per_minute / 60.0
        bucket = self._buckets.pop(caller, _Bucket(float(self._per_minute), now))
        bucket.left = min(float(self._per_minute), bucket.left + (now - bucket.at) * rate)
        bucket.at = now
        self._buckets[caller] = bucket
        while len(self._buckets) > MOST_CALLERS:
            self._buckets.popitem(last=False)
        if bucket.left < 1.0:
            wait = max(1, round((1.0 - bucket.left) / rate))
            message = f"more than {self._per_minute} requests a minute; try again in {wait} s"
            raise ApiError(
                429, message, "rate_limit_error", code="rate_limit_exceeded", headers={"Retry-After": str(wait)}
            )
        bucket.left -= 1.0


def must_be_admin(headers: Headers, key: str | None) -> None:
    """Raise unless a request has the admin key."""
    if key is None:
        raise ApiError(403, "this needs an admin key, and the server was started without --admin-key")
    given = headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.strip().encode(), key.encode()):
        message = "this needs the admin key; send it as `Authorization: Bearer KEY`"
        raise ApiError(401, message, "authentication_error", code="invalid_api_key")


T = TypeVar("T")
log = logging.getLogger(__name__)
KERNEL_BYTES = 128 << 10
READ_BYTES = 64 << 10  # taken from a connection at once: a body may come in chunks of one byte
_Any: Any = object  # a mixin over one of the protocols of the framework, whose attributes are untyped
_Protocol: Any = AutoHTTPProtocol


class Watched(_Any):  # type: ignore[misc]
    """What our connections have that those of the framework have not."""

    def __init__(self, patience: float, outbox: Outbox, **given: Any) -> None:
        """`patience` in seconds; the connections of a server share an outbox."""
        super().__init__(**given)
        self.patience, self.outbox = patience, outbox
        self._is_h11 = not hasattr(super(), "on_headers_complete")
        self._check: asyncio.TimerHandle | None = None
        self._vain = 0  # bytes since the last that ended a head, or were of a body

    def connection_made(self, transport: asyncio.Transport) -> None:
        with suppress(AttributeError):  # uvloop has its own
            transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
        super().connection_made(transport)
        self._client = Attendance()
        self.app_state: dict[str, Any] = {**self.app_state, CONNECTION: self}  # of each request's state
        self._silence = asyncio.get_running_loop().call_later(self.patience, self._close_if_silent)

    def data_received(self, data: bytes) -> None:
        self._vain += len(data)
        super().data_received(data)
        if self._vain > HEAD_BYTES and not self._is_h11 and not self.transport.is_closing():
            self.send_refusal(head_too_large())

    def on_headers_complete(self) -> None:
        self._vain = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._vain = 0
        super().on_body(body)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_looking()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._stop_looking()
        self._silence.cancel()  # it would keep what has ended until then
        self._client.end()
        self.app_state = {}

    def send_refusal(self, error: ApiError) -> None:
        """Answer what is no request yet, and close."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps(error.body()).encode()
            head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    async def send_body(self, lines: AsyncGenerator[bytes]) -> None:
        await self.outbox.send(lines, self.transport, self.flow)

    async def while_open(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._client.during(work)

    def _close_if_silent(self) -> None:
        if self.cycle is None:  # no request has come
            self.transport.close()

    def _look_later(self) -> None:
        self._stop_looking()
        self._check = asyncio.get_running_loop().call_later(self.patience, self._look, unread(self.transport))

    def _look(self, before: int) -> None:
        if unread(self.transport) < before:
            self._look_later()
            return
        log.warning("a client read nothing for %g s: disconnected", self.patience)
        self.transport.abort()

    def _stop_looking(self) -> None:
        if self._check is not None:
            self._check.cancel()
            self._check = None


class Connection(Watched, _Protocol):  # type: ignore[misc]
    """What uvicorn makes one of for each connection."""


def unread(transport: asyncio.WriteTransport) -> int:
    """Bytes that were written and that the client's side has not taken yet: ours, and the kernel's."""
    kernel = bytearray(4)
    with suppress(OSError):  # a system that does not tell
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, kernel)
    return transport.get_write_buffer_size() + int.from_bytes(kernel, sys.byteorder)
