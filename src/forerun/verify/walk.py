"""TreeView: what a verifier reads of one tree (tokens, children, laws, noise), and the loop over a batch of trees.

A verifier decides one tree at a time: a walk takes a `TreeView` to the nodes it accepts and the bonus.
Tokens, parents and the argmax of greedy trees are read from the device once for the whole batch; the rows of
laws only at nodes that a walk reaches. On a GPU that means several reads for each node. Where tokens were chosen, not
drawn, the token after a node depends on nothing but its law and its position: so there the tokens after all nodes are
found together, read once, and the walk goes along them (`decide_together`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.noise import DRAW, Noise, device_uniform, device_uniforms, draw, mixed_seed
from forerun.core.types import Draws, Laws, TreeBatch, Verdict
from forerun.verify.greedy import greedy_walks, walk_argmax
from forerun.verify.warp import argmax_rows


@dataclass(frozen=True, slots=True)
class TreeView:
    """Tree b of a batch. The token that follows a node at depth d has the random numbers of depth d."""

    b: int
    first: int  # where its nodes start among the M of the batch
    tokens: list[int]
    children: Sequence[Sequence[int]]  # of each node, in index order
    rows: list[int]  # the law each node was drawn from; -1 = chosen
    argmax: list[int]  # where the tree is greedy: the target's token after each node
    draws: Draws | None
    laws: Laws
    noise: Noise

    @property
    def greedy(self) -> bool:
        return self.laws.greedy[self.b]

    def log_weights(self, node: int) -> Tensor:
        """[V] of the target's law after a node."""
        return self.laws.log_weights[self.first + node]

    def law(self, node: int) -> Tensor:
        """[V] fp64, the target's law after a node."""
        return self.laws.probs(self.first + node).double()

    def drawn_from(self, node: int) -> Tensor:
        """[V] fp64, the law that a sampled node was drawn from; 0 for tokens outside the draft vocabulary."""
        assert self.draws is not None, "a chosen node was drawn from no law"
        law = self.draws.laws[self.rows[node]].to(self.laws.log_weights.device).double()
        return F.pad(law, (0, self.laws.log_weights.shape[-1] - len(law)))

    def uniform(self, depth: int, purpose: int, index: int = 0) -> float:
        return self.noise.uniform(self.b, depth, purpose, index)

    def draw(self, law: Tensor, depth: int) -> int:
        """The target's token after a node at this depth; each position has one such draw."""
        return draw(law, self.uniform(depth, DRAW))


Walk = Callable[[TreeView], tuple[list[int], int]]  # -> accepted nodes below the root, bonus


def decide(trees: TreeBatch, laws: Laws, noise: Noise, walk: Walk, *, coupled: bool | None = None) -> Verdict:
    """Walk every tree of the batch; exact rules say whether they are `coupled`, so that a GPU is read once."""
    if coupled is not None and reads_once(trees, laws):
        return decide_together(trees, laws, noise, coupled)
    walks = [walk(view) for view in _views(trees, laws, noise)]
    return Verdict.of([path for path, _ in walks], [bonus for _, bonus in walks], trees.device)


def follow_argmax(view: TreeView) -> tuple[list[int], int]:
    """The walk of a greedy tree, under every rule."""
    return walk_argmax(view.tokens, view.children, view.argmax)


def _views(trees: TreeBatch, laws: Laws, noise: Noise) -> list[TreeView]:
    (tokens, _), draws = trees.to_host(), trees.drawn_from
    rows = [-1] * len(tokens) if draws is None else draws.rows.tolist()
    argmax = _argmax_tokens(trees, laws)
    views = []
    for b, shape in enumerate(trees.topology()):
        span = slice(trees.starts[b], trees.starts[b + 1])
        own = tokens[span], shape.children, rows[span], argmax[span]
        views.append(TreeView(b, span.start, *own, draws, laws, noise))
    return views


def _argmax_tokens(trees: TreeBatch, laws: Laws) -> list[int]:
    """[M] the target's token after each node of the greedy trees, in one pass and one read."""
    if all(laws.greedy):
        return argmax_rows(laws.log_weights)
    nodes = trees.nodes_of([b for b, greedy in enumerate(laws.greedy) if greedy])
    argmax = [-1] * trees.nodes
    if len(nodes):
        for node, top in zip(nodes.tolist(), argmax_rows(laws.log_weights[nodes]), strict=True):
            argmax[node] = top
    return argmax


CHUNK_ENTRIES = 1 << 24  # entries of rows that are computed together: temporary memory is a few times that


def reads_once(trees: TreeBatch, laws: Laws) -> bool:
    """Are these trees of chosen tokens, on a device that is slow to answer?"""
    return trees.drawn_from is None and laws.log_weights.device.type != "cpu" and not all(laws.greedy)


def decide_together(trees: TreeBatch, laws: Laws, noise: Noise, coupled: bool) -> Verdict:
    """The verdict of coupled or of exact verification on trees of chosen tokens, with one read."""
    rows = laws.log_weights
    owners = [b for b, size in enumerate(trees.sizes()) for _ in range(size)]
    seeds = [mixed_seed(seed) for seed in noise.seeds]
    at = [noise.positions[b] + depth for b, depth in zip(owners, trees.host_depths(), strict=True)]
    sent = torch.tensor([[seeds[b] for b in owners], at, [laws.greedy[b] for b in owners]]).to(rows.device)
    step = max(1, CHUNK_ENTRIES // rows.shape[1])
    parts = [_tokens(rows[i : i + step], sent[:, i : i + step], coupled) for i in range(0, trees.nodes, step)]
    return greedy_walks(trees, torch.cat(parts).tolist())


def _tokens(rows: Tensor, sent: Tensor, coupled: bool) -> Tensor:
    """[n] after nodes, of which were sent: mixed seeds, positions of their tokens, whether they are greedy."""
    seeds, positions, greedy = sent
    if coupled:
        tokens = torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device)
        found = coupled_tokens(rows, noise_of(seeds, positions, tokens))
    else:
        found = drawn_tokens(rows.softmax(-1), device_uniform(seeds, positions, DRAW))
    return torch.where(greedy > 0, rows.argmax(-1), found)


def noise_of(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """[..., V] standard exponentials E = -log(1 - u) of mixed seeds and positions [...]."""
    return device_uniforms(seeds, positions, tokens).neg_().log1p_().neg_()


def coupled_tokens(log_weights: Tensor, noise: Tensor) -> Tensor:
    """argmin(E / p) of laws [..., V]: what `forerun.verify.warp.coupled_token` gives for each."""
    weights = (log_weights - log_weights.amax(-1, keepdim=True)).exp_()
    return (noise / weights).argmin(-1)


def drawn_tokens(laws: Tensor, u: Tensor) -> Tensor:
    """The tokens at quantiles u [...] of laws [..., V]: what `forerun.core.noise.draw` gives for each."""
    cdf = laws.double().cumsum(-1)
    found = torch.searchsorted(cdf, (u * cdf[..., -1])[..., None], right=True)[..., 0]
    last = laws.shape[-1] - 1 - (laws > 0).flip(-1).to(torch.int8).argmax(-1)  # of those that are possible
    return torch.minimum(found, last)
