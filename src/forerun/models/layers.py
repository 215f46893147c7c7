"""Layer functions that decoders and drafting heads share: linear maps, norms, rotary embedding, experts, NaN checks.

Functions on plain tensors, rows first ([M, D]); nothing here knows of sequences or caches. On a CPU the cost
of a pass over few rows is memory traffic and the number of operations, so each part is as few as it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import ModelError
from forerun.models.config import Activation
from forerun.models.moe import MoeConfig
from forerun.models.rope import RopeConfig, frequencies

Over = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]  # a function of rows, and rows -> what it makes of them


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [M, in] by weight [out, in], into `out` [M, out] where given."""
    form = _form(x)
    if form == "rows":
        out = x.new_empty(len(x), len(weight)) if out is None else out
        for row, into in zip(x.unbind(), out.unbind(), strict=True):
            torch.mv(weight, row, out=into)
    elif form == "columns":
        product = torch.mm(weight, x.t()).t()
        out = product.contiguous() if out is None else out.copy_(product)
    elif bias is None:
        return torch.mm(x, weight.t(), out=out)
    else:
        return torch.addmm(bias, x, weight.t(), out=out)
    return out if bias is None else out.add_(bias)


def add_linear_(onto: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """onto += linear(x), in place: added to the residual stream."""
    if bias is not None:
        onto.add_(bias)
    form = _form(x)
    if form == "rows":
        for row, into in zip(x.unbind(), onto.unbind(), strict=True):
            into.addmv_(weight, row)
        return onto
    if form == "columns":
        return onto.add_(torch.mm(weight, x.t()).t())
    return onto.addmm_(x, weight.t())


def _form(x: Tensor) -> Literal["rows", "columns", "plain"]:
    """How to multiply few rows on a CPU, as measured with OpenBLAS on a small ARM machine in fp32.

    Two or three rows are cheaper one by one, since a matrix-vector product runs at memory speed and the
    matrix product takes three times as long from the second row on; a dozen or more are a quarter cheaper
    with the weight as the left factor.
    """
    if x.device.type != "cpu":
        return "plain"
    if 2 <= len(x) <= 3:
        return "rows"
    return "columns" if 12 <= len(x) <= 64 else "plain"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; a weight in fp32 asks for the whole in fp32."""
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape[-1:], None, eps).mul_(weight).to(x.dtype)
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, weight.shape[-1:], None, eps).mul_(weight)


def norm_heads_(rotary: Tensor, weight: Tensor, heads: int, whole: bool, eps: float) -> None:
    """Norm queries and keys [M, H + Hkv, Dh] in place, head by head, or `whole`: all queries, and all keys."""
    if not whole:
        rotary.copy_(rms_norm(rotary, weight, eps))
        return
    for part, own in ((rotary[:, :heads], weight[:heads]), (rotary[:, heads:], weight[heads:])):
        part.copy_(rms_norm(part.flatten(1), own.flatten(), eps).view_as(part))


def gate(x: Tensor, activation: Activation) -> Tensor:
    """[M, 2I], gate and up side by side -> activation(gate) * up [M, I]; relu2 [M, I] has no gate."""
    if activation == "relu2":
        return F.relu(x).square_()
    inner = x.shape[-1] // 2
    return activate(x[:, :inner], activation).mul_(x[:, inner:])


def activate(x: Tensor, activation: Activation | Literal["relu", "gelu"]) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.relu(x) if activation == "relu" else F.gelu(x, approximate="none" if activation == "gelu" else "tanh")


def clamped_gate(x: Tensor, limit: float, alpha: float) -> Tensor:
    """[M, 2I] -> [M, I] as gpt-oss does: gate * sigmoid(alpha * gate) * (up + 1), both limited first."""
    inner = x.shape[-1] // 2
    opened, linear_part = x[:, :inner].clamp(max=limit), x[:, inner:].clamp(-limit, limit)
    return (opened * alpha).sigmoid_().mul_(opened).mul_(linear_part.add_(1))


def softcap_(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), in place."""
    return logits.div_(cap).tanh_().mul_(cap)


class Rotations:
    """Rotary embedding: from positions to rotations, for one rope."""

    def __init__(self, rope: RopeConfig, device: torch.device) -> None:
        self.rope = rope
        self.device = device
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}  # regime -> frequencies [1, R], magnitude [1, 1]

    def at(self, positions: Tensor, regime: int) -> Tensor:
        """[M] positions -> [M, 1, R] complex: what each pair of dimensions is multiplied by."""
        if regime not in self._tables:
            rates, scale = frequencies(self.rope, regime)
            self._tables[regime] = (rates.unsqueeze(0).to(self.device), torch.full((1, 1), scale, device=self.device))
        rates, magnitude = self._tables[regime]
        angles = positions.to(torch.float32).unsqueeze(1) * rates
        return torch.polar(magnitude.expand_as(angles), angles).unsqueeze(1)


