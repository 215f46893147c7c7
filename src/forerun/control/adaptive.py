"""AdaptiveController: how much to draft, from what passes cost here and how often drafts were accepted.

Sequences whose drafter has a menu (captured graphs on a GPU) draft together, and one form is chosen for all of them
(forms.py). All other sequences get budgets of their own (per_sequence.py). Where sequences of a menu also have drafts
that cost nothing, n-gram chains, a round takes either the menu's form or those chains, whichever promises more tokens
per second for the batch: trees from the host and from the device in one pass would send all of them through the host.
The menu's form stays for many rounds, each launched before the last one is read, until another is better or a look-up
is worth reading first (waiting.py). Look-ups alone stand beside a menu without forms: where the target launches plain
passes one behind the other, they do so until a look-up is worth reading one first.

What the sequences of one menu do in a round, and the small questions that the adaptive controller asks of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forerun.control.allowance import Allowance
from forerun.control.base import ControlParts, WaitingPrompts
from forerun.control.cost import CostModel
from forerun.control.forms import NO_FORMS, FormChooser, Promise
from forerun.control.lookups import MOST_WITH_TREES, LookupGate, asked_beside, chain_budget, plan_lookup, plan_lookups
from forerun.control.per_sequence import NOTHING, SequencePlanner
from forerun.control.waiting import MOST_WAITED_FOR, Waiting, beside_plain, ends, free_promise, within
from forerun.core.offer import FREE, NEVER, PLAIN, Menu, Offer, RoundPlan
from forerun.core.types import Budget, Round, Seq

MOST_NODES, MOST_WIDTH = 60, 10  # the largest budget, where no limit was set
# rounds that drafted nothing: one of so many is timed, out of step with calls of up to eight, and all of the first
TIMED_EVERY, TIMED_AT_FIRST = 11, 16
UNFOLLOWED_ROUNDS = 4  # plain rounds that were read first, after which none is expected to follow


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
        """`follows`: the target launches plain passes before the last one is read, where nobody drafts."""
        self.planner = SequencePlanner(cost, nodes, width, offer)
        self.allowance = Allowance()  # of all menus together
        self.gate = LookupGate(cost, self.planner.free_chains)
        self.waiting = Waiting(self.planner.free_chains)
        self.looks_up = looks_up  # does a sequence's drafter make look-ups and nothing else?
        self._lookups: dict[int, bool] = {}  # by sequence
        self._asked: int | None = None  # whose look-ups this round has asked for; None = others draft too
        self._idle: bool | None = None  # nothing can be drafted now; True = a drafter that costs rests
        self._idles = 0  # such rounds so far
        self._ahead: int | None = None  # the sequence whose next pass is run already
        self._choosers: dict[int, FormChooser] = {}  # by the menu's identity
        self._decisions: list[Decision] = []  # of this round
        self._never = False  # nobody of this round can draft
        self._unasked = 0 if follows else UNFOLLOWED_ROUNDS  # plain rounds in a row that had to be read first
        # the next round, if it was said what that is before this one is read
        self._next: tuple[Decision | None, Sequence[Seq]] | None = None

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
        if self._next is not None and self._next[0] is not None:  # said to follow, and read first after all
            self._next[0].chooser.take_back(self._next[0].promise)
        self._decisions, self._asked, self._idle, self._never, self._next = [], None, None, False, None
        looks_up, alone = self._all_look_up(seqs), len(seqs) == 1
        if alone and self._ahead == seqs[0].id:  # its pass is run: whatever was found could not be drafted
            self._idle = not looks_up
            return [NOTHING]
        if looks_up:
            if self._unasked < UNFOLLOWED_ROUNDS and self.gate.asks_all(len(seqs)):
                return self._plan_beside_plain(seqs)
            return self._plan_lookups(seqs)
        offers = self.planner.offers_of(seqs)
        if alone and self.planner.rests(seqs[0], offers[0]):
            self._idle = True
            return [self.planner.resting(seqs[0])]
        if all([offer is NEVER for offer in offers]):  # noqa: C419 - twice as fast
            self._never = True
            self.planner.skip()
            return [NOTHING] * len(seqs)
        budgets = self._plan_all(seqs, offers)
        return [self.planner.resting(seqs[0])] if alone and budgets[0] is NOTHING else budgets

    def _all_look_up(self, seqs: Sequence[Seq]) -> bool:
        known = self._lookups
        for seq in seqs:
            if (found := known.get(seq.id)) is None:
                found = known[seq.id] = self.looks_up(seq)
            if not found:
                return False
        return True

    def _plan_lookups(self, seqs: Sequence[Seq]) -> list[Budget]:
        if len(seqs) == 1:
            budget = plan_lookup(self.planner, seqs[0])
            self._idle = None if budget.nodes else False
            return [budget]
        budgets, self._asked = plan_lookups(self.gate, self.planner, seqs)
        return budgets

    def _plan_beside_plain(self, seqs: Sequence[Seq]) -> list[Budget]:
        """Where plain rounds follow each other: look-ups where they are worth more than another plain one."""
        batch, ids = len(seqs), tuple([seq.id for seq in seqs])
        offers = [within(self.planner.offer(seq), seq) for seq in seqs]
        decision = self._decide(NO_FORMS, ids, offers, batch)
        self._decisions = [decision]
        self.planner.take_chains(seqs, offers)
        if decision.promise.form.kind != "lookup":
            return [NOTHING] * batch
        if batch <= MOST_WITH_TREES:
            return self.planner.plan(seqs, offers, batch)
        return [chain_budget(depth) for depth in self.planner.free_chains(offers, batch)[0]]

    def follow(self, seqs: Sequence[Seq], last: RoundPlan, switches: Callable[[], bool]) -> RoundPlan | None:
        """See forerun.control.base.PlansAhead. Look-ups are made now, beside the device."""
        if (last.repeats > 0 and self._goes_on(seqs)) if last.kind == "trees" else self._stays_plain(seqs):
            return last.again()
        return self._switch(seqs) if switches() else None

    def _stays_plain(self, seqs: Sequence[Seq]) -> bool:
        """Is the round behind the plain one under way plain?"""
        self._next, batch = None, len(seqs)
        if not self._all_look_up(seqs):
            return self._keeps_plain(seqs)
        if not self.gate.asks_all(batch):
            asked = asked_beside(self.gate, self.planner, seqs)
            if asked is not None:
                self._asked, self._next = (self._asked or 0) + asked, (None, seqs)
            return asked is not None
        self._unasked, chooser = 0, self._chooser(NO_FORMS)
        plain = chooser.promise_of(PLAIN, batch, batch, batch)
        offers = [within(self.planner.offer(seq), seq) for seq in seqs]
        if not self.waiting.waits(chooser, plain, offers):
            self._next = Decision(chooser, frozenset([seq.id for seq in seqs]), plain, plain), seqs
        return self._next is not None

    def _keeps_plain(self, seqs: Sequence[Seq]) -> bool:
        """The same for drafters that are more than look-ups: by the state of the round under way, which stays."""
        if self._never:
            return all([self.planner.offer(seq) is NEVER for seq in seqs])  # noqa: C419
        if self._idle:
            return len(seqs) == 1 and self.planner.rests(seqs[0], self.planner.offer(seqs[0]))
        if len(self._decisions) != 1:
            return False
        (decision,) = self._decisions
        ids = self._ids_of_menu(decision, seqs)
        if not ids or decision.promise.form.kind != "plain" or decision.promise.insists:
            return False
        plain = decision.chooser.keeps_plain(ids, len(seqs))
        if plain is None:
            return False
        if len(seqs) <= MOST_WAITED_FOR:
            offers = [within(self.planner.offer(seq), seq) for seq in seqs]
            if self.waiting.waits(decision.chooser, plain, offers):
                return False
        self._decisions = [replace(decision, ids=decision.ids.union(ids), promise=plain, head=plain)]
        return True

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
        """The round under way is the one that was said to follow: it is observed as that."""
        if self._next is not None:
            (decision, seqs), self._next = self._next, None
            self._idle, self._never = None, False
            self._decisions, self._asked = ([], 0) if decision is None else ([decision], None)
            if decision is None or decision.chooser.menu is not NO_FORMS:
                self.planner.skip()
            else:
                self.planner.take_chains(seqs, [FREE] * len(seqs))

    def _plan_all(self, seqs: Sequence[Seq], offers: list[Offer]) -> list[Budget]:
        """Forms for the sequences of each menu, and budgets of their own for all others."""
        beside = 0
        planned: dict[int, Budget] = {}
        for menu, which in by_menu(offers):
            some = [within(offers[b], seqs[b]) for b in which]
            decision = self._decide(menu, tuple([seqs[b].id for b in which]), some, len(seqs))
            self._decisions.append(decision)
            if decision.promise.form.kind == "lookup":
                for b in which:
                    offers[b] = Offer(free=offers[b].free)
            else:
                planned |= dict.fromkeys(which, decision.budget())
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
        if len(self._decisions) != 1:
            return False
        (decision,), ids = self._decisions, [seq.id for seq in seqs]
        chooser, head = decision.chooser, decision.chooser.keeps(ids, len(seqs))
        if head is None or ends(chooser, head, seqs):
            return False
        if len(seqs) <= MOST_WAITED_FOR:
            offers = [within(self.planner.offer(seq), seq) for seq in seqs]
            if self.waiting.waits(chooser, head, offers):
                return False
        self._decisions = [replace(decision, ids=decision.ids.union(ids), head=head)]  # some have joined
        return True

    def _switch(self, seqs: Sequence[Seq]) -> RoundPlan | None:
        """A round of another form behind the one under way; of few sequences that is read first, for look-ups."""
        self._next = None
        if len(seqs) <= MOST_WAITED_FOR or len(self._decisions) != 1:
            return None
        chooser, ids = self._decisions[0].chooser, tuple([seq.id for seq in seqs])
        others = [seq for seq in seqs if self.planner.offer(seq).menu is not chooser.menu]
        if others or ends(chooser, self._decisions[0].head, seqs):
            return None
        promise = chooser.choose(ids, len(seqs))
        decision = Decision(chooser, frozenset(ids), promise, promise)
        self._next = decision, seqs
        return RoundPlan("trees", decision.repeats, promise.form) if promise.form.nodes else RoundPlan("plain")

    def observe(self, outcome: Round) -> None:
        if outcome.undrafted < len(outcome.seqs):  # else it was not planned here: all of them start with it
            self._observe(outcome)
        self._take_next()

    def _observe(self, outcome: Round) -> None:
        batch, nodes, cost = len(outcome.seqs), sum(outcome.drafted), self.planner.cost
        self._unasked += not nodes
        self._ahead = outcome.seqs[0].id if outcome.ahead else None
        if not outcome.prompt_rows or waited_for_prompts(outcome):
            cost.note_prompts(outcome.prompt_rows)
        if self._idle is not None:
            self._observe_idle(outcome, self._idle)
            return
        if outcome.tells_times:
            cost.observe(outcome.tree_rows or batch + nodes, outcome.seconds["pass"], batch)
        if self._asked is not None:
            self.gate.observe(outcome, self._asked)
            if self._asked < batch:
                return
        for decision in self._decisions:
            observe_menu(decision, outcome, self.waiting)
        self.planner.observe(outcome)

    def _observe_idle(self, outcome: Round, costly: bool) -> None:
        """A round of one sequence for which there was nothing to draft: most rounds of many texts, so in few steps."""
        self._idles += 1
        if outcome.tells_times and (self._idles <= TIMED_AT_FIRST or self._idles % TIMED_EVERY == 0):
            self.cost.observe(1, outcome.seconds["pass"])
        self.planner.note_idle(outcome, costly)

    def forget(self, seq: Seq) -> None:
        self.planner.forget(seq)
        self.gate.forget(seq.id)
        self._lookups.pop(seq.id, None)
        for chooser in self._choosers.values():
            chooser.forget(seq.id)

    def _decide(self, menu: Menu, ids: tuple[int, ...], offers: Sequence[Offer], batch: int) -> Decision:
        """The menu's best form, or chains that cost nothing where these promise more."""
        chooser = self._chooser(menu)
        head = promise = chooser.choose(ids, batch)
        self.waiting.note(offers)
        if not head.insists and any([offer.free for offer in offers]):  # noqa: C419
            depths, accepted = self.planner.free_chains(offers, batch)
            nodes = sum(depths)
            free = free_promise(chooser, head, nodes, batch, accepted)
            if nodes and self.waiting.takes(chooser, head, free, batch):
                promise = free
        return Decision(chooser, frozenset(ids), promise, head)

    def _chooser(self, menu: Menu) -> FormChooser:
        chooser = self._choosers.get(id(menu))
        if chooser is None:
            allowance = beside_plain() if menu is NO_FORMS else self.allowance
            most = self.planner.nodes, self.planner.width
            chooser = self._choosers[id(menu)] = FormChooser(menu, self.cost, allowance, *most)
        return chooser


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
