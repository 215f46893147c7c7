"""The encoder: reads sources, and makes what their decoders attend to.

A source is read by itself. It has rows enough to be worth reading the weights for, and so its bits depend on no other:
in torch the bits of a row depend on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from forerun.models.encoder_decoder.config import EncoderDecoderConfig
from forerun.models.encoder_decoder.layers import Layer, apply_part, feed_forward
from forerun.models.encoder_decoder.positions import encoder_bias
from forerun.models.encoder_decoder.weights import Model


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
