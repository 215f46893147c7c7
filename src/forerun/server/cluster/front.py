"""The front: this project's HTTP server, whose texts are written by replicas elsewhere. One `/metrics` for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from forerun.models.load.checkpoint import open_checkpoint
from forerun.server.app import create_app
from forerun.server.cluster.backend import ClusterBackend, session_of_request
from forerun.server.cluster.loads import ReplicaGauges
from forerun.server.settings import ClusterSettings

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
