"""PriceLists: what nodes cost in tokens, made anew every few rounds, as costs are corrected by every round."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.control.allocate import deepest, widest
from forerun.control.cost import CostModel
from forerun.core.types import Budget

REFRESH_ROUNDS = 16  # rounds for which a list holds
# of a round: what one without a draft counts for, as it shows what a plain pass takes and no more
IDLE_ROUND = 0.25


@dataclass(frozen=True, slots=True)
class PriceList:
    """What nodes cost, and the longest chain and widest tree that can pay."""

    price: tuple[float, ...]
    deepest: int
    widest: int
    free: Budget  # of a draft that costs nothing but its places
    chain: Budget  # the same without branches


class PriceLists:
    """Lists by batch size, pace and nodes of others, for trees of so many nodes and children at most."""

    def __init__(self, nodes: int, width: int) -> None:
        self.nodes, self.width, self.rounds, self._age = nodes, width, 0, 0.0
        self._lists: dict[tuple[int, float, int], PriceList] = {}

    def note_round(self) -> None:
        self.rounds += 1
        self._grow_older(1.0)

    def note_idle(self, rounds: int) -> None:
        """So many rounds without a draft."""
        self.rounds += rounds
        self._grow_older(IDLE_ROUND * rounds)

    def _grow_older(self, rounds: float) -> None:
        self._age += rounds
        if self._age >= REFRESH_ROUNDS:
            self._age = 0.0
            self._lists.clear()

    def of(self, cost: CostModel, batch: int, rate: float, others: int) -> PriceList:
        """For one sequence of a batch whose others draft so many nodes; `rate` is its pace."""
        key = batch, round(rate * 20) / 20, others
        if key not in self._lists:
            price = cost.price(self.nodes, batch - 1, key[1], others)
            depth, width = deepest(price), widest(price, self.width)
            nodes = depth if width == 1 else self.nodes if depth else 0
            free = Budget(nodes, depth, width, price[: nodes + 1], source="free")
            chain = Budget(depth, depth, price=price[: depth + 1], source="free")
            self._lists[key] = PriceList(price, depth, width, free, chain)
        return self._lists[key]
