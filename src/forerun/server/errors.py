"""Errors in the shape of the OpenAI API: every failure of a request is one JSON object with a message that helps."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from forerun.core.errors import ForerunError, InvalidInput, MissingDependency, PromptTooLong
from forerun.server.backends.base import kind_of
from forerun.server.schemas import FieldError, Speculative

log = logging.getLogger(__name__)
NO_OBJECT = "the body must be a JSON object, sent with the header `Content-Type: application/json`"
# parts of a place that name one of a field's types, not a field
_TYPE = re.compile(r"str|int|float|bool|(list|dict|literal|constrained|function-\w+)\[.*\]|[A-Z]\w+")
MESSAGES = "/v1/messages"  # the route of Anthropic's API, and of those below it
_MESSAGES_KINDS = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
_DIGITS = re.compile(r"\d{40,}")
_SETTING = re.compile(r"([a-z_]+)=")  # how a message about a value that is out of range begins


class ErrorFacts(BaseModel):
    """What is wrong with a request."""

    message: str
    type: str
    param: str | None  # the field it is about
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorFacts


class MessagesErrorFacts(BaseModel):
    """What is wrong with a request."""

    type: str
    message: str


class MessagesErrorBody(BaseModel):
    """The body of every answer of Anthropic's routes that is not a success."""

    type: str = "error"
    error: MessagesErrorFacts


# for the OpenAPI schema; a range in place of the framework's own 422, which is not used
RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "the request is wrong, or cannot be taken now"},
    "5XX": {"model": ErrorBody, "description": "the server failed, is shutting down, or ran past the deadline"},
}
MESSAGES_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**facts, "model": MessagesErrorBody} for status, facts in RESPONSES.items()
}


class ApiError(HTTPException):
    """A request that cannot be served, with the status that says why.

    One of the framework's own kind, because others become "400, the body cannot be parsed" while a body is read.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message = _DIGITS.sub(lambda found: f"{found[0][:20]}...", message)  # a client's own number, of any length
        super().__init__(status, message, headers)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code = param, code

    def body(self, path: str = "") -> dict[str, Any]:
        """The error in the shape of the API that the route is of."""
        if path.startswith(MESSAGES):
            kind = _MESSAGES_KINDS.get(self.status, self.kind if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> JSONResponse:
        return JSONResponse(self.body(path), self.status, headers=self.headers)


def as_api_error(error: BaseException) -> ApiError:
    """Any failure as an ApiError; an unexpected one is logged, and the client gets a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLong):
        return ApiError(400, str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, InvalidInput | MissingDependency):  # what this server was not installed for
        return ApiError(400, str(error), param=_field_of(str(error)))
    if isinstance(error, ForerunError):
        return ApiError(500, str(error), "server_error")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request ran past the server's deadline", "server_error", code="timeout")
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"the server failed: {kind_of(error)}", "server_error", code="internal_error")


def _field_of(message: str) -> str | None:
    """The field of the body that a message of the library is about, where it begins with one."""
    found = _SETTING.match(message)
    if found is None:
        return None
    return f"speculative.{found[1]}" if found[1] in Speculative.model_fields else found[1]


def add_error_handlers(app: FastAPI) -> None:
    """Give every failure the one shape."""

    async def on_any(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response(request.url.path)

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        path, message = request.url.path[:200], str(error.detail)
        if error.status_code == 404:
            message = f"there is no {path} here; GET /docs lists what there is"
        elif error.status_code == 405:
            message = f"{path} takes no {request.method}; GET /docs lists what it takes"
        return ApiError(error.status_code, message, kind, headers=dict(error.headers or {})).response(path)

    for kind in (ApiError, ForerunError, TimeoutError, Exception):
        app.add_exception_handler(kind, on_any)
    app.add_exception_handler(HTTPException, on_http)


def from_validation(found: Any) -> ApiError:
    """The first thing that is wrong with a body, in one line."""
    # of a field with several types each type has something against it: what one is about its value says most
    about_values = [each for each in found if not str(each.get("type")).endswith("_type")]
    first: Mapping[str, Any] = next(iter([*about_values, *found]), {})
    if first.get("type") == "model_type" and not first.get("loc"):  # a list, say
        return ApiError(400, NO_OBJECT, code="invalid_json")
    where = [part for part in map(str, first.get("loc", ())) if not _TYPE.fullmatch(part)]
    place = ".".join(where)
    # by a check of ours, in words that need no more before them
    raised = (first.get("ctx") or {}).get("error")
    message = str(raised or first.get("msg", "the body is wrong"))
    param = ".".join([*where, raised.field] if isinstance(raised, FieldError) else where) or None
    return ApiError(400, f"{place}: {message}" if place else message, param=param)
