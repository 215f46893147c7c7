"""FeatureRows: the target's hidden rows that a head has not read yet, on the device, a few places per sequence.

Every sequence owns ROOM rows of one buffer, used again and again: row t of a sequence lies at its place t % ROOM. After
a round one indexed copy appends the rows of root and path of all sequences, whichever of them drafted, joined or left.
A draft reads rows by their places. Rows that no draft starts from are read in passes of their own (row_reader.py), many
sequences at once: prompts before the first draft behind them (unread_prompts.py), and the rows of sequences that do not
draft when their places are used up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.drafters.base import committed_tokens
from forerun.drafters.eagle.cuda.draft_noise import settings_of
from forerun.drafters.eagle.cuda.draft_plan import PLACES, ROOM, Lane
from forerun.drafters.eagle.cuda.feature_copies import append_decided, copy_rows
from forerun.drafters.eagle.cuda.feature_fusion import FeatureFusion
from forerun.drafters.eagle.cuda.head import HeadNet
from forerun.drafters.eagle.cuda.row_reader import RowReader
from forerun.drafters.eagle.cuda.row_state import NO_PAGES, RowState
from forerun.drafters.eagle.cuda.unread_prompts import UnreadPrompts
from forerun.models.cuda.graphs import Replays
from forerun.models.cuda.integers import SentInts
from forerun.models.cuda.last_round import LastRound
from forerun.models.pages import PAGE, TREE_MARGIN, pages_for
from forerun.trees import ints_of
from forerun.types import Scores, Seq, TreeBatch, TreeForm, Verdict

DEEPEST = 16  # levels of a draft; a round adds at most one row more, which is less than ROOM
PADDING = -1  # whose slots padding has


class Behind(NamedTuple):
    """What a draft behind a round that was not read starts from."""

    lanes: list[Lane]
    owners: dict[int, RowState]  # by their trees in that round
    states: list[RowState | None]  # of all its sequences
    new: list[RowState]  # of those that had no tree


Fresh = tuple[RowState, Sequence[int], list[int]]  # rows of a pass, and the token after each


class FeatureRows:
    """The rows of all sequences of one head, and its slots."""

    def __init__(
        self, net: HeadNet, fusion: FeatureFusion, last: LastRound, replays: Replays, ints: SentInts
    ) -> None:
        self.net, self.fusion, self._last, self._replays = net, fusion, last, replays
        device, width = net.model.device, fusion.feature_width
        self._model = net.model
        self._states: dict[int, RowState] = {}
        self._left_out: set[int] = set()  # sequences for which there was no room
        self._free = list(range(PLACES))[::-1]
        self._zeros = PLACES * ROOM  # a row that is always zero; the one behind it is never read
        self._places = SentInts(device, 2 * PLACES * (DEEPEST + 1), torch.long)
        with torch.inference_mode(False):
            self.rows = torch.zeros(PLACES * ROOM + 2, width, dtype=net.model.dtype, device=device)
        self.reader = RowReader(net, fusion, replays, ints)
        self.prompts = UnreadPrompts(self.reader)
        self._padding = RowState(PADDING, 0, NO_PAGES)
        self.has_room(self._padding, TREE_MARGIN)

    @property
    def held(self) -> int:
        """Sequences that have places."""
        return len(self._states)

    def get(self, seq_id: int | None) -> RowState | None:
        return None if seq_id is None else self._states.get(seq_id)

    def ready(self, seq: Seq, least: int = 1) -> RowState | None:
        """Of a sequence that has rows for all of its tokens, and room for a draft behind them; None = it has not.

        With `least` 0 it may have no rows yet, as its prompt had one token.
        """
        state = self._states.get(seq.id) if least else self._with_room(seq, 0)
        if state is None or not least <= len(state.after) == len(seq.tokens) - 1:
            return None
        return state if len(state.after) <= self._model.max_length - DEEPEST else None

    def lane(self, state: RowState | None, root: int) -> Lane:
        """What a draft must know of a sequence whose last round was read; None = padding."""
        if state is None or not state.seen:
            return Lane(root, (0,), self._padding.pages, 0, self._zeros)
        first = min(state.read, len(state.after) - 1)  # the last row in any case: the draft starts from it
        return Lane(root, state.after[first:], state.pages, first, state.place * ROOM)

    def lanes_behind(
        self, going: Sequence[tuple[Seq, int]], passed: int, unread: int, drafted: int
    ) -> Behind | None:
        """Lanes behind a round that was not read; None = there is no room, or no rows.

        Sequences come with their tree in that round, -1 = none; only these may be without rows. The round adds up to
        `passed` rows; a draft takes up to `unread` that were not read, and writes `drafted` positions behind them.
        """
        states = [self.ready(seq) for seq, _ in going]
        new = [one for one, (_, tree) in zip(states, going, strict=True) if tree < 0 and one is not None]
        self.prompts.read([one for one in states if one is not None])
        self.read_ahead(new, unread)
        others = zip(states, going, strict=True)
        short = [one for one, (_, tree) in others if one is not None and tree >= 0 and one.read < one.seen]
        self.read_ahead(short, 0)  # of plain rounds, and of prompts too short to be put off
        longest = self._model.max_length - DEEPEST
        lanes, owners = list[Lane](), dict[int, RowState]()
        for state, (seq, tree) in zip(states, going, strict=True):
            if tree >= 0 and state is not None:
                seen = len(state.after)
                end = seen + passed
                if end > longest or not self.has_room(state, end + drafted):
                    return None
                owners[tree] = state
                lanes.append(Lane(0, (), state.pages, seen, state.place * ROOM, tree))
            elif tree >= 0 or (state is not None and not self.has_room(state, state.seen + drafted)):
                return None
            else:
                lanes.append(self.lane(state, seq.tokens[-1]))
        return Behind(lanes, owners, states, new)

    def forget(self, seq_id: int) -> None:
        self._left_out.discard(seq_id)
        self.prompts.forget(seq_id)
        state = self._states.pop(seq_id, None)
        if state is not None:
            self._free.append(state.place)
            self.net.pool.release(seq_id)

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Add the rows of root and path of every tree; long ones, which are prompts, are put off.

        Where the next draft was started before this round was read, they were added, and read, on the device.
        """
        known = [self._states.get(seq.id) for seq in seqs]
        if any([one is not None and one.kept is not None for one in known]):  # noqa: C419 - quicker
            self._note_kept(seqs, committed_tokens(trees, verdict))
            return
        if trees.form is None and trees.is_plain():
            self._observe_plain(seqs, scores, verdict)
            return
        tokens, (paths, bonus) = trees.to_host()[0], verdict.to_host()
        fresh, owners, members = list[Fresh](), dict[int, RowState](), trees.members
        spans = zip(trees.starts, trees.starts[1:], strict=False)
        for b, (seq, (first, end), path, last) in enumerate(zip(seqs, spans, paths, bonus, strict=True)):
            state = self._with_room(seq, len(path) + 1)
            if state is None or first == end:
                continue  # no room for it, or a prompt of one token: nothing went through the target
            rows = [first, *[first + node for node in path]]
            fresh.append((state, rows, [*[tokens[row] for row in rows[1:]], last]))
            owners[members[b]] = state
        hidden = [scores.hidden[layer] for layer in self.fusion.layers]
        self._make_places(fresh)
        if verdict.outcome is not None and trees.form is not None:
            self.append_decided(owners, hidden, trees.form)
            for state, _, after in fresh:
                state.after += after
        else:
            self._append_passed(fresh, hidden)

    def _note_kept(self, seqs: Sequence[Seq], committed: Sequence[list[int]]) -> None:
        """Of a round behind which another was launched before it was read: these tokens were committed in it.

        Whose rows were not kept has no more drafts: those rows are gone.
        """
        for seq, tokens in zip(seqs, committed, strict=True):
            state = self._with_room(seq, len(tokens))
            if state is not None and state.kept is not None:
                state.after += tokens
                state.read, state.kept = len(state.after) if state.kept else state.read, None

    def _with_room(self, seq: Seq, rows: int) -> RowState | None:
        """A sequence with places and pages for so many more rows."""
        state = self._states.get(seq.id)
        if state is not None and len(state.after) + rows <= PAGE * len(state.pages):
            return state  # the usual case
        return self._admit(seq, rows)

    def _observe_plain(self, seqs: Sequence[Seq], scores: Scores, verdict: Verdict) -> None:
        """The same of lone roots, in few steps: a batch too large for drafts has many plain rounds."""
        found = [self._with_room(seq, 1) for seq in seqs]
        states = [state for state in found if state is not None]
        if any([len(state.after) - state.read >= ROOM for state in states]):  # noqa: C419 - quicker
            self._make_places([(state, (0,), []) for state in states])
        places, bonus = [one.place * ROOM + len(one.after) % ROOM for one in states], verdict.to_host()[1]
        for state, token in zip(found, bonus, strict=True):
            if state is not None:
                state.after.append(token)
        rows = range(len(seqs)) if len(states) == len(seqs) else [b for b, one in enumerate(found) if one]
        self._copy(rows, places, [scores.hidden[layer] for layer in self.fusion.layers])

    def _append_passed(self, fresh: Sequence[Fresh], hidden: list[Tensor]) -> None:
        """Of passes whose verdict the host has."""
        self._put_off([one for one in fresh if len(one[1]) > DEEPEST + 1], hidden)
        sources, places = list[int](), list[int]()
        for state, passed, after in fresh:
            state.after += after
            seen, kept = state.seen, len(passed)
            if kept > DEEPEST + 1:
                state.read, kept = seen, 1
            sources += passed[-kept:]
            places += [state.place * ROOM + t % ROOM for t in range(seen - kept, seen)]
        self._copy(sources, places, hidden)

    def _copy(self, sources: Sequence[int], places: Sequence[int], hidden: list[Tensor]) -> None:
        if sources:
            self._places.send(np.array((sources, places), dtype=np.int64))
            copy_rows(self.rows, hidden, *self._places.all[: 2 * len(sources)].view(2, -1))

    def append_decided(self, owners: Mapping[int, RowState], hidden: list[Tensor], form: TreeForm) -> None:
        """The rows of root and path of trees of a form, by what the device has decided; whoever owns none is left out.

        Those of trees lie in the target's buffers, so the copy is captured; those of lone roots are copies already.
        """
        sent = np.full((2, form.trees), -1, dtype=np.int64)
        if owners:
            states = owners.values()
            sent[:, [*owners]] = [one.place * ROOM for one in states], [len(one.after) for one in states]
        self._places.send(sent)
        decided = self._places.all[: 2 * form.trees].view(2, -1)
        if not form.depth:
            append_decided(self.rows, hidden, decided, self._last, form)
            return
        self._replays.do(
            ("append", form), lambda: append_decided(self.rows, hidden, decided, self._last, form)
        )

    def read_ahead(self, states: Sequence[RowState], most: int) -> None:
        """Read what is more than a draft takes, so that at most so many rows are left of each sequence."""
        self.prompts.read(states)
        spans = [(state, state.read, state.seen - most) for state in states if state.seen - state.read > most]
        self._read_places(spans)

    def rehearse(self, scores: Scores, form: TreeForm) -> None:
        """Capture the copy behind rounds of a form; what is copied is dropped."""
        self.append_decided({}, [scores.hidden[layer] for layer in self.fusion.layers], form)

    def rehearse_reading(self) -> None:
        """Capture the passes that read for keys and values; they write to no slot."""
        self.reader.rehearse()

    def has_room(self, state: RowState, positions: int) -> bool:
        """Give a sequence pages for so many positions; False = there are too few."""
        more = pages_for(positions) - len(state.pages)
        if more > 0:
            if not self.net.pool.take(state.seq_id, more):
                return False
            state.pages = np.array(self.net.pool.held[state.seq_id], dtype=np.int32)
        return True

    def _admit(self, seq: Seq, rows: int) -> RowState | None:
        """A sequence with places and pages for so many more rows; None where there are none, until it is forgotten."""
        state = self._states.get(seq.id)
        if state is None and self._free and seq.id not in self._left_out:
            state = self._states[seq.id] = RowState(seq.id, self._free.pop(), NO_PAGES, settings_of(seq))
        if state is not None and not self.has_room(state, state.seen + rows):
            self.forget(seq.id)
            state = None
        if state is None:
            self._left_out.add(seq.id)
        return state

    def _make_places(self, coming: Sequence[Fresh]) -> None:
        """Where new rows would overwrite unread ones, read these first; of all sequences that have many."""
        counts = [(one, one.seen - one.read, len(rows)) for one, rows, _ in coming if one.read < one.seen]
        if any(unread + rows > ROOM for _, unread, rows in counts):
            full = [state for state, unread, rows in counts if unread + rows > ROOM // 2]
            self._read_places([(state, state.read, state.seen) for state in full])

    def _read_places(self, spans: Sequence[tuple[RowState, int, int]]) -> None:
        """Read rows of the buffer for keys and values: of each sequence those from one to before another."""
        self.prompts.read([state for state, _, _ in spans])  # they come before these
        places = [state.place * ROOM + t % ROOM for state, low, high in spans for t in range(low, high)]

        def fill(low: int, count: int) -> None:
            self._places.send(np.array(places[low : low + count], dtype=np.int64))
            torch.index_select(self.rows, 0, self._places.all[:count], out=self.reader.passing[:count])

        self.reader.read([state.span(low, state.after[low:high]) for state, low, high in spans], fill)
        for state, _, high in spans:
            state.read = max(state.read, high)

    def _put_off(self, long: Sequence[Fresh], hidden: list[Tensor]) -> None:
        """Keep rows of a pass, before they are counted as seen, until somebody drafts behind them."""
        self._read_places([(one, one.read, one.seen) for one, _, _ in long if one.read < one.seen])
        for state, rows, after in long:
            part = hidden, rows[0], rows[-1] + 1
            if rows[-1] - rows[0] != len(rows) - 1:  # a long path of a tree that branches
                index = ints_of(rows, self.rows.device)
                part = [layer.index_select(0, index) for layer in hidden], 0, len(rows)
            self.prompts.add(state, state.seen, after, part)
