"""Passes over trees that were grown on the device: from their parents to a pass, from its argmax to the verdict.

The host knows the sizes of such trees and the pages of their sequences, but not their tokens and parents. Where the
last round was not read yet, it does not know the lengths of the sequences either: it sends the lengths before that
round and the index of each sequence's tree, and `LastRound` has on the device what was decided. The device fills in
tokens, positions, slots, ancestors and groups before the pass and the path of the argmax after it: one kernel each on a
GPU (kernels/trees.py), a few torch operations elsewhere. The host reads everything at once, later.

A form may have more trees than there are sequences: the last ones are padding, so that few forms serve all batches.
Padding is written to no slot and attends to nothing; its verdict is dropped.

A node whose token is CUT has its place in the form and nothing else: no slot, so no experts, and it sees no further
than its root. A walk never enters it, because the target says no such token. Its row of the table of slots holds
-2 - slot, where a path may move to.

`Placing` says where the rows of a pass go. Behind an unread plain round every sequence is one token longer. Behind
unread trees only the device knows how much longer: it adds root and path to the lengths that the host sends (for lone
roots in plain_rounds.py), and the host provides pages for the longest path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.core.tree import trace
from forerun.core.types import CUT, GreedyWalk, Seq, TreeBatch, TreeForm, Verdict, offsets
from forerun.models.cuda.plan import FIELDS, MAX_ROWS, Need, Plan, Root, Rows, Size, SizeFor, Span, is_far, splits_at
from forerun.models.pages import PAGE, TREE_MARGIN, Extent, PagedKV

TURNS = 2  # outcomes that the host has not read yet, at most

Samples = Callable[[Tensor, Tensor], Tensor]  # logits [B, N, V] and positions [B, N] -> tokens [B, N]


class Place(NamedTuple):
    """Where a tree is written: behind the committed positions of its sequence."""

    pages: Sequence[int]
    length: int
    follows: int = -1  # its tree in the last round, which was not read: that adds root and path to the length


def plan_grown(
    places: Sequence[Place],
    form: TreeForm,
    group_nodes: int,
    prompts: Sequence[Span] = (),
    farthest: int = 0,
    size_for: SizeFor = Need.rounded,
    added: int = 0,
    tiled_nodes: int = 0,
) -> Plan:
    """A pass over trees whose content is on the device; there is a place for every real tree.

    Chunks of prompts follow behind the trees' rows: the host knows all about them, and `size_for` gives the size of
    such a pass. `farthest` asks for as many splits as a context that long needs. Those that follow an unread round may
    be `added` positions further back. `tiled_nodes`: see plan_pass.
    """
    ends = [length + (added if follows >= 0 else 0) for _, length, follows in places]
    farthest = max((max(farthest, 0, *ends) + form.depth, *(span.farthest for span in prompts)))
    tiled = tiled_nodes > 0 and is_far(farthest)
    nodes = tiled_nodes if tiled else group_nodes
    chunks, real = Rows(form.rows), len(places)
    for span in prompts:
        chunks.add(span, nodes)
    own = form.trees * groups_per_tree(form, nodes, tiled)
    rows, groups = form.rows + len(chunks.tokens), own + len(chunks.groups)
    need = Need(rows, groups, farthest, tiled, not form.chain)
    size = size_for(need) if prompts else need.exactly(form.trees, 0 if form.chain else form.nodes, form.depth)
    at = Places.of(size, form)
    ints = np.zeros(at.pages - MAX_ROWS, dtype=np.int32)
    ints[2 * size.rows : 3 * size.rows] = -1
    starts = offsets([len(pages) for pages, _, _ in places])
    table = ints[at.lengths - MAX_ROWS :].reshape(3, form.trees)
    table[1] = -1
    table = table[:, :real]
    table[0] = [length for _, length, _ in places]
    table[1] = [follows for _, _, follows in places]
    table[2] = [at.pages + start for start in starts[:-1]]
    if prompts:
        chunks.write_chains(ints, size, own, at.pages + starts[-1])
    tables = [page for pages, _, _ in places for page in pages] + chunks.pages
    return Plan(size, rows, np.concatenate((ints, np.array(tables, dtype=np.int32))))


def groups_per_tree(form: TreeForm, group_nodes: int, tiled: bool = False) -> int:
    """Groups of nodes that share what they attend to; and, in trees that branch, one of each node's own.

    Those of a tiled pass lie behind the groups of all trees, and are not counted here.
    """
    return -(-form.nodes // group_nodes) + (0 if form.chain or tiled else form.nodes)


class GrownBuffers:
    """Buffers for grown trees as input of a pass, and for its outcome until the host reads it."""

    def __init__(
        self, device: torch.device, walk: GreedyWalk, group_nodes: int, fused: bool | None = None, tiled_nodes: int = 0
    ) -> None:
        self.walk, self.group_nodes, self.tiled_nodes = walk, group_nodes, tiled_nodes
        self.fused = device.type == "cuda" if fused is None else fused  # by kernels, or in plain torch
        self.passes = 0  # that were decided
        self.form: TreeForm | None = None  # of the last
        self.moved = 0  # the last pass whose paths were moved to their places
        self.superseded = 0  # the last pass behind which a plain one was launched before it was read
        on_gpu = device.type == "cuda"
        with torch.inference_mode(False):
            self.tree_ints = torch.zeros(2, MAX_ROWS, dtype=torch.long, device=device)  # tokens and parents
            self.outcome = torch.zeros(8 * MAX_ROWS, dtype=torch.long, device=device)
            self.moves = torch.zeros(2, 4 * MAX_ROWS, dtype=torch.long, device=device)
            self.last = LastRound(device)
            self._host = [torch.zeros(8 * MAX_ROWS, dtype=torch.long, pin_memory=on_gpu) for _ in range(TURNS)]
        self._sent = [torch.cuda.Event() if on_gpu else None for _ in self._host]  # type: ignore[no-untyped-call]

    def take(self, trees: TreeBatch, form: TreeForm) -> None:
        """Copy the trees in; padding gets the first tree once more, which is a tree like any other."""
        torch.stack((trees.tokens, trees.parents), out=self.tree_ints[:, : trees.nodes])
        if trees.nodes < form.rows:
            pads = self.tree_ints[:, trees.nodes : form.rows].view(2, -1, form.nodes)
            pads.copy_(self.tree_ints[:, None, : form.nodes])

    def take_padding(self, form: TreeForm) -> None:
        """Trees of a form for a pass over nothing but padding: roots with children."""
        trees = self.tree_ints[:, : form.rows].view(2, form.trees, form.nodes)
        trees.zero_()
        trees[1, :, 0] = -1

    def fill(self, ints: Tensor, size: Size, form: TreeForm) -> None:
        """Complete the integers of a pass."""
        places, nodes = Places.of(size, form), self.tiled_nodes if size.tiled else self.group_nodes
        if self.fused:
            from forerun.models.cuda.kernels import trees as tree_kernels

            tree_kernels.place[(form.trees, form.nodes)](
                self.tree_ints, ints, self.last.accepted, MAX_ROWS, places.positions, places.slots, places.groups,
                places.ancestors, places.lengths, self.tree_ints.stride(0), form.trees, form.nodes, form.depth,
                nodes, groups_per_tree(form, nodes, size.tiled), size.shared, int(form.chain), TILED=size.tiled,
                num_warps=1,
            )  # fmt: skip
            return
        tokens, parents = self._trees(form)
        depths, ancestors = trace(parents, form.depth)
        given, follows, starts = ints[places.lengths :][: 3 * form.trees].view(3, form.trees).clone()
        lengths = given + self.last.added(follows)
        written = lengths[:, None] + torch.arange(form.nodes, device=ints.device)
        slots = ints[starts[:, None] + written // PAGE] * PAGE + written % PAGE
        real, is_cut = (starts > 0)[:, None], tokens == CUT
        slots, depths = torch.where(is_cut, -2 - slots, slots), torch.where(is_cut, 0, depths)
        ints[MAX_ROWS : MAX_ROWS + form.rows].copy_(tokens.clamp(min=0).flatten())
        ints[places.positions : places.positions + form.rows].copy_((lengths[:, None] + depths).flatten())
        ints[places.slots : places.slots + form.rows].copy_(torch.where(real, slots, -1).flatten())
        ints[places.ancestors : places.lengths].copy_(ancestors.flatten())
        shared, lone = self._groups(form, lengths, starts, places, nodes, size.tiled)
        behind = [(0, shared), (size.shared, lone)] if size.tiled else [(0, torch.cat((shared, lone), 1))]
        for first, groups in behind:
            fields = torch.where(real[..., None], groups, 0).flatten()
            ints[places.groups + FIELDS * first :][: len(fields)].copy_(fields)

    def _groups(
        self, form: TreeForm, lengths: Tensor, starts: Tensor, places: Places, each: int, tiled: bool
    ) -> tuple[Tensor, Tensor]:
        """Two of [B, groups, FIELDS]: nodes that share committed tokens, `each` so many; single nodes where a tree
        branches, from the split on in which it starts, or from the tile on. Fields: models/cuda/plan.py.
        """
        trees, nodes = torch.arange(form.trees, device=lengths.device), form.nodes
        own, behind = splits_at(lengths), splits_at(lengths + form.depth) + 1
        first = torch.arange(0, nodes, each, device=lengths.device)
        shared = lengths.new_zeros(form.trees, len(first), FIELDS)
        shared[..., 1] = (behind if form.chain else own + int(tiled))[:, None]
        shared[..., 2] = (trees[:, None] * nodes + first).int()
        shared[..., 3] = (nodes - first).clamp(max=each).int()
        shared[..., 4] = int(tiled and not form.chain)
        lone = lengths.new_zeros(form.trees, 0 if form.chain else nodes, FIELDS)
        rows = (trees[:, None] * nodes + torch.arange(lone.shape[1], device=lengths.device)).int()
        if not tiled:
            lone[..., 0], lone[..., 1] = own[:, None], behind[:, None]
        lone[..., 2], lone[..., 3], lone[..., 6] = rows, 1, places.ancestors + rows * (form.depth + 1)
        for groups in (shared, lone):
            groups[..., 5], groups[..., 7] = lengths[:, None], starts[:, None]
        return shared, lone

    def decide(self, ints: Tensor, size: Size, form: TreeForm, logits: Tensor, samples: Samples | None = None) -> None:
        """The verdict, and which slots it moves: root and path behind each other, the rest onto itself.

        The target's tokens are the argmax, or what `samples` makes of logits and positions. May be done again.
        """
        places = Places.of(size, form)
        if samples is None:
            tops = logits.argmax(-1).view(form.trees, -1)
        else:
            positions = ints[places.positions :][: form.rows].view(form.trees, form.nodes)
            tops = samples(logits.view(form.trees, form.nodes, -1), positions)
        trees = self.tree_ints[:, : form.rows].view(2, form.trees, form.nodes)
        ancestors = ints[places.ancestors : places.lengths].view(form.trees, form.nodes, -1)
        paths, accepted, bonus = self._decided(form)
        self.walk(trees, ancestors, tops, paths, accepted, bonus)
        if self.fused:
            from forerun.models.cuda.kernels import trees as tree_kernels

            tree_kernels.record[(form.trees,)](
                self.tree_ints, ints, self.outcome, self.moves, self.last.accepted, self.last.tokens, self.last.rows,
                places.slots, self.tree_ints.stride(0), self.moves.stride(0), form.rows, form.nodes, form.depth,
                STEPS, N_UP=1 << max(2, (form.nodes - 1).bit_length()),
                STEPS_UP=1 << max(2, form.depth.bit_length()), num_warps=4,
            )  # fmt: skip
            return
        self.last.note(trees[0], paths, accepted, bonus)
        self.outcome[: 2 * form.rows].copy_(trees.flatten())
        slots = ints[places.slots :][: form.rows].view(form.trees, form.nodes).long()
        slots = torch.where(slots < -1, -2 - slots, slots)
        steps = torch.arange(1, form.depth + 1, device=slots.device).clamp_(max=form.nodes - 1).expand_as(paths)
        sources = torch.where(paths < 0, steps, paths)
        moves = torch.stack((slots.gather(1, sources), slots.gather(1, steps)))  # [2, B, depth]
        real = slots[:, :1] >= 0
        moves = torch.where(real, moves, moves[:, :1])  # padding does what the first tree does
        moves = torch.where(real[:1], moves, 0)  # and if that is padding too, nothing
        self.moves[:, : form.trees * form.depth].copy_(moves.flatten(1))

    def send(self, form: TreeForm) -> int:
        """The pass was launched: let its outcome be copied to the host, behind it. Returns the number of the pass."""
        self.passes, self.form = self.passes + 1, form
        turn, size = self.passes % TURNS, _length(form)
        self._host[turn][:size].copy_(self.outcome[:size], non_blocking=True)
        if (sent := self._sent[turn]) is not None:
            sent.record()
        return self.passes

    def read(self, trees: TreeBatch, form: TreeForm, number: int) -> Verdict:
        """The verdict of a pass, and its trees: the one time in a round that the host waits, for no later pass."""
        if self.passes - number >= TURNS:
            raise RuntimeError("the outcome of a pass was overwritten by those that follow it")
        turn = number % TURNS
        if (sent := self._sent[turn]) is not None:
            sent.synchronize()
        values = self._host[turn][: _length(form)].clone()  # the buffer is written again
        tokens, parents = values[: 2 * form.rows].view(2, -1)[:, : trees.nodes].tolist()
        trees.note_host(tokens, parents)
        paths, accepted, bonus = (part[: len(trees)] for part in _split(values, form))
        return Verdict(paths, accepted, bonus, Outcome(self, number, range(len(trees))))

    def committed(self, form: TreeForm) -> Tensor:
        """[rows] of the last pass: the token that is written after the root and after every accepted node."""
        (tokens, parents), (paths, _, bonus) = self._trees(form), self._decided(form)
        found = bonus[:, None].repeat(1, form.nodes + 1)  # the last column is for what was not accepted
        nodes = paths.clamp(min=0)
        found.scatter_(1, torch.where(paths < 0, form.nodes, parents.gather(1, nodes)), tokens.gather(1, nodes))
        return found[:, : form.nodes].flatten()

    def last_nodes(self, form: TreeForm) -> Tensor:
        """[B] the rows of the nodes that end the last paths."""
        paths, accepted, _ = self._decided(form)
        nodes = torch.where(accepted > 0, paths.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0], 0)
        return nodes + torch.arange(0, form.rows, form.nodes, device=nodes.device)

    def moves_of(self, form: TreeForm) -> tuple[Tensor, Tensor]:
        """Two of [B depth]: the KV slots of the last paths, and where they belong; those that stay move nowhere."""
        sources, places = self.moves[:, : form.trees * form.depth]
        return sources, places

    def _decided(self, form: TreeForm) -> tuple[Tensor, Tensor, Tensor]:
        """Where paths [B, depth], accepted [B] and bonus [B] go."""
        return _split(self.outcome[: _length(form)], form)

    def _trees(self, form: TreeForm) -> tuple[Tensor, Tensor]:
        trees = self.tree_ints[:, : form.rows].view(2, form.trees, form.nodes)
        return trees[0], trees[1]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parts of a pass over grown trees start among all integers; tokens start at MAX_ROWS."""

    positions: int
    slots: int
    groups: int
    ancestors: int  # [M, depth + 1]
    lengths: int  # [B], then [B] the trees that they follow, then [B] where their pages start; 0 = padding
    pages: int

    @classmethod
    def of(cls, size: Size, form: TreeForm) -> Places:
        first, rows = MAX_ROWS + size.rows, size.rows
        behind = first + 2 * rows + FIELDS * size.groups
        lengths = behind + form.rows * (form.depth + 1)
        return cls(first, first + rows, first + 2 * rows, behind, lengths, lengths + 3 * form.trees)


