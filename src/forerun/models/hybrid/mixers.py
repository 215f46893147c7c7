"""Recurrent layers over trees: every node's state follows from its parent's, in the same few calls wherever it is.

A layer's state is a tuple of tensors: the last inputs of its convolution, and what else the layer remembers. Nodes are
taken one by one, prompts too, so that a state does not depend on how its tokens were cut into passes and trees: on GPUs
by one kernel per layer and sequence, elsewhere in torch. What a layer remembers is large: a tree's nodes do not keep it
beyond their layer, and a verdict walks the accepted path again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.attention import Span
from forerun.models.config import RecurrentConfig
from forerun.models.hybrid.rows import RowLinear, by_rows, kernels_run_on
from forerun.models.hybrid.stateful import LayerState, Made


@dataclass(frozen=True, slots=True)
class Walk:
    """The nodes of one sequence in a pass, and those whose states will be asked for: in a tree any one path's."""

    span: Span
    is_tree: bool
    kept: frozenset[int]
    reads: Tensor  # [N, K] of the inputs before the first node and those of the nodes: what each node convolves

    @classmethod
    def of(cls, span: Span, is_tree: bool, kept: frozenset[int], kernel: int, device: torch.device) -> Walk:
        before = list(range(kernel - 1))
        if span.shape.is_chain:
            reads = torch.arange(span.nodes)[:, None] + torch.arange(kernel)
        else:
            paths = ([*before, *(kernel - 1 + node for node in path)] for path in span.shape.paths)
            reads = torch.tensor([path[-kernel:] for path in paths])
        return cls(span, is_tree, kept, reads.to(device))


class Mixer(Protocol):
    """What a recurrent layer does in the place of attention."""

    def start(self) -> LayerState:
        """Before the first token."""

    def run(self, x: Tensor, walks: Sequence[Walk], states: Sequence[LayerState]) -> tuple[Tensor, list[Made]]:
        """[M, D] -> [M, D] from these states on; and by walk, the states of the nodes that are kept."""


