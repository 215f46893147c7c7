"""Messages between two processes of ours over a pair of sockets. Sending never waits.

A message is anything that `marshal` writes: Python's own numbers, texts, lists, tuples and dicts (numpy's numbers would
arrive as bytes). Both ends run the same Python, and nobody else can reach the sockets.
"""

from __future__ import annotations

import marshal
import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from threading import Condition, Thread
from typing import Any

_LENGTH = struct.Struct("!I")
_PLAIN = 2  # marshal's format without references: half the time
_AT_ONCE = 1 << 18  # bytes read by one call
_KERNEL = 1 << 20  # bytes that the system is asked to hold


class Channel:
    """One end. Any thread may send; one receives."""

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(True)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL)
        self._socket = own
        self._lock = Condition()
        self._backlog: deque[bytes] = deque()  # not taken by the system yet; the first may be on its way
        self._sender: Thread | None = None
        self._read = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Have it sent. What the other end is too slow for waits here; where the other end is gone it is dropped."""
        body = marshal.dumps(message, _PLAIN)
        frame = _LENGTH.pack(len(body)) + body
        with self._lock:
            if not self._backlog:
                frame = frame[self._try(frame) :]
            if frame:
                self._backlog.append(frame)
                self._have_sent_later()

    def receive(self) -> Iterator[Any]:
        """What comes, until the other end closes; waits."""
        while True:
            yield from self._whole()
            read = self._receive()
            if not read:
                return
            self._read += read

    def receive_ready(self) -> list[Any] | None:
        """What has come; None = the other end has closed. To be called when there is something to read."""
        try:
            read = self._receive(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        self._read += read
        return list(self._whole()) if read else None

    def close(self) -> None:
        """Both ends read no more than what is there."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the socket; this end must not be used after that."""
        self._socket.close()

    def _receive(self, how: int = 0) -> bytes:
        try:
            return self._socket.recv(_AT_ONCE, how)
        except BlockingIOError:
            raise
        except OSError:  # the other end was killed, or this one was given back
            return b""

    def _whole(self) -> Iterator[Any]:
        """Messages that are there; what was handed out is gone, however early the caller stops."""
        at, read = 0, self._read
        try:
            while len(read) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(read, at)
                start, end = at + _LENGTH.size, at + _LENGTH.size + length
                if len(read) < end:
                    return
                with memoryview(read) as view, view[start:end] as body:
                    message = marshal.loads(body)
                at = end
                yield message
        finally:
            del read[:at]

    def _try(self, frame: bytes) -> int:
        """Bytes that the system takes now."""
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(frame)

    def _have_sent_later(self) -> None:
        if self._sender is None:
            self._sender = Thread(target=self._send_backlog, name="forerun-backlog", daemon=True)
            self._sender.start()
        self._lock.notify()

    def _send_backlog(self) -> None:
        while True:
            with self._lock:
                while not self._backlog:
                    self._lock.wait()
                frame = self._backlog[0]  # stays first until it is sent: what comes meanwhile goes behind it
            with suppress(OSError):
                self._socket.sendall(frame)
            with self._lock:
                self._backlog.popleft()
