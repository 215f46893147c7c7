"""HeadLayer: one transformer layer of an EAGLE head or of a multi-token-prediction layer, in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from forerun.drafters.head_shape import HeadShape
from forerun.drafters.matrix import Matrix
from forerun.models.layers import gate, pair_up, rms_norm, rotate_

# q [N, H, Dh], k and v [N, Hkv, Dh] of a layer, and which layer it is -> [N, H Dh]
Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class HeadLayer:
    """Weights under `prefix`, in one precision on one device, and a pass over any rows."""

    def __init__(
        self,
        config: HeadShape,
        weights: Mapping[str, Tensor],
        prefix: str,
        index: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config, self._index, dims = config, index, config.head_dim

        def get(name: str) -> Tensor:
            return weights[prefix + name].detach().to(device, dtype).contiguous()

        def maybe(name: str) -> Tensor | None:
            return get(name) if prefix + name in weights else None

        q, k, v = (get(f"self_attn.{name}_proj.weight") for name in "qkv")
        # exact: packed heads run natively
        self._qkv = Matrix(torch.cat((pair_up(q, dims, dims), pair_up(k, dims, dims), v)), packed=False)
        self._o = Matrix(get("self_attn.o_proj.weight"), packed=False)
        gates = [get(f"mlp.{name}_proj.weight") for name in ("gate", "up")]
        self._gate_up = Matrix(torch.cat(gates), packed=False)
        self._down = Matrix(get("mlp.down_proj.weight"), packed=False)
        self._mlp_norm = get("post_attention_layernorm.weight")
        self.input_norm, self.feature_norm = maybe("input_layernorm.weight"), maybe("hidden_norm.weight")
        self._qk_norm: Tensor | None = None
        if prefix + "self_attn.q_norm.weight" in weights:
            norms = [pair_up(get(f"self_attn.{name}_norm.weight"), dims, dims) for name in "qk"]
            heads = zip(norms, (config.heads, config.kv_heads), strict=True)
            self._qk_norm = torch.cat([norm.expand(count, -1) for norm, count in heads])

    def run(self, x: Tensor, into: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        """Rows x [N, D], whose attention reads `into`, through the layer; x may be overwritten."""
        config, eps = self._config, self._config.norm_eps
        qkv = self._qkv.times(into).view(len(into), -1, config.head_dim)
        both = config.heads + config.kv_heads
        turned, v = qkv[:, :both], qkv[:, both:]
        if self._qk_norm is not None:
            turned = rms_norm(turned, self._qk_norm, eps)
        rotate_(torch.unflatten(turned, -1, (-1, 2)), rotations)
        x = self._o.add_to(x, attend(turned[:, : config.heads], turned[:, config.heads :], v, self._index))
        inner = gate(self._gate_up.times(rms_norm(x, self._mlp_norm, eps)), "silu")
        return self._down.add_to(x, inner)

    def behind(self, x: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        """As an ordinary layer, which reads the rows themselves behind its norm."""
        assert self.input_norm is not None
        return self.run(x, rms_norm(x, self.input_norm, self._config.norm_eps), rotations, attend)
