"""Each family's GGUF file in Hugging Face's terms: names, shapes, and the converter's changes undone."""

from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.core.errors import DamagedFile, UnsupportedModel
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.models.load.gguf import GgufFile
from forerun.models.load.gguf_families import config_of
from forerun.models.load.quants import Blocks, dequantize
from forerun.models.load.weights import GgufWeights
from tests.models.tiny_gguf import EXPERTS, FAMILIES, HEAD_DIM, HEADS, KV_HEADS, VOCAB, WIDTH, gguf, write_tiny


def raw(checkpoint: Checkpoint, tensor: str) -> torch.Tensor:
    weights = checkpoint.weights
    assert isinstance(weights, GgufWeights)
    return dequantize(weights.file.blocks(tensor))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_opens(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_tiny(tmp_path / "m.gguf", family)))
    config = checkpoint.config
    assert config["model_type"] == family
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (WIDTH, 2, HEAD_DIM)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert config["rms_norm_eps"] == 1e-5
    assert config["vocab_size"] == VOCAB
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 0, None)
    for name, weight in checkpoint.weights.items():
        assert tuple(weight.shape) == checkpoint.weights.shape(name)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_takes_config_and_names(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    checkpoint = open_checkpoint(str(write_tiny(tmp_path / "m.gguf", family)))
    settings = {key: value for key, value in checkpoint.config.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(family, **settings)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    theirs.pop("lm_head.weight")
    assert stack_experts(checkpoint) == theirs


def stack_experts(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Names and shapes with the experts stacked, as transformers 5 holds them in memory."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in checkpoint.weights:
        shape = checkpoint.weights.shape(name)
        if ".experts." not in name:
            shapes[name.replace("block_sparse_moe", "mlp")] = shape
            continue
        stem, part = name.replace("block_sparse_moe", "mlp").split(".experts.")
        down = part.split(".")[1] in ("w2", "down_proj")
        stacked = f"{stem}.experts.{'down_proj' if down else 'gate_up_proj'}"
        shapes[stacked] = (EXPERTS, *shape) if down else (EXPERTS, 2 * shape[0], shape[1])
    return shapes


@pytest.mark.parametrize("family", ["llama", "smollm3", "mixtral"])
@pytest.mark.parametrize(("part", "heads"), [("q", HEADS), ("k", KV_HEADS)])
def test_llama_rows_are_put_back(family: str, part: str, heads: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_tiny(tmp_path / "m.gguf", family)))
    ours = checkpoint.weights[f"model.layers.0.self_attn.{part}_proj.weight"]
    # The converter's own step, applied to what we read, must give what lies in the file.
    converted = ours.view(heads, 2, HEAD_DIM // 2, WIDTH).transpose(1, 2).reshape(ours.shape)
    stored = raw(checkpoint, f"blk.0.attn_{part}.weight")
    assert torch.equal(converted, stored)
    assert not torch.equal(ours, stored)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3_text"])
def test_other_families_keep_their_rows(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_tiny(tmp_path / "m.gguf", family)))
    ours = checkpoint.weights["model.layers.1.self_attn.k_proj.weight"]
    assert torch.equal(ours, raw(checkpoint, "blk.1.attn_k.weight"))


def test_gemma_norms_lose_the_one_that_was_added(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_tiny(tmp_path / "m.gguf", "gemma3_text")))
    for name, tensor in {
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.self_attn.q_norm.weight": "blk.0.attn_q_norm.weight",
        "model.layers.1.pre_feedforward_layernorm.weight": "blk.1.ffn_norm.weight",
    }.items():
        assert torch.equal(checkpoint.weights[name], raw(checkpoint, tensor) - 1)
    embedding = checkpoint.weights["model.embed_tokens.weight"]
    assert torch.equal(embedding, raw(checkpoint, "token_embd.weight"))
    assert checkpoint.config["sliding_window"] == 512
    assert checkpoint.config["rope_parameters"]["sliding_attention"]["rope_theta"] == 10000.0


def test_experts_come_one_by_one(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_tiny(tmp_path / "m.gguf", "mixtral")))
    stacked = raw(checkpoint, "blk.1.ffn_gate_exps.weight")
    for expert in range(EXPERTS):
        name = f"model.layers.1.block_sparse_moe.experts.{expert}.w1.weight"
        assert torch.equal(checkpoint.weights[name], stacked[expert])
    assert checkpoint.config["num_local_experts"] == EXPERTS


