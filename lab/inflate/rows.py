"""Inflates what reads and writes the target's rows: tables, norms, biases, and matrices of rows side by side.

The row of a larger target is the small one with zeros behind it. What is added to a matrix reads through random weights
and writes zeros, so that it costs what it would cost, and adds nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lab.inflate.model import Shape


class RowInflater:
    """From rows of `width` to those of a larger shape."""

    def __init__(self, width: int, shape: Shape, dtype: torch.dtype, device: torch.device | str) -> None:
        self.width, self.shape, self.dtype, self.device = width, shape, dtype, torch.device(device)

    def side_by_side(self, weight: Tensor) -> Tensor:
        """[d, k d] -> [D, k D]: columns that are added read zeros, rows that are added write zeros."""
        width, wide = self.width, self.shape.width
        parts = torch.split(weight, width, 1)
        new = torch.empty(wide, len(parts) * wide, dtype=self.dtype, device=self.device)
        new.normal_(0.0, 0.02, generator=torch.Generator(self.device).manual_seed(len(parts)))
        for i, part in enumerate(parts):
            new[:, i * wide : i * wide + width] = 0
            new[:width, i * wide : i * wide + width] = part.to(new)
        return new

    def table(self, weight: Tensor) -> Tensor:
        """[V, d] -> [V, D], an embedding or an LM head."""
        new = torch.zeros(len(weight), self.shape.width, dtype=self.dtype, device=self.device)
        new[:, : self.width] = weight.to(new)
        return new

    def norm(self, weight: Tensor) -> Tensor:
        """One or several side by side: they divide by a smaller root mean square."""
        return self._vector(weight, 1.0, math.sqrt(self.width / self.shape.width))

    def vector(self, weight: Tensor) -> Tensor:
        """A bias: what it adds stays."""
        return self._vector(weight, 0.0, 1.0)

    def _vector(self, weight: Tensor, filling: float, scale: float) -> Tensor:
        parts = torch.split(weight, self.width)
        new = torch.full((len(parts), self.shape.width), filling, dtype=self.dtype, device=self.device)
        for i, part in enumerate(parts):
            new[i, : self.width] = (part.float() * scale).to(new)
        return new.flatten()
