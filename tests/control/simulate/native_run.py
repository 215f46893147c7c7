"""Simulate look-ups for one text at a time on a CPU: real drafters, controller and texts, with time counted.

    RunSimulation(X86, Host(), texts).run().speed()

As in forerun.models.native.pass_rows, a native call goes on with plain passes behind the one it was asked for, until a
look-up could find something that is worth drafting. Rounds that find their pass already run take the host little.
Texts are grouped by name, and each group's speed is given over plain decoding, which runs as many passes in every call.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import QUICK, CostModel
from forerun.core.tree import committed_tokens
from forerun.core.types import Budget, PlainSeq, Round, Scores
from forerun.drafters.base import LookupDrafter
from forerun.drafters.lookup.ngram import NgramDrafter
from tests.control.simulate.history import KnownTexts, Text

MOST = 7  # passes behind the first of a call
X86 = CostModel({1: 4.4e-3, 2: 4.7e-3, 3: 4.9e-3, 4: 5e-3, 8: 6.2e-3, 16: 11e-3, 24: 16e-3, 32: 21e-3, 64: 41e-3})
ARM = CostModel({1: 5.1e-3, 2: 6.7e-3, 4: 9.9e-3, 8: 16.3e-3, 16: 31e-3, 24: 46e-3, 32: 62e-3, 64: 120e-3})
# the default model on x86 as its drafted rounds were, and not as passes were measured by themselves
DEARER = CostModel({1: 4.4e-3, 2: 6e-3, 3: 6.5e-3, 4: 7e-3, 8: 9.3e-3, 16: 15.5e-3, 24: 22e-3, 32: 29e-3, 64: 55e-3})


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds of Python: of a plain round that makes a call, of one whose pass is run already, of one that drafts."""

    plain: float = 2e-4
    known: float = 5e-5
    drafted: float = 5e-4

    def plain_text(self, tokens: int) -> float:
        """Of so many tokens without a draft."""
        calls = calls_of(tokens)
        return calls * self.plain + (tokens - calls) * self.known


@dataclass(slots=True)
class Group:
    """Texts of one name: what they took, what plain decoding would take, and what was drafted for them."""

    seconds: float = 0.0
    plain: float = 0.0
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0  # nodes
    accepted: int = 0
    in_vain: int = 0  # passes that were run ahead and not asked for

    @property
    def speed(self) -> float:
        return self.plain / self.seconds


@dataclass(slots=True)
class RunHistory:
    """What a run of the simulation took, by group."""

    groups: dict[str, Group] = field(default_factory=dict)

    def speed(self) -> float:
        """Over all texts, times plain decoding."""
        found = self.groups.values()
        return sum(group.plain for group in found) / sum(group.seconds for group in found)

    def least_speed(self) -> float:
        """Of the slowest group."""
        return min(group.speed for group in self.groups.values())


class RunSimulation:
    """One controller and one look-up drafter, one text behind the other."""

    def __init__(
        self,
        cost: CostModel,
        host: Host,
        texts: Mapping[str, Sequence[Text]],
        *,
        told: CostModel | None = None,
        noise: float = 0.0,
        seed: int = 1,
        pause: float = 0.0,
        drafter: LookupDrafter | None = None,
    ) -> None:
        """`told`: the curve that was measured at the start, if it is not the true one; `noise` of every pass.

        `pause`: what the first pass of a call, which comes behind Python, takes longer, in plain passes: weights that
        the last cache has lost meanwhile are read again.
        """
        self.cost, self.host, self.texts, self.noise = cost, host, texts, noise
        self.pause = pause * cost.pass_seconds(1)
        self.drafter = NgramDrafter() if drafter is None else drafter
        self.history, self._rng, self.known = RunHistory(), random.Random(seed), KnownTexts()
        told = told or cost
        curve = CostModel({rows: told.pass_seconds(rows) for rows in QUICK})
        self.controller = AdaptiveController(curve, 60, 10, self.drafter.offer, lambda seq: True)
        self._to_come: list[float] = []  # seconds of passes that were run for rounds to come

    def run(self) -> RunHistory:
        for name, texts in self.texts.items():
            for prompt, answer in texts:
                self._write(self.history.groups.setdefault(name, Group()), prompt, answer)
        return self.history

    def write(self, text: Text) -> Group:
        """One text by itself: what it took."""
        group = Group()
        self._write(group, *text)
        return group

    def _write(self, group: Group, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """The first token comes with the prompt."""
        self._to_come, seq = [], self.known.start((prompt, answer), skip=1)
        while len(seq.tokens) < seq.max_length:
            self._round(group, seq, [*prompt, *answer])
        written = len(answer) - 1
        group.tokens += written
        group.plain += written * self._pass(1, exact=True) + self.host.plain_text(written)
        group.plain += calls_of(written) * self.pause
        self.known.end(seq)
        self.drafter.forget(seq)
        self.controller.forget(seq)

    def _round(self, group: Group, seq: PlainSeq, whole: list[int]) -> None:
        at = len(seq.tokens)
        trees = self.drafter.propose([seq], [_cut(self.controller.plan([seq])[0], len(whole) - at - 1)])
        (shape,), nodes = trees.topology(), trees.nodes - 1
        verdict, seconds = self.known.verdict([seq], trees), {"draft": 0.0, "verdict": 0.0}
        path = verdict.to_host()[0][0]
        if self._to_come and not nodes:
            seconds |= {"pass": self._to_come.pop(), "host": self.host.known}
        else:
            group.in_vain += len(self._to_come)
            own = self.host.drafted if nodes else self.host.plain
            seconds |= {"pass": self._pass(1 + nodes) + self.pause, "host": own + sum(self._to_come)}
            runs = self._runs_on(whole, at + len(path) + 1) if shape.is_chain else 0
            self._to_come = [self._pass(1) for _ in range(runs)]
        self.drafter.observe([seq], trees, Scores(None), verdict)
        seq.tokens += committed_tokens(trees, verdict)[0]
        counts = (nodes,), (shape.deepest,), (len(path),)
        self.controller.observe(Round((seq,), *counts, seconds, ahead=len(self._to_come)))
        group.rounds, group.drafted = group.rounds + 1, group.drafted + nodes
        group.accepted, group.seconds = group.accepted + len(path), group.seconds + sum(seconds.values())

    def _runs_on(self, whole: list[int], length: int) -> int:
        """How many plain passes are run behind so many known tokens."""
        match, count = self.drafter.needs.match_length, 0
        while match is not None and count < MOST and length + count < len(whole):
            if match and _came_before(whole, length + count, match):
                break
            count += 1
        return count

    def _pass(self, rows: int, exact: bool = False) -> float:
        """Seconds of a pass; `exact`: on average."""
        more = (2.0 / 3.14159) ** 0.5 if exact else abs(self._rng.gauss(0.0, 1.0))
        return self.cost.pass_seconds(rows) * (1.0 + self.noise * more)


def calls_of(tokens: int) -> int:
    """Native calls that plain decoding makes for so many tokens."""
    return -(-tokens // (1 + MOST))


def _cut(budget: Budget, room: int) -> Budget:
    """As the engine does: no more than the text can still take."""
    if budget.depth <= room or not budget.nodes:
        return budget
    return replace(budget, nodes=budget.nodes if room > 0 else 0, depth=max(0, room))


def _came_before(tokens: list[int], length: int, match: int) -> bool:
    """Did the last `match` of the first `length` tokens come before, to end before the last one?"""
    wanted = tokens[length - match : length]
    return any(tokens[at : at + match] == wanted for at in range(length - match))
