"""FeatureRows: the target's hidden rows that a head has not read yet, on the device, a few places per sequence.

Every sequence owns ROOM rows of one buffer, used again and again: row t of a sequence lies at its place t % ROOM. After
a round one indexed copy appends the rows of root and path of all sequences, whichever of them drafted, joined or left.
A draft reads rows by their places. Keys and values of a head depend on a row alone, so rows that no draft starts from
are read in passes of their own, many sequences at once: prompts when they are prefilled, and the rows of sequences that
do not draft when their places are used up.

What is known of the sequences is kept in arrays (row_states.py), so that a round of many takes as long as one of few.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.drafters.eagle.cuda.draft_plan import MOST, Lanes
from forerun.drafters.eagle.cuda.feature_fusion import FeatureFusion
from forerun.drafters.eagle.cuda.head import HeadNet
from forerun.drafters.eagle.cuda.integers import SentInts
from forerun.drafters.eagle.cuda.row_states import PADDING, ROOM, RowStates
from forerun.models.cuda.graphs import Replays
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import MAX_ROWS, Size, round_up
from forerun.models.paged import Ints
from forerun.types import Scores, Seq, TreeBatch, TreeForm, Verdict

DEEPEST = 16  # levels of a draft
PASSES = (64, 256, MAX_ROWS)  # rows of a pass that reads for keys and values alone


class Fresh(NamedTuple):
    """Rows of a pass, R of them, that B sequences get: root and path of each."""

    places: Ints  # [B] of the sequences
    counts: Ints  # [B] rows of each
    owners: Ints  # [R] which of the B
    rows: Ints  # [R] of the pass
    after: Ints  # [R] the token after each
    at: Ints  # [R] position

    @classmethod
    def of(
        cls, places: Ints, firsts: Ints, paths: Sequence[Sequence[int]], bonus: Sequence[int], tokens: Ints
    ) -> Fresh:
        """From where the trees of these places start, their accepted nodes, and what follows those."""
        counts = np.array([1 + len(path) for path in paths], dtype=np.int32)
        owners = np.repeat(np.arange(len(paths), dtype=np.int32), counts)
        ends = np.cumsum(counts, dtype=np.int32)
        rows = firsts[owners]
        below = np.ones(len(rows), dtype=bool)
        below[ends - counts] = False
        rows[below] += np.fromiter(chain.from_iterable(paths), np.int32, len(rows) - len(paths))
        after = np.empty_like(rows)
        after[:-1], after[ends - 1] = tokens[rows[1:]], bonus
        within = np.arange(len(rows), dtype=np.int32) - (ends - counts)[owners]
        return cls(places, counts, owners, rows, after, within)

    def behind(self, seen: Ints) -> Fresh:
        """The same behind so many rows of each sequence."""
        return self._replace(at=self.at + seen[self.owners])

    def select(self, which: np.ndarray[Any, Any]) -> Fresh:
        """Some of the rows."""
        return self._replace(
            owners=self.owners[which], rows=self.rows[which], after=self.after[which], at=self.at[which]
        )


class FeatureRows:
    """The rows of all sequences of one head, and its slots."""

    def __init__(self, net: HeadNet, fusion: FeatureFusion, replays: Replays, ints: SentInts) -> None:
        self.net, self.fusion, self._replays, self._ints = net, fusion, replays, ints
        device, width = net.model.device, fusion.feature_width
        self.states = RowStates(net.pool)
        self._dropped = (MOST + 1) * ROOM  # a row that is never read; those of PADDING are always zero
        self._places = SentInts(device, 2 * MOST * (DEEPEST + 1), torch.long)
        with torch.inference_mode(False):
            self.rows = torch.zeros(self._dropped + 1, width, dtype=net.model.dtype, device=device)
            self._passing = torch.zeros(MAX_ROWS, width, dtype=net.model.dtype, device=device)

    @property
    def held(self) -> int:
        """Sequences that have places."""
        return self.states.held

    def forget(self, seq_id: int) -> None:
        self.states.forget(seq_id)

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Add the rows of root and path of every tree; long ones, which are prompts, are read at once."""
        states, (paths, bonus), starts = self.states, verdict.to_host(), trees.starts
        places = states.admit(seqs, [1 + len(path) for path in paths])
        kept = [
            b for b, place in enumerate(places) if place != PADDING and starts[b + 1] > starts[b]
        ]  # not those that there is no room for, and prompts of one token, of which nothing went through the target
        if not kept:
            return
        if len(kept) < len(seqs):
            places, paths, bonus = places[kept], [paths[b] for b in kept], [bonus[b] for b in kept]
        firsts = np.array(starts[:-1], dtype=np.int32)[kept]
        fresh = Fresh.of(places, firsts, paths, bonus, np.array(trees.to_host()[0], dtype=np.int32))
        hidden = [scores.hidden[layer] for layer in self.fusion.layers]
        self._make_places(fresh)
        fresh = fresh.behind(states.seen[places])
        is_long = fresh.counts > DEEPEST + 1
        if is_long.any():
            self._read_passed(fresh.select(np.flatnonzero(is_long[fresh.owners])), hidden)
        states.seen[places] += fresh.counts
        seen = states.seen[places]
        states.read[places] = np.where(is_long, seen, states.read[places])
        last = np.where(is_long, 1, fresh.counts)[fresh.owners]  # rows to keep of each
        fresh = fresh.select(np.flatnonzero(fresh.at >= seen[fresh.owners] - last))
        owners, around = places[fresh.owners], fresh.at % ROOM
        states.after[owners, around] = fresh.after
        self._append(
            hidden, fresh.rows, owners * ROOM + around, trees.form if verdict.outcome is not None else None
        )

    def lanes(self, places: Sequence[int], roots: Sequence[int]) -> Lanes:
        """What a draft must know of these sequences."""
        return self.states.lanes(places, roots)

    def read_ahead(self, places: Sequence[int], behind: int) -> None:
        """Read what is more than a draft takes, so that at most `behind` rows are left of each sequence."""
        at = np.array(places, dtype=np.int32)
        at = at[self.states.unread(at) > behind]
        if len(at):
            self._read_places(at, self.states.seen[at] - behind)

    def rehearse(self, scores: Scores, form: TreeForm) -> None:
        """Capture the copy behind rounds of a form; what is copied is dropped."""
        none = np.zeros(0, dtype=np.int32)
        self._append([scores.hidden[layer] for layer in self.fusion.layers], none, none, form)

    def rehearse_reading(self) -> None:
        """Capture the passes that read for keys and values; they write to no slot."""
        none = np.zeros(0, dtype=np.int32)
        for rows in PASSES:
            self._keep(none, none, none, rows)

    def _make_places(self, coming: Fresh) -> None:
        """Where new rows would overwrite unread ones, read these first; of all sequences that have many."""
        wanted = self.states.unread(coming.places) + coming.counts
        if (wanted > ROOM).any():
            full = coming.places[wanted > ROOM // 2]
            self._read_places(full, self.states.seen[full])

    def _append(self, hidden: list[Tensor], sources: Ints, places: Ints, form: TreeForm | None) -> None:
        """One indexed copy; behind trees of a form the rows lie in the target's buffers, and the copy is captured."""
        if form is None:
            self._places.send(np.concatenate((sources, places)))
            self._copy(hidden, len(sources))
            return
        count = form.trees * (form.depth + 1)
        both = np.zeros((2, count), dtype=np.int64)
        both[1] = self._dropped
        both[0, : len(sources)], both[1, : len(sources)] = sources, places
        self._places.send(both)
        self._replays.do(("append", form), lambda: self._copy(hidden, count))

    def _copy(self, hidden: list[Tensor], count: int) -> None:
        sources, places = self._places.all[: 2 * count].view(2, count)
        parts = [rows.index_select(0, sources) for rows in hidden]
        self.rows.index_copy_(0, places, torch.cat(parts, -1))

    def _read_places(self, places: Ints, ends: Ints) -> None:
        """Read rows of the buffer for keys and values: the unread ones of each sequence, to before an end."""
        counts = ends - self.states.read[places]
        owners = np.repeat(places, counts)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = self.states.read[owners] + within.astype(np.int32)
        tokens, slots = self.states.after[owners, at % ROOM], self.states.slots(owners, at)
        for low in range(0, len(owners), MAX_ROWS):
            some = slice(low, low + MAX_ROWS)
            now = owners[some] * ROOM + at[some] % ROOM
            self._places.send(now)
            torch.index_select(self.rows, 0, self._places.all[: len(now)], out=self._passing[: len(now)])
            self._keep(tokens[some], at[some], slots[some])
        self.states.read[places] = np.maximum(self.states.read[places], ends)

    def _read_passed(self, fresh: Fresh, hidden: list[Tensor]) -> None:
        """Read rows of a pass for keys and values, before they are counted as seen."""
        slots = self.states.slots(fresh.places[fresh.owners], fresh.at)
        for low in range(0, len(fresh.rows), MAX_ROWS):
            some = slice(low, low + MAX_ROWS)
            now = fresh.rows[some]
            if now[-1] - now[0] == len(now) - 1:  # rows follow each other: no gather
                parts = [layer[now[0] : now[-1] + 1] for layer in hidden]
            else:
                index = torch.from_numpy(now).to(self.rows.device)
                parts = [layer.index_select(0, index) for layer in hidden]
            torch.cat(parts, -1, out=self._passing[: len(now)])
            self._keep(fresh.after[some], fresh.at[some], slots[some])

    def _keep(self, tokens: Ints, at: Ints, slots: Ints, rows: int = 0) -> None:
        """Write keys and values of the first rows of `_passing`."""
        rows = rows or round_up(len(tokens), PASSES)
        ints = np.zeros((3, rows), dtype=np.int32)
        ints[2] = -1
        for row, values in zip(ints, (tokens, at, slots), strict=True):
            row[: len(tokens)] = values
        self._ints.send(ints)
        self._replays.do(("keep", rows), lambda: self._pass(rows))

    def _pass(self, rows: int) -> None:
        run = Run.of(Size(rows, 0, 0), self._ints.all)
        self.net.keep(run, self.fusion.fuse(self._passing[:rows]))
