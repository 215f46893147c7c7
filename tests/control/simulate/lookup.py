"""Simulate look-ups for a batch on a GPU: real drafters and a real controller over known texts, with time counted.

    LookupSimulation(H200, HostSeconds(), NgramDrafter(), texts, batch=32).run(1000).worst_window()

The device and the host have clocks of their own. As in forerun.engine.engine, the next plain pass is launched before
the last one is read where the controller says that it is plain, which hides the host's work; a round that drafts waits
for the host. Whoever has written a text is followed by the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.tree import committed_tokens
from forerun.core.types import Offer, PlainSeq, Round, RoundPlan, Scores, Seq, TreeBatch, lone_roots
from forerun.drafters.base import LookupDrafter
from tests.control.simulate.history import History, KnownTexts, SimulatedRound, Text

H200 = CostModel(  # an 8B model in bf16: seconds by rows
    {1: 4.4e-3, 8: 4.5e-3, 32: 4.9e-3, 64: 5.3e-3, 96: 6.2e-3, 128: 7.2e-3, 192: 9.5e-3, 256: 12.3e-3, 1024: 48e-3}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostSeconds:
    """What the host takes: for every round, for one that drafts on top of that, and for look-ups."""

    round: float = 1e-4
    sequence: float = 25e-6
    drafted_round: float = 5e-4
    drafted_sequence: float = 6e-5
    look_up: float = 3e-5
    token: float = 2.5e-7  # that a look-up has to read first

    def plain(self, batch: int) -> float:
        return self.round + batch * self.sequence

    def drafted(self, batch: int) -> float:
        return self.drafted_round + batch * self.drafted_sequence


class LookupSimulation:
    """One controller, one look-up drafter, and a batch that is always full."""

    def __init__(
        self,
        cost: CostModel,
        host: HostSeconds,
        drafter: LookupDrafter,
        texts: Sequence[Text],
        batch: int,
        *,
        gated: bool = True,
        launches_ahead: bool = True,
    ) -> None:
        """`gated`: the controller knows that the drafter makes look-ups; else every sequence is always asked."""
        self.cost, self.host, self.drafter, self.texts = cost, host, drafter, KnownTexts(texts)
        looks_up = lambda seq: gated  # noqa: E731
        self.controller = AdaptiveController(CostModel(cost.seconds), 60, 10, self._offer, looks_up, launches_ahead)
        self.launches_ahead = launches_ahead
        self.look_ups, self.history = 0, History()
        self._under_way: float | None = None  # when the pass of the next round ends, where it follows
        self._now = self._free_at = 0.0
        self._looking, self._read = 0.0, dict[int, int]()
        halves = [len(texts[i % len(texts)][1]) // 2 for i in range(batch)]
        self.seqs = [self.texts.start(skip=7 * i % half) for i, half in enumerate(halves)]

    def run(self, rounds: int) -> History:
        for _ in range(rounds):
            self._step()
        return self.history

    def plain_seconds(self, batch: int) -> float:
        """Of a plain round in a row of them."""
        once, host = self.cost.pass_seconds(batch), self.host.plain(batch)
        return max(once, host) if self.launches_ahead else once + host

    def _step(self) -> None:
        seqs, batch, started, self._looking = self.seqs, len(self.seqs), self._now, 0.0
        end, followed = self._under_way, self._under_way is not None
        trees = lone_roots(seqs) if followed else self.drafter.propose(seqs, self.controller.plan(seqs))
        drafted, looking = trees.nodes - batch, self._looking
        if end is None:
            self._now += looking + 0.4 * self.host.plain(batch)
            self._now += self.host.drafted(batch) if drafted else 0.0
            end = self._launch(trees.nodes)
        self._follow_up(trees)
        self._now = max(self._now, end) + 0.6 * self.host.plain(batch)
        spent, verdict = self._now - started, self.texts.verdict(seqs, trees)
        once = min(self.cost.pass_seconds(trees.nodes), spent - looking)
        seconds = {"draft": self._looking, "pass": once, "host": max(0.0, spent - self._looking - once)}
        self.drafter.observe(seqs, trees, Scores(None), verdict)
        nodes = tuple(size - 1 for size in trees.sizes())
        depths = tuple(shape.deepest for shape in trees.topology())
        accepted = tuple(len(path) for path in verdict.to_host()[0])
        for seq, tokens in zip(seqs, committed_tokens(trees, verdict), strict=True):
            seq.tokens += tokens
        self.controller.observe(Round(tuple(seqs), nodes, depths, accepted, seconds, followed=followed))
        made = SimulatedRound(batch, drafted, sum(accepted) + batch, spent, self.plain_seconds(batch))
        self.history.rounds.append(made)
        self.seqs = [self._follow(seq) for seq in seqs]

    def _follow_up(self, trees: TreeBatch) -> None:
        """Launch the next round, if that is known to be plain, before this one is read."""
        self._under_way, looking = None, self._looking
        follow, plain = self.controller.follow, RoundPlan("plain")
        if self.launches_ahead and trees.is_plain() and follow(self.seqs, plain, bool):
            self._now += self._looking - looking + 0.4 * self.host.plain(len(trees))
            self._under_way = self._launch(len(trees))

    def _launch(self, rows: int) -> float:
        """When the pass ends."""
        self._free_at = max(self._now, self._free_at) + self.cost.pass_seconds(rows)
        return self._free_at

    def _offer(self, seq: Seq) -> Offer:
        self.look_ups += 1
        self._looking += self.host.look_up + self.host.token * (len(seq.tokens) - self._read.get(seq.id, 0))
        self._read[seq.id] = len(seq.tokens)
        return self.drafter.offer(seq)

    def _follow(self, seq: PlainSeq) -> PlainSeq:
        """The same sequence, or the next one where it has ended."""
        if len(seq.tokens) < seq.max_length:
            return seq
        self.drafter.forget(seq)
        self.controller.forget(seq)
        self.texts.end(seq)
        self._read.pop(seq.id, None)
        return self.texts.start()
