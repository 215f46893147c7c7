"""The steps of a pass in plain torch: for machines without Triton, and what the kernels are tested against."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.cuda.network import Buffers, Layer, Model, Run
from forerun.models.cuda.packed import times
from forerun.models.cuda.plan import split_start
from forerun.models.pages import PAGE

_ROWS = 16  # rows of attention at a time, at least: keys are gathered per row
_GATHERED = 1 << 18  # keys and values that are gathered at a time, where more rows than that fit


class PlainSteps:
    """Implements forerun.models.cuda.network.Steps."""

    def __init__(self, model: Model, buffers: Buffers, kv: Tensor) -> None:
        self.model, self.buffers, self.kv = model, buffers, kv  # kv [L, 2, Hkv, S, D]
        # of this pass: a run, a window, what they see
        self._seen: tuple[Run, int, Tensor, Tensor] | None = None

    def embed(self, run: Run) -> None:
        self.buffers.x[: run.size.rows] = F.embedding(run.tokens.long(), self.model.embedding).float()

    def qkv(self, run: Run, layer: int) -> None:
        if layer == 0:  # another pass: its integers lie where those of the last one lay
            self._seen = None
        config, weights = self.model.config, self.model.layers[layer]
        rows, heads, dim = run.size.rows, config.heads, config.head_dim
        found = times(self._into_attention(run, weights), weights.qkv)
        if weights.qkv_bias is not None:
            found = found + weights.qkv_bias
        found = found.view(rows, -1, dim).float()
        rotated = found[:, : heads + config.kv_heads]
        if weights.qk_norm is not None:
            rotated = F.rms_norm(rotated, (dim,), None, config.norm_eps) * weights.qk_norm.float()
        if weights.rope is not None:
            rotated = _rotate(rotated, weights.rope[run.positions.long()])
        self.buffers.queries[:rows] = rotated[:, :heads].flatten(1).to(self.model.dtype)
        there = run.slots >= 0
        slots = run.slots[there].long()
        self.kv[layer, 0][:, slots] = rotated[there, heads:].transpose(0, 1).to(self.model.dtype)
        values = found[there, heads + config.kv_heads :]
        self.kv[layer, 1][:, slots] = values.transpose(0, 1).to(self.model.dtype)

    def attend(self, run: Run, layer: int) -> None:
        """Gather what every row sees, by position, and attend to it a few rows at a time."""
        config = self.model.config
        table, seen = self._seen_by(run, self.model.layers[layer].window)  # [rows, P]
        keys, values = self.kv[layer, 0], self.kv[layer, 1]
        shape = run.size.rows, config.kv_heads, -1, config.head_dim
        queries = self.buffers.queries[: run.size.rows].view(shape)
        rows, longest = table.shape
        self.buffers.found[rows : run.size.rows] = 0.0  # padding
        step = max(_ROWS, _GATHERED // (config.kv_heads * config.head_dim * longest))
        for low in range(0, rows, step):
            some = slice(low, min(low + step, rows))
            k = keys[:, table[some]].float()  # [Hkv, m, P, D]
            # slots that nothing was written to may hold NaN, which a weight of 0 does not take away
            v = values[:, table[some]].float().masked_fill(~seen[some, :, None], 0.0)
            scores = torch.einsum("mhgd,hmpd->mhgp", queries[some].float(), k) * config.attention_scale
            scores = scores.masked_fill(~seen[some, None, None], float("-inf"))
            found = torch.einsum("mhgp,hmpd->mhgd", scores.softmax(-1), v)
            self.buffers.found[some] = found.flatten(1).to(self.model.dtype)

    def _seen_by(self, run: Run, window: int) -> tuple[Tensor, Tensor]:
        """What `_slots_seen` says, which is the same for all layers of a window."""
        if self._seen is None or self._seen[0] is not run or self._seen[1] != window:
            self._seen = (run, window, *_slots_seen(run, window))
        return self._seen[2:]

    def leave_attention(self, run: Run, layer: int) -> None:
        rows = run.size.rows
        self.buffers.x[:rows] += times(self.buffers.found[:rows], self.model.layers[layer].o).float()

    def gate(self, run: Run, layer: int) -> None:
        weights, rows = self.model.layers[layer], run.size.rows
        both = times(self._normed(run, weights.mlp_norm), weights.gate_up).view(rows, -1, 2)
        self.buffers.inner[:rows] = F.silu(both[..., 0]) * both[..., 1]

    def leave_mlp(self, run: Run, layer: int) -> None:
        rows = run.size.rows
        self.buffers.x[:rows] += times(self.buffers.inner[:rows], self.model.layers[layer].down).float()

    def normalise(self, run: Run, into: Tensor) -> None:
        into[: run.size.rows] = self._normed(run, self.model.final_norm)

    def head(self, run: Run) -> None:
        found = times(self._normed(run, self.model.final_norm), self.model.head)
        self.buffers.logits[: run.size.rows] = found.float()

    def head_of_normed(self, run: Run) -> None:
        rows = run.size.rows
        self.buffers.logits[:rows] = times(self.buffers.rows[:rows], self.model.head).float()

    def on(self, model: Model) -> PlainSteps:
        steps = copy.copy(self)
        steps.model = model
        return steps

    def woken(self) -> list[int]:
        return []

    def _into_attention(self, run: Run, weights: Layer) -> Tensor:
        return self._normed(run, weights.attention_norm)

    def _normed(self, run: Run, weight: Tensor) -> Tensor:
        normed = F.rms_norm(self.buffers.x[: run.size.rows], weight.shape, None, self.model.config.norm_eps)
        return (normed * weight.float()).to(self.model.dtype)


def _rotate(pairs: Tensor, rotations: Tensor) -> Tensor:
    """Rotate neighbours [m, H, D] by cosines and sines [m, R, 2]; dimensions beyond 2R stay."""
    dims = 2 * rotations.shape[1]
    even, odd = pairs[..., 0:dims:2], pairs[..., 1:dims:2]
    cos, sin = rotations[:, None, :, 0], rotations[:, None, :, 1]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((rotated, pairs[..., dims:]), -1)


def _slots_seen(run: Run, window: int) -> tuple[Tensor, Tensor]:
    """[rows, P] the slot of every position of a row, and whether it is seen; from the groups, as the kernel.

    Without the padding behind the last row that sees something.
    """
    ints, positions = run.ints.cpu().numpy(), run.positions.cpu().numpy()
    longest = int(positions.max()) + 1
    table = np.zeros((run.size.rows, longest), dtype=np.int64)
    seen = np.zeros((run.size.rows, longest), dtype=np.bool_)
    for low, high, first, count, base, length, ancestors, pages in run.groups.tolist():
        own, start = positions[first : first + count, None], split_start(low)
        end = min(split_start(high), int(own.max(initial=-1)) + 1)
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
    device = run.ints.device
    return torch.from_numpy(table[:rows]).to(device), torch.from_numpy(seen[:rows]).to(device)
