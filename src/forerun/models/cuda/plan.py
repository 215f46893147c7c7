"""The plan of a GPU pass: one array of integers, sent to the device in one copy that the host does not wait for.

Per row its token, its position and the slot its keys and values go to; then the groups of nodes that attention
works on (kernels/attention.py), the ancestors of nodes in trees that branch, and the pages of every sequence. Row
counts, group counts and split counts are rounded up to a few sizes, so that a pass can be replayed as a captured graph.
Prompts are cut into chunks that fill the rows that trees leave.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.tree import Topology, TreeBatch, chain_of
from forerun.core.types import LoadedAdapter, Seq, first_rows
from forerun.models.config import DecoderConfig
from forerun.models.pages import PAGE, Ints, slots_of
from forerun.models.slots import Piece

MAX_ROWS = 1024  # rows in one pass; a tree has at most 257
# ints per group: low split, high split, first row, rows, base slot, length, ancestors, pages (0 = none); in a tiled
# pass the fifth says whether it is of a tree that branches
FIELDS = 8
ROW_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 384, 512, 768, MAX_ROWS)
# rows of the largest pass whose products are those of few rows (kernels_linear, not kernels_wide)
NARROW = 64
SPLIT_SIZES = (8, 32, 96, 256)  # few: passes are captured with each, before texts are written
SHORT = 32  # splits: passes that reach further are tiled, see Size
QUERIES, TILED_QUERIES = 64, 128  # rows that one program of attention has at most: nodes times heads to a KV head
WIDEST_HEAD = 256  # in tiled passes
TOGETHER, DEEPEST = 2, 16  # lone nodes to a program of attention; levels of trees that allow it
LONGEST = 245_760  # positions that 256 splits cover
PAGES = 1 << 17  # pages of all sequences of a pass together, at most


def split_of(position: int) -> int:
    """Which split of the context a position lies in: 128 wide to 1024, 256 to 4096, then 1024."""
    if position < 1024:
        return position // 128
    return 8 + (position - 1024) // 256 if position < 4096 else 20 + (position - 4096) // 1024


def splits_of(positions: Ints) -> Ints:
    far = np.where(positions < 4096, 8 + ((positions - 1024) >> 8), 20 + ((positions - 4096) >> 10))
    return np.where(positions < 1024, positions >> 7, far)


def splits_at(positions: Tensor) -> Tensor:
    """`split_of` of many positions on a device."""
    far = torch.where(positions < 4096, 8 + ((positions - 1024) >> 8), 20 + ((positions - 4096) >> 10))
    return torch.where(positions < 1024, positions >> 7, far)


def split_start(split: int) -> int:
    if split < 8:
        return split * 128
    return 1024 + (split - 8) * 256 if split < 20 else 4096 + (split - 20) * 1024


@dataclass(frozen=True, slots=True)
class Span:
    """The nodes of one sequence, written behind `length` committed positions on its pages."""

    tokens: Sequence[int]
    shape: Topology
    pages: Sequence[int]
    length: int
    adapter: LoadedAdapter | None = None
    owner: Seq | None = None  # whose rows these are, where a pass continues states
    is_read: bool = False  # of a prompt: all of it is committed

    @property
    def farthest(self) -> int:
        """The last position."""
        return self.length + (len(self.tokens) - 1 if self.shape.is_chain else max(self.shape.depths))


# a lone root: its token, its sequence's pages, and the length behind which it is
Root = tuple[int, Sequence[int], int]


def nodes_per_group(heads: int, kv_heads: int, head_dim: int, tiled: bool = False) -> int:
    """Nodes that one program of attention can take; rows of wide heads need twice the registers."""
    most = TILED_QUERIES if tiled and head_dim <= 128 else QUERIES
    return max(1, most // (1 << (heads // kv_heads - 1).bit_length()))


def group_sizes(config: DecoderConfig) -> tuple[int, int]:
    """Nodes that any layer's programs of attention can take; in tiled passes, 0 = heads are too wide for these."""
    shapes = [(config.heads, *config.kv_sizes(layer)) for layer in range(config.layers)]
    tiled = all(dim <= WIDEST_HEAD for _, _, dim in shapes)
    few, many = (min(nodes_per_group(*shape, tiled=one) for shape in shapes) for one in (False, True))
    return few, many if tiled else 0


