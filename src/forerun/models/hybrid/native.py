"""NativeHybrid: models with recurrent layers on the native kernels, prompts and trees in one call per pass.

A sequence's state is one tensor: the states of all recurrent layers, as native/c/recurrent.c lays them out. The kernels
compute every row by the same steps in the same order, so a state does not depend on passes, chunks or trees. States
are large, and a verdict keeps one: a pass over a tree keeps what its recurrent layers read, and a verdict walks
the accepted path again.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from forerun.core.types import Needs, Prompts, Scores, Seq, TreeBatch
from forerun.models.attention import PassRows, Span
from forerun.models.base import LayerSubset
from forerun.models.config import DecoderConfig, RecurrentConfig
from forerun.models.decoder import Decoder
from forerun.models.families import RecurrentKind
from forerun.models.hybrid.stateful import KEPT_BYTES, LayerState, Made, State, StatefulDecoder, States
from forerun.models.native import library as native
from forerun.models.native.packing import PackedWeight, pack_floats, side_by_side
from forerun.models.native.target import NativeDecoder, NativePlacement
from forerun.models.native.weights import NativeReader

_KINDS: dict[RecurrentKind, int] = {"short_conv": 0, "delta_net": 1, "mamba2": 2}  # as forerun.h has them


class HybridReader(NativeReader):
    """Recurrent layers beside what every decoder has."""

    def _layer(self, index: int) -> native.Layer:
        alone, at = self.config.recurrent and self.config.recurrent.mlp_alone, f"{self.names.prefix}layers.{index}."
        if not alone:
            return super()._layer(index)
        norm = self._keep(self.names.norm(at + "norm.weight").contiguous())
        if self.config.sparse[index]:
            return native.Layer(mlp_norm=norm, **self._experts(at))
        if alone[index]:
            return native.Layer(mlp_norm=norm, **self._mlp(at + "mlp.", self.config.inner))
        return native.Layer(attention_norm=norm, **self._attention(at + "self_attn.", index))

    def _attention(self, at: str, index: int) -> dict[str, Any]:
        recurrent = self.config.recurrent
        assert recurrent is not None
        if not recurrent.layers[index]:
            return super()._attention(at, index)
        at = at.removesuffix("self_attn.")
        make = {"short_conv": self._short_conv, "delta_net": self._delta_net, "mamba2": self._mamba}[recurrent.kind]
        mixer = make(at, recurrent)
        mixer.kind, mixer.kernel = _KINDS[recurrent.kind], recurrent.kernel
        mixer.key_heads, mixer.value_heads = recurrent.key_heads, recurrent.value_heads
        mixer.key_dim, mixer.value_dim, mixer.in_turns = recurrent.key_dim, recurrent.value_dim, recurrent.in_turns
        mixer.state = recurrent.layers[:index].count(True) * native.library().fr_state_numbers(ctypes.byref(mixer))
        self.kept.append(mixer)
        return {"mixer": ctypes.pointer(mixer)}

    def _short_conv(self, at: str, recurrent: RecurrentConfig) -> native.Mixer:
        width = self.config.width
        return native.Mixer(
            channels=width,
            wide=3 * width,
            gates_at=width,
            inputs=side_by_side([self._linear(at + "conv.in_proj.weight", 3 * width, width)]),
            output=side_by_side([self._linear(at + "conv.out_proj.weight", width, width)]),
            **self._convolution(at + "conv.conv.", width, recurrent.kernel),
        )

    def _delta_net(self, at: str, recurrent: RecurrentConfig) -> native.Mixer:
        at += "linear_attn."
        keys, heads = recurrent.key_heads * recurrent.key_dim, recurrent.value_heads
        values = heads * recurrent.value_dim
        return native.Mixer(
            channels=2 * keys + values,
            wide=2 * keys + 2 * values + 2 * heads,
            gates_at=2 * keys + values,
            steps_at=2 * keys + 2 * values,
            norm_size=recurrent.value_dim,
            inputs=side_by_side([*self._delta_inputs(at, recurrent), self._delta_steps(at, recurrent)]),
            **self._memory(at, recurrent, recurrent.value_dim),
        )

    def _mamba(self, at: str, recurrent: RecurrentConfig) -> native.Mixer:
        at += "mamba."
        keys, heads = recurrent.key_heads * recurrent.key_dim, recurrent.value_heads
        values = heads * recurrent.value_dim
        channels = 2 * keys + values
        return native.Mixer(
            channels=channels,
            wide=values + channels + heads,
            convolved_at=values,
            steps_at=values + channels,
            norm_size=values // recurrent.norm_groups,
            least_step=recurrent.least_step,
            inputs=side_by_side([self._linear(at + "in_proj.weight", values + channels + heads, self.config.width)]),
            skip=self._floats(at + "D", heads),
            **self._memory(at, recurrent, values),
        )

    def _memory(self, at: str, recurrent: RecurrentConfig, normed: int) -> dict[str, Any]:
        """What DeltaNet and Mamba-2 have in common."""
        heads, values = recurrent.value_heads, recurrent.value_heads * recurrent.value_dim
        channels = values + 2 * recurrent.key_heads * recurrent.key_dim
        self._check(at + "A_log", (heads,))
        return {
            "rates": self._keep(-self.weights[at + "A_log"].detach().float().exp().contiguous()),
            "step_bias": self._floats(at + "dt_bias", heads),
            "norm": self._floats(at + "norm.weight", normed),
            "output": side_by_side([self._linear(at + "out_proj.weight", self.config.width, values)]),
            **self._convolution(at + "conv1d.", channels, recurrent.kernel),
        }

    def _delta_inputs(self, at: str, recurrent: RecurrentConfig) -> list[PackedWeight]:
        """Queries, keys, values and gates; Qwen3-Next has them key head by key head."""
        width, values = self.config.width, recurrent.value_heads * recurrent.value_dim
        keys = recurrent.key_heads * recurrent.key_dim
        if (name := at + "in_proj_qkvz.weight") in self.weights:
            share = values // recurrent.key_heads
            rows = _by_parts(recurrent.key_heads, [recurrent.key_dim] * 2 + [share] * 2)
            return [self._linear(name, 2 * keys + 2 * values, width, rows=rows)]
        sizes = {"qkv": 2 * keys + values, "z": values}
        return [self._linear(f"{at}in_proj_{part}.weight", size, width) for part, size in sizes.items()]

    def _delta_steps(self, at: str, recurrent: RecurrentConfig) -> PackedWeight:
        """In float32 whatever the mode: they are few, and decide how long a state lasts."""
        heads, width = recurrent.value_heads, self.config.width
        if (name := at + "in_proj_ba.weight") in self.weights:
            self._check(name, (2 * heads, width))
            share = heads // recurrent.key_heads
            both = self.weights[name].detach()[_by_parts(recurrent.key_heads, [share, share])]
        else:
            names = [f"{at}in_proj_{part}.weight" for part in "ba"]
            for name in names:
                self._check(name, (heads, width))
            both = torch.cat([self.weights[name].detach() for name in names])
        return self._kept(pack_floats(both, "float32"))

    def _convolution(self, at: str, channels: int, kernel: int) -> dict[str, Any]:
        self._check(at + "weight", (channels, 1, kernel))
        taps = self.weights[at + "weight"].detach().float().view(channels, kernel).t().contiguous()
        bias = self._floats(at + "bias", channels) if at + "bias" in self.weights else None
        return {"taps": self._keep(taps), "bias": bias}


def _by_parts(heads: int, sizes: list[int]) -> Tensor:
    """Rows that lie head by head, part after part."""
    rows = torch.arange(heads * sum(sizes)).view(heads, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, sizes, 1)])


@dataclass(frozen=True, slots=True)
class _Kept(Mapping[int, LayerState]):
    """The states of a tree's nodes, computed again along the path to the one that is asked for."""

    model: native.Model
    inputs: Tensor  # what the recurrent layers read of the first `rows` rows of the pass
    rows: int
    span: Span
    start: Tensor

    def __getitem__(self, node: int) -> LayerState:
        path = array("i", [self.span.first + one for one in self.span.shape.paths[node]])
        found = torch.empty_like(self.start)
        failed = native.library().fr_replay(
            ctypes.byref(self.model), self.inputs.data_ptr(), self.rows, path.buffer_info()[0], len(path),
            self.start.data_ptr(), found.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for the state of {len(path)} nodes")
        return (found,)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.span.nodes))

    def __len__(self) -> int:
        return self.span.nodes


