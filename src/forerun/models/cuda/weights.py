"""Weights on a GPU: 16 bits, one byte each (int8 or fp8 with one scale per output) or four bits, and stacked experts.

Reading weights is what a pass over few nodes costs, so half the bytes are nearly half the time. Rows stay in 16 bits
and sums in fp32; the scale is applied to the finished sum, so a row's bits still depend on that row alone.

Widening costs as much time as the saved bytes are worth. So a drafting head of int8 weights has rows of whole numbers,
two bytes each, and tensor cores multiply bytes as they lie in memory: once with the high ones and once with the low
ones, which is free where reading weights is what takes time. Their sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from forerun.models.cuda.cubin.packing import BLOCK as BLOCK
from forerun.models.cuda.cubin.packing import Strips as Strips
from forerun.models.cuda.cubin.packing import pack_bf16, pack_bytes, pack_e4m3, pack_int4, pair_gates
from forerun.models.layers import Experts
from forerun.models.load.quantized.layouts import in_bytes, in_four_bits
from forerun.models.moe import MoeConfig

WeightKind = Literal["plain", "int8", "fp8", "w4", "file"]  # "file": as a quantised checkpoint has them
Role = Literal["layer", "gate", "head"]  # of a weight in its model
LARGEST_ROW = 32639  # of a row of whole numbers: 127 * 256 + 127


@dataclass(frozen=True, slots=True)
class Packed:
    """[N, K] in one byte each."""

    data: Tensor  # int8 or float8_e4m3fn
    scales: Tensor  # [N] fp32

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def scaled(self, by: float | Tensor) -> Packed:
        """The same numbers times something, for all outputs or [N] for each."""
        return Packed(self.data, self.scales * by)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Some of its rows, widened."""
        return self.data[rows].float() * self.scales[rows, None]


@dataclass(frozen=True, slots=True)
class Fours:
    """[N, K] in MXFP4: what a checkpoint rounded to it, without a change.

    STRIP outputs lie together, and STEP inputs of theirs: half of a byte each, the first 64 in the lower half. Inputs
    beyond the last one are zero.
    """

    data: Tensor  # [N / STRIP, steps, STRIP, STEP / 2] uint8
    scales: Tensor  # [N / STRIP, steps, STRIP, GROUPS, 2] bfloat16 of 32 inputs: powers of two, times 2 ** 126
    depth: int  # K

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.data) * STRIP, self.depth))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Some outputs, in bfloat16."""
        at = torch.arange(self.shape[0], device=self.data.device)[rows]
        data, scales = self.data[at // STRIP, :, at % STRIP], self.scales[at // STRIP, :, at % STRIP]
        numbers = torch.tensor(_NUMBERS, device=data.device)[torch.stack((data & 15, data >> 4), 2).long()]
        factors = (scales.double() * 2.0**-126).float().transpose(2, 3).unsqueeze(-1)
        wide = numbers.view(len(at), -1, 2, GROUPS, STEP // 2 // GROUPS) * factors
        return wide.view(len(at), -1)[:, : self.depth].bfloat16()


STRIP, STEP, GROUPS = 16, 128, 2  # of Fours, as in kernels/mxfp4.py
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
Weight = Tensor | Packed | Strips | Fours


def pack_fours(weight: Tensor) -> Fours | None:
    """A weight [N, K] as MXFP4, where that changes no number; None where it would, or sizes do not fit."""
    outputs, depth = weight.shape
    if weight.dtype != torch.bfloat16 or outputs % STRIP or depth % 32:
        return None
    wide = torch.nn.functional.pad(weight.float(), (0, -depth % STEP))
    groups = wide.view(outputs // STRIP, STRIP, -1, 2, GROUPS, 32)
    most = groups.abs().amax(-1, keepdim=True)
    exponents = torch.where(most > 0, most.frexp().exponent - 3, 0)  # the largest becomes 4 or more
    if not bool(((exponents >= -126) & (exponents <= 1)).all()):  # the kernel multiplies by 2 ** (exponent + 126)
        return None
    numbers = groups.ldexp(-exponents)
    sizes = torch.tensor(_NUMBERS[:8], device=weight.device)
    codes = torch.bucketize(numbers.abs(), sizes).clamp_(max=7)
    if not torch.equal(sizes[codes], numbers.abs()):
        return None
    codes = (codes + 8 * (numbers < 0)).to(torch.uint8).flatten(-2).permute(0, 2, 1, 3, 4)
    scales = (exponents.squeeze(-1).double() + 126).exp2().bfloat16().permute(0, 2, 1, 4, 3)
    return Fours((codes[..., 0, :] | codes[..., 1, :] << 4).contiguous(), scales.contiguous(), depth)


def pack(weight: Tensor, kind: WeightKind) -> Weight:
    """A weight [N, K] in the form asked for; each output's largest number becomes the largest there is."""
    if kind == "plain":
        return weight
    data, scales = in_bytes(weight, kind)
    return Packed(data.contiguous(), scales)


