"""What a drafter says of the coming round before it is asked to draft, for the controller to weigh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from forerun.types import Seq


@dataclass(frozen=True, slots=True)
class Quote:
    """What drafting for one sequence would cost in the coming round."""

    level: float = 0.0  # seconds per drafted level; 0 = drafting costs nothing
    start: float = 0.0  # seconds before the first level: text that it must read first
    chosen: bool = True  # never sampled: the drafter cuts its tree by the price list
    stops: bool = False  # it sees its confidence level by level, and stops where the next would not pay
    free: tuple[float, ...] = ()  # survivals of a chain that is at hand at no cost


@runtime_checkable
class Quotes(Protocol):
    """A drafter that quotes; of any other, only its cost per level is known."""

    def quote(self, seq: Seq) -> Quote:
        """What drafting for this sequence would cost now. Decided from committed text alone."""
        ...


@runtime_checkable
class Claims(Protocol):
    """A drafter that says how sure it was, so that it can be held to it."""

    def claim(self, seq: Seq) -> float | None:
        """How many tokens of its last draft for this sequence it expected to stand; None = no telling."""
        ...


def quote_of(drafter: object, seq: Seq) -> Quote:
    """The drafter's own quote, or what its cost says: what costs nothing is chosen, what costs may be sampled."""
    quote: Callable[[Seq], Quote] | None = getattr(drafter, "quote", None)  # a protocol is slow to ask
    if quote is not None:
        return quote(seq)
    cost = float(getattr(drafter, "cost", 0.0))
    return Quote(cost, chosen=not cost)


def claim_of(drafter: object, seq: Seq) -> float | None:
    """What the drafter expected of its last draft, if it says so."""
    claim: Callable[[Seq], float | None] | None = getattr(drafter, "claim", None)
    return None if claim is None else claim(seq)
