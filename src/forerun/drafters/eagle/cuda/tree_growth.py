"""Dynamic trees (EAGLE-2) on the device: the rule of drafters/tree_growth.py in operations that a graph can capture.

Every node of the frontier proposes its likeliest children, the best of these by cumulative confidence are the
next frontier, and of all that were proposed the best n are the tree. Sizes are known before the draft starts, so
nothing is read on the way. On a GPU a level is two kernels; elsewhere it is plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from forerun.models.cuda.early_start import starts_early

CHUNK = 2048  # logits that one program looks through
MOST_CUT = 4096  # candidates that one program chooses the best of


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """How a head's output is read: its vocabulary, and its calibration (scale * q^power)."""

    ids: Tensor  # [Vd] the target's ids
    log_scale: float = 0.0
    power: float = 1.0

    def log_confidence(self, log_probs: Tensor) -> Tensor:
        if self.power != 1.0 or self.log_scale:
            log_probs = log_probs * self.power + self.log_scale
        return log_probs.clamp(max=0.0)


@dataclass(frozen=True, slots=True)
class Frontier:
    """Nodes that go through the head next, the best first."""

    log_survivals: Tensor  # [B, W] log survivals
    places: Tensor  # [B, W] where they are in the pool; -1 = the root
    tokens: Tensor  # [B, W]
    parents: Tensor  # [B W] rows of their parents in the last frontier, over all trees
    ancestors: Tensor  # [B, W, L] places among the drafted slots, from the first level down to themselves

    @classmethod
    @cache  # captured drafts read them
    def of_roots(cls, trees: int, device: torch.device) -> Frontier:
        """Made once: a frontier is never written to."""
        with torch.inference_mode(False):
            none = torch.full((trees, 1), -1, device=device)
            ancestors = torch.zeros(trees, 1, 0, dtype=torch.long, device=device)
            return cls(torch.zeros(trees, 1, device=device), none, none, none.flatten(), ancestors)


class Pool:
    """All candidates, level by level: [B, N] each."""

    def __init__(self, trees: int, width: int, branch: int, depth: int, device: torch.device) -> None:
        self.width, self.branch = width, branch
        size = branch + (depth - 1) * width * branch
        self.scores = torch.empty(trees, size, device=device)
        self.tokens = torch.empty(trees, size, dtype=torch.long, device=device)
        self.parents = torch.empty(trees, size, dtype=torch.long, device=device)
        self.used = 0

    def add(self, count: int) -> slice:
        self.used += count
        return slice(self.used - count, self.used)


def grow_level(
    pool: Pool,
    frontier: Frontier,
    logits: Tensor,
    head_output: HeadOutput,
    into: tuple[Tensor, Tensor] | None = None,
    fused: bool | None = None,
) -> Frontier:
    """Add the children of a frontier, whose logits are [B W, Vd], to the pool; returns the next frontier.

    `into`: where its tokens [B W] and ancestors [B W L] are to be written, flat, for the pass over it.
    """
    by_kernels = logits.device.type == "cuda" if fused is None else fused
    if by_kernels and pool.branch <= 16 and pool.width <= 16:
        return _grow_fused(pool, frontier, logits, head_output, into)
    grown = grow_plainly(pool, frontier, logits, head_output)
    if into is not None:
        into[0].copy_(grown.tokens.flatten())
        into[1].copy_(grown.ancestors.flatten())
    return grown


def grow_plainly(pool: Pool, frontier: Frontier, logits: Tensor, head_output: HeadOutput) -> Frontier:
    """The same in plain torch."""
    trees, wide = frontier.log_survivals.shape
    values, rows = logits.topk(pool.branch)  # [B W, K]
    values = head_output.log_confidence((values - logits.logsumexp(-1, keepdim=True)).clamp(max=0.0))
    scores = (frontier.log_survivals[:, :, None] + values.view(trees, wide, -1)).flatten(1)
    tokens = head_output.ids[rows].view(trees, -1)
    first, span = pool.used, pool.add(scores.shape[1])
    pool.scores[:, span], pool.tokens[:, span] = scores, tokens
    pool.parents[:, span] = frontier.places.repeat_interleave(pool.branch, 1)
    log_survivals, best = scores.topk(min(pool.width, scores.shape[1]))  # [B, W]
    parents = best // pool.branch
    level, fresh = frontier.ancestors.shape[-1], best.shape[1]
    own = level * pool.width + torch.arange(fresh, device=best.device)
    ancestors = frontier.ancestors.gather(1, parents[..., None].expand(-1, -1, level))
    ancestors = torch.cat((ancestors, own.expand(trees, -1)[..., None]), -1)
    over_all = parents + torch.arange(0, trees * wide, wide, device=best.device)[:, None]
    return Frontier(log_survivals, best + first, tokens.gather(1, best), over_all.flatten(), ancestors)


