"""The plan of a draft by a draft model: a few integers of every sequence from the host, all others from the device.

The first pass reads what the model has not read of every sequence, one token or two: after a draft that was accepted
whole, its last token and the target's own; after any other, the target's own. Each further pass reads one drafted
token per sequence, whose id only the device knows. Positions, slots and groups follow from a sequence's pages and
length. Where the last round was not read yet, the host knows neither these tokens nor the length: then it names the
sequence's tree in that round, and the device takes them from its own record of it. Batch sizes are rounded up to a few
buckets; rows of padding are written nowhere and attend to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.drafters.eagle.cuda.draft_plan import aligned
from forerun.models.cuda.last_round import LastRound
from forerun.models.cuda.plan import FIELDS, MAX_ROWS, NARROW, Size, splits_at, splits_to
from forerun.models.paged import Ints
from forerun.models.pages import PAGE

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)  # batch sizes that have graphs
MOST = BUCKETS[-1]
DEEPEST = 16  # tokens of a draft
UNREAD = 2  # tokens per sequence that the first pass reads, at most
KNOWN = 6  # integers of a sequence that the host sends, beside its pages


class Lane(NamedTuple):
    """One sequence of a draft: what the host sends of it to the device."""

    tokens: Sequence[int]  # not read yet, the root last; of no account where it follows an unread round
    pages: Sequence[int]  # of the draft model's slots, with room for the draft; none = nothing is drafted
    first: int  # position of the first of these tokens
    follows: int = -1  # its tree in the last round, which was not read: `tokens` was that tree's root
    deep: int = 0  # tokens that were drafted in that round

    @property
    def root_at(self) -> int:
        """Position of the root; before the last round, where it follows one that was not read."""
        return self.first + len(self.tokens) - 1

    @property
    def farthest(self) -> int:
        """Where the root may be, at most."""
        return self.root_at + (self.deep + 1 if self.follows >= 0 else 0)


@dataclass(frozen=True, slots=True)
class ChainForm:
    """What passes must agree in to be replays of one graph."""

    sequences: int  # B, a bucket
    splits: int  # of the context

    @property
    def first(self) -> Size:
        """The roots, then what comes before each of them."""
        return Size(UNREAD * self.sequences, UNREAD * self.sequences, self.splits)

    @property
    def further(self) -> Size:
        return Size(self.sequences, self.sequences, self.splits)

    @property
    def scored(self) -> int:
        """Rows of the first pass with logits: the roots; all where products are those of many rows."""
        rows = self.first.rows
        return rows if rows > NARROW else self.sequences

    @property
    def passes_at(self) -> int:
        """The further passes, each [positions | slots | groups], behind [tokens | positions | slots | groups]."""
        return 3 * aligned(self.first.rows) + FIELDS * self.first.groups

    @property
    def extent(self) -> int:
        """Integers of a further pass."""
        return 2 * aligned(self.sequences) + FIELDS * self.sequences

    @property
    def sent_at(self) -> int:
        """What the host sends: [KNOWN, B], then the pages of all sequences."""
        return self.passes_at + (DEEPEST - 1) * self.extent


def plan_chain(lanes: Sequence[Lane], depth: int, farthest: int = 0) -> tuple[ChainForm, Ints]:
    """What is sent for a draft so deep, for as many lanes as a bucket has.

    `farthest` asks for as many splits as a context that long needs.
    """
    count, real = len(lanes), [lane for lane in lanes if lane.pages]
    form = ChainForm(count, splits_to(max(farthest, 0, *(lane.farthest for lane in real)) + depth))
    ints = np.zeros(KNOWN * count + sum(len(lane.pages) for lane in real), dtype=np.int32)
    table, at = ints[: KNOWN * count].reshape(KNOWN, count), KNOWN * count
    for b, lane in enumerate(lanes):
        before = lane.tokens[0] if len(lane.tokens) > 1 else -1  # unread beside the root
        start = MAX_ROWS + form.sent_at + at if lane.pages else 0
        table[:, b] = lane.root_at, lane.tokens[-1], before, start, lane.follows, lane.deep
        ints[at : at + len(lane.pages)] = lane.pages
        at += len(lane.pages)
    return form, ints


def complete(ints: Tensor, form: ChainForm, last: LastRound, vocab_size: int) -> Tensor:
    """Work out all integers of a draft from what was sent, on the device; further passes as if it were deepest.

    Returns the roots [B]. One outside the draft model's vocabulary is read as another token: the host learns of it when
    it reads the round, and does not draft for that sequence from then on.
    """
    count, at = form.sequences, MAX_ROWS + form.sent_at
    root_at, root, before, starts, follows, deep = ints[at : at + KNOWN * count].view(KNOWN, count)
    decided, trees = follows >= 0, follows.clamp(min=0).long()
    accepted, path = last.accepted[trees], last.tokens[trees]  # [B], and [B, STEPS] the path, then the bonus
    places = torch.stack((accepted, (accepted - 1).clamp_(min=0)), 1)
    bonus, end = path.gather(1, places).int().unbind(1)
    whole = torch.where(accepted == deep, end, -1)  # accepted whole: its last token was never an input
    tokens = torch.stack((torch.where(decided, bonus, root), torch.where(decided, whole, before)))  # [2, B]
    first = torch.where(decided, root_at + accepted.int() + 1, root_at)
    _write(ints, form, tokens.clamp(max=vocab_size - 1), first, starts)
    return tokens[0]


def _write(ints: Tensor, form: ChainForm, tokens: Tensor, root_at: Tensor, starts: Tensor) -> None:
    """Rows of roots, of tokens before these, and of each further pass; fields of groups: models/cuda/plan.py.

    A row attends alone, to all before it and to itself. Rows that are not there attend to nothing.
    """
    count, device = form.sequences, ints.device
    steps = torch.arange(-2, DEEPEST, dtype=torch.int32, device=device)
    steps = torch.cat((steps[2:3], steps[1:2], steps[3:]))[:, None]  # 0, -1, 1, 2, ...
    real = (starts > 0).expand(len(steps), count)
    real = real & torch.cat((real[:1], tokens[1:] >= 0, real[2:]))
    at = torch.where(real, root_at + steps, 0)  # [1 + DEEPEST, B]
    pages = ints[(starts + at // PAGE).clamp_(max=len(ints) - 1)]  # of deeper drafts than this one, any
    slots = torch.where(real, pages * PAGE + at % PAGE, -1)
    lanes = torch.arange(count, dtype=torch.int32, device=device).expand_as(at)
    lanes = torch.cat((lanes[:1], lanes[1:2] + count, lanes[2:]))  # rows of their passes
    none, one = torch.zeros_like(at), torch.ones_like(at)
    groups = torch.stack((none, splits_at(at) + 1, lanes, one, none, at, none, starts.expand_as(at)), -1)
    groups = groups * real[..., None]
    own, rows, wide = ints[MAX_ROWS:], aligned(form.first.rows), aligned(count)
    parts = own[: 3 * rows].view(3, rows)[:, : form.first.rows].view(3, UNREAD, count)
    parts[0].copy_(tokens.clamp(min=0))
    parts[1].copy_(at[:UNREAD])
    parts[2].copy_(slots[:UNREAD])
    own[3 * rows : form.passes_at].view(UNREAD, count, FIELDS).copy_(groups[:UNREAD])
    passes = own[form.passes_at : form.sent_at].view(DEEPEST - 1, form.extent)
    passes[:, :count].copy_(at[UNREAD:])
    passes[:, wide : wide + count].copy_(slots[UNREAD:])
    passes[:, 2 * wide :].copy_(groups[UNREAD:].flatten(1))