def _length(form: TreeForm) -> int:
    return 2 * form.rows + form.trees * (form.depth + 2)


def _split(values: Tensor, form: TreeForm) -> tuple[Tensor, Tensor, Tensor]:
    """Paths [B, depth], accepted [B] and bonus [B] behind tokens and parents of all nodes."""
    sizes = [form.trees * form.depth, form.trees, form.trees]
    paths, accepted, bonus = torch.split(values[2 * form.rows :], sizes)
    return paths.view(form.trees, form.depth), accepted, bonus


@dataclass(frozen=True, slots=True)
class Outcome:
    """Implements forerun.core.types.DeviceOutcome."""

    buffers: GrownBuffers
    number: int  # of the pass
    trees: Sequence[int]

    def kept(self, which: Sequence[int]) -> Outcome:
        return replace(self, trees=[self.trees[b] for b in which])

    @property
    def is_latest(self) -> bool:
        return self.number == self.buffers.passes > self.buffers.superseded

    @property
    def is_moved(self) -> bool:
        return self.number <= self.buffers.moved


STEPS = 17  # root and path of the deepest tree whose outcome can be followed before it was read


class LastRound:
    """What the last pass over grown trees decided, at places that do not depend on the form; of roots if asked."""

    def __init__(self, device: torch.device) -> None:
        self.accepted = torch.zeros(MAX_ROWS, dtype=torch.long, device=device)  # by tree
        # of the path, then the bonus
        self.tokens = torch.zeros(MAX_ROWS, STEPS, dtype=torch.long, device=device)
        # of root and path in the pass
        self.rows = torch.zeros(MAX_ROWS, STEPS, dtype=torch.long, device=device)

    def added(self, follows: Tensor) -> Tensor:
        """[B] positions that the last round added to sequences whose trees in it were these; -1 = none."""
        return torch.where(follows < 0, 0, self.accepted[follows.clamp(min=0).long()] + 1).int()

    def note_roots(self, tokens: Tensor) -> None:
        """Of a plain pass: the tokens [B] behind its roots. Nothing was drafted, and each root was a row."""
        self.accepted[: len(tokens)].zero_()
        self.tokens[: len(tokens), 0].copy_(tokens)
        self.rows[: len(tokens), 0].copy_(torch.arange(len(tokens), device=tokens.device))

    def note(self, tokens: Tensor, paths: Tensor, accepted: Tensor, bonus: Tensor) -> None:
        """Of trees [B, N]: paths [B, depth], accepted [B] and bonus [B]."""
        trees, nodes = tokens.shape
        if paths.shape[1] >= STEPS:
            return  # too deep to be followed
        nexts = torch.cat((paths, paths.new_full((trees, 1), -1)), 1)
        steps = torch.arange(nexts.shape[1], device=paths.device)
        found = tokens.gather(1, nexts.clamp(min=0))
        self.accepted[:trees] = accepted
        self.tokens[:trees, : len(steps)] = torch.where(steps == accepted[:, None], bonus[:, None], found)
        first = torch.arange(trees, device=paths.device)[:, None] * nodes
        self.rows[:trees, : len(steps)] = first + torch.cat((paths.new_zeros(trees, 1), paths.clamp(min=0)), 1)


