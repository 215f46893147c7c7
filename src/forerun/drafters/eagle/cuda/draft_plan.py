"""The plan of a GPU draft: one array of integers for the device, laid out once per form and batch bucket.

First the rows that the head has not read yet, for their keys and values; then the last row of each sequence, from which
its draft starts; then one pass per level. Positions, slots and groups follow from a sequence's base slot and length.
The device fills in the tokens of the levels and the ancestors of their nodes.

Batch sizes are rounded up to a few buckets. Padding takes the place of the sequences that are missing: all of it is one
sequence of one row, with slots of its own, so that nothing has to be treated apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from forerun.models.cuda.grown import splits_to
from forerun.models.cuda.plan import FIELDS, MAX_ROWS, Ints, Size, Template, round_up, split_of
from forerun.offers import Form
from forerun.types import TreeForm

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128)  # batch sizes that have graphs
MOST = BUCKETS[-1]  # sequences in one draft


class Lane(NamedTuple):
    """What a draft must know of one sequence: its unread rows, at least one, and where they are."""

    root: int  # the last token
    tokens: Sequence[int]  # after each of these rows
    base: int  # its first slot
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
    ends = [lane.first + len(lane.tokens) for lane in lanes]
    farthest = max(farthest, max(ends)) + shape.depth
    form = DraftForm(len(lanes), shape, splits_to(farthest))
    ints = _catch_up(lanes, ends, form)
    if shape.depth > 1:
        places = [(lane.base, end) for lane, end in zip(lanes, ends, strict=True)]
        ints = np.concatenate((ints, _levels(form, group_nodes).fill(places, shape.depth)))
    return form, ints


def _catch_up(lanes: Sequence[Lane], ends: Sequence[int], form: DraftForm) -> Ints:
    """[tokens | positions | slots | sources] of the unread rows, pads written nowhere, and what `last_at` says."""
    count, behind, rows = form.sequences, form.behind, aligned(form.caught.rows)
    ints = np.zeros(form.level_at(0, 1), dtype=np.int32)
    numbers = [(lane.first, len(lane.tokens), lane.base, lane.ring, lane.room) for lane in lanes]
    first, fresh, base, ring, room = np.array(numbers, dtype=np.int32).T[:, :, None]
    steps = np.arange(behind, dtype=np.int32)
    inside = steps < fresh  # [B, behind]
    at = (first + steps) * inside
    parts = ints[: 4 * rows].reshape(4, rows)[:, : count * behind]
    parts[0, inside.ravel()] = [token for lane in lanes for token in lane.tokens]
    parts[1] = at.ravel()
    parts[2] = ((base + 1 + at) * inside - 1).ravel()
    parts[3] = (ring + at % room).ravel()
    roots, lasts, positions = ints[form.last_at :][: 3 * aligned(count)].reshape(3, -1)[:, :count]
    places = np.arange(count, dtype=np.int32)
    roots[:] = [lane.root for lane in lanes]
    lasts[:] = places * behind + fresh[:, 0] - 1
    positions[:] = ends
    positions -= 1
    groups = ints[form.last_at + 3 * aligned(count) :].reshape(count, FIELDS)
    groups[:, 1] = [split_of(end - 1) + 1 for end in ends]
    groups[:, 2], groups[:, 3], groups[:, 4], groups[:, 5] = places, 1, base[:, 0], ends
    return ints


@lru_cache(maxsize=512)
def _levels(form: DraftForm, group_nodes: int) -> Template:
    """Of every level [tokens | positions | slots | groups]."""
    template, width, size = Template(), form.shape.width, form.level(group_nodes)
    rows, extent = aligned(size.rows), extent_of(size)
    for level in range(form.shape.depth - 1):
        first = level * extent
        template.pad_to(first + rows)
        for b in range(form.sequences):
            for _ in range(width):
                template.add(b, level, 0, 1)
        template.pad_to(first + 2 * rows)
        for b in range(form.sequences):
            for node in range(width):
                template.add(b, level * width + node, 1, 1)
        template.pad_to(first + 3 * rows)
        ancestors = None if width == 1 else MAX_ROWS + form.ancestors_at(level, group_nodes)
        for b in range(form.sequences):
            mine = range(b * width, (b + 1) * width)
            template.add_groups(b, mine, group_nodes, ancestors, level + 1)
        template.pad_to(first + extent)
    return template


def extent_of(size: Size) -> int:
    """Integers of one pass."""
    return 3 * aligned(size.rows) + FIELDS * size.groups


def aligned(count: int) -> int:
    """16 bytes: kernels are compiled for integers that start so."""
    return -(-count // 4) * 4
