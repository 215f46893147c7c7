"""The plan of a GPU draft: one array of integers for the device, laid out once per form; and which forms are captured.

First the rows of the last round, which the head reads with the target's true features, then one pass per level.
Positions, slots and groups follow from a sequence's base slot and length; the device fills in the tokens of the levels
and the ancestors of their nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from forerun.models.cuda.plan import FIELDS, MAX_ROWS, SPLIT_SIZES, Ints, Size, Template, round_up, split_of
from forerun.types import TreeForm

DraftShape = tuple[int, int, int]  # nodes below the root, depth, width
SHAPES: tuple[DraftShape, ...] = (
    (1, 1, 1), (2, 2, 1), (4, 4, 1), (8, 3, 3), (16, 4, 4), (24, 5, 6), (40, 6, 8), (59, 6, 10),
)  # fmt: skip
UNKNOWN = (
    (0.6, 0.1, 0.05, 0.03, 0.02),
)  # how often a head's likeliest tokens are accepted, where its config does not say
REQUESTS = 3  # times that a shape is asked for before a graph is captured for it


@dataclass(frozen=True, slots=True)
class DraftForm:
    """What drafts must agree in to be replays of one graph."""

    sequences: int  # B
    nodes: int  # below the root
    depth: int
    width: int
    behind: int  # rows of the last round per sequence, at most
    caught: Size  # the pass over these rows
    level: Size  # the pass over a level

    @property
    def trees(self) -> TreeForm:
        return TreeForm(self.sequences, self.nodes + 1, self.depth, chain=self.width == 1)

    @property
    def roots_at(self) -> int:
        """Where the roots' tokens are, and behind them each sequence's last row."""
        return extent_of(self.caught)

    def level_at(self, level: int) -> int:
        return extent_of(self.caught) + 2 * aligned(self.sequences) + level * extent_of(self.level)

    def ancestors_at(self, level: int) -> int:
        """Level i has i + 1 steps per node."""
        return self.level_at(self.depth - 1) + aligned(self.level.rows) * (level * (level + 1) // 2)


def plan_draft(
    places: Sequence[tuple[int, int]],
    fresh: Sequence[Sequence[int]],
    roots: Sequence[int],
    shape: DraftShape,
    group_nodes: int,
) -> tuple[DraftForm, Ints]:
    """The integers of a draft of (nodes, depth, width) for sequences at these base slots and lengths.

    `fresh` has, per sequence, the tokens after the rows that are new.
    """
    nodes, depth, width = shape
    sequences, behind = len(places), max(depth + 1, *map(len, fresh))
    after = [(base, length + len(new)) for (base, length), new in zip(places, fresh, strict=True)]
    splits = round_up(1 + split_of(max(length for _, length in after) + depth), SPLIT_SIZES)
    groups = -(-behind // group_nodes) * sequences
    level = -(-width // group_nodes) * sequences + (sequences * width if width > 1 else 0)
    level = 1 << (level - 1).bit_length()
    caught, drafted = Size(sequences * behind, groups, splits), Size(sequences * width, level, splits)
    form = DraftForm(sequences, nodes, depth, width, behind, caught, drafted)
    ints = _catch_up(places, fresh, roots, behind, group_nodes)
    if depth > 1:
        ints = np.concatenate((ints, _levels(form, group_nodes).fill(after, depth)))
    return form, ints


def _catch_up(
    places: Sequence[tuple[int, int]],
    fresh: Sequence[Sequence[int]],
    roots: Sequence[int],
    behind: int,
    group_nodes: int,
) -> Ints:
    """[tokens | positions | slots | groups | roots | last rows] of the new rows; pads are written nowhere."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    groups: list[int] = []
    ends: list[int] = []
    for b, ((base, length), new) in enumerate(zip(places, fresh, strict=True)):
        count, pads = len(new), behind - len(new)
        tokens += [*new, *[0] * pads]
        positions += [*range(length, length + count), *[0] * pads]
        slots += [*range(base + length, base + length + count), *[-1] * pads]
        ends.append(b * behind + count - 1)
        high = split_of(length + count - 1) + 1
        for low in range(0, behind, group_nodes):
            rows = min(max(count - low, 0), group_nodes)
            groups += (0, high if rows else 0, b * behind + low, rows, base, length, 0, 0)
    parts = (tokens, positions, slots, groups, roots, ends)
    return np.array([value for part in parts for value in (*part, *[0] * (-len(part) % 4))], dtype=np.int32)


