"""SourceTeacher: a frozen encoder-decoder of transformers that shows a drafter its rows, a batch at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.models.encoder_decoder.config import EncoderDecoderConfig, supports
from forerun.models.load.checkpoint import Checkpoint
from forerun.models.load.tokenizer import read_json
from forerun.train.data.corpus import Batch

_BANNED = -1e4  # a logit that no other falls below, and finite: gradients stay numbers


class SourceTeacher:
    """Encoder and decoder, batched with padding: what a drafter learns need not have the bits of decoding."""

    def __init__(self, model: Any, config: EncoderDecoderConfig, device: torch.device) -> None:
        self.config, self._model = config, model.to(device).eval().requires_grad_(False)
        self.weights: Mapping[str, Tensor] = model.state_dict()
        self.head: Tensor = model.get_output_embeddings().weight.detach()  # [V, D]
        bias = self.weights.get("final_logits_bias")
        # [V] of the law that is drafted for: tokens that the model's own settings ban are not to be learnt
        self.bias: Tensor = (
            torch.zeros(len(self.head), device=device) if bias is None else bias.flatten().clone()
        )
        laws = config.source_rules.laws
        self.bias[[word[0] for word in (() if laws is None else laws.bad_words) if len(word) == 1]] = _BANNED
        self.start = config.source_rules.start

    @torch.no_grad()
    def read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[B, T, D] the encoder's rows at the places of each source, and the decoder's at those before its output.

        Sequences are a source and its output; elsewhere the rows are zero.
        """
        tokens, learnt = batch.tokens, batch.learnt.to(batch.tokens.device)
        count, length = tokens.shape
        sources = torch.where(learnt.any(1), learnt.int().argmax(1), 1)  # [B]
        places = torch.arange(length, device=tokens.device)
        longest, outputs = int(sources.max()), int(learnt.sum(1).max())
        mask = (places < sources[:, None])[:, :longest]
        ids = torch.where(mask, tokens[:, :longest], self.start)
        encoder, decoder = self._model.get_encoder(), self._model.get_decoder()
        encoded = encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        # the decoder reads its start token where the source ends, and then the output but for its last token
        at = sources[:, None] - 1 + torch.arange(max(1, outputs), device=tokens.device)  # [B, O]
        inside = at < length
        at = at.clamp(max=length - 1)
        read = tokens.gather(1, at)
        read[:, 0] = self.start
        rows = decoder(
            input_ids=read, encoder_hidden_states=encoded, encoder_attention_mask=mask.long(), use_cache=False
        ).last_hidden_state
        whole = rows.new_zeros(2, count, length, rows.shape[-1])
        whole[0, :, :longest] = encoded * mask[:, :, None]
        whole[1].scatter_add_(1, at[:, :, None].expand_as(rows), rows * inside[:, :, None])
        return whole[0], whole[1]


def load_source_teacher(checkpoint: Checkpoint, device: torch.device) -> SourceTeacher:
    """The teacher of an encoder-decoder's folder."""
    if not supports(checkpoint.config):
        raise InvalidInput(
            "specdec drafts for encoder-decoders (T5, Marian); for a decoder use dflash or eagle3"
        )
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(str(checkpoint.path), dtype=torch.float32)
    config = EncoderDecoderConfig.from_hf(
        checkpoint.config, read_json(checkpoint.path / "generation_config.json")
    )
    return SourceTeacher(model, config, device)
