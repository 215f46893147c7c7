"""RecyclingDrafter: drafts what the target found likeliest after the same tokens before; and when it rests (`Rest`).

Every pass gives the target's law after every scored node, rejected ones included, and most of it is thrown away. This
drafter keeps the likeliest successors of each pair of tokens and of each single one (token recycling, Luo et al. 2024,
keeps those of single ones) and grows a tree of them, the likeliest path first. How far a kept probability can be
trusted is learnt from the committed tokens, at no cost. What is kept belongs to one request, or where `shared` is
set to one tenant.

On a device the likeliest tokens after every node are found behind the pass and sent to the host, which reads them when
the round is read (`keep`): the next plain round is launched before, and the table is one round late. So a round is
read first only where a draft is worth that, as with any look-up. Finding them takes some hundredths of a small model's
round. Where the table seldom knows what comes, or drafts do not bring what all that costs, nothing is offered for a
while, and only committed tokens are kept (`Rest`); while that goes on, rests double.

Greedy texts and sampled ones are told apart, because drafts of the latter are accepted far less often. What one text
has shown holds for the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import itemgetter

import torch
from torch import Tensor

from forerun.core.request import best_count
from forerun.core.tree import committed_tokens
from forerun.core.types import CUT, NEVER, Budget, Offer, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.base import AT_HAND, NEGLIGIBLE, BaseDrafter, Parts, chances, goes_on
from forerun.drafters.heads.growth import Candidates, grow
from forerun.drafters.model.draft_law import likeliest

BREAK_EVEN = 0.2  # tokens a round that the table must know, beside the target's own
FIRST, TRIAL, MOST = 6.0, 3.0, 10.0  # such tokens that may be missed: at the start, after a rest, and at most
# in plain rounds: what it takes to keep a row, and beside its nodes a round that is read first; and what of that drafts
# may owe at the start, after a rest, and at most
KEPT_ROW, READ_FIRST = 0.05, 0.4
FIRST_DEBT, TRIAL_DEBT, MOST_DEBT = 2.5, 1.0, 5.0
SHORTEST, LONGEST = 32, 512  # rounds of a rest


class _State:
    __slots__ = ("credit", "left", "length", "spare")

    def __init__(self) -> None:
        self.credit, self.spare, self.left, self.length = FIRST, FIRST_DEBT, 0, SHORTEST


class Rest:
    """Of all sequences of one drafter."""

    def __init__(self) -> None:
        self._states = {True: _State(), False: _State()}

    def holds(self, seq: Seq) -> bool:
        return self._states[seq.params.is_greedy].left > 0

    def note(self, seq: Seq, known: int, drafted: bool) -> None:
        """Of the tokens that a round of this sequence brought, drafts were right about so many, or would have been."""
        state = self._states[seq.params.is_greedy]
        if state.left:
            state.left -= 1
            state.credit, state.spare = TRIAL, TRIAL_DEBT
            return
        state.credit = min(MOST, state.credit + known - BREAK_EVEN)
        state.spare = min(MOST_DEBT, state.spare - KEPT_ROW + (known - READ_FIRST if drafted else 0.0))
        if min(state.credit, state.spare) < 0:
            state.left, state.length = state.length, min(2 * state.length, LONGEST)
        elif state.spare == MOST_DEBT:
            state.length = SHORTEST


KEPT = 8  # successors of a context
MOST_CONTEXTS, MOST_TENANTS = 1 << 16, 16  # that are kept; beyond, the oldest are dropped
MEMORY = 0.998  # of the hit rates, per try
ANY = -1  # in the place of the first token of a context: whatever it was
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
# the kind of a successor that stood in the prompt; others: which share the target gave it
_COPIED = len(_SHARES) + 1
# how often successors of a kind come
_PRIOR = (0.01, 0.03, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.85, 0.3)

Successors = tuple[tuple[int, int], ...]  # token and kind, the likeliest first
Context = tuple[int, int]


class Table:
    """Successors by context, and how often each kind of them was right."""

    def __init__(self) -> None:
        self._rows: OrderedDict[Context, Successors] = OrderedDict()
        kinds = 2 * len(_PRIOR)  # found by two tokens, and by one
        self._hits, self._tries = [10.0 * rate for rate in (*_PRIOR, *_PRIOR)], [10.0] * kinds

    def __len__(self) -> int:
        return len(self._rows)

    def after(self, before: int, token: int) -> list[tuple[int, float]]:
        """Successors of two tokens, else of the last one, and how likely each is."""
        return [(successor, self._hits[i] / self._tries[i]) for successor, i in self._known(before, token)]

    def learn(self, before: int, token: int, successors: Successors) -> None:
        for context in ((before, token), (ANY, token)):
            self._rows[context] = successors
            self._rows.move_to_end(context)
        while len(self._rows) > MOST_CONTEXTS:
            self._rows.popitem(last=False)

    def learn_copied(self, tokens: Sequence[int]) -> None:
        """From a prompt: what followed each pair, unless the target's own law is known."""
        for i in range(1, len(tokens)):
            found = ((tokens[i], _COPIED),)
            self._rows.setdefault((ANY, tokens[i - 1]), found)
            if i > 1:
                self._rows.setdefault((tokens[i - 2], tokens[i - 1]), found)

    def knows(self, before: int, token: int, came: int) -> bool:
        """Is what came its likeliest successor here?"""
        return max(self.after(before, token), key=itemgetter(1), default=(ANY, 0.0))[0] == came

    def count(self, before: int, token: int, came: int) -> None:
        """Was what it would have drafted here right?"""
        for successor, i in self._known(before, token):
            self._hits[i] = self._hits[i] * MEMORY + (successor == came)
            self._tries[i] = self._tries[i] * MEMORY + 1.0

    def _known(self, before: int, token: int) -> list[tuple[int, int]]:
        found = self._rows.get((before, token))
        if found is not None:
            return list(found)
        shift = len(_PRIOR)
        return [(successor, kind + shift) for successor, kind in self._rows.get((ANY, token), ())]


