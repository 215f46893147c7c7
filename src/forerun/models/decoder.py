"""Our own decoder: a Target for the Llama, Mistral, Qwen, SmolLM, Gemma 3, Phi-3 and Mixtral families.

One pass serves prompts, trees and plain decoding: rows of all sequences share the linear layers, attention
runs per sequence. What a layer would compute like every other (rotations, masks, views of buffers and of the
KV store) is made once per pass, which is what makes a pass over one node cheap on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import InvalidInput
from forerun.models.attention import Span, attend, reach_of, view_of
from forerun.models.blocks import Block, Checkpoint
from forerun.models.config import DecoderConfig
from forerun.models.kv import KVStore
from forerun.models.layers import Rotations, add_linear_, gate, linear, rms_norm, rotate_, softcap_
from forerun.models.moe import Experts, mix
from forerun.types import Needs, Scores, Seq, TreeBatch, Verdict

TREE_MARGIN = 257  # slots beyond max_length: the root and 256 nodes, the largest budget there is
CHUNK = 512  # rows of prompts per pass


class Decoder:
    """Implements forerun.models.base.Target."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_slots: int | None,
    ) -> None:
        self.config = config
        self._device = torch.device(device)
        self._dtype = dtype
        with torch.no_grad(), torch.inference_mode(False):
            checkpoint = Checkpoint(weights, config, dtype, self._device)
            self._embedding = checkpoint.embedding()
            self._blocks = [checkpoint.block(i) for i in range(config.layers)]
            self._final_norm = checkpoint.final_norm()
            self._head = checkpoint.head(self._embedding)
        self._rotations = [Rotations(rope, self._device) for rope in config.ropes]
        self._lengths: dict[int, int] = {}  # sequence -> how long it may become
        self.kv = KVStore(
            config.layers,
            config.kv_heads,
            config.head_dim,
            dtype=dtype,
            device=self._device,
            capacity=kv_slots,
        )

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_length(self) -> int:
        return self.config.max_length

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def used_slots(self) -> int:
        """KV slots that sequences hold now."""
        return self.kv.used

    def embed(self, ids: Tensor) -> Tensor:
        """[..., D] rows of the embedding, for heads that share it."""
        return F.embedding(ids.to(self._device), self._embedding)

    def head_rows(self, ids: Tensor) -> Tensor:
        """[N, D] rows of the LM head, for heads that start from it."""
        return self._head[ids.to(self._device)]

    @torch.no_grad()
    def prefill(self, seqs: Sequence[Seq], needs: Needs) -> tuple[TreeBatch, Scores]:
        """Cache all tokens that are not cached yet but the last, in passes of at most CHUNK rows."""
        self._admit(seqs)
        extents = [self.kv.extent(seq.id) for seq in seqs]
        fresh = [seq.tokens[extent.length : -1] for seq, extent in zip(seqs, extents, strict=True)]
        chains = TreeBatch.chains(fresh, self._device)
        hidden = self._hidden_rows(needs, len(chains.tokens))
        for first, end in _cut(len(chains.tokens), CHUNK):
            pieces = []  # (sequence, its span) in this pass
            for b, extent in enumerate(extents):
                low, high = max(first, chains.starts[b]), min(end, chains.starts[b + 1])
                if low < high:
                    pieces.append((b, Span(low - first, high - first, extent.base, extent.length, None)))
            rows = {layer: out[first:end] for layer, out in hidden.items()}
            spans, owners = [span for _, span in pieces], [seqs[b] for b, _ in pieces]
            self._run(chains.tokens[first:end], spans, owners, rows)
            for b, span in pieces:
                extents[b].length += span.nodes
        return chains, Scores(None, hidden)

    @torch.no_grad()
    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs) -> Scores:
        """One pass over every node; keys and values are written behind the committed ones."""
        parents = trees.parents.tolist()
        spans = []
        for b, seq in enumerate(seqs):
            extent, (first, end) = self.kv.extent(seq.id), trees.starts[b : b + 2]
            if extent.length + end - first > extent.size:
                raise InvalidInput(
                    f"a tree of {end - first} nodes on {extent.length} tokens does not fit the {extent.size} "
                    f"slots of sequence {seq.id}: at most {TREE_MARGIN} nodes beyond its max_length"
                )
            spans.append(Span(first, end, extent.base, extent.length, parents[first:end]))
        hidden = self._hidden_rows(needs, len(trees.tokens))
        logits = torch.empty(len(trees.tokens), self.vocab_size, dtype=self._dtype, device=self._device)
        self._run(trees.tokens, spans, seqs, hidden, logits)
        logits = logits.float()
        cap = self.config.logit_softcap
        return Scores(logits if cap is None else softcap_(logits, cap), hidden)

    @torch.no_grad()
    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        paths, accepted = verdict.paths.tolist(), verdict.accepted.tolist()
        for seq, path, count in zip(seqs, paths, accepted, strict=True):
            self.kv.keep(seq.id, path[:count])

    def truncate(self, seq: Seq, length: int) -> None:
        self.kv.truncate(seq.id, length)

    def has_room(self, length: int) -> bool:
        return self.kv.has_room(length + TREE_MARGIN)

    def release(self, seq: Seq) -> None:
        self.kv.release(seq.id)
        self._lengths.pop(seq.id, None)

    def _admit(self, seqs: Sequence[Seq]) -> None:
        """Slots for all that have none yet, or for none of them."""
        new = [seq for seq in seqs if seq.id not in self._lengths]
        try:
            for seq in new:
                length = max(min(seq.max_length, self.max_length), len(seq.tokens))
                self.kv.reserve(seq.id, length + TREE_MARGIN)
                self._lengths[seq.id] = length
        except InvalidInput:
            for seq in new:
                self.release(seq)
            raise
        for seq in seqs:
            if len(seq.tokens) > (size := self.kv.extent(seq.id).size):
                raise InvalidInput(
                    f"sequence {seq.id} has {len(seq.tokens)} tokens but {size} slots: release it first"
                )

    def _hidden_rows(self, needs: Needs, rows: int) -> dict[int, Tensor]:
        """Where hidden rows will go: layer i = what enters layer i, -1 = what leaves the last norm."""
        for layer in needs.hidden_layers:
            if not -1 <= layer <= self.config.layers:
                raise InvalidInput(f"hidden layer {layer} is not one of -1 to {self.config.layers}")
        shape = rows, self.config.width
        return {
            layer: torch.empty(shape, dtype=self._dtype, device=self._device) for layer in needs.hidden_layers
        }

    @torch.inference_mode()
    def _run(
        self,
        tokens: Tensor,
        spans: Sequence[Span],
        seqs: Sequence[Seq],
        hidden: Mapping[int, Tensor],
        logits: Tensor | None = None,
    ) -> None:
        """One pass over M rows; fills the hidden rows and logits given."""
        config, data = self.config, self.kv.data
        heads, head_dim = config.heads, config.head_dim
        qkv = data.new_empty(len(tokens), (heads + 2 * config.kv_heads) * head_dim)
        found = data.new_empty(len(tokens), heads * head_dim)
        views = {}
        for window in set(config.windows):
            reaches = [reach_of(span, window, self._dtype, self._device) for span in spans]
            views[window] = [view_of(reach, data, qkv, found, heads) for reach in reaches]
        turned = qkv[:, : (heads + config.kv_heads) * head_dim].view(len(tokens), -1, head_dim)
        turns = [self._turns(i, spans, seqs) for i in range(len(config.ropes))]
        pairs = [turned[..., : rope.dims].view(*turned.shape[:2], -1, 2) for rope in config.ropes]

        x = F.embedding(tokens.to(self._device), self._embedding)  # [M, D]
        if config.embedding_scale != 1.0:
            x.mul_(torch.tensor(config.embedding_scale, dtype=self._dtype))
        for i, block in enumerate(self._blocks):
            if i in hidden:
                hidden[i].copy_(x)
            linear(rms_norm(x, block.attention_norm, config.norm_eps), block.qkv, block.qkv_bias, out=qkv)
            if block.qk_norm is not None:
                turned.copy_(rms_norm(turned, block.qk_norm, config.norm_eps))
            rope = config.layer_ropes[i]
            if rope is not None:
                rotate_(pairs[rope], turns[rope])
            for view in views[config.windows[i]]:
                attend(i, view, config.attention_scale, config.attention_softcap)
            self._leave(x, block, found)
        if config.layers in hidden:
            hidden[config.layers].copy_(x)
        if logits is not None or -1 in hidden:
            x = rms_norm(x, self._final_norm, config.norm_eps)
        if -1 in hidden:
            hidden[-1].copy_(x)
        if logits is not None:
            linear(x, self._head, out=logits)

    def _leave(self, x: Tensor, block: Block, found: Tensor) -> None:
        """From what attention found to the end of the layer: everything that works row by row, in place."""
        eps, activation = self.config.norm_eps, self.config.activation
        if block.after_attention_norm is None:
            add_linear_(x, found, block.o, block.o_bias)
        else:
            x.add_(rms_norm(linear(found, block.o, block.o_bias), block.after_attention_norm, eps))
        rows = rms_norm(x, block.mlp_norm, eps)
        mlp = block.mlp
        if isinstance(mlp, Experts):
            assert self.config.moe is not None
            x.add_(mix(rows, mlp, self.config.moe, activation))
            return
        inner = gate(linear(rows, mlp.gate_up, mlp.gate_up_bias), activation)
        if block.after_mlp_norm is None:
            add_linear_(x, inner, mlp.down, mlp.down_bias)
        else:
            x.add_(rms_norm(linear(inner, mlp.down, mlp.down_bias), block.after_mlp_norm, eps))

    def _turns(self, index: int, spans: Sequence[Span], seqs: Sequence[Seq]) -> Tensor:
        """[M, 1, R] the rotations of one rope at every row's position."""
        rotations = self._rotations[index]
        regimes = [rotations.rope.regime(self._lengths[seq.id]) for seq in seqs]
        positions = [[span.length + depth for depth in span.depths()] for span in spans]
        if len(set(regimes)) == 1:
            flat = [position for row in positions for position in row]
            return rotations.at(torch.tensor(flat, device=self._device), regimes[0])
        rows = zip(positions, regimes, strict=True)
        return torch.cat([rotations.at(torch.tensor(row, device=self._device), r) for row, r in rows])


def _cut(total: int, size: int) -> list[tuple[int, int]]:
    return [(first, min(first + size, total)) for first in range(0, total, size)]
