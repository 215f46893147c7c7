"""DrafterPool: routes each sequence of a batch to its own drafter, and checks what that proposes.

A batch may mix requests that want different drafters. The pool splits it, calls each drafter for its own sequences,
and puts the results back in order; a batch with one drafter is passed on whole. A drafter that raises, or whose trees
are malformed, is switched off for its sequences, which are then decoded plainly: kernels would read past the end of a
malformed tree, and a wrong root would change the output silently. Trees that a device has grown (`TreeBatch.form`) come
from our own code: only their sizes are checked, since reading them would make the host wait.

Trees from the host and from a device in one pass would make every round wait for the last one. So where drafts are
captured, a head that drafts for one sequence drafts for all that run beside it (`gather`): for those too that ask for
look-ups or for nothing. What drafts changes no text.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import count
from typing import Protocol, TypeGuard

from forerun.core.errors import InvalidInput
from forerun.core.params import Forces
from forerun.core.tree import ONE_NODE, ints_of
from forerun.core.types import Budget, Draws, Needs, Offer, Request, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.base import BaseDrafter, Drafter, KeepsRows, LookupDrafter, NoDrafter, PoolingDrafter, device_of
from forerun.drafters.device.protocol import DeviceDrafter
from forerun.engine.sequence import SWITCHED_OFF, SequenceState


def check_trees(trees: TreeBatch, seqs: Sequence[Seq], budgets: Sequence[Budget], vocab_size: int) -> None:
    """Raise InvalidInput unless there is one tree per sequence, within its budget, and each is well formed."""
    starts = trees.starts
    if len(starts) != len(seqs) + 1 or starts[0] != 0:
        raise InvalidInput(f"{len(starts) - 1} trees were proposed for {len(seqs)} sequences")
    if trees.form is None:
        tokens, parents = trees.to_host()
        if _are_lone_roots(trees, tokens, parents, seqs):
            return
        if not len(tokens) == len(parents) == starts[-1]:
            raise InvalidInput(f"{len(tokens)} tokens and {len(parents)} parents for {starts[-1]} nodes")
        if {*map(type, tokens), *map(type, parents)} != {int}:
            raise InvalidInput("tokens and parents of a tree are integers")
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise InvalidInput(f"a tree holds a token outside the vocabulary of {vocab_size}")
    # trees of one form are as large as any may be
    shared = max((budget.nodes for budget in budgets), default=0)
    for b, seq in enumerate(seqs):
        first, end = starts[b], starts[b + 1]
        most = budgets[b].nodes if trees.form is None else shared
        if not 0 < end - first <= most + 1:
            raise InvalidInput(f"a tree of {end - first} nodes, but 1 to {most + 1} were asked for")
        if trees.form is not None:
            continue
        if tokens[first] != seq.tokens[-1] or parents[first] != -1:
            raise InvalidInput("the root of a tree is the last token of its sequence, and its parent is -1")
        if end - first > 1:
            depth = _depth_of(tuple(parents[first:end]))
            if depth is None:
                raise InvalidInput(f"{parents[first:end]} are no parents: they come before their children")
            if depth > budgets[b].depth:
                raise InvalidInput(f"a tree is {depth} deep, but at most {budgets[b].depth} was asked for")
    if trees.drawn_from is not None:
        _check_draws(trees, trees.drawn_from, vocab_size)


def _are_lone_roots(trees: TreeBatch, tokens: list[int], parents: list[int], seqs: Sequence[Seq]) -> bool:
    """A plain round, as most are in a large batch: then there is nothing else to check."""
    if trees.starts == ONE_NODE and len(tokens) == len(parents) == 1 and trees.drawn_from is None:
        return type(tokens[0]) is int and parents[0] == -1 and tokens[0] == seqs[0].tokens[-1]
    if not trees.is_plain() or trees.drawn_from is not None or len(parents) != len(tokens):
        return False
    return {*map(type, tokens)} == {int} and {*parents} == {-1} and tokens == [seq.tokens[-1] for seq in seqs]


@lru_cache(maxsize=1024)
def _depth_of(parents: tuple[int, ...]) -> int | None:
    """How deep a tree of this shape is; None where a child comes before its parent. Cached, because shapes recur."""
    depths = [0]
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            return None
        depths.append(depths[parent] + 1)
    return max(depths)


def _check_draws(trees: TreeBatch, draws: Draws, vocab_size: int) -> None:
    """Every drawn node names its law, and siblings were drawn from one."""
    if draws.rows.shape != (trees.nodes,) or draws.laws.ndim != 2 or draws.laws.shape[1] > vocab_size:
        shapes = f"{tuple(draws.laws.shape)} laws and {tuple(draws.rows.shape)} rows"
        raise InvalidInput(f"{shapes} for {trees.nodes} nodes and a vocabulary of {vocab_size}")
    if trees.form is not None:
        return
    rows, parents = draws.rows.tolist(), trees.to_host()[1]
    if max(rows, default=-1) >= len(draws.laws):
        raise InvalidInput(f"a node names law {max(rows)} of {len(draws.laws)}")
    for first, end in zip(trees.starts, trees.starts[1:], strict=False):
        law_of: dict[int, int] = {}
        for parent, row in zip(parents[first:end], rows[first:end], strict=True):
            if row >= 0 and law_of.setdefault(parent, row) != row:
                raise InvalidInput("siblings that were sampled come from one law")


log = logging.getLogger(__name__)

POOLING = "pooling"  # what sequences have whose prompts are embedded
BESIDE = "prediction+", "forced+"  # what is composed with a drafter for single requests
LONG = 16  # rounds of rest: more are not told apart


def _groups(names: Sequence[str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault(name, []).append(i)
    return groups


def _shared_drafter(seqs: Sequence[SequenceState]) -> str | None:
    """The one that drafts for all of them, as is usual; None = there are several."""
    name = seqs[0].drafting
    for seq in seqs:
        if seq.drafting != name:
            return None
    return name


def _runs_own(name: str, own: str) -> bool:
    """Does this drafter run the head of an adapter, alone or beside others: prediction+eagle2@NAME?"""
    return name.partition("@")[1:] == own.partition("@")[1:]


class MakesDrafter(Protocol):
    """Builds a drafter by name; with `head`, the folder of another head than the one that was configured."""

    def __call__(self, name: str, head: str | None = None) -> Drafter: ...


class DrafterPool:
    """Drafters by name, made on first use."""

    def __init__(
        self,
        make: MakesDrafter,
        vocab_size: int,
        runs_head: Callable[[str], bool] = lambda name: False,
        captures: bool = False,
    ) -> None:
        """`captures`: drafters hold graphs in the target's buffers, so that no other runs what one of them does."""
        self._make, self._vocab_size, self._runs_head, self._captures = make, vocab_size, runs_head, captures
        self._made: dict[str, Drafter] = {SWITCHED_OFF: NoDrafter(), POOLING: PoolingDrafter()}
        self._failed: set[str] = set()
        self._rests = 0  # further rounds for which the first sequence of this one drafts nothing that costs
        self._head: str | None = None  # the folder of a head that was swapped in; None = the configured one
        self._own: dict[str, tuple[str, str]] = {}  # by adapter: the drafter with a head of its own, and its folder
        self._retired: dict[str, set[int]] = {}  # drafters with a former head, and the sequences that have them
        self._guests: dict[int, SequenceState] = {}  # for which another drafter drafts than they ask for

    def has(self, name: str) -> bool:
        return name in self._made

    def get(self, name: str) -> Drafter:
        if name not in self._made:
            owns = (head for own, head in self._own.values() if _runs_own(name, own))
            head = next(owns, self._head)
            self._made[name] = self._make(name, head) if head is not None else self._make(name)
        return self._made[name]

    def swap_head(self, head: str, seqs: Sequence[SequenceState]) -> None:
        """Draft with the head in this folder from now on; `seqs`, of which drafters hold rows, keep the former one.

        All drafters that run a head are built before any is replaced: where one cannot be, nothing has changed.
        """
        names = [name for name in self._made if name and name not in self._retired and self._runs_head(name)]
        if not names:
            raise InvalidInput("no drafter in use runs a trained head; start with one, as draft_model=FOLDER")
        fresh = {name: self._make(name, head) for name in names if not name.startswith(BESIDE)}
        for name in names:  # what is drafted beside others comes behind them, and is put beside the new ones
            drafter, former = fresh.get(name) or self._make(name), self._made[name]
            known_as = [other for other, made in self._made.items() if made is former]
            users = [seq for seq in seqs if seq.drafting in known_as]
            if users:
                kept = next(f"{name}@{i}" for i in count(1) if f"{name}@{i}" not in self._made)
                self._made[kept], self._retired[kept] = former, {seq.id for seq in users}
                for seq in users:
                    seq.draft_with(kept)
            self._made |= dict.fromkeys(known_as, drafter)
            self._failed -= set(known_as)
        self._head = head

    def add_own(self, adapter: str, drafter: str, head: str) -> None:
        """Draft with the head in this folder for the texts of an adapter that ask for no drafter by name."""
        names = (f"{drafter}@{adapter}{'' if i == 1 else f'.{i}'}" for i in count(1))
        name = next(name for name in names if name not in self._made)
        self._made[name] = self._make(drafter, head)
        self._own[adapter] = name, head

    def drop_own(self, adapter: str, seqs: Sequence[SequenceState]) -> None:
        """The reverse; `seqs`, of which drafters hold rows, keep the head to their end."""
        own, _ = self._own.pop(adapter, (None, None))
        for name in [name for name in self._made if own is not None and _runs_own(name, own)]:
            self._retired[name] = {seq.id for seq in seqs if seq.drafting == name}
            self._free(name)

    def _free(self, name: str) -> None:
        if not self._retired[name]:
            del self._retired[name], self._made[name]

    def name_for(self, request: Request, default: str) -> str:
        """The drafter that a request asks for, its adapter's or the default."""
        if request.pooling is not None:
            return POOLING
        return request.drafter or self._own.get(request.adapter or "", (default,))[0]

    def name_beside(self, request: Request, name: str) -> str:
        """The drafter of this name, built if need be, and beside it what drafts a request's prediction and law.

        Where drafts are captured, a prediction is put beside the drafter of all requests, for good: it has captured its
        drafts and learnt what they bring, its rounds overlap, and two in one round would write into the same buffers.
        """
        drafter, parts = self.get(name), name.split("+")
        if isinstance(drafter, NoDrafter):
            return name
        beside = ["prediction"] if request.prediction else []
        if self._captures and not isinstance(drafter, LookupDrafter):  # look-ups alone are planned apart
            name = "+".join([one for one in parts if f"{one}+" not in BESIDE])
            if beside or "prediction" in parts:
                self._made[name] = self.get(f"prediction+{name}")
            return name
        if not self._captures and any(isinstance(law, Forces) for law in request.params.processors):
            beside = ["forced", *beside]
        name = "+".join([*[one for one in beside if one not in parts], *parts])
        self.get(name)
        return name

    def add(self, name: str, drafter: Drafter) -> None:
        self._made[name] = drafter

    def needs(self, seqs: Sequence[SequenceState]) -> Needs:
        needs: Needs | None = None
        for name in (seqs[0].drafting,) if len(seqs) == 1 else {seq.drafting for seq in seqs}:
            try:
                more = self._made[name].needs
                needs = more if needs is None else needs | more
            except Exception as error:
                self._switch_off(name, [seq for seq in seqs if seq.drafting == name], error)
        needs = needs or Needs()
        return needs if needs.match_length is None or len(seqs) > 1 else alone(needs, seqs[0], self._rests)

    def propose(self, seqs: Sequence[SequenceState], budgets: Sequence[Budget]) -> TreeBatch:
        self._rests = 0 if budgets[0].nodes else budgets[0].repeats
        name = _shared_drafter(seqs)
        if name is not None:
            return self._propose(name, seqs, budgets)
        groups = _groups([seq.drafting for seq in seqs])
        parts = [
            self._propose(name, [seqs[b] for b in which], [budgets[b] for b in which]) for name, which in groups.items()
        ]
        return TreeBatch.join(parts, [b for which in groups.values() for b in which])

    def keep_rows(self, seqs: Sequence[SequenceState], scores: Scores) -> Scores:
        """The scores of a pass with what the drafter of these sequences keeps of their logits."""
        name = None if scores.logits is None else _shared_drafter(seqs)
        drafter = None if name is None else self._made[name]
        if name is None or scores.logits is None or not _keeps_rows(drafter):
            return scores
        try:
            return replace(scores, kept=drafter.keep(seqs, scores.logits))
        except Exception as error:
            self._switch_off(name, seqs, error)
            return scores

    def observe(self, seqs: Sequence[SequenceState], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        shared = _shared_drafter(seqs)
        if shared is not None:
            try:
                self._made[shared].observe(seqs, trees, scores, verdict)
            except Exception as error:
                self._switch_off(shared, seqs, error)
            return
        for name, which in _groups([seq.drafting for seq in seqs]).items():
            some = [seqs[b] for b in which]
            try:
                self._observe_part(name, some, which, trees, scores, verdict)
            except Exception as error:
                self._switch_off(name, some, error)

    def gather(self, seqs: Sequence[SequenceState], beside: Sequence[SequenceState] = ()) -> None:
        """Let a head that drafts for some of these draft for all, as far as that can be.

        No round of `seqs` is unread. Those `beside` share the coming pass, and keep the drafter that they have.
        """
        together = [*beside, *seqs]
        if not seqs or self.are_gathered(together):
            return
        names = Counter([seq.drafting for seq in together if seq.id not in self._guests])
        lead = max(filter(self._leads, names), key=lambda name: names[name], default=None)
        for seq in seqs:
            if seq.drafting != lead:
                self._dismiss(seq)
            if lead is not None and seq.drafting != lead and self._may_join(seq, lead):
                self._guests[seq.id] = seq
                seq.draft_with(lead)

    def are_gathered(self, seqs: Sequence[SequenceState]) -> bool:
        """Does one drafter draft for all of these, that one of them asked for? Else the host may not plan ahead."""
        if not self._captures or not seqs:
            return True
        return _shared_drafter(seqs) is not None and any([seq.id not in self._guests for seq in seqs])  # noqa: C419

    def _leads(self, name: str) -> bool:
        """Does this drafter grow trees on the device, behind any unread round?"""
        return (device := self._device_of(name)) is not None and device.menu.switches

    def _device_of(self, name: str) -> DeviceDrafter | None:
        """None also where it raises: it is switched off when a round asks it."""
        try:
            return device_of(self._made[name], ())
        except Exception as error:
            log.debug("drafter %r does not say what drafts for it on a device: %r", name, error)
            return None

    def _may_join(self, seq: SequenceState, lead: str) -> bool:
        """Can the other drafter draft for this sequence, and would its own make look-ups or nothing?"""
        request, own, device = seq.request, self._made[seq.drafting], self._device_of(lead)
        if seq.drafting in (SWITCHED_OFF, POOLING) or request.budget is not None or request.prediction:
            return False
        if device is None or not isinstance(own, LookupDrafter | NoDrafter):
            return False
        try:
            return self._made[lead].offer(seq).menu is device.menu
        except Exception as error:
            log.debug("drafter %r offers nothing to another's sequence: %r", lead, error)
            return False

    def _dismiss(self, seq: SequenceState) -> None:
        """Its own drafter drafts for a guest again."""
        if self._guests.pop(seq.id, None) is not None:
            self._leave(seq)

    def _leave(self, seq: SequenceState) -> None:
        """What drafts for a sequence forgets it; from now on it has the drafter that it asked for."""
        name = seq.drafting
        if name in self._made:
            self._forget(name, seq)
        if name in self._retired:
            self._retired[name].discard(seq.id)
            self._free(name)
        seq.draft_with(seq.drafter if seq.drafter in self._made else SWITCHED_OFF)

    def forget(self, seq: SequenceState) -> None:
        """Free what its drafter holds, and what one that was switched off may still hold."""
        self._dismiss(seq)
        if seq.drafter != seq.drafting and seq.drafter in self._made:
            self._forget(seq.drafter, seq)
        if seq.drafting in self._retired:
            self._leave(seq)  # if it is read again, the new one sees all of it
        elif seq.drafting in self._made:
            self._forget(seq.drafting, seq)

    def never_draft(self, seqs: Sequence[SequenceState]) -> bool:
        """Has none of these sequences a drafter, whatever the controller plans?"""
        name = _shared_drafter(seqs)
        return name is not None and isinstance(self._made[name], NoDrafter)

    def device(self, seqs: Sequence[SequenceState]) -> DeviceDrafter | None:
        """The device drafter that these sequences share; None = their rounds are read before the next is drafted."""
        return device_of(self._made[seqs[0].drafting], seqs)

    def looks_up(self, seq: Seq) -> bool:
        """Does its drafter make look-ups and nothing else?"""
        drafter = self._made[seq.drafting] if isinstance(seq, SequenceState) else None
        return isinstance(drafter, BaseDrafter) and drafter.looks_up

    def offer(self, seq: Seq) -> Offer:
        """What a sequence's drafter offers; one that raises is switched off, and the plain one is asked."""
        assert isinstance(seq, SequenceState), "drafters are known of an engine's own sequences"
        try:
            return self._made[seq.drafting].offer(seq)
        except Exception as error:
            self._switch_off(seq.drafting, [seq], error)
            return self._made[SWITCHED_OFF].offer(seq)

    def _propose(self, name: str, seqs: Sequence[SequenceState], budgets: Sequence[Budget]) -> TreeBatch:
        try:
            trees = self._made[name].propose(seqs, budgets)
            check_trees(trees, seqs, budgets, self._vocab_size)
        except Exception as error:
            self._switch_off(name, seqs, error)
            return self._made[SWITCHED_OFF].propose(seqs, budgets)
        return trees

    def _observe_part(
        self,
        name: str,
        seqs: Sequence[SequenceState],
        which: Sequence[int],
        trees: TreeBatch,
        scores: Scores,
        verdict: Verdict,
    ) -> None:
        """Show a drafter its own sequences of a batch that several share."""
        nodes, rows = trees.nodes_of(which), ints_of(which, verdict.paths.device)
        hidden = {layer: rows_[nodes] for layer, rows_ in scores.hidden.items()}
        encoded = None if scores.encoded is None else [scores.encoded[b] for b in which]
        logits = None if scores.logits is None else scores.logits[nodes]
        part = Scores(logits, hidden, encoded=encoded)
        chosen = Verdict(verdict.paths[rows], verdict.accepted[rows], verdict.bonus[rows])
        self._made[name].observe(seqs, trees.select(which), part, chosen)

    def _switch_off(self, name: str, seqs: Sequence[SequenceState], error: Exception) -> None:
        """These sequences continue without their drafter; logged once per drafter."""
        if name not in self._failed:
            self._failed.add(name)
            log.warning("drafter %r failed and is switched off for its sequences: %r", name, error)
        for seq in seqs:
            seq.draft_with()
            self._forget(name, seq)

    def _forget(self, name: str, seq: SequenceState) -> None:
        try:
            self._made[name].forget(seq)
        except Exception as error:
            log.warning("drafter %r could not forget a sequence: %r", name, error)


def _keeps_rows(drafter: Drafter | None) -> TypeGuard[KeepsRows]:
    return drafter is not None and _kind_keeps_rows(type(drafter))


@cache
def _kind_keeps_rows(kind: type) -> bool:
    """Asked once: to compare a class with a protocol takes long."""
    return issubclass(kind, KeepsRows)


def alone(needs: Needs, seq: SequenceState, rests: int) -> Needs:
    """What a drafter needs of a sequence that is alone in its round; its head rests for `rests` further rounds.

    One call of the target may then run the passes of several plain rounds, as nothing is decided between them: until
    a look-up matches (`Needs.match_length`), or the controller lets the head run again (`Budget.repeats`).
    """
    # is its next token always where the logits are largest, whatever the text says by then?
    is_settled = seq.traits.is_plain_greedy and not seq.params.stop
    if not is_settled or (needs.may_run and not rests):
        return _asked_each_round(needs)
    return _while_it_rests(needs, min(rests, LONG)) if needs.may_run else needs


@lru_cache(maxsize=64)
def _asked_each_round(needs: Needs) -> Needs:
    """The same needs, and every round is asked for: one pass a call."""
    return replace(needs, match_length=None, may_run=False)


@lru_cache(maxsize=256)
def _while_it_rests(needs: Needs, rounds: int) -> Needs:
    """The same needs of a head that rests for that many further rounds."""
    return replace(needs, may_run=False, rests=rounds)
