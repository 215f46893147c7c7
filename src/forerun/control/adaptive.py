"""AdaptiveController: how much to draft, from what passes cost on this machine and what acceptance rounds have shown.

Sequences whose drafter has a menu (captured graphs on a GPU) draft together: one form is chosen for all of them
(forms.py). Other sequences get a budget each (per_sequence.py). Where sequences of a menu also have look-ups, a round
has either the menu's form or the look-ups, whichever promises more tokens per second for the batch: trees from the
host and from the device in one pass would send all of them through the host. A form is kept for many rounds that
overlap, until another form is better or a look-up is worth reading the round under way first (overlap.py). Look-ups
alone are weighed against overlapping plain rounds in the same way, with a menu that has no forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from forerun.control.base import ControlParts, WaitingPrompts
from forerun.control.cost import CostModel
from forerun.control.forms import NO_FORMS, FormChooser, Promise
from forerun.control.lookups import FEW, LookupGate, chain_budget, plan_lookups, search_ahead
from forerun.control.overlap import Overlap, ends, lookup_promise, within
from forerun.control.per_sequence import NOTHING, SequencePlanner
from forerun.control.prices import LOOKUPS, Allowance
from forerun.core.types import FREE, NEVER, PLAIN, Budget, Menu, Offer, Round, RoundPlan, Seq

MOST_NODES, MOST_WIDTH = 60, 10  # nodes and children where no limit was set: room for the largest form of a head
# rounds without a draft: one of 11 is timed (a prime: native calls run up to 8 of them), and each of the first 16
TIMED_EVERY, TIMED_AT_FIRST = 11, 16
REPEATS = 64  # rounds under one plan before one is read first, so that every plan is made anew in time
UNFOLLOWED_ROUNDS = 4  # plain rounds that were read first, after which none is expected to follow


@dataclass(frozen=True, slots=True)
class Decision:
    """What the sequences of one menu do in this round."""

    chooser: FormChooser
    ids: frozenset[int]
    promise: Promise
    head: Promise  # of the menu's best form, taken or not

    def budget(self, price: tuple[float, ...] | None = None) -> Budget:
        """The same for each of them."""
        form = self.promise.form
        if not form.nodes:
            return NOTHING
        return Budget(form.nodes, form.depth, form.width, price, source="costly", repeats=self.repeats)

    @property
    def repeats(self) -> int:
        """Further rounds under it: none behind a trial."""
        return 0 if self.promise.is_trial else REPEATS


@dataclass(slots=True)
class Planned:
    """How a round was planned: all that is needed to observe it."""

    decisions: list[Decision] = field(default_factory=list)  # one for each menu
    searched: int | None = None  # sequences for which look-ups were made; None = not all sequences look up
    rests: bool | None = None  # nothing can be drafted for the only sequence; True = its drafter, which costs, rests
    never: bool = False  # no sequence has a drafter
    lookups: Sequence[Seq] = ()  # sequences with look-ups alone, whose plain round follows an unread one


class AdaptiveController:
    """Budgets from measured costs and observed acceptance."""

    def __init__(
        self,
        cost: CostModel,
        nodes: int,
        width: int,
        offer: Callable[[Seq], Offer],
        looks_up: Callable[[Seq], bool] = lambda seq: False,
        follows: bool = False,
    ) -> None:
        """`follows`: plain rounds overlap on this target."""
        self.planner = SequencePlanner(cost, nodes, width, offer)
        self.allowance = Allowance()  # of all menus together
        self.gate = LookupGate(cost, self.planner.free_chains)
        self.overlap = Overlap(self.planner.free_chains)
        self.looks_up = looks_up  # does a sequence's drafter make look-ups and nothing else?
        self._idles = 0  # rounds so far of one sequence for which nothing could be drafted
        self._passed_already: int | None = None  # the sequence whose next pass is run already
        self._choosers: dict[int, FormChooser] = {}  # by the menu's identity
        self._alone: int | None = None  # the sequence that was last alone in its round
        self._unasked = 0 if follows else UNFOLLOWED_ROUNDS  # plain rounds in a row that had to be read first
        self._planned = Planned()  # the round under way
        self._next: Planned | None = None  # the round behind it, where that was planned before this one is read

    @classmethod
    def build(cls, parts: ControlParts) -> AdaptiveController:
        nodes = MOST_NODES if parts.nodes is None else parts.nodes
        width = parts.width or MOST_WIDTH
        return cls(parts.measure(), nodes, width, parts.offer, parts.looks_up, parts.follows)

    @property
    def cost(self) -> CostModel:
        return self.planner.cost

    @cost.setter
    def cost(self, cost: CostModel) -> None:
        self.planner.cost = self.gate.cost = cost
        for chooser in self._choosers.values():
            chooser.cost = cost

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        self._note_context(seqs)
        for decision in self._next.decisions if self._next is not None else ():  # it was not launched
            decision.chooser.cancel(decision.promise)
        self._planned, self._next = Planned(), None
        looks_up, alone = self._all_look_up(seqs), len(seqs) == 1
        if alone and self._passed_already == seqs[0].id:  # its pass is run: whatever was found could not be drafted
            self._planned.rests = not looks_up
            return [NOTHING]
        if looks_up:
            if self._unasked < UNFOLLOWED_ROUNDS and self.gate.searches_all(len(seqs)):
                return self._plan_beside_overlap(seqs)
            return self._plan_lookups(seqs)
        offers = self.planner.offers_of(seqs)
        if alone and self.planner.rests(seqs[0], offers[0]):
            self._planned.rests = True
            return [self.planner.resting(seqs[0])]
        if all([offer is NEVER for offer in offers]):  # noqa: C419 - twice as fast
            self._planned.never = True
            self.planner.take_chains((), ())
            return [NOTHING] * len(seqs)
        budgets = self._plan_all(seqs, offers)
        return [self.planner.resting(seqs[0])] if alone and budgets[0] is NOTHING else budgets

    def _all_look_up(self, seqs: Sequence[Seq]) -> bool:
        return all(map(self.looks_up, seqs))

    def _plan_lookups(self, seqs: Sequence[Seq]) -> list[Budget]:
        if len(seqs) == 1:
            budget = self.planner.lookup_budget(seqs[0])
            self._planned.rests = None if budget.nodes else False
            return [budget]
        budgets, self._planned.searched = plan_lookups(self.gate, self.planner, seqs)
        return budgets

    def _plan_beside_overlap(self, seqs: Sequence[Seq]) -> list[Budget]:
        """Where plain rounds follow each other: look-ups where they are worth more than another plain one."""
        batch, ids = len(seqs), tuple([seq.id for seq in seqs])
        offers = self._offers(seqs)
        decision = self._decide(NO_FORMS, ids, offers, batch)
        self._planned.decisions = [decision]
        self.planner.take_chains(seqs, offers)
        if decision.promise.form.kind != "lookup":
            return [NOTHING] * batch
        if batch <= FEW:
            return self.planner.plan(seqs, offers, batch)
        return [chain_budget(depth) for depth in self.planner.free_chains(offers, batch)[0]]

    def follow(self, seqs: Sequence[Seq], last: RoundPlan, switches: Callable[[], bool]) -> RoundPlan | None:
        """See forerun.control.base.PlansAhead. Look-ups are made now, beside the device."""
        self._note_context(seqs)
        if (last.repeats > 0 and self._goes_on(seqs)) if last.kind == "trees" else self._stays_plain(seqs):
            return last.again()
        return self._switch(seqs) if switches() else None

    def _stays_plain(self, seqs: Sequence[Seq]) -> bool:
        """Is the round behind the plain one under way plain?"""
        self._next, batch = None, len(seqs)
        if not self._all_look_up(seqs):
            return self._keeps_plain(seqs)
        if not self.gate.searches_all(batch):
            asked = search_ahead(self.gate, self.planner, seqs)
            if asked is not None:
                self._planned.searched = (self._planned.searched or 0) + asked
                self._next = Planned(searched=0)
            return asked is not None
        self._unasked, chooser = 0, self._chooser(NO_FORMS)
        plain = chooser.promise_of(PLAIN, batch, batch, batch)
        if not self.overlap.waits(chooser, plain, self._offers(seqs)):
            decision = Decision(chooser, frozenset([seq.id for seq in seqs]), plain, plain)
            self._next = Planned([decision], lookups=seqs)
        return self._next is not None

    def _keeps_plain(self, seqs: Sequence[Seq]) -> bool:
        """The same for drafters that are more than look-ups: by the state of the round under way, which stays."""
        if self._planned.never:
            return all([self.planner.offer(seq) is NEVER for seq in seqs])  # noqa: C419
        if self._planned.rests:
            return len(seqs) == 1 and self.planner.rests(seqs[0], self.planner.offer(seqs[0]))
        if len(self._planned.decisions) != 1:
            return False
        (decision,) = self._planned.decisions
        ids = self._ids_of_menu(decision, seqs)
        if not ids or decision.promise.form.kind != "plain" or decision.promise.is_trial:
            return False
        plain = decision.chooser.keeps_plain(ids, len(seqs))
        if plain is None or self._reads_first(decision.chooser, plain, seqs):
            return False
        self._planned.decisions = [replace(decision, ids=decision.ids.union(ids), promise=plain, head=plain)]
        return True

    def _reads_first(self, chooser: FormChooser, promise: Promise, seqs: Sequence[Seq]) -> bool:
        """Is a look-up of one of these few sequences worth reading the round under way first?"""
        return len(seqs) <= FEW and self.overlap.waits(chooser, promise, self._offers(seqs))

    def _offers(self, seqs: Sequence[Seq]) -> list[Offer]:
        return [within(self.planner.offer(seq), seq) for seq in seqs]

    def _ids_of_menu(self, decision: Decision, seqs: Sequence[Seq]) -> list[int]:
        """The sequences that a decision holds for; empty = others could draft too, of which it says nothing.

        It may be older than all of them: behind a text of look-ups alone, it would keep a head from drafting.
        """
        found = list[int]()
        for seq in seqs:
            offer = None if seq.id in decision.ids else self.planner.offer(seq)
            if offer is None or offer.menu is decision.chooser.menu:
                found.append(seq.id)
            elif offer.costs:
                return []
        return found

    def _take_next(self) -> None:
        """The round under way is the one that was planned to follow: it is observed as that."""
        if self._next is not None:
            self._planned, self._next = self._next, None
            seqs = self._planned.lookups
            self.planner.take_chains(seqs, [FREE] * len(seqs))

    def _plan_all(self, seqs: Sequence[Seq], offers: list[Offer]) -> list[Budget]:
        """Forms for the sequences of each menu, and budgets of their own for all others."""
        beside = 0
        planned: dict[int, Budget] = {}
        for menu, which in group_by_menu(offers):
            some = [within(offers[b], seqs[b]) for b in which]
            decision = self._decide(menu, tuple([seqs[b].id for b in which]), some, len(seqs))
            self._planned.decisions.append(decision)
            if decision.promise.form.kind == "lookup":
                for b in which:
                    offers[b] = Offer(free=offers[b].free)
            else:
                cuts = some[0].stops and decision.promise.form.nodes
                price = self.cost.price_for_all(self.planner.nodes, len(seqs)) if cuts else None
                planned |= dict.fromkeys(which, decision.budget(price))
                beside += decision.promise.form.nodes * len(which)
        left = [b for b in range(len(seqs)) if b not in planned]
        budgets = self.planner.plan([seqs[b] for b in left], [offers[b] for b in left], len(seqs), beside)
        planned |= dict(zip(left, budgets, strict=True))
        return [planned[b] for b in range(len(seqs))]

    def note_waiting(self, prompts: WaitingPrompts) -> None:
        for chooser in self._choosers.values():
            chooser.note_waiting(prompts)

    def _goes_on(self, seqs: Sequence[Seq]) -> bool:
        """May these sequences start another round of the form under way?"""
        if len(self._planned.decisions) != 1:
            return False
        (decision,), ids = self._planned.decisions, [seq.id for seq in seqs]
        chooser, head = decision.chooser, decision.chooser.keeps(ids, len(seqs))
        if head is None or ends(chooser, head, seqs) or self._reads_first(chooser, head, seqs):
            return False
        self._planned.decisions = [replace(decision, ids=decision.ids.union(ids), head=head)]  # some have joined
        return True

    def _switch(self, seqs: Sequence[Seq]) -> RoundPlan | None:
        """A round of another form behind the one under way; of few sequences that is read first, for look-ups."""
        self._next = None
        if len(seqs) <= FEW or len(self._planned.decisions) != 1:
            return None
        (last,), ids = self._planned.decisions, tuple([seq.id for seq in seqs])
        chooser = last.chooser
        others = [seq for seq in seqs if self.planner.offer(seq).menu is not chooser.menu]
        if others or ends(chooser, last.head, seqs):
            return None
        promise = chooser.choose(ids, len(seqs))
        decision = Decision(chooser, frozenset(ids), promise, promise)
        self._next = Planned([decision])
        return RoundPlan("trees", decision.repeats, promise.form) if promise.form.nodes else RoundPlan("plain")

    def observe(self, outcome: Round) -> None:
        if outcome.undrafted < len(outcome.seqs):  # else it was not planned here: all of them start with it
            self._observe(outcome)
        self._take_next()

    def _note_context(self, seqs: Sequence[Seq]) -> None:
        if seqs:
            self.cost.note_context(sum([len(seq.tokens) for seq in seqs]) / len(seqs))

    def _observe(self, outcome: Round) -> None:
        self._note_context(outcome.seqs)
        batch, nodes, cost = len(outcome.seqs), sum(outcome.drafted), self.planner.cost
        self._unasked += not nodes
        self._passed_already = outcome.seqs[0].id if outcome.ahead else None
        if not outcome.prompt_rows or delayed_by_prompts(outcome):
            cost.note_prompts(outcome.prompt_rows)
        planned = self._planned
        if planned.rests is not None:
            self._observe_idle(outcome, planned.rests)
            return
        if outcome.tells_times:
            cost.observe(outcome.tree_rows or batch + nodes, outcome.seconds["pass"], batch)
        if planned.searched is not None:
            self.gate.observe(outcome, planned.searched)
            if planned.searched < batch:
                return
        if batch > 1 or self._alone != outcome.seqs[0].id:
            self._alone = outcome.seqs[0].id
            self.allowance.begin()
        for decision in planned.decisions:
            observe_menu(decision, outcome, self.overlap)
        self.planner.observe(outcome)

    def _observe_idle(self, outcome: Round, costly: bool) -> None:
        """A round of one sequence for which there was nothing to draft: most rounds of many texts, so in few steps."""
        self._idles += 1
        if outcome.tells_times and (self._idles <= TIMED_AT_FIRST or self._idles % TIMED_EVERY == 0):
            self.cost.observe(1, outcome.seconds["pass"])
        self.planner.note_idle(outcome, costly)

    def forget(self, seq: Seq) -> None:
        self.planner.forget(seq)
        self.gate.met.discard(seq.id)
        for chooser in self._choosers.values():
            chooser.forget(seq.id)

    def _decide(self, menu: Menu, ids: tuple[int, ...], offers: Sequence[Offer], batch: int) -> Decision:
        """The menu's best form, or chains that cost nothing where these promise more."""
        chooser = self._chooser(menu)
        head = promise = chooser.choose(ids, batch)
        self.overlap.note(offers)
        if not head.is_trial and any([offer.free for offer in offers]):  # noqa: C419
            depths, accepted = self.planner.free_chains(offers, batch)
            nodes = sum(depths)
            free = lookup_promise(chooser, head, nodes, batch, accepted)
            if nodes and self.overlap.takes(chooser, head, free, batch):
                promise = free
        return Decision(chooser, frozenset(ids), promise, head)

    def _chooser(self, menu: Menu) -> FormChooser:
        chooser = self._choosers.get(id(menu))
        if chooser is None:
            allowance = Allowance(**LOOKUPS) if menu is NO_FORMS else self.allowance
            most = self.planner.nodes, self.planner.width
            chooser = self._choosers[id(menu)] = FormChooser(menu, self.cost, allowance, *most)
        return chooser


