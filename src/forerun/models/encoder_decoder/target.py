"""EncoderDecoder: a T5 or Marian model as a Target. The encoder reads a request's source once, when it is prefilled.

The tokens of a sequence are the decoder's: its start token, and what was written. Keys and values of the source are
kept beside them and shared by all nodes of its trees. A sequence that was released, after a round that failed, is read
again from its source. A sequence without a source, such as the cost model's probes, gets one of a single token.
On a CPU it runs on the native kernels, elsewhere in torch.

Every node's attention is computed by itself, over exactly the keys that it would see in plain decoding and in their
order, so its bits are the same in a tree, in a chain and alone; the linear layers see to the rest (layers.py). A source
is read by itself, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.request import SourceRules
from forerun.core.tree import Topology, chain_of
from forerun.core.types import Needs, Prompts, Scores, Seq, TreeBatch, Verdict, first_rows, offsets
from forerun.models.encoder_decoder.config import EncoderDecoderConfig
from forerun.models.encoder_decoder.layers import (
    Layer,
    Model,
    Reader,
    apply_part,
    decoder_bias,
    encoder_bias,
    feed_forward,
)
from forerun.models.layers import check_numbers
from forerun.models.load.checkpoint import Checkpoint
from forerun.models.load.tokenizer import read_json
from forerun.models.native import library as native
from forerun.models.native.packing import FloatMode
from forerun.models.slots import UnpagedTarget


@dataclass(frozen=True, slots=True)
class Span:
    first: int
    end: int
    cache: SequenceCache
    shape: Topology


@dataclass(frozen=True, slots=True)
class _Node:
    """What one node sees in every layer: the first `seen` slots, or these slots where they do not lie in a row."""

    row: int
    cache: SequenceCache
    seen: int
    slots: Tensor | None
    bias: Tensor | None  # [1, H, 1, N]


class DecoderPass:
    """Runs passes; what it keeps between them is T5's table of distances."""

    def __init__(self, config: EncoderDecoderConfig, model: Model) -> None:
        self.config, self.model = config, model
        self._distances = torch.empty(0, 0)  # [H, N]

    def run(self, tokens: list[int], spans: Sequence[Span], hidden: Mapping[int, Tensor]) -> Tensor:
        """[M, D] the rows that leave the decoder; fills the hidden rows asked for."""
        config, stack = self.config, self.model.decoder
        last = config.max_length - 1  # what is drafted past the context is never accepted
        places = [min(s.cache.length + depth, last) for s in spans for depth in s.shape.depths]
        x = stack.embed(tokens, places, config.embedding_scale)
        for span in spans:
            span.cache.reserve(span.end - span.first)
        nodes = [node for span in spans for node in self._nodes(span)]
        for i, layer in enumerate(stack.layers):
            if i in hidden:
                hidden[i].copy_(x)
            x = self._layer(i, layer, x, spans, nodes)
        if config.decoder.layers in hidden:
            hidden[config.decoder.layers].copy_(x)
        if stack.final_norm is not None:
            x = stack.final_norm(x)
        if -1 in hidden:
            hidden[-1].copy_(x)
        return x

    def logits(self, rows: Tensor, largest_only: bool = False) -> Tensor:
        """[M, V] in fp32; where only the largest of each row is wanted, the others may be estimates below it."""
        scale, bias, screen = self.config.head_scale, self.model.head_bias, self.model.screen
        rows = rows if scale == 1.0 else rows * scale
        if largest_only and screen is not None:
            largest = screen.largest(rows)
            if largest is not None:
                return largest
        found = self.model.head(rows)
        return check_numbers((found if bias is None else found.add_(bias)).float())

    def _layer(self, i: int, layer: Layer, x: Tensor, spans: Sequence[Span], nodes: Sequence[_Node]) -> Tensor:
        config, cross, part = self.config, layer.cross, layer.feed_forward
        assert cross is not None, "a decoder layer attends to the source"
        heads, size, first = config.decoder.heads, config.head_dim, config.norms_first

        def attend(rows: Tensor) -> Tensor:
            qkv = layer.attention.inputs(rows).view(len(rows), 3, heads, size)
            for span in spans:
                start, made = span.cache.length, qkv[span.first : span.end, 1:]  # [M_b, 2, H, Dh]
                span.cache.data[i, :, :, start : start + len(made)] = made.permute(1, 2, 0, 3)
            found = torch.empty_like(rows[:, :1]).expand(-1, heads * size).contiguous()
            for node in nodes:
                found[node.row] = self._attend(i, node, qkv[node.row, 0])
            return layer.attention.output(found)

        def attend_source(rows: Tensor) -> Tensor:
            queries = cross.inputs(rows).view(len(rows), heads, 1, size)
            found = [self._attend_source(i, span, queries[span.first : span.end]) for span in spans]
            return cross.output(torch.cat(found))

        x = apply_part(x, layer.attention.norm, first, attend)
        x = apply_part(x, cross.norm, first, attend_source)
        return apply_part(x, part.norm, first, lambda rows: feed_forward(rows, part, config))

    def _attend(self, i: int, node: _Node, query: Tensor) -> Tensor:
        """[H, Dh] of one node -> [H Dh]."""
        data = node.cache.data[i]
        seen = data[:, :, : node.seen] if node.slots is None else data.index_select(2, node.slots)
        keys, values = seen.unsqueeze(1).unbind(0)
        found = F.scaled_dot_product_attention(
            query[None, :, None], keys, values, attn_mask=node.bias, scale=self.config.attention_scale
        )
        return found.reshape(-1)

    def _attend_source(self, i: int, span: Span, queries: Tensor) -> Tensor:
        """[M_b, H, 1, Dh] -> [M_b, H Dh]: every node is a batch of its own, on the same keys."""
        keys, values = span.cache.source[i].unsqueeze(1).expand(-1, len(queries), -1, -1, -1).unbind(0)
        found = F.scaled_dot_product_attention(queries, keys, values, scale=self.config.attention_scale)
        return found.reshape(len(queries), -1)

    def _nodes(self, span: Span) -> list[_Node]:
        cache, nodes = span.cache, list[_Node]()
        for i, path in enumerate(span.shape.paths):
            seen, slots = cache.length + len(path), None
            if path[-1] != len(path) - 1:  # an ancestor is missing in between: not the nodes 0 to i
                slots = torch.tensor(
                    [*range(cache.length), *(cache.length + node for node in path)], device=cache.data.device
                )
            nodes.append(_Node(span.first + i, cache, seen, slots, self._bias(seen)))
        return nodes

    def _bias(self, seen: int) -> Tensor | None:
        table, relative = self.model.decoder.bias, self.config.relative
        if table is None or relative is None:
            return None
        if self._distances.shape[1] < seen:
            self._distances = decoder_bias(table, 2 * seen, relative)
        return self._distances[None, :, None, -seen:]


