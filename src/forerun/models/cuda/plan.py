"""What the host tells the device about a pass: one array of integers, sent in one copy.

Per row its token, its position and the slot its keys and values go to; then the groups of nodes that attention
works on (see kernels_attention.py), and the ancestors of nodes in trees that branch. Row counts, group counts
and split counts are rounded up to a few sizes, so that a pass can be replayed as a captured graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_ROWS = 512  # rows in one pass; a tree has at most 257
FIELDS = 8  # ints per group: low split, high split, first row, rows, base slot, length, ancestors, -
ROW_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, MAX_ROWS)
SPLIT_SIZES = (4, 8, 14, 20, 32, 48, 64, 96, 128, 192, 256)
LONGEST = 245_760  # positions that 256 splits cover

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


def split_of(position: int) -> int:
    """Which split of the context a position lies in: 128 wide to 1024, 256 to 4096, then 1024."""
    if position < 1024:
        return position // 128
    return 8 + (position - 1024) // 256 if position < 4096 else 20 + (position - 4096) // 1024


def split_start(split: int) -> int:
    if split < 8:
        return split * 128
    return 1024 + (split - 8) * 256 if split < 20 else 4096 + (split - 20) * 1024


@dataclass(frozen=True, slots=True)
class Span:
    """The nodes of one sequence, written behind `length` committed slots that start at `base`."""

    tokens: Sequence[int]
    parents: Sequence[int] | None  # within the span; None = a chain
    base: int
    length: int


@dataclass(frozen=True, slots=True)
class Size:
    """What passes must agree in to be replays of one graph."""

    rows: int
    groups: int
    splits: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One pass. `ints` lies behind an identity of MAX_ROWS entries, the ancestors of every chain."""

    size: Size
    rows: int  # really there; the others are padding
    ints: Ints


def plan_pass(spans: Sequence[Span], group_nodes: int) -> Plan:
    """Lay out a pass; `group_nodes` is how many nodes one program of attention can take."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    groups: list[tuple[int, ...]] = []
    ancestors: list[int] = []
    for span in spans:
        first, count = len(tokens), len(span.tokens)
        tokens += span.tokens
        slots += range(span.base + span.length, span.base + span.length + count)
        if span.parents is None or all(parent == i - 1 for i, parent in enumerate(span.parents)):
            positions += range(span.length, span.length + count)
            groups += _chain_groups(span, first, count, group_nodes)
        else:
            depths, paths = _paths(span.parents)
            positions += [span.length + depth for depth in depths]
            groups += _tree_groups(span, first, depths, paths, group_nodes, ancestors)
    size = Size(
        _round(len(tokens), ROW_SIZES),
        1 << max(0, len(groups) - 1).bit_length(),
        _round(1 + split_of(max(positions)), SPLIT_SIZES),
    )
    return Plan(size, len(tokens), _pack(size, tokens, positions, slots, groups, ancestors))


def _chain_groups(span: Span, first: int, count: int, group_nodes: int) -> list[tuple[int, ...]]:
    """Nodes that follow each other share whatever they see: ancestors are the identity, at 0."""
    groups: list[tuple[int, ...]] = []
    for low in range(0, count, group_nodes):
        rows = min(group_nodes, count - low)
        high = split_of(span.length + low + rows - 1) + 1
        groups.append((0, high, first + low, rows, span.base, span.length, 0, 0))
    return groups


def _tree_groups(
    span: Span,
    first: int,
    depths: Sequence[int],
    paths: Sequence[Sequence[int]],
    group_nodes: int,
    ancestors: list[int],
) -> list[tuple[int, ...]]:
    """Committed text is shared; from the split in which the tree starts, every node walks alone.

    The last but one field is where a node's ancestors start, counted from the first of them: `_pack` moves it.
    """
    shared = split_of(span.length)
    groups: list[tuple[int, ...]] = []
    if shared:
        for low in range(0, len(depths), group_nodes):
            rows = min(group_nodes, len(depths) - low)
            groups.append((0, shared, first + low, rows, span.base, span.length, 0, 0))
    for node, depth in enumerate(depths):
        high = split_of(span.length + depth) + 1
        groups.append((shared, high, first + node, 1, span.base, span.length, len(ancestors) + 1, 0))
        ancestors += paths[node]
    return groups


def _paths(parents: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Of every node its depth, and the nodes from the root down to itself."""
    depths: list[int] = []
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        paths.append([node] if parent < 0 else [*paths[parent], node])
    return depths, paths


def _pack(
    size: Size,
    tokens: list[int],
    positions: list[int],
    slots: list[int],
    groups: list[tuple[int, ...]],
    ancestors: list[int],
) -> Ints:
    """[3 rows + FIELDS groups + ancestors]; padding rows are token 0 at position 0, written nowhere."""
    behind = 3 * size.rows + FIELDS * size.groups
    ints = np.zeros(behind + len(ancestors), dtype=np.int32)
    ints[: len(tokens)] = tokens
    ints[size.rows : size.rows + len(tokens)] = positions
    ints[2 * size.rows : 3 * size.rows] = -1
    ints[2 * size.rows : 2 * size.rows + len(tokens)] = slots
    table = ints[3 * size.rows : behind].reshape(size.groups, FIELDS)
    table[: len(groups)] = groups
    table[:, 6] = np.where(table[:, 6] > 0, table[:, 6] - 1 + MAX_ROWS + behind, 0)
    ints[behind:] = ancestors
    return ints


def _round(count: int, sizes: Sequence[int]) -> int:
    return sizes[bisect_left(sizes, count)]