class Convolution:
    """A causal convolution of every channel over the last inputs of a node's own path."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.float().reshape(len(weight), -1).t().contiguous()  # [K, C]
        self.bias = None if bias is None else bias.float()

    def start(self, dtype: torch.dtype) -> Tensor:
        return self.weight.new_zeros(len(self.weight) - 1, self.weight.shape[1], dtype=dtype)

    def run(self, x: Tensor, walks: Sequence[Walk], before: Sequence[Tensor]) -> tuple[Tensor, list[dict[int, Tensor]]]:
        """[M, C] -> [M, C] fp32, and by walk, the last inputs of nodes that are kept. Products and sums only."""
        found, made = torch.empty(x.shape, dtype=torch.float32, device=x.device), []
        for walk, old in zip(walks, before, strict=True):
            some = slice(walk.span.first, walk.span.end)
            windows = torch.cat((old, x[some]))[walk.reads]  # [N, K, C]
            total = windows[:, 0] * self.weight[0]
            for i in range(1, len(self.weight)):
                total += windows[:, i] * self.weight[i]
            found[some] = total if self.bias is None else total.add_(self.bias)
            made.append({node: windows[node, 1:].clone() for node in walk.kept})
        return found, made


class ShortConv:
    """LFM2: a convolution between two gates."""

    def __init__(self, inputs: RowLinear, convolution: Convolution, output: RowLinear) -> None:
        self.inputs, self.convolution, self.output = inputs, convolution, output

    def start(self) -> LayerState:
        return (self.convolution.start(self.inputs.weight.dtype),)

    def run(self, x: Tensor, walks: Sequence[Walk], states: Sequence[LayerState]) -> tuple[Tensor, list[Made]]:
        before, behind, inner = self.inputs(x).chunk(3, -1)
        mixed, made = self.convolution.run(before * inner, walks, [state[0] for state in states])
        kept: list[Made] = [{node: (one,) for node, one in some.items()} for some in made]
        return self.output(behind * mixed.to(x.dtype)), kept


class Memory(ABC):
    """A convolution, then a matrix per head that forgets, is written by keys and values, and read by queries.

    `inputs` gives what is convolved, then gates of what is found, then steps (`steps` numbers).
    """

    skip: Tensor | None = None  # [Hv] fp32: how much of a value is found directly, in Mamba-2

    def __init__(
        self,
        config: RecurrentConfig,
        inputs: RowLinear,
        convolution: Convolution,
        rates: Tensor,  # [Hv] fp32, negative: how fast each head forgets
        step_bias: Tensor,  # [Hv] fp32
        norm: Tensor,
        output: RowLinear,
        eps: float,
        steps: int,
    ) -> None:
        self.config, self.inputs, self.convolution, self.steps = config, inputs, convolution, steps
        self.rates, self.step_bias, self.norm, self.output, self.eps = rates, step_bias, norm, output, eps
        self.heads, self.values = config.value_heads, config.value_heads * config.value_dim
        self.keys = config.key_heads * config.key_dim

    def start(self) -> LayerState:
        memory = self.rates.new_zeros(self.heads, self.config.key_dim, self.config.value_dim)
        return self.convolution.start(self.inputs.weight.dtype), memory

    def run(self, x: Tensor, walks: Sequence[Walk], states: Sequence[LayerState]) -> tuple[Tensor, list[Made]]:
        sizes = [2 * self.keys + self.values, self.values, self.steps]
        joined, gates, steps = torch.split(self.inputs(x), sizes, -1)
        mixed, inputs = self.convolution.run(joined, walks, [state[0] for state in states])
        prepared = by_rows(self.prepare, mixed.to(x.dtype), steps)
        found, made = prepared.new_empty(len(x), self.values), list[Made]()
        for walk, state, last in zip(walks, states, inputs, strict=True):
            some = slice(walk.span.first, walk.span.end)
            memories = self._walk(walk, state[1], prepared, found)
            if walk.is_tree and walk.span.nodes > 1:
                made.append(_Replayed(self, walk, state[1], prepared[some], last))
            else:
                made.append({node: (last[node], memories[node]) for node in walk.kept})
        return self.output(by_rows(self.finish, found.to(x.dtype), gates)), made

    def _walk(self, walk: Walk, start: Tensor, prepared: Tensor, found: Tensor) -> Mapping[int, Tensor]:
        """Fill what each node finds in its memory; the memories of all nodes, of a chain those that are kept."""
        if kernels_run_on(start.device):
            wanted = () if walk.is_tree and walk.span.nodes > 1 else sorted(walk.kept)
            return self._scan(start, prepared, found, walk.span.first, walk.span.shape.parents, wanted)
        memories, shape, first = dict[int, Tensor](), walk.span.shape, walk.span.first
        for node, parent in enumerate(shape.parents):
            before = start if parent < 0 else memories[parent]
            memories[node], found[first + node] = self.step(before, prepared[first + node])
            if shape.is_chain and (walk.is_tree or parent not in walk.kept):
                memories.pop(parent, None)
        return memories

    def _scan(
        self, start: Tensor, prepared: Tensor, found: Tensor, first: int, parents: Sequence[int], wanted: Sequence[int]
    ) -> dict[int, Tensor]:
        from forerun.models.cuda.steps.recurrent import scan

        return scan(start, prepared, found, first, parents, wanted, self.skip)

    def walk_path(self, start: Tensor, prepared: Tensor) -> Tensor:
        """The memory behind nodes that follow each other."""
        if kernels_run_on(start.device):
            found, last = prepared.new_empty(len(prepared), self.values), len(prepared) - 1
            return self._scan(start, prepared, found, 0, range(-1, last), [last])[last]
        for row in prepared:
            start = self.step(start, row)[0]
        return start

    def step(self, before: Tensor, prepared: Tensor) -> tuple[Tensor, Tensor]:
        """One node: its memory from its parent's [Hv, Dk, Dv], and what it finds there [Hv Dv]."""
        heads, keys = self.heads, self.heads * self.config.key_dim
        row = prepared.clone()  # equally aligned wherever it was
        query, key, value, strength, left = torch.split(row, [keys, keys, self.values, heads, heads])
        query, key, value = (one.view(heads, 1, -1) for one in (query, key, value))
        memory = before * left.view(-1, 1, 1)
        memory.baddbmm_(key.transpose(1, 2), self._written(memory, key, value) * strength.view(-1, 1, 1))
        return memory, self._read(memory, query, value).flatten()

    def _of_all_heads(self, one: Tensor) -> Tensor:
        """[N, Hk, Dk] queries or keys -> [N, Hv Dk]: heads of values share them."""
        each = self.heads // self.config.key_heads
        return (one.repeat(1, each, 1) if self.config.in_turns else one.repeat_interleave(each, 1)).flatten(1)

    @abstractmethod
    def prepare(self, mixed: Tensor, steps: Tensor) -> Tensor:
        """[N, ...] fp32, side by side: queries, keys, values, how strongly each is written, what is left of before."""

    @abstractmethod
    def _written(self, memory: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[Hv, 1, Dv] what a value adds under its key."""

    def _read(self, memory: Tensor, query: Tensor, value: Tensor) -> Tensor:
        return torch.bmm(query, memory)

    @abstractmethod
    def finish(self, found: Tensor, gates: Tensor) -> Tensor:
        """What is found, normed and multiplied by its gate."""


class _Replayed(Mapping[int, LayerState]):
    """The states of a tree's nodes, computed again along the path to the one that is asked for."""

    def __init__(self, memory: Memory, walk: Walk, start: Tensor, prepared: Tensor, last: Mapping[int, Tensor]) -> None:
        self._memory, self._walk, self._start, self._prepared, self._last = memory, walk, start, prepared, last

    def __getitem__(self, node: int) -> LayerState:
        path = list(self._walk.span.shape.paths[node])
        return self._last[node], self._memory.walk_path(self._start, self._prepared[path])

    def __iter__(self) -> Iterator[int]:
        return iter(self._walk.kept)

    def __len__(self) -> int:
        return len(self._walk.kept)


class DeltaNet(Memory):
    """Qwen3-Next and Qwen3.5: what a key gives already is taken off its value (the gated delta rule)."""

    def prepare(self, mixed: Tensor, steps: Tensor) -> Tensor:
        queries, keys, values = torch.split(F.silu(mixed).float(), [self.keys, self.keys, self.values], -1)
        parts = list[Tensor]()
        for one in (queries, keys):
            heads = one.reshape(len(one), -1, self.config.key_dim)
            parts.append(self._of_all_heads(heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + 1e-6)))
        strengths, decays = steps.chunk(2, -1)
        left = (self.rates * F.softplus(decays.float() + self.step_bias)).exp()
        return torch.cat(
            (parts[0] * self.config.key_dim**-0.5, parts[1], values, strengths.sigmoid().float(), left), -1
        )

    def _written(self, memory: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value - torch.bmm(key, memory)

    def finish(self, found: Tensor, gates: Tensor) -> Tensor:
        heads = found.reshape(len(found), -1, self.config.value_dim)
        normed = self.norm * F.rms_norm(heads.float(), heads.shape[-1:], None, self.eps).to(found.dtype)
        return (normed.flatten(1) * F.silu(gates.float())).to(found.dtype)


class Mamba2(Memory):
    """Granite 4: values come first among what is convolved, then keys and queries of groups of heads."""

    def prepare(self, mixed: Tensor, steps: Tensor) -> Tensor:
        values, keys, queries = torch.split(F.silu(mixed).float(), [self.values, self.keys, self.keys], -1)
        groups = [one.reshape(len(one), -1, self.config.key_dim) for one in (queries, keys)]
        strengths = F.softplus(steps.float() + self.step_bias).clamp(min=self.config.least_step)
        return torch.cat((*map(self._of_all_heads, groups), values, strengths, (strengths * self.rates).exp()), -1)

    def _written(self, memory: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value

    def _read(self, memory: Tensor, query: Tensor, value: Tensor) -> Tensor:
        assert self.skip is not None
        return torch.bmm(query, memory) + self.skip.view(-1, 1, 1) * value

    def finish(self, found: Tensor, gates: Tensor) -> Tensor:
        gated = (found.float() * F.silu(gates.float())).view(len(found), self.config.norm_groups, -1)
        return self.norm * F.rms_norm(gated, gated.shape[-1:], None, self.eps).flatten(1).to(found.dtype)