def test_blocks_stay_quantised(tmp_path: Path) -> None:
    weights = open_checkpoint(str(write_tiny(tmp_path / "m.gguf"))).weights
    assert isinstance(weights, GgufWeights)
    blocks = weights.blocks("model.layers.0.self_attn.q_proj.weight")
    assert isinstance(blocks, Blocks)
    assert blocks.kind == gguf.GGMLQuantizationType.Q8_0
    assert blocks.data.numel() == WIDTH * WIDTH // 32 * 34


def test_stated_rope_scaling(tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.freq_base": 5e5}
    config = config_of(GgufFile(write_tiny(tmp_path / "a.gguf", keys=linear)))
    assert config["rope_parameters"] == {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(UnsupportedModel, match="dynamic"):
        config_of(GgufFile(write_tiny(tmp_path / "b.gguf", keys={"rope.scaling.type": "dynamic"})))


@pytest.mark.slow
def test_llama3_rope_is_recognised_by_its_table(tmp_path: Path) -> None:
    # Divisors of theta 10000, width 16, factor 8, context 8192, as transformers' llama3 rope computes them.
    transformers = pytest.importorskip("transformers")
    settings = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    settings |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    theirs = transformers.LlamaConfig(
        head_dim=HEAD_DIM, max_position_embeddings=65536, rope_parameters=settings | {"rope_theta": 10000.0}
    )
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    table = 10000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM) / scaled.numpy()
    path = write_tiny(tmp_path / "a.gguf", extra={"rope_freqs.weight": table.astype(np.float32)})
    assert config_of(GgufFile(path))["rope_scaling"] == pytest.approx(settings)
    odd = {"rope_freqs.weight": np.linspace(1, 9, HEAD_DIM // 2, dtype=np.float32)}
    with pytest.raises(UnsupportedModel, match="rope"):
        config_of(GgufFile(write_tiny(tmp_path / "b.gguf", extra=odd)))


def test_phi_long_rope(tmp_path: Path) -> None:
    tables = {f"rope_factors_{k}.weight": np.full(8, v, np.float32) for k, v in (("long", 4), ("short", 1))}
    keys = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.5}
    config = config_of(GgufFile(write_tiny(tmp_path / "m.gguf", "phi3", extra=tables, keys=keys)))
    assert config["rope_scaling"]["long_factor"] == [4.0] * 8
    assert config["rope_scaling"]["attention_factor"] == 1.5
    assert config["original_max_position_embeddings"] == 32


def test_a_separate_output_unties_the_embedding(tmp_path: Path) -> None:
    extra = {"output.weight": np.ones((VOCAB, WIDTH), np.float32)}
    checkpoint = open_checkpoint(str(write_tiny(tmp_path / "m.gguf", extra=extra)))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in checkpoint.weights


def test_unknown_things_are_refused_by_name(tmp_path: Path) -> None:
    odd = write_tiny(tmp_path / "a.gguf", extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(UnsupportedModel, match="attn_sinks"):
        open_checkpoint(str(odd))
    with pytest.raises(DamagedFile, match="layers"):
        open_checkpoint(str(write_tiny(tmp_path / "b.gguf", drop="blk.1.attn_output.weight")))
    writer = gguf.GGUFWriter(str(tmp_path / "c.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="mamba"):
        open_checkpoint(str(tmp_path / "c.gguf"))
