"""A streamed completion over a plain socket, timed; standard library only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit


@dataclass(slots=True)
class Answer:
    """What came back for one request, and when; times are perf_counter's."""

    sent: float = 0.0
    first: float | None = None
    last: float | None = None
    text: str = ""
    tokens: int = 0
    status: int = 0
    problem: str | None = None  # why it counts as lost

    @property
    def first_seconds(self) -> float | None:
        return None if self.first is None else self.first - self.sent

    @property
    def seconds_per_token(self) -> float | None:
        """Of the tokens after the first round's; None where there are none."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Endpoint:
    base: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)


async def ask(endpoint: Endpoint, body: Mapping[str, Any]) -> Answer:
    """Stream one chat; whatever goes wrong is told in the answer."""
    answer = Answer(perf_counter())
    try:
        usage = False
        async for chunk in _chunks(endpoint, body, answer):
            if "error" in chunk:
                answer.problem = str(chunk["error"])[:200]
                return answer
            for choice in chunk.get("choices", ()):
                text = (choice.get("delta") or {}).get("content")
                if text:
                    now = perf_counter()
                    answer.first, answer.last = answer.first or now, now
                    answer.text += text
            if chunk.get("usage"):
                answer.tokens, usage = int(chunk["usage"]["completion_tokens"]), True
        if answer.problem is None and not usage:
            answer.problem = "the stream ended before its usage"
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        answer.problem = f"{type(error).__name__}: {error}"[:200]
    return answer


async def _chunks(endpoint: Endpoint, body: Mapping[str, Any], answer: Answer) -> AsyncIterator[dict[str, Any]]:
    place = urlsplit(endpoint.base)
    reader, writer = await asyncio.open_connection(
        place.hostname, place.port or (443 if place.scheme == "https" else 80), ssl=place.scheme == "https" or None
    )
    try:
        asked = {**body, "model": endpoint.model, "stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(asked).encode()
        head = {
            "Host": place.netloc, "Content-Type": "application/json", "Content-Length": str(len(data)),
            "Connection": "close", **endpoint.headers,
        }  # fmt: skip
        lines = [f"POST {place.path}/v1/chat/completions HTTP/1.1", *(f"{k}: {v}" for k, v in head.items()), "", ""]
        writer.write("\r\n".join(lines).encode() + data)
        await writer.drain()
        answer.status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        if answer.status != 200:
            answer.problem = f"status {answer.status}"
            return
        done = False
        async for line in _sse(reader):
            done = done or line == b"[DONE]"
            if not done:
                yield json.loads(line)
        if not done:
            answer.problem = "the stream was cut off"
    finally:
        writer.close()


async def _sse(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Messages of a chunked body."""
    rest = b""
    while size := int((await reader.readline()).strip() or b"0", 16):
        rest += (await reader.readexactly(size + 2))[:-2]
        *whole, rest = rest.split(b"\n\n")
        for message in whole:
            yield message.removeprefix(b"data: ")
