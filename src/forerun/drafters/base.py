"""The Drafter protocol, what a drafter is built from, classes to derive drafters from, and one that drafts nothing.

A drafter cannot affect exactness: the verifier decides what is accepted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import mul
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.params import SpeculativeConfig
from forerun.core.request import Pooling
from forerun.core.types import FREE, NEVER, Budget, Needs, Offer, Scores, Seq, TreeBatch, Verdict, lone_roots
from forerun.drafters.device.protocol import DeviceDrafter
from forerun.models.base import Target

AT_HAND, NEGLIGIBLE = 24, 0.05  # longest chain of an offer, and the least probability in it


@dataclass(frozen=True, slots=True)
class Parts:
    """What a drafter may be built from."""

    target: Target
    draft: Target | None  # the second checkpoint, if one was given
    speculative: SpeculativeConfig
    max_batch: int = 1  # sequences decoded at once: GPU graphs are captured for this number
    max_length: int | None = None  # tokens of a sequence; None = the target's
    more_drafts: tuple[Target, ...] = ()  # of a cascade: further checkpoints, for which `draft` drafts
    by_host: bool = False  # it is part of a cascade, so the host runs it step by step
    opening: tuple[int, ...] = ()  # on a GPU: what the chat template writes before an answer; () = not known
    cost_file: Path | None = None  # where t(n) of the target is kept; what else is read of it may lie beside it

    def head_folder(self, drafter: str, in_formats: bool = False) -> Path:
        """The folder of the trained head that this drafter runs; `in_formats`: are there kernels for `draft_dtype`?"""
        if self.speculative.draft_model is None:
            raise InvalidInput(f"the drafter {drafter!r} needs a trained head; pass draft_model=FOLDER")
        if (dtype := self.speculative.draft_dtype) != "auto" and not in_formats:
            raise InvalidInput(
                f"draft_dtype={dtype!r} is for draft models, and for EAGLE heads and MTP layers on a GPU; "
                f"leave it out for a head of {drafter!r} here"
            )
        return Path(self.speculative.draft_model)

    def checkpoint(self, drafter: str) -> Target:
        """The second model that this drafter runs."""
        if self.draft is None:
            raise InvalidInput(f"the drafter {drafter!r} needs a second checkpoint; pass draft_model=NAME")
        if (self.draft.source_rules is None) != (self.target.source_rules is None):
            raise InvalidInput(
                "an encoder-decoder drafts for an encoder-decoder, and a decoder for a decoder; "
                "pass a draft_model of the target's kind, or another drafter"
            )
        return self.draft


@runtime_checkable
class Drafter(Protocol):
    """Drafts continuations as trees of tokens.

    A drafter learns only through `observe`; it never touches the target, its KV or the sequences. Wrong drafts
    cost time, never correctness. What must hold: node 0 of every tree is the sequence's last token; parents
    precede children; a tree has at most `budget.nodes` nodes below its root, at most `budget.depth` deep;
    siblings that were chosen differ; a node that was *sampled* says from which law (`TreeBatch.drawn_from`),
    and whether it was proposed never depended on what was sampled.
    """

    @property
    def needs(self) -> Needs:
        """What it reads from the target."""

    def offer(self, seq: Seq) -> Offer:
        """What drafting for this sequence would cost now. Decided from committed tokens alone."""

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        """One tree per sequence; a lone root where nothing is drafted."""

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Learn from a round, prompts included (a prompt is a chain accepted whole).

        Called after the verdict and before its tokens are appended to `seq.tokens`.
        """

    def forget(self, seq: Seq) -> None:
        """Free what is held for a sequence: it has ended, or its prompt will be read again after a failed round."""


@runtime_checkable
class HasDevice(Protocol):
    """A drafter that runs on a device, or in part."""

    def device(self, seqs: Sequence[Seq]) -> DeviceDrafter | None:
        """What drafts for all of these behind a round that was not read; None = every round must be read first."""


@runtime_checkable
class KeepsRows(Protocol):
    """A drafter that reads of logits what it has kept on their device, so that the next pass may overwrite them."""

    def keep(self, seqs: Sequence[Seq], logits: Tensor) -> Callable[[], Sequence[Any]] | None:
        """Start to bring it to the host, of every row; None = nothing is read of this round. Called before its verdict
        is known, and the result behind that."""
        ...


