"""What the operator of a server or a cluster sets. No web framework, Ray or torch here: help is shown at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from forerun.core.checks import unknown
from forerun.core.errors import InvalidInput

LOOPBACK = "127.0.0.1"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# where HTTP is answered: beside the engine's process, or on a thread of it
Front = Literal["process", "thread"]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server answers; what it runs is the engine's affair."""

    model_names: tuple[str, ...]  # what requests may call the model; the first is what answers call it
    host: str = LOOPBACK
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # none = everybody may ask
    max_queue: int = 256  # requests that wait for a place in the batch; more are turned away
    max_body: int = 4 << 20  # bytes
    max_choices: int = 16  # `n` of one request, times its prompts
    deadline: float | None = None  # seconds that one request may take in all
    rate_limit: int | None = None  # requests a minute per key, or per address without keys
    drain_seconds: float = 30.0  # that running requests have to end after SIGTERM
    client_seconds: float = 60.0  # that a client may take to send its request, or read nothing of its answer
    hang_seconds: float = 120.0  # without progress while there is work: requests end, /health reports it
    restart: bool = False  # a new engine where the old one has ended, a new process where it hangs
    log_prompts: bool = False
    # do API keys share cached prompts? How long an answer takes may tell that one is
    share_prefixes: bool = False
    record: Path | None = None  # where texts of requests that say "record": true are kept for training
    heads: Path | None = None  # versions of a head, whose link `current` is followed
    adapters: Mapping[str, str] = field(default_factory=dict)  # LoRA adapters that the engine has: name -> folder
    admin_key: str | None = None  # who sends it may change adapters, and have the server sleep; None = nobody may

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise InvalidInput("a server needs a name for its model; pass --served-model-name")
        if taken := [name for name in self.adapters if name in self.model_names]:
            raise InvalidInput(f"the adapter {taken[0]!r} has the model's name; choose another name for it")
        if not 0 <= self.port <= 65535:
            raise InvalidInput(f"port={self.port} is out of range: 0 to 65535; 0 = any that is free")
        for name in ("deadline", "rate_limit", "hang_seconds", "client_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidInput(f"{name}={value} is out of range: above 0")
        if not self.drain_seconds >= 0:
            raise InvalidInput(f"drain_seconds={self.drain_seconds} is out of range: 0 or more")
        for name in ("max_queue", "max_body", "max_choices"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name}={getattr(self, name)} is out of range: 1 or more")


def read_keys(file: Path) -> tuple[str, ...]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the API keys cannot be read from {file}: {error}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise InvalidInput(f"{file} holds no API key; write one a line")
    return keys


def _refuse_unknown(given: Mapping[str, Any], owner: type[Any], what: str) -> None:
    known = [each.name for each in fields(owner)]
    if strange := [name for name in given if name not in known]:
        raise InvalidInput(unknown(f"setting of a {what}", str(strange[0]), known))


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
        _refuse_unknown(values, cls, "cluster")
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Those that differ from their defaults, as JSON and YAML can hold them."""
        plain = asdict(ClusterSettings())
        return {name: value for name, value in asdict(self).items() if value != plain[name]}

    def server_settings(self, with_keys: bool = True) -> ServerSettings:
        """The settings of the front's server, with the keys of the file."""
        keys = read_keys(Path(self.api_key_file)) if with_keys and self.api_key_file else ()
        given = {"model_names": [self.model], **self.server}
        _refuse_unknown(given, ServerSettings, "server")
        return ServerSettings(**{**given, "model_names": tuple(given["model_names"]), "api_keys": keys})

    @property
    def most(self) -> int:
        return self.replicas if self.max_replicas is None else self.max_replicas
