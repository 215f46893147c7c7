"""The next round, started before the last one was read: the device then never waits for the host.

Where trees were grown on a device, the device itself decides what is accepted of greedy and sampled texts, and what
grew the trees can go on from there (`TreeBatch.grower`). So the next draft and the pass over it are launched while the
last pass is still running; the host reads that one meanwhile. Sequences turn out to have ended: their trees in the
round that follows are dropped. Everything a pass writes lies behind what is committed, so that a round that follows can
be forgotten at any time. The controller's plan stands for as many rounds as it says (`Budget.repeats`), and a
controller that reconsiders is asked before each of them.

Plain passes the target itself launches one behind the other (forerun.models.cuda.plain_rounds); where a look-up may
draft in the next round, the controller says before each whether to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeGuard

from forerun.control.base import Controller, Reconsiders
from forerun.engine.pending import Launched, Pending
from forerun.engine.prompt_rows import prompt_share
from forerun.engine.sequence import SequenceState
from forerun.verify.warp import is_plain_greedy

if TYPE_CHECKING:
    from forerun.engine.engine import Engine

log = logging.getLogger(__name__)

Going = list[tuple[SequenceState, int]]  # sequences, and their trees in the last round; -1 = they had none


def follow(engine: Engine, last: Launched) -> Launched | None:
    """`next_round`; where it fails, rounds are read first from then on."""
    try:
        return next_round(engine, last)
    except Exception as error:
        engine.follows_unread = False
        log.warning("rounds are read before the next one starts, as one failed that was not: %r", error)
        raise


def next_round(engine: Engine, last: Launched) -> Launched | None:
    """Launch the round behind one that was not read; None = it must be read first.

    Whatever interrupts it undoes the last round too: the engine holds both as pending meanwhile.
    """
    trees, form = last.trees, last.trees.form
    if last.scores.greedy is not None and last.scores.greedy.next_is_plain is not None:
        _tell_plain(engine, last, last.scores.greedy.next_is_plain)
        return None
    if last.repeats <= 0 or form is None or trees.grower is None or last.scores.greedy is None:
        return None
    engine.scheduler.start_those_read()  # whose prompts the last pass has completed
    going = _going(last, engine.running)
    seqs = [seq for seq, _ in going]
    if not any(tree >= 0 for _, tree in going) or not _may_follow(
        engine, [*last.seqs, *seqs], last.scores.greedy.sampled
    ):
        return None
    both = [*last.pending.seqs, *(seq for seq, tree in going if tree < 0)]
    engine.hold(both)
    share = prompt_share(engine.scheduler, engine.prompt_rows, engine.controller, len(seqs))
    if not _goes_on(engine, [seq for seq in seqs if seq.request.budget is None]):
        return None
    rows = form.nodes + form.depth + 1
    grown = None
    if engine.target.make_room(seqs, [rows] * len(seqs)):
        grown = trees.grower.follow(going, trees, last.scores.hidden)
    if grown is None:
        return None
    readers = engine.scheduler.next_readers(share) if share else []
    engine.hold([*both, *readers])
    engine.scheduler.begin(readers)
    scores = engine.score(seqs, grown, readers, share)
    return Launched(Pending([*seqs, *readers]), seqs, readers, grown, scores, last.clock, last.repeats - 1)


def _tell_plain(engine: Engine, last: Launched, tell: Callable[[bool], None]) -> None:
    """Will the round behind a plain one be plain too, as far as that is known before this one is read?"""
    assert last.scores.greedy is not None
    controller, seqs = engine.controller, last.seqs
    if not _reconsiders(controller) or any([seq.request.budget is not None for seq in seqs]):  # noqa: C419
        return
    if not _may_follow(engine, seqs, last.scores.greedy.sampled):
        return
    engine.hold(last.pending.seqs)
    plain = controller.stays_plain(seqs)
    if plain is not None:
        tell(plain)


def _going(last: Launched, running: Sequence[SequenceState]) -> Going:
    """All that run but those whom one more token ends."""
    places = {seq.id: tree for tree, seq in enumerate(last.seqs)}
    going = [(seq, places.get(seq.id, -1)) for seq in running]
    return [(seq, tree) for seq, tree in going if tree < 0 or len(seq.tokens) + 1 < seq.max_length]


def _may_follow(engine: Engine, seqs: Sequence[SequenceState], sampled: bool) -> bool:
    """Does the device decide about all of both rounds (`sampled`: it samples), and does one drafter serve them?"""
    if len({seq.drafting for seq in seqs}) > 1:
        return False
    if not all(engine.verifiers.get(name).exact for name in {seq.verifier for seq in seqs}):
        return False
    if any(seq.params.logprobs is not None for seq in seqs):
        return False
    return all(map(is_plain_greedy, seqs)) or (sampled and engine.verifiers.device_decides(seqs))


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
