"""Rounds over recorded texts: real acceptance, a GPU's times, and a fixed form or the real controller.

As in forerun.engine.engine the next round is launched before the last one is read, where the controller's plan
holds, and what follows the end of all texts is dropped; a round that is read first shows the host's work. Prompts are
read one by one, in time of their own. The head drafts alone: look-ups are left out.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.bench.forms.record import RecordedText
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.drafters.eagle.cuda.draft_plan import bucket_of
from forerun.drafters.eagle.cuda.menu import FORMS, DraftMenu, forms_for
from forerun.models.cuda.plan import ROW_SIZES, round_up
from forerun.offers import Form, Offer
from forerun.types import PlainSeq, Round

# ms of a pass of an 8B by rows on one H200: docs/benchmarks.md
PASSES = {1: 4.09, 2: 4.1, 4: 4.12, 8: 4.15, 16: 4.26, 32: 4.46, 48: 4.65, 64: 4.85, 96: 5.27, 128: 5.68, 160: 6.86,
          192: 7.4, 224: 8.46, 256: 8.72, 384: 12.2, 512: 15.6, 768: 22.5, 1024: 29.5}  # fmt: skip
BATCHES = (1, 8, 32, 64, 128)
LEVELS = (0.115, 0.14, 0.2, 0.3, 0.5)  # ms of a level of a chain by BATCHES
WIDER = 0.3  # of that, more for ten children
DRAFTED = (0.2, 0.4, 0.5, 0.7, 1.2)  # ms of the host's work that shows in a round with drafts
PLAIN = (0.06, 0.1, 0.2, 0.5, 0.8)  # and without
READ_FIRST = 0.5  # ms more of a round with drafts, where the last one is read before it starts
PROMPT, PROMPT_ROW = 2.5, 1 / 38  # ms
MOST_NODES, MOST_WIDTH = 127, 10  # the controller may have any form of the menu


def pass_seconds(rows: int) -> float:
    return PASSES[round_up(rows, ROW_SIZES)] * 1e-3


def draft_seconds(form: Form, batch: int) -> float:
    level = np.interp(bucket_of(batch), BATCHES, LEVELS) * (1.0 + WIDER * (form.width - 1) / 9)
    return float(form.depth * level) * 1e-3


def host_seconds(batch: int, drafts: bool) -> float:
    return float(np.interp(batch, BATCHES, DRAFTED if drafts else PLAIN)) * 1e-3


def make_controller(
    rates: Sequence[Sequence[float]], forms: Iterable[Form] | None = None
) -> AdaptiveController:
    """The real one, over the menu of a head with these rates, timed as above; `forms` in place of the menu's own."""
    menu = DraftMenu(rates) if forms is None else _OtherMenu(rates, forms)
    for batch in (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128):
        for form in menu.forms:
            menu.note(batch, form, draft_seconds(form, batch))
    offer, curve = Offer(menu=menu), {rows: ms * 1e-3 for rows, ms in PASSES.items()}
    return AdaptiveController(CostModel(curve), MOST_NODES, MOST_WIDTH, lambda seq: offer, follows=True)


class _OtherMenu(DraftMenu):
    """Forms that are not on the menu, for any batch."""

    def __init__(self, rates: Sequence[Sequence[float]], forms: Iterable[Form]) -> None:
        super().__init__(rates)
        self._forms = tuple(forms)

    @property
    def forms(self) -> tuple[Form, ...]:
        return self._forms

    def seconds(self, form: Form, batch: int) -> float:
        return self.drafting(form, batch)


@dataclass(slots=True)
class Outcome:
    """What a run wrote, and took."""

    tokens: int = 0
    rounds: int = 0  # of single sequences
    seconds: float = 0.0
    forms: Counter[Form | None] = field(default_factory=Counter)
    read_first: int = 0
    dropped: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds


class Simulation:
    """So many sequences at once, one text after the other: with a form for all of them, a controller's, or none."""

    def __init__(
        self,
        texts: Sequence[RecordedText],
        batch: int,
        *,
        form: Form | None = None,
        controller: AdaptiveController | None = None,
        noise: float = 0.0,
        seed: int = 1,
    ) -> None:
        self.texts, self.batch, self.form, self.controller = texts, batch, form, controller
        self.noise, self.rng = noise, random.Random(seed)
        self.outcome, self._next_id = Outcome(), 1
        self._running: list[PlainSeq] = []
        self._text: dict[int, RecordedText] = {}
        self._follows, self._left, self._ended = False, 0, 0  # the last: trees of texts that have ended

    def run(self, order: Iterable[int]) -> Outcome:
        """Write these texts."""
        waiting = list(order)[::-1]
        while waiting or self._running:
            while waiting and len(self._running) < self.batch:
                self._start(self.texts[waiting.pop()])
            self._step()
        return self.outcome

    def _start(self, text: RecordedText) -> None:
        """Read a prompt; the first token comes with it."""
        self.outcome.seconds += (PROMPT + PROMPT_ROW * len(text.prompt)) * 1e-3
        self.outcome.tokens += 1
        if len(text.answer) > 1:
            whole = [*text.prompt, text.answer[0]]
            longest = len(text.prompt) + len(text.answer)
            seq = PlainSeq(self._next_id, whole, len(text.prompt), max_length=longest)
            self._text[seq.id] = text
            self._running.append(seq)
            self._next_id += 1

    def _step(self) -> None:
        seqs, outcome, followed = list(self._running), self.outcome, self._follows
        if not seqs:
            return
        if not followed:
            self._plan(seqs)
        self._left -= 1
        form, count = self.form, len(seqs)
        accepted = [self._accepted(seq) for seq in seqs]
        rows = count if form is None else bucket_of(count + self._ended) * (form.nodes + 1)
        seconds = self._seconds(rows, count, followed)
        going = [seq for seq in seqs if len(seq.tokens) + 1 < seq.max_length]
        self._follows = bool(going) and self._may_follow(going)
        for seq, tokens in zip(seqs, accepted, strict=True):
            text, at = self._text[seq.id], len(seq.tokens) - seq.prompt_length
            seq.tokens += text.answer[at : at + tokens + 1]
        if self.controller is not None:
            sizes = (0, 0) if form is None else (form.nodes, form.depth)
            nodes, depths = ((size,) * count for size in sizes)
            grown = 0 if form is None else rows
            self.controller.observe(
                Round(
                    tuple(seqs), nodes, depths, tuple(accepted), seconds, followed=followed, tree_rows=grown
                )
            )
        outcome.tokens += sum(accepted) + count
        outcome.rounds += count
        outcome.seconds += sum(seconds.values())
        outcome.forms[form] += 1
        outcome.read_first += not followed
        self._end(seqs, going, seconds)

    def _plan(self, seqs: Sequence[PlainSeq]) -> None:
        self._ended = 0
        if self.controller is not None:
            budget = self.controller.plan(seqs)[0]
            self.form = Form(budget.nodes, budget.depth, budget.width) if budget.nodes else None
            self._left = budget.repeats

    def _may_follow(self, going: Sequence[PlainSeq]) -> bool:
        if self.controller is None:
            return True
        if self.form is None:
            return self.controller.stays_plain(going)
        return self._left >= 0 and self.controller.goes_on(going)

    def _accepted(self, seq: PlainSeq) -> int:
        if self.form is None:
            return 0
        place = len(seq.tokens) - seq.prompt_length
        return min(self._text[seq.id].accepted(place, self.form), seq.max_length - len(seq.tokens) - 1)

    def _seconds(self, rows: int, count: int, followed: bool) -> dict[str, float]:
        form = self.form
        drafting = 0.0 if form is None else draft_seconds(form, count + self._ended)
        parts = {"draft": drafting, "pass": pass_seconds(rows), "host": host_seconds(count, form is not None)}
        parts = {name: spent * max(0.7, self.rng.gauss(1.0, self.noise)) for name, spent in parts.items()}
        parts["host"] += 0.0 if followed or form is None else READ_FIRST * 1e-3
        return parts

    def _end(self, seqs: Sequence[PlainSeq], going: Sequence[PlainSeq], seconds: dict[str, float]) -> None:
        """Texts that are written leave; a round that was launched for such texts alone is dropped."""
        ended = [seq for seq in seqs if len(seq.tokens) >= seq.max_length]
        self._running = [seq for seq in self._running if seq not in ended]
        if self.controller is not None:
            for seq in ended:
                self.controller.forget(seq)
        if not self._follows:
            return
        self._ended = sum(seq in ended for seq in going)
        if self._ended == len(going):
            self.outcome.seconds += seconds["draft"] + seconds["pass"]
            self.outcome.dropped += 1
            self._follows = False


def in_turn(texts: Sequence[RecordedText], count: int) -> list[int]:
    """So many texts, again and again, those of a task not one behind the other, as the batch sweep takes them."""
    size = len(texts)
    step = next((n for n in range(round(0.618 * size), size) if math.gcd(n, size) == 1), 1)
    return [i * step % size for i in range(count)]


def fixed_forms(batch: int) -> tuple[Form, ...]:
    """Those of the menu for so many sequences."""
    return tuple(form for form in FORMS if form in forms_for(bucket_of(batch)))