def starts(outcome: Round) -> bool:
    """Was it the first round of a text? Then its drafter has read a prompt, which other rounds need not."""
    if outcome.followed:
        return False
    columns = zip(outcome.seqs, outcome.accepted, strict=True)
    return any([len(seq.tokens) - seq.prompt_length <= count + 1 for seq, count in columns])  # noqa: C419


def delayed_by_prompts(outcome: Round) -> bool:
    """Had a sequence begun to write before this round? Else its prompts delayed no sequence."""
    columns = zip(outcome.seqs, outcome.accepted, strict=True)
    return any([len(seq.tokens) - seq.prompt_length > count + 1 for seq, count in columns])  # noqa: C419


def observe_menu(decision: Decision, outcome: Round, overlap: Overlap) -> None:
    """Book what the round gained or lost against plain decoding, and learn what its form brings and takes."""
    batch = len(outcome.seqs)
    drafted = outcome.seqs[: batch - outcome.undrafted]
    which = [b for b, seq in enumerate(drafted) if seq.id in decision.ids]  # some may have been sent back
    if not which:
        return
    nodes = sum([outcome.drafted[b] for b in which])
    ids, accepted = [outcome.seqs[b].id for b in which], [outcome.accepted[b] for b in which]
    promise, chooser = decision.promise, decision.chooser
    if not nodes and promise.form.nodes and not outcome.tree_rows:
        promise = promise._replace(form=PLAIN)  # the drafter was not ready
    follows = chooser.overhead.follows(promise.form, batch)
    waited = follows and (starts(outcome) or not (promise.form == PLAIN or chooser.has_drafted(ids)))
    chooser.observe(promise, ids, accepted, batch, outcome.seconds, waited, outcome.followed)
    rows = outcome.tree_rows or batch + nodes
    taken = chooser.promise_of(promise.form, rows, batch, 0.0, len(ids)).seconds
    overlap.observe(decision.head, promise.form, taken, sum(accepted), batch)
    if not outcome.followed and (promise.form.nodes or (follows and not starts(outcome))):
        taken += chooser.gap(batch)
    lost = taken / chooser.plain_seconds(batch) - 1.0 - sum(accepted) / batch
    chooser.allowance.book(lost)


def group_by_menu(offers: Sequence[Offer]) -> list[tuple[Menu, list[int]]]:
    """Menus, and the sequences that draft from each."""
    first = offers[0].menu
    if first is not None and all([offer.menu is first for offer in offers]):  # noqa: C419 - twice as fast
        return [(first, [*range(len(offers))])]
    groups: dict[int, tuple[Menu, list[int]]] = {}
    for b, offer in enumerate(offers):
        if offer.menu is not None:
            groups.setdefault(id(offer.menu), (offer.menu, []))[1].append(b)
    return [*groups.values()]
