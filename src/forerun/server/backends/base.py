"""The model behind a server, wherever its engine runs: texts as they grow, how busy it is, whether it still works.

`thread` has the engine in this process, `process` in one of its own, `forerun.server.cluster` in many. No torch here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from forerun.api.completion import Completion
from forerun.core import registry
from forerun.core.errors import ForerunError, UnsupportedModel
from forerun.core.request import Event
from forerun.engine.stats import Form
from forerun.heads import heads_in_the_box
from forerun.models.load.tokenizer import Tokenizer

Restarted = Literal["yes", "no", "needs a new program"]  # no = it will be asked again
CLOSING = 2.0  # seconds that a round may still take when its engine is to end


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine is doing now, and what it has done since it was started."""

    running: int
    waiting: int
    used_slots: int
    cached_slots: int
    slots: int | None  # that there can be; None = no limit
    read: int  # tokens of prompts
    reused: int  # of these, found in the prefix cache
    preemptions: int
    rounds: int  # of the engine; `forms` has those of its sequences
    tokens: int
    drafted: int
    accepted: int
    forms: Mapping[Form, int]
    reached: Sequence[int]  # rounds of sequences whose draft reached depth 1, 2, ...
    kept: Sequence[int]  # of these, those whose accepted path did
    seconds: Mapping[str, float]  # by part of a round
    aged: int = 0  # requests admitted before more urgent ones, for they had waited longest
    # by LoRA adapter: rounds of sequences, tokens, drafted and accepted ones
    adapters: Mapping[str, Sequence[int]] = field(default_factory=dict)
    captures: int = 0  # that drafts for one sequence wait for

    @property
    def sequence_rounds(self) -> int:
        return sum(self.forms.values())

    @property
    def accepted_per_position(self) -> list[float]:
        return [kept / reached for kept, reached in zip(self.kept, self.reached, strict=False) if reached]


class EngineHangs(ForerunError):
    """There was work, and the engine made no progress."""

    def __init__(self) -> None:
        super().__init__("the engine makes no progress; the request was given up")


class EngineError(Exception):
    """An unexpected error in an engine of another process: its kind and its message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def kind_of(error: BaseException) -> str:
    """The name of an error's class, wherever it was raised."""
    return error.kind if isinstance(error, EngineError) else type(error).__name__


class ProgressWatch:
    """Sees whether an engine that has work gets on with it."""

    def __init__(self) -> None:
        self._seen, self._since, self._had_work = (-1, 0), monotonic(), False

    def stands_still(self, progress: tuple[int, int], has_work: bool, patience: float) -> bool:
        """Was there work but no progress for so many seconds? To be called often."""
        if progress != self._seen or not (has_work and self._had_work):
            self._seen, self._since = progress, monotonic()
        self._had_work = has_work
        return monotonic() - self._since > patience


class Backend(ABC):
    """A model that writes texts. Made inside the event loop that uses it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_length: int, has_encoder: bool) -> None:
        self.tokenizer, self.vocab_size, self.max_length = tokenizer, vocab_size, max_length
        self.has_encoder = has_encoder  # it reads the prompt, which takes no room in the context of the text

    @property
    @abstractmethod
    def max_batch(self) -> int: ...

    @property
    @abstractmethod
    def drafter(self) -> str: ...

    @cached_property
    def drafters(self) -> list[str]:
        """What a request may name without a checkpoint of its own: the server's first."""
        plain = [spec.name for spec in registry.drafters.specs() if spec.needs == "nothing"]
        heads = [head.drafter for head in heads_in_the_box() if head.vocab_size in (None, self.vocab_size)]
        return list(dict.fromkeys([self.drafter, *heads, *plain]))

    @abstractmethod
    def stream(self, prompt: tuple[int, ...], **options: Any) -> AsyncGenerator[Event | Completion]:
        """An Event per round as the text grows, then its Completion; leaving it early aborts it.

        Without `every_round` only the event of the first round comes before the Completion, at the least.
        """

    async def refresh(self) -> None:  # noqa: B027
        """Have `load`, `cpu_seconds` and what is known of its health be as of now, as far as it answers."""

    @abstractmethod
    def load(self) -> Load: ...

    @abstractmethod
    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far, by thread; asked by the front's."""

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine; None while it runs, or where others start it again."""
        return None

    @property
    @abstractmethod
    def problem(self) -> str | None:
        """Why the engine cannot answer; None while it can."""

    @property
    def lost_process(self) -> str | None:
        """Which of the processes that the model is split over has ended; None where that counts as a failure."""
        return None

    def looks_hung(self, patience: float) -> bool:
        """Was there work, and neither a round nor a prompt that was read on, for so many seconds? Asked often."""
        return False

    def give_up(self) -> None:  # noqa: B027
        """All waiting requests get an error, and no new ones are served. Asked where it looks hung."""

    @abstractmethod
    async def swap_head(self, folder: Path) -> None:
        """Draft with the head in this folder from now on; raises, and changes nothing, where it cannot be used."""

    async def change_adapter(self, name: str, folder: str | None) -> None:
        """Serve the LoRA adapter in this folder under a name from now on; None = serve it no longer."""
        raise UnsupportedModel("adapters are loaded and unloaded by a server of one replica; give --lora at its start")

    async def sleep(self) -> None:
        """Give all memory of the engine back, its weights included, until `restart`; no request is under way."""
        raise UnsupportedModel("sleep needs one replica, and an engine in its own process: not with --front thread")

    async def restart(self) -> Restarted:
        """Start a new engine in place of one that has ended."""
        return "no"

    @abstractmethod
    async def close(self) -> None:
        """End the engine; all waiting requests get an error."""


def why_ended(failure: BaseException) -> str:
    """What `/health` says of an engine that has ended: of unexpected errors only their kind."""
    return f"the engine ended: {failure if isinstance(failure, ForerunError) else kind_of(failure)}"
