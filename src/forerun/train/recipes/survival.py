"""Weights of a block's positions by how far its draft gets: D-PACE's, from the overlap of the laws at each position.

A token counts only if those before it were accepted, and what it is worth is what can still be accepted behind it. With
overlaps a_i, softened to q_i = 1/2 + a_i / 2, position j weighs the sum over m >= j of q_1 ... q_m: the expected length
that hangs on it. While a drafter guesses badly its first positions count; the better they get, the more the later ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

FLOOR = 0.5  # of a position's chance: a hard position must not silence all behind it


@dataclass(slots=True)
class Survival:
    """The positions of all drafts of a batch, level by level."""

    rows: int  # of the batch: drafts are named by the row that they start from
    _places: list[Tensor] = field(default_factory=list)  # [N] by level
    _losses: list[Tensor] = field(default_factory=list)
    _overlaps: list[Tensor] = field(default_factory=list)
    _learnt: list[Tensor] = field(default_factory=list)

    def add(self, places: Tensor, losses: Tensor, overlaps: Tensor, learnt: Tensor) -> None:
        """One level: which drafts have it [N], and of each its loss, its overlap, and 1 where it is learnt."""
        self._places.append(places)
        self._losses.append(losses)
        self._overlaps.append(overlaps.detach())
        self._learnt.append(learnt)

    def __bool__(self) -> bool:
        return bool(self._places)

    def loss(self) -> Tensor:
        """The weighted mean over all positions."""
        chances = torch.zeros(len(self._places), self.rows, device=self._losses[0].device)
        for level, (places, overlaps) in enumerate(zip(self._places, self._overlaps, strict=True)):
            chances[level, places] = FLOOR + (1 - FLOOR) * overlaps
        weights = survival_weights(chances.t()).t()
        total, count = torch.zeros((), device=chances.device), torch.zeros((), device=chances.device)
        for mine, places, losses, learnt in zip(
            weights, self._places, self._losses, self._learnt, strict=True
        ):
            total = total + (mine[places] * losses).sum()
            count = count + (mine[places] * learnt).sum()
        return total / count.clamp(min=1e-6)


def survival_weights(chances: Tensor) -> Tensor:
    """[N, levels] from the chances of every position [N, levels]; zero from where a draft ends."""
    reached = chances.cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1)
