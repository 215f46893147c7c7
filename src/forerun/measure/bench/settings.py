"""Settings of a benchmark: drafters, conditions to run them under, and a suite of prompts.

A *setup* is a drafter and its budget: `ngram` leaves the budget to the controller, `ngram:8` drafts eight nodes
every round whatever they cost, `eagle3:24:5:6` trees of 24, five deep and six wide. `eagle3=FOLDER` drafts with the
head in that folder, `layer_skip=PLAN` with the layers of that plan, `draft_model=NAME` with that model
(`draft_model>draft_model=SMALL;MEDIUM` with two), `auto` is the default when no drafter is named. A *cell* is one
combination of verifier, temperature and batch size; every setup runs in every cell, next to the plain loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from forerun.core import registry
from forerun.core.errors import InvalidInput, UnknownName
from forerun.core.request import Budget

PLAIN, AUTO = "plain", "auto"
TRANSFORMERS, LOOKUP, ASSISTED = "transformers", "transformers_lookup", "transformers_assisted"
LLAMA_CPP = "llama_cpp"
LLAMA_CPP_LOOKUPS = {f"{LLAMA_CPP}_lookup_{tokens}": tokens for tokens in (3, 10)}  # tokens that it looks up
FIXED_NODES = 8
PEERS = (TRANSFORMERS, LOOKUP, ASSISTED, LLAMA_CPP, *LLAMA_CPP_LOOKUPS)


@dataclass(frozen=True, slots=True)
class DrafterSetup:
    name: str
    drafter: str | None  # None = the engine's default
    budget: int | None = None  # None = the controller decides
    head: str | None = None  # its head, plan of layers or second models, where these are not the engine's own
    tree: tuple[int, int] | None = None  # depth and width of what is drafted with a budget; None = a chain

    @classmethod
    def parse(cls, text: str) -> DrafterSetup:
        """`auto`, a drafter's name, `name:nodes` for the same budget every round, `name=folder` for a head."""
        if "=" in text:
            return cls._with_head(text)
        name, colon, nodes = text.partition(":")
        if name == PLAIN:
            raise InvalidInput("'plain' is always measured; name the drafters to compare with it")
        if name != AUTO:
            name = registry.drafters.spec(name).name  # raises, naming what there is
        drafter = None if name == AUTO else name
        if not colon:
            return cls(text, drafter)
        sizes = [int(part) if part.isdigit() else 0 for part in nodes.split(":")]
        if len(sizes) not in (1, 3) or not all(1 <= size <= 256 for size in sizes):
            raise InvalidInput(
                f"the budget in {text!r} is not usable; write {name}:8, with 1 to 256 nodes, or {name}:24:5:6"
            )
        return cls(text, drafter, sizes[0], tree=(sizes[1], sizes[2]) if len(sizes) == 3 else None)

    def fixed(self) -> Budget | None:
        """What it drafts every round; None = the controller decides."""
        if self.budget is None:
            return None
        depth, width = self.tree or (self.budget, 1)
        return Budget(self.budget, depth, width)

    @classmethod
    def _with_head(cls, text: str) -> DrafterSetup:
        """`eagle3=folder` or `eagle3:8=folder`, named after the drafter and the last part of each path."""
        drafter, _, folder = text.partition("=")
        plain = cls.parse(drafter)
        if plain.drafter is None or not folder:
            raise InvalidInput(f"{text!r} names no head; write eagle3=FOLDER, with the drafter it is for")
        short = ";".join(Path(part).name for part in folder.split(";"))
        return cls(f"{drafter}={short}", plain.drafter, plain.budget, folder, plain.tree)


@dataclass(frozen=True, slots=True)
class Cell:
    verifier: str = "auto"
    temperature: float = 0.0
    batch: int = 1

    @property
    def name(self) -> str:
        return f"verifier={self.verifier} temperature={self.temperature:g} batch={self.batch}"


@dataclass(frozen=True, slots=True)
class Settings:
    model: str = "smollm2"
    draft_model: str | None = None
    setups: tuple[DrafterSetup, ...] = (DrafterSetup(AUTO, None),)
    verifiers: tuple[str, ...] = ("auto",)
    temperatures: tuple[float, ...] = (0.0,)
    batches: tuple[int, ...] = (1,)
    budget: int | None = None  # drafted nodes per round at most; None = what may pay
    peers: tuple[str, ...] = ()
    url: str | None = None  # an OpenAI-compatible endpoint to measure beside
    suite: str | None = None  # a JSONL file; None = built in
    tasks: tuple[str, ...] = ()  # () = all
    limit: int | None = 2  # prompts per task; None = all
    max_tokens: int = 64
    repeats: int = 2
    seed: int = 0  # of the texts, where the temperature is not 0
    all_turns: bool = False
    ignore_eos: bool = False
    dtype: str = "auto"
    kv_dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None  # None = as many as `LLM` takes by itself

    def __post_init__(self) -> None:
        for name in ("repeats", "max_tokens", "budget"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"{name}={value} measures nothing; use 1 or more")
        for batch in self.batches:
            if batch < 1:
                raise InvalidInput(f"batches={batch} is out of range; use 1 or more sequences at once")
        for temperature in self.temperatures:
            if not 0 <= temperature < inf:
                raise InvalidInput(f"temperature={temperature} is out of range; use 0 (greedy) or more")
        if self.threads is not None and self.threads < 1:
            raise InvalidInput(f"threads={self.threads} is out of range; use 1 or more")
        if not self.verifiers:
            raise InvalidInput(f"no verifier is named; use auto, {', '.join(registry.verifiers.names())}")
        for name in self.verifiers:
            if name != "auto" and name not in registry.verifiers.names():
                registry.verifiers.get(name)  # raises, naming what there is
        for name in self.peers:
            if name not in PEERS:
                raise UnknownName(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
        if ASSISTED in self.peers and self.draft_model is None:
            raise InvalidInput(f"the peer {ASSISTED!r} needs a second model; add --draft-model NAME")
        names = [setup.name for setup in self.setups]
        for name in names:
            if names.count(name) > 1:
                raise InvalidInput(f"the drafter {name!r} is listed twice; name each once")

    @property
    def nodes(self) -> int:
        """The budget of drafters that do not weigh costs."""
        return self.budget or FIXED_NODES

    def cells(self) -> list[Cell]:
        """Every combination, the first of each list first."""
        return [
            Cell(verifier, temperature, batch)
            for verifier in self.verifiers
            for temperature in self.temperatures
            for batch in self.batches
        ]

    def as_document(self) -> dict[str, Any]:
        document = asdict(self)
        document["drafters"] = [setup.name for setup in self.setups]
        del document["setups"]
        return {key: list(value) if isinstance(value, tuple) else value for key, value in document.items()}


def parse_setups(names: Sequence[str]) -> tuple[DrafterSetup, ...]:
    return tuple(DrafterSetup.parse(name) for name in names)
