"""A Ray cluster on this machine with two replicas of the default model, for all tests of one file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from forerun.server.settings import ClusterSettings

SETTINGS = ClusterSettings(
    load={"max_batch": 4, "max_length": 1024, "threads": 1}, server={"port": 0, "drain_seconds": 20.0}
)


@dataclass
class Cluster:
    """A running application."""

    url: str
    settings: ClusterSettings


@pytest.fixture(scope="module")
def cluster(smollm2_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    pytest.importorskip("ray.serve")
    from forerun.server.cluster.run import running

    folder = tmp_path_factory.mktemp("ray")
    (folder / "token").write_text(secrets.token_hex(32))
    with pytest.MonkeyPatch.context() as patch:
        # Ray would write a token of this cluster into the home folder
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(folder / "token"))
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_DEDUP_LOGS", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(["src", os.environ.get("PYTHONPATH", "")]))
        with running(SETTINGS, num_cpus=6, object_store_memory=80 << 20) as url:
            yield Cluster(url, SETTINGS)
