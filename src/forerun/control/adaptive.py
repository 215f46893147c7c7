"""AdaptiveController: one decision for every round, from one model of time, one of acceptance, and one account.

    time        seconds of a round: pass, draft, and the host's work that nothing hides          times.py
    acceptance  tokens of a draft: what is claimed x the drafter's factor x the request's        acceptance.py
    account     what drafting may lose: 0.92x of a request, 0.985x of 20 requests of a drafter   account.py
    decision    plain, trees of a shape, or look-ups: most tokens beyond those of its time       choices.py

All that is believed is kept by drafter, so that requests of one drafter say nothing about those of another; they share
what passes and the host take. Drafters that run on the host have budgets of their own (host_trees.py). Nothing is kept
of a round: its plan travels with it and comes back with its outcome. docs/controller.md explains it on a page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, isfinite

from forerun.control.acceptance import DrafterState, Request
from forerun.control.account import covered
from forerun.control.base import ControlParts, WaitingPrompts
from forerun.control.choices import MOST_WAITED_FOR, Choice, Choices, Drafted, Group, trees_plan
from forerun.control.cost import CostModel
from forerun.control.host_trees import HostTrees
from forerun.control.times import RoundTimes
from forerun.core.offer import NEVER, NOTHING, Kind, Offer, Part, Plan
from forerun.core.types import Round, Seq

MOST_NODES, MOST_WIDTH = 60, 10  # the largest budget, where no limit was set
MOST_ASKED = 8  # sequences: for so few look-ups are always made
PANEL, SAMPLES = (4, 32)  # of more sequences, those that are looked up in turn, and the last look-ups that count
# plain rounds of a request with captured trees that no round shows: reading its prompt, a round dropped at its end
RESERVE = 0.9
CHEAP = 0.02  # of a plain round: look-ups that take less than this are made for all


class AdaptiveController:
    """Plans from measured costs and observed acceptance."""

    def __init__(
        self,
        cost: CostModel,
        nodes: int,
        width: int,
        offer: Callable[[Seq], Offer],
        looks_up: Callable[[Seq], bool] = lambda seq: False,
        follows: bool = False,
    ) -> None:
        """`follows`: the target launches rounds before the last one is read; that also shows when it is asked to."""
        self.offer, self.looks_up = offer, looks_up
        self.times = RoundTimes(cost, follows)
        self.choices, self.host = Choices(self.times, nodes, width), HostTrees(self.times, nodes, width)
        self._drafters: dict[object, DrafterState] = {}
        self._requests: dict[int, Request] = {}
        self._samples: dict[int, deque[tuple[float, ...]]] = {}  # by drafter: what look-ups of a few have found
        self._turn = 0  # whose look-up comes next

    @classmethod
    def build(cls, parts: ControlParts) -> AdaptiveController:
        nodes = MOST_NODES if parts.nodes is None else parts.nodes
        width = parts.width or MOST_WIDTH
        return cls(parts.measure(), nodes, width, parts.offer, parts.looks_up, parts.follows)

    @property
    def cost(self) -> CostModel:
        return self.times.cost

    @cost.setter
    def cost(self, cost: CostModel) -> None:
        self.times.cost = cost

    # ---- deciding

    def plan(self, seqs: Sequence[Seq]) -> Plan:
        plan = self._decide(seqs, None)
        return Plan.plain(len(seqs)) if plan is None else plan

    def follow(self, seqs: Sequence[Seq], unread: Plan) -> Plan | None:
        self.times.follows = True
        return self._decide(seqs, unread)

    def note_waiting(self, prompts: WaitingPrompts) -> None:
        self.choices.prompts = prompts

    def _decide(self, seqs: Sequence[Seq], unread: Plan | None) -> Plan | None:
        """What the next round does; None = the one under way, if there is one, is read first."""
        batch = len(seqs)
        known = self._requests.get(seqs[0].id) if batch == 1 else None
        if known is not None and known.ahead:
            return Plan.plain(1)  # its pass is run: whatever was found could not be drafted
        many = batch > MOST_ASKED and all(self.looks_up(seq) for seq in seqs)
        if many and not self._asks_all(seqs, unread):
            return Plan.plain(batch, asked=1)
        offers = [self._offer(seq) for seq in seqs]
        requests = [self._request(seq, offer) for seq, offer in zip(seqs, offers, strict=True)]
        groups: dict[int, list[int]] = {}
        for b, request in enumerate(requests):
            groups.setdefault(id(request.drafter), []).append(b)
        if len(groups) == 1:
            return self._of_one(Group(seqs, offers, requests, batch), unread)
        parts = [
            Group([seqs[b] for b in which], [offers[b] for b in which], [requests[b] for b in which], batch)
            for which in groups.values()
        ]
        plan = self._mixed(parts, [*groups.values()], batch)
        return plan if unread is None or plan.kind == unread.kind == "plain" else None

    def _of_one(self, group: Group, unread: Plan | None) -> Plan | None:
        """All sequences have the same drafter."""
        if _on_host(group, self.times.follows):
            plan = self.host.plan(group)
            return plan if unread is None or plan.kind == "plain" else None
        best = self.choices.best(group, None if unread is None else unread.shape)
        looked_up = self.choices.lookup(group, best, unread)
        if looked_up is not None:
            return looked_up if unread is None else None
        if best.shape is None:
            return Plan.plain(group.batch, asked=0 if group.menu is not None else group.batch)
        if unread is not None and self._ends(group.seqs, best):
            return None
        return trees_plan(group.seqs, best.shape)

    def _mixed(self, groups: Sequence[Group], places: Sequence[Sequence[int]], batch: int) -> Plan:
        """Several drafters: each group does what is best beside the others, in two sweeps."""
        found = [Drafted() for _ in groups]
        for _ in range(2):
            for i, group in enumerate(groups):
                others = sum([one for j, one in enumerate(found) if j != i], Drafted())
                if _on_host(group, follows=True):
                    plan = self.host.plan(group, others.rows)
                    found[i] = Drafted(plan, sum([min(one.nodes, one.depth) for one in plan.budgets]))
                else:
                    found[i] = self.choices.beside(group, others)
        budgets, parts = [NOTHING] * batch, dict[int, Part]()
        for which, one in zip(places, found, strict=True):
            for b, budget in zip(which, one.plan or (), strict=False):
                budgets[b] = budget
            parts |= {} if one.plan is None else one.plan.parts
        kinds = {part.kind for part in parts.values()}
        kind: Kind = "trees" if "trees" in kinds else "lookup" if kinds else "plain"
        return Plan(kind, tuple(budgets), parts)

    def _asks_all(self, seqs: Sequence[Seq], unread: Plan | None) -> bool:
        """Look-ups of many take the host long: some are made in turn, and all of them where these promise enough."""
        batch, times = len(seqs), self.times
        plain, asking = times.plain(batch), batch * times.asking
        if asking < CHEAP * plain:
            return True
        self._turn += 1
        seq = seqs[self._turn % PANEL]
        offer = self._offer(seq)
        request = self._request(seq, offer)
        found = self._samples.setdefault(id(request.drafter), deque(maxlen=SAMPLES))
        found.append(offer.free[: self.choices.nodes])
        if len(found) < MOST_ASKED or self._turn % PANEL:
            return False
        rho, claims = batch / plain, [found[i % len(found)] for i in range(batch)]
        depths, accepted = self.choices.chains(claims, [request] * batch, batch, rho, batch)
        seconds = times.lookup(sum(depths), batch) + asking + (0.0 if unread is None else times.gap(batch))
        if batch + accepted <= rho * seconds:
            return False
        known = [self._requests.get(one.id, request) for one in seqs]
        return covered(known, seconds / plain - 1.0)

    def _ends(self, seqs: Sequence[Seq], best: Choice) -> bool:
        """Does the round under way end all of these so likely that another, dropped then, costs more than the gap?"""
        likely, accepted = 1.0, best.tokens / len(seqs) - 1.0
        for seq in seqs:
            more = seq.max_length - len(seq.tokens) - 1  # tokens that must be accepted for it to end
            if best.shape is None or more > best.shape.depth:
                return False
            likely *= (accepted / (1.0 + accepted)) ** more
        return likely * best.seconds > (1.0 - likely) * self.times.gap(len(seqs))

    def _offer(self, seq: Seq) -> Offer:
        """What its drafter offers, without what would lie behind the end of the sequence."""
        request, room = self._requests.get(seq.id), max(0, seq.max_length - len(seq.tokens) - 1)
        if request is not None and request.offered is not None and request.offered[0] == len(seq.tokens):
            offer = request.offered[1]  # it was asked for when the last round was booked
        else:
            offer = self.offer(seq)
        return offer if len(offer.free) <= room else replace(offer, free=offer.free[:room])

    def _request(self, seq: Seq, offer: Offer) -> Request:
        found = self._requests.get(seq.id)
        if found is None:
            key = getattr(seq, "drafting", ""), id(offer.menu), offer is NEVER
            state = self._drafters.setdefault(key, DrafterState())
            reserve = 0.0 if offer.menu is None else RESERVE
            found = self._requests[seq.id] = Request(state, reserve=reserve)
        return found

    # ---- learning

    def observe(self, outcome: Round) -> None:
        batch, plan = len(outcome.seqs), outcome.plan or Plan.plain(len(outcome.seqs))
        if outcome.undrafted == batch:
            return  # it was not planned here: all of them start with it
        pairs = zip(outcome.seqs, outcome.accepted, strict=True)
        begins = [len(seq.tokens) - seq.prompt_length <= count + 1 for seq, count in pairs]
        if not outcome.prompt_rows or not all(begins):  # else nobody has waited for these prompts
            self.times.cost.note_prompts(outcome.prompt_rows)
        kind = plan.kind if sum(outcome.drafted) else "plain"
        first = not outcome.followed and any(begins) and self.times.follows
        if outcome.tells_times:
            self._learn_times(outcome, plan, kind, first)
        self._book(outcome, plan, self._lost(outcome, plan, kind, first))
        if not self.times.follows or (kind == "trees" and plan.shape is None):
            self.host.observe(outcome, plan, self._requests, self._asked_again(outcome, plan))

    def _learn_times(self, outcome: Round, plan: Plan, kind: Kind, first: bool) -> None:
        """The first round of a text, in which its drafter reads the prompt, tells of its pass alone."""
        seconds, times, batch = outcome.seconds, self.times, len(outcome.seqs)
        times.cost.observe(outcome.tree_rows or batch + sum(outcome.drafted), seconds["pass"], batch)
        draft = seconds.get("draft", 0.0)
        rest = sum(seconds.values()) - seconds["pass"] - seconds.get("prompt", 0.0)
        if not first:
            times.observe(kind, outcome.followed, batch, max(0.0, rest - (draft if kind == "trees" else 0.0)))
        if kind == "plain" and plan.asked and draft:
            times.observe_asking(draft / plan.asked)
        if kind == "trees" and outcome.followed and plan.shape is not None:
            menu, request = self.offer(outcome.seqs[0]).menu, self._requests.get(outcome.seqs[0].id)
            if menu is not None and request is not None:
                times.observe_draft(request.drafter, menu, plan.shape, batch - outcome.undrafted, draft)

    def _lost(self, outcome: Round, plan: Plan, kind: Kind, first: bool) -> float:
        """Plain rounds that this one took beyond a plain one, by the model of time."""
        batch, times = len(outcome.seqs), self.times
        rows, plain = outcome.tree_rows or batch + sum(outcome.drafted), times.plain(batch)
        taken = times.cost.pass_seconds(rows, batch) + times.around(kind, outcome.followed, batch)
        if first:
            taken -= times.gap(batch)  # plain decoding reads it first, too
        if kind == "trees":
            menu, request = self.offer(outcome.seqs[0]).menu, self._requests.get(outcome.seqs[0].id)
            draft = inf  # as of shapes that are not captured for a batch of which some have left
            if plan.shape is not None and menu is not None and request is not None:
                draft = times.draft(request.drafter, menu, plan.shape, batch - outcome.undrafted)
            taken += draft if isfinite(draft) else min(outcome.seconds.get("draft", 0.0), plain)
        return taken / plain - 1.0

    def _book(self, outcome: Round, plan: Plan, lost: float) -> None:
        """What each request, and its drafter, has shown and lost; in batches the batch counts."""
        drafted = len(outcome.seqs) - outcome.undrafted
        mean, idle = sum(outcome.accepted[:drafted]) / drafted, dict[int, DrafterState]()
        for b, seq in enumerate(outcome.seqs[:drafted]):
            request = self._requests.get(seq.id)
            if request is None:
                continue
            count, part = outcome.accepted[b], plan.part(seq.id)
            request.book(1 + count, lost - (count if drafted <= MOST_WAITED_FOR else mean))
            request.ahead = outcome.ahead > 0
            if not outcome.drafted[b] or part.kind == "plain":
                request.idle()
                idle[id(request.drafter)] = request.drafter
            elif part.kind == "lookup":
                request.see_lookup(count, sum(part.claims[: outcome.depths[b]]))
            elif part.shape is not None and (menu := self.offer(seq).menu) is not None:
                request.see_trees(count, menu.expected(part.shape))
        for state in idle.values():
            state.idle()

    def _asked_again(self, outcome: Round, plan: Plan) -> dict[int, Offer]:
        """The offers of drafters on the host: they also say what was expected of the round that is being booked."""
        found = dict[int, Offer]()
        for seq in outcome.seqs:
            part, request = plan.part(seq.id), self._requests.get(seq.id)
            if part.kind == "trees" and part.shape is None and request is not None:
                found[seq.id] = self.offer(seq)
                request.offered = len(seq.tokens), found[seq.id]
        return found

    def forget(self, seq: Seq) -> None:
        request = self._requests.pop(seq.id, None)
        if request is not None:
            request.drafter.end(request)


def _on_host(group: Group, follows: bool) -> bool:
    """Are its trees made on the host? So are look-ups of a lone sequence, where rounds do not follow each other."""
    if group.menu is not None:
        return False
    return any([offer.costs for offer in group.offers]) or (not follows and group.batch == 1)  # noqa: C419
