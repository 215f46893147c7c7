"""EagleHead: an EAGLE head's weights, and one pass of its layers over any rows, in torch.

Row t of the head is made of the target's feature of token t and the embedding of token t + 1 (one step ahead of
the feature), and predicts token t + 2. Steps beyond the committed sequence use the head's own output as
the feature. The caller decides what a row attends to.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters.eagle.config import EagleConfig
from forerun.drafters.eagle.layer import Attend, HeadLayer
from forerun.drafters.head_shape import checked_shared, vocabulary_of
from forerun.drafters.matrix import Matrix
from forerun.models.layers import Rotations, rms_norm
from forerun.models.rope import RopeConfig
from forerun.models.shared import SharedWeights


class EagleHead:
    """Weights of one head, and its layers."""

    def __init__(
        self,
        config: EagleConfig,
        weights: Mapping[str, Tensor],
        shared: SharedWeights | None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)

        def get(name: str) -> Tensor:
            return weights[name].detach().to(self.device, dtype).contiguous()

        def matrix(weight: Tensor) -> Matrix:  # exact: packed heads run natively
            return Matrix(weight, packed=False)

        def maybe(name: str) -> Tensor | None:
            return get(name) if name in weights else None

        with torch.no_grad(), torch.inference_mode(False):
            self._fc, self._fc_bias = matrix(get("fc.weight")), maybe("fc.bias")
            prefixes = ["midlayer.", *(f"layers.{i}." for i in range(1, config.depth))]
            self._layers = [
                HeadLayer(config, weights, prefix, i, dtype, self.device) for i, prefix in enumerate(prefixes)
            ]
            self._norm = maybe("norm.weight")
            self._fc_norms = [get(f"fc_norm.{i}.weight") for i in range(len(config.layers)) if config.fc_norm]
            self._input_norm = get("input_norm.weight") if config.norm_before_fc else None
            self.vocabulary = vocabulary_of(config, weights).to(self.device)
            self._embedding = maybe("embed_tokens.weight")
            self._embed_proj = maybe("embed_proj.weight")  # of a head that is narrower than its target
            self._shared = checked_shared(config, weights, shared)
            self._lm_head = matrix(self._own_or_shared_head(maybe("lm_head.weight")))
        rope = RopeConfig("default", config.rope_theta, config.head_dim, config.max_length)
        self._rotations = Rotations(rope, self.device)
        self._rotation_table = self._rotations.at(torch.arange(256, device=self.device), 0)  # [P, 1, R]

    def fuse(self, features: Tensor) -> Tensor:
        """[N, F] of the target -> [N, D], what a row carries of them."""
        if self.config.kind == "eagle":
            return features
        features = features.to(self.dtype)
        if self._input_norm is not None:
            features = rms_norm(features, self._input_norm, self.config.norm_eps)
        if self._fc_norms:
            parts = zip(features.chunk(len(self._fc_norms), -1), self._fc_norms, strict=True)
            features = torch.cat([rms_norm(part, norm, self.config.norm_eps) for part, norm in parts], -1)
        return self._through_fc(features)

    def run(self, tokens: Tensor, carried: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass over N rows -> their output [N, D], before any norm."""
        config, eps, first = self.config, self.config.norm_eps, self._layers[0]
        embedded, rotations = self._embed(tokens), self._rotations_at(positions)
        if config.kind == "eagle":
            into = self._through_fc(torch.cat((embedded, carried.to(self.dtype)), -1))
            x = into.clone()
        else:
            assert first.input_norm is not None and first.feature_norm is not None  # noqa: PT018
            normed = rms_norm(carried, first.feature_norm, eps)
            into = torch.cat((rms_norm(embedded, first.input_norm, eps), normed), -1)
            x = normed.clone() if config.norm_before_residual else carried.clone()
        x = first.run(x, into, rotations, attend)
        for layer in self._layers[1:]:
            x = layer.behind(x, rotations, attend)
        return x

    def logits(self, out: Tensor) -> Tensor:
        """[N, Vd] fp32 of what follows the rows with these outputs."""
        return self._lm_head.times(self._normed(out)).float()

    def carry(self, out: Tensor) -> Tensor:
        """What the next row carries after a row with this output."""
        return self._normed(out) if self.config.norm_output else out

    def _normed(self, out: Tensor) -> Tensor:
        return out if self._norm is None else rms_norm(out, self._norm, self.config.norm_eps)

    def _rotations_at(self, positions: Tensor) -> Tensor:
        last = int(positions.max()) if self.device.type == "cpu" else len(self._rotation_table)
        if self.device.type != "cpu":
            return self._rotations.at(positions, 0)
        if last >= len(self._rotation_table):
            self._rotation_table = self._rotations.at(torch.arange(2 * (last + 1)), 0)
        return self._rotation_table[positions]

    def _through_fc(self, rows: Tensor) -> Tensor:
        out = self._fc.times(rows)
        return out if self._fc_bias is None else out.add_(self._fc_bias)

    def _own_or_shared_head(self, own: Tensor | None) -> Tensor:
        if own is not None:
            return own
        assert self._shared is not None
        return self._shared.head_rows(self.vocabulary.ids).to(self.device, self.dtype).contiguous()

    def _embed(self, tokens: Tensor) -> Tensor:
        """[N, D]"""
        if self._embedding is not None:
            return F.embedding(tokens, self._embedding)
        assert self._shared is not None
        rows = self._shared.embed(tokens).to(self.dtype)
        return rows if self._embed_proj is None else F.linear(rows, self._embed_proj)
