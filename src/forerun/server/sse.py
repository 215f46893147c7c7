"""Server-sent events: one JSON object a message, `[DONE]` last, errors in the middle of a stream as an object too.

Under load most of the front's time goes into messages of one token. Where the server is our own (`Connection` in
connection.py) they are handed to the connection at once: the layers of the framework take three times as long.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing, suppress
from itertools import zip_longest
from json.encoder import encode_basestring
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from forerun.server.errors import as_api_error
from forerun.server.outbox import ClientLeft, OwnConnection, connection_of, is_chunked

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_MARK = "\0 a text \0"  # no text that JSON would write as it is
PLACE = f"\0 {secrets.token_hex(8)} \0"  # no text that anybody knows


class EventStream(StreamingResponse):
    """Streams messages, the first of which is known. A client that leaves ends their generator; `ends` comes last."""

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes], ends: ExitStack, headers: dict[str, str]
    ) -> None:
        self._rest, self._ends = rest, ends
        self._lines = _to_the_end(first, rest)
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


async def _to_the_end(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    try:
        yield first
        async for line in rest:
            yield line
    except Exception as error:  # headers are sent: what is left is to say it in the stream
        yield as_line(as_api_error(error).body())
    yield b"data: [DONE]\n\n"


def encoded(chunk: dict[str, Any], parts: Sequence[str] = ()) -> bytes:
    """A chunk as JSON, with JSON that was made before in the places where it has `PLACE`."""
    if not parts:
        return encode(chunk).encode()
    pieces = encode(chunk).split(encode(PLACE))
    return "".join(each for pair in zip_longest(pieces, parts, fillvalue="") for each in pair).encode()


def as_line(chunk: dict[str, Any], parts: Sequence[str] = ()) -> bytes:
    return b"data: " + encoded(chunk, parts) + b"\n\n"


class TextLine:
    """A message of which only one text changes: all else in it is written once."""

    def __init__(self, chunk_of: Callable[[str], dict[str, Any]]) -> None:
        self._before, self._after = as_line(chunk_of(_MARK)).split(_quoted(_MARK))

    def with_text(self, text: str) -> bytes:
        return self._before + _quoted(text) + self._after


def _quoted(text: str) -> bytes:
    return encode_basestring(text).encode()
