"""The plan of a GPU draft: one array of integers for the device, laid out once per form and batch bucket.

First the rows that the head has not read yet, for their keys and values; then the last row of each sequence, from which
its draft starts; then one pass per level; then, behind room for ancestors, the pages of all sequences. Positions, slots
and groups follow from a sequence's pages and length. The device fills in the tokens of the levels and the ancestors.

Batch sizes are rounded up to a few buckets. Padding takes the place of the sequences that are missing: all of it is one
sequence of one row, with slots of its own, so that nothing has to be treated apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from forerun.models.cuda.plan import FIELDS, MAX_ROWS, Size, round_up, splits_of, splits_to
from forerun.models.paged import Ints
from forerun.models.pages import PAGE
from forerun.offers import Form
from forerun.types import TreeForm

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128)  # batch sizes that have graphs
MOST = BUCKETS[-1]  # sequences in one draft


class Lane(NamedTuple):
    """What a draft must know of one sequence: its unread rows, at least one, and where they are."""

    root: int  # the last token
    tokens: Sequence[int]  # after each of these rows
    pages: Ints  # of the head's slots, by position; with room for the draft
    first: int  # position of the first of these rows
    ring: int  # place of its position 0 among all feature rows
    room: int  # feature rows that a sequence has, used again and again


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

    def pages_at(self, group_nodes: int) -> int:
        """Behind all ancestors."""
        return self.ancestors_at(self.shape.depth - 1, group_nodes)

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
    """The integers of a draft for as many lanes as a bucket has, padding included.

    `farthest` asks for as many splits as a context that long needs.
    """
    numbers = [(lane.first, len(lane.tokens), lane.ring, lane.room, len(lane.pages)) for lane in lanes]
    table = np.array(numbers, dtype=np.int32).T
    ends, depth = table[0] + table[1], shape.depth
    form = DraftForm(len(lanes), shape, splits_to(max(farthest, int(ends.max())) + depth))
    tables = Tables(
        np.concatenate([lane.pages for lane in lanes]), np.cumsum(table[4], dtype=np.int32) - table[4]
    )
    at = form.pages_at(group_nodes)
    ints = np.zeros(at + len(tables.pages), dtype=np.int32)
    ints[at:] = tables.pages
    splits = splits_of(ends + np.array([[-1], [0], [depth]], dtype=np.int32))
    first, places = form.level_at(0, group_nodes), tables.starts + (MAX_ROWS + at)
    _catch_up(ints[:first], lanes, table[:, :, None], tables, form)
    last = ints[first - FIELDS * len(lanes) : first].reshape(-1, FIELDS)
    last[:, 1], last[:, 2], last[:, 3] = splits[0] + 1, np.arange(len(lanes)), 1
    last[:, 5], last[:, 7] = ends, places
    if depth > 1:
        levels = ints[first : form.level_at(depth - 1, group_nodes)].reshape(depth - 1, -1)
        _levels(levels, form, group_nodes, tables, ends, splits[1:])
        rows = aligned(form.level(group_nodes).rows)
        groups = levels[:, 3 * rows :].reshape(depth - 1, len(lanes), -1, FIELDS)
        groups[..., 5], groups[..., 7] = ends[:, None], places[:, None]
    return form, ints


class Tables(NamedTuple):
    """The pages of all sequences, one after another, and where each sequence's start."""

    pages: Ints
    starts: Ints

    def slots(self, positions: Ints) -> Ints:
        """Of positions [B, n] of every sequence."""
        found: Ints = self.pages[self.starts[:, None] + positions // PAGE] * PAGE + positions % PAGE
        return found


def _catch_up(ints: Ints, lanes: Sequence[Lane], table: Ints, tables: Tables, form: DraftForm) -> None:
    """[tokens | positions | slots | sources] of the unread rows, pads written nowhere; of `last_at` all but groups."""
    count, behind, rows = form.sequences, form.behind, aligned(form.caught.rows)
    first, fresh, ring, room, _ = table
    inside = np.arange(behind, dtype=np.int32) < fresh  # [B, behind]
    at = (first + np.arange(behind, dtype=np.int32)) * inside
    parts = ints[: 4 * rows].reshape(4, rows)[:, : count * behind]
    parts[0, inside.ravel()] = [token for lane in lanes for token in lane.tokens]
    parts[1] = at.ravel()
    parts[2] = np.where(inside, tables.slots(at), -1).ravel()
    parts[3] = (ring + at % room).ravel()
    roots, lasts, positions = ints[form.last_at :][: 3 * aligned(count)].reshape(3, -1)[:, :count]
    roots[:] = [lane.root for lane in lanes]
    lasts[:] = np.arange(count, dtype=np.int32) * behind + fresh[:, 0] - 1
    positions[:] = (first + fresh)[:, 0] - 1


def _levels(ints: Ints, form: DraftForm, group_nodes: int, tables: Tables, ends: Ints, splits: Ints) -> None:
    """Of every level [tokens | positions | slots | groups], of sequences that are so long.

    `splits`: those in which their drafts start, and end at the latest.
    """
    count, width, size = len(ints), form.shape.width, form.level(group_nodes)
    ints[:], rows = _same_of_levels(form, group_nodes), aligned(size.rows)
    steps = np.arange(count, dtype=np.int32)[:, None]
    ints[:, rows : rows + size.rows] = np.repeat(ends, width) + steps
    places: Ints = np.arange(count * width, dtype=np.int32)
    slots = tables.slots(ends[:, None] + places)  # [B, levels width]
    ints[:, 2 * rows : 2 * rows + size.rows] = (
        slots.reshape(-1, count, width).swapaxes(0, 1).reshape(count, -1)
    )
    groups = ints[:, 3 * rows :].reshape(count, form.sequences, -1, FIELDS)
    start, behind, shared = splits[0, :, None], splits[1, :, None] + 1, -(-width // group_nodes)
    if width == 1:  # nodes of a chain share everything
        groups[..., 1] = behind
    else:  # committed tokens are shared; from the split in which the tree starts, every node attends alone
        groups[:, :, :shared, 1] = groups[:, :, shared:, 0] = start
        groups[:, :, shared:, 1] = behind


@lru_cache(maxsize=512)
def _same_of_levels(form: DraftForm, group_nodes: int) -> Ints:
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
    return ints


def extent_of(size: Size) -> int:
    """Integers of one pass."""
    return 3 * aligned(size.rows) + FIELDS * size.groups


def aligned(count: int) -> int:
    """16 bytes: kernels are compiled for integers that start so."""
    return -(-count // 4) * 4
