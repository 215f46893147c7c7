"""The Controller protocol: how much to draft, per sequence and round. What it is built from, and FixedController."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeGuard, runtime_checkable

from forerun.control.cost import CostModel
from forerun.core.request import budget_of
from forerun.core.types import Budget, Offer, Round, RoundPlan, Seq


@dataclass(frozen=True, slots=True)
class ControlParts:
    """What a controller is built from: its class has `build(parts)`."""

    offer: Callable[[Seq], Offer]  # of the sequence's own drafter
    measure: Callable[[], CostModel]  # what passes cost on this machine; takes a second: called when needed
    nodes: int | None  # drafted nodes per round that the user allows; None = what may pay
    width: int | None  # children per node at most
    looks_up: Callable[[Seq], bool] = lambda seq: False  # does its drafter make look-ups and nothing else?
    follows: bool = False  # are plain passes launched before the last one is read?


@runtime_checkable
class ControllerClass(Protocol):
    """What the registry names: a class that builds itself from parts."""

    def build(self, parts: ControlParts) -> Controller: ...


@dataclass(frozen=True, slots=True)
class WaitingPrompts:
    """Requests whose prompts are not read yet while a round is planned."""

    requests: int = 0  # that have a place in the batch
    rows: int = 0  # their tokens that are not cached
    taken: int = 0  # rows of prompts that the coming pass prefills at most
    room: int = sys.maxsize  # rows of a pass, trees included


class Controller(Protocol):
    """Plans budgets before anything is drawn, from what earlier rounds showed.

    It never sees the tokens of the round it plans, so it cannot bias them. 0 nodes = do not draft.
    """

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        """One budget per sequence that shares the coming pass."""
        ...

    def observe(self, outcome: Round) -> None:
        """Learn from a round: what was accepted, and what it cost."""
        ...

    def forget(self, seq: Seq) -> None:
        """The sequence is finished."""
        ...


@runtime_checkable
class PlansAhead(Protocol):
    """A controller that plans the next round before the one under way is read."""

    def follow(self, seqs: Sequence[Seq], last: RoundPlan, switches: Callable[[], bool]) -> RoundPlan | None:
        """The plan of the round behind `last`, which is plain or has trees; None = that is to be read first.

        `switches`: can the sequences' drafter go on in another form, or behind a plain round?
        """
        ...


@runtime_checkable
class SeesPrompts(Protocol):
    """A controller that weighs drafts against the prompts that wait."""

    def note_waiting(self, prompts: WaitingPrompts) -> None:
        """What waits now; called before `plan` and before `follow`."""
        ...


USUAL_NODES = 8  # nodes of every round where no number was set


class FixedController:
    """Always the same."""

    def __init__(self, nodes: int, width: int = 1) -> None:
        self.budget = budget_of(nodes, width)

    @classmethod
    def build(cls, parts: ControlParts) -> FixedController:
        return cls(USUAL_NODES if parts.nodes is None else parts.nodes, parts.width or 1)

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        return [self.budget] * len(seqs)

    def observe(self, outcome: Round) -> None:
        pass

    def forget(self, seq: Seq) -> None:
        pass


def plans_ahead(controller: Controller) -> TypeGuard[PlansAhead]:
    return _is_kind(type(controller), PlansAhead)


def sees_prompts(controller: Controller) -> TypeGuard[SeesPrompts]:
    return _is_kind(type(controller), SeesPrompts)


@cache
def _is_kind(kind: type, protocol: type) -> bool:
    """Asked once: to compare a class with a protocol takes as long as a look-up."""
    return issubclass(kind, protocol)
