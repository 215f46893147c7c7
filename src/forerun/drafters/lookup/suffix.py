"""SuffixDrafter: drafts what followed the longest match of the sequence's end, with probabilities from counts.

Three texts are searched: the request itself (a suffix automaton), where it is allowed the past outputs of the same
tenant, and a corpus that was indexed beforehand. Whichever promises the longest accepted chain drafts; where more
nodes are cheap, other continuations and other texts become branches. Where nothing matches, nothing is drafted on a
CPU; on a GPU, where more nodes cost next to nothing, trees are filled up with the successors that the target finds
likeliest after single tokens (successors.py), and something is drafted in every round that allows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from forerun.core.request import best_count
from forerun.core.tree import committed_tokens
from forerun.core.types import FREE, Budget, Needs, Offer, Scores, Seq, TreeBatch, Verdict, lone_roots
from forerun.drafters.base import AT_HAND, NEGLIGIBLE, LookupDrafter, Parts
from forerun.drafters.heads.growth import BestTree
from forerun.drafters.lookup.ngram import MatchNeeds
from forerun.drafters.lookup.suffix_index import (
    ALIKE,
    CAUTION,
    ONCE,
    OWN_MEMORY,
    SECOND,
    SHARED_MEMORY,
    Corpus,
    HitRates,
)
from forerun.drafters.lookup.suffix_match import ALWAYS, History, NativeLookup, PlaceLookup
from forerun.drafters.lookup.suffix_table import Fill, OwnTrust, Successors, least_of, load_or_read
from forerun.models.native import library as native


@dataclass(slots=True)
class _Sequence:
    lookup: PlaceLookup | NativeLookup
    trust: OwnTrust = field(default_factory=OwnTrust)  # in the table of successors
    read: int = 0  # tokens of the sequence that were read
    looked: int = -1  # length of the sequence when continuations were last looked up
    grown: tuple[tuple[object, ...], BestTree] | None = None  # the coming round's, for which budget
    offered: int = -1  # length of the sequence when a tree was last offered
    nexts: Sequence[int] = ()  # the tokens below its root
    missed: bool = False  # the token behind that was none of these


class SuffixDrafter(LookupDrafter):
    def __init__(
        self,
        longest: int = 16,
        shortest: int = 1,
        history: History | None = None,
        corpus: Corpus | None = None,
        successors: Successors | None = None,
    ) -> None:
        self.longest, self.shortest = longest, shortest
        self.history, self.corpus, self.successors = history, corpus, successors
        is_alone = history is None and corpus is None  # nothing but the request is searched
        self._runs_native = is_alone and native.available()
        self._matches = MatchNeeds(longest, shortest) if is_alone and successors is None else None
        self._sequences: dict[int, _Sequence] = {}
        self._met: set[int] = set()  # sequences that were observed: their outputs go into the history
        self._looked_up: set[int] = set()  # sequences with a chain for the coming round
        self._all = [HitRates(longest, CAUTION if successors is None else 1.0) for _ in range(3)]
        self._fill = None if successors is None else Fill(successors)

    @classmethod
    def build(cls, parts: Parts) -> SuffixDrafter:
        given = parts.speculative
        history = corpus = None
        if given.shared:
            history = History(parts.target.vocab_size, file=Path(given.history) if given.history else None)
        if given.corpus is not None:
            corpus = Corpus.open(Path(given.corpus), parts.target.vocab_size)
        successors = load_or_read(parts.target, parts.opening, parts.cost_file) if parts.opening else None
        return cls(given.prompt_lookup_max, given.prompt_lookup_min, history, corpus, successors)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """Where something is drafted without a match, or in other texts, no pass is run ahead."""
        return Needs() if self._matches is None else self._matches.needs

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        """Where nothing may be drafted, nothing is looked up."""
        if self._fill is not None:
            self._fill.note_budgets(budgets)
        if not any([budget.nodes for budget in budgets]):  # noqa: C419 - twice as fast
            if self._matches is not None:
                self._matches.rest()
            if self._looked_up and len(seqs) == 1 and budgets[0].source == "free":
                self._note_refused(seqs[0])
            return lone_roots(seqs)
        return TreeBatch.trees([self._tree(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)])

    def _note_refused(self, seq: Seq) -> None:
        """Passes may run past matches that are worth no more than this one."""
        state = self._sequences.get(seq.id)
        if self._matches is None or state is None or state.looked != len(seq.tokens):
            return
        for step in state.lookup.steps(1):
            if step.kind == ALIKE:
                self._matches.refuse(step.match)
            elif step.kind == ONCE:  # all occurrences of a shorter match may agree, which is worth as much
                self._matches.refuse(step.match - 1)

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Score the chains that were looked up against the committed tokens, proposed or not."""
        self._met.update([seq.id for seq in seqs])
        if not self._looked_up:
            return
        for seq, committed in zip(seqs, committed_tokens(trees, verdict), strict=True):
            state = self._sequences.get(seq.id)
            if state is None or state.looked != len(seq.tokens):
                continue
            lookup = state.lookup
            if self._fill is not None and state.grown is not None:
                self._fill.count(seq.tokens[-1], lookup.matched, committed[0], state.trust)
            if lookup.match():
                self._count_steps(lookup, committed)
        self._looked_up.clear()

    def _count_steps(self, lookup: PlaceLookup | NativeLookup, committed: Sequence[int]) -> None:
        """Of the chain: which tokens came, up to the first that did not."""
        own, shared = lookup.rates[lookup.source], self._all[lookup.source]
        for step, token in zip(lookup.steps(len(committed)), committed, strict=False):
            hit = step.token == token
            own.count(step.kind, step.match, hit, OWN_MEMORY)
            shared.count(step.kind, step.match, hit, SHARED_MEMORY)
            if not hit:
                if step.second is not None:
                    own.count(SECOND, step.match, step.second == token, OWN_MEMORY)
                    shared.count(SECOND, step.match, step.second == token, SHARED_MEMORY)
                break

    def forget(self, seq: Seq) -> None:
        tenant, met = seq.cache_salt, seq.id in self._met or seq.id in self._sequences
        self._sequences.pop(seq.id, None)
        self._looked_up.discard(seq.id)
        self._met.discard(seq.id)
        if met and self.history is not None and tenant is not None:
            self.history.add(tenant, seq.tokens[seq.prompt_length :])

    def rewind(self, seq: Seq, length: int) -> None:
        """Read the sequence anew; what a draft model wrote is no output."""
        self._sequences.pop(seq.id, None)

    def chain(self, seq: Seq, length: int) -> Iterator[tuple[int, float]]:
        for step in self._state(seq).lookup.steps(length):
            yield step.token, step.rate

    def offer(self, seq: Seq) -> Offer:
        """A chain that matches; with the table of successors the tree that it would draft, as budgets are now."""
        state = self._state(seq)
        if self._fill is not None and self._fill.is_used:
            grown = self._grown(seq, state, self._fill.asked)
            free = tuple(takewhile(NEGLIGIBLE.__le__, grown.by_depth))
            if state.offered != state.looked:
                self._fill.note_offer(sum(free), state.missed)
                state.offered, state.nexts = state.looked, grown.nexts
            return Offer(free=free, otherwise=self._fill.after_miss)
        survivals = state.lookup.survivals()
        if not survivals:
            return FREE
        return Offer(free=tuple(takewhile(NEGLIGIBLE.__le__, survivals)))

    def _state(self, seq: Seq) -> _Sequence:
        state = self._sequences.get(seq.id)
        if state is None:
            state = self._sequences[seq.id] = _Sequence(self._lookup(seq))
        size = len(seq.tokens)
        if state.looked != size:
            most = ALWAYS if self._fills else AT_HAND  # trees are looked up besides
            state.lookup.read(seq, seq.tokens[state.read :], most)
            state.missed = 0 <= state.offered < size and seq.tokens[state.offered] not in state.nexts
            state.read = state.looked = size
            state.grown = None
            self._looked_up.add(seq.id)
        return state

    @property
    def _fills(self) -> bool:
        return self._fill is not None and self._fill.is_used

    def _lookup(self, seq: Seq) -> PlaceLookup | NativeLookup:
        rates = [HitRates(self.longest) for _ in range(3)]
        if self._runs_native:
            return NativeLookup(rates, self._all, self.shortest, seq.stop_ids, self._fill)
        tenant, reader = seq.cache_salt, None
        if self.history is not None and tenant is not None:
            reader = self.history.reader(tenant)
        return PlaceLookup(rates, self._all, self.shortest, reader, self.corpus)

    def _tree(self, seq: Seq, budget: Budget) -> tuple[list[int], Sequence[int]]:
        if not budget.nodes:
            return seq.tokens[-1:], [-1]
        state = self._state(seq)
        if self._matches is not None:
            self._matches.take(state.lookup.match())
        if not self._fills and (budget.width <= 1 or budget.nodes == 1):
            survivals = state.lookup.survivals()[: min(budget.nodes, budget.depth)]
            count = best_count(survivals, budget.price)
            return [seq.tokens[-1], *state.lookup.tokens(count)], range(-1, count)
        grown = self._grown(seq, state, budget)
        return grown.tokens, grown.parents

    def _grown(self, seq: Seq, state: _Sequence, budget: Budget) -> BestTree:
        size, least = (budget.nodes, budget.depth, budget.width), least_of(budget)
        table = self._fill.of(state.trust) if self._fill is not None and self._fill.is_used else None
        wanted = size, least, budget.price, table is None
        if state.grown is None or state.grown[0] != wanted:
            state.grown = wanted, state.lookup.grow(seq, table, size, least, budget.price)
        return state.grown[1]
