"""Small random checkpoints in shapes that the GPU decoder takes, and targets made of them."""

import os
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.models.config import DecoderConfig
from forerun.models.cuda.hybrid import cuda_decoder
from forerun.models.cuda.pool import make_steps
from forerun.models.cuda.target import CudaDecoder
from forerun.models.cuda.weights import WeightKind
from forerun.models.families import FAMILIES
from forerun.models.slots import KV_DTYPES
from forerun.verify.greedy import device_walk
from forerun.verify.sampled import SampledTokens

VOCAB = 200
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True, "hidden_size": 96, "num_attention_heads": 6},
    "wide-heads": {"model_type": "llama", "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "large": {  # what takes the large tiles: products split along their depth
        "model_type": "llama",
        "hidden_size": 1536,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_hidden_layers": 2,
    },
}
SHAPES["odd"] = {**SHAPES["large"], "intermediate_size": 3840}  # 30 steps deep: down is cut into five
# 96 tiles of queries, keys and values: one split
SHAPES["wide-split"] = {**SHAPES["large"], "num_attention_heads": 32, "num_key_value_heads": 8}
# as many key-value heads as large models have: batches of it have work enough for attention's whole groups
SHAPES["wide-kv"] = {"model_type": "llama", "num_attention_heads": 16, "num_key_value_heads": 8}
SHAPES["wide-qwen2"] = {**SHAPES["large"], "model_type": "qwen2"}
SHAPES["wide-qwen3"] = {**SHAPES["large"], "model_type": "qwen3"}
# fused projections and a part of each head that rotates; rotations of neighbours (named so that other seeds stay)
SHAPES["with-phi3"] = {"model_type": "phi3", "partial_rotary_factor": 0.75, "sliding_window": 9}
SHAPES["with-glm"] = {"model_type": "glm", "partial_rotary_factor": 0.5, "attention_bias": True}
# norms behind each part, GeGLU, caps, windows and ropes by layer; heads whose norms take a whole row
_GEMMA2 = {
    "model_type": "gemma2",
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
_GEMMA3 = {
    "model_type": "gemma3_text",
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "rope_local_base_freq": 100.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
SHAPES["with-gemma2"] = _GEMMA2
SHAPES["with-gemma3"] = {**_GEMMA3, "hidden_size": 96, "head_dim": 32}
SHAPES["with-glm4"] = {"model_type": "glm4", "partial_rotary_factor": 0.5, "attention_bias": True}
SHAPES["with-large-gemma2"] = {**SHAPES["large"], **_GEMMA2, "tie_word_embeddings": False}
SHAPES["with-large-gemma3"] = {
    **SHAPES["large"],
    **_GEMMA3,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "query_pre_attn_scalar": 200,
    "tie_word_embeddings": False,
}
# for contexts of several thousand tokens
SHAPES["xl-context"] = {**SHAPES["wide-heads"], "num_attention_heads": 8, "num_key_value_heads": 2}
SHAPES["xl-context"] |= {"max_position_embeddings": 8192}
# norms behind each part alone, of all heads together, a rope by layer; scaled residuals and logits
_OLMO3 = {"sliding_window": 9, "rope_parameters": {
    "full_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}}  # fmt: skip
SHAPES["z-olmo2"] = {"model_type": "olmo2"}
SHAPES["z-olmo3"] = {"model_type": "olmo3", **_OLMO3, "num_hidden_layers": 4, "head_dim": 32}
SHAPES["z-granite"] = {
    "model_type": "granite",
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
SHAPES["z-large-olmo2"] = {**SHAPES["large"], "model_type": "olmo2", "num_key_value_heads": 12}
SHAPES["z-large-granite"] = {**SHAPES["large"], **SHAPES["z-granite"]}
# layers of two sizes that share keys and values, with inputs; values that are keys
_GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 100.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
SHAPES["zz-gemma4"] = {
    **_GEMMA4,
    "hidden_size_per_layer_input": 48,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 5.0,
}
SHAPES["zz-gemma4-equal"] = {
    **_GEMMA4,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 1,
}
SHAPES["zz-large-gemma4"] = {
    **SHAPES["large"],
    **SHAPES["zz-gemma4"],
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "tie_word_embeddings": False,
}
# other rotations for texts of more than 20 tokens
SHAPES["zz-longrope"] = {
    "model_type": "phi3",
    "original_max_position_embeddings": 20,
    "rope_parameters": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [1.0, 1.3, 2.0, 2.5, 3.0, 4.0, 6.0, 9.0],
        "rope_theta": 10_000.0,
    },
}
# norms behind each part and of each head, layers without positions
SHAPES["zz-nope-exaone4"] = {"model_type": "exaone4", "sliding_window": 9, "sliding_window_pattern": 2}
# these differ from the others in the tiles of kernels alone: the plain steps have none, and take seconds for them
WIDE = (
    "xl-context",
    "wide-kv",
    "large",
    "odd",
    "wide-split",
    "wide-qwen2",
    "wide-qwen3",
    "with-large-gemma2",
    "with-large-gemma3",
    "z-large-olmo2",
    "z-large-granite",
    "zz-large-gemma4",
)
SMALL = tuple(name for name in SHAPES if name not in WIDE)
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])]


def need_cuda(device: str = "cuda") -> None:
    """Skip where there is no GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def where_kernels_run() -> torch.device:
    """A GPU, or a CPU where kernels run in Triton's interpreter; skips where there is neither."""
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        return torch.device("cpu")
    if not torch.cuda.is_available() or find_spec("triton") is None:
        pytest.skip("needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1)")
    return torch.device("cuda")


def fused_on_a_cpu(target: CudaDecoder, monkeypatch: pytest.MonkeyPatch) -> CudaDecoder:
    """A target on a CPU whose passes run the kernels, in Triton's interpreter."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    target.passes.steps = make_steps("triton", target.model, target.buffers, target.kv.data, target.kv.scales)
    return target


def make_reference(name: str, seed: int | None = None) -> Any:
    """transformers' model of a shape, fp32, with norms and biases that are not trivial."""
    settings = {**_BASE, **SHAPES[name]}
    torch.manual_seed(sorted(SHAPES).index(name) if seed is None else seed)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.normal_(0.0, 0.6 / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 0.2)
            if "norm" in key and not FAMILIES[config.model_type].norm_offset:
                weight.add_(1.0)
            if "q_norm" in key and config.model_type == "gemma4_text":
                weight.mul_(0.1)  # its scores are not scaled: sharp ones would amplify what bfloat16 rounds
        for key, buffer in model.named_buffers():
            if "layer_scalar" in key:
                buffer.uniform_(0.7, 1.3)
    return model


def rounding(name: str, tokens: Tensor, last: int) -> float:
    """How far transformers' own logits of the last tokens are off in bfloat16: random weights may amplify rounding."""
    model = make_reference(name)
    with torch.no_grad():
        wanted = model(tokens, use_cache=False).logits[0, -last:]
        rounded = model.bfloat16()(tokens, use_cache=False).logits[0, -last:].float()
    return float((rounded - wanted).abs().max())


def weights_of(model: Any) -> tuple[DecoderConfig, dict[str, Tensor]]:
    values = {**model.config.to_dict(), "model_type": model.config.model_type}
    return DecoderConfig.from_hf(values), dict(model.state_dict())


def make_target(
    name: str,
    device: str,
    dtype: torch.dtype = torch.float32,
    kernels: Literal["auto", "triton", "torch"] = "auto",
    kv_slots: int = 20_000,
    weight_kind: WeightKind = "plain",
    seed: int | None = None,
    samples: bool = True,
) -> CudaDecoder:
    """`name` is one of SHAPES; with a KV cache of 8 bits: SHAPE+int8 or SHAPE+fp8."""
    name, _, kept = name.partition("+")
    config, weights = weights_of(make_reference(name, seed))
    return cuda_decoder(config)(
        config,
        weights,
        dtype=dtype,
        device=device,
        kv_slots=kv_slots,
        kv_dtype=KV_DTYPES[kept] if kept else None,
        kernels=kernels,
        weight_kind=weight_kind,
        greedy_walk=device_walk(torch.device(device)),
        sampling=SampledTokens() if samples else None,
    )
