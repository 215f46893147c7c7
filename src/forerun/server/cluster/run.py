"""The Ray Serve application, a front and its replicas: its config file, and running it on a Ray cluster."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from forerun import __version__
from forerun.build.load import drafting_of
from forerun.core import registry
from forerun.core.errors import InvalidInput, MissingDependency
from forerun.models.kv_budget import usual_batch
from forerun.server.settings import APPLICATION, FRONT, REPLICA, ClusterSettings

log = logging.getLogger(__name__)


def write_config(settings: ClusterSettings, file: Path) -> None:
    import yaml

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
        log.info("shutting down: running texts have %g s to finish", settings.server_settings().drain_seconds)


@contextmanager
def running(settings: ClusterSettings, **ray_options: Any) -> Iterator[str]:
    """The application, as long as it is needed; where it listens.

    Joins the Ray cluster of RAY_ADDRESS; else it starts one on this machine, which ends with it.
    """
    ray, serve = _ray()

    server = settings.server_settings()
    joins = "RAY_ADDRESS" in os.environ or "address" in ray_options
    if not joins:  # replicas may share the cores of one machine
        needed = int(settings.cpus * settings.most + 2)
        ray_options = {"num_cpus": max(needed, os.cpu_count() or 1), "include_dashboard": False, **ray_options}
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


IMPORT_PATH = "forerun.ray:app"
FRONT_ROOM = 4096  # requests that one front has open; its server turns away more than its queue holds


def app(args: dict[str, Any]) -> Any:
    """Ray Serve calls this with the `args` of a config file; the application that it deploys."""
    try:
        from ray import serve
        from ray.serve.config import RequestRouterConfig
    except ImportError as error:
        raise MissingDependency(f"several replicas need {error.name}; pip install 'forerun[ray]'") from None
    from forerun.server.cluster.backend import Front
    from forerun.server.cluster.replica import Replica

    settings = _settled(ClusterSettings.from_dict(args))
    server = settings.server_settings(with_keys=False)
    # what is in the arguments makes a new version of a replica, and the drafter must not
    own = replace(settings, drafter=None, replicas=1, max_replicas=None).as_dict()
    version = sha256(json.dumps([__version__, own], sort_keys=True).encode()).hexdigest()[:16]
    # without a version of ours, every `serve.run` would replace all replicas
    same: dict[str, Any] = {"version": version, "_internal": True}
    batch = int(settings.load["max_batch"])
    replica = serve.deployment(Replica).options(
        name=REPLICA,
        user_config={"drafter": settings.drafter},
        max_ongoing_requests=batch + max(1, batch // 4),  # the next ones are at hand when a text ends
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        graceful_shutdown_timeout_s=server.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        request_router_config=RequestRouterConfig(
            request_router_class="forerun.server.cluster.router.PrefixRouter", request_router_kwargs={"batch": batch}
        ),
        **_how_many(settings),
        **same,
    )
    front = serve.deployment(serve.ingress()(Front)).options(
        name=FRONT,
        num_replicas=1,
        max_ongoing_requests=FRONT_ROOM,
        ray_actor_options={"num_cpus": 0.1},
        graceful_shutdown_timeout_s=server.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2.0,
        **same,
    )
    return front.bind(replica.bind(own), own)


def _settled(settings: ClusterSettings) -> ClusterSettings:
    """With the batch of a replica, which its router needs to know, and a drafter that is loaded with the model.

    Only a drafter that runs no checkpoint can be changed in a running replica.
    """
    if "max_batch" not in settings.load:
        device = "cuda" if settings.gpus else "cpu"
        most, _ = usual_batch(device, None, int(settings.load.get("threads", settings.cpus)))
        settings = replace(settings, load={**settings.load, "max_batch": most})
    named = settings.drafter
    drafting_of({**settings.load, "drafter": named or settings.load.get("drafter")})  # raises what is wrong
    if named is None or named == "auto" or registry.drafters.spec(named).needs == "nothing":
        return settings
    return replace(settings, drafter=None, load={**settings.load, "drafter": named})


def _how_many(settings: ClusterSettings) -> dict[str, Any]:
    """A fixed number of replicas, or as many as queue and KV use ask for."""
    if settings.most == settings.replicas:
        return {"num_replicas": settings.replicas}
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    policy = AutoscalingPolicy(
        policy_function="forerun.server.cluster.scaling:QueueAndKV",
        policy_kwargs={"target_queue": settings.target_queue, "target_kv": settings.target_kv},
    )
    scaling = AutoscalingConfig(
        min_replicas=settings.replicas, max_replicas=settings.most, upscale_delay_s=settings.upscale_seconds,
        downscale_delay_s=settings.downscale_seconds, look_back_period_s=max(4.0, settings.upscale_seconds),
        metrics_interval_s=2.0, policy=policy,
    )  # fmt: skip
    return {"autoscaling_config": scaling}


def config_of(settings: ClusterSettings) -> dict[str, Any]:
    """What `serve deploy` reads, as `serve build` writes it; the model's settings are its `args`.

    The drafter stands apart: a change of it alone restarts no replica, a change of `args` replaces all in turn.
    """
    settings = _settled(settings)
    server = settings.server_settings(with_keys=False)
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": server.host, "port": server.port, "request_timeout_s": server.deadline},
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "runtime_env": {},
                "args": replace(settings, drafter=None).as_dict(),
                "deployments": [{"name": REPLICA, "user_config": {"drafter": settings.drafter}}],
            }
        ],
    }
