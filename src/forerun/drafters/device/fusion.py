"""Loads an EAGLE head or an MTP layer for the GPU: its layers as a network, and the fusion of the target's features."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters.device.growth import HeadOutput
from forerun.drafters.device.head import HeadModel, HeadNet, HeadWeights, LayerWeights
from forerun.drafters.heads.eagle_head import EagleConfig
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.models.config import DecoderConfig
from forerun.models.cuda.device_trees import LastRound
from forerun.models.cuda.network import HEAD_DIMS
from forerun.models.cuda.target import CudaDecoder
from forerun.models.cuda.weights import WeightKind, interleaved
from forerun.models.layers import pair_up
from forerun.models.pages import TREE_MARGIN

# than the target's: padding has some, and drafts are written behind all sequences
MORE_SLOTS = 3 * TREE_MARGIN
WIDE = 1024  # from this width on reading a head's weights is what a level costs, and one byte each is enough


class FeatureFusion:
    """What a row carries: the target's features of a true row, the head's own output of a drafted one."""

    def __init__(self, config: EagleConfig, weights: Mapping[str, Tensor], model: HeadModel) -> None:
        def get(name: str) -> Tensor:
            return weights[name].detach().to(model.device, model.dtype)

        self.layers, self.feature_width, self._eps = config.layers, config.feature_width, config.norm_eps
        self._fc = get("fc.weight") if config.kind == "eagle3" else None
        self._bias = get("fc.bias") if config.kind == "eagle3" and "fc.bias" in weights else None
        count = len(config.layers) if config.fc_norm else 0
        self._norms = [get(f"fc_norm.{i}.weight") for i in range(count)]
        self._input_norm = get("input_norm.weight") if config.norm_before_fc else None
        self._output_norm = model.final_norm.float() if config.norm_output else None

    def fuse(self, features: Tensor) -> Tensor:
        """[N, F] of the target -> [N, D]; EAGLE-1 and MTP carry the target's own row."""
        if self._fc is None:
            return features
        if self._input_norm is not None:
            features = F.rms_norm(features, features.shape[-1:], self._input_norm, self._eps)
        if self._norms:
            parts = zip(features.chunk(len(self._norms), -1), self._norms, strict=True)
            features = torch.cat([F.rms_norm(part, norm.shape, norm, self._eps) for part, norm in parts], -1)
        fused = features @ self._fc.t()
        return fused if self._bias is None else fused + self._bias

    def carry(self, out: Tensor) -> Tensor:
        """[N, D] fp32 outputs -> what the rows behind them carry."""
        if self._output_norm is None:
            return out
        return F.rms_norm(out, out.shape[-1:], self._output_norm, self._eps)


def why_not(config: EagleConfig, target: object) -> str:
    """Why a head cannot draft on the device; empty where it can."""
    if not isinstance(target, CudaDecoder):
        return "the target is not our decoder on a GPU"
    if config.head_dim not in HEAD_DIMS or config.width % 16 or config.inner % 16:
        return (
            f"head_dim={config.head_dim}, width={config.width} or inner={config.inner} do not fit the kernels"
        )
    return ""


def make_net(
    config: EagleConfig,
    weights: Mapping[str, Tensor],
    target: CudaDecoder,
    kind: WeightKind | None = None,
) -> tuple[HeadNet, FeatureFusion, HeadOutput, LastRound]:
    """A head for a target; weights of one byte by default where the head is wide and kernels can read them."""
    if kind is None:
        bytes_pay = config.kind != "eagle" and config.width >= WIDE and target.kernels == "triton"
        kind = "int8" if bytes_pay else "plain"
    rows = len(weights["lm_head.weight"]) if "lm_head.weight" in weights else config.draft_vocab_size
    vocabulary = DraftVocabulary.from_file(weights, rows, config.vocab_size).to(target.device)
    parts = _head_weights(config, weights, target, vocabulary)
    shape = _decoder_config(config, target.max_length, rows, parts.layers[0].qk_norm is not None)
    model = HeadModel(
        shape, parts, target.model.dtype, target.device, kind,
        config.norm_before_residual,
    )  # fmt: skip
    net = HeadNet(model, target.kv.capacity + MORE_SLOTS, target.kernels)
    worth = config.calibration
    head_output = HeadOutput(vocabulary.ids, math.log(worth.scale), worth.power)
    return net, FeatureFusion(config, weights, model), head_output, target.grown.last


def _head_weights(
    config: EagleConfig, weights: Mapping[str, Tensor], target: CudaDecoder, vocabulary: DraftVocabulary
) -> HeadWeights:
    own = weights.get("embed_tokens.weight")
    narrows = weights.get("embed_proj.weight")  # of a head that is narrower than its target
    if narrows is not None:
        table = target.model.embedding
        own = torch.cat([part @ narrows.to(table).t() for part in torch.split(table, 1 << 14)])
    head = weights.get("lm_head.weight")
    mixes, unused = config.kind == "eagle", torch.ones(config.width)
    norms = (
        ("enorm", "hnorm") if config.kind == "mtp" else ("midlayer.input_layernorm", "midlayer.hidden_norm")
    )
    token_norm, feature_norm = (weights.get(f"{name}.weight", unused) for name in norms)
    prefixes = ["midlayer.", *(f"layers.{i}." for i in range(1, config.depth))]
    return HeadWeights(
        embedding=target.model.embedding if own is None else own,
        token_norm=token_norm,
        feature_norm=feature_norm,
        layers=[_layer_weights(config, weights, prefix, unused) for prefix in prefixes],
        norm=weights.get("norm.weight"),
        head=target.shared().head_rows(vocabulary.ids) if head is None else head,
        mix=weights["fc.weight"] if mixes else None,
        mix_bias=weights.get("fc.bias") if mixes else None,
        entry=weights["fc.weight"] if config.kind == "mtp" else None,
    )


def _layer_weights(
    config: EagleConfig, weights: Mapping[str, Tensor], at: str, unused: Tensor
) -> LayerWeights:
    dims = config.head_dim
    q, k, v = (weights[f"{at}self_attn.{name}_proj.weight"] for name in "qkv")
    gates = [weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    qk_norm = None
    if f"{at}self_attn.q_norm.weight" in weights:
        norms = [pair_up(weights[f"{at}self_attn.{name}_norm.weight"], dims, dims) for name in "qk"]
        counts = config.heads, config.kv_heads
        qk_norm = torch.cat([norm.expand(count, -1) for norm, count in zip(norms, counts, strict=True)])
    return LayerWeights(
        input_norm=weights.get(f"{at}input_layernorm.weight", unused),
        qkv=torch.cat((pair_up(q, dims, dims), pair_up(k, dims, dims), v)),
        o=weights[f"{at}self_attn.o_proj.weight"],
        mlp_norm=weights[f"{at}post_attention_layernorm.weight"],
        gate_up=interleaved(torch.cat(gates)),
        down=weights[f"{at}mlp.down_proj.weight"],
        qk_norm=qk_norm,
    )


def _decoder_config(config: EagleConfig, longest: int, rows: int, qk_norm: bool) -> DecoderConfig:
    """The head as a model whose vocabulary is the draft's."""
    return DecoderConfig.from_hf(
        {
            "model_type": "qwen3" if qk_norm else "llama",
            "vocab_size": rows,
            "hidden_size": config.width,
            "intermediate_size": config.inner,
            "num_hidden_layers": config.depth,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": min(config.max_length, longest),
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "tie_word_embeddings": False,
        }
    )