@dataclass(slots=True, eq=False)
class TreesPass:
    """A pass over grown trees that was launched."""

    form: TreeForm
    read: Callable[[], Verdict]  # waits for it
    verdict: Verdict | None = None  # once it was read

    def decided(self) -> Verdict:
        if self.verdict is None:
            self.verdict = self.read()
        return self.verdict


class Placing:
    """Places of trees and roots, and what the last pass was."""

    def __init__(self, kv: PagedKV, extent_for: Callable[[Seq, int], Extent]) -> None:
        self.kv, self._extent_for = kv, extent_for
        self.last: TreesPass | None = None  # the last pass that was launched, if that was over grown trees

    @property
    def added(self) -> int:
        """Positions that the last pass adds to a sequence, at most."""
        return 1 if self.last is None else self.last.form.depth + 1

    def places(self, seqs: Sequence[Seq], follows: Sequence[int] | None, form: TreeForm) -> list[Place]:
        """Of trees: of each the pages, the length that is known, and the tree or root that it follows."""
        extents, held = self.kv.extents([seq.id for seq in seqs]), self.kv.pool.held
        behind = [-1] * len(seqs) if follows is None else follows
        for seq, extent, tree in zip(seqs, extents, behind, strict=True):
            nodes = form.nodes + (self.added if tree >= 0 else 0)
            if nodes > TREE_MARGIN or extent.length + extent.coming + nodes > extent.writable:
                self._extent_for(seq, nodes)
        places = zip(extents, behind, strict=True)
        return [Place(held[one.id], one.length + one.coming, tree) for one, tree in places]

    def roots(self, seqs: Sequence[Seq], tokens: Sequence[int], follows: Sequence[int]) -> list[Root]:
        """One row per sequence; a token below 0 names a row or a tree of the last pass, -1 the first.

        Behind trees the length is the one before them.
        """
        extents, held = self.kv.extents([seq.id for seq in seqs]), self.kv.pool.held
        known, added = int(self.last is None), self.added
        lengths = [
            one.length + one.coming + (known if row >= 0 else 0) for one, row in zip(extents, follows, strict=True)
        ]
        for extent, row in zip(extents, follows, strict=True):
            end = extent.length + extent.coming + (added if row >= 0 else 0) + 1
            if end > extent.writable:
                self.kv.grow(extent.id, end)
        heads = [-1 - row if row >= 0 else token for token, row in zip(tokens, follows, strict=True)]
        return [(head, held[one.id], at) for head, one, at in zip(heads, extents, lengths, strict=True)]
