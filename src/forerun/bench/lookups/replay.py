"""Replays recorded texts with look-ups: the drafters and the controller are real, and time is counted.

On a GPU plain rounds are launched before the last one is read, and a draft is not (forerun.testing.follow_simulator);
on a CPU plain passes run on in one native call (forerun.testing.run_simulator). Decoding alone is counted, without
prompts. Replays flatter: whatever else the host does between two rounds is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from forerun.bench.lookups.record import Recording
from forerun.control.cost import CostModel
from forerun.drafters.base import LookupDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.drafters.suffix.drafter import SuffixDrafter
from forerun.drafters.suffix.successors import READ
from forerun.offers import Form, Menu
from forerun.testing import run_simulator
from forerun.testing.follow_simulator import FollowSimulation, Host
from forerun.testing.lookup_simulator import Text
from forerun.testing.menu_simulator import SimulatedMenu
from forerun.testing.run_simulator import RunSimulation

GAP = 4e-4  # seconds of the host in a round that is read first, on a GPU
DRAFT = 65e-6  # of it for a draft of either drafter: `forerun.bench.lookups cost`
HEAD_LEVEL, HEAD_RATE = (
    1.15e-4,
    0.62,
)  # seconds of a level of a head, and how often its likeliest token is right
HEAD_FORMS = (Form(5, 5, 1), Form(15, 6, 5), Form(31, 6, 8))

GPUS = {  # seconds of a pass by rows, on one H200
    "1.5B": CostModel({1: 1.45e-3, 8: 1.5e-3, 32: 1.6e-3, 64: 1.75e-3}),
    "8B": CostModel({1: 4.1e-3, 8: 4.15e-3, 32: 4.46e-3, 64: 4.85e-3}),
}
CPUS = {"arm": run_simulator.ARM, "x86": run_simulator.X86, "x86-dearer": run_simulator.DEARER}


class Speed(NamedTuple):
    """Of one task, or of all."""

    times_plain: float
    tokens_per_round: float


@dataclass(slots=True)
class _Sums:
    seconds: float = 0.0
    plain: float = 0.0
    tokens: int = 0
    rounds: int = 0

    def add(self, seconds: float, plain: float, tokens: int, rounds: int) -> None:
        self.seconds, self.plain = self.seconds + seconds, self.plain + plain
        self.tokens, self.rounds = self.tokens + tokens, self.rounds + rounds


def gpu_with(pass_seconds: float) -> CostModel:
    """A GPU on which a plain pass takes so long, and more rows as much more as at 8B."""
    known = GPUS["8B"].seconds
    return CostModel({rows: pass_seconds * seconds / known[1] for rows, seconds in known.items()})


def make_drafter(name: str, recording: Recording, table: int) -> LookupDrafter:
    """As it is built on a GPU, with successors of the first so many tokens, or on a CPU, with none."""
    if name == "ngram":
        return NgramDrafter()
    return SuffixDrafter(successors=recording.successors(table))


def replay_gpu(
    recording: Recording, name: str, cost: CostModel, *, in_a_row: bool, head: bool = False,
    draft: float = DRAFT, table: int = READ,
) -> dict[str, Speed]:  # fmt: skip
    """By task: with a drafter and a controller for every text, or one for all; `head`: beside a head."""
    host, sums = Host(GAP, draft), dict[str, _Sums]()
    texts: list[Text] = [(one.prompt, one.answer) for one in recording.texts]
    menu = SimulatedMenu(HEAD_FORMS, HEAD_LEVEL, claimed_rate=HEAD_RATE) if head else None
    one_for_all = make_drafter(name, recording, table) if in_a_row else None

    def simulate(some: Sequence[Text], lookup: LookupDrafter | None, heads: Menu | None) -> FollowSimulation:
        return FollowSimulation(
            cost, heads, some, host, lambda text, at: HEAD_RATE, looks_up=lookup is not None, lookup=lookup
        )

    shared = simulate(texts, one_for_all, menu) if in_a_row else None
    for one, text in zip(recording.texts, texts, strict=True):
        alone = shared or simulate([text], make_drafter(name, recording, table), menu)
        seconds, rounds = alone.write()
        plain, _ = simulate([text], None, None).write()
        sums.setdefault(one.task, _Sums()).add(seconds, plain, len(one.answer), rounds)
    return _speeds(sums)


def replay_cpu(recording: Recording, name: str, cost: CostModel, *, in_a_row: bool) -> dict[str, Speed]:
    host, sums = run_simulator.Host(), dict[str, _Sums]()

    def make() -> RunSimulation:
        return RunSimulation(cost, host, {}, drafter=make_drafter(name, recording, table=0))

    simulation = make()
    for one in recording.texts:
        simulation = simulation if in_a_row else make()
        group = simulation.write((one.prompt, one.answer))
        sums.setdefault(one.task, _Sums()).add(group.seconds, group.plain, group.tokens, group.rounds)
    return _speeds(sums)


def _speeds(sums: Mapping[str, _Sums]) -> dict[str, Speed]:
    total = _Sums()
    for one in sums.values():
        total.add(one.seconds, one.plain, one.tokens, one.rounds)
    every = {**sums, "all": total}
    return {task: Speed(one.plain / one.seconds, one.tokens / one.rounds) for task, one in every.items()}


def worlds(
    *, head: bool = False, passes: Sequence[float] = (), draft: float = DRAFT, table: int = READ
) -> dict[str, Callable[..., dict[str, Speed]]]:
    """Every machine whose times are known: what replays a recording with a drafter there, by `in_a_row`.

    `passes`: and GPUs with plain passes of so many seconds.
    """
    known = GPUS | {f"{1e3 * one:g} ms": gpu_with(one) for one in passes}
    on_gpu = partial(replay_gpu, head=head, draft=draft, table=table)
    gpus: dict[str, Callable[..., dict[str, Speed]]]
    gpus = {f"{size} on a GPU": partial(on_gpu, cost=cost) for size, cost in known.items()}
    cpus = {f"{kind} CPU": partial(replay_cpu, cost=cost) for kind, cost in CPUS.items()}
    return gpus if head else {**gpus, **cpus}
