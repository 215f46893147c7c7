"""Tree batches, the drafted trees of a round laid end to end; and verdicts, the accepted paths through them.

Both are made of lists or of tensors, and converted to the other on first use. On a CPU a whole round needs no tensor of
small integers: passes evict the CPU caches, so making or reading one costs more than all the arithmetic on it.

The topology of a tree: depths, ancestors, paths and children of its nodes, computed once per shape.

`topology_of(parents)` caches its results, because shapes recur round after round: chains of one length, the fixed trees
of Medusa. `trace` is the same for trees whose parents are only on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import InvalidInput

Seconds = Callable[[], float | None]  # of work on a device; None while it is not done
_CPU = torch.device("cpu")
# the token of a node that a device has grown and then left out: all below it are, the target does not score it
# and no walk enters it
CUT = -1
ONE_NODE = (0, 1)  # `starts` of one tree that is its root: a plain round of one sequence, usual on a CPU


@dataclass(frozen=True, slots=True)
class Draws:
    """How sampled nodes were drawn. Siblings come from one law, in index order."""

    laws: Tensor  # [P, V] fp32; rows sum to 1
    rows: Tensor  # [M] the law that node i was drawn from; -1 = chosen, not drawn
    replace: bool  # siblings are i.i.d. (True) or drawn without replacement (False)


@dataclass(frozen=True, slots=True)
class TreeForm:
    """The sizes of trees that a device grows: all that the host knows about them, and what their graphs differ in."""

    trees: int  # B, or more: the last ones are padding
    nodes: int  # N, the root included
    depth: int  # levels below the root
    width: int = 2  # children of a node, at most; 1 = nodes follow each other

    @property
    def chain(self) -> bool:
        return self.width == 1

    @property
    def rows(self) -> int:
        return self.trees * self.nodes

    def starts(self, trees: int) -> tuple[int, ...]:
        """Where so many trees start, and the end of the last."""
        return tuple(range(0, trees * self.nodes + 1, self.nodes))


class TreeBatch:
    """What one round puts to the target: one tree per sequence, laid end to end. Never changed once it is made."""

    __slots__ = (
        "_lists",
        "_tensors",
        "_topologies",
        "device",
        "draft_seconds",
        "drawn_from",
        "follows",
        "form",
        "starts",
    )

    def __init__(
        self,
        tokens: Tensor | list[int],  # [M] int64
        parents: Tensor | list[int],  # [M] int64, index within its own tree; -1 at the root
        starts: tuple[int, ...],  # [B+1] tree b is starts[b]:starts[b+1]; sizes are fixed by the host
        drawn_from: Draws | None = None,  # None = every node was chosen: a point mass
        device: torch.device | str = _CPU,  # of lists: where their tensors will be
        form: TreeForm | None = None,  # of trees that a device has grown: all that the host knows of them
        draft_seconds: float = 0.0,  # that the device takes to grow them; 0 = not known
        follows: tuple[int, ...] | None = None,  # [B] behind an unread round: each tree's place in it; -1 = new
    ) -> None:
        self.starts, self.drawn_from, self.form = starts, drawn_from, form
        self.draft_seconds, self.follows = draft_seconds, follows
        self._topologies: list[Topology] | None = None
        self._lists: tuple[list[int], list[int]] | None = None
        self._tensors: tuple[Tensor, Tensor] | None = None
        if type(tokens) is list and type(parents) is list:  # the usual case
            self._lists = tokens, parents
        elif isinstance(tokens, Tensor) and isinstance(parents, Tensor):
            self._tensors, self.device = (tokens, parents), tokens.device
            return
        else:
            self._lists = _listed(tokens), _listed(parents)
        self.device = torch.device(device) if isinstance(device, str) else device

    @property
    def tokens(self) -> Tensor:
        return self._as_tensors()[0]

    @property
    def parents(self) -> Tensor:
        return self._as_tensors()[1]

    def _as_tensors(self) -> tuple[Tensor, Tensor]:
        if self._tensors is None:
            assert self._lists is not None, "trees are made of one or the other"
            tokens, parents = self._lists
            self._tensors = ints_of(tokens, self.device), ints_of(parents, self.device)
        return self._tensors

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def nodes(self) -> int:
        """M, of all trees."""
        return self.starts[-1]

    def sizes(self) -> list[int]:
        return [self.starts[b + 1] - self.starts[b] for b in range(len(self))]

    def to_host(self) -> tuple[list[int], list[int]]:
        """Tokens and parents of all nodes, to be read only; trees that were grown on a device are read once."""
        if self._lists is None:
            self._lists = self.tokens.tolist(), self.parents.tolist()
        return self._lists

    def note_host(self, tokens: list[int], parents: list[int]) -> None:
        """Keep tokens and parents that were read from the device with the verdict: `to_host` then reads nothing."""
        self._lists = tokens, parents

    def topology(self) -> list[Topology]:
        """[B] the shape of every tree: depths, ancestors, paths. Worked out once."""
        if self._topologies is None:
            if self.starts == ONE_NODE:
                self._topologies = _ROOT_ALONE
            elif self.is_plain():
                self._topologies = [chain_of(1)] * len(self)
            elif self.form is not None and self.form.chain:
                self._topologies = [chain_of(self.form.nodes)] * len(self)
            else:
                parents = self.to_host()[1]
                self._topologies = [topology_of(tuple(parents[a:b])) for a, b in pairwise(self.starts)]
        return self._topologies

    def drafted(self) -> list[tuple[int, int]]:
        """[B] nodes below the root of every tree, and the depth of the deepest; none that were CUT."""
        whole = [(size - 1, shape.deepest) for size, shape in zip(self.sizes(), self.topology(), strict=True)]
        if self.form is None or CUT not in (tokens := self.to_host()[0]):
            return whole
        kept = [tokens[a:b] for a, b in pairwise(self.starts)]
        depths = [
            [depth for token, depth in zip(own, shape.depths, strict=True) if token != CUT]
            for own, shape in zip(kept, self.topology(), strict=True)
        ]
        return [(len(some) - 1, max(some)) for some in depths]

    def host_depths(self) -> list[int]:
        """[M] distance of every node from its root."""
        if self.is_plain():
            return [0] * self.nodes
        return [depth for shape in self.topology() for depth in shape.depths]

    def depths(self) -> Tensor:
        return ints_of(self.host_depths(), self.device)  # [M]

    def is_plain(self) -> bool:
        """Is every tree its root alone? Then nothing was drafted."""
        return self.starts == ONE_NODE or self.starts == tuple(range(len(self.starts)))

    def select(self, which: Sequence[int]) -> TreeBatch:
        """The trees of some sequences, in this order."""
        if len(which) == len(self) and list(which) == list(range(len(self))):
            return self
        nodes, drawn = self.nodes_of(which), self.drawn_from
        if drawn is not None:
            drawn = Draws(drawn.laws, drawn.rows[nodes.to(drawn.rows.device)], drawn.replace)
        starts = self.starts  # sizes of these trees only: some walk a batch tree by tree
        sizes = [starts[b + 1] - starts[b] for b in which]
        return TreeBatch(self.tokens[nodes], self.parents[nodes], offsets(sizes), drawn)

    def kept(self, which: Sequence[int]) -> TreeBatch:
        """Some of the trees, once they were read; their places on the device: see DeviceOutcome.trees."""
        (tokens, parents), starts, form = self.to_host(), self.starts, self.form
        rows = [row for b in which for row in range(starts[b], starts[b + 1])]
        some = [tokens[row] for row in rows], [parents[row] for row in rows]
        return TreeBatch(*some, offsets([starts[b + 1] - starts[b] for b in which]), None, self.device, form)

    def nodes_of(self, which: Sequence[int]) -> Tensor:
        """[M'] indices into the M nodes of the trees named."""
        spans = [torch.arange(self.starts[b], self.starts[b + 1]) for b in which]
        return torch.cat(spans).to(self.device) if spans else torch.zeros(0, dtype=torch.long)

    @classmethod
    def join(cls, parts: Sequence[TreeBatch], order: Sequence[int]) -> TreeBatch:
        """Lay several batches end to end, then put tree i of the whole at place order[i].

        A node that was CUT is scored then: it has some token.
        """
        if len(parts) == 1 and list(order) == list(range(len(order))):
            return parts[0]
        device = parts[0].device
        tokens = torch.cat([part.tokens.to(device) for part in parts]).clamp_(min=0)
        parents = torch.cat([part.parents.to(device) for part in parts])
        sizes = [size for part in parts for size in part.sizes()]
        whole = TreeBatch(tokens, parents, offsets(sizes), _join_draws(parts))
        return whole.select(sorted(range(len(order)), key=lambda i: order[i]))

    @classmethod
    def chains(cls, rows: Sequence[Sequence[int]], device: torch.device | str = _CPU) -> TreeBatch:
        """One chain per sequence; each row starts with its root."""
        return cls.trees([(row, range(-1, len(row) - 1)) for row in rows], device=device)

    @classmethod
    def trees(
        cls,
        rows: Sequence[tuple[Sequence[int], Sequence[int]]],
        drawn_from: Draws | None = None,
        device: torch.device | str = _CPU,
    ) -> TreeBatch:
        """One (tokens, parents) pair per sequence."""
        if len(rows) == 1:
            ((own, above),) = rows
            return TreeBatch(list(own), list(above), (0, len(own)), drawn_from, device)
        tokens = [token for row, _ in rows for token in row]
        parents = [parent for _, row in rows for parent in row]
        return TreeBatch(tokens, parents, offsets([len(row) for row, _ in rows]), drawn_from, device)


class NextRoots(Protocol):
    """Makes the plain round after one whose verdict the host has not read."""

    def __call__(self, going: Sequence[tuple[Any, int]]) -> TreeBatch | None:
        """The next roots, for pairs of a sequence and its place in the last round (-1 = none); None = read that first.

        A root that only the device knows is read together with the verdict on it (`TreeBatch.follows`).
        """


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """(0, s0, s0+s1, ...): where each of several pieces laid end to end starts, and the total."""
    return (0, *accumulate(sizes))


def _listed(values: Tensor | list[int]) -> list[int]:
    return values.tolist() if isinstance(values, Tensor) else values


def _join_draws(parts: Sequence[TreeBatch]) -> Draws | None:
    """Laws of several drafters in one table, padded to one width on one device."""
    drawn = [part.drawn_from for part in parts if part.drawn_from is not None]
    if not drawn:
        return None
    if len({draws.replace for draws in drawn}) > 1:
        raise InvalidInput("drafters that sample siblings with and without replacement cannot share a batch")
    device, width = drawn[0].laws.device, max(draws.laws.shape[-1] for draws in drawn)
    rows, laws, used = list[Tensor](), list[Tensor](), 0
    for part in parts:
        if part.drawn_from is None:
            rows.append(torch.full((part.nodes,), -1, device=device))
        else:
            theirs = part.drawn_from.rows.to(device)
            rows.append(torch.where(theirs < 0, -1, theirs + used))
            law = part.drawn_from.laws.to(device)
            laws.append(F.pad(law, (0, width - law.shape[-1])))
            used += len(law)
    return Draws(torch.cat(laws), torch.cat(rows), drawn[0].replace)


def ints_of(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    """A tensor of integers. On a GPU by pinned memory, so that the host does not wait for work under way."""
    if torch.device(device).type != "cuda":
        return torch.tensor(values, dtype=torch.long, device=device)
    return torch.tensor(values, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)


Mask = np.ndarray[tuple[int, int], np.dtype[np.bool_]]


class Topology:
    """One tree of N nodes; parents precede children, the root comes first. To be read only."""

    def __init__(self, parents: tuple[int, ...]) -> None:
        self.parents = parents
        self.is_chain = parents == tuple(range(-1, len(parents) - 1))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> Sequence[int]:
        """[N] distance of every node from the root."""
        if self.is_chain:
            return range(len(self.parents))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    @cached_property
    def deepest(self) -> int:
        return max(self.depths, default=0)

    @cached_property
    def paths(self) -> Sequence[Sequence[int]]:
        """[N] the nodes from the root down to every node, itself included."""
        if self.is_chain:
            return [range(node + 1) for node in range(len(self.parents))]
        paths: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            paths.append([node] if parent < 0 else [*paths[parent], node])
        return paths

    @cached_property
    def children(self) -> Sequence[Sequence[int]]:
        """[N] the children of every node, in index order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(node)
        return children

    @cached_property
    def ancestors(self) -> Mask:
        """[N, N] is column an ancestor of row, or row itself?"""
        if self.is_chain:
            return np.tri(len(self.parents), dtype=bool)
        seen = np.eye(len(self.parents), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        return seen


@lru_cache(maxsize=256)
def topology_of(parents: tuple[int, ...]) -> Topology:
    """The shape with these parents, each an index within the tree, -1 at the root."""
    return Topology(parents)


@lru_cache(maxsize=1024)
def chain_of(nodes: int) -> Topology:
    """A chain of so many nodes, the root included."""
    return Topology(tuple(range(-1, nodes - 1)))


def trace(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Of nodes [B, N] their depths, and [B, N, depth + 1] the ancestor at every depth, by torch alone.

    Beyond a node's own depth the entry is the node itself.
    """
    nodes = parents.shape[1]
    up = [torch.arange(nodes, device=parents.device).expand_as(parents)]
    for _ in range(depth):
        up.append(parents.gather(1, up[-1].clamp(min=0)))  # the root's parent, -1, leads to the root's again
    ancestors = torch.stack(up, -1)
    depths = (ancestors >= 0).sum(-1) - 1
    steps = torch.arange(depth + 1, device=parents.device)
    return depths, ancestors.gather(-1, (depths[..., None] - steps).clamp(min=0))


_ROOT_ALONE = [chain_of(1)]


class DeviceOutcome(Protocol):
    """A verdict in the memory of the device that decided it, until that target's next pass over trees."""

    @property
    def is_latest(self) -> bool:
        """Is it still there? Else a pass that follows it was launched."""

    @property
    def is_moved(self) -> bool:
        """Are the accepted paths at their places in the KV cache?"""

    @property
    def trees(self) -> Sequence[int]:
        """[B] which trees of the pass the verdict is on."""

    def kept(self, which: Sequence[int]) -> DeviceOutcome:
        """On some of these trees."""


class DeviceSampling(Protocol):
    """The target's own tokens above temperature 0, on a device (forerun.verify.sampled), for targets there."""

    @property
    def fields(self) -> int:
        """Numbers per sequence that are sent to the device."""

    def kinds(self, seqs: Sequence[Any]) -> Hashable | None:
        """What these sequences (`forerun.core.types.Seq`) need; None = all are greedy, or the host must decide.

        What is captured for some kinds serves all batches of these.
        """

    def usual(self) -> Sequence[Hashable]:
        """Kinds that are to be captured beforehand."""

    def settings(self, seqs: Sequence[Any], kinds: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[fields, B] of every sequence."""

    def tokens(self, logits: Tensor, positions: Tensor, table: Tensor, kinds: Any, depth: int) -> Tensor:
        """[B, N] after every node: of logits [B, N, V], positions [B, N] and settings [fields, B] on the device."""


class Verdict:
    """The verifier's decision: per tree, the accepted nodes below the root and the bonus token."""

    __slots__ = ("_device", "_lists", "_tensors", "outcome")

    def __init__(
        self,
        paths: Tensor,  # [B, P] node index within its tree, by depth; -1 past the end
        accepted: Tensor,  # [B] how many nodes each path has
        bonus: Tensor,  # [B] the target's token after the path
        outcome: DeviceOutcome | None = None,  # the same on the target's device, where that decided
    ) -> None:
        self.outcome = outcome
        self._tensors: tuple[Tensor, Tensor, Tensor] | None = (paths, accepted, bonus)
        self._lists: tuple[list[list[int]], list[int]] | None = None
        self._device: torch.device | str = paths.device

    @classmethod
    def of(
        cls,
        paths: Sequence[Sequence[int]],
        bonus: Sequence[int],
        device: torch.device | str,
        outcome: DeviceOutcome | None = None,
    ) -> Verdict:
        verdict = cls.__new__(cls)
        verdict._lists, verdict._tensors = ([*map(list, paths)], list(bonus)), None
        verdict._device, verdict.outcome = device, outcome
        return verdict

    @classmethod
    def whole_chain(cls, trees: TreeBatch, bonus: Sequence[int]) -> Verdict:
        """Every node accepted: the verdict of a prompt on itself."""
        return cls.of([range(1, size) for size in trees.sizes()], bonus, trees.device)

    @property
    def paths(self) -> Tensor:
        return self._as_tensors()[0]

    @property
    def accepted(self) -> Tensor:
        return self._as_tensors()[1]

    @property
    def bonus(self) -> Tensor:
        return self._as_tensors()[2]

    def _as_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._tensors is None:
            assert self._lists is not None, "a verdict is made of one or the other"
            paths, bonus = self._lists
            longest = max((len(path) for path in paths), default=0)
            padded = [[*path, *[-1] * (longest - len(path))] for path in paths]
            lengths = ints_of([len(path) for path in paths], self._device)
            rows = ints_of(padded, self._device).view(len(paths), longest)
            self._tensors = rows, lengths, ints_of(bonus, self._device)
        return self._tensors

    def kept(self, which: Sequence[int]) -> Verdict:
        """On some of the trees."""
        paths, bonus = self.to_host()
        outcome = None if self.outcome is None else self.outcome.kept(which)
        return Verdict.of([paths[b] for b in which], [bonus[b] for b in which], self._device, outcome)

    def path(self, b: int) -> list[int]:
        return self.to_host()[0][b]

    def to_host(self) -> tuple[list[list[int]], list[int]]:
        """All paths, cut to their lengths, and all bonus tokens, to be read only: the one read of a round."""
        if self._lists is None:
            rows = zip(self.paths.tolist(), self.accepted.tolist(), strict=True)
            self._lists = [path[:length] for path, length in rows], self.bonus.tolist()
        return self._lists


def committed_tokens(trees: TreeBatch, verdict: Verdict) -> list[list[int]]:
    """What a round adds to every sequence: the tokens of its path, and the target's own."""
    (tokens, _), (paths, bonus) = trees.to_host(), verdict.to_host()
    if len(bonus) == 1:
        (path,), first = paths, trees.starts[0]
        return [[*[tokens[first + node] for node in path], *bonus] if path else [*bonus]]
    return [
        [*[tokens[first + node] for node in path], last] if path else [last]
        for first, path, last in zip(trees.starts, paths, bonus, strict=False)
    ]
