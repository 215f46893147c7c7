"""What the host tells the device about a draft: one array of integers, laid out once per form.

First the rows of the last round, which the head takes in with the target's true features, then one pass per level.
Positions, slots and groups follow from where a text lies and how long it is; tokens of the levels and the ancestors of
their nodes are for the device to fill in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from forerun.models.cuda.plan import FIELDS, MAX_ROWS, SPLIT_SIZES, Ints, Size, Template, round_up, split_of
from forerun.types import TreeForm

Shape = tuple[int, int, int]  # nodes below the root, depth, width
MENU: tuple[Shape, ...] = (
    (1, 1, 1), (2, 2, 1), (4, 4, 1), (8, 3, 3), (16, 4, 4), (24, 5, 6), (40, 6, 8), (59, 6, 10),
)  # fmt: skip
UNKNOWN = ((0.6, 0.1, 0.05, 0.03, 0.02),)  # how often a head's likeliest tokens stand, where it does not say
PATIENCE = 3  # times that a form is asked for before it is worth a graph of its own


@dataclass(frozen=True, slots=True)
class DraftForm:
    """What drafts must agree in to be replays of one graph."""

    texts: int  # B
    nodes: int  # below the root
    depth: int
    width: int
    behind: int  # rows of the last round per text, at most
    caught: Size  # the pass over these rows
    level: Size  # the pass over a level

    @property
    def trees(self) -> TreeForm:
        return TreeForm(self.texts, self.nodes + 1, self.depth, chain=self.width == 1)

    @property
    def roots_at(self) -> int:
        """Where the roots' tokens are, and behind them each text's last row."""
        return extent_of(self.caught)

    def level_at(self, level: int) -> int:
        return extent_of(self.caught) + 2 * aligned(self.texts) + level * extent_of(self.level)

    def ancestors_at(self, level: int) -> int:
        """Level i has i + 1 steps per node."""
        return self.level_at(self.depth - 1) + aligned(self.level.rows) * (level * (level + 1) // 2)


def plan_draft(
    places: Sequence[tuple[int, int]],
    fresh: Sequence[Sequence[int]],
    roots: Sequence[int],
    shape: Shape,
    group_nodes: int,
) -> tuple[DraftForm, Ints]:
    """The integers of a draft of (nodes, depth, width) for texts at these base slots and lengths.

    `fresh` has, per text, the tokens after the rows that are new.
    """
    nodes, depth, width = shape
    texts, behind = len(places), max(depth + 1, *map(len, fresh))
    after = [(base, length + len(new)) for (base, length), new in zip(places, fresh, strict=True)]
    splits = round_up(1 + split_of(max(length for _, length in after) + depth), SPLIT_SIZES)
    groups = -(-behind // group_nodes) * texts
    level = -(-width // group_nodes) * texts + (texts * width if width > 1 else 0)
    level = 1 << (level - 1).bit_length()
    caught, drafted = Size(texts * behind, groups, splits), Size(texts * width, level, splits)
    form = DraftForm(texts, nodes, depth, width, behind, caught, drafted)
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
        for text in range(form.texts):
            for _ in range(width):
                template.add(text, level, 0, 1)
        template.pad_to(first + 2 * rows)
        for text in range(form.texts):
            for node in range(width):
                template.add(text, level * width + node, 1, 1)
        template.pad_to(first + 3 * rows)
        ancestors = None if width == 1 else MAX_ROWS + form.ancestors_at(level)
        for text in range(form.texts):
            mine = range(text * width, (text + 1) * width)
            template.add_groups(text, mine, group_nodes, ancestors, level + 1)
        template.pad_to(first + size)
    return template


def extent_of(size: Size) -> int:
    """Integers of one pass."""
    return 3 * aligned(size.rows) + FIELDS * size.groups


def aligned(count: int) -> int:
    """16 bytes: kernels are compiled for integers that start so."""
    return -(-count // 4) * 4


def expected(rates: Sequence[Sequence[float]], shape: Shape) -> float:
    """Tokens of a tree of this shape that stand, if the r-th likeliest child of a node at a level does so often."""
    nodes, depth, width = shape
    level, found = [1.0], list[float]()
    for i in range(depth):
        ranks = rates[min(i, len(rates) - 1)][:width]
        level = sorted((above * rate for above in level[:width] for rate in ranks), reverse=True)
        found += level
    return sum(sorted(found, reverse=True)[:nodes])


def best_of_menu(
    rates: Sequence[Sequence[float]], most: Shape, price: Sequence[float], level: float
) -> Shape:
    """The form that brings most beyond its price; every form is a graph to capture, so they are few."""
    fitting = [shape for shape in MENU if all(map(int.__le__, shape, most)) and shape[0] < len(price)]
    return max(
        fitting or MENU[:1],
        key=lambda shape: expected(rates, shape) - price[min(shape[0], len(price) - 1)] - level * shape[1],
    )


@dataclass(slots=True)
class DraftMenu:
    """Which shapes of draft are worth a graph: capturing one costs as much as many rounds.

    A budget that is new is met with what is there and fits, or not at all, until it has been asked for several times.
    At the end of a text budgets shrink round by round: there the last draft will do, the text is cut behind it.
    """

    known: dict[int, set[Shape]] = field(default_factory=dict)  # by number of texts
    asked: dict[tuple[int, Shape], int] = field(default_factory=dict)
    latest: dict[int, Shape] = field(default_factory=dict)

    def choose(self, texts: int, shape: Shape, ends: bool = False) -> Shape | None:
        known = self.known.setdefault(texts, set())
        if ends and shape not in known:
            return self.latest.get(texts)
        if shape not in known:
            count = self.asked[texts, shape] = self.asked.get((texts, shape), 0) + 1
            if known and count < PATIENCE:
                return max((other for other in known if all(map(int.__le__, other, shape))), default=None)
            known.add(shape)
        self.latest[texts] = shape
        return shape
