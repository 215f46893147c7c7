"""Passes over trees that were grown on the device: from their parents to a pass, from its argmax to the verdict.

The host knows the sizes and slots of such trees, but not their tokens and parents. So it lays out the pass for any
tree of that size, with room for as many ancestors as the tree may be deep, and the device fills in the rest: tokens,
positions and ancestors before the pass, the path of the argmax after it. The host reads all of it at once, at the end
of the round. Everything here is a few torch operations on small integers, made to be captured in a graph.

A form may have more trees than there are sequences: the last ones are padding, so that few forms serve all batches.
Padding is written to no slot and attends to nothing; what is decided about it is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from forerun.models.cuda.plan import (
    FIELDS,
    MAX_ROWS,
    Need,
    Plan,
    Rows,
    Size,
    SizeFor,
    Span,
    Template,
)
from forerun.models.pages import PAGE
from forerun.topology import trace
from forerun.types import GreedyWalk, TreeBatch, TreeForm, Verdict, offsets


def plan_grown(
    places: Sequence[tuple[Sequence[int], int]],
    form: TreeForm,
    group_nodes: int,
    prompts: Sequence[Span] = (),
    farthest: int = 0,
    size_for: SizeFor = Need.rounded,
) -> Plan:
    """A pass over trees whose content is on the device; `places` has every real tree's pages and length.

    Chunks of prompts follow behind the trees' rows: the host knows all about them, and `size_for` gives the size of
    such a pass. `farthest` asks for as many splits as a context that long needs.
    """
    chunks, real = Rows(form.rows), len(places)
    for span in prompts:
        chunks.add(span, group_nodes)
    own = form.trees * _groups_per_tree(form, group_nodes)
    rows, groups = form.rows + len(chunks.tokens), own + len(chunks.groups)
    farthest = max(farthest, 0, *(length for _, length in places)) + form.depth
    need = Need(rows, groups, max(farthest, 0, *chunks.positions))
    size = size_for(need) if prompts else need.rounded()
    template = _layout(form, group_nodes, size.rows, size.groups)
    starts, at = offsets([len(pages) for pages, _ in places]), MAX_ROWS + len(template)
    pads = form.trees - real
    ints = template.fill(
        [*((0, n) for _, n in places), *[(0, 0)] * pads],
        form.depth,
        [*(at + start for start in starts[:-1]), *[0] * pads],
    )
    tables = np.array([page for pages, _ in places for page in pages] + chunks.pages, dtype=np.int32)
    if real:  # nodes are written behind the committed positions, in their own order
        written = np.array([n for _, n in places])[:, None] + np.arange(form.nodes)
        found = tables[np.array(starts[:-1])[:, None] + written // PAGE] * PAGE + written % PAGE
        ints[2 * size.rows : 2 * size.rows + real * form.nodes] = found.ravel()
    if pads:  # padding is written nowhere and attends to nothing
        first = 3 * size.rows + FIELDS * real * _groups_per_tree(form, group_nodes)
        ints[first : 3 * size.rows + FIELDS * size.groups] = 0
    if prompts:
        chunks.write_chains(ints, size, own, at + starts[-1])
    return Plan(size, rows, np.concatenate((ints, tables)))


def _groups_per_tree(form: TreeForm, group_nodes: int) -> int:
    return -(-form.nodes // group_nodes) + (0 if form.chain else form.nodes)


@lru_cache(maxsize=256)
def _layout(form: TreeForm, group_nodes: int, rows: int, groups: int) -> Template:
    """[tokens | positions | slots | groups | ancestors [M, depth + 1] | lengths [B]].

    Tokens, positions and ancestors are for `fill`, which also reads the lengths; slots depend on the pages.
    """
    template = Template()
    template.pad_to(2 * rows)
    template.pad_to(3 * rows, -1)
    ancestors = None if form.chain else MAX_ROWS + 3 * rows + FIELDS * groups
    for tree in range(form.trees):
        nodes = range(tree * form.nodes, (tree + 1) * form.nodes)
        template.add_groups(tree, nodes, group_nodes, ancestors, form.depth + 1)
    template.pad_to(3 * rows + FIELDS * groups + form.rows * (form.depth + 1))
    for tree in range(form.trees):
        template.add(tree, 0, 0, 1)
    return template


class GrownBuffers:
    """Buffers for grown trees as input of a pass, and for its outcome until the host reads it."""

    def __init__(self, device: torch.device, walk: GreedyWalk, fused: bool | None = None) -> None:
        self.walk = walk
        self.fused = device.type == "cuda" if fused is None else fused  # by kernels, or in plain torch
        with torch.inference_mode(False):
            self.tree_ints = torch.zeros(2, MAX_ROWS, dtype=torch.long, device=device)  # tokens and parents
            self.outcome = torch.zeros(8 * MAX_ROWS, dtype=torch.long, device=device)
            self.moves = torch.zeros(2, 4 * MAX_ROWS, dtype=torch.long, device=device)
            self._host = torch.zeros(8 * MAX_ROWS, dtype=torch.long, pin_memory=device.type == "cuda")

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
        places = Places.of(size, form)
        if self.fused:
            from forerun.models.cuda import kernels_grown

            kernels_grown.place[(form.trees, form.nodes)](
                self.tree_ints, ints, MAX_ROWS, places.positions, places.ancestors, places.lengths,
                self.tree_ints.stride(0), form.nodes, form.depth, num_warps=1,
            )  # fmt: skip
            return
        tokens, parents = self._trees(form)
        depths, ancestors = trace(parents, form.depth)
        positions = ints[places.lengths :][: form.trees, None] + depths
        ints[MAX_ROWS : MAX_ROWS + form.rows].copy_(tokens.flatten())
        ints[places.positions : places.positions + form.rows].copy_(positions.flatten())
        ints[places.ancestors : places.lengths].copy_(ancestors.flatten())

    def decide(self, ints: Tensor, size: Size, form: TreeForm, logits: Tensor) -> None:
        """The verdict, and which slots it moves: root and path behind each other, the rest onto itself."""
        places = Places.of(size, form)
        trees = self.tree_ints[:, : form.rows].view(2, form.trees, form.nodes)
        ancestors = ints[places.ancestors : places.lengths].view(form.trees, form.nodes, -1)
        paths, accepted, bonus = self._decided(form)
        self.walk(trees, ancestors, logits.argmax(-1).view(form.trees, -1), paths, accepted, bonus)
        if self.fused:
            from forerun.models.cuda import kernels_grown

            kernels_grown.record[(form.trees,)](
                self.tree_ints, ints, self.outcome, self.moves, places.slots, self.tree_ints.stride(0),
                self.moves.stride(0), form.rows, form.nodes, form.depth,
                N_UP=1 << max(2, (form.nodes - 1).bit_length()), STEPS_UP=1 << max(2, form.depth.bit_length()),
                num_warps=4,
            )  # fmt: skip
            return
        self.outcome[: 2 * form.rows].copy_(trees.flatten())
        slots = ints[places.slots :][: form.rows].view(form.trees, form.nodes).long()
        steps = (
            torch.arange(1, form.depth + 1, device=slots.device).clamp_(max=form.nodes - 1).expand_as(paths)
        )
        sources = torch.where(paths < 0, steps, paths)
        moves = torch.stack((slots.gather(1, sources), slots.gather(1, steps)))  # [2, B, depth]
        real = slots[:, :1] >= 0
        moves = torch.where(real, moves, moves[:, :1])  # padding does what the first tree does
        moves = torch.where(real[:1], moves, 0)  # and if that is padding too, nothing
        self.moves[:, : form.trees * form.depth].copy_(moves.flatten(1))

    def read(self, trees: TreeBatch, form: TreeForm) -> Verdict:
        """The verdict, and the trees with it: the one time in a round that the host waits."""
        size = _length(form)
        self._host[:size].copy_(self.outcome[:size], non_blocking=True)
        if self.outcome.device.type == "cuda":
            torch.cuda.current_stream(self.outcome.device).synchronize()
        values = self._host[:size].clone()  # the buffer is written again in the next round
        tokens, parents = values[: 2 * form.rows].view(2, -1)[:, : trees.nodes].tolist()
        trees.note_host(tokens, parents)
        paths, accepted, bonus = (part[: len(trees)] for part in _split(values, form))
        return Verdict(paths, accepted, bonus, Outcome(self, form))

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
    ancestors: int
    lengths: int

    @classmethod
    def of(cls, size: Size, form: TreeForm) -> Places:
        behind = MAX_ROWS + 3 * size.rows + FIELDS * size.groups
        lengths = behind + form.rows * (form.depth + 1)
        return cls(MAX_ROWS + size.rows, MAX_ROWS + 2 * size.rows, behind, lengths)


def _length(form: TreeForm) -> int:
    return 2 * form.rows + form.trees * (form.depth + 2)


def _split(values: Tensor, form: TreeForm) -> tuple[Tensor, Tensor, Tensor]:
    """Paths [B, depth], accepted [B] and bonus [B] behind tokens and parents of all nodes."""
    sizes = [form.trees * form.depth, form.trees, form.trees]
    paths, accepted, bonus = torch.split(values[2 * form.rows :], sizes)
    return paths.view(form.trees, form.depth), accepted, bonus


@dataclass(frozen=True, slots=True)
class Outcome:
    """Implements forerun.types.DeviceOutcome: the last verdict in its buffers."""

    buffers: GrownBuffers
    form: TreeForm

    def moves(self) -> tuple[Tensor, Tensor]:
        sources, places = self.buffers.moves[:, : self.form.trees * self.form.depth]
        return sources, places
