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
from forerun.models.cuda.plan import FIELDS, MAX_ROWS, NARROW, Size, split_of, splits_to
from forerun.models.paged import Ints
from forerun.models.pages import PAGE
from forerun.noise import coupling_key

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)  # batch sizes that have graphs
MOST = BUCKETS[-1]
DEEPEST = 16  # tokens of a draft
UNREAD = 2  # tokens per sequence that the first pass reads, at most


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
    pages_at, real = form.passes_at + (depth - 1) * form.extent, sizes > 0
    tables = _Tables(pages, np.cumsum(sizes, dtype=np.int32) - sizes, MAX_ROWS + pages_at)
    ints = np.zeros(pages_at + len(pages), dtype=np.int32)
    ints[pages_at:] = pages
    rows = aligned(form.first.rows)
    parts = ints[: 3 * rows].reshape(3, rows)[:, : form.first.rows].reshape(3, UNREAD, count)
    groups = ints[3 * rows : form.noise_at].reshape(UNREAD, count, FIELDS)
    for back in range(UNREAD):  # the last token of every sequence, then the one before it
        there = real & np.array([len(lane.tokens) > back for lane in lanes])
        parts[0, back] = [lane.tokens[-1 - back] if len(lane.tokens) > back else 0 for lane in lanes]
        parts[1, back], parts[2, back] = tables.rows(at - back, there)
        groups[back] = tables.groups(at - back, there, back * count)
    _write_noise(ints[form.noise_at : form.passes_at], lanes, at)
    passes = ints[form.passes_at : pages_at].reshape(depth - 1, form.extent)
    wide = aligned(count)
    for i, row in enumerate(passes, start=1):
        row[:count], row[wide : wide + count] = tables.rows(at + i, real)
        row[2 * wide :].reshape(count, FIELDS)[:] = tables.groups(at + i, real, 0)
    return form, ints


class _Tables(NamedTuple):
    """The pages of all sequences, one after another."""

    pages: Ints
    starts: Ints  # where those of each sequence start
    place: int  # of the first among all integers

    def rows(self, at: Ints, there: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> tuple[Ints, Ints]:
        """Positions and slots of one row per sequence."""
        positions = np.where(there, at, 0)
        if not len(self.pages):
            return positions, np.full_like(positions, -1)
        index = np.where(there, self.starts + positions // PAGE, 0)
        return positions, np.where(there, self.pages[index] * PAGE + positions % PAGE, -1)

    def groups(self, at: Ints, there: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], first: int) -> Ints:
        """[B, FIELDS] each row attends alone, to all before it and to itself; see models/cuda/plan.py."""
        found = np.zeros((len(at), FIELDS), dtype=np.int32)
        found[:, 1] = [split_of(int(position)) + 1 for position in at]
        found[:, 2], found[:, 3], found[:, 5] = first + np.arange(len(at)), 1, at
        found[:, 7] = self.place + self.starts
        found[~there] = 0
        return found


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
