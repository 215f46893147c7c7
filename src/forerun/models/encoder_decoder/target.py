"""EncoderDecoder: a T5 or Marian model as a Target. The encoder reads a request's source once, when it is prefilled.

The tokens of a sequence are the decoder's: its start token, and what was written. Keys and values of the source are
kept beside them and shared by all nodes of its trees. A sequence that was released, after a round that failed, is read
again from its source. A sequence without a source, such as the cost model's probes, gets one of a single token.
On a CPU it runs on the native kernels, elsewhere in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.request import SourceRules
from forerun.core.tree import chain_of
from forerun.core.types import Needs, Prompts, Scores, Seq, TreeBatch, Verdict, first_rows, offsets
from forerun.models.encoder_decoder.config import EncoderDecoderConfig
from forerun.models.encoder_decoder.decoder import DecoderPass, Encoder, SequenceCache, Span
from forerun.models.encoder_decoder.weights import Reader
from forerun.models.load.checkpoint import Checkpoint
from forerun.models.load.tokenizer import read_json
from forerun.models.native import library as native
from forerun.models.native.packing import FloatMode
from forerun.models.slots import UnpagedTarget

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
    """`dtype` as the user gave it: q8 needs the native kernels, one byte per weight on a GPU is not supported."""
    if dtype in ("int8", "fp8", "gguf"):
        raise InvalidInput(f"dtype={dtype!r} is not for encoder-decoders; use float32, bfloat16 or q8")
    config = EncoderDecoderConfig.from_hf(checkpoint.config, read_json(checkpoint.path / "generation_config.json"))
    mode = _MODES.get(dtype) if device.type == "cpu" and native.available() else None
    if mode is None and dtype == "q8":
        raise InvalidInput(f"dtype='q8' needs a CPU and the native kernels: {native.why_not() or 'use float32'}")
    kept = torch.float32 if mode is not None else torch_dtype(dtype, device)
    return EncoderDecoder(config, checkpoint.weights, dtype=kept, device=device, mode=mode, kv_slots=kv_slots)
