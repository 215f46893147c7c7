"""The nouns of Forerun: what a round puts to the target, what comes back, and what was decided.

Shapes: B sequences, M nodes of all trees laid end to end, V vocabulary, D width. Parents precede children;
node 0 of a tree is its root, the last committed token, whose keys and values the target has not seen yet.
So a sequence of n tokens has n - 1 of them in the KV cache, plain decoding is a tree of one node, and a
prompt is a chain whose every node is accepted: there is one kind of round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from forerun.errors import InvalidInput
from forerun.params import SamplingParams

FinishReason = Literal["stop", "length", "aborted"]


class Seq(Protocol):
    """A sequence as targets, drafters and controllers see it: read only."""

    @property
    def id(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...  # prompt and output, all committed
    @property
    def prompt_length(self) -> int: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def max_length(self) -> int: ...  # tokens it can ever hold
    @property
    def stop_ids(self) -> frozenset[int]: ...  # tokens that end it
    @property
    def shares_noise(self) -> bool: ...  # its verifier couples by noise: draft with the same noise


@dataclass(frozen=True, slots=True)
class Draws:
    """How sampled nodes were drawn. Siblings come from one law, in index order."""

    laws: Tensor  # [P, V] fp32; rows sum to 1
    rows: Tensor  # [M] the law that node i was drawn from; -1 = chosen, not drawn
    replace: bool  # siblings are i.i.d. (True) or drawn without replacement (False)


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """What one round puts to the target: one tree per sequence, laid end to end."""

    tokens: Tensor  # [M] int64
    parents: Tensor  # [M] int64, index within its own tree; -1 at the root
    starts: tuple[int, ...]  # [B+1] tree b is starts[b]:starts[b+1]; sizes are fixed by the host
    drawn_from: Draws | None = None  # None = every node was chosen: a point mass

    def __len__(self) -> int:
        return len(self.starts) - 1

    def sizes(self) -> list[int]:
        return [self.starts[b + 1] - self.starts[b] for b in range(len(self))]

    def to_host(self) -> tuple[list[int], list[int]]:
        """Tokens and parents of all nodes; trees that were grown on a device may have been read already."""
        return self.tokens.tolist(), self.parents.tolist()

    def host_depths(self) -> list[int]:
        """[M] distance of every node from its root."""
        parents, depths = self.to_host()[1], list[int]()
        for first, size in zip(self.starts, self.sizes(), strict=False):
            for parent in parents[first : first + size]:
                depths.append(0 if parent < 0 else depths[first + parent] + 1)
        return depths

    def depths(self) -> Tensor:
        return torch.tensor(self.host_depths(), device=self.tokens.device)  # [M]

    def is_plain(self) -> bool:
        """Nothing was drafted: every tree is its root."""
        return len(self.tokens) == len(self)

    def select(self, which: Sequence[int]) -> TreeBatch:
        """The trees of some sequences, in the order asked for."""
        if list(which) == list(range(len(self))):
            return self
        nodes = self.nodes_of(which)
        sizes = self.sizes()
        drawn = self.drawn_from
        if drawn is not None:
            drawn = Draws(drawn.laws, drawn.rows[nodes], drawn.replace)
        return TreeBatch(self.tokens[nodes], self.parents[nodes], offsets([sizes[b] for b in which]), drawn)

    def nodes_of(self, which: Sequence[int]) -> Tensor:
        """[M'] indices into the M nodes of the trees named."""
        spans = [torch.arange(self.starts[b], self.starts[b + 1]) for b in which]
        return torch.cat(spans).to(self.tokens.device) if spans else torch.zeros(0, dtype=torch.long)

    @classmethod
    def join(cls, parts: Sequence[TreeBatch], order: Sequence[int]) -> TreeBatch:
        """Lay several batches end to end, then put tree i of the whole at place order[i]."""
        if len(parts) == 1 and list(order) == list(range(len(order))):
            return parts[0]
        device = parts[0].tokens.device
        tokens = torch.cat([part.tokens.to(device) for part in parts])
        parents = torch.cat([part.parents.to(device) for part in parts])
        sizes = [size for part in parts for size in part.sizes()]
        whole = cls(tokens, parents, offsets(sizes), _join_draws(parts))
        return whole.select(sorted(range(len(order)), key=lambda i: order[i]))

    @classmethod
    def chains(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> TreeBatch:
        """One chain per sequence; each row starts with its root."""
        tokens = [token for row in rows for token in row]
        parents = [i - 1 for row in rows for i in range(len(row))]
        return cls(_ints(tokens, device), _ints(parents, device), offsets([len(row) for row in rows]))

    @classmethod
    def trees(
        cls,
        rows: Sequence[tuple[Sequence[int], Sequence[int]]],
        drawn_from: Draws | None = None,
        device: torch.device | str = "cpu",
    ) -> TreeBatch:
        """One (tokens, parents) pair per sequence."""
        tokens = [token for row, _ in rows for token in row]
        parents = [parent for _, row in rows for parent in row]
        starts = offsets([len(row) for row, _ in rows])
        return cls(_ints(tokens, device), _ints(parents, device), starts, drawn_from)


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """(0, s0, s0+s1, ...): where each of several pieces laid end to end starts, and the total."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return tuple(starts)


def _join_draws(parts: Sequence[TreeBatch]) -> Draws | None:
    drawn = [part.drawn_from for part in parts if part.drawn_from is not None]
    if not drawn:
        return None
    if len({draws.replace for draws in drawn}) > 1:
        raise InvalidInput("drafters that sample siblings with and without replacement cannot share a batch")
    rows, used = [], 0
    for part in parts:
        if part.drawn_from is None:
            rows.append(torch.full_like(part.tokens, -1))
        else:
            rows.append(torch.where(part.drawn_from.rows < 0, -1, part.drawn_from.rows + used))
            used += len(part.drawn_from.laws)
    return Draws(torch.cat([draws.laws for draws in drawn]), torch.cat(rows), drawn[0].replace)


def _ints(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=device)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter reads from the target; nothing else is computed."""

    hidden_layers: tuple[int, ...] = ()  # () n-gram | (-1,) Medusa, EAGLE-1/2 | three layers EAGLE-3

    def __or__(self, other: Needs) -> Needs:
        return Needs(tuple(sorted({*self.hidden_layers, *other.hidden_layers})))


@dataclass(frozen=True, slots=True)
class Scores:
    """What the target said of every node."""

    logits: Tensor | None  # [M, V] fp32, raw; None when a prompt is prefilled
    hidden: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> [M, D]; -1 = after the last norm
    settle: Callable[[], Verdict] | None = None  # the greedy verdict on these trees, worked out on the device
    drafting: float = 0.0  # seconds of the draft that a device had still before it when the pass was launched

    @property
    def required_logits(self) -> Tensor:
        assert self.logits is not None, "a pass over trees returns logits"
        return self.logits


@dataclass(frozen=True, slots=True)
class Laws:
    """The law after every node, as log-weights: law = softmax(log_weights), -inf = impossible.

    Where `greedy` holds, the law is the point mass on the argmax (the first one on a tie).
    """

    log_weights: Tensor  # [M, V] fp32
    greedy: tuple[bool, ...]  # [B]
    settle: Callable[[], Verdict] | None = None  # where all are greedy: the verdict, read from the device

    def probs(self, node: int) -> Tensor:
        return self.log_weights[node].softmax(-1)  # [V]

    def select(self, nodes: Tensor, which: Sequence[int]) -> Laws:
        if list(which) == list(range(len(self.greedy))):
            return self
        return Laws(self.log_weights[nodes], tuple(self.greedy[b] for b in which))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided: per tree, the accepted nodes below the root and one token of the target's own."""

    paths: Tensor  # [B, P] node index within its tree, by depth; -1 past the end
    accepted: Tensor  # [B] how many nodes each path has
    bonus: Tensor  # [B] the target's own token after the path

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]], bonus: Sequence[int], device: torch.device | str) -> Verdict:
        longest = max((len(path) for path in paths), default=0)
        padded = [[*path, *[-1] * (longest - len(path))] for path in paths]
        lengths = _ints([len(path) for path in paths], device)
        return cls(_ints(padded, device).view(len(paths), longest), lengths, _ints(bonus, device))

    @classmethod
    def whole_chain(cls, trees: TreeBatch, bonus: Sequence[int]) -> Verdict:
        """Every node accepted: the verdict of a prompt on itself."""
        return cls.of([range(1, size) for size in trees.sizes()], bonus, trees.tokens.device)

    def path(self, b: int) -> list[int]:
        return self.to_host()[0][b]

    def to_host(self) -> tuple[list[list[int]], list[int]]:
        """All paths, cut to their lengths, and all bonus tokens: the one read of a round."""
        rows = zip(self.paths.tolist(), self.accepted.tolist(), strict=True)
        return [path[:length] for path, length in rows], self.bonus.tolist()


