"""Recorded decisions of the adaptive controller in its simulator: what it planned, round by round.

python -m tests.control.decisions        # writes decisions.json anew: only when decisions are meant to change
"""

from __future__ import annotations

import hashlib
import json
from itertools import chain
from pathlib import Path

from forerun.control.cost import CostModel
from forerun.core.types import Budget
from tests.control.simulate.predictable import Make, Simulation, TextKind

FILE = Path(__file__).with_name("decisions.json")
COSTS = {
    "steep": CostModel({1: 1.0, 2: 2.9, 4: 3.0, 8: 3.4, 16: 6.0}),
    "cpu": CostModel({1: 1.0, 2: 1.33, 4: 1.9, 8: 3.4, 16: 6.0}),
    "gpu": CostModel({1: 1.0, 2: 1.01, 4: 1.02, 8: 1.04, 16: 1.07, 32: 1.12, 64: 1.2}),
}
MAKES = {
    "draft model": Make(0.1, chosen=False, stops=False, start=4.0),
    "medusa": Make(0.1, stops=False),
    "head": Make(0.1),
    "overclaiming head": Make(0.2, claim_power=0.4),
    "n-gram and head": Make(0.1, ngram=True),
    "n-gram and draft model": Make(0.15, chosen=False, stops=False, start=2.0, ngram=True),
    "n-gram": Make(0.0, ngram=True),
}
KINDS = (TextKind(0.75, copied=0.3), TextKind(0.1), TextKind(0.9, copied=0.5), TextKind(0.4, copied=0.1))
ROUNDS = 20  # of each kind


def decided(cost: CostModel, make: Make, batch: int) -> list[str]:
    """One line per round and sequence."""
    simulation = Simulation(cost, make, batch=batch, seed=7)
    lines = []
    for kind in chain(KINDS, KINDS[:2]):
        for _ in range(ROUNDS):
            simulation.write(kind, 1)
            lines += [_line(budget) for budget in simulation.budgets]
    return lines


def _line(budget: Budget) -> str:
    price = "" if budget.price is None else f" {sum(budget.price):.6f}"
    return f"{budget.source} {budget.nodes} {budget.depth} {budget.width} {budget.level:.6f}{price}"


def digest(lines: list[str]) -> dict[str, object]:
    """The first few decisions, to be read by a person, and a hash of all."""
    return {"first": lines[:12], "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest()}


def decide_all() -> dict[str, dict[str, object]]:
    """Every make on every cost curve, alone and in a batch."""
    return {
        f"{make}, {cost}, batch {batch}": digest(decided(COSTS[cost], MAKES[make], batch))
        for make in MAKES
        for cost in COSTS
        for batch in (1, 3)
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(decide_all(), indent=1) + "\n", encoding="utf-8")
