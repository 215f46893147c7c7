"""Trees that were grown on the device: from their parents to a pass, and from its argmax to the greedy verdict.

The host knows how large such trees are and where they go, but not what is in them. So it lays out the pass for any
tree of that size, with room for as many ancestors as the tree may be deep, and the device fills in the rest: tokens,
positions and ancestors before the pass, the path of the argmax behind it. The host reads all of it at once, when
the round is over. Everything here is a few torch operations on small integers, made to be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from forerun.models.cuda.plan import (
    FIELDS,
    MAX_ROWS,
    ROW_SIZES,
    SPLIT_SIZES,
    Plan,
    Size,
    Template,
    round_up,
    split_of,
)
from forerun.types import TreeBatch, Verdict


@dataclass(frozen=True, slots=True)
class Form:
    """What trees must agree in to go through one graph."""

    trees: int  # B
    nodes: int  # N, the root included
    depth: int  # levels below the root
    chain: bool = False  # nodes follow each other

    @property
    def rows(self) -> int:
        return self.trees * self.nodes


class GrownTrees(TreeBatch):
    """Trees of one form, on the device; `both` [2, M] has their tokens and parents."""

    __slots__ = ("both", "form", "lists", "seconds")

    def __init__(self, both: Tensor, form: Form, seconds: float = 0.0) -> None:
        super().__init__(both[0], both[1], tuple(range(0, form.rows + 1, form.nodes)))
        self.both, self.form = both, form
        self.lists: list[list[int]] = []  # tokens and parents, once they were read
        self.seconds = seconds  # that growing them keeps the device

    def to_host(self) -> tuple[list[int], list[int]]:
        if not self.lists:
            self.lists[:] = self.both.tolist()
        return self.lists[0], self.lists[1]


def plan_grown(places: Sequence[tuple[int, int]], form: Form, group_nodes: int) -> Plan:
    """A pass over trees whose content the device knows; `places` has every tree's base slot and length."""
    rows, groups, template = _layout(form, group_nodes)
    farthest = max(length for _, length in places) + form.depth
    size = Size(rows, groups, round_up(1 + split_of(farthest), SPLIT_SIZES))
    return Plan(size, form.rows, template.fill(places, form.depth))


