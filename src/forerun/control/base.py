"""The Controller protocol: how much to draft, per sequence and round, and what a controller is built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from forerun.control.cost import CostModel
from forerun.core.offer import Offer, Plan
from forerun.core.types import Budget, Round, Seq


@dataclass(frozen=True, slots=True)
class ControlParts:
    """What a controller is built from: its class has `build(parts)`."""

    offer: Callable[[Seq], Offer]  # of the sequence's own drafter
    measure: Callable[[], CostModel]  # what passes cost on this machine; takes a second: called when needed
    nodes: int | None  # drafted nodes per round that the user allows; None = what may pay
    width: int | None  # children per node at most
    looks_up: Callable[[Seq], bool] = lambda seq: False  # does its drafter make look-ups and nothing else?
    follows: bool = False  # are rounds launched before the last one is read?


@runtime_checkable
class ControllerClass(Protocol):
    """What the registry names: a class that builds itself from parts."""

    def build(self, parts: ControlParts) -> Controller: ...


@dataclass(frozen=True, slots=True)
class WaitingPrompts:
    """Requests whose prompts are not read yet while a round is planned."""

    requests: int = 0  # that have a place in the batch
    rows: int = 0  # their tokens that are not cached
    taken: int = 0  # of these rows, those that the coming pass reads at most
    room: int = 1 << 30  # rows of a pass, trees included


class Controller(Protocol):
    """Plans rounds before anything is drawn, from what earlier rounds showed.

    It never sees the tokens of the round it plans, so it cannot bias them. 0 nodes = do not draft.
    """

    def plan(self, seqs: Sequence[Seq]) -> Sequence[Budget] | Plan:
        """One budget per sequence that shares the coming pass. A `Plan` comes back with the round's outcome."""
        ...

    def observe(self, outcome: Round) -> None:
        """Learn from a round: what was accepted, and what it cost."""
        ...

    def forget(self, seq: Seq) -> None:
        """The sequence is finished."""
        ...


@runtime_checkable
class Reconsiders(Protocol):
    """A controller that plans rounds before the last one is read."""

    def follow(self, seqs: Sequence[Seq], unread: Plan) -> Plan | None:
        """The round behind one that was launched with this plan and not read; None = it must be read first."""
        ...


@runtime_checkable
class SeesPrompts(Protocol):
    """A controller that weighs drafts against the prompts that wait."""

    def note_waiting(self, prompts: WaitingPrompts) -> None:
        """What waits now; called before `plan` and before `follow`."""
        ...
