"""What the sequences of one menu do in a round, and the small questions that the adaptive controller asks of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from forerun.control.forms import FormChooser, Promise
from forerun.control.free_drafts import NOTHING
from forerun.control.waiting import Waiting
from forerun.core.offer import PLAIN, Menu, Offer
from forerun.core.types import Budget, Round

REPEATS = 64  # rounds that follow under one plan at most, before one is read first


@dataclass(frozen=True, slots=True)
class Decision:
    """What the sequences of one menu do in this round."""

    chooser: FormChooser
    ids: frozenset[int]
    promise: Promise
    head: Promise  # of the menu's best form, taken or not

    def budget(self) -> Budget:
        """The same for each of them."""
        form = self.promise.form
        if not form.nodes:
            return NOTHING
        return Budget(form.nodes, form.depth, form.width, source="costly", repeats=self.repeats)

    @property
    def repeats(self) -> int:
        """Further rounds under it: none behind a trial."""
        return 0 if self.promise.insists else REPEATS


@lru_cache(maxsize=64)
def chain_budget(depth: int) -> Budget:
    """A chain that was found, so long."""
    return Budget(depth, depth, source="free") if depth else NOTHING


def starts(outcome: Round) -> bool:
    """Was it the first round of a text? Then its drafter has read a prompt, which other rounds need not."""
    if outcome.followed:
        return False
    columns = zip(outcome.seqs, outcome.accepted, strict=True)
    return any([len(seq.tokens) - seq.prompt_length <= count + 1 for seq, count in columns])  # noqa: C419


def waited_for_prompts(outcome: Round) -> bool:
    """Had anybody begun to write before this round? Else its prompts lay beside no trees: nobody was delayed."""
    columns = zip(outcome.seqs, outcome.accepted, strict=True)
    return any([len(seq.tokens) - seq.prompt_length > count + 1 for seq, count in columns])  # noqa: C419


def observe_menu(decision: Decision, outcome: Round, waiting: Waiting) -> None:
    """Book what the round gained or lost against plain decoding, and learn what its form brings and takes."""
    batch = len(outcome.seqs)
    drafted = outcome.seqs[: batch - outcome.undrafted]
    which = [b for b, seq in enumerate(drafted) if seq.id in decision.ids]  # some may have been sent back
    if not which:
        return
    nodes = sum([outcome.drafted[b] for b in which])
    ids, accepted = [outcome.seqs[b].id for b in which], [outcome.accepted[b] for b in which]
    promise, chooser = decision.promise, decision.chooser
    if not nodes and promise.form.nodes:
        promise = promise._replace(form=PLAIN)  # the drafter was not ready
    follows = chooser.around.follows(promise.form, batch)
    waited = follows and starts(outcome)
    chooser.observe(promise, ids, accepted, batch, outcome.seconds, waited, outcome.followed)
    rows = outcome.tree_rows or batch + nodes
    taken = chooser.promise_of(promise.form, rows, batch, 0.0, len(ids)).seconds
    waiting.observe(decision.head, promise.form, taken, sum(accepted), batch)
    if not outcome.followed and (promise.form.nodes or (follows and not starts(outcome))):
        taken += chooser.gap(batch)
    lost = taken / chooser.plain_seconds(batch) - 1.0 - sum(accepted) / batch
    chooser.allowance.book(lost)


def by_menu(offers: Sequence[Offer]) -> list[tuple[Menu, list[int]]]:
    """Menus, and the sequences that draft from each."""
    first = offers[0].menu
    if first is not None and all([offer.menu is first for offer in offers]):  # noqa: C419 - twice as fast
        return [(first, [*range(len(offers))])]
    groups: dict[int, tuple[Menu, list[int]]] = {}
    for b, offer in enumerate(offers):
        if offer.menu is not None:
            groups.setdefault(id(offer.menu), (offer.menu, []))[1].append(b)
    return [*groups.values()]