@lru_cache(maxsize=256)
def _layout(form: Form, group_nodes: int) -> tuple[int, int, Template]:
    """Rows, groups, and [tokens | positions | slots | groups | ancestors [M, depth + 1] | lengths [B]].

    Tokens, positions and ancestors are for `fill`, which also reads the lengths.
    """
    template, rows = Template(), round_up(form.rows, ROW_SIZES)
    template.pad_to(2 * rows)
    for tree in range(form.trees):
        for node in range(form.nodes):
            template.add(tree, node, 1, 1)
    template.pad_to(3 * rows, -1)
    alone = 0 if form.chain else form.nodes
    groups = form.trees * (-(-form.nodes // group_nodes) + alone)
    groups = 1 << (groups - 1).bit_length()
    ancestors = None if form.chain else MAX_ROWS + 3 * rows + FIELDS * groups
    for tree in range(form.trees):
        nodes = range(tree * form.nodes, (tree + 1) * form.nodes)
        template.add_groups(tree, nodes, group_nodes, ancestors, form.depth + 1)
    template.pad_to(3 * rows + FIELDS * groups + form.rows * (form.depth + 1))
    for tree in range(form.trees):
        template.add(tree, 0, 0, 1)
    return rows, groups, template


def trace(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Of nodes [B, N] their depths, and [B, N, depth + 1] the node at every depth on the way down to them.

    Beyond a node's own depth stands the node itself.
    """
    nodes = parents.shape[1]
    up = [torch.arange(nodes, device=parents.device).expand_as(parents)]
    for _ in range(depth):
        up.append(parents.gather(1, up[-1].clamp(min=0)))  # the root's parent, -1, leads to the root's again
    ancestors = torch.stack(up, -1)
    depths = (ancestors >= 0).sum(-1) - 1
    steps = torch.arange(depth + 1, device=parents.device)
    return depths, ancestors.gather(-1, (depths[..., None] - steps).clamp(min=0))


def follow(
    tokens: Tensor, parents: Tensor, depths: Tensor, ancestors: Tensor, tops: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The greedy walk of every tree at once: paths [B, depth] (-1 past the end), accepted [B], bonus [B].

    A node stands where it and all above it equal the argmax after their parents; the deepest one ends the path.
    """
    right = (tokens == tops.gather(1, parents.clamp(min=0))) | (parents < 0)
    stands = right.gather(1, ancestors.flatten(1)).view_as(ancestors).all(-1)  # [B, N]
    last = torch.where(stands, depths, -1).argmax(1, keepdim=True)  # [B, 1]
    accepted = depths.gather(1, last)
    path = ancestors.gather(1, last[..., None].expand(-1, -1, ancestors.shape[-1]))[:, 0, 1:]
    places = torch.arange(path.shape[1], device=path.device)
    return torch.where(places < accepted, path, -1), accepted[:, 0], tops.gather(1, last)[:, 0]


class GrownBuffers:
    """Where grown trees go into a pass, and where its outcome lies until the host reads it."""

    def __init__(self, device: torch.device, fused: bool | None = None) -> None:
        self.fused = device.type == "cuda" if fused is None else fused  # by kernels, or in plain torch
        with torch.inference_mode(False):
            self.both = torch.zeros(2, MAX_ROWS, dtype=torch.long, device=device)
            self.outcome = torch.zeros(8 * MAX_ROWS, dtype=torch.long, device=device)
            self.moves = torch.zeros(2, 4 * MAX_ROWS, dtype=torch.long, device=device)
            self._host = torch.zeros(8 * MAX_ROWS, dtype=torch.long, pin_memory=device.type == "cuda")

    def take(self, trees: GrownTrees) -> None:
        self.both[:, : trees.form.rows].copy_(trees.both)

    def fill(self, ints: Tensor, size: Size, form: Form) -> None:
        """Complete the integers of a pass."""
        places = Places.of(size, form)
        if self.fused:
            from forerun.models.cuda import kernels_grown

            kernels_grown.place[(form.trees, form.nodes)](
                self.both, ints, MAX_ROWS, places.positions, places.ancestors, places.lengths, self.both.stride(0),
                N=form.nodes, DEPTH=form.depth, num_warps=1,
            )  # fmt: skip
            return
        tokens, parents = self._trees(form)
        depths, ancestors = trace(parents, form.depth)
        positions = ints[places.lengths :][: form.trees, None] + depths
        ints[MAX_ROWS : MAX_ROWS + form.rows].copy_(tokens.flatten())
        ints[places.positions : places.positions + form.rows].copy_(positions.flatten())
        ints[places.ancestors : places.lengths].copy_(ancestors.flatten())

    def settle(self, ints: Tensor, size: Size, form: Form, logits: Tensor) -> None:
        """The verdict, and which slots it moves: root and path behind each other, the rest onto itself."""
        places = Places.of(size, form)
        tops = logits.argmax(-1)
        if self.fused:
            from forerun.models.cuda import kernels_grown

            kernels_grown.settle[(form.trees,)](
                self.both, ints, tops, self.outcome, self.moves, places.positions, places.slots, places.ancestors,
                places.lengths, self.both.stride(0), self.moves.stride(0), TREES=form.trees, N=form.nodes,
                N_UP=1 << max(2, (form.nodes - 1).bit_length()), DEPTH=form.depth,
                STEPS_UP=1 << max(2, form.depth.bit_length()), num_warps=4,
            )  # fmt: skip
            return
        tokens, parents = self._trees(form)
        ancestors = ints[places.ancestors : places.lengths].view(form.trees, form.nodes, -1).long()
        depths = (
            ints[places.positions :][: form.rows].view_as(tokens) - ints[places.lengths :][: form.trees, None]
        )
        paths, accepted, bonus = follow(tokens, parents, depths.long(), ancestors, tops.view_as(tokens))
        parts = (self.both[:, : form.rows].flatten(), paths.flatten(), accepted, bonus)
        self.outcome[: _length(form)].copy_(torch.cat(parts))
        roots = ints[places.slots :][: form.rows].view(form.trees, form.nodes)[:, :1].long()
        steps = torch.arange(1, form.depth + 1, device=roots.device)
        sources = torch.where(paths < 0, steps, paths)
        both = torch.stack(((roots + sources).flatten(), (roots + steps).flatten()))
        self.moves[:, : form.trees * form.depth].copy_(both)

    def read(self, trees: GrownTrees) -> Verdict:
        """The verdict, and the trees with it: the one time in a round that the host waits."""
        form, size = trees.form, _length(trees.form)
        self._host[:size].copy_(self.outcome[:size], non_blocking=True)
        if self.outcome.device.type == "cuda":
            torch.cuda.current_stream(self.outcome.device).synchronize()
        values = self._host[:size].clone()  # the buffer is written again in the next round
        trees.lists[:] = values[: 2 * form.rows].view(2, -1).tolist()
        sizes = [form.trees * form.depth, form.trees, form.trees]
        paths, accepted, bonus = torch.split(values[2 * form.rows :], sizes)
        return Verdict(paths.view(form.trees, form.depth), accepted, bonus)

    def path_rows(self, form: Form) -> Tensor:
        """[B (depth + 1)] rows of root and path in the pass; the root's again past the end."""
        paths = self.outcome[2 * form.rows :][: form.trees * form.depth].view(form.trees, form.depth)
        nodes = torch.cat((torch.zeros_like(paths[:, :1]), paths.clamp(min=0)), 1)
        firsts = torch.arange(0, form.rows, form.nodes, device=paths.device)
        return (firsts[:, None] + nodes).flatten()

    def _trees(self, form: Form) -> tuple[Tensor, Tensor]:
        both = self.both[:, : form.rows].view(2, form.trees, form.nodes)
        return both[0], both[1]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parts of a pass over grown trees start among all integers; tokens start at MAX_ROWS."""

    positions: int
    slots: int
    ancestors: int
    lengths: int

    @classmethod
    def of(cls, size: Size, form: Form) -> Places:
        behind = MAX_ROWS + 3 * size.rows + FIELDS * size.groups
        lengths = behind + form.rows * (form.depth + 1)
        return cls(MAX_ROWS + size.rows, MAX_ROWS + 2 * size.rows, behind, lengths)


def _length(form: Form) -> int:
    return 2 * form.rows + form.trees * (form.depth + 2)
