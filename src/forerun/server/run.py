"""Starts a server: loads the model, then listens until it is told to stop."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from forerun.errors import MissingDependency
from forerun.server.settings import LOOPBACK, ServerSettings

if TYPE_CHECKING:
    from forerun.llm import LLM

log = logging.getLogger(__name__)


def serve(llm: LLM, settings: ServerSettings) -> None:
    """Answer requests until SIGTERM or Ctrl-C; running ones then have `drain_seconds` to end."""
    try:
        import uvicorn

        from forerun.async_llm import AsyncLLM
        from forerun.server.app import create_app
        from forerun.server.backend import Backend
    except ImportError as error:
        raise MissingDependency(f"serving needs {error.name}; pip install 'forerun[serve]'") from None
    if settings.host not in (LOOPBACK, "localhost", "::1") and not settings.api_keys:
        log.warning("listening on %s without an API key: everybody who reaches it may ask", settings.host)
    config = uvicorn.Config(
        lambda: create_app(Backend(AsyncLLM(llm, max_requests=1 << 16)), settings),
        factory=True,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        timeout_graceful_shutdown=int(settings.drain_seconds),
        timeout_keep_alive=30,
    )
    uvicorn.Server(config).run()