def pack_strips(weight: Tensor, kind: WeightKind, role: Role = "layer") -> Strips:
    """The same for the products that are compiled ahead; gates come interleaved with their other halves.

    The LM head meets rows of 16 bits in any case, and has one byte at least: its errors are those of the text. Of a
    quantised checkpoint, these are the weights that it left in 16 bits.
    """
    order = pair_gates if role == "gate" else (lambda given: given)
    if kind == "file":
        packed = pack_bf16(order(weight).bfloat16())
    elif kind == "w4" and role != "head":
        numbers, by_group = in_four_bits(weight)
        packed = pack_int4(order(numbers), order(by_group))
    else:
        data, scales = in_bytes(weight, "int8" if kind == "w4" else kind)
        data = order(data.view(torch.uint8)).view(data.dtype)
        rows_too = data.dtype != torch.int8 and role != "head"
        packed = pack_e4m3(data, order(scales)) if rows_too else pack_bytes(data, order(scales))
    return replace(packed, gated=role == "gate")


def interleaved(gate_up: Tensor) -> Tensor:
    """[2I, D], all gates and then all ups, as gate and up interleaved."""
    return gate_up.view(2, -1, gate_up.shape[1]).transpose(0, 1).reshape(gate_up.shape)


def times(rows: Tensor, weight: Weight) -> Tensor:
    """rows [M, K] by a weight [N, K], in plain torch."""
    if isinstance(weight, Tensor):
        return rows @ weight.t()
    assert isinstance(weight, Packed)
    return ((rows @ weight.data.to(rows.dtype).t()) * weight.scales).to(rows.dtype)


def whole(rows: Tensor) -> Tensor:
    """Rows rounded to whole numbers of two bytes, of the same type."""
    return rows.float().round().clamp(-LARGEST_ROW, LARGEST_ROW).to(rows.dtype)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One layer's experts; rows of `gate_up` are gate and up in turn, as in dense layers."""

    router: Tensor  # [E, D], or [E + 1, D]: the last row opens the shared expert, which else is always open
    gate_up: Weight  # [E 2I, D] expert after expert
    down: Weight  # [E D, I]
    shared_gate_up: Weight | None  # [2S, D]
    shared_down: Weight | None  # [D, S]
    biases: ExpertBiases | None = None
    correction: Tensor | None = None  # [E] fp32, added to the scores for the choice only


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """Biases of one layer, fp32; that of attention's output is added where rows enter the experts and leave them."""

    before: Tensor  # [D]
    router: Tensor  # [E]
    gate_up: Tensor  # [E 2I] gate and up in turn
    down: Tensor  # [E D]


def stack_experts(experts: Experts, config: MoeConfig, kind: WeightKind, before: Tensor | None = None) -> ExpertWeights:
    """From the layout of a checkpoint, whose own tensors stay as they are; `before`: the bias of attention's output."""
    gate_up, down = torch.empty_like(experts.gate_up), experts.down
    for expert in range(config.experts):
        gate_up[expert] = interleaved(experts.gate_up[expert])
    router, shared = experts.router, experts.shared
    if shared is not None and experts.shared_gate is not None:
        router = torch.cat((router, experts.shared_gate))
    return ExpertWeights(
        router=router.contiguous(),
        gate_up=_stacked(gate_up, kind),
        down=_stacked(down, kind),
        shared_gate_up=None if shared is None else pack(interleaved(shared.gate_up), kind),
        shared_down=None if shared is None else pack(shared.down, kind),
        biases=_stack_biases(experts, before) if config.biases else None,
        correction=experts.correction,
    )


def _stacked(weights: Tensor, kind: WeightKind) -> Weight:
    """[E, N, K] expert after expert: in four bits where a checkpoint's were, and nobody asks for other ones."""
    if kind == "plain" and pack_fours(weights[0]) is not None:
        fours = [pack_fours(weight) for weight in weights]
        found = [one for one in fours if one is not None]
        if len(found) == len(fours):
            data, scales = torch.cat([one.data for one in found]), torch.cat([one.scales for one in found])
            return Fours(data, scales, found[0].depth)
    return pack(weights.flatten(0, 1), kind)


def _stack_biases(experts: Experts, before: Tensor | None) -> ExpertBiases:
    router, gate_up, down = experts.router_bias, experts.gate_up_bias, experts.down_bias
    assert router is not None
    assert gate_up is not None
    assert down is not None
    in_turn = gate_up.float().view(len(gate_up), 2, -1).transpose(1, 2)
    none = torch.zeros(down.shape[1], device=down.device)
    return ExpertBiases(
        before=none if before is None else before.float(),
        router=router.float(),
        gate_up=in_turn.flatten().contiguous(),
        down=down.float().flatten().contiguous(),
    )


def part_of(weight: Weight, index: int, count: int) -> Weight:
    """One of `count` equal parts of stacked weights."""
    size = weight.shape[0] // count
    return rows_of(weight, index * size, (index + 1) * size)


def rows_of(weight: Weight, first: int, end: int) -> Weight:
    """What makes the outputs from one to before another."""
    if isinstance(weight, (Tensor, Fours)):
        return weight[first:end]
    assert isinstance(weight, Packed)
    return Packed(weight.data[first:end], weight.scales[first:end])
