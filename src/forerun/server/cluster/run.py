"""Runs a server of several replicas from the command line: starts or joins a Ray cluster, and drains it at the end."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forerun.core.errors import InvalidInput, MissingDependency
from forerun.server.cluster.settings import APPLICATION, ClusterSettings

log = logging.getLogger(__name__)


def write_config(settings: ClusterSettings, file: Path) -> None:
    """The config file that `serve deploy` or KubeRay takes."""
    import yaml

    from forerun.server.cluster.application import config_of

    text = yaml.safe_dump(config_of(settings), sort_keys=False, allow_unicode=True)
    head = f"# Made by `forerun serve --write-config`; start it with `serve deploy {file.name}`.\n"
    try:
        file.write_text(head + text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"the config cannot be written to {file}: {error.strerror}") from None


def serve_replicas(settings: ClusterSettings, announce: Callable[[str], object]) -> None:
    """Answer requests until SIGTERM or Ctrl-C; then those that run have `drain_seconds` to end."""
    told = threading.Event()
    with running(settings) as url:
        announce(url)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: told.set())
        told.wait()
        log.info("shutting down: texts that run have %g s to end", settings.server_settings().drain_seconds)


@contextmanager
def running(settings: ClusterSettings, **ray_options: Any) -> Iterator[str]:
    """The application, as long as it is needed; where it listens.

    Joins the Ray cluster of RAY_ADDRESS; else it starts one on this machine, which ends with it.
    """
    ray, serve = _ray()
    from forerun.server.cluster.application import app

    server = settings.server_settings()
    joins = "RAY_ADDRESS" in os.environ or "address" in ray_options
    if not joins:  # replicas may share the cores of one machine
        needed = int(settings.cpus * settings.most + 2)
        ray_options = {
            "num_cpus": max(needed, os.cpu_count() or 1),
            "include_dashboard": False,
            **ray_options,
        }
    ray.init(log_to_driver=False, **ray_options)
    try:
        port = server.port or _free_port(server.host)
        serve.start(http_options={"host": server.host, "port": port})
        serve.run(app(settings.as_dict()), name=APPLICATION, route_prefix="/")
        host = f"[{server.host}]" if ":" in server.host else server.host
        yield f"http://{host}:{port}"
    finally:
        serve.delete(APPLICATION) if joins else serve.shutdown()
        ray.shutdown()


def update(settings: ClusterSettings) -> None:
    """Bring a running application to these settings.

    Another drafter that needs no checkpoint is taken at once; for other changes Ray Serve replaces one replica after
    the other. Texts that run go on either way.
    """
    _, serve = _ray()
    from forerun.server.cluster.application import app

    serve.run(app(settings.as_dict()), name=APPLICATION, route_prefix="/")


def _ray() -> tuple[Any, Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a library does not report its users
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise MissingDependency(f"several replicas need {error.name}; pip install 'forerun[ray]'") from None
    return ray, serve


def _free_port(host: str) -> int:
    import socket

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        taken.bind((host, 0))
        return int(taken.getsockname()[1])
