"""What the sequences of one menu do in a round, and the small questions that the adaptive controller asks of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from forerun.control.forms import FormChooser, Promise
from forerun.control.free_drafts import NOTHING
from forerun.offers import Menu, Offer
from forerun.types import Budget, Round

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
        form, repeats = self.promise.form, 0 if self.chooser.insists else REPEATS
        if not form.nodes:
            return NOTHING
        return Budget(form.nodes, form.depth, form.width, source="costly", repeats=repeats)


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
