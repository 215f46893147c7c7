"""What every request passes first: limits on its size, a name for it, and a count of those turned away."""

from __future__ import annotations

import asyncio
import secrets
from time import perf_counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.server.errors import ApiError
from forerun.server.metrics import Metrics

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
                if message["status"] >= 400:
                    self.metrics.count_refused(message["status"])
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
            await error.response()(scope, receive, named)


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