def device_of(drafter: Drafter, seqs: Sequence[Seq]) -> DeviceDrafter | None:
    return drafter.device(seqs) if isinstance(drafter, HasDevice) else None


@runtime_checkable
class DrafterClass(Protocol):
    """What the registry's `where` of a drafter names: a class that builds itself from parts."""

    def build(self, parts: Parts) -> Drafter: ...


@runtime_checkable
class CompositeClass(Protocol):
    """What the registry's `where` of a composition names: a class that is built from two drafters."""

    def compose(self, first: Drafter, second: Drafter) -> Drafter: ...


class BaseDrafter(ABC):
    """A drafter that needs nothing, costs nothing and learns nothing, until a subclass says otherwise."""

    needs: Needs = Needs()
    looks_up = False  # does it look up what it drafts, behind any text at hand? Its rounds are planned as look-ups

    @classmethod
    def build(cls, parts: Parts) -> Drafter:
        return cls()

    def offer(self, seq: Seq) -> Offer:
        return FREE

    @abstractmethod
    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch: ...

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:  # noqa: B027
        """Nothing is learnt."""

    def forget(self, seq: Seq) -> None:  # noqa: B027
        """Nothing is held."""

    def rewind(self, seq: Seq, length: int) -> None:
        """Only the first `length` tokens of the sequence still hold: in a cascade, rejected tokens are taken back."""
        self.forget(seq)


class NoDrafter(BaseDrafter):
    """Drafts nothing, at no cost: every tree is its root, which is plain decoding in the same loop."""

    needs = Needs(match_length=0)

    def offer(self, seq: Seq) -> Offer:
        return NEVER

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return lone_roots(seqs)


class PoolsRows(Seq, Protocol):
    """A sequence whose prompt may have to be embedded."""

    @property
    def pooling(self) -> Pooling | None: ...

    def note_embedding(self, embedding: list[float]) -> None: ...


class PoolingDrafter(NoDrafter):
    """Drafts nothing, and pools the rows of prompts: passes show them to drafters alone, from the prefix cache too.

    Rows are added up in float64 once all are there: chunks of a prompt, and its neighbours, change no bit.
    """

    needs = Needs(hidden_layers=(-1,))

    def __init__(self) -> None:
        self._rows: dict[int, list[Tensor]] = {}

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        for b, seq in enumerate(cast(Sequence[PoolsRows], seqs)):
            held = self._rows.setdefault(seq.id, [])
            left = seq.prompt_length - sum(map(len, held))
            if seq.pooling is None or left <= 0:
                continue
            first, end = trees.starts[b : b + 2]
            held.append(scores.hidden[-1][first : min(end, first + left)].to("cpu", torch.float32, copy=True))
            if left <= end - first:
                rows = torch.cat(held)
                pooled = rows.mean(0, dtype=torch.float64) if seq.pooling == "mean" else rows[-1]
                seq.note_embedding(pooled.float().tolist())

    def forget(self, seq: Seq) -> None:
        self._rows.pop(seq.id, None)


class LookupDrafter(BaseDrafter):
    """A drafter that looks continuations up at no cost, and knows how far to trust them."""

    looks_up = True

    @abstractmethod
    def chain(self, seq: Seq, length: int) -> Iterator[tuple[int, float]]:
        """What it would draft now: tokens, and how likely each is accepted if those before it are."""

    def confidence(self, seq: Seq) -> float:
        """How likely the first token it would draft now is accepted; 0 = it has nothing to draft."""
        return next((rate for _, rate in self.chain(seq, 1)), 0.0)

    def offer(self, seq: Seq) -> Offer:
        """A free chain: how likely each depth of it is to be accepted."""
        return Offer(free=chances(rate for _, rate in self.chain(seq, AT_HAND)))


def chances(rates: Iterable[float]) -> tuple[float, ...]:
    """How likely the first 1, 2, ... tokens of a chain are all accepted, as far as that is not negligible."""
    return tuple(takewhile(NEGLIGIBLE.__le__, accumulate(rates, mul)))


def goes_on(seq: Seq, trees: TreeBatch, b: int) -> bool:
    """Does tree b go on with a text that is being written? Else it is a part of what is read, or the first round."""
    start = trees.starts[b]
    has_root = start < trees.starts[b + 1] and trees.to_host()[0][start] == seq.tokens[-1]
    return has_root and len(seq.tokens) > seq.prompt_length
