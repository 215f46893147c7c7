"""The front: this project's HTTP server (`Front`), and the model behind it: replicas elsewhere, which write the texts.

A request whose replica dies is sent to another one, at most `ATTEMPTS` times: a request that ends every engine it meets
must not meet all of them. A greedy text, and a sampled one whose verifier shares its noise with no draft (`coupled`,
which a seed selects), is a function of the request: another replica writes the same tokens. They are compared with
those that the client has, and only what follows them is handed on.

All replicas have one `/metrics`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import process_time, thread_time
from typing import Any

from fastapi import FastAPI
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from forerun.api.completion import Completion
from forerun.core.errors import ForerunError, UnsupportedModel
from forerun.core.noise import fresh_seed
from forerun.core.request import Event
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.tokenizer import Tokenizer
from forerun.server.app import create_app
from forerun.server.backends.base import Backend, Load
from forerun.server.cluster.replica import Begun, Ended, Loads, ReplicaGauges, Report
from forerun.server.settings import ClusterSettings

log = logging.getLogger(__name__)
ATTEMPTS = 4
LOOK_EVERY = 1.0  # seconds between two looks at all replicas
session_of_request: ContextVar[str | None] = ContextVar("session_of_request", default=None)


class ReplicaLost(ForerunError):
    """The replica that wrote a text is gone, or its engine has failed."""


class ClusterBackend(Backend):
    """Replicas behind a Ray Serve handle, as a Backend. Ray Serve restarts them, and each looks whether it hangs."""

    def __init__(self, handle: Any, tokenizer: Tokenizer, first: Report) -> None:
        super().__init__(tokenizer, first.vocab_size, first.max_length, first.has_encoder)
        self._handle, self._facts = handle, first
        self.loads = Loads()
        self.loads.update([first])
        self.resumed = self.resent = 0
        self._looking = asyncio.create_task(self._look())

    @property
    def max_batch(self) -> int:
        """Of all replicas together."""
        return self._facts.max_batch * max(1, len(self.loads.usable()))

    @property
    def drafter(self) -> str:
        return next((report.drafter for report in self.loads.usable()), self._facts.drafter)

    def load(self) -> Load:
        return self.loads.total()

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of this process so far, by thread: engines have others."""
        front = thread_time()
        return {"front": front, "others": max(0.0, process_time() - front)}

    @property
    def problem(self) -> str | None:
        return None if self.loads.usable() else "no replica answers"

    async def swap_head(self, folder: Path) -> None:
        raise UnsupportedModel("--heads works with one replica; with several, give each the head by `update`")

    async def close(self) -> None:
        """Look no more; the replicas are Ray Serve's."""
        self._looking.cancel()

    async def stream(self, prompt: tuple[int, ...], **options: Any) -> AsyncGenerator[Event | Completion]:
        """One text as it grows, from as many replicas as it takes."""
        every_round = options.pop("every_round", True)
        options = with_seed(options, self._facts.verifier)
        replay, gone = Replay(can_resume(options, self._facts.verifier)), list[str]()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                replay.restart()
                async with aclosing(self._from_one(prompt, options, every_round, gone)) as items:
                    async for item in items:
                        for news in replay.take(item):
                            yield news
                return
            except ReplicaLost as error:
                if attempt == ATTEMPTS:
                    raise StreamLost(f"{attempt} replicas in turn did not end this text: {error}") from None
                self.resumed, self.resent = self.resumed + replay.started, self.resent + (not replay.started)
                log.warning("%s: its text is %s", error, "resumed" if replay.started else "sent again")

    async def _from_one(
        self, prompt: tuple[int, ...], options: dict[str, Any], every_round: bool, gone: list[str]
    ) -> AsyncGenerator[Event | Completion]:
        """The text as one replica writes it; a replica that is lost is added to `gone`."""
        known = {"every_round": every_round, "session": session_of_request.get(), "avoid": tuple(gone)}
        answer, where = self._handle.options(stream=True).write.remote(prompt, options, **known), ""
        try:
            async for item in answer:
                if isinstance(item, Begun):
                    where = item.replica
                elif isinstance(item, Ended):
                    if not item.engine_failed:
                        raise item.error
                    gone.append(where)
                    raise ReplicaLost(f"the engine of replica {where} has failed")
                else:
                    yield item
                    if isinstance(item, Completion):
                        return
        except (RayTaskError, TaskCancelledError):
            raise
        except RayError as error:
            gone.append(where)
            raise ReplicaLost(f"replica {where or '?'} is gone ({type(error).__name__})") from None
        finally:
            answer.cancel()  # does nothing to one that has ended
        gone.append(where)
        raise ReplicaLost(f"replica {where} ended a text before its end")

    async def _look(self) -> None:
        """Ask all replicas how they are, now and then."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                found = await self._handle.broadcast("report").results_async(timeout_s=5.0, return_exceptions=True)
                self.loads.update([each for each in found if isinstance(each, Report)])
            except (TimeoutError, RayError) as error:
                log.warning("the replicas could not be asked: %s", error)


_BY_REQUEST = ("auto", "coupled")  # verifiers under which a seed fixes the text


class StreamLost(ForerunError):
    """The replica that wrote a text is gone, and the text cannot be gone on with."""


def with_seed(options: Mapping[str, Any], default_verifier: str) -> dict[str, Any]:
    """The same options with a seed, where a seed makes the text a function of the request and none was given."""
    sampled = options.get("temperature", 0.0) != 0.0
    if sampled and options.get("seed") is None and _verifier(options, default_verifier) in _BY_REQUEST:
        return {**options, "seed": fresh_seed()}
    return dict(options)


def can_resume(options: Mapping[str, Any], default_verifier: str) -> bool:
    """Does another replica write the same text for these options? The default is that of the replicas."""
    verifier = _verifier(options, default_verifier)
    if verifier == "typical":  # accepts what the target might have said: depends on the draft
        return False
    greedy = options.get("temperature", 0.0) == 0.0
    return greedy or (options.get("seed") is not None and verifier in _BY_REQUEST)


def _verifier(options: Mapping[str, Any], default: str) -> str:
    return options.get("verifier") or default


@dataclass(slots=True)
class Replay:
    """What the client has of one text, and what is left out when the text comes again from its beginning."""

    resumable: bool
    _tokens: list[int] = field(default_factory=list)  # that the client has
    _text: str = ""
    _token: int = 0  # how far this writing is
    _char: int = 0

    @property
    def started(self) -> bool:
        return bool(self._tokens or self._text)

    def restart(self) -> None:
        """The text comes again; raises where what the client has cannot be gone on with."""
        if self.started and not self.resumable:
            raise StreamLost(
                "the replica that wrote this text is gone, and a text whose tokens depend on how it was drafted cannot "
                "be gone on with; send it again, or with temperature 0, or with a seed and no verifier of its own"
            )
        self._token = self._char = 0

    def take(self, item: Event | Completion) -> Iterator[Event | Completion]:
        """The part of an item that is news to the client."""
        if isinstance(item, Completion):
            self._check(item.token_ids[: len(self._tokens)] == self._tokens)
            yield item
            return
        known, told = self._known(item), len(self._text) - self._char
        old_text, text = item.text[: max(0, told)], item.text[max(0, told) :]
        self._check(self._text[self._char : self._char + len(old_text)] == old_text)
        self._token, self._char = self._token + len(item.tokens), self._char + len(item.text)
        tokens = item.tokens[known:]
        self._tokens += tokens
        self._text += text
        if tokens or text or item.finished:
            if not known and not old_text:
                yield item
                return
            accepted = max(0, item.accepted - known)
            yield replace(
                item, tokens=tokens, text=text, accepted=accepted, logprobs=item.logprobs[known:], rejected=()
            )

    def _known(self, item: Event) -> int:
        """How many tokens of an item the client has; raises where they are not the ones it got."""
        known = max(0, min(len(item.tokens), len(self._tokens) - self._token))
        self._check(list(item.tokens[:known]) == self._tokens[self._token : self._token + known])
        return known

    def _check(self, same: bool) -> None:
        if not same:
            raise StreamLost(
                "the replica that wrote this text is gone, and another one wrote a different text (numbers that round "
                "differently can do that); send the request again"
            )


SESSION = "x-session-id"  # requests with the same value go to the same replica where that costs nothing


class Front:
    """Answers HTTP. Ray Serve's proxies hand requests to it."""

    def __init__(self, replicas: Any, args: Mapping[str, Any]) -> None:
        self._replicas, self._settings = replicas, ClusterSettings.from_dict(args)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Ray Serve once this object is made; waits until there is a replica."""
        first = await self._replicas.report.remote()
        tokenizer = open_checkpoint(self._settings.model).tokenizer()
        return front_app(ClusterBackend(self._replicas, tokenizer, first), self._settings)


def front_app(backend: ClusterBackend, settings: ClusterSettings) -> FastAPI:
    """The server's application, and what only a cluster has: replicas, sessions."""
    app = create_app(backend, settings.server_settings())
    service = app.state.service
    service.metrics.registry.register(ReplicaGauges(backend.loads))

    @app.get("/replicas")
    async def replicas() -> dict[str, Any]:
        """What each replica is and does, and how many texts others took over."""
        shown = [
            {**asdict(report), "load": {"running": report.load.running, "waiting": report.load.waiting,
                                        "used_slots": report.load.used_slots, "tokens": report.load.tokens,
                                        "read": report.load.read, "reused": report.load.reused}}
            for report in backend.loads.reports.values()
        ]  # fmt: skip
        return {"replicas": shown, "resumed": backend.resumed, "resent": backend.resent}

    app.add_middleware(Sessions)
    return app


class Sessions:
    """An ASGI layer that notes which session a request belongs to, for the router."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            session_of_request.set(Headers(scope=scope).get(SESSION, "")[:128] or None)
        await self.app(scope, receive, send)
