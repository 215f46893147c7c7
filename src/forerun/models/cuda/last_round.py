"""LastRound: what the last pass decided, for what follows it before the host has read it."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.models.cuda.plan import MAX_ROWS

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
        self.rows[:trees, : len(steps)] = first + torch.cat(
            (paths.new_zeros(trees, 1), paths.clamp(min=0)), 1
        )
