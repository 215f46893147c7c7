"""Runs a server: takes a port, listens once the model is there, and ends gracefully.

After SIGTERM or Ctrl-C it still listens: `/ready` says no, new requests get status 503, and those that run have
`drain_seconds` to end; what is left then ends with an error. A second signal ends everything at once.

The engine has a process of its own (`forerun.server.backends`), or with `front="thread"` a thread of this one,
where a pass that hangs cannot be ended. With `restart` the process then replaces itself by a new one with the same
command line, which inherits the listening socket: clients that come meanwhile wait until the model is loaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

from forerun.build.memory_limit import without_collector
from forerun.core.errors import InvalidInput, MissingDependency
from forerun.server.backends.base import Backend
from forerun.server.backends.start import Loader
from forerun.server.settings import LOOPBACK, Front, ServerSettings

MakeBackend = Callable[[], Backend]
Answer = Callable[[MakeBackend], int | None]

log = logging.getLogger(__name__)
REPLACE = -1  # instead of a signal: the process is to start anew


def bind(settings: ServerSettings) -> socket.socket:
    """Bind the port before a model is loaded, so that one in use is reported at once; nothing is served yet."""
    if "FORERUN_LISTENER" in os.environ:  # of the process before this one
        return socket.socket(fileno=int(os.environ.pop("FORERUN_LISTENER")))
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((settings.host, settings.port))
    except OSError as error:
        taken.close()
        place = f"{settings.host}:{settings.port}"
        raise InvalidInput(f"cannot listen on {place}: {error.strerror}; choose another --host or --port") from None
    return taken


def address_of(listener: socket.socket) -> str:
    """What to type into a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    loader: Loader,
    settings: ServerSettings,
    listener: socket.socket,
    announce: Callable[[Backend], object],
    *,
    front: Front = "process",
    trace: Path | None = None,
) -> None:
    """Load a model and answer requests until SIGTERM, or Ctrl-C, which is raised again.

    `announce` is called once it listens; `trace` is a file that gets every round.
    """
    if settings.host not in (LOOPBACK, "localhost", "::1") and not settings.api_keys:
        log.warning("listening on %s without an API key: anybody who can reach it may send requests", settings.host)
    answer = _beside_a_process if front == "process" else _beside_a_thread
    with listener.dup() as spare:  # the server closes its own
        told = answer(loader, trace, lambda make: asyncio.run(_answer(make, settings, listener, announce)))
        if told == signal.SIGINT:
            raise KeyboardInterrupt
        if told == REPLACE:
            _replace(spare)


def _beside_a_process(loader: Loader, trace: Path | None, answer: Answer) -> int | None:
    """The engine in a process of its own, which loads its model while this one imports the web framework."""
    from forerun.server.backends.start import EngineProcess

    engine = EngineProcess(loader, trace)
    try:
        with without_collector():
            import_application()
            from forerun.server.backends.process import ProcessBackend

            facts = engine.wait_until_ready()
            tokenizer = facts.tokenizer.tokenizer()
        return answer(lambda: ProcessBackend(engine, facts, tokenizer))
    finally:
        engine.kill()


def _beside_a_thread(loader: Loader, trace: Path | None, answer: Answer) -> int | None:
    """The engine on a thread of this process."""
    with without_collector():
        llm = loader()
        import_application()
    from forerun.api.async_llm import AsyncLLM
    from forerun.engine.stats import traced
    from forerun.server.backends.thread import LocalBackend

    with traced(llm.engine.stats, trace):
        return answer(lambda: LocalBackend(AsyncLLM(llm, max_requests=1 << 16)))


def _replace(listener: socket.socket) -> None:
    """Start this program anew, in this process; does not return."""
    log.error("the engine hangs: restarting the server")
    listener.set_inheritable(True)
    os.environ["FORERUN_LISTENER"] = str(listener.fileno())
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def import_application() -> None:
    """Import what answers requests, most of which is the web framework; says what is missing."""
    try:
        import uvicorn  # noqa: F401

        import forerun.server.app  # noqa: F401
    except ImportError as error:
        raise MissingDependency(f"serving needs {error.name}; pip install 'forerun[serve]'") from None


async def _answer(
    make_backend: MakeBackend, settings: ServerSettings, listener: socket.socket, announce: Callable[[Backend], object]
) -> int | None:
    """Returns the signal that ended it, or REPLACE."""
    backend = make_backend()
    try:
        return await _answer_with(backend, settings, listener, lambda: announce(backend))
    finally:
        await backend.close()


async def _answer_with(
    backend: Backend, settings: ServerSettings, listener: socket.socket, announce: Callable[[], object]
) -> int | None:
    import uvicorn

    from forerun.server.app import create_app

    app = create_app(backend, settings)
    service = app.state.service

    class Server(uvicorn.Server):
        told: int | None = None
        until = 0.0

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            announce()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.told is not None:
                self.should_exit = self.force_exit = True
                return
            self.told, self.until = sig, monotonic() + settings.drain_seconds
            service.draining = True
            log.info("shutting down: %d running texts have %g s to finish", service.active, settings.drain_seconds)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await super().shutdown(sockets)
            # its own end of the application is left out then, which is logged as an error
            if self.force_exit:
                await self.lifespan.shutdown()

        async def on_tick(self, counter: int) -> bool:
            if self.told is None and service.must_replace:
                self.told, self.should_exit = REPLACE, True
            elif self.told is not None and (not service.active or monotonic() > self.until):
                await service.backend.close()  # who is still there gets an error
                self.should_exit = True
            return await super().on_tick(counter)

    server = Server(uvicorn.Config(app, **uvicorn_options(settings)))
    await server.serve(sockets=[listener])
    return server.told


def uvicorn_options(settings: ServerSettings) -> dict[str, Any]:
    """How connections are kept, and the protocol class that cuts off clients that do not read."""
    from forerun.server.limits import HEAD_BYTES, Connection
    from forerun.server.sse import Outbox

    return {
        "http": partial(Connection, settings.client_seconds, Outbox()),
        "h11_max_incomplete_event_size": HEAD_BYTES,
        "log_level": "warning",
        "timeout_graceful_shutdown": 5,
        "timeout_keep_alive": 30,
    }