def _grow_fused(
    pool: Pool,
    frontier: Frontier,
    logits: Tensor,
    head_output: HeadOutput,
    into: tuple[Tensor, Tensor] | None,
) -> Frontier:
    from forerun.drafters.eagle.cuda import kernels_head

    trees, wide = frontier.log_survivals.shape
    vocab, branch, device = logits.shape[1], pool.branch, logits.device
    chunks, level = -(-vocab // CHUNK), frontier.ancestors.shape[-1]
    found = torch.empty(trees * wide, chunks, branch, device=device)
    rows = torch.empty(trees * wide, chunks, branch, dtype=torch.int32, device=device)
    highs, sums = (torch.empty(trees * wide, chunks, device=device) for _ in range(2))
    pdl = starts_early(device)
    kernels_head.tops[(trees * wide, chunks)](
        logits, found, rows, highs, sums, vocab, K=branch, CHUNK=CHUNK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    first = pool.add(wide * branch).start
    fresh = min(pool.width, wide * branch)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.long, device=device)

    tokens, ancestors = into or (integers(trees * fresh), integers(trees * fresh * (level + 1)))
    nexts = Frontier(
        torch.empty(trees, fresh, device=device), integers(trees, fresh), tokens.view(trees, fresh),
        integers(trees * fresh), ancestors.view(trees, fresh, level + 1),
    )  # fmt: skip
    kernels_head.advance[(trees,)](
        found, rows, highs, sums, head_output.ids, frontier.log_survivals, frontier.places, frontier.ancestors,
        pool.scores, pool.tokens, pool.parents, nexts.log_survivals, nexts.places, nexts.tokens, nexts.parents,
        nexts.ancestors, first, pool.scores.shape[1], head_output.log_scale, head_output.power, level,
        WIDE=wide, WIDE_UP=_power(wide), K=branch, K_UP=_power(branch), C=chunks, C_UP=_power(chunks),
        FOUND_UP=_power(chunks * branch), FRESH=fresh, FRESH_UP=_power(fresh), WIDTH=pool.width, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return nexts


def cut_trees(pool: Pool, roots: Tensor, nodes: int, into: Tensor, fused: bool | None = None) -> None:
    """Write [2, B, nodes + 1] tokens and parents of the best nodes and their root; ties go to the one made first."""
    size = pool.scores.shape[1]
    if size <= MOST_CUT and (roots.device.type == "cuda" if fused is None else fused):
        from forerun.drafters.eagle.cuda import kernels_head

        pdl = starts_early(roots.device)
        kernels_head.cut[(len(roots),)](
            pool.scores, pool.tokens, pool.parents, roots, torch.empty_like(pool.scores, dtype=torch.int32), into,
            size, into.stride(0), nodes, UP=_power(size), PDL=pdl, num_warps=1 if size <= 1024 else 4, launch_pdl=pdl,
        )  # fmt: skip
        return
    order = pool.scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
    places = order.sort(dim=1).values  # parents were added before their children
    above = pool.parents.gather(1, places)
    # the root's children have none above
    into[1, :, 1:] = (torch.searchsorted(places, above) + 1) * (above >= 0)
    into[0, :, 1:] = pool.tokens.gather(1, places)
    into[0, :, 0], into[1, :, 0] = roots, -1


def _power(value: int) -> int:
    """The power of two that is no less, and at least 4."""
    return 1 << max(2, (value - 1).bit_length())
