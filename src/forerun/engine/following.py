"""The next round, started before the last one was read: the device then never waits for the host.

Where a device finds the next tokens of greedy and sampled texts itself, the round behind can be launched while the
last pass is still running; the host reads that one meanwhile. Of a plain round the next roots follow
(`Greedy.next_roots`); of trees that were grown on the device, what grew them goes on from there (`TreeBatch.grower`).
The form may change on the way, to none and back, where the drafter can do that (`SwitchesForms`).
Sequences that have joined, and chunks of prompts, are in the same pass. Sequences turn out to have ended: their trees
in the round that follows are dropped. Everything a pass writes lies behind what is committed, so that a round that
follows can be forgotten at any time. The controller's plan stands for as many rounds as it says (`Budget.repeats`), and
a controller that reconsiders is asked before each of them, and for another plan where it does not hold. What was learnt
from the round under way counts one round later. Nobody is asked about texts that are never drafted for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from forerun.control.base import Controller, Reconsiders
from forerun.engine.pending import Launched, Pending
from forerun.engine.prompt_rows import prompt_share
from forerun.engine.sequence import SequenceState, traits_of
from forerun.engine.starting import device_decides, in_padding
from forerun.types import Budget, TreeBatch

if TYPE_CHECKING:
    from forerun.engine.engine import Engine

log = logging.getLogger(__name__)

Going = list[tuple[SequenceState, int]]  # sequences, and their trees in the last round; -1 = they had none


def follow(engine: Engine, last: Launched) -> Launched | None:
    """`next_round`; where it fails, rounds are read first from then on."""
    try:
        started = engine.stats.now()
        following = next_round(engine, last)
        engine.late_launch.note_launch(engine.stats.now() - started)
        return following
    except Exception as error:
        engine.follows_unread = False
        log.warning("rounds are read before the next one starts, as one failed that was not: %r", error)
        raise


def next_round(engine: Engine, last: Launched) -> Launched | None:
    """Launch the round behind one that was not read; None = it must be read first.

    Whatever interrupts it undoes the last round too: the engine holds both as pending meanwhile.
    """
    known = last.scores.greedy
    if known is None or (known.next_roots is None and last.trees.grower is None):
        return None
    engine.scheduler.start_those_read()  # whose prompts the last pass has completed
    going = _going(last, engine.running)
    seqs, joined = [seq for seq, _ in going], [seq for seq, tree in going if tree < 0]
    others = [*last.seqs, *joined]
    if len(joined) == len(going) or not device_decides(engine, others, known.sampled):
        return None
    both = [*last.pending.seqs, *joined]  # some of these were read in the last pass: they are named twice
    engine.hold(both)
    scheduler = engine.scheduler
    share = prompt_share(scheduler, engine.prompt_rows, engine.controller, len(seqs))
    plan = _next_plan(engine, last, seqs)
    if plan is None:
        return None
    starters, readers = list[SequenceState](), list[SequenceState]()
    trees = _grown(engine, last, going, plan) if plan.drafts else None
    if trees is not None:
        readers = scheduler.next_readers(share) if share else []
        starters, trees = in_padding(engine, others, trees, readers, share, known.sampled)
    elif plan.drafts or not _has_room(engine, last, going, 1):
        return None
    else:
        readers = scheduler.next_readers(share) if share else []
        starters = scheduler.starters(readers, len(seqs) + len(readers), share)
        if starters and not device_decides(engine, [*others, *starters], known.sampled):
            starters = []
        trees = _roots(engine, last, [*going, *[(seq, -1) for seq in starters]])
    if trees is None:
        return None
    engine.hold([*both, *readers])
    scheduler.begin(readers)
    scheduler.start(starters)
    seqs = [*seqs, *starters]
    scores = engine.score(seqs, trees, readers, share)
    pending, may_draft = Pending([*seqs, *readers]), last.may_draft if plan.other is None else plan.drafts
    return Launched(pending, seqs, readers, trees, scores, last.clock, plan.repeats, may_draft)


class Next(NamedTuple):
    """What the next round drafts."""

    drafts: bool
    repeats: int  # further rounds that may start before it is read
    other: Budget | None = None  # None = the form of the last round


def _next_plan(engine: Engine, last: Launched, seqs: Sequence[SequenceState]) -> Next | None:
    """The plan of the next round, if it is known before the last one is read."""
    controller, same = engine.controller, Next(last.trees.form is not None, last.repeats - 1)
    if last.trees.form is None and engine.drafters.never_draft(seqs):
        return same
    planned = seqs
    if any([one.has_budget for one in traits_of(seqs)]):  # noqa: C419
        planned = [seq for seq in seqs if seq.request.budget is None]
    if not _reconsiders(controller) or (same.drafts and not planned):  # a request's own budget always holds
        stands = last.repeats > 0 and (same.drafts or not last.may_draft)
        return same if stands and (same.drafts or len(planned) == len(seqs)) else None
    if same.drafts:
        if last.repeats > 0 and controller.goes_on(planned):
            return same
    elif len(planned) == len(seqs):
        last.clock.lap("host")
        stays = controller.stays_plain(seqs)
        last.clock.lap("draft")  # look-ups are made beside the device
        if stays:
            return same
    if len(planned) < len(seqs) or engine.drafters.switcher(seqs[0]) is None:
        return None
    budget = controller.switches(seqs)
    return None if budget is None else Next(budget.nodes > 0, budget.repeats, budget)


def _grown(engine: Engine, last: Launched, going: Going, plan: Next) -> TreeBatch | None:
    """Trees of the last form, or of another, where there is room for them."""
    form, grower, round_before = last.trees.form, last.trees.grower, (going, last.trees, last.scores.hidden)
    if plan.other is None:
        room = form is not None and _has_room(engine, last, going, form.nodes)
        return grower.follow(*round_before) if grower is not None and room else None
    switcher = engine.drafters.switcher(going[0][0])
    if switcher is None or not _has_room(engine, last, going, 1 + plan.other.nodes):
        return None
    if form is None and last.scores.greedy is not None and last.scores.greedy.hand_on is not None:
        last.scores.greedy.hand_on()
    return switcher.switch(*round_before, plan.other)


def _roots(engine: Engine, last: Launched, going: Going) -> TreeBatch | None:
    """Lone roots, behind others or behind trees."""
    known, switcher = last.scores.greedy, None
    if known is None or known.next_roots is None:
        return None
    if last.trees.form is not None:
        switcher = engine.drafters.switcher(going[0][0])
    if switcher is not None:
        switcher.rest(going, last.trees, last.scores.hidden)
    return known.next_roots(going)


def _has_room(engine: Engine, last: Launched, going: Going, nodes: int) -> bool:
    """For so many nodes of each, behind all that the last round may add."""
    form = last.trees.form
    added = 1 if form is None else form.depth + 1
    rows = [nodes + (added if tree >= 0 else 0) for _, tree in going]
    return engine.target.make_room([seq for seq, _ in going], rows)


def _going(last: Launched, running: Sequence[SequenceState]) -> Going:
    """All that run but those whom one more token ends."""
    if last.seqs == running:  # the usual case
        return [(seq, b) for b, seq in enumerate(running) if len(seq.tokens) + 1 < seq.max_length]
    places = {seq.id: tree for tree, seq in enumerate(last.seqs)}
    going = [(seq, places.get(seq.id, -1)) for seq in running]
    return [(seq, tree) for seq, tree in going if tree < 0 or len(seq.tokens) + 1 < seq.max_length]


def _reconsiders(controller: Controller) -> TypeGuard[Reconsiders]:
    return _kind_reconsiders(type(controller))


@cache
def _kind_reconsiders(kind: type) -> bool:
    """Asked once: to compare a class with a protocol takes as long as a look-up."""
    return issubclass(kind, Reconsiders)
