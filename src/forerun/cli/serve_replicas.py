"""`forerun serve --replicas N`: the same server over several engines, by Ray Serve."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

from forerun.core.errors import InvalidInput
from forerun.server.cluster.settings import ClusterSettings
from forerun.server.settings import ServerSettings


def serve_replicas(
    model: str,
    server: ServerSettings,
    load: Mapping[str, Any],
    many: Mapping[str, Any],
    key_file: Path | None,
    config: Path | None,
) -> None:
    """Write the config file that was asked for, or serve until a signal comes."""
    settings = cluster_settings(model, server, load, many)
    from forerun.server.cluster import run

    if config is not None:
        if server.api_keys and key_file is None:
            raise InvalidInput(
                "keys do not belong into a config file; give --api-key-file instead of --api-key"
            )
        run.write_config(replace(settings, api_key_file=None if key_file is None else str(key_file)), config)
        typer.echo(f"wrote {config}; start it with `serve deploy {config}`")
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with tempfile.TemporaryDirectory() as folder:
        if server.api_keys:  # the front reads them from a file that only this user can read
            keys = Path(folder) / "keys"
            keys.touch(mode=0o600)
            keys.write_text("\n".join(server.api_keys), encoding="utf-8")
            settings = replace(settings, api_key_file=str(keys))
        run.serve_replicas(settings, lambda url: typer.echo(_said(settings, url), err=True))


def cluster_settings(
    model: str, server: ServerSettings, load: Mapping[str, Any], many: Mapping[str, Any]
) -> ClusterSettings:
    """The settings of the cluster that the flags ask for; what is at its default is left out."""
    own = {name: value for name, value in load.items() if value is not None and value != "auto"}
    on_gpu = _on_gpu(str(load.get("device") or "auto"))
    replicas, most = int(many["replicas"]), many["max_replicas"]
    if not on_gpu and "threads" not in own:  # they share this machine's cores
        own["threads"] = max(1, (os.cpu_count() or 1) // max(replicas, most or 1))
    drafter = own.pop("drafter", None)
    given = {name: list(value) if name == "model_names" else value for name, value in asdict(server).items()}
    plain = asdict(ServerSettings(("-",)))
    kept = {name: value for name, value in given.items() if name != "api_keys" and value != plain[name]}
    gpus = many["gpus"]
    return ClusterSettings(
        model, replicas, most, drafter, own, kept, gpus=float(on_gpu) if gpus is None else float(gpus)
    )


def _on_gpu(device: str) -> bool:
    if device != "auto":
        return device.startswith("cuda")
    import torch

    return torch.cuda.is_available()


def _said(settings: ClusterSettings, url: str) -> str:
    most = "" if settings.most == settings.replicas else f" to {settings.most}"
    return (
        f"serving {settings.server_settings().model_names[0]} at {url} (API below /v1, "
        f"{settings.replicas}{most} replicas); Ctrl-C ends it"
    )
