"""Times a pass over one node and over 32 of models of real shapes with random weights, some with fewer layers.

    python -m tests.gpu.family_times
    python -m tests.gpu.family_times --tiny --device cpu

A row says what computes the model, and for each number of nodes the milliseconds of a pass, the bytes that it must read
and its share of the measured copy rate; then how much longer 32 nodes take than one. Of experts, as many count as
uniform choices wake. Passes of the Triton decoder are replays of captured graphs; other decoders are timed with the
host.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from forerun.cli.bench import words
from forerun.core.errors import UnsupportedModel
from forerun.core.types import Needs, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.cuda.hybrid import cuda_decoder
from forerun.models.cuda.network import check_supported
from forerun.models.cuda.target import CudaDecoder
from forerun.models.decoder import Decoder
from forerun.models.hybrid.target import torch_decoder
from forerun.models.load.shapes import expected_shapes
from forerun.testing import FakeSeq
from forerun.verify.greedy import device_walk
from lab.gpu.rounds import seconds_of

_GLM = {
    "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
    "num_hidden_layers": 12, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_local_experts": 32, "num_experts_per_tok": 4,
    },
    "gemma-3-12b": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 3840, "intermediate_size": 15360,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "sliding_window": 1024, "max_position_embeddings": 131072,
    },
    "glm-4.5-air": _GLM,  # 46 layers
    "qwen3-next-80b": {  # 48 layers
        "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
        "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "deepseek-v3": {  # 61 layers, of which three are dense
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 4, "num_attention_heads": 128, "first_k_dense_replace": 1,
    },
    "gemma-4-e2b": {
        "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "sliding_window_pattern": 5,
        "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
    },
    "gemma-4-31b": {
        "model_type": "gemma4_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "sliding_window": 1024,
        "attention_k_eq_v": True, "num_global_key_value_heads": 4, "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    },
    "glm-4.7-flash": {  # 47 layers
        "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
        "num_hidden_layers": 16, "num_attention_heads": 20,
    },
    "olmo-2-7b": {
        "model_type": "olmo2", "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096,
    },
    "granite-3.3-8b": {
        "model_type": "granite", "vocab_size": 49159, "hidden_size": 4096, "intermediate_size": 12800,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22,
        "logits_scaling": 16.0, "tie_word_embeddings": True,
    },
}  # fmt: skip
_TINY = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_hidden_layers": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "n_routed_experts": 16, "num_local_experts": 16, "num_experts": 16, "kv_lora_rank": 32, "q_lora_rank": 32,
    "global_head_dim": 32, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0, "layer_types": None,
}  # fmt: skip
CONTEXT, MANY = 64, 32


class RandomFamily(Mapping[str, Tensor]):
    """Weights of any family, made on the device when they are read."""

    def __init__(self, config: DecoderConfig, device: str) -> None:
        self.shapes, self.device = dict(expected_shapes(config, {})), device  # type: ignore[arg-type]
        self.in_fours = config.family == "gpt_oss"  # whose checkpoints have experts in MXFP4

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, name: str) -> Tensor:
        size = self.shapes[name]
        new = torch.ones(size, dtype=torch.bfloat16, device=self.device)
        if self._is_in_fours(name):
            return new.random_(-4, 5) * 2.0 ** -round(math.log2(size[-1]) / 2 + 2)
        return new.normal_(0.0, 0.7 / size[-1] ** 0.5) if len(size) > 1 else new

    def _is_in_fours(self, name: str) -> bool:
        return self.in_fours and ".experts." in name and len(self.shapes[name]) > 1 and "bias" not in name

    def bytes_read(self, config: DecoderConfig, nodes: int) -> float:
        """By a pass over so many nodes: 16 bits of each weight, 4.25 of MXFP4."""
        woken = 1.0 if config.moe is None else 1 - (1 - config.moe.per_token / config.moe.experts) ** nodes
        sizes = {
            name: (4.25 / 8 if self._is_in_fours(name) else 2) * math.prod(shape) for name, shape in self.shapes.items()
        }
        read = {name: size * (woken if ".experts." in name else 1.0) for name, size in sizes.items()}
        looked_up = "embed_tokens_per_layer" if config.tied else "embed_tokens"
        return sum(size for name, size in read.items() if looked_up not in name)


def make_target(config: DecoderConfig, weights: RandomFamily, device: str) -> CudaDecoder | Decoder:
    try:
        check_supported(config)
    except UnsupportedModel:
        return torch_decoder(config)(config, weights, dtype=torch.bfloat16, device=device, kv_slots=4096)
    walk = device_walk(torch.device(device))
    return cuda_decoder(config)(config, weights, dtype=torch.bfloat16, device=device, kv_slots=4096, greedy_walk=walk)


def pass_seconds(target: CudaDecoder | Decoder, nodes: int) -> float:
    seq = FakeSeq(nodes, [(7 * j) % 199 for j in range(CONTEXT)], max_length=CONTEXT + 2 * MANY)
    target.prefill([seq], Needs())
    tree = TreeBatch.chains([[seq.tokens[-1], *range(nodes - 1)]])
    logits = target.score([seq], tree, Needs()).required_logits
    assert bool(logits.isfinite().all()), "logits are not numbers"
    captured = isinstance(target, CudaDecoder) and target.kernels == "triton"
    if captured:
        assert isinstance(target, CudaDecoder)
        seconds = seconds_of(target.passes.replay_last, 20)
    else:
        seconds = seconds_of(lambda: target.score([seq], tree, Needs()), 5)
    target.release(seq)
    return seconds


def copy_rate(device: str, numbers: int) -> float:
    """Bytes per second, read and written ones counted."""
    source = torch.empty(numbers, dtype=torch.float32, device=device)
    into = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: into.copy_(source), 10)


def measure(name: str, settings: Mapping[str, Any], device: str, rate: float) -> str:
    config, started = DecoderConfig.from_hf(settings), perf_counter()
    weights = RandomFamily(config, device)
    target = make_target(config, weights, device)
    kind = f"Triton ({target.kernels})" if isinstance(target, CudaDecoder) else type(target).__name__
    loaded, cells, times = perf_counter() - started, list[str](), list[float]()
    for nodes in (1, MANY):
        times.append(pass_seconds(target, nodes))
        read = weights.bytes_read(config, nodes)
        share = read / rate / times[-1]
        cells.append(f"{nodes} nodes: {times[-1] * 1e3:.3f} ms, {read / 1e9:.2f} GB, {share:.0%} of the copy rate")
    spent = perf_counter() - started
    cells.append(f"t({MANY})/t(1) {times[1] / times[0]:.2f}; {loaded:.0f} s to load, {spent:.0f} s in all")
    return f"{name} ({config.layers} layers, {kind}): " + "; ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="gemma-3-12b,glm-4.5-air,gpt-oss-20b,deepseek-v3,qwen3-next-80b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny widths, to try the script itself")
    flags = parser.parse_args()
    rate = copy_rate(flags.device, 1 << (22 if flags.tiny else 30))
    print(f"copies {rate / 1e12:.3f} TB/s; {CONTEXT} tokens of context", flush=True)
    for name in words(flags.shapes):
        try:
            print(measure(name, {**SHAPES[name], **(_TINY if flags.tiny else {})}, flags.device, rate), flush=True)
        except (RuntimeError, AssertionError) as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        gc.collect()  # graphs and their buffers hold each other
        if flags.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
