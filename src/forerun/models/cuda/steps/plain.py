"""The steps of a pass in plain torch: for machines without Triton, and what the kernels are tested against."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.config import DecoderConfig
from forerun.models.cuda.adapters import ROWS
from forerun.models.cuda.network import Buffers, Layer, Model, Run, shaped, store_of, turned, written_sizes
from forerun.models.cuda.plan import split_start
from forerun.models.cuda.states import KEEPS, PARENTS, Trace, windows_of
from forerun.models.cuda.weights import ExpertWeights, Packed, Weight, part_of
from forerun.models.hybrid.attention import EPS
from forerun.models.hybrid.mixers import Memory
from forerun.models.layers import activate, by_expert, clamped_gate, norm_heads_, route, softcap_
from forerun.models.pages import PAGE

_ROWS = 16  # rows of attention at a time, at least: keys are gathered per row
_GATHERED = 1 << 18  # keys and values that are gathered at a time, where more rows than that fit


class PlainSteps:
    """Implements forerun.models.cuda.network.Steps."""

    def __init__(self, model: Model, buffers: Buffers, kv: Tensor, scales: Tensor | None = None) -> None:
        self.model, self.buffers, self.kv = model, buffers, kv  # kv [L, 2, Hkv, S, D]
        self.scales = scales  # [L, 2, Hkv, S] of keys and values of 8 bits
        # of this pass: a run, a window, what they see
        self._seen: tuple[Run, int, Tensor, Tensor] | None = None
        self._written: tuple[Run, Tensor, Tensor] | None = None  # a run, its rows that are written, their slots

    def embed(self, run: Run) -> None:
        rows, scale = F.embedding(run.tokens.long(), self.model.embedding), self.model.config.embedding_scale
        if scale != 1.0:
            rows = rows * torch.tensor(scale, dtype=rows.dtype)
        self.buffers.x[: run.size.rows] = rows.float()
        if (turns := self.buffers.page_turns) is not None:
            moved = torch.where(run.slots < 0, 0, turns[(run.slots // PAGE).clamp_(min=0).long()])
            self.buffers.turned[: run.size.rows] = run.positions + moved

    def qkv(self, run: Run, layer: int) -> None:
        if layer == 0:  # another pass: its integers lie where those of the last one lay
            self._seen = self._written = None
        config, weights = self.model.config, self.model.layers[layer]
        rows, heads, (kv_heads, dim) = run.size.rows, config.heads, written_sizes(config, layer)
        given = self._into_attention(run, weights)
        found = self._adapted(run, layer, "qkv", given, times(given, weights.qkv))
        if weights.qkv_bias is not None:
            found = found + weights.qkv_bias
        found = found.view(rows, -1, dim).float()
        if weights.qk_norm is not None:
            normed = found[:, : len(weights.qk_norm)]
            norm_heads_(normed, weights.qk_norm.float(), heads, config.qk_norm == "all", config.norm_eps)
        rotated = found[:, : heads + kv_heads]
        if weights.rope is not None:
            rotated = _rotate(rotated, weights.rope[turned(self.buffers, run).long()])
        asking = shaped(self.buffers.queries, heads * dim)
        asking[:rows] = rotated[:, :heads].flatten(1).to(asking.dtype)
        if not kv_heads:
            return
        there, slots = self._written_by(run)
        keys, values, into = rotated[:, heads:], found[:, heads + kv_heads :], store_of(self.kv, config, layer)
        for part, new in enumerate((keys, values)):
            those, store = new.index_select(0, there).transpose(0, 1), into[part]
            if self.scales is None:
                store.index_copy_(1, slots, those.to(self.model.dtype))
            else:
                numbers, scales = in_bytes(those, store.dtype)
                store.view(torch.int8).index_copy_(1, slots, numbers.view(torch.int8))
                self.scales[layer, part].index_copy_(1, slots, scales)

    def attend(self, run: Run, layer: int) -> None:
        """Gather what every row sees, by position, and attend to it a few rows at a time."""
        config, sinks = self.model.config, self.model.layers[layer].sinks
        table, hidden = self._seen_by(run, self.model.layers[layer].window)  # [rows, P], [1, rows, 1, P]
        (kv_heads, dim), given, out = config.kv_sizes(layer), self.buffers.queries, self.buffers.found
        given, out = shaped(given, config.heads * dim), shaped(out, config.heads * dim)
        queries = given[: run.size.rows].view(run.size.rows, kv_heads, -1, dim).transpose(0, 1)  # [Hkv, m, group, D]
        rows, longest = table.shape
        out[rows : run.size.rows] = 0.0  # padding
        step = max(_ROWS, _GATHERED // (kv_heads * dim * longest))
        for low in range(0, rows, step):
            some = slice(low, min(low + step, rows))
            slots, wide = table[some].flatten(), (kv_heads, -1, longest, dim)
            k, v = (self._rows_at(layer, part, slots).view(wide) for part in range(2))
            asked, mask = queries[:, some].float(), hidden[:, some]
            if config.attention_softcap is None and sinks is None:
                found = F.scaled_dot_product_attention(asked, k, v, mask, scale=config.attention_scale)
            else:
                found = _capped(asked, k, v, mask, config, sinks)
            out[some] = found.transpose(0, 1).flatten(1).to(self.model.dtype)

    def _rows_at(self, layer: int, part: int, slots: Tensor) -> Tensor:
        """[Hkv, N, D] fp32 keys (part 0) or values in these slots."""
        store = store_of(self.kv, self.model.config, layer)[part]
        if self.scales is None:
            return store.index_select(1, slots).float()
        numbers = store.view(torch.int8).index_select(1, slots).view(store.dtype)
        return from_bytes(numbers, self.scales[layer, part].index_select(1, slots))

    def _written_by(self, run: Run) -> tuple[Tensor, Tensor]:
        if self._written is None or self._written[0] is not run:
            there = (run.slots >= 0).nonzero()[:, 0]
            self._written = run, there, run.slots[there].long()
        return self._written[1:]

    def _seen_by(self, run: Run, window: int) -> tuple[Tensor, Tensor]:
        """What `_slots_seen` says, which is the same for all layers of a window."""
        if self._seen is None or self._seen[0] is not run or self._seen[1] != window:
            self._seen = (run, window, *_slots_seen(run, window))
        return self._seen[2:]

    def leave_attention(self, run: Run, layer: int) -> None:
        weights = self.model.layers[layer]
        given = shaped(self.buffers.found, weights.o.shape[1])[: run.size.rows]
        found = self._adapted(run, layer, "o", given, times(given, weights.o))
        self._add(found, weights.after_attention_norm)

    def gate(self, run: Run, layer: int) -> None:
        weights, rows = self.model.layers[layer], run.size.rows
        given = self._entering(run, weights.mlp_norm)
        both = self._adapted(run, layer, "gate", given, times(given, weights.gate_up)).view(rows, -1, 2)
        shaped(self.buffers.inner, both.shape[1])[:rows] = (
            activate(both[..., 0], self.model.config.activation) * both[..., 1]
        )

    def leave_mlp(self, run: Run, layer: int) -> None:
        weights = self.model.layers[layer]
        given = shaped(self.buffers.inner, weights.down.shape[1])[: run.size.rows]
        self._add(self._adapted(run, layer, "down", given, times(given, weights.down)), weights.after_mlp_norm)

    def _add(self, found: Tensor, norm: Tensor | None) -> None:
        """To the residual stream, normed where the layer norms it."""
        found = found.float()
        if norm is not None:
            found = F.rms_norm(found, norm.shape, norm.float(), self.model.config.norm_eps)
        self.buffers.x[: len(found)].add_(found, alpha=self.model.config.residual_scale)

    def normalise(self, run: Run, into: Tensor) -> None:
        into[: run.size.rows] = self._normed(run, self.model.final_norm)

    def head(self, run: Run) -> None:
        self._put_logits(self._normed(run, self.model.final_norm))

    def head_of_normed(self, run: Run) -> None:
        self._put_logits(self.buffers.rows[: run.size.rows])

    def _put_logits(self, rows: Tensor) -> None:
        found, cap = times(rows, self.model.head).float(), self.model.config.logit_softcap
        found *= self.model.config.logit_scale
        self.buffers.logits[: len(rows)] = found if cap is None else softcap_(found, cap)

    def on(self, model: Model) -> PlainSteps:
        steps = copy.copy(self)
        steps.model = model
        return steps

    def active_experts(self) -> list[int]:
        return []

    def _adapted(self, run: Run, layer: int, product: str, given: Tensor, found: Tensor) -> Tensor:
        """What a product gave, with what adapters add to its rows."""
        if run.adapted is None:
            return found
        stacks, found = self.buffers.adapters, found.float()
        stack, shape = stacks.layers[layer][product], stacks.shapes[product]
        for slot, *some in run.adapted.table.view(-1, ROWS + 1).tolist():
            rows = [row for row in some if 0 <= row < len(given)]
            if slot < 0 or not rows:
                continue
            middle = torch.einsum("mk,prk->mpr", given[rows].float(), stack.down[slot].float()) * stacks.scales[slot]
            ups = torch.split(stack.up[slot].float(), list(shape.outputs))
            parts = [middle[:, part] @ up.t() for part, up in enumerate(ups)]
            added = torch.stack(parts, -1).flatten(1) if product == "gate" else torch.cat(parts, 1)
            found[rows] += added
        return found.to(given.dtype)

    def _into_attention(self, run: Run, weights: Layer) -> Tensor:
        return self._entering(run, weights.attention_norm)

    def _entering(self, run: Run, weight: Tensor) -> Tensor:
        """Rows of the residual stream as attention and feed-forward layers read them."""
        if self.model.config.norms.before_attention is None:
            return self.buffers.x[: run.size.rows].to(self.model.dtype)
        return self._normed(run, weight)

    def _normed(self, run: Run, weight: Tensor) -> Tensor:
        normed = F.rms_norm(self.buffers.x[: run.size.rows], weight.shape, None, self.model.config.norm_eps)
        return (normed * weight.float()).to(self.model.dtype)


def in_bytes(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [.., D] fp32 as numbers of 8 bits, and the scale of each: its largest number's share of 127 or 448.

    Scales are numbers that float16 has, rounded up, in fp32. A row that holds something else than numbers has no finite
    scale, so that this is not lost.
    """
    sizes = torch.where(rows.isnan(), torch.inf, rows.abs())
    wanted = sizes.amax(-1) / (127.0 if dtype == torch.int8 else 448.0)
    scales = wanted.half()
    scales = torch.where(scales.float() < wanted, (scales.view(torch.int16) + 1).view(torch.half), scales).float()
    steps = rows * torch.where(scales > 0, 1 / scales, 0.0)[..., None]
    return (steps.round() if dtype == torch.int8 else steps).to(dtype), scales


