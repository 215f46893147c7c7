"""A controller that records every round and leaves the decisions to the controller it wraps.

All of them: a question of the engine's that stopped here would make the benchmark measure another product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forerun.bench.measure import Drafts
from forerun.control.base import Controller, Reconsiders, SeesPrompts, WaitingPrompts
from forerun.types import Budget, Round, Seq


class Recorder:
    """Replaces an engine's controller."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self._reconsiders = controller if isinstance(controller, Reconsiders) else None
        self._sees_prompts = controller if isinstance(controller, SeesPrompts) else None
        self.passes: list[Mapping[str, float]] = []
        self._drafts: dict[int, list[tuple[int, int, int]]] = {}

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        return self.controller.plan(seqs)

    def goes_on(self, seqs: Sequence[Seq]) -> bool:
        return self._reconsiders is None or self._reconsiders.goes_on(seqs)

    def stays_plain(self, seqs: Sequence[Seq]) -> bool:
        return self._reconsiders is not None and self._reconsiders.stays_plain(seqs)

    def switches(self, seqs: Sequence[Seq]) -> Budget | None:
        return None if self._reconsiders is None else self._reconsiders.switches(seqs)

    def note_waiting(self, prompts: WaitingPrompts) -> None:
        if self._sees_prompts is not None:
            self._sees_prompts.note_waiting(prompts)

    def observe(self, outcome: Round) -> None:
        self.controller.observe(outcome)
        self.passes.append(dict(outcome.seconds))
        rows = zip(outcome.seqs, outcome.drafted, outcome.depths, outcome.accepted, strict=True)
        for seq, drafted, depth, accepted in rows:
            self._drafts.setdefault(seq.id, []).append((drafted, depth, accepted))

    def forget(self, seq: Seq) -> None:
        self.controller.forget(seq)

    def take(self) -> tuple[list[Mapping[str, float]], list[Drafts]]:
        """What happened since the last call: the seconds of each round, and each sequence's rounds in order."""
        passes, drafts = self.passes, [tuple(rounds) for _, rounds in sorted(self._drafts.items())]
        self.passes, self._drafts = [], {}
        return passes, drafts
