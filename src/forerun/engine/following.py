"""The next round, started before the last one was read: the device then never waits for the host.

Where a device finds the next tokens of greedy and sampled texts itself, the round behind can be launched while the
last pass is still running; the host reads that one meanwhile. Of a plain round the next roots follow
(`Greedy.next_roots`); of trees that were grown on the device, what grew them goes on from there (`TreeBatch.grower`).
Sequences that have joined, and chunks of prompts, are in the same pass. Sequences turn out to have ended: their trees
in the round that follows are dropped. Everything a pass writes lies behind what is committed, so that a round that
follows can be forgotten at any time. The controller's plan stands for as many rounds as it says (`Budget.repeats`), and
a controller that reconsiders is asked before each of them. Nobody is asked about texts that are never drafted for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeGuard

from forerun.control.base import Controller, Reconsiders
from forerun.engine.pending import Launched, Pending
from forerun.engine.prompt_rows import prompt_share
from forerun.engine.sequence import SequenceState, traits_of
from forerun.engine.starting import device_decides, in_padding
from forerun.types import TreeBatch

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
    if known is None or not (
        known.next_roots is not None or (last.repeats > 0 and last.trees.grower is not None)
    ):
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
    starters, readers = list[SequenceState](), list[SequenceState]()
    if known.next_roots is None:
        trees = _grown(engine, last, going)
        if share and trees is not None:
            readers = scheduler.next_readers(share)
            starters, trees = in_padding(engine, others, trees, readers, share, known.sampled)
    elif not _may_stay_plain(engine, last, going):
        return None
    else:
        readers = scheduler.next_readers(share) if share else []
        starters = scheduler.starters(readers, len(seqs) + len(readers), share)
        if starters and not device_decides(engine, [*others, *starters], known.sampled):
            starters = []
        trees = known.next_roots([*going, *[(seq, -1) for seq in starters]])
    if trees is None:
        return None
    engine.hold([*both, *readers])
    scheduler.begin(readers)
    scheduler.start(starters)
    seqs = [*seqs, *starters]
    scores = engine.score(seqs, trees, readers, share)
    pending, repeats = Pending([*seqs, *readers]), last.repeats - 1
    return Launched(pending, seqs, readers, trees, scores, last.clock, repeats, last.may_draft)


def _grown(engine: Engine, last: Launched, going: Going) -> TreeBatch | None:
    """Trees of the same form, where the plan holds and there is room for them."""
    seqs, form, grower = [seq for seq, _ in going], last.trees.form, last.trees.grower
    if form is None or grower is None:
        return None
    if not _goes_on(engine, [seq for seq in seqs if seq.request.budget is None]):
        return None
    if not engine.target.make_room(seqs, [form.nodes + form.depth + 1] * len(seqs)):
        return None
    return grower.follow(going, last.trees, last.scores.hidden)


def _may_stay_plain(engine: Engine, last: Launched, going: Going) -> bool:
    """Is the next round known to be plain, and is there room for it?"""
    seqs = [seq for seq, _ in going]
    if not _stays_plain(engine, last, seqs):
        return False
    return engine.target.make_room(seqs, [2 if tree >= 0 else 1 for _, tree in going])


def _stays_plain(engine: Engine, last: Launched, seqs: Sequence[SequenceState]) -> bool:
    """Is the round behind a plain one plain too, as far as that is known before this one is read?"""
    if engine.drafters.never_draft(seqs):
        return True
    if any([one.has_budget for one in traits_of(seqs)]):  # noqa: C419
        return False
    if _reconsiders(engine.controller):
        last.clock.lap("host")
        stays = engine.controller.stays_plain(seqs)
        last.clock.lap("draft")  # look-ups are made beside the device
        return stays
    return not last.may_draft and last.repeats > 0


def _going(last: Launched, running: Sequence[SequenceState]) -> Going:
    """All that run but those whom one more token ends."""
    if last.seqs == running:  # the usual case
        return [(seq, b) for b, seq in enumerate(running) if len(seq.tokens) + 1 < seq.max_length]
    places = {seq.id: tree for tree, seq in enumerate(last.seqs)}
    going = [(seq, places.get(seq.id, -1)) for seq in running]
    return [(seq, tree) for seq, tree in going if tree < 0 or len(seq.tokens) + 1 < seq.max_length]


def _goes_on(engine: Engine, planned: Sequence[SequenceState]) -> bool:
    """Does the plan of these hold for another round? A request's own budget always does."""
    controller = engine.controller
    return not planned or not _reconsiders(controller) or controller.goes_on(planned)


def _reconsiders(controller: Controller) -> TypeGuard[Reconsiders]:
    return _kind_reconsiders(type(controller))


@cache
def _kind_reconsiders(kind: type) -> bool:
    """Asked once: to compare a class with a protocol takes as long as a look-up."""
    return issubclass(kind, Reconsiders)
