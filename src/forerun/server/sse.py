"""Server-sent events: one JSON object a message, `[DONE]` last, errors in the middle of a stream as an object too."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse

from forerun.server.errors import as_api_error

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def sse_response(chunks: AsyncGenerator[dict[str, Any]], headers: dict[str, str]) -> StreamingResponse:
    """Stream chunks; the framework closes the generator when the client goes away, which aborts the request."""
    return StreamingResponse(_lines(chunks), media_type="text/event-stream", headers=_HEADERS | headers)


async def _lines(chunks: AsyncGenerator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async with aclosing(chunks) as found:
            async for chunk in found:
                yield as_line(chunk)
    except Exception as error:  # headers are sent: what is left is to say it in the stream
        yield as_line(as_api_error(error).body())
    yield b"data: [DONE]\n\n"


def as_line(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
