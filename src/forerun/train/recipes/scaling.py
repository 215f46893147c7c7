"""Scaled linear layers: inputs and outputs of very different sizes, trained at one learning rate.

An optimiser that moves every weight by the same step learns a small input slowly. A target's last rows are twenty
times the size of its embeddings, and single dimensions twenty times larger still. So a layer's weight is learnt in
units, and everything it computes is computed with the weight in full, `out * weight * into`: what a file holds.
Sizes are powers of two, so nothing is rounded when the file is written or read, and a run that is resumed, even on
another kind of machine, has the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.train.data.corpus import Batch
from forerun.train.teacher import Teacher

# The last norm starts at a tenth of the size of the target's rows, so that the first laws are nearly even: at full size
# noise is told as certainty, and masks, whose own token the LM head finds likely, cost a loss of 40 a token. It grows
# four times as fast as other weights move.
BEGINNING, QUICK = 0.1, 4.0


@dataclass(frozen=True, slots=True)
class Sizes:
    token: Tensor  # [D] of an embedding, the same in every dimension
    feature: Tensor  # [D] of the target's last row

    @classmethod
    def ones(cls, width: int) -> Sizes:
        return cls(torch.ones(width), torch.ones(width))

    @property
    def row(self) -> float:
        """Of a whole last row: the root mean square over its dimensions."""
        return float(self.feature.square().mean().sqrt())


@torch.no_grad()
def measure_sizes(teacher: Teacher, batch: Batch) -> Sizes:
    """From the embedding table, and from the target's last rows on one batch, padding left out."""
    device = teacher.head.device
    _, last = teacher.features(batch.tokens.to(device), ())
    rows = last[batch.learnt.to(device)].float()
    token = teacher.embedding.float().square().mean().sqrt().expand(rows.shape[-1])
    return Sizes(_power_of_two(token), _power_of_two(rows.square().mean(0).sqrt()))


@torch.no_grad()
def measure_features(teacher: Teacher, batch: Batch, layers: Sequence[int]) -> Tensor:
    """[F] sizes of the features of these layers, side by side, on one batch."""
    device = teacher.head.device
    kept, _ = teacher.features(batch.tokens.to(device), layers)
    rows = torch.cat([kept[layer] for layer in layers], -1)[batch.learnt.to(device)].float()
    return _power_of_two(rows.square().mean(0).sqrt())


def _power_of_two(sizes: Tensor) -> Tensor:
    return sizes.clamp(min=2.0**-8).log2().round().exp2().cpu()


class ScaledLinear(nn.Linear):
    """A linear layer that learns its weight in units of what it reads and writes."""

    into: Tensor
    out: Tensor

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.register_buffer("into", torch.ones(inputs), persistent=False)
        self.register_buffer("out", torch.ones(outputs, 1), persistent=False)
        self.is_scaled = False

    def scale(self, reads: Tensor | None = None, writes: Tensor | None = None) -> None:
        """Name the sizes of what it reads [inputs] and writes [outputs]."""
        self.is_scaled = True
        if reads is not None:
            self.into.copy_(1.0 / reads)
        if writes is not None:
            self.out.copy_(writes[:, None])

    @property
    def full(self) -> Tensor:
        """[outputs, inputs] the weight that files hold."""
        return self.out * self.weight * self.into if self.is_scaled else self.weight

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias * self.out[:, 0]
        return F.linear(x, self.full, bias)


class ScaledNorm(nn.RMSNorm):
    """A norm that learns its weight in units of what it writes."""

    out: Tensor

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        self.register_buffer("out", torch.ones(width), persistent=False)

    @torch.no_grad()
    def scale(self, writes: Tensor, share: float) -> None:
        """Start at a share of these sizes [width], and learn in units of them."""
        self.out.copy_(writes)
        self.weight.fill_(share)

    @property
    def full(self) -> Tensor:
        """[width] the weight that files hold."""
        return self.out * self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), x.shape[-1:], self.full, self.eps)


@torch.no_grad()
def fold(module: nn.Module) -> dict[str, Tensor]:
    weights = {name: weight.detach() for name, weight in module.state_dict().items()}
    for name, layer in module.named_modules():
        if isinstance(layer, ScaledLinear):
            weights[f"{name}.weight"] = layer.full
            if layer.bias is not None:
                weights[f"{name}.bias"] = layer.bias * layer.out[:, 0]
        elif isinstance(layer, ScaledNorm):
            weights[f"{name}.weight"] = layer.full
    return weights


@torch.no_grad()
def unfold(module: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name: weight.float() for name, weight in weights.items()}
    for name, layer in module.named_modules():
        if isinstance(layer, ScaledLinear):
            into, out = layer.into.cpu(), layer.out.cpu()
            if (key := f"{name}.weight") in found:  # a smaller layer than the module's is its first rows and columns
                rows, columns = found[key].shape
                found[key] = found[key] / into[:columns] / out[:rows]
            if (key := f"{name}.bias") in found:
                found[key] = found[key] / out[: len(found[key]), 0]
        elif isinstance(layer, ScaledNorm) and (key := f"{name}.weight") in found:
            found[key] = found[key] / layer.out.cpu()
    return found


def main_directions(rows: Tensor, count: int) -> Tensor:
    """[D, count] orthonormal directions in which rows [N, D] vary most, the strongest first."""
    vectors: Tensor = torch.linalg.eigh(rows.t() @ rows)[1]  # the weakest first
    return vectors.flip(1)[:, :count]
