"""PredictionDrafter: drafts what the caller predicts the answer to be, such as a file that is to be edited.

The prediction is aligned with the text (`Alignment`), and what follows the cursor is drafted. How often the predicted
token came is learnt by how many tokens before it agreed, drafted or not; a guess that is seldom right is not drafted.
A text that was not found in its prediction for a while is looked at only where rounds end anyhow.

`prediction+other` is what a request with a prediction is drafted by: see `Engine.prepare`.

ForcedDrafter: drafts what the law leaves no choice about, such as keys of a JSON schema or the end of thinking.

A grammar often allows one continuation alone. Its text may be cut into tokens in several ways, so that a forced token
is not always the target's: how often it is, is counted.

`forced+other` drafts for a request with such a law, where drafts lie in no captured buffers: see `DrafterPool`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from forerun.core.params import Forces, Prefix
from forerun.core.request import best_count
from forerun.core.tree import committed_tokens
from forerun.core.types import FREE, Budget, Needs, Offer, Scores, Seq, TreeBatch, Verdict, lone_roots
from forerun.drafters.base import AT_HAND, NEGLIGIBLE, LookupDrafter
from forerun.drafters.lookup.alignment import Alignment
from forerun.drafters.lookup.ngram import HitRates

# how often the next token is right behind 0, 1, 2, ... tokens that agree, before anything was seen
PRIOR = (0.3, 0.45, 0.65, 0.75, 0.82, 0.86, 0.9, 0.92, 0.93, 0.94, 0.95, 0.95, 0.96, 0.96, 0.97, 0.97)
WEIGHT = 8.0  # tries that the prior is worth
LEAST = 0.25  # guesses that are right less often are not drafted
PATIENCE = 24  # tokens in a row that were not predicted, after which rounds are no longer ended to look

AWAKE, ASLEEP = Needs(), Needs(match_length=0)


@dataclass(slots=True)
class _Sequence:
    alignment: Alignment
    rates: HitRates
    read: int  # tokens of the sequence that the alignment has
    unforeseen: int = 0  # of these, the last ones, none of which was predicted


class PredictionDrafter(LookupDrafter):
    """What follows the text's place in its prediction; nothing where a request has none."""

    def __init__(self) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._all = HitRates([WEIGHT * rate for rate in PRIOR], [WEIGHT] * len(PRIOR))
        self._awake: set[int] = set()  # sequences that rounds are ended for

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return AWAKE if self._awake else ASLEEP

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        if not any([budget.nodes for budget in budgets]):  # noqa: C419 - quicker
            return lone_roots(seqs)
        return TreeBatch.chains(
            [[seq.tokens[-1], *self._draft(seq, budget)] for seq, budget in zip(seqs, budgets, strict=True)]
        )

    def forget(self, seq: Seq) -> None:
        self._sequences.pop(seq.id, None)
        self._awake.discard(seq.id)

    def chain(self, seq: Seq, length: int) -> Iterator[tuple[int, float]]:
        state = self._look_up(seq)
        if state is not None:
            at, run = state.alignment.at, 1 + state.alignment.run
            for i, token in enumerate(state.alignment.tokens[at : at + length]):
                yield token, state.rates.rate(run + i, self._all)

    def offer(self, seq: Seq) -> Offer:
        """As LookupDrafter's, from the counts: every round asks for it."""
        state = self._look_up(seq)
        survivals = [] if state is None else self._survivals(state, AT_HAND, NEGLIGIBLE)
        return Offer(free=tuple(survivals)) if survivals else FREE

    def _draft(self, seq: Seq, budget: Budget) -> Sequence[int]:
        state = self._look_up(seq) if budget.nodes else None
        if state is None:
            return ()
        depth = min(budget.nodes, budget.depth)
        if depth and budget.price is not None:
            depth = best_count(self._survivals(state, depth), budget.price)
        at = state.alignment.at
        return state.alignment.tokens[at : at + depth]

    def _survivals(self, state: _Sequence, length: int, least: float = 0.0) -> list[float]:
        length = min(length, len(state.alignment.tokens) - state.alignment.at)
        return state.rates.survivals(1 + state.alignment.run, length, self._all, least)

    def _look_up(self, seq: Seq) -> _Sequence | None:
        """Where the sequence stands in its prediction; None = nothing is worth drafting."""
        state = self._sequences.get(seq.id)
        if state is None:
            if not seq.prediction:
                return None
            state = _Sequence(Alignment(seq.prediction), HitRates.empty(len(PRIOR)), seq.prompt_length)
            self._sequences[seq.id] = state
            self._awake.add(seq.id)
        if state.read < len(seq.tokens):
            self._read(state, seq.tokens[state.read :])
            (self._awake.add if state.unforeseen <= PATIENCE else self._awake.discard)(seq.id)
        alignment = state.alignment
        if not alignment.guesses or state.rates.rate(1 + alignment.run, self._all) < LEAST:
            return None
        return state

    def _read(self, state: _Sequence, tokens: Sequence[int]) -> None:
        """The text has gone on with these tokens."""
        alignment = state.alignment
        for token in tokens:
            guesses, run = alignment.guesses, 1 + alignment.run
            hit = alignment.add(token)
            if guesses:
                state.rates.count(run, hit, memory=0.97)
                self._all.count(run, hit, memory=0.998)
            state.unforeseen = 0 if hit else state.unforeseen + 1
        state.read += len(tokens)


SURE, MEMORY = 0.9, 0.99  # how often a forced token comes, before anything was seen


@dataclass(slots=True)
class _Forced:
    length: int = -1  # of the sequence when its forced tokens were looked up
    tokens: Sequence[int] = field(default_factory=tuple)


class ForcedDrafter(LookupDrafter):
    """The tokens that must follow; nothing where several may."""

    needs = Needs()

    def __init__(self) -> None:
        self._sequences: dict[int, _Forced] = {}
        self._hits, self._tries = SURE * WEIGHT, WEIGHT

    def chain(self, seq: Seq, length: int) -> Iterator[tuple[int, float]]:
        rate = self._hits / self._tries
        for token in self._look_up(seq)[:length]:
            yield token, rate

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return TreeBatch.chains(
            [[seq.tokens[-1], *self._draft(seq, budget)] for seq, budget in zip(seqs, budgets, strict=True)]
        )

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Count how often forced tokens came, drafted or not."""
        if not self._sequences:
            return
        for seq, committed in zip(seqs, committed_tokens(trees, verdict), strict=True):
            state = self._sequences.get(seq.id)
            if state is None or state.length != len(seq.tokens):
                continue
            for forced, token in zip(state.tokens, committed, strict=False):
                self._hits = self._hits * MEMORY + (forced == token)
                self._tries = self._tries * MEMORY + 1.0
                if forced != token:
                    break

    def forget(self, seq: Seq) -> None:
        self._sequences.pop(seq.id, None)

    def _draft(self, seq: Seq, budget: Budget) -> Sequence[int]:
        depth = min(budget.nodes, budget.depth)
        tokens = self._look_up(seq)[:depth] if depth else ()
        if tokens and budget.price is not None:
            rate = self._hits / self._tries
            return tokens[: best_count([rate ** (1 + i) for i in range(len(tokens))], budget.price)]
        return tokens

    def _look_up(self, seq: Seq) -> Sequence[int]:
        laws = [law for law in seq.params.processors if isinstance(law, Forces)]
        if not laws:
            return ()
        state = self._sequences.setdefault(seq.id, _Forced())
        if state.length != len(seq.tokens):
            state.length, state.tokens = (len(seq.tokens), laws[-1].forced(Prefix(seq.tokens, seq.prompt_length)))
        return state.tokens
