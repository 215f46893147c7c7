"""Server-sent events: one JSON object a message, `[DONE]` last, errors in the middle of a stream as an object too."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Send

from forerun.server.errors import as_api_error

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """Streams chunks. A client that leaves ends their generator."""

    def __init__(self, chunks: AsyncGenerator[dict[str, Any]], headers: dict[str, str]) -> None:
        self._lines = _lines(chunks)
        super().__init__(self._lines, media_type="text/event-stream", headers=_HEADERS | headers)

    async def stream_response(self, send: Send) -> None:
        """Closes the generator itself: the framework leaves that to the garbage collector."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        async with aclosing(self._lines) as lines:
            await send(start)
            async for line in lines:
                await send({"type": "http.response.body", "body": line, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _lines(chunks: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[bytes]:
    try:
        async with aclosing(chunks) as found:
            async for chunk in found:
                yield as_line(chunk)
    except Exception as error:  # headers are sent: what is left is to say it in the stream
        yield as_line(as_api_error(error).body())
    yield b"data: [DONE]\n\n"


def as_line(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