def rotate_(pairs: Tensor, rotations: Tensor) -> None:
    """Rotate pairs [M, H, R, 2] by rotations [M, 1, R], in place.

    A pair is two neighbours, so that a rotation is one complex product; `pair_up` brings weights into this order.
    """
    if pairs.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotations)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(rotations)))


def pair_up(weight: Tensor, head_dim: int, dims: int) -> Tensor:
    """Reorder the rows of a query or key weight (or bias, or head norm) for `rotate_`.

    Checkpoints rotate dimension i with i + dims/2; here the two become neighbours. Queries and keys are
    reordered alike, so their products stay what they were.
    """
    heads = weight.reshape(-1, head_dim, *weight.shape[1:])  # [H, D, ...]
    half = dims // 2
    order = torch.arange(dims).view(2, half).t().flatten()
    order = torch.cat((order, torch.arange(dims, head_dim)))
    return heads[:, order.to(weight.device)].reshape(weight.shape)


def unpair(weight: Tensor, head_dim: int, dims: int) -> Tensor:
    """The inverse of `pair_up`: neighbours that rotate together become halves."""
    heads = weight.reshape(-1, head_dim, *weight.shape[1:])
    turned = heads[:, :dims].reshape(len(heads), dims // 2, 2, *weight.shape[1:])
    halves = turned.transpose(1, 2).reshape(len(heads), dims, *weight.shape[1:])
    return torch.cat((halves, heads[:, dims:]), 1).reshape(weight.shape)


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated feed-forward layer: gate and up in one weight."""

    gate_up: Tensor  # [2I, D]
    down: Tensor  # [D, I]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of one layer's experts and their router."""

    router: Tensor  # [E, D]
    gate_up: Tensor  # [E, 2I, D]
    down: Tensor  # [E, D, I]
    shared: Mlp | None = None
    shared_gate: Tensor | None = None  # [1, D]
    router_bias: Tensor | None = None  # [E]
    correction: Tensor | None = None  # [E] fp32, added to the scores for the choice only
    gate_up_bias: Tensor | None = None  # [E, 2I]
    down_bias: Tensor | None = None  # [E, D]
    scales: Tensor | None = None  # [E] fp32, of what each gives


def mix(x: Tensor, experts: Experts, config: MoeConfig, activation: Activation, over: Over | None = None) -> Tensor:
    """[M, D] -> [M, D]: the picked experts' outputs, weighted by the router, added up in the order of their numbers.

    Rows are sorted by expert, so that each expert that some row picked is read for all of its rows at once. `over`
    applies a function to rows in calls of its own choice; None = all at once.
    """
    over = over or _at_once
    both = over(partial(_routed, experts=experts, config=config), x)  # fp32: small numbers of experts are exact in it
    weights, picked = both[:, : config.per_token].to(x.dtype), both[:, config.per_token :].long()  # [M, K]
    found = x.new_empty(len(x), config.per_token, x.shape[1])
    for expert, rows, ranks in by_expert(picked, config.experts):
        run = partial(_run_expert, experts=experts, expert=expert, config=config, activation=activation)
        found[rows, ranks] = over(run, x[rows])
    out = found[:, 0] * weights[:, :1]
    for rank in range(1, config.per_token):
        out += found[:, rank] * weights[:, rank : rank + 1]
    if experts.shared is not None:
        out += over(partial(_run_shared, experts=experts, activation=activation), x)
    return out


def _at_once(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return function(rows)


def _routed(x: Tensor, experts: Experts, config: MoeConfig) -> Tensor:
    """[M, 2 K] what `route` gives, side by side."""
    weights, picked = route(x, experts.router, config, experts.router_bias, experts.correction)
    if experts.scales is not None:
        weights = weights * experts.scales[picked]
    return torch.cat((weights.float(), picked.float()), -1)


def _run_expert(x: Tensor, experts: Experts, expert: int, config: MoeConfig, activation: Activation) -> Tensor:
    into, out_of = experts.gate_up_bias, experts.down_bias
    both = linear(x, experts.gate_up[expert], None if into is None else into[expert])
    inner = gate(both, activation) if config.clamp is None else clamped_gate(both, *config.clamp)
    return linear(inner, experts.down[expert], None if out_of is None else out_of[expert])


def _run_shared(x: Tensor, experts: Experts, activation: Activation) -> Tensor:
    assert experts.shared is not None
    out = linear(gate(linear(x, experts.shared.gate_up), activation), experts.shared.down)
    return out if experts.shared_gate is None else out * linear(x, experts.shared_gate).sigmoid()


def route(
    x: Tensor, router: Tensor, config: MoeConfig, bias: Tensor | None = None, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[M, K] the weights of the experts that each row picks, and their numbers, which ascend."""
    logits = linear(x.to(router.dtype), router, bias)
    laws = logits.float().sigmoid() if config.sigmoid else logits.softmax(-1, dtype=torch.float32)  # [M, E]
    scores = laws if correction is None else laws + correction
    if config.groups[0] > 1:
        scores = scores.masked_fill(~in_best_groups(scores, config), float("-inf"))
    picked = scores.topk(config.per_token, dim=-1).indices
    weights = laws.gather(-1, picked)
    if config.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if config.sigmoid else 0.0))
    if config.scale != 1.0:
        weights = weights * config.scale
    picked, order = picked.sort(-1)
    return weights.gather(-1, order).to(x.dtype), picked


def in_best_groups(scores: Tensor, config: MoeConfig) -> Tensor:
    """[M, E] whether an expert is in one of the groups that its row may pick from.

    A group counts for its best expert, or for the sum of its best two where scores are sigmoids.
    """
    groups, kept = config.groups
    grouped = scores.view(len(scores), groups, -1)
    best = grouped.topk(2 if config.sigmoid else 1, dim=-1).values.sum(-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(kept, dim=-1).indices, True)
    return chosen.repeat_interleave(grouped.shape[-1], -1)


def by_expert(picked: Tensor, experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every expert that some row picked, in order, with the rows that did and the rank it has for each."""
    order = picked.flatten().argsort(stable=True)
    counts: list[int] = torch.bincount(picked.flatten(), minlength=experts).tolist()
    for expert, pairs in enumerate(torch.split(order, counts)):
        if len(pairs):
            yield expert, pairs // picked.shape[1], pairs % picked.shape[1]


def check_numbers(logits: Tensor) -> Tensor:
    """The logits, unless a row of them holds NaN or both infinities; on a CPU only, where reading does not wait."""
    if logits.device.type == "cpu" and bool(logits.sum().isnan()):
        raise not_numbers()
    return logits


def not_numbers() -> ModelError:
    return ModelError(
        "the model computes logits that are not numbers (NaN): its weights are damaged or too large for this "
        "dtype; fetch them again, or use dtype='float32'"
    )