@dataclass(frozen=True, slots=True)
class Budget:
    """How much one sequence may draft this round, fixed before anything is drawn.

    `price` and `level` are in tokens: what would have been written in the time that they take. A drafter whose
    nodes are chosen leaves out those that its own confidence does not deem worth their price.
    """

    nodes: int  # below the root; 0 = do not draft
    depth: int
    width: int = 1
    price: tuple[float, ...] | None = (
        None  # of a pass over the root and 0, 1, ... more nodes; None = all alike
    )
    level: float | None = None  # of drafting one level; 0 = only what costs nothing; None = nobody weighed it

    def __post_init__(self) -> None:
        if self.nodes < 0 or self.depth < 0 or self.width < 1:
            raise InvalidInput(f"{self} is out of range: nodes and depth 0 or more, width 1 or more")


@dataclass(frozen=True, slots=True)
class Request:
    """One text to write."""

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    drafter: str | None = None  # None = the engine's
    verifier: str | None = None
    budget: Budget | None = None  # None = the controller decides


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token under the law it was sampled from, and of the likeliest tokens there."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """What one round added to one sequence."""

    seq_id: int
    tokens: tuple[int, ...]
    accepted: int  # how many of them, from the front, were drafted; the rest is the target's own
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finished: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did, for controllers and metrics: never for drafters or verifiers."""

    seqs: tuple[Seq, ...]
    drafted: tuple[int, ...]  # [B] nodes below the root
    depths: tuple[int, ...]  # [B] depth of the deepest node
    accepted: tuple[int, ...]  # [B]
    seconds: Mapping[str, float]  # draft, target, verify, rest
