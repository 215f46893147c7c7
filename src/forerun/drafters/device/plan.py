"""The plan of a head's draft, and DraftMenu: the forms of drafts that are captured for each batch size.

A plan is a few integers of every sequence from the host; all others are worked out on the device (`growth.complete`).
First the rows that the head has not read yet, for their keys and values; then the last row of each sequence, from which
its draft starts; then one pass per level; then, behind room for ancestors, what the host sends: of every sequence its
unread rows and where they are, and its pages. Where the last round was not read yet, the host does not know these rows:
then it names the sequence's tree in that round, and the device takes root and path from there.

Batch sizes are rounded up to a few buckets. Padding takes the place of the sequences that are missing: all of it is one
sequence of one row, with slots of its own, so that nothing has to be treated apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple
from weakref import ref

import numpy as np
from torch import Tensor

from forerun.core.types import Form, TreeForm
from forerun.models.cuda.graphs import Replays
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import DEEPEST as LONE_LEVELS
from forerun.models.cuda.plan import FIELDS, MAX_ROWS, ROW_SIZES, SPLIT_SIZES, Size, round_up, split_start, splits_to
from forerun.models.pages import TREE_MARGIN, Ints

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128)  # batch sizes that have graphs
CHAIN_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)  # of draft models
MOST = BUCKETS[-1]  # sequences in one draft
DEEPEST = 16  # levels of a draft; a round adds at most one row more, which is less than ROOM
# sequences that have rows: some are read before there is a place in the batch for them
PLACES = MOST + MOST // 4
ROOM = 24  # feature rows that a sequence has, used again and again: row t lies at its place t % ROOM
KNOWN = 6  # integers of a sequence that the host sends, beside its unread tokens and its pages


class Lane(NamedTuple):
    """What a draft must know of one sequence: its unread rows, at least one, and where they are."""

    root: int  # the last token
    tokens: Sequence[int]  # after each of these rows
    pages: Ints  # of the head's slots, by position; with room for the draft
    first: int  # position of the first of these rows
    ring: int  # place of its position 0 among all feature rows
    # its tree in the last round, which was not read: root and tokens are to be taken from there
    follows: int = -1


@dataclass(frozen=True, slots=True)
class DraftForm:
    """What drafts must agree in to be replays of one graph."""

    trees: TreeForm  # as many as the bucket has
    splits: int  # of the context
    group_nodes: int  # rows of one sequence that one program of attention has
    attends: bool = False  # do unread rows attend too? So in heads of several layers

    @property
    def sequences(self) -> int:
        """B."""
        return self.trees.trees

    @property
    def shape(self) -> Form:
        return form_of(self.trees)

    @property
    def behind(self) -> int:
        """Unread rows per sequence, at most."""
        return self.trees.depth + 1

    @property
    def unread(self) -> int:
        """Rows whose keys and values are computed, padding included."""
        return self.sequences * self.behind

    @property
    def caught(self) -> Size:
        """The pass over the unread rows, without the rest of the last layer."""
        groups = self.sequences * -(-self.behind // self.group_nodes) if self.attends else 0
        return Size(self.unread, groups, self.splits if self.attends else 0)

    @property
    def last(self) -> Size:
        """The last row of each sequence."""
        return Size(self.sequences, self.sequences, self.splits)

    @property
    def level(self) -> Size:
        """The pass over a level."""
        width = self.trees.width
        single = width if width > 1 else 0
        groups = self.sequences * (-(-width // self.group_nodes) + single)
        lone = single if self.trees.depth <= LONE_LEVELS else 0
        return Size(self.sequences * width, groups, self.splits, self.sequences, lone)

    @property
    def sources_at(self) -> int:
        """Where each unread row's place among the feature rows is."""
        return 3 * aligned(self.unread)

    @property
    def last_at(self) -> int:
        """The last rows: [roots | places among the unread rows | positions], then their groups."""
        return self.sources_at + aligned(self.unread)

    @property
    def caught_at(self) -> int:
        """The groups of the unread rows."""
        return self.last_at + 3 * aligned(self.sequences) + FIELDS * self.sequences

    def level_at(self, level: int) -> int:
        first = self.caught_at + FIELDS * self.caught.groups
        return first + level * extent_of(self.level)

    @property
    def sent_at(self) -> int:
        """What the host sends lies behind all ancestors."""
        return self.ancestors_at(self.trees.depth - 1)

    @property
    def pages_at(self) -> int:
        """The last of what it sends."""
        return self.sent_at + self.sequences * (KNOWN + self.behind)

    def ancestors_at(self, level: int) -> int:
        """Level i has i + 1 steps per node."""
        size, end = self.level, self.level_at(self.trees.depth - 1)
        return end + aligned(size.rows) * (level * (level + 1) // 2)


def trees_of(form: Form, count: int) -> TreeForm:
    """So many trees of a form."""
    return TreeForm(count, form.nodes + 1, form.depth, form.width)


def form_of(trees: TreeForm) -> Form:
    """The form of the menu that these are of."""
    return Form(trees.nodes - 1, trees.depth, trees.width)


def behind(shape: Form) -> int:
    """Root and path of a round of trees like this: the rows that the next draft finds unread, at most."""
    return shape.depth + 1


def below(shape: Form) -> int:
    """Positions behind the last row that a draft writes."""
    return (shape.depth - 1) * shape.width


def bucket_of(batch: int) -> int:
    """The batch size that graphs are captured for."""
    return round_up(batch, BUCKETS)


def plan_draft(
    lanes: Sequence[Lane], shape: Form, group_nodes: int, farthest: int = 0, attends: bool = False
) -> tuple[DraftForm, Ints]:
    """What is sent of as many lanes as a bucket has, padding included: [KNOWN, B], unread tokens [B, behind], pages.

    `farthest` asks for as many splits as a context that long needs; `attends`: see DraftForm.
    """
    count, most = len(lanes), behind(shape)
    ends = [one.first + (len(one.tokens) if one.follows < 0 else most) for one in lanes]
    splits = splits_to(max(farthest, *ends) + shape.depth)
    form = DraftForm(trees_of(shape, count), splits, group_nodes, attends)
    at, pages = MAX_ROWS + form.pages_at, np.concatenate([lane.pages for lane in lanes])
    ints = np.zeros(count * (KNOWN + most) + len(pages), dtype=np.int32)
    table, unread = ints[: KNOWN * count].reshape(KNOWN, count), ints[KNOWN * count :]
    roots, known, own, firsts, rings, follows = zip(*lanes, strict=True)
    starts = np.cumsum([at, *map(len, own)])[:-1]
    table[:] = firsts, [len(tokens) for tokens in known], rings, starts, roots, follows
    for b, tokens in enumerate(known):
        if tokens:  # none where the last round was not read
            unread[b * most : b * most + len(tokens)] = tokens
    unread[count * most :] = pages
    return form, ints


def run_at(ints: Tensor, size: Size, first: int) -> Run:
    """The integers of one pass, which start behind the identity at `first`."""
    at, rows = MAX_ROWS + first, aligned(size.rows)
    tokens, positions, slots = ints[at : at + 3 * rows].view(3, rows)[:, : size.rows].unbind(0)
    at += 3 * rows
    groups = ints[at : at + FIELDS * size.groups].view(size.groups, FIELDS)
    return Run(size, ints, tokens, positions, slots, groups)


def caught_run(ints: Tensor, form: DraftForm) -> Run:
    """The pass over the unread rows."""
    run, size = run_at(ints, Size(form.unread, 0, 0), 0), form.caught
    at = MAX_ROWS + form.caught_at
    return replace(run, size=size, groups=ints[at : at + FIELDS * size.groups].view(size.groups, FIELDS))


def last_run(ints: Tensor, form: DraftForm) -> tuple[Run, Tensor, Tensor]:
    """The pass over the last row of each sequence, the roots, and which of the unread rows those are."""
    at, rows = MAX_ROWS + form.last_at, aligned(form.sequences)
    roots, ends, positions = ints[at : at + 3 * rows].view(3, rows)[:, : form.sequences].unbind(0)
    at += 3 * rows
    groups = ints[at : at + FIELDS * form.sequences].view(form.sequences, FIELDS)
    return Run(form.last, ints, positions, positions, positions, groups), roots, ends


def extent_of(size: Size) -> int:
    """Integers of one pass."""
    return 3 * aligned(size.rows) + FIELDS * size.groups


def aligned(count: int) -> int:
    """16 bytes: kernels are compiled for integers that start so."""
    return -(-count // 4) * 4


# no chain as long as a chunk of a prompt: kernels for these take the last row's position for the end of all, and a node
# that was cut has its root's
FORMS = tuple(
    Form(*sizes)
    for sizes in (
        (1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 4, 1), (5, 5, 1),
        (7, 5, 3), (11, 5, 4), (15, 6, 5), (23, 6, 6), (31, 6, 8), (47, 7, 8), (59, 7, 10),
    )
)  # fmt: skip
CHAINS = tuple(Form(depth, depth, 1) for depth in (1, 2, 3, 4, 5, 6, 8))  # of draft models
ROWS = 384  # of a target's pass over all trees: a larger pass costs more than any draft brings
FILLED = 0.9  # of a pass, at least, by trees that branch
# how often a head's likeliest tokens are accepted, where its config does not say; and those of a draft model
UNKNOWN, MODEL_RATES = ((0.6, 0.1, 0.05, 0.03, 0.02),), ((0.75,),)
# seconds per level before any was timed: about the time to read a head's weights, or a draft model's
HEAD_LEVEL, MODEL_LEVEL = 2e-4, 1e-3
NEWEST_DRAFT, LEAST_CHANGE = 0.1, 0.005  # weight of the last draft's seconds, and a change too small to be noted
PASS, ROW = 2e-3, 1e-5  # seconds of a target's pass, and of a row more: what says which forms are captured first
UNREAD = 4 * DEEPEST  # tokens that a draft may lie behind those that the host has read, at most


def forms_for(bucket: int, forms: Sequence[Form] = FORMS) -> tuple[Form, ...]:
    """The forms for so many sequences: those whose trees fit a pass that can pay for itself, and fill it.

    A pass is computed for the next of a few numbers of rows (ROW_SIZES). Trees of 15 nodes and a root fill one of
    128 rows at batch 8, while trees of 16 would pay for 160.
    """
    most = min(ROWS, MAX_ROWS)
    return tuple(form for form in forms if bucket * (form.nodes + 1) <= most and _fills(form, bucket))


def _fills(form: Form, bucket: int) -> bool:
    rows = bucket * (form.nodes + 1)
    return form.width == 1 or rows >= FILLED * round_up(rows, ROW_SIZES)


def contexts_of(max_length: int) -> list[int]:
    """One length for each number of splits that a pass may have."""
    found: dict[int, int] = {}
    for splits in SPLIT_SIZES:
        length = min(max_length + DEEPEST, split_start(splits) - 2 * DEEPEST)
        found.setdefault(splits_to(length), length)
    return list(found.values())


class DraftJob(NamedTuple):
    """Drafts that are captured: batch size, form, and the contexts that they hold for, the shortest first."""

    bucket: int
    form: Form
    reaches: tuple[int, ...]
    beyond: int = 0  # the context up to which the same form has a job of its own


class DraftMenu:
    """Implements forerun.drafters.device.protocol.DeviceMenu: of a head's trees, or of a draft model's chains."""

    def __init__(
        self,
        rates: Sequence[Sequence[float]] = (),
        *,
        chains: bool = False,
        switches: bool | None = None,
        widest: int = MAX_ROWS,
        graphs: Replays | None = None,
    ) -> None:
        """`rates`: how often tokens of each level and rank are accepted; `widest`: children of a node, at most.

        `switches`: None = as heads do, not draft models.
        """
        self.forms: tuple[Form, ...] = CHAINS if chains else FORMS
        self.buckets: tuple[int, ...] = CHAIN_BUCKETS if chains else BUCKETS
        # a draft model has read the roots of its own chains alone
        self.switches = not chains if switches is None else switches
        self.complete_to = 0
        self.price: tuple[float, ...] | None = None  # of 0, 1, ... nodes: see Budget
        self._rates = rates or (MODEL_RATES if chains else UNKNOWN)
        self._unmeasured, self._widest = (MODEL_LEVEL, 1) if chains else (HEAD_LEVEL, widest)
        self._graphs = None if graphs is None else ref(graphs)  # a controller keeps menus of drafters that are gone
        self._seconds: dict[tuple[int, Form], float] = {}
        self._found: dict[tuple[Form, int], float] = {}  # what was looked up since the last measurement
        self._captured: dict[Form, set[int]] = {}  # batch sizes that have a graph
        self._longer: set[tuple[Form, int]] = set()  # not captured yet for one sequence, beyond such a context
        self._expected = {form: expected(self._rates, form) for form in self.forms}

    def jobs(self, max_batch: int, max_length: int) -> list[DraftJob]:
        """What is captured, in this order: for one sequence the likely forms first, and all of them in short contexts.

        `note_captured` is to be told of each.
        """
        reaches = contexts_of(max_length)
        largest = round_up(min(max_batch, MOST), self.buckets)
        first, *larger = [bucket for bucket in self.buckets if bucket <= largest]
        forms = sorted(forms_for(first, self.forms), key=self._speed, reverse=True)
        between = pairwise([0, *reaches])
        alone = [DraftJob(first, form, (reach,), beyond) for beyond, reach in between for form in forms]
        self._longer = {(job.form, job.beyond) for job in alone if job.beyond}
        whole = [DraftJob(size, form, tuple(reaches)) for size in larger for form in forms_for(size, self.forms)]
        return alone + whole

    def take_price(self, price: tuple[float, ...] | None) -> None:
        self.price = price

    def _speed(self, form: Form) -> float:
        """Tokens per second to be expected of one sequence, before anything was timed."""
        return (1.0 + self.expected(form)) / (PASS + form.nodes * ROW + form.depth * self._unmeasured)

    def holds(self, length: int) -> bool:
        """Are there graphs for contexts of so many tokens, in every form that is known?"""
        return not self._longer or length + UNREAD <= min(beyond for _, beyond in self._longer) or not self._captures

    def fitting(self, batch: int, nodes: int, depth: int, width: int) -> Form | None:
        """A form as large as asked for, cut to the rows of a pass and the slots behind each sequence; None = none."""
        if batch > MOST:
            return None
        room, slots = MAX_ROWS // round_up(batch, self.buckets), TREE_MARGIN - 1
        nodes = min(nodes, room - 1)
        if nodes < 1 or depth < 1:
            return None
        depth = min(depth, nodes, DEEPEST)
        width = min(width, nodes, self._widest, slots // max(1, depth - 1))
        return Form(min(nodes, width + (depth - 1) * width * width, slots), depth, width)

    def knows(self, form: Form, batch: int) -> bool:
        """Is there a graph of this form for so many sequences, or none needed?"""
        return not self._captures or self.bucket(form, batch) in self._captured.get(form, ())

    def bucket(self, form: Form, batch: int) -> int:
        """The smallest batch size with a graph of this form, or the one that it would be captured for."""
        captured = [bucket for bucket in self._captured.get(form, ()) if bucket >= batch]
        return min(captured) if captured and self._captures else round_up(batch, self.buckets)

    def trees(self, form: Form, batch: int) -> TreeForm:
        """The trees of a draft for so many sequences, padding included."""
        return trees_of(form, self.bucket(form, batch))

    @property
    def _captures(self) -> bool:
        graphs = None if self._graphs is None else self._graphs()
        return graphs is not None and graphs.capture

    def seconds(self, form: Form, batch: int) -> float:
        """Infinite where this form is not captured for so many sequences."""
        found = self._found.get((form, batch))
        if found is None:
            listed = batch <= MOST and form in forms_for(round_up(batch, self.buckets), self.forms)
            listed = listed and (batch > self.complete_to or self.knows(form, batch))  # else it is captured later
            found = self._found[form, batch] = self.drafting(form, batch) if listed else math.inf
        return found

    def rows(self, form: Form, batch: int) -> int:
        return (self.bucket(form, batch) if batch <= MOST else batch) * (form.nodes + 1)

    def drafting(self, form: Form, batch: int) -> float:
        """The same of any form; a guess where none was timed for so many sequences or a few more."""
        larger = [bucket for bucket in self.buckets if bucket >= batch]
        known = (self._seconds.get((bucket, form)) for bucket in larger)
        return next((seconds for seconds in known if seconds is not None), self._unmeasured * form.depth)

    def note(self, bucket: int, form: Form, seconds: float) -> None:
        """A draft of this form for so many sequences was timed."""
        self._seconds[bucket, form] = seconds
        self._found.clear()

    def correct(self, bucket: int, form: Form, seconds: float) -> None:
        """A draft in mid-text took so long: all forms for so many sequences are timed behind other contexts than these.

        A pause of the machine counts little.
        """
        known = self._seconds.get((bucket, form))
        if not known:
            return
        ratio = 1.0 + NEWEST_DRAFT * (min(seconds / known, 2.0) - 1.0)
        if abs(ratio - 1.0) >= LEAST_CHANGE:
            for one in [key for key in self._seconds if key[0] == bucket]:
                self._seconds[one] *= ratio
            self._found.clear()

    def is_timed(self, bucket: int, form: Form) -> bool:
        return (bucket, form) in self._seconds

    def note_captured(self, bucket: int, form: Form, beyond: int = 0) -> None:
        """`beyond`: see DraftJob; graphs of long contexts alone do not make a form known."""
        if beyond:
            self._longer.discard((form, beyond))
            return
        self._captured.setdefault(form, set()).add(bucket)
        self._found.clear()

    def expected(self, form: Form) -> float:
        return self._expected[form] if form in self._expected else expected(self._rates, form)


def expected(rates: Sequence[Sequence[float]], form: Form) -> float:
    """Expected accepted tokens of a tree of this form, given the acceptance rates of each level and rank."""
    level, found = [1.0], list[float]()
    for i in range(form.depth):
        ranks = rates[min(i, len(rates) - 1)][: form.width]
        level = sorted((above * rate for above in level[: form.width] for rate in ranks), reverse=True)
        found += level
    return sum(sorted(found, reverse=True)[: form.nodes])