class NativeHybrid(StatefulDecoder, NativeDecoder):
    """Implements forerun.models.base.Target."""

    reader = HybridReader

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Tensor], **placed: Unpack[NativePlacement]) -> None:
        NativeDecoder.__init__(self, config, weights, **placed)
        layers = [self._model.layer[i] for i in range(config.layers)]
        mixers = [layer.mixer.contents for layer in layers if layer.mixer]
        self._state_size = sum(native.library().fr_state_numbers(ctypes.byref(mixer)) for mixer in mixers)
        self._inputs_size = sum(mixer.wide for mixer in mixers)
        self._states = States(max(KEPT_BYTES, (placed.get("kv_memory") or 0) // 8))

    def _empty_state(self) -> State:
        return ((torch.zeros(self._state_size),),)

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        return Decoder.score(self, seqs, trees, needs, prompts)

    def _run(self, given: PassRows, layers: LayerSubset | None = None, rows: Tensor | None = None) -> list[int] | None:
        """Of the spans that are trees, a verdict may ask for any node."""
        assert layers is None and rows is None, "layers with a state do not run apart"  # noqa: PT018
        _, spans, seqs, *_, trees = given
        replayed = spans[trees - 1].end if any(span.nodes > 1 for span in spans[:trees]) else 0
        inputs = torch.empty(replayed * self._inputs_size)
        walks, made, alive = (native.Walk * len(spans))(), list[Made](), list[object]()
        for i, (seq, span) in enumerate(zip(seqs, spans, strict=True)):
            walk, ((start,),) = walks[i], self._start_state(seq, span.length)
            walk.first, walk.nodes, walk.start = span.first, span.nodes, start.data_ptr()
            if not span.shape.is_chain:
                parents = array("i", span.shape.parents)
                walk.parents = parents.buffer_info()[0]
                alive.append(parents)
            if i < trees and span.nodes > 1:
                made.append(_Kept(self._model, inputs, replayed, span, start))
                continue
            nodes = array("i", self._kept_nodes(seq, span.length, span.nodes))
            states = [torch.empty(self._state_size) for _ in nodes]
            places = array("Q", [state.data_ptr() for state in states])
            walk.kept, walk.kept_nodes, walk.states = len(nodes), nodes.buffer_info()[0], places.buffer_info()[0]
            alive += (nodes, places, start)
            made.append({node: (state,) for node, state in zip(nodes, states, strict=True)})
        one = self._pass
        one.walks, one.walk_count = walks, len(spans)
        one.inputs, one.replayed = inputs.data_ptr(), replayed
        tops = NativeDecoder._run(self, given)
        del alive
        for seq, states_of in zip(seqs, made, strict=True):
            self._states.note(seq.id, [states_of])
        return tops
