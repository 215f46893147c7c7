"""The HTTP front: routes in the OpenAI API's places, and what an operator needs beside them.

Whoever has the admin key loads and unloads LoRA adapters, and has the engine sleep and wake up, under vLLM's names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect

from forerun import __version__
from forerun.core.errors import DamagedFile, InvalidInput, ModelNotFound, UnsupportedModel
from forerun.engine.stats import captures_awaited
from forerun.server.answers import Answer, Kind
from forerun.server.backends.base import Backend
from forerun.server.doors.embeddings import EmbeddingsAnswer, EmbeddingsRequest
from forerun.server.doors.messages import CountRequest, MessagesAnswer, MessagesRequest
from forerun.server.doors.responses import ResponsesAnswer, ResponsesRequest
from forerun.server.errors import (
    MESSAGES,
    MESSAGES_ERRORS,
    NO_OBJECT,
    RESPONSES,
    ApiError,
    add_error_handlers,
    as_api_error,
)  # fmt: skip
from forerun.server.generation import salted
from forerun.server.limits import Gate, Guard, must_be_admin
from forerun.server.metrics import RequestSpan
from forerun.server.reading import BODIES, What, as_body
from forerun.server.schemas import Body, ChatRequest, CompletionRequest, DetokenizeRequest, Name, TokenizeRequest
from forerun.server.service import Service
from forerun.server.settings import ServerSettings
from forerun.server.sse import ClientLeft, EventStream, connection_of

log = logging.getLogger(__name__)
T = TypeVar("T")
ANSWERS: dict[str, type[Answer]] = {  # in other shapes than a chat's
    "responses": ResponsesAnswer,
    "messages": MessagesAnswer,
    "embeddings": EmbeddingsAnswer,
}
POLL = 0.25  # seconds between looks at the engine


class Application(FastAPI):
    """With the bodies of requests in its OpenAPI schema: `_read` reads them, and the framework does not know them."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = self.openapi_schema = super().openapi()
            bodies: list[tuple[Any, Any]] = [
                (body, "validation") for body in (*BODIES.values(), LoadAdapter, UnloadAdapter)
            ]
            _, found = models_json_schema(bodies, ref_template="#/components/schemas/{model}")
            document["components"]["schemas"] |= found["$defs"]
        return self.openapi_schema


def _takes(body: type[BaseModel]) -> dict[str, Any]:
    """The part of a route's schema that says what its body is."""
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def create_app(backend: Backend, settings: ServerSettings) -> FastAPI:
    """The application around a model that is loaded."""
    service, gate = Service(backend, settings), Gate(settings.api_keys, settings.rate_limit)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(_watch(service)), asyncio.create_task(_follow_heads(service))]
        yield
        service.draining = True
        for task in tasks:
            task.cancel()
        service.reader_process.close()
        await backend.close()

    app = Application(
        title="Forerun", version=__version__, lifespan=lifespan, docs_url="/docs", redoc_url=None, responses=RESPONSES
    )  # fmt: skip
    app.state.service = service
    add_error_handlers(app)
    app.add_middleware(Guard, max_body=settings.max_body, patience=settings.client_seconds, metrics=service.metrics)
    allowed = [Depends(_check_key(gate))]
    _add_operator_routes(app, service)
    _add_text_routes(app, service, allowed)
    _add_token_routes(app, service, allowed)
    add_adapter_routes(app, service)
    add_sleep_routes(app, service)
    return app


async def _watch(service: Service) -> None:
    """Watch the engine: end its requests where it hangs, and start it again with `--restart`."""
    backend, settings = service.backend, service.settings
    while True:
        await asyncio.sleep(POLL)
        await backend.refresh()
        if backend.looks_hung(settings.hang_seconds):
            log.error(
                "no progress for %g s although requests are running: they end with an error", settings.hang_seconds
            )
            backend.give_up()
        if settings.restart and backend.failure is not None and not service.sleeping:
            restarted = await backend.restart()
            if restarted == "yes":
                log.warning("the engine had ended and was started again")
            elif restarted == "needs a new program" and not service.active:  # who waited has been told
                service.must_replace = True
        if settings.restart and backend.lost_process is not None and not service.active:
            service.must_replace = True


async def _follow_heads(service: Service) -> None:
    """Swap heads as the link says; apart from the watch, which must see an engine that hangs in the meantime."""
    while service.head_watch is not None:
        await asyncio.sleep(POLL)
        if service.backend.problem is None:
            try:
                await service.head_watch.check()
            except Exception:  # a version that was deleted, say: what drafts now goes on
                log.exception("the heads could not be followed")


def _check_key(gate: Gate) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        address = request.client.host if request.client else ""
        given = request.headers.get("authorization")
        if given is None and request.url.path.startswith(MESSAGES) and "x-api-key" in request.headers:
            given = f"Bearer {request.headers['x-api-key']}"
        request.state.caller = gate.check(given, address)

    return check


