"""What the operator of a server sets. No web framework here, so that the command line can show help at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

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