class RecyclingDrafter(BaseDrafter):
    """Implements forerun.drafters.base.KeepsRows."""

    looks_up = True

    def __init__(self, shared: bool = False) -> None:
        self.shared, self._rest = shared, Rest()
        self._tables: dict[int, Table] = {}  # by sequence
        self._tenants: OrderedDict[str, Table] = OrderedDict()

    @classmethod
    def build(cls, parts: Parts) -> RecyclingDrafter:
        return cls(parts.speculative.shared)

    def offer(self, seq: Seq) -> Offer:
        """The likeliest chain costs nothing; while the drafter rests there is none."""
        if self._rest.holds(seq):
            return NEVER
        return Offer(free=chances(self._likeliest_rates(seq)))

    def _likeliest_rates(self, seq: Seq) -> Iterator[float]:
        table, (before, token) = self._table(seq), _ends(seq.tokens)
        for _ in range(AT_HAND):
            if not (after := table.after(before, token)):
                return
            before, (token, rate) = token, max(after, key=itemgetter(1))
            yield rate
            if token in seq.stop_ids:
                return

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return TreeBatch.trees([self._tree(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)])

    def keep(self, seqs: Sequence[Seq], logits: Tensor) -> Callable[[], list[Successors]] | None:
        """The likeliest successors of every node, on their way; none for sequences that all rest."""
        return None if all([self._rest.holds(seq) for seq in seqs]) else _sent(logits)  # noqa: C419

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Keep the likeliest successors of every node; a prompt, and a round at rest, show only what they hold."""
        committed, rows = committed_tokens(trees, verdict), scores.kept
        if rows is None and scores.logits is not None:  # part of a batch, or of a composition
            rows = self.keep(seqs, scores.logits)
        if rows is None:
            for b, (seq, came) in enumerate(zip(seqs, committed, strict=True)):
                if goes_on(seq, trees, b):
                    self._table(seq).learn_copied([*seq.tokens[-2:], *came])
                    self._rest.note(seq, len(came) - 1, len(came) > 1)
                elif seq.id not in self._tables:  # with the first part of it all that is read is learnt
                    self._table(seq).learn_copied(seq.tokens)
            return
        (tokens, parents), paths, found = trees.to_host(), verdict.to_host()[0], rows()
        for b, seq in enumerate(seqs):
            table, start = self._table(seq), trees.starts[b]
            before = seq.tokens[-2] if len(seq.tokens) > 1 else ANY
            below = range(start + 1, trees.starts[b + 1])
            contexts = [(before, tokens[start]), *((tokens[start + parents[i]], tokens[i]) for i in below)]
            path = [0, *paths[b]]
            known = len(path) - 1 if below else table.knows(*contexts[0], committed[b][0])
            self._rest.note(seq, known, bool(below))
            for node, token in zip(path, committed[b], strict=True):
                table.count(*contexts[node], token)
            for node, context in enumerate(contexts):
                if context[1] != CUT:
                    table.learn(*context, found[start + node])
            for node in path:  # where contexts repeat, what was committed is the last word
                table.learn(*contexts[node], found[start + node])

    def rewind(self, seq: Seq, length: int) -> None:
        """What the target would write after some tokens holds wherever they stand."""

    def forget(self, seq: Seq) -> None:
        self._tables.pop(seq.id, None)

    def _table(self, seq: Seq) -> Table:
        table = self._tables.get(seq.id)
        if table is None:
            tenant = seq.cache_salt if self.shared else None
            table = Table() if tenant is None else self._tenants.setdefault(tenant, Table())
            while len(self._tenants) > MOST_TENANTS:
                self._tenants.popitem(last=False)
            self._tables[seq.id] = table
        return table

    def _tree(self, seq: Seq, budget: Budget) -> tuple[list[int], list[int]]:
        """The likeliest nodes first, until the rest is negligible."""
        table, width = self._table(seq), max(1, budget.width)

        def below(before: int, token: int) -> Candidates:
            found = [(rate, successor, token) for successor, rate in table.after(before, token)]
            found.sort(key=itemgetter(0), reverse=True)
            return found, 0.0

        def ways(node: tuple[float, int, int]) -> Candidates | None:
            return None if node[1] in seq.stop_ids else below(node[2], node[1])

        size, first = (budget.nodes, budget.depth, width), below(*_ends(seq.tokens))
        grown = grow(seq.tokens[-1], first, ways, None, size, NEGLIGIBLE / 4)
        count = best_count(grown.survivals, budget.price)
        return grown.tokens[: count + 1], grown.parents[: count + 1]


def _ends(tokens: Sequence[int]) -> Context:
    return (tokens[-2] if len(tokens) > 1 else ANY), tokens[-1]


def _sent(logits: Tensor) -> Callable[[], list[Successors]]:
    """The likeliest tokens after every node, with the kind that says how likely they were, on their way to the host."""
    values, rows = likeliest(logits.float()[None], min(KEPT, logits.shape[-1]))
    if logits.device.type != "cuda":
        return lambda: _unpacked(values, rows)
    host = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in (values, rows)]
    for into, part in zip(host, (values, rows), strict=True):
        into.copy_(part, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def read() -> list[Successors]:
        done.synchronize()
        return _unpacked(*host)

    return read


def _unpacked(values: Tensor, rows: Tensor) -> list[Successors]:
    """From log-probabilities and tokens [1, M, K]."""
    kinds = torch.bucketize(values[0], _limits(), right=True).tolist()
    return [tuple(zip(*pair, strict=True)) for pair in zip(rows[0].tolist(), kinds, strict=True)]


@cache
def _limits() -> Tensor:
    """Logarithms of the shares that divide the kinds."""
    return torch.tensor(_SHARES, dtype=torch.float64).log().float()
