"""Connections with patience: one whose client takes nothing that was sent, or sends no request, is cut off.

The framework stops writing chunks once 64 KiB wait for a client, behind what the kernel holds: `KERNEL_BYTES`, where it
would take megabytes by itself. This class says how long it may stay so; closing such a connection in the usual way
would wait for the client to read the rest.

A request's path and headers are bounded too. Of the parsers that the framework may use, h11 has a limit on bytes that
make no whole request; httptools has none, and gets one here. What is whole is looked at by `Guard`.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import socket
import sys
import termios
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from forerun.server.errors import ApiError
from forerun.server.guard import HEAD_BYTES, head_too_large
from forerun.server.outbox import CONNECTION, Attendance, Outbox

T = TypeVar("T")
log = logging.getLogger(__name__)
KERNEL_BYTES = 128 << 10
READ_BYTES = 64 << 10  # taken from a connection at once: a body may come in chunks of one byte
_Protocol: Any = AutoHTTPProtocol


def connection_class(patience: float) -> type[asyncio.Protocol]:
    """What uvicorn makes one of for each connection; `patience` in seconds."""

    outbox, is_h11 = Outbox(), not hasattr(_Protocol, "on_headers_complete")

    class Connection(_Protocol):  # type: ignore[misc]
        _check: asyncio.TimerHandle | None = None
        _vain = 0  # bytes since the last that ended a head, or were of a body

        def connection_made(self, transport: asyncio.Transport) -> None:
            with suppress(AttributeError):  # uvloop has its own
                transport.max_size = READ_BYTES  # type: ignore[attr-defined]
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
            super().connection_made(transport)
            self._client = Attendance()
            self.app_state: dict[str, Any] = {**self.app_state, CONNECTION: self}  # of each request's state
            self._silence = asyncio.get_running_loop().call_later(patience, self._close_if_silent)

        def data_received(self, data: bytes) -> None:
            self._vain += len(data)
            super().data_received(data)
            if self._vain > HEAD_BYTES and not is_h11 and not self.transport.is_closing():
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
            await outbox.send(lines, self.transport, self.flow)

        async def while_open(self, work: Coroutine[Any, Any, T]) -> T:
            return await self._client.during(work)

        def _close_if_silent(self) -> None:
            if self.cycle is None:  # no request has come
                self.transport.close()

        def _look_later(self) -> None:
            self._stop_looking()
            self._check = asyncio.get_running_loop().call_later(patience, self._look, unread(self.transport))

        def _look(self, before: int) -> None:
            if unread(self.transport) < before:
                self._look_later()
                return
            log.warning("a client read nothing for %g s: its connection was cut off", patience)
            self.transport.abort()

        def _stop_looking(self) -> None:
            if self._check is not None:
                self._check.cancel()
                self._check = None

    return Connection


def unread(transport: asyncio.WriteTransport) -> int:
    """Bytes that were written and that the client's side has not taken yet: ours, and the kernel's."""
    kernel = bytearray(4)
    with suppress(OSError):  # a system that does not tell
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, kernel)
    return transport.get_write_buffer_size() + int.from_bytes(kernel, sys.byteorder)
