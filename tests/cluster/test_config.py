"""Settings of a cluster, the config file that is written of them, and the application that Ray Serve builds of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from forerun.cli.serve import cluster_settings
from forerun.core.errors import InvalidInput, UnknownName
from forerun.heads import BOX
from forerun.server.cluster.run import app, config_of, write_config
from forerun.server.settings import ClusterSettings, ServerSettings

ROOT = Path(__file__).parents[2]
SETTINGS = ClusterSettings(
    replicas=2, max_replicas=4, drafter="ngram", load={"max_batch": 4}, server={"drain_seconds": 12.0}
)


def test_settings_survive_a_config_file(tmp_path: Path) -> None:
    write_config(SETTINGS, tmp_path / "cluster.yaml")
    found = yaml.safe_load((tmp_path / "cluster.yaml").read_text())
    (only,) = found["applications"]
    again = ClusterSettings.from_dict({**only["args"], **only["deployments"][0]["user_config"]})
    assert again == SETTINGS
    assert found["http_options"]["port"] == 8000


def test_ray_takes_the_config_and_builds_the_application() -> None:
    pytest.importorskip("ray.serve")
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(config_of(SETTINGS))
    assert schema.applications[0].import_path == "forerun.ray:app"
    parts = _deployments(app(schema.applications[0].args))
    assert sorted(parts) == ["Front", "Replica"]
    replica = parts["Replica"]._deployment_config
    assert replica.autoscaling_config.max_replicas == 4
    assert replica.graceful_shutdown_timeout_s == 12.0
    assert replica.max_ongoing_requests == 5


def test_a_drafter_alone_is_no_new_version_and_other_changes_are() -> None:
    pytest.importorskip("ray.serve")

    def versions(**changes: Any) -> set[str]:
        parts = _deployments(app({**SETTINGS.as_dict(), **changes}))
        return {part._version for part in parts.values()}

    assert versions() == versions(drafter="suffix") == versions(replicas=1)
    assert versions() != versions(load={"max_batch": 5})
    assert versions(drafter="eagle3") != versions()  # runs a checkpoint: replicas are replaced in turn


def _deployments(application: Any) -> dict[str, Any]:
    front = application._bound_deployment
    inner = front.init_args[0]._bound_deployment
    return {front.name: front, inner.name: inner}


def test_the_kuberay_example_is_such_a_config() -> None:
    text = (ROOT / "docs" / "deploy" / "kuberay.yaml").read_text(encoding="utf-8")
    inner = yaml.safe_load(yaml.safe_load(text)["spec"]["serveConfigV2"])
    (only,) = inner["applications"]
    assert only["import_path"] == "forerun.ray:app"
    settings = ClusterSettings.from_dict(only["args"])
    assert settings.gpus == 1.0
    assert settings.most > settings.replicas


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"target_kv": 1.5}, "target_kv"),
        ({"server": {"prot": 1}}, "prot"),
        ({"server": {"api_keys": ["secret"]}}, "api_key_file"),
        ({"server": {"port": -1}}, "port"),
        ({"replica": 2}, "replicas"),
    ],
)
def test_what_is_wrong_is_said(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        ClusterSettings.from_dict(values)


def test_an_unknown_drafter_is_refused_before_anything_is_started() -> None:
    with pytest.raises(UnknownName):
        config_of(ClusterSettings(drafter="no such drafter"))


def test_a_head_that_the_drafter_cannot_run_is_refused_too() -> None:
    with pytest.raises(InvalidInput, match="is a head of the kind medusa"):
        config_of(ClusterSettings(drafter="eagle3", load={"draft_model": str(BOX / "smollm2-135m-medusa")}))


@pytest.mark.parametrize(("gpus", "batch"), [(0.0, 12), (1.0, 64)])
def test_replicas_have_a_batch_that_the_router_knows(gpus: float, batch: int) -> None:
    (only,) = config_of(ClusterSettings(load={"threads": 3}, gpus=gpus))["applications"]
    assert only["args"]["load"] == {"threads": 3, "max_batch": batch}


def test_flags_become_settings() -> None:
    server = ServerSettings(("name",), port=9000, max_queue=5)
    load = {"device": "cpu", "max_batch": 4, "drafter": "ngram", "draft_model": None, "dtype": "auto", "threads": None}
    found = cluster_settings("smollm2", server, load, {"replicas": 2, "max_replicas": None, "gpus": None})
    assert (found.replicas, found.most, found.drafter, found.gpus) == (2, 2, "ngram", 0.0)
    assert found.load == {"device": "cpu", "max_batch": 4, "threads": found.load["threads"]}
    assert found.server_settings() == server
    assert ClusterSettings.from_dict(found.as_dict()) == found
