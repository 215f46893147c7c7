"""The integers of a draft by a draft model: those of its first pass, and of each further one, sent in one copy.

The first pass reads what the model has not read of every sequence, one token or two: after a draft that was accepted
whole, its last token and the target's own; after any other, the target's own. Each further pass reads one drafted
token per sequence, whose id only the device knows. Positions, slots and groups follow from a sequence's pages and
length. Batch sizes are rounded up to a few buckets; rows of padding are written nowhere and attend to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from forerun.drafters.eagle.cuda.draft_plan import aligned
from forerun.models.cuda.plan import FIELDS, MAX_ROWS, NARROW, Size, splits_of, splits_to
from forerun.models.paged import Ints
from forerun.models.pages import PAGE
from forerun.noise import coupling_key

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)  # batch sizes that have graphs
MOST = BUCKETS[-1]
DEEPEST = 16  # tokens of a draft
UNREAD = 2  # tokens per sequence that the first pass reads, at most

Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


class Noise(NamedTuple):
    """By what a sequence's tokens are drawn, where its verifier couples by noise."""

    seed: int
    temperature: float


class Lane(NamedTuple):
    """What a draft must know of one sequence."""

    tokens: Sequence[int]  # not read yet, the root last
    pages: Sequence[int]  # of the draft model's slots, with room for the draft; none = padding
    first: int  # position of the first of these tokens
    noise: Noise | None = None  # None = the likeliest tokens are drafted

    @property
    def root_at(self) -> int:
        return self.first + len(self.tokens) - 1


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
    def noise_at(self) -> int:
        """[keys, low and high, of every token of every sequence | temperatures | is noise used]."""
        return 3 * aligned(self.first.rows) + FIELDS * self.first.groups

    @property
    def passes_at(self) -> int:
        """The further passes, each [positions | slots | groups]."""
        return self.noise_at + (2 * DEEPEST + 2) * aligned(self.sequences)

    @property
    def extent(self) -> int:
        """Integers of a further pass."""
        return 2 * aligned(self.sequences) + FIELDS * self.sequences


def plan_chain(lanes: Sequence[Lane], depth: int, farthest: int = 0) -> tuple[ChainForm, Ints]:
    """The integers of a draft so deep, for as many lanes as a bucket has.

    `farthest` asks for as many splits as a context that long needs.
    """
    count = len(lanes)
    at = np.array([lane.root_at if lane.pages else 0 for lane in lanes], dtype=np.int32)
    form = ChainForm(count, splits_to(max(farthest, int(at.max())) + depth))
    sizes = np.array([len(lane.pages) for lane in lanes], dtype=np.int32)
    pages = np.array([page for lane in lanes for page in lane.pages], dtype=np.int32)
    real, starts = sizes > 0, np.cumsum(sizes, dtype=np.int32) - sizes
    pages_at = form.passes_at + (depth - 1) * form.extent
    tables = _Tables(pages if len(pages) else np.zeros(1, np.int32), starts, MAX_ROWS + pages_at)
    ints = np.zeros(pages_at + len(pages), dtype=np.int32)
    ints[pages_at:] = pages
    rows, wide = aligned(form.first.rows), aligned(count)
    parts = ints[: 3 * rows].reshape(3, rows)[:, : form.first.rows].reshape(3, UNREAD, count)
    groups = ints[3 * rows : form.noise_at].reshape(UNREAD, count, FIELDS)
    places, slots, found = tables.rows(at + np.arange(depth, dtype=np.int32)[:, None], real)
    parts[0, 0], parts[1, 0], parts[2, 0] = [lane.tokens[-1] for lane in lanes], places[0], slots[0]
    groups[0] = found[0]
    before = [lane.tokens[0] if len(lane.tokens) > 1 else -1 for lane in lanes]  # unread beside the root
    parts[2, 1] = -1
    if max(before) >= 0:
        there = real & (np.array(before) >= 0)
        parts[0, 1] = np.where(there, before, 0)
        parts[1, 1], parts[2, 1], groups[1] = (part[0] for part in tables.rows((at - 1)[None], there))
        groups[1, there, 2] += count
    passes = ints[form.passes_at : pages_at].reshape(depth - 1, form.extent)
    passes[:, :count], passes[:, wide : wide + count] = places[1:], slots[1:]
    passes[:, 2 * wide :] = found[1:].reshape(depth - 1, FIELDS * count)
    if any(lane.noise is not None for lane in lanes):
        _write_noise(ints[form.noise_at : form.passes_at], lanes, at)
    return form, ints


class _Tables(NamedTuple):
    """The pages of all sequences, one after another."""

    pages: Ints
    starts: Ints  # where those of each sequence start
    place: int  # of the first among all integers

    def rows(self, at: Ints, there: Bools) -> tuple[Ints, Ints, Ints]:
        """Positions, slots and groups of rows at [n, B]; a row attends alone, to all before it and to itself.

        Rows that are not there are written nowhere and attend to nothing. Fields of groups: models/cuda/plan.py.
        """
        places = np.where(there, at, 0)
        pages = self.pages[np.where(there, self.starts + places // PAGE, 0)]
        groups = np.zeros((*places.shape, FIELDS), dtype=np.int32)
        groups[..., 1], groups[..., 2], groups[..., 3] = splits_of(places) + 1, np.arange(at.shape[1]), 1
        groups[..., 5], groups[..., 7] = places, self.place + self.starts
        groups[:, ~there] = 0
        return places, np.where(there, pages * PAGE + places % PAGE, -1), groups


def _write_noise(ints: Ints, lanes: Sequence[Lane], at: Ints) -> None:
    """Keys of the noise by which each drafted token is drawn; the token behind a root is at its position plus one."""
    table = ints.reshape(2 * DEEPEST + 2, -1)
    temperatures = table[-2].view(np.float32)
    temperatures[:] = 1.0
    for b, lane in enumerate(lanes):
        if lane.noise is not None:
            keys = [coupling_key(lane.noise.seed, int(at[b]) + 1 + i) for i in range(DEEPEST)]
            table[: 2 * DEEPEST, b] = [low for low, _ in keys] + [high for _, high in keys]
            temperatures[b], table[-1, b] = lane.noise.temperature, 1