_PROBED: dict[int | str, dict[str, Any]] = {503: {"description": "no, and why"}}  # in the shape of a yes
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}  # beside JSON


def _add_operator_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=_PROBED)
    async def health() -> Response:
        if service.sleeping:
            return JSONResponse({"status": "sleeping"})
        problem, captures = service.backend.problem, service.backend.load().captures
        status = {"status": "ok"} if problem is None else {"status": "failed", "reason": problem}
        if problem is None and captures:
            status["note"] = captures_awaited(captures)
        return JSONResponse(status, 200 if problem is None else 503)

    @app.get("/ready", responses=_PROBED)
    async def ready() -> Response:
        there = not (service.draining or service.sleeping) and service.backend.problem is None
        return JSONResponse({"ready": there}, 200 if there else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        await service.backend.refresh()
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        await service.backend.refresh()
        return service.stats()

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return _page_file("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page_part(name: str) -> Response:
        return _page_file(name)


_PAGE = {"index.html": "text/html", "style.css": "text/css", "app.js": "text/javascript", "plots.js": "text/javascript"}


def _page_file(name: str) -> Response:
    if name not in _PAGE:
        raise ApiError(404, f"the page has no part {name[:80]!r}", "not_found_error")
    text = (files("forerun.server") / "page" / name).read_text(encoding="utf-8")
    return Response(text, media_type=f"{_PAGE[name]}; charset=utf-8")


def _add_text_routes(app: FastAPI, service: Service, allowed: list[Any]) -> None:
    options: dict[str, Any] = {"dependencies": allowed, "response_model": None, "responses": _STREAMED}

    @app.post("/v1/chat/completions", openapi_extra=_takes(ChatRequest), **options)
    async def chat(request: Request) -> Response:
        return await _answer(service, "chat", request)

    @app.post("/v1/completions", openapi_extra=_takes(CompletionRequest), **options)
    async def complete(request: Request) -> Response:
        return await _answer(service, "completion", request)

    @app.post("/v1/responses", openapi_extra=_takes(ResponsesRequest), **options)
    async def respond(request: Request) -> Response:
        return await _answer(service, "responses", request)

    @app.post(MESSAGES, openapi_extra=_takes(MessagesRequest), **{**options, "responses": _STREAMED | MESSAGES_ERRORS})
    async def message(request: Request) -> Response:
        return await _answer(service, "messages", request)

    @app.post("/v1/embeddings", dependencies=allowed, openapi_extra=_takes(EmbeddingsRequest))
    async def embed(request: Request) -> Response:
        return await _answer(service, "embeddings", request)

    @app.get("/v1/models", dependencies=allowed)
    async def models() -> dict[str, Any]:
        names = (*service.settings.model_names, *service.adapters)
        return {"object": "list", "data": [_model(name, service) for name in names]}

    @app.get("/v1/models/{name:path}", dependencies=allowed)
    async def model(name: str) -> dict[str, Any]:
        service.reader.check_model(name, (*service.adapters,))
        return _model(name, service)


def _add_token_routes(app: FastAPI, service: Service, allowed: list[Any]) -> None:
    @app.post("/tokenize", dependencies=allowed, openapi_extra=_takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        return Response(await _read(service, "tokenize", request), media_type="application/json")

    counted = _takes(CountRequest)

    @app.post(f"{MESSAGES}/count_tokens", dependencies=allowed, openapi_extra=counted, responses=MESSAGES_ERRORS)
    async def count_tokens(request: Request) -> Response:
        return Response(await _read(service, "count", request), media_type="application/json")

    @app.post("/detokenize", dependencies=allowed, openapi_extra=_takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        return Response(await _read(service, "detokenize", request), media_type="application/json")


async def _read(service: Service, what: What, request: Request) -> Any:
    """What a body asks for. The framework would parse it here, where all streams wait for it."""
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise _gone() from None
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (kind.startswith("application/") and kind.endswith(("/json", "+json"))):
        raise ApiError(400, NO_OBJECT, code="invalid_json")
    found = service.read_now(what, raw)
    if found is None:
        found = await _while_connected(request, service.read_beside(what, raw))
    return found


async def _answer(service: Service, what: What, request: Request) -> Response:
    """One request from body to answer; whatever goes wrong has the one shape, and is logged once."""
    try:
        return await _whole_or_stream(service, what, request)
    except Exception as error:
        raise as_api_error(error) from None


async def _whole_or_stream(service: Service, what: What, request: Request) -> Response:
    state = request.state
    kind: Kind = "text_completion" if what == "completion" else "chat.completion"
    span = RequestSpan(request.headers, f"forerun {kind}", service.model, state.id)
    with ExitStack() as held:
        held.enter_context(span)
        body, jobs = await _read(service, what, request)
        apart = bool(service.settings.api_keys) and not service.settings.share_prefixes
        jobs = salted(jobs, state.caller if apart else None, body.cache_salt)
        prompts = [job.prompt for job in jobs[:: body.n or 1]]
        answer = ANSWERS.get(what, Answer)(
            kind,
            body.model if body.model in service.adapters else service.model,
            service.backend.tokenizer,
            body,
            body.logprobs is not None and body.logprobs is not False,
            span,
            len(prompts),
            state.arrived,
        )
        answer.prompt_tokens = sum(map(len, prompts))
        answer.predicted = jobs[0].options.get("prediction") or ()
        if isinstance(body, CompletionRequest) and body.echo:
            answer.echoed = prompts
        answer.asked_by = {"request": state.id, "caller": state.caller}
        if span.trace_id is not None:
            answer.asked_by["trace"] = span.trace_id
        held.enter_context(service.admitted(min(len(jobs), answer.at_once(service.backend.max_batch))))
        if not body.stream:
            whole = await _while_connected(request, service.write(body, answer, jobs))
            return Response(whole, media_type="application/json", headers=span.headers())
        lines = service.stream(body, answer, jobs)
        # what the engine has against the request is an answer with a status of its own
        first = await _while_connected(request, anext(lines))
        headers = {"x-request-id": state.id, **span.headers()}
        return EventStream(first, lines, held.pop_all(), headers, answer)


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await some work, unless the client goes away: then it is cancelled, which aborts its texts."""
    own = connection_of(request.scope)
    if own is not None:
        try:
            return await own.while_open(work)
        except ClientLeft:
            raise _gone() from None
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _gone()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait({task, gone})


def _gone() -> ApiError:
    return ApiError(499, "the client has gone away")


async def _disconnect(request: Request) -> None:
    """Returns when the client has gone; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _model(name: str, service: Service) -> dict[str, Any]:
    facts = {"id": name, "object": "model", "created": service.created, "owned_by": "forerun"}
    base = {"parent": service.model} if name in service.adapters else {}
    return {**facts, "max_model_len": service.backend.max_length, "root": service.model, **base}


class UnloadAdapter(Body):
    neutral: ClassVar[dict[str, Any]] = {"lora_int_id": None, "load_inplace": False}  # vLLM's
    lora_name: Annotated[Name, Field(min_length=1)]


class LoadAdapter(UnloadAdapter):
    lora_path: Name
    head_path: Name | None = None  # a head that drafts for this adapter's texts alone


def add_adapter_routes(app: FastAPI, service: Service) -> None:
    """The routes and bodies that vLLM has."""

    @app.post("/v1/load_lora_adapter", openapi_extra=_takes(LoadAdapter))
    async def load(request: Request) -> Response:
        body = await _admins_body(request, service, LoadAdapter)
        given = body.lora_path if body.head_path is None else f"{body.lora_path},head={body.head_path}"
        return await _changed(service.load_adapter(body.lora_name, given), body.lora_name, "loaded")

    @app.post("/v1/unload_lora_adapter", openapi_extra=_takes(UnloadAdapter))
    async def unload(request: Request) -> Response:
        body = await _admins_body(request, service, UnloadAdapter)
        return await _changed(service.unload_adapter(body.lora_name), body.lora_name, "unloaded")


async def _changed(work: Any, name: str, how: str) -> Response:
    try:
        await work
    except (DamagedFile, InvalidInput, ModelNotFound, UnsupportedModel) as error:  # of the folder that was named
        raise ApiError(400, str(error), param="lora_path") from None
    except Exception as error:
        raise as_api_error(error) from None
    return JSONResponse({"status": how, "lora_name": name})


async def _admins_body(request: Request, service: Service, kind: type[BaseModel]) -> Any:
    """What an admin has sent; nobody else is read."""
    must_be_admin(request.headers, service.settings.admin_key)
    return as_body(kind, await request.body())


def add_sleep_routes(app: FastAPI, service: Service) -> None:
    """All answer whether the server sleeps."""

    def state(request: Request) -> dict[str, bool]:
        must_be_admin(request.headers, service.settings.admin_key)
        return {"is_sleeping": service.sleeping}

    @app.get("/is_sleeping")
    async def is_sleeping(request: Request) -> dict[str, bool]:
        return state(request)

    @app.post("/sleep")
    async def sleep(request: Request) -> dict[str, bool]:
        state(request)
        try:
            await service.sleep()
        except UnsupportedModel as error:
            raise ApiError(400, str(error)) from None
        return state(request)

    @app.post("/wake_up")
    async def wake_up(request: Request) -> dict[str, bool]:
        state(request)
        await service.wake_up()
        return state(request)
