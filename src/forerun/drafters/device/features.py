"""FeatureRows: the target's hidden rows that a head has not read yet, on the device, a few places per sequence.

Every sequence (`RowState`) owns ROOM rows of one buffer, used again and again: row t of a sequence lies at its place
t % ROOM. After a round one indexed copy appends the rows of root and path of all sequences, whichever of them drafted,
joined or left. A draft reads rows by their places. Rows that no draft starts from are read in passes of their own
(`RowReader`), many sequences at once: prompts before the first draft behind them (`UnreadPrompts`), and the rows of
sequences that do not draft when their places are used up.

In a head of one layer keys and values depend on a row's input: such a pass needs tokens, positions and slots. In a head
of several, rows go through all layers but the last, so they attend to what their sequence has before them: then the
pass is planned as a target's is, each sequence a chain behind the rows that were read.

While many requests wait for their first token nothing is drafted, and they would wait for the head's reading too: so
rows of prompts are kept as the target's pass has left them, in copies that nobody overwrites, and read before the first
draft of their sequence. Of each sequence they are one span, in the order of its tokens. A head with windows is given no
more of a long prompt than its next draft depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.core.tree import chain_of, committed_tokens, ints_of
from forerun.core.types import Scores, Seq, TreeBatch, TreeForm, Verdict
from forerun.drafters.device.growth import Settings, settings_of
from forerun.drafters.device.head import FeatureFusion, HeadNet, append_decided, copy_rows
from forerun.drafters.device.plan import DEEPEST, PLACES, ROOM, Lane
from forerun.drafters.heads import base as heads
from forerun.models.cuda.device_trees import LastRound
from forerun.models.cuda.graphs import Replays
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import (
    MAX_ROWS,
    Need,
    Plan,
    Rows,
    SentInts,
    Size,
    Span,
    padding,
    plan_pass,
    round_up,
    splits_to,
)
from forerun.models.pages import PAGE, TREE_MARGIN, Ints, pages_for

NO_PAGES: Ints = np.zeros(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class RowState:
    """What is known of one sequence's rows. Row t belongs to token `base` + t, and comes with the token after it.

    Rows begin at the first token, unless the head has begun to draft for a text that another drafter had: then it knows
    nothing of what comes before.
    """

    seq_id: int
    place: int  # which ROOM rows it owns
    pages: Ints  # of its slots, by position
    base: int = 0
    noise: Settings | None = None  # that its drafts share with the verifier
    after: list[int] = field(default_factory=list)  # the token after each row that was observed
    read: int = 0  # rows whose keys and values are in the head's slots, were sent there, or are put off
    kept: bool | None = None  # of the round under way the rows are in their places: has the head read them?

    @property
    def seen(self) -> int:
        """Rows that were observed."""
        return len(self.after)

    def span(self, first: int, tokens: list[int]) -> Span:
        """Rows from a position on, with the token after each."""
        pages: list[int] = self.pages[: pages_for(first + len(tokens))].tolist()
        return Span(tokens, chain_of(len(tokens)), pages, first)


PASSES = (64, 128, 256, 512, MAX_ROWS)  # rows of a pass
Fill = Callable[[int, int], None]  # put so many rows, from a place among all on, into `RowReader.passing`


class RowReader:
    """Reads rows that were put into `passing`."""

    def __init__(self, net: HeadNet, fusion: FeatureFusion, replays: Replays, ints: SentInts) -> None:
        self.net, self.fusion, self._replays, self._ints = net, fusion, replays, ints
        with torch.inference_mode(False):
            shape = MAX_ROWS, fusion.feature_width
            self.passing = torch.zeros(shape, dtype=net.model.dtype, device=net.model.device)

    def read(self, spans: Sequence[Span], fill: Fill) -> None:
        """Rows of sequences, each behind those that were read; `fill` brings their features, in the same order."""
        low = 0
        for some in _cut(spans):
            count = sum(len(span.tokens) for span in some)
            fill(low, count)
            self.keep(some)
            low += count

    def rehearse(self) -> None:
        """Capture all passes; they write to no slot."""
        for rows in PASSES:
            self._run(padding(self._size(rows)))

    def keep(self, spans: Sequence[Span]) -> None:
        """Write keys and values of the first rows of `passing`."""
        if self.net.attends:
            self._run(plan_pass(spans, self.net.group_nodes, self._size_for))
            return
        rows = Rows()
        for span in spans:
            rows.add(span, self.net.group_nodes)
        count = len(rows.tokens)
        size = self._size(round_up(count, PASSES))
        ints = np.zeros((3, size.rows), dtype=np.int32)
        ints[2] = -1
        ints[:, :count] = rows.tokens, rows.positions, rows.slots
        self._run(Plan(size, count, ints))

    def _run(self, plan: Plan) -> None:
        self._ints.send(plan.ints)
        self._replays.do(("keep", plan.size), lambda: self._pass(plan.size))

    def _pass(self, size: Size) -> None:
        run = Run.of(size, self._ints.all)
        self.net.keep(run, self.fusion.fuse(self.passing[: size.rows]))

    def _size(self, rows: int) -> Size:
        """Of a pass: a group for every few rows of a sequence, and one for what is left of each sequence."""
        if not self.net.attends:
            return Size(rows, 0, 0)
        sequences = PLACES if rows == MAX_ROWS else rows // 8
        return Size(rows, rows // self.net.group_nodes + sequences, splits_to(self.net.model.max_length))

    def _size_for(self, need: Need) -> Size:
        return next(size for size in map(self._size, PASSES) if need.fits(size))


def _cut(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """The same rows, at most MAX_ROWS at once."""
    some, room = list[Span](), MAX_ROWS
    for span in spans:
        low = 0
        while low < len(span.tokens):
            tokens = span.tokens[low : low + room]
            some.append(Span(tokens, chain_of(len(tokens)), span.pages, span.length + low))
            low, room = low + len(tokens), room - len(tokens)
            if not room:
                yield some
                some, room = [], MAX_ROWS
    if some:
        yield some


MOST_UNREAD = 8 * MAX_ROWS  # rows of all sequences together: 0.2 GB of a target of 8B

Part = tuple[Sequence[Tensor], int, int]  # layers of a pass, and the rows of them from one to before another


@dataclass(slots=True)
class UnreadPrompt:
    """Rows of one sequence that follow each other."""

    state: RowState
    first: int  # position
    after: list[int] = field(default_factory=list)  # the token after each row
    parts: list[Part] = field(default_factory=list)

    def keep_last(self, count: int) -> None:
        """Forget all rows but about so many, where no draft will depend on them: nobody will see their slots."""
        surplus = len(self.after) - count
        if surplus < heads.SURPLUS:
            return
        self.first, self.after = self.first + surplus, self.after[surplus:]
        parts, self.parts = self.parts, []
        for layers, first, end in parts:
            if 0 < surplus < end - first:  # a copy, or all of a long prefix that was found would be held
                kept = [layer[first + surplus : end].clone() for layer in layers]
                self.parts.append((kept, 0, end - first - surplus))
            elif not surplus:
                self.parts.append((layers, first, end))
            surplus = max(0, surplus - (end - first))


class UnreadPrompts:
    def __init__(self, reader: RowReader) -> None:
        self._reader, self._depends_on = reader, reader.net.depends_on
        self._unread: dict[int, UnreadPrompt] = {}

    @property
    def rows(self) -> int:
        return sum(len(one.after) for one in self._unread.values())

    def rows_of(self, seq_id: int) -> int:
        one = self._unread.get(seq_id)
        return 0 if one is None else len(one.after)

    def add(self, state: RowState, first: int, after: Sequence[int], part: Part) -> None:
        """Rows of a sequence from a position on, behind those that it has here; too many of all are read at once."""
        one = self._unread.setdefault(state.seq_id, UnreadPrompt(state, first))
        assert one.first + len(one.after) == first, "rows of a prompt follow each other"
        one.after += after
        one.parts.append(part)
        if self._depends_on is not None:
            one.keep_last(self._depends_on)
        if self.rows > MOST_UNREAD:
            self.read([each.state for each in self._unread.values()])

    def forget(self, seq_id: int) -> None:
        self._unread.pop(seq_id, None)

    def read(self, states: Sequence[RowState]) -> None:
        """Read what there is of these sequences."""
        if not self._unread:
            return
        wanted = {state.seq_id for state in states}
        some = [one for seq_id, one in self._unread.items() if seq_id in wanted]
        if some:
            fill = self._fill_from([part for one in some for part in one.parts])
            self._reader.read([one.state.span(one.first, one.after) for one in some], fill)
            self._unread = {seq_id: one for seq_id, one in self._unread.items() if seq_id not in wanted}

    def _fill_from(self, parts: Sequence[Part]) -> Fill:
        """Brings rows of these parts, laid end to end, to the reader."""
        parts = _joined(parts)

        def fill(low: int, count: int) -> None:
            start = 0  # of a part among all rows
            for layers, first, end in parts:
                begin, stop = max(low, start), min(low + count, start + end - first)
                if begin < stop:
                    rows = slice(first + begin - start, first + stop - start)
                    into = self._reader.passing[begin - low : stop - low]
                    torch.cat([layer[rows] for layer in layers], -1, out=into)
                start += end - first

        return fill


def _joined(parts: Sequence[Part]) -> list[Part]:
    """The same rows, with those that follow each other in a pass as one part: each is a copy of its own."""
    found = list[Part]()
    for layers, first, end in parts:
        if found and found[-1][0] is layers and found[-1][2] == first:
            found[-1] = layers, found[-1][1], end
        else:
            found.append((layers, first, end))
    return found


PADDING = -1  # whose slots padding has


class Behind(NamedTuple):
    lanes: list[Lane]
    owners: dict[int, RowState]  # by their trees in that round
    states: list[RowState | None]  # of all its sequences
    new: list[RowState]  # of those that had no tree


Fresh = tuple[RowState, Sequence[int], list[int]]  # rows of a pass, and the token after each


class FeatureRows:
    """The rows of all sequences of one head, and its slots."""

    def __init__(self, net: HeadNet, fusion: FeatureFusion, last: LastRound, replays: Replays, ints: SentInts) -> None:
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
        return len(self._states)

    def get(self, seq_id: int | None) -> RowState | None:
        return None if seq_id is None else self._states.get(seq_id)

    def ready(self, seq: Seq, least: int = 1, coming: int = 0) -> RowState | None:
        """Of a sequence that has rows for all of its tokens, and room for a draft behind them; None = it has not.

        With `least` 0 it may have no rows yet, as its prompt had one token. `coming`: tokens that it will get now.
        """
        state = self._states.get(seq.id) if least else self._with_room(seq, 0)
        if state is None or not least <= len(state.after) == len(seq.tokens) + coming - 1 - state.base:
            return None
        return state if len(state.after) <= self._model.max_length - DEEPEST else None

    def lane(self, state: RowState | None, root: int) -> Lane:
        """What a draft must know of a sequence whose last round was read; None = padding."""
        if state is None or not state.seen:
            return Lane(root, (0,), self._padding.pages, 0, self._zeros)
        first = min(state.read, len(state.after) - 1)  # the last row in any case: the draft starts from it
        return Lane(root, state.after[first:], state.pages, first, state.place * ROOM)

    def lanes_behind(self, going: Sequence[tuple[Seq, int]], passed: int, unread: int, drafted: int) -> Behind | None:
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
        tokens = trees.to_host()[0]
        self._begin_late(seqs, [tokens[first] for first in trees.starts[:-1] if first < len(tokens)])
        if trees.form is None and trees.is_plain():
            self._observe_plain(seqs, scores, verdict)
            return
        paths, bonus = verdict.to_host()
        fresh, owners = list[Fresh](), dict[int, RowState]()
        places = range(len(seqs)) if verdict.outcome is None else verdict.outcome.trees
        spans = zip(trees.starts, trees.starts[1:], strict=False)
        for b, (seq, (first, end), path, last) in enumerate(zip(seqs, spans, paths, bonus, strict=True)):
            state = self._with_room(seq, len(path) + 1)
            if state is None or first == end:
                continue  # no room for it, or a prompt of one token: nothing went through the target
            rows = [first, *[first + node for node in path]]
            fresh.append((state, rows, [*[tokens[row] for row in rows[1:]], last]))
            owners[places[b]] = state
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

    def _begin_late(self, seqs: Sequence[Seq], roots: Sequence[int]) -> None:
        """Sequences that write, and of which rows are missing: theirs begin with this round."""
        for seq, root in zip(seqs, roots, strict=False):
            state, length = self._states.get(seq.id), len(seq.tokens)
            if state is not None and state.base + len(state.after) == length - 1:
                continue  # the usual case
            if length > seq.prompt_length and root == seq.tokens[-1]:  # else a part of its prompt
                self.forget(seq.id)
                if (state := self._admit(seq, 0)) is not None:
                    state.base = length - 1

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
        self._replays.do(("append", form), lambda: append_decided(self.rows, hidden, decided, self._last, form))

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
            state = self._states[seq.id] = RowState(seq.id, self._free.pop(), NO_PAGES, noise=settings_of(seq))
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