def from_bytes(numbers: Tensor, scales: Tensor) -> Tensor:
    """The rows [.., D] fp32 that attention reads: products of numbers of 8 bits and their scales, in float16."""
    return (numbers.float() * scales[..., None]).half().float()


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, config: DecoderConfig, sinks: Tensor | None) -> Tensor:
    """Attention [Hkv, m, group, D] whose scores have a cap, or whose heads have sinks."""
    scores = (q @ k.transpose(-1, -2)).mul_(config.attention_scale)
    if config.attention_softcap is not None:
        scores = softcap_(scores, config.attention_softcap)
    scores += mask
    if sinks is not None:
        own = sinks.float().view(len(q), 1, -1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, own), -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


def _rotate(pairs: Tensor, rotations: Tensor) -> Tensor:
    """Rotate neighbours [m, H, D] by cosines and sines [m, R, 2]; dimensions beyond 2R stay."""
    dims = 2 * rotations.shape[1]
    turned = torch.view_as_complex(pairs[..., :dims].reshape(*pairs.shape[:-1], -1, 2))
    rotated = torch.view_as_real(turned * torch.view_as_complex(rotations)[:, None]).flatten(-2)
    return rotated if dims == pairs.shape[-1] else torch.cat((rotated, pairs[..., dims:]), -1)


