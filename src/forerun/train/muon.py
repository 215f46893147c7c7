"""Muon: AdamW whose matrices are moved along orthogonalised momentum, by steps of one size in all directions.

A matrix's momentum is made orthogonal by Newton and Schulz's iteration: every direction that the gradient has, strong
or weak, is then followed alike. Steps have the size of AdamW's (an entry moves by the learning rate, in the root mean
square), so that one learning rate serves matrices and vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
_ROUNDS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)  # steep at zero: singular values end between 0.7 and 1.2
MOMENT = "momentum_buffer"  # what it keeps of a matrix


class Muon(torch.optim.AdamW):
    """Groups with `orthogonal` set are moved by Muon, the others by AdamW."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group["orthogonal"]]
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        moved = [(p, g) for g in groups if g["orthogonal"] for p in g["params"] if p.grad is not None]
        for _, alike in groupby(sorted(moved, key=_kind), key=_kind):
            self._move(list(alike))
        return loss

    def _move(self, moved: list[tuple[Tensor, dict[str, Any]]]) -> None:
        """Matrices of one shape together: one product instead of many small ones."""
        momenta = []
        for parameter, _ in moved:
            state = self.state[parameter]
            if MOMENT not in state:
                state["step"], state[MOMENT] = torch.zeros(()), torch.zeros_like(parameter)
            state["step"] += 1  # AdamW looks for it when a state is loaded
            state[MOMENT].lerp_(parameter.grad, 1 - MOMENTUM)
            momenta.append(torch.lerp(parameter.grad, state[MOMENT], MOMENTUM))  # type: ignore[arg-type]
        directions = orthogonal(torch.stack(momenta))
        for (parameter, group), direction in zip(moved, directions, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(direction.to(parameter.dtype), alpha=-group["lr"] * max(parameter.shape) ** 0.5)


def _kind(moved: tuple[Tensor, dict[str, Any]]) -> tuple[int, ...]:
    return tuple(moved[0].shape)


def orthogonal(matrices: Tensor) -> Tensor:
    """[N, A, B] with the same singular vectors and singular values near one."""
    wide = matrices.shape[-2] > matrices.shape[-1]
    # many CPUs have no products of 16 bits
    matrices = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x: Tensor = matrices.mT if wide else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = _QUINTIC
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: Tensor = x.mT if wide else x
    return found
