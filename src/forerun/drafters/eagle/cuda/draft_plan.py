"""The plan of a GPU draft: a few integers of every sequence from the host, all others worked out on the device.

First the rows that the head has not read yet, for their keys and values; then the last row of each sequence, from which
its draft starts; then one pass per level; then, behind room for ancestors, what the host sends: of every sequence its
unread rows and where they are, and its pages. Where the last round was not read yet, the host does not know these rows:
then it names the sequence's tree in that round, and the device takes root and path from there.

Batch sizes are rounded up to a few buckets. Padding takes the place of the sequences that are missing: all of it is one
sequence of one row, with slots of its own, so that nothing has to be treated apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.models.cuda.last_round import LastRound
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import FIELDS, MAX_ROWS, Size, round_up, splits_at, splits_to
from forerun.models.paged import Ints
from forerun.models.pages import PAGE
from forerun.offers import Form
from forerun.types import TreeForm

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128)  # batch sizes that have graphs
MOST = BUCKETS[-1]  # sequences in one draft
ROOM = 24  # feature rows that a sequence has, used again and again: row t lies at its place t % ROOM
KNOWN = 6  # integers of a sequence that the host sends, beside its unread tokens and its pages


class Lane(NamedTuple):
    """What a draft must know of one sequence: its unread rows, at least one, and where they are."""

    root: int  # the last token
    tokens: Sequence[int]  # after each of these rows
    pages: Ints  # of the head's slots, by position; with room for the draft
    first: int  # position of the first of these rows
    ring: int  # place of its position 0 among all feature rows
    follows: int = (
        -1
    )  # its tree in the last round, which was not read: root and tokens are to be taken from there


@dataclass(frozen=True, slots=True)
class DraftForm:
    """What drafts must agree in to be replays of one graph."""

    sequences: int  # B, a bucket
    shape: Form
    splits: int  # of the context

    @property
    def trees(self) -> TreeForm:
        shape = self.shape
        return TreeForm(self.sequences, shape.nodes + 1, shape.depth, chain=shape.width == 1)

    @property
    def behind(self) -> int:
        """Unread rows per sequence, at most: root and path of the last round."""
        return self.shape.depth + 1

    @property
    def below(self) -> int:
        """Positions behind the last row that a draft writes."""
        return (self.shape.depth - 1) * self.shape.width

    @property
    def caught(self) -> Size:
        """The unread rows, of which only keys and values are computed."""
        return Size(self.sequences * self.behind, 0, 0)

    @property
    def last(self) -> Size:
        """The last row of each sequence."""
        return Size(self.sequences, self.sequences, self.splits)

    def level(self, group_nodes: int) -> Size:
        """The pass over a level."""
        width = self.shape.width
        groups = self.sequences * (-(-width // group_nodes) + (width if width > 1 else 0))
        return Size(self.sequences * width, groups, self.splits)

    @property
    def sources_at(self) -> int:
        """Where each unread row's place among the feature rows is."""
        return 3 * aligned(self.caught.rows)

    @property
    def last_at(self) -> int:
        """The last rows: [roots | places among the unread rows | positions], then their groups."""
        return self.sources_at + aligned(self.caught.rows)

    def level_at(self, level: int, group_nodes: int) -> int:
        first = self.last_at + 3 * aligned(self.sequences) + FIELDS * self.sequences
        return first + level * extent_of(self.level(group_nodes))

    def sent_at(self, group_nodes: int) -> int:
        """What the host sends lies behind all ancestors."""
        return self.ancestors_at(self.shape.depth - 1, group_nodes)

    def pages_at(self, group_nodes: int) -> int:
        """The last of what it sends."""
        return self.sent_at(group_nodes) + self.sequences * (KNOWN + self.behind)

    def ancestors_at(self, level: int, group_nodes: int) -> int:
        """Level i has i + 1 steps per node."""
        size, end = self.level(group_nodes), self.level_at(self.shape.depth - 1, group_nodes)
        return end + aligned(size.rows) * (level * (level + 1) // 2)


def bucket_of(batch: int) -> int:
    """The batch size that graphs are captured for."""
    return round_up(batch, BUCKETS)


def plan_draft(
    lanes: Sequence[Lane], shape: Form, group_nodes: int, farthest: int = 0
) -> tuple[DraftForm, Ints]:
    """What is sent of as many lanes as a bucket has, padding included: [KNOWN, B], unread tokens [B, behind], pages.

    `farthest` asks for as many splits as a context that long needs.
    """
    count, behind = len(lanes), shape.depth + 1
    ends = [one.first + (len(one.tokens) if one.follows < 0 else behind) for one in lanes]
    form = DraftForm(count, shape, splits_to(max(farthest, *ends) + shape.depth))
    at, pages = MAX_ROWS + form.pages_at(group_nodes), np.concatenate([lane.pages for lane in lanes])
    ints = np.zeros(count * (KNOWN + behind) + len(pages), dtype=np.int32)
    table, unread = ints[: KNOWN * count].reshape(KNOWN, count), ints[KNOWN * count :]
    for b, (root, tokens, own, first, ring, follows) in enumerate(lanes):
        table[:, b] = first, len(tokens), ring, at, root, follows
        unread[b * behind : b * behind + len(tokens)] = tokens
        at += len(own)
    unread[count * behind :] = pages
    return form, ints


@dataclass(frozen=True, slots=True)
class Sent:
    """What the host has sent of all sequences of a draft, completed by what the last round decided."""

    first: Tensor  # [B] int32, as all of these
    fresh: Tensor  # [B] unread rows
    ring: Tensor
    starts: Tensor  # [B] where each sequence's pages start among all integers
    tokens: Tensor  # [B, behind]
    roots: Tensor  # [B]

    @classmethod
    def of(cls, ints: Tensor, form: DraftForm, group_nodes: int, last: LastRound) -> Sent:
        count, at = form.sequences, MAX_ROWS + form.sent_at(group_nodes)
        first, known, ring, starts, root, follows = ints[at : at + KNOWN * count].view(KNOWN, count)
        given = ints[at + KNOWN * count :][: count * form.behind].view(count, form.behind)
        decided, trees = follows >= 0, follows.clamp(min=0).long()
        fresh = torch.where(decided, last.accepted[trees] + 1, known)
        tokens = torch.where(decided[:, None], last.tokens[trees, : form.behind], given)
        roots = torch.where(decided, tokens.gather(1, (fresh - 1)[:, None])[:, 0], root)
        return cls(first, fresh.int(), ring, starts, tokens, roots)

    def slots(self, ints: Tensor, positions: Tensor) -> Tensor:
        """Of positions [B, n] of every sequence."""
        return ints[self.starts[:, None] + positions // PAGE] * PAGE + positions % PAGE


def complete(ints: Tensor, form: DraftForm, group_nodes: int, last: LastRound) -> None:
    """Work out all integers of a draft from what was sent, on the device."""
    sent = Sent.of(ints, form, group_nodes, last)
    ends = sent.first + sent.fresh
    own = ints[MAX_ROWS : MAX_ROWS + form.level_at(form.shape.depth - 1, group_nodes)]
    _catch_up(ints, own, form, sent, ends)
    if form.shape.depth > 1:
        _levels(ints, own[form.level_at(0, group_nodes) :], form, group_nodes, sent, ends)


def _catch_up(ints: Tensor, own: Tensor, form: DraftForm, sent: Sent, ends: Tensor) -> None:
    """[tokens | positions | slots | sources] of the unread rows, pads written nowhere; then the last rows."""
    count, behind, rows = form.sequences, form.behind, aligned(form.caught.rows)
    steps = torch.arange(behind, dtype=torch.int32, device=ints.device)
    inside = steps < sent.fresh[:, None]  # [B, behind]
    at = (sent.first[:, None] + steps) * inside
    parts = own[: 4 * rows].view(4, rows)[:, : count * behind].view(4, count, behind)
    parts[0] = torch.where(inside, sent.tokens, 0)
    parts[1] = at
    parts[2] = torch.where(inside, sent.slots(ints, at), -1)
    parts[3] = sent.ring[:, None] + at % ROOM
    wide, lanes = aligned(count), torch.arange(count, dtype=torch.int32, device=ints.device)
    roots, lasts, positions = own[form.last_at :][: 3 * wide].view(3, wide)[:, :count]
    roots.copy_(sent.roots)
    lasts.copy_(lanes * behind + sent.fresh - 1)
    positions.copy_(ends - 1)
    groups = own[form.last_at + 3 * wide :][: FIELDS * count].view(count, FIELDS)
    fields = splits_at(ends - 1) + 1, lanes, torch.ones_like(lanes), ends, sent.starts
    groups.copy_(_fields((1, 2, 3, 5, 7), fields))


def _levels(ints: Tensor, own: Tensor, form: DraftForm, group_nodes: int, sent: Sent, ends: Tensor) -> None:
    """Of every level [tokens | positions | slots | groups]."""
    count, width, size = form.shape.depth - 1, form.shape.width, form.level(group_nodes)
    rows, levels = aligned(size.rows), own.view(count, -1)
    levels.copy_(_same_of_levels(form, group_nodes, ints.device))
    steps = torch.arange(count, dtype=torch.int32, device=ints.device)
    positions = levels[:, rows : rows + size.rows].view(count, -1, width)
    positions.copy_((ends + steps[:, None])[..., None].expand_as(positions))
    places = torch.arange(count * width, dtype=torch.int32, device=ints.device)
    slots = sent.slots(ints, ends[:, None] + places).view(-1, count, width)
    levels[:, 2 * rows : 2 * rows + size.rows].view(count, -1, width).copy_(slots.transpose(0, 1))
    groups = levels[:, 3 * rows :].view(count, form.sequences, -1, FIELDS)
    start, behind = splits_at(ends)[:, None], splits_at(ends + form.shape.depth)[:, None] + 1
    shared = -(-width // group_nodes)
    if width == 1:  # nodes of a chain share everything
        groups[..., 1] = behind
    else:  # committed tokens are shared; from the split in which the tree starts, every node attends alone
        groups[:, :, :shared, 1] = start
        groups[:, :, shared:, 0] = start
        groups[:, :, shared:, 1] = behind
    groups[..., 5] = ends[:, None]
    groups[..., 7] = sent.starts[:, None]


def _fields(which: Sequence[int], values: Sequence[Tensor]) -> Tensor:
    """Groups that have these fields, and no others."""
    columns = [torch.zeros_like(values[0])] * FIELDS
    for field, value in zip(which, values, strict=True):
        columns[field] = value
    return torch.stack(columns, -1)


@lru_cache(maxsize=512)
def _same_of_levels(form: DraftForm, group_nodes: int, device: torch.device) -> Tensor:
    """[levels, integers of one] the groups' rows and ancestors, which are the same in every draft."""
    width, size = form.shape.width, form.level(group_nodes)
    ints = np.zeros((form.shape.depth - 1, extent_of(size)), dtype=np.int32)
    for level, row in enumerate(ints):
        groups = row[3 * aligned(size.rows) :].reshape(form.sequences, -1, FIELDS)
        for b in range(form.sequences):
            low = range(0, width, group_nodes)
            alone = range(width) if width > 1 else ()
            groups[b, :, 2] = [b * width + node for node in (*low, *alone)]
            groups[b, :, 3] = [*(min(group_nodes, width - node) for node in low), *[1] * len(alone)]
            first = MAX_ROWS + form.ancestors_at(level, group_nodes)
            groups[b, len(low) :, 6] = [first + (b * width + node) * (level + 1) for node in alone]
    with torch.inference_mode(False):
        return torch.from_numpy(ints).to(device)


def run_at(ints: Tensor, size: Size, first: int) -> Run:
    """The integers of one pass, which start behind the identity at `first`."""
    at, rows = MAX_ROWS + first, aligned(size.rows)
    tokens, positions, slots = ints[at : at + 3 * rows].view(3, rows)[:, : size.rows].unbind(0)
    at += 3 * rows
    groups = ints[at : at + FIELDS * size.groups].view(size.groups, FIELDS)
    return Run(size, ints, tokens, positions, slots, groups)


def last_run(ints: Tensor, form: DraftForm) -> tuple[Run, Tensor, Tensor]:
    """The pass over the last row of each sequence, the roots, and which of the unread rows those are."""
    at, rows = MAX_ROWS + form.last_at, aligned(form.sequences)
    roots, ends, positions = ints[at : at + 3 * rows].view(3, rows)[:, : form.sequences].unbind(0)
    at += 3 * rows
    groups = ints[at : at + FIELDS * form.sequences].view(form.sequences, FIELDS)
    return Run(form.last, ints, positions, positions, positions, groups), roots.long(), ends


def extent_of(size: Size) -> int:
    """Integers of one pass."""
    return 3 * aligned(size.rows) + FIELDS * size.groups


def aligned(count: int) -> int:
    """16 bytes: kernels are compiled for integers that start so."""
    return -(-count // 4) * 4
