"""What the operator of a cluster sets. Neither Ray nor torch here, so that the command line can show help at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from forerun.core.checks import unknown
from forerun.core.errors import InvalidInput
from forerun.server.settings import ServerSettings, read_keys

REPLICA, FRONT, APPLICATION = "Replica", "Front", "forerun"  # what Ray Serve calls them


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """How many replicas of which model. `asdict` of it is what a Serve config file holds under `args`."""

    model: str = "smollm2"
    replicas: int = 2  # at least
    max_replicas: int | None = None  # None = as many as `replicas`: no autoscaling
    drafter: str | None = None  # of requests that name none; a change of it alone restarts no replica
    load: Mapping[str, Any] = field(default_factory=dict)  # options of LLM.load
    server: Mapping[str, Any] = field(default_factory=dict)  # fields of ServerSettings
    api_key_file: str | None = None  # on the machine that the front runs on
    cpus: float = 1.0  # of one replica
    gpus: float = 0.0
    target_queue: float = 2.0  # texts that wait per replica; more of them ask for another replica
    target_kv: float = 0.8  # share of the KV cache in use above which another replica is asked for
    upscale_seconds: float = 10.0  # that the need must last
    downscale_seconds: float = 300.0

    def __post_init__(self) -> None:
        most = self.max_replicas
        if self.replicas < 1 or (most is not None and most < self.replicas):
            raise InvalidInput(
                f"replicas={self.replicas} and max_replicas={most} are out of range: 1 <= replicas <= max_replicas"
            )
        if self.cpus < 0 or self.gpus < 0:
            raise InvalidInput(f"cpus={self.cpus} and gpus={self.gpus} are out of range: 0 or more")
        if not (self.target_queue > 0 and 0 < self.target_kv <= 1):
            raise InvalidInput(
                f"target_queue={self.target_queue} must be above 0, target_kv={self.target_kv} above 0 up to 1"
            )
        if "api_keys" in self.server:
            raise InvalidInput("API keys of a cluster are read from a file; give api_key_file")
        self.server_settings(with_keys=False)  # raises what is wrong with it

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ClusterSettings:
        """Those of a config file; a name that is unknown is refused."""
        known = [each.name for each in fields(cls)]
        for name in values:
            if name not in known:
                raise InvalidInput(unknown("setting of a cluster", str(name), known))
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Those that differ from their defaults, as JSON and YAML can hold them."""
        plain = asdict(ClusterSettings())
        return {name: value for name, value in asdict(self).items() if value != plain[name]}

    def server_settings(self, with_keys: bool = True) -> ServerSettings:
        """The settings of the front's server, with the keys of the file."""
        keys = read_keys(Path(self.api_key_file)) if with_keys and self.api_key_file else ()
        given = {"model_names": [self.model], **self.server}
        known = [each.name for each in fields(ServerSettings)]
        for name in given:
            if name not in known:
                raise InvalidInput(unknown("setting of a server", str(name), known))
        return ServerSettings(**{**given, "model_names": tuple(given["model_names"]), "api_keys": keys})

    @property
    def most(self) -> int:
        return self.replicas if self.max_replicas is None else self.max_replicas
