"""Recorded decisions of the adaptive controller in its simulators: what it planned, round by round.

python -m tests.control.decisions        # writes decisions.json anew: only when decisions are meant to change

Drafters without a menu, on three cost curves, alone and in a batch; menus of captured forms, whose rounds follow each
other or not; a head with look-ups, and look-ups alone, where the next round waits or is launched; look-ups that are
made for samples only; prompts that wait; a batch of several drafters. A plan that was made anew and one that follows
an unread round are told apart, as is a round that is read first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path

from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.types import Budget, Menu, RoundPlan, Seq
from forerun.drafters.lookup.ngram import NgramDrafter
from lab.simulate.speeds import SimulatedMenu
from tests.control.lookup_texts import COPYING, RECORDED
from tests.control.scenarios import BOTH, HEAD, MIXED, NGRAM, NONE, SMALL, Texts, write
from tests.control.simulate.follow import FollowSimulation, Host
from tests.control.simulate.history import Text
from tests.control.simulate.lookup import H200, HostSeconds, LookupSimulation
from tests.control.simulate.menu import MenuSimulation, Trace
from tests.control.simulate.predictable import Make, Simulation, TextKind
from tests.control.test_forms import FLAT, FORMS, HOST, LEAPS, MENU, STEEP, TRACES
from tests.simulate.load import SimulatedServer, asks

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
WIDE = {"flat": FLAT, "leaps": LEAPS, "steep": STEEP}  # milliseconds of passes of a menu's batches
TEXT_SECONDS = CostModel({1: 1.56e-3, 16: 1.8e-3, 32: 1.9e-3, 64: 2.4e-3, 128: 3.2e-3})  # of a 1.5B on an H200
TEXT_MENU = SimulatedMenu(FORMS, 1.3e-4)
BESIDE: dict[str, list[Text]] = {"recorded": RECORDED, "copied": COPYING}


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


class Watched(AdaptiveController):
    """Notes what it decides: the plan of every round, and of what follows a round that is not read yet."""

    lines: list[str]

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        budgets = super().plan(seqs)
        self._note("plan", [f"{_line(one)} repeats {one.repeats}" for one in budgets])
        return budgets

    def follow(self, seqs: Sequence[Seq], last: RoundPlan, switches: Callable[[], bool]) -> RoundPlan | None:
        found = super().follow(seqs, last, switches)
        form = None if found is None else found.form
        shape = "" if form is None else f" {form.nodes} {form.depth} {form.width}"
        self._note("follow", ["read first" if found is None else f"{found.kind}{shape} repeats {found.repeats}"])
        return found

    def _note(self, kind: str, some: Iterable[str]) -> None:
        """Sequences that are planned alike share a line."""
        self.lines += [f"{kind} {len([*same])} x {line}" for line, same in groupby(some)]


def watch(controller: AdaptiveController) -> list[str]:
    """What a controller that has decided nothing yet is going to decide."""
    controller.__class__, lines = Watched, list[str]()
    assert isinstance(controller, Watched)
    controller.lines = lines
    return lines


def menu(cost: str, batch: int, gap: float) -> list[str]:
    """Forms for sequences of all traces, which come and go; `gap` in plain rounds, 0 = no round follows another."""
    traces: list[Trace] = [*TRACES.values()] * (batch // len(TRACES)) or [lambda now: TRACES["every 60"](now + 30)]
    own = gap * WIDE[cost].pass_seconds(batch)
    simulation = MenuSimulation(WIDE[cost], MENU, traces, lifetime=70, host=HOST, gap=own, seed=7)
    lines = watch(simulation.controller)
    simulation.run(150)
    return lines


def beside(forms: Menu | None, texts: str) -> list[str]:
    """Look-ups of one text beside a head, or alone where there is no menu."""
    rate = lambda text, at: (0.2, 0.6, 0.8)[text % 3]  # noqa: E731
    simulation = FollowSimulation(TEXT_SECONDS, forms, BESIDE[texts], Host(8e-4), rate, seed=7)
    lines = watch(simulation.controller)
    simulation.run(300)
    return lines


def samples(batch: int) -> list[str]:
    """Look-ups for many, which take the host long."""
    texts = [*RECORDED, *COPYING]
    simulation = LookupSimulation(H200, HostSeconds(), NgramDrafter(), texts, batch)
    lines = watch(simulation.controller)
    simulation.run(250)
    return lines


def waiting(clients: int) -> list[str]:
    """Prompts wait while others write, through the real engine."""
    server = SimulatedServer(True)
    assert isinstance(server.engine.controller, AdaptiveController)
    lines = watch(server.engine.controller)
    server.serve(asks(2 * clients, seed=7), clients)
    server.serve(asks(4, seed=8), 1)
    return lines


def company(names: Sequence[str], batch: int) -> list[str]:
    """Requests of several drafters, through the real engine: in turn, or all in one batch."""
    lines = list[str]()

    class Noted(Watched):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            self.lines = lines

    write(Texts.drawn(6 if batch == 1 else batch, MIXED, 7), names, SMALL, Noted, 7, batch)
    return lines


def digest(lines: list[str]) -> dict[str, object]:
    """The first few decisions, to be read by a person, and a hash of all."""
    return {"first": lines[:12], "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest()}


CASES: dict[str, Callable[[], list[str]]] = {
    **{
        f"{make}, {cost}, batch {batch}": partial(decided, COSTS[cost], MAKES[make], batch)
        for make in MAKES
        for cost in COSTS
        for batch in (1, 3)
    },
    **{
        f"menu, {cost}, batch {batch}, gap {gap}": partial(menu, cost, batch, gap)
        for cost in WIDE
        for batch in (1, 8, 32)
        for gap in (0.0, 0.2)
    },
    **{f"menu and look-ups, {texts}": partial(beside, TEXT_MENU, texts) for texts in BESIDE},
    **{f"look-ups alone, {texts}": partial(beside, None, texts) for texts in BESIDE},
    **{f"look-ups, batch {batch}": partial(samples, batch) for batch in (2, 8, 32)},
    **{f"waiting, {clients} clients": partial(waiting, clients) for clients in (8, 24)},
    "drafters in turn": partial(company, (BOTH, NGRAM, HEAD, NONE), 1),
    "drafters in one batch": partial(company, (BOTH, NGRAM, HEAD, NONE), 8),
}


if __name__ == "__main__":
    made = {name: digest(decide()) for name, decide in CASES.items()}
    FILE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