@dataclass(frozen=True, slots=True)
class Size:
    """What passes must agree in to be replays of one graph.

    Tiled passes are those behind long contexts: all nodes of a tree share every tile of the context, and there is a
    lone group for each row of the pass, behind all others. A row has the same bits in either kind of pass.
    """

    rows: int
    groups: int
    splits: int
    trees: int = 1  # of one form, whose groups lie tree by tree
    lone: int = 0  # the last groups of each tree are its single nodes, which attend to one split or to two
    tiled: bool = False

    @property
    def shared(self) -> int:
        """Groups that may attend to any number of splits."""
        return self.groups - self.trees * self.lone

    def attending(self, programs: int) -> int:
        """Programs of attention to a key-value head, where a group that is not lone has `programs`."""
        return self.shared * programs + self.trees * -(-self.lone // TOGETHER)


def splits_to(farthest: int) -> int:
    """Splits of a pass that reaches so far."""
    return round_up(1 + split_of(farthest), SPLIT_SIZES)


def is_far(farthest: int) -> bool:
    """Are passes of a target tiled that reach so far?"""
    return splits_to(farthest) > SHORT


@dataclass(frozen=True, slots=True)
class Need:
    """What a pass must have room for."""

    rows: int
    groups: int
    farthest: int  # position
    tiled: bool = False
    branches: bool = False  # asked of tiled passes alone, whose lone groups `groups` does not count

    def fits(self, size: Size) -> bool:
        if self.tiled != size.tiled or (self.tiled and self.branches != (size.lone > 0)):
            return False
        return self.rows <= size.rows and self.groups <= size.shared and splits_to(self.farthest) <= size.splits

    def rounded(self) -> Size:
        """The next of a few sizes."""
        return self._sized(1 << max(0, self.groups - 1).bit_length())

    def _sized(self, groups: int) -> Size:
        rows, splits = round_up(self.rows, ROW_SIZES), splits_to(self.farthest)
        if not self.tiled:
            return Size(rows, groups, splits)
        return Size(rows, groups + rows * self.branches, splits, lone=rows * self.branches, tiled=True)

    def exactly(self, trees: int, lone: int, levels: int) -> Size:
        """Of nothing but trees of one form: no empty groups, and of the lone ones it is known that they are."""
        if self.tiled:
            return self._sized(self.groups)
        lone = lone if levels <= DEEPEST else 0
        return replace(self.rounded(), groups=self.groups, trees=trees, lone=lone)


SizeFor = Callable[[Need], Size]


@dataclass(frozen=True, slots=True)
class Plan:
    """One pass. `ints` lies behind an identity of MAX_ROWS entries, the ancestors of every chain."""

    size: Size
    rows: int  # really there; the others are padding
    ints: Ints
    links: Ints | None = None  # what rows continue, in recurrent layers: see models/cuda/states.py
    units: Ints | None = None  # which rows have which adapter: see models/cuda/adapters.py; None = none has one


class Roots:
    """Lone roots, which come first in a pass: what `Rows.add` makes of chains of one node, all of them at once."""

    def __init__(self, roots: Sequence[Root]) -> None:
        tokens, pages, lengths = zip(*roots, strict=True)
        self.count, self.tokens, self.pages = len(roots), tokens, list(chain.from_iterable(pages))
        self.lengths = np.array(lengths, dtype=np.int32)
        ends = np.cumsum([len(own) for own in pages], dtype=np.int32)
        self.starts = np.concatenate((ends[:1] * 0, ends[:-1]))  # of the pages of each among all

    def write(self, ints: Ints, size: Size, table: Ints) -> None:
        """Into the rows and groups of a pass, before padding is known and pages have their places."""
        count, lengths = self.count, self.lengths
        pages = np.array(self.pages, dtype=np.int32)[self.starts + lengths // PAGE]
        ints[:count] = self.tokens
        ints[size.rows : size.rows + count] = lengths
        ints[2 * size.rows : 2 * size.rows + count] = pages * PAGE + lengths % PAGE
        own = table[:count]
        own[:, 1], own[:, 2], own[:, 3] = splits_of(lengths) + 1, np.arange(count), 1
        own[:, 5], own[:, 7] = lengths, self.starts + 1


@dataclass(slots=True)
class Rows:
    """The rows of a pass while they are laid out."""

    first: int = 0  # rows that come before them
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    groups: list[tuple[int, ...]] = field(default_factory=list)
    ancestors: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)  # of all sequences, end to end
    tiled: bool = False
    lone: list[tuple[int, ...]] = field(default_factory=list)  # in a tiled pass, groups of single nodes

    def add(self, span: Span, group_nodes: int) -> None:
        first, count, table = self.first + len(self.tokens), len(span.tokens), len(self.pages) + 1
        self.tokens += span.tokens
        self.pages += span.pages
        self.slots += slots_of(span.pages, span.length, span.length + count)
        if span.shape.is_chain:
            self.positions += range(span.length, span.length + count)
            self.groups += _chain_groups(span, first, count, group_nodes, table)
        else:
            self.positions += [span.length + depth for depth in span.shape.depths]
            groups, lone = _tree_groups(span, first, group_nodes, table, self.ancestors, self.tiled)
            self.groups += groups if self.tiled else [*groups, *lone]
            self.lone += lone if self.tiled else []

    def write_chains(self, ints: Ints, size: Size, groups: int, pages: int) -> None:
        """Write chains behind the rows and the groups that come before them; their pages lie at `pages`."""
        end = self.first + len(self.tokens)
        for part, values in enumerate((self.tokens, self.positions, self.slots)):
            ints[part * size.rows + self.first : part * size.rows + end] = values
        table = ints[3 * size.rows : 3 * size.rows + FIELDS * size.groups].reshape(size.groups, FIELDS)
        own = table[groups : groups + len(self.groups)]
        own[:] = self.groups
        own[:, 7] += pages - 1


def padding(size: Size) -> Plan:
    """A pass over nothing: its rows are written nowhere."""
    return Plan(size, 0, _pack(size, Rows()))


def plan_pass(
    spans: Sequence[Span],
    group_nodes: int,
    size_for: SizeFor = Need.rounded,
    roots: Sequence[Root] = (),
    added: int = 0,
    tiled_nodes: int = 0,
    prompts: bool = False,
) -> Plan:
    """Lay out a pass, lone roots first; `group_nodes` is how many nodes one program of attention can take.

    `tiled_nodes`: the same in a tiled pass, 0 = none is; `prompts`: it need not be far for that, see `menu`. Roots may
    turn out to be so much further back than is said (`added`).
    """
    lone = Roots(roots) if roots else None
    first, farthest = (lone.count, int(lone.lengths.max()) + added) if lone else (0, 0)
    farthest = max((farthest, *(span.farthest for span in spans)))
    tiled = tiled_nodes > 0 and (is_far(farthest) or (prompts and splits_to(farthest) > SPLIT_SIZES[0]))
    rows = Rows(first, pages=lone.pages if lone else [], tiled=tiled)
    for span in spans:
        rows.add(span, tiled_nodes if tiled else group_nodes)
    count = first + len(rows.tokens)
    size = size_for(Need(count, first + len(rows.groups), farthest, tiled, bool(rows.lone)))
    return Plan(size, count, _pack(size, rows, lone))


def _chain_groups(span: Span, first: int, count: int, group_nodes: int, table: int) -> list[tuple[int, ...]]:
    """Nodes that follow each other share whatever they see: ancestors are the identity, at 0."""
    groups: list[tuple[int, ...]] = []
    for low in range(0, count, group_nodes):
        rows = min(group_nodes, count - low)
        high = split_of(span.length + low + rows - 1) + 1
        groups.append((0, high, first + low, rows, 0, span.length, 0, table))
    return groups


def _tree_groups(
    span: Span, first: int, group_nodes: int, table: int, ancestors: list[int], tiled: bool
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Groups of nodes that share committed tokens, and of single nodes.

    Single nodes begin with the split in which the tree starts; in a tiled pass, with the tile. The last two fields say
    where a node's ancestors and its pages start, counted from 1: `_pack` moves them.
    """
    depths, paths, shared = span.shape.depths, span.shape.paths, split_of(span.length)
    groups, lone = list[tuple[int, ...]](), list[tuple[int, ...]]()
    high = shared + tiled
    for low in range(0, len(depths) if high else 0, group_nodes):
        rows = min(group_nodes, len(depths) - low)
        groups.append((0, high, first + low, rows, int(tiled), span.length, 0, table))
    for node, depth in enumerate(depths):
        begin, end = (0, 0) if tiled else (shared, split_of(span.length + depth) + 1)
        lone.append((begin, end, first + node, 1, 0, span.length, len(ancestors) + 1, table))
        ancestors += paths[node]
    return groups, lone


def _pack(size: Size, rows: Rows, lone: Roots | None = None) -> Ints:
    """[3 rows + FIELDS groups + ancestors + pages]; padding rows are token 0 at position 0, written nowhere."""
    behind, first = 3 * size.rows + FIELDS * size.groups, rows.first
    end, count = behind + len(rows.ancestors), first + len(rows.tokens)
    ints = np.zeros(end + len(rows.pages), dtype=np.int32)
    ints[2 * size.rows : 3 * size.rows] = -1
    table = ints[3 * size.rows : behind].reshape(size.groups, FIELDS)
    if lone is not None:
        lone.write(ints, size, table)
    if rows.tokens:
        for part, values in enumerate((rows.tokens, rows.positions, rows.slots)):
            ints[part * size.rows + first : part * size.rows + count] = values
        table[first : first + len(rows.groups)] = rows.groups
    if rows.lone:
        single = np.array(rows.lone, dtype=np.int32)
        table[size.shared + single[:, 2]] = single
    for field_, start in ((6, behind), (7, end)):
        table[:, field_] = np.where(table[:, field_] > 0, table[:, field_] - 1 + MAX_ROWS + start, 0)
    ints[behind:end] = rows.ancestors
    ints[end:] = rows.pages
    return ints


def round_up(count: int, sizes: Sequence[int]) -> int:
    """The first of several sizes, ascending, that is no less."""
    return sizes[bisect_left(sizes, count)]


class Found:
    """Logits and hidden rows of several passes."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.logits: list[Tensor] = []
        self.hidden: dict[int, list[Tensor]] = {layer: [] for layer in layers}


def chunks_of(pieces: Sequence[Piece]) -> list[Span]:
    return [
        Span(
            piece.tokens, chain_of(len(piece.tokens)), piece.extent.pages, piece.extent.length, piece.seq.adapter,
            piece.seq, is_read=True,
        )
        for piece in pieces
    ]  # fmt: skip


def fitting_rows(nodes: int, rows: int) -> int:
    """About `rows` rows of prompts beside these nodes, so that the pass has a size without padding.

    The nearest size, up or down: a row costs about the same in any of them, and fewer rows a pass are more passes until
    a prompt is read.
    """
    place = bisect_right(ROW_SIZES, nodes + rows)
    near = min(ROW_SIZES[max(0, place - 1) : place + 1], key=lambda size: (abs(size - nodes - rows), -size))
    return near - nodes if near > 64 and 2 * (near - nodes) >= rows else rows


def rows_beside(nodes: int, rows: int, waiting: int) -> int:
    """Rows of prompts in a pass over `nodes` nodes: about `rows` of the `waiting` ones."""
    most = waiting if waiting <= rows else fitting_rows(nodes, rows)
    return min(most, max(0, MAX_ROWS - nodes))


def beside_trees(fresh: Sequence[list[int]], trees: TreeBatch, rows: int, least: int = 0) -> list[list[int]]:
    """What of prompts goes into the pass over trees, where about `rows` rows were asked for; `least` in any case.

    Where there are more, they fill a size that passes have, and pad none. Beside lone roots, and beside trees that were
    grown on a device, no more than fit: those that follow unread ones cannot go into another pass, as the host cannot
    read them. Beside others that leave little of a pass they get one of their own.
    """
    nodes = trees.nodes if trees.form is None else trees.form.rows
    waiting, room = sum(map(len, fresh)), max(0, MAX_ROWS - nodes)
    starts = trees.form is not None or trees.is_plain()
    assert least <= (room if starts else 0), "those that start with this pass fit it"
    if trees.form is None and not trees.is_plain() and 2 * room < min(rows, waiting):
        return first_rows(fresh, rows)
    return first_rows(fresh, max(rows_beside(nodes, rows, waiting), least))


def least_rows(prompts: Sequence[Seq], fresh: Sequence[list[int]], seqs: Sequence[Seq]) -> int:
    """Rows of prompts, in order, until all of those are read that are among `seqs`.

    Their roots are scored behind them in the same pass: a layer writes keys and values of all rows before it attends.
    """
    starting, rows, least = {seq.id for seq in seqs}, 0, 0
    for seq, tokens in zip(prompts, fresh, strict=True):
        rows += len(tokens)
        if seq.id in starting:
            least = rows
    return least


def rows_of(spans: Sequence[Span]) -> int:
    return sum(len(span.tokens) for span in spans)


Runs = list[tuple[LoadedAdapter | None, int, int]]  # an adapter, the first of its rows, and the row behind the last


def adapter_runs(seqs: Sequence[Seq], each: int, spans: Sequence[Span], first: int) -> Runs:
    """Of a pass over sequences of `each` rows, and over spans from row `first` on."""
    runs: Runs = [(seq.adapter, i * each, (i + 1) * each) for i, seq in enumerate(seqs)]
    for span in spans:
        runs.append((span.adapter, first, first + len(span.tokens)))
        first += len(span.tokens)
    return runs


def joined(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)


BUFFERS = 8  # pinned buffers, used in turn: more than two rounds fill, so that none waits for its copy


class SentInts:
    """One array on the device, of which the part behind `first` is replaced by what is sent."""

    def __init__(self, device: torch.device, size: int, dtype: torch.dtype, first: int = 0) -> None:
        self._first, on_gpu = first, device.type == "cuda"
        with torch.inference_mode(False):
            self.all = torch.zeros(size, dtype=dtype)
            self.all[:first] = torch.arange(first)  # the ancestors of every chain: see models/cuda/plan.py
            self.all = self.all.to(device)
            self._pages = [torch.zeros(size - first, dtype=dtype, pin_memory=on_gpu) for _ in range(BUFFERS)]
        self._arrays = [page.numpy() for page in self._pages]
        self._sent: list[Any] = [torch.cuda.Event() if on_gpu else None for _ in self._pages]  # type: ignore[no-untyped-call]
        self._turn = 0

    def send(self, ints: np.ndarray[Any, Any], at: int = 0) -> None:
        """Copied behind `first`, or `at` places further, in the order of the device's work.

        Waits only if the copy of BUFFERS calls ago is not done.
        """
        first, size = self._first + at, ints.size
        if first + size > len(self.all):
            raise InvalidInput(f"a draft or a pass of {size} integers is too large; lower the budget or the batch")
        self._turn = (self._turn + 1) % BUFFERS
        page, sent = self._pages[self._turn], self._sent[self._turn]
        if sent is not None:
            sent.synchronize()
        self._arrays[self._turn][:size] = ints.ravel()
        self.all[first : first + size].copy_(page[:size], non_blocking=True)
        if sent is not None:
            sent.record()