@lru_cache(maxsize=256)
def _levels(form: DraftForm, group_nodes: int) -> Template:
    """Of every level [tokens | positions | slots | groups]."""
    template, width = Template(), form.width
    rows, size = aligned(form.level.rows), extent_of(form.level)
    for level in range(form.depth - 1):
        first = level * size
        template.pad_to(first + rows)
        for b in range(form.sequences):
            for _ in range(width):
                template.add(b, level, 0, 1)
        template.pad_to(first + 2 * rows)
        for b in range(form.sequences):
            for node in range(width):
                template.add(b, level * width + node, 1, 1)
        template.pad_to(first + 3 * rows)
        ancestors = None if width == 1 else MAX_ROWS + form.ancestors_at(level)
        for b in range(form.sequences):
            mine = range(b * width, (b + 1) * width)
            template.add_groups(b, mine, group_nodes, ancestors, level + 1)
        template.pad_to(first + size)
    return template


def extent_of(size: Size) -> int:
    """Integers of one pass."""
    return 3 * aligned(size.rows) + FIELDS * size.groups


def aligned(count: int) -> int:
    """16 bytes: kernels are compiled for integers that start so."""
    return -(-count // 4) * 4


def expected(rates: Sequence[Sequence[float]], shape: DraftShape) -> float:
    """Expected accepted tokens of a tree of this shape, given the acceptance rates of each level and rank."""
    nodes, depth, width = shape
    level, found = [1.0], list[float]()
    for i in range(depth):
        ranks = rates[min(i, len(rates) - 1)][:width]
        level = sorted((above * rate for above in level[:width] for rate in ranks), reverse=True)
        found += level
    return sum(sorted(found, reverse=True)[:nodes])


def best_draft_shape(
    rates: Sequence[Sequence[float]], most: DraftShape, price: Sequence[float], level: float
) -> DraftShape:
    """The shape that gains most beyond its price; every shape is a graph to capture, so there are few."""
    fitting = [shape for shape in SHAPES if all(map(int.__le__, shape, most)) and shape[0] < len(price)]
    return max(
        fitting or SHAPES[:1],
        key=lambda shape: expected(rates, shape) - price[min(shape[0], len(price) - 1)] - level * shape[1],
    )


@dataclass(slots=True)
class CapturedShapes:
    """Which shapes of draft have a graph: capturing one costs as much as many rounds.

    A new shape is replaced by a captured one that fits, or by none, until it has been asked for several times. At the
    end of a sequence budgets shrink round by round: there the last shape is used, and the sequence is cut behind it.
    """

    known: dict[int, set[DraftShape]] = field(default_factory=dict)  # by number of sequences
    asked: dict[tuple[int, DraftShape], int] = field(default_factory=dict)
    latest: dict[int, DraftShape] = field(default_factory=dict)

    def choose(self, sequences: int, shape: DraftShape, ends: bool = False) -> DraftShape | None:
        known = self.known.setdefault(sequences, set())
        if ends and shape not in known:
            return self.latest.get(sequences)
        if shape not in known:
            count = self.asked[sequences, shape] = self.asked.get((sequences, shape), 0) + 1
            if known and count < REQUESTS:
                return max((other for other in known if all(map(int.__le__, other, shape))), default=None)
            known.add(shape)
        self.latest[sequences] = shape
        return shape