def _slots_seen(run: Run, window: int) -> tuple[Tensor, Tensor]:
    """[rows, P] the slot of each position of a row, [1, rows, 1, P] -inf where it is not seen. From the groups.

    Without the padding behind the last row that sees something. A position that is not seen has the slot of the row's
    last one, which was written: others may hold NaN, which a weight of 0 does not take away.
    """
    ints, positions = run.ints.cpu().numpy(), run.positions.cpu().numpy()
    longest = int(positions.max()) + 1
    table = np.zeros((run.size.rows, longest), dtype=np.int64)
    seen = np.zeros((run.size.rows, longest), dtype=np.bool_)
    for low, high, first, count, base, length, ancestors, pages in run.groups.tolist():
        own, start = positions[first : first + count, None], split_start(low)
        end = min(split_start(high), int(own.max(initial=-1)) + 1)
        if run.size.tiled and ancestors:  # a single node, from the tile on in which its tree starts
            start, end = length // PAGE * PAGE, int(own.max(initial=-1)) + 1
        elif run.size.tiled and base:  # of a tree that branches
            base, end = 0, min(end, length // PAGE * PAGE)
        if end <= start:
            continue
        at = np.arange(start, end)
        written = np.where(at < length, at, length + ints[ancestors + np.maximum(at - length, 0)])
        slots = ints[pages + written // PAGE] * PAGE + written % PAGE if pages else base + written
        part, there = np.s_[first : first + count, start:end], at <= own
        table[part] = np.where(there, slots, table[part])
        seen[part] |= there & (at > own - window) if window else there
    sees = seen.any(-1)
    rows = int(np.flatnonzero(sees)[-1]) + 1 if sees.any() else 0
    seen[~sees, 0] = True  # padding between rows: something finite that is never read
    table, seen, last = table[:rows], seen[:rows], positions[:rows, None].astype(np.int64)
    table = np.where(seen, table, np.take_along_axis(table, last, 1))
    hidden = np.where(seen[None, :, None], np.float32(0.0), np.float32(-np.inf))
    return torch.from_numpy(table).to(run.ints.device), torch.from_numpy(hidden).to(run.ints.device)


class PlainExpertSteps(PlainSteps):
    """Implements forerun.models.cuda.network.Steps."""

    def __init__(self, model: Model, buffers: Buffers, kv: Tensor, scales: Tensor | None = None) -> None:
        super().__init__(model, buffers, kv, scales)
        self._active_experts = [0] * len(model.layers)

    def active_experts(self) -> list[int]:
        return list(self._active_experts)

    def gate(self, run: Run, layer: int) -> None:
        if self.model.layers[layer].experts is None:
            super().gate(run, layer)

    def leave_mlp(self, run: Run, layer: int) -> None:
        weights = self.model.layers[layer]
        if weights.experts is None:
            super().leave_mlp(run, layer)
            return
        live = (run.slots >= 0).nonzero().flatten()  # padding would only activate experts
        if weights.experts.biases is not None:
            self.buffers.x[live] += weights.experts.biases.before
        rows = self._normed(run, weights.mlp_norm)[live]
        self.buffers.x[live] += self._mix(rows, weights.experts, layer)

    def _mix(self, rows: Tensor, experts: ExpertWeights, layer: int) -> Tensor:
        moe = self.model.config.moe
        assert moe is not None
        count = moe.experts
        biases = experts.biases
        router_bias = None if biases is None else biases.router.to(rows.dtype)
        weights, picked = route(rows, experts.router[:count], moe, router_bias, experts.correction)
        out = torch.zeros(rows.shape, device=rows.device)
        self._active_experts[layer] = len(set(picked.flatten().tolist()))
        for expert, places, ranks in by_expert(picked, count):
            gate_up, down = part_of(experts.gate_up, expert, count), part_of(experts.down, expert, count)
            if biases is None:
                found = _feed_forward(rows[places], gate_up, down)
            else:
                assert moe.clamp is not None
                both = times(rows[places], gate_up) + biases.gate_up.view(count, -1)[expert].to(rows.dtype)
                opened = clamped_gate(torch.cat((both[:, ::2], both[:, 1::2]), 1), *moe.clamp)
                found = times(opened, down).float() + biases.down.view(count, -1)[expert]
            out[places] += found * weights[places, ranks, None].float()
        if experts.shared_gate_up is not None and experts.shared_down is not None:
            found = _feed_forward(rows, experts.shared_gate_up, experts.shared_down)
            out += found * times(rows, experts.router[count:]).float().sigmoid() if moe.shared_gate else found
        return out


def _feed_forward(rows: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    both = times(rows, gate_up).view(len(rows), -1, 2)
    return times(F.silu(both[..., 0]) * both[..., 1], down).float()


class PlainSizedSteps(PlainSteps):
    """Implements forerun.models.cuda.network.Steps for layers of different sizes, which may have inputs and an end."""

    def embed(self, run: Run) -> None:
        super().embed(run)
        inputs, config = self.model.inputs, self.model.config
        if inputs is None:
            return
        given = self.buffers.x[: run.size.rows].to(self.model.dtype)
        made = times(given, inputs.projection).float().view(run.size.rows, -1, len(inputs.norm)) * config.width**-0.5
        made = F.rms_norm(made, inputs.norm.shape, inputs.norm.float(), config.norm_eps)
        own = F.embedding(run.tokens.long(), inputs.table).view_as(made)
        own = own * torch.tensor(len(inputs.norm) ** 0.5, dtype=own.dtype)
        self._inputs = (made + own.float()) * 0.5**0.5  # [rows, L, P]

    def leave_mlp(self, run: Run, layer: int) -> None:
        super().leave_mlp(run, layer)
        end, rows, x = self.model.layers[layer].end, run.size.rows, self.buffers.x
        assert end is not None
        if end.gate is not None and end.projection is not None:
            opened = activate(times(x[:rows].to(self.model.dtype), end.gate).float(), self.model.config.activation)
            gated = (opened * self._inputs[:rows, layer]).to(self.model.dtype)
            self._add(times(gated, end.projection), end.norm)
        x[:rows] *= end.scale


class PlainRecurrentSteps(PlainExpertSteps):
    """Implements forerun.models.cuda.network.Steps for models some of whose layers keep a state."""

    def embed(self, run: Run) -> None:
        super().embed(run)
        self._seen = self._written = None

    def qkv(self, run: Run, layer: int) -> None:
        weights, rows, states = self.model.layers[layer], run.size.rows, self.buffers.states
        own, given = weights.recurrent, self._into_attention(run, weights)
        if weights.opens is not None:
            self._behind = times(given, weights.opens)
        if own is None:
            super().qkv(run, layer)
            return
        assert states is not None
        made = times(given, weights.qkv)
        if own.memory is None:
            joined, self._behind, inner = made.chunk(3, -1)
            joined = joined * inner
        else:
            values = own.memory.values
            sizes = [states.channels, values, made.shape[1] - states.channels - values]
            joined, self._behind, self._steps = torch.split(made, sizes, -1)
        states.joined[own.index, :rows] = joined

    def attend(self, run: Run, layer: int) -> None:
        weights, rows, states = self.model.layers[layer], run.size.rows, self.buffers.states
        own = weights.recurrent
        if own is None:
            super().attend(run, layer)
            return
        assert states is not None
        links, inputs = states.links[:, :rows], states.inputs[:, own.index]
        windows = windows_of(states.joined[own.index, :rows], links[PARENTS], inputs)
        kept, mixed = (links[KEEPS] >= 0).nonzero()[:, 0], (windows * own.taps).sum(1)
        inputs[links[KEEPS, kept].long()] = windows[kept, 1:]
        mixed = (mixed if own.bias is None else mixed + own.bias).to(self.model.dtype)
        if own.memory is None:
            found = self._behind * mixed
        else:
            prepared = own.memory.prepare(mixed, self._steps)
            states.prepared[own.index, :rows, : prepared.shape[1]] = prepared
            found = self._walk(own.memory, prepared, links, states.memories[:, own.index])
            found = own.memory.finish(found.to(self.model.dtype), self._behind)
        shaped(self.buffers.found, weights.o.shape[1])[:rows] = found

    def _walk(self, memory: Memory, prepared: Tensor, links: Tensor, places: Tensor) -> Tensor:
        """[rows, Hv Dv] what every row finds in its memory."""
        found, made = list[Tensor](), list[Tensor]()
        for row, (parent, keep) in enumerate(zip(links[PARENTS].tolist(), links[KEEPS].tolist(), strict=True)):
            before = places[-1 - parent] if parent < 0 else made[parent]
            state, read = memory.step(before, prepared[row])
            made.append(state)
            found.append(read)
            if keep >= 0:
                places[keep] = state
        return torch.stack(found)

    def leave_attention(self, run: Run, layer: int) -> None:
        weights, rows = self.model.layers[layer], run.size.rows
        if weights.opens is not None:
            found = shaped(self.buffers.found, weights.o.shape[1])[:rows]
            found.mul_(self._behind[:rows].float().sigmoid().to(found.dtype))
        super().leave_attention(run, layer)

    def keep_states(self, trace: Trace, rows: Tensor, places: Tensor) -> None:
        states, there = self.buffers.states, places >= 0
        assert states is not None
        layers = [layer.recurrent for layer in self.model.layers if layer.recurrent is not None]
        for own, joined, prepared in zip(layers, trace.joined, trace.prepared, strict=True):
            links = trace.links[:, : len(joined)].clone()
            windows = windows_of(joined, links[PARENTS], states.inputs[:, own.index])
            states.inputs[places[there].long(), own.index] = windows[rows[there], 1:]
            if own.memory is None:
                continue
            links[KEEPS] = -1
            links[KEEPS, rows[there]] = places[there].to(links.dtype)
            wide = own.memory.heads * (2 * own.memory.config.key_dim + 2) + own.memory.values
            self._walk(own.memory, prepared[:, :wide], links, states.memories[:, own.index])


class PlainLatentSteps(PlainExpertSteps):
    """Implements forerun.models.cuda.network.Steps for latent attention."""

    def qkv(self, run: Run, layer: int) -> None:
        if layer == 0:
            self._seen = self._written = None
        config, weights, rows = self.model.config, self.model.layers[layer], run.size.rows
        latent, own = config.latent, weights.latent
        assert latent is not None
        assert own is not None
        assert weights.rope is not None
        made = times(self._into_attention(run, weights), weights.qkv).float()
        short, cached = made[:, : -latent.row], made[:, -latent.row :]
        if own.queries is not None and own.query_norm is not None:
            normed = F.rms_norm(short, own.query_norm.shape, own.query_norm.float(), EPS).to(self.model.dtype)
            short = times(normed, own.queries).float()
        turns = weights.rope[turned(self.buffers, run).long()]
        heads = short.view(rows, config.heads, -1)
        plain, rotated = heads[..., : latent.key_dim], _rotate(heads[..., latent.key_dim :].contiguous(), turns)
        asked = torch.einsum("mhn,hcn->mhc", plain.to(self.model.dtype), own.keys).float()
        self.buffers.queries[:rows] = torch.cat((asked, rotated), -1).flatten(1).to(self.model.dtype)
        normed = F.rms_norm(cached[:, : latent.rank], own.norm.shape, own.norm.float(), EPS)
        both = torch.cat((normed, _rotate(cached[:, None, latent.rank :].contiguous(), turns)[:, 0]), 1)
        there, slots = self._written_by(run)
        self.kv[layer, 0, 0].index_copy_(0, slots, both.index_select(0, there).to(self.model.dtype))

    def attend(self, run: Run, layer: int) -> None:
        config, latent, out = self.model.config, self.model.config.latent, self.buffers.found
        assert latent is not None
        table, hidden = self._seen_by(run, 0)
        out = shaped(out, config.heads * latent.rank)
        out[: run.size.rows] = 0.0
        queries = self.buffers.queries[: run.size.rows].view(run.size.rows, config.heads, -1).float()
        for row, slots in enumerate(table):
            cached = self.kv[layer, 0, 0].index_select(0, slots).float()
            scores = queries[row] @ cached.t() * config.attention_scale + hidden[0, row]
            out[row] = (scores.softmax(-1) @ cached[:, : latent.rank]).flatten().to(self.model.dtype)

    def leave_attention(self, run: Run, layer: int) -> None:
        config, weights, rows = self.model.config, self.model.layers[layer], run.size.rows
        latent, own = config.latent, weights.latent
        assert latent is not None
        assert own is not None
        found = shaped(self.buffers.found, config.heads * latent.rank)[:rows].view(rows, config.heads, -1)
        given = torch.einsum("mhc,hvc->mhv", found, own.values).flatten(1)
        self._add(times(given, weights.o), weights.after_attention_norm)


def times(rows: Tensor, weight: Weight) -> Tensor:
    """rows [M, K] by a weight [N, K], in plain torch."""
    if isinstance(weight, Tensor):
        return rows @ weight.t()
    assert isinstance(weight, Packed)
    return ((rows @ weight.data.to(rows.dtype).t()) * weight.scales).to(rows.dtype)