class Encoder:
    """From sources to the keys and values of the decoder's cross attention."""

    def __init__(self, config: EncoderDecoderConfig, model: Model) -> None:
        self.config, self.model = config, model
        self._biases: dict[int, Tensor] = {}  # by length

    def read(self, source: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[L, 2, H, S, Dh]: keys and values for each decoder layer; and the rows [S, D] that they are made of."""
        config, stack = self.config, self.model.encoder
        x = stack.embed(list(source), list(range(len(source))), config.embedding_scale)
        bias = self._bias(len(source))
        for layer in stack.layers:
            x = self._layer(layer, x, bias)
        if stack.final_norm is not None:
            x = stack.final_norm(x)
        made = self.model.cross(x)
        shape = len(x), config.decoder.layers, 2, config.decoder.heads, config.head_dim
        return made.view(shape).permute(1, 2, 3, 0, 4).contiguous(), x

    def _layer(self, layer: Layer, x: Tensor, bias: Tensor | None) -> Tensor:
        config, part = self.config, layer.feed_forward

        def attend(rows: Tensor) -> Tensor:
            qkv = layer.attention.inputs(rows).view(len(rows), 3, config.encoder.heads, config.head_dim)
            return layer.attention.output(_attend(qkv, bias, config.attention_scale))

        x = apply_part(x, layer.attention.norm, config.norms_first, attend)
        return apply_part(x, part.norm, config.norms_first, lambda rows: feed_forward(rows, part, config))

    def _bias(self, length: int) -> Tensor | None:
        """[H, S, S] of T5; kept for the lengths that recur."""
        table, relative = self.model.encoder.bias, self.config.relative
        if table is None or relative is None:
            return None
        if length not in self._biases:
            if len(self._biases) > 64:
                self._biases.clear()
            self._biases[length] = encoder_bias(table, length, relative)
        return self._biases[length]


def _attend(qkv: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """[S, 3, H, Dh] of one source -> [S, H Dh]."""
    q, k, v = qkv.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)  # [1, H, S, Dh] each
    mask = None if bias is None else bias.unsqueeze(0)
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return found[0].transpose(0, 1).reshape(len(qkv), -1)


STEP = 64  # slots that a cache grows by


class SequenceCache:
    """Committed slots first, the nodes of the last pass behind them; growing keeps what is committed."""

    def __init__(self, source: Tensor, encoded: Tensor) -> None:
        self.source = source  # [L, 2, H, S, Dh]
        self.encoded = encoded  # [S, D] what the encoder made of it
        layers, _, heads, _, head_dim = source.shape
        self.data = source.new_empty(layers, 2, heads, 0, head_dim)
        self.length = 0  # committed slots

    def reserve(self, nodes: int) -> None:
        """Slots for `nodes` nodes behind the committed ones."""
        have, wanted = self.data.shape[3], self.length + nodes
        if wanted > have:
            grown = self.data.new_empty(*self.data.shape[:3], -(-wanted // STEP) * STEP, self.data.shape[4])
            grown[:, :, :, : self.length] = self.data[:, :, :, : self.length]
            self.data = grown

    @torch.inference_mode()  # its tensors are made in that mode
    def keep(self, path: Sequence[int]) -> None:
        """Commit the root and these nodes of the last pass: each moves behind the one before it."""
        places = list(enumerate(path, start=1))
        moves = [(self.length + node, self.length + i) for i, node in places if node != i]
        if moves:
            device = self.data.device
            source, to = (torch.tensor(column, device=device) for column in zip(*moves, strict=True))
            self.data[:, :, :, to] = self.data[:, :, :, source]
        self.length += 1 + len(path)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)


CHUNK = 512  # rows of prompts per pass


class EncoderDecoder(UnpagedTarget):
    """Implements forerun.models.base.Target. `kv_slots` limits the decoder's tokens; sources come on top."""

    def __init__(
        self,
        config: EncoderDecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        mode: FloatMode | None = None,  # of the native kernels; None = torch
        kv_slots: int | None = None,
    ) -> None:
        self.config, self._dtype, self.device = config, dtype, torch.device(device)
        self.slots, self._promised, self._mode = kv_slots, 0, mode
        self.vocab_size, self.max_length = config.vocab_size, config.max_length
        self.source_rules: SourceRules = config.source_rules
        with torch.no_grad(), torch.inference_mode(False):
            model = Reader(weights, config, dtype, self.device, mode).model()
        self._encoder, self._decoder = Encoder(config, model), DecoderPass(config, model)
        self._caches: dict[int, SequenceCache] = {}

    @property
    def used_slots(self) -> int:
        return sum(cache.length for cache in self._caches.values())

    @property
    def pass_rows(self) -> int:
        return CHUNK

    def prefill(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> tuple[TreeBatch, Scores]:
        """Encode the sources of new sequences, and cache the tokens that a sequence read again has written."""
        self._admit(seqs)
        fresh = [seq.tokens[self._caches[seq.id].length : -1] for seq in seqs]
        fresh = fresh if rows is None else first_rows(fresh, rows)
        starts = offsets([len(tokens) for tokens in fresh])
        hidden = self._empty_rows(needs, starts[-1])
        for seq, tokens, start in zip(seqs, fresh, starts, strict=False):
            cache = self._caches[seq.id]
            for first in range(0, len(tokens), CHUNK):
                some, at = tokens[first : first + CHUNK], start + first
                into = {layer: out[at : at + len(some)] for layer, out in hidden.items()}
                self._run(some, [Span(0, len(some), cache, chain_of(len(some)))], into)
                cache.length += len(some)
        encoded = [self._caches[seq.id].encoded for seq in seqs] if needs.encoded else None
        return TreeBatch.chains(fresh, self.device), Scores(None, hidden, encoded=encoded)

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        """One pass over every node; sources of new sequences are encoded before it."""
        read = None if prompts is None else self.prefill(prompts.seqs, needs, prompts.rows)
        self._admit(seqs)
        tokens, shapes, starts = trees.to_host()[0], trees.topology(), trees.starts
        spans = [Span(starts[b], starts[b + 1], self._caches[seq.id], shapes[b]) for b, seq in enumerate(seqs)]
        hidden = self._empty_rows(needs, trees.nodes)
        rows = self._run(tokens, spans, hidden)
        with torch.inference_mode():
            logits = self._decoder.logits(rows, needs.largest_only)
        return Scores(logits, hidden, read=read)

    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        for seq, path in zip(seqs, verdict.to_host()[0], strict=True):
            self._caches[seq.id].keep(path)
        self._promised = 0

    def truncate(self, seq: Seq, length: int) -> None:
        if seq.id in self._caches:
            self._caches[seq.id].truncate(length)

    def cached_tokens(self, seq: Seq) -> int:
        cache = self._caches.get(seq.id)
        return 0 if cache is None else cache.length

    def release(self, seq: Seq) -> None:
        self._caches.pop(seq.id, None)

    def _admit(self, seqs: Sequence[Seq]) -> None:
        """Read the sources of sequences that are not known yet; all are known then, or none."""
        new = [seq for seq in seqs if seq.id not in self._caches]
        if not new:
            return
        rules = self.source_rules
        sources = [tuple(seq.source) or (rules.start,) for seq in new]
        if too_long := next((len(source) for source in sources if len(source) > rules.longest), None):
            raise InvalidInput(f"a source of {too_long} tokens; the encoder reads {rules.longest} at most")
        with torch.inference_mode():
            self._match_threads()
            made = [self._encoder.read(source) for source in sources]
        self._caches |= {seq.id: SequenceCache(*rows) for seq, rows in zip(new, made, strict=True)}

    @torch.inference_mode()
    def _run(self, tokens: list[int], spans: Sequence[Span], hidden: Mapping[int, Tensor]) -> Tensor:
        self._match_threads()
        return self._decoder.run(tokens, spans, hidden)

    def _match_threads(self) -> None:
        if self._mode is not None:
            native.match_threads(torch.get_num_threads())

    def _empty_rows(self, needs: Needs, count: int) -> dict[int, Tensor]:
        """[count, D] for every hidden layer needed: i = what enters layer i, -1 = what leaves the last norm."""
        for layer in needs.hidden_layers:
            if not -1 <= layer <= self.config.decoder.layers:
                raise InvalidInput(f"hidden layer {layer} is not one of -1 to {self.config.decoder.layers}")
        shape = count, self.config.width
        return {layer: torch.empty(shape, dtype=self._dtype, device=self.device) for layer in needs.hidden_layers}


_MODES: dict[str, FloatMode] = {"auto": "float32", "float32": "float32", "q8": "q8"}


def load_encoder_decoder(
    checkpoint: Checkpoint,
    dtype: str,
    torch_dtype: Callable[[str, torch.device], torch.dtype],
    device: torch.device,
    kv_slots: int | None,
) -> EncoderDecoder:
    """`dtype` as the user gave it: q8 needs the native kernels, fewer bits per weight on a GPU are not supported."""
    if dtype in ("int8", "fp8", "w4", "gguf"):
        raise InvalidInput(f"dtype={dtype!r} is not for encoder-decoders; use float32, bfloat16 or q8")
    config = EncoderDecoderConfig.from_hf(checkpoint.config, read_json(checkpoint.path / "generation_config.json"))
    mode = _MODES.get(dtype) if device.type == "cpu" and native.available() else None
    if mode is None and dtype == "q8":
        raise InvalidInput(f"dtype='q8' needs a CPU and the native kernels: {native.why_not() or 'use float32'}")
    kept = torch.float32 if mode is not None else torch_dtype(dtype, device)
    return EncoderDecoder(config, checkpoint.weights, dtype=kept, device=device, mode=mode, kv_slots=kv_slots)
