"""A model is its settings and all of its weights: what no part of it reads is refused, in the words of its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from forerun.build.engine import load_target  # noqa: E402
from forerun.core.errors import DamagedFile, ForerunError  # noqa: E402
from forerun.core.params import EngineConfig  # noqa: E402
from forerun.models.hf.target import HFTarget  # noqa: E402
from forerun.models.load.checkpoint import open_checkpoint  # noqa: E402
from tests.encoder_decoder.tiny_models import make_model  # noqa: E402
from tests.models.tiny_checkpoints import FAMILIES, in_tiers, make_reference, save  # noqa: E402
from tests.models.tiny_gguf import FAMILIES as GGUF_FAMILIES  # noqa: E402
from tests.models.tiny_gguf import HEAD_DIM, WIDTH, write_tiny  # noqa: E402

CPU = EngineConfig(device="cpu", kv_slots=512)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


def change(folder: Path, settings: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Other settings for a folder, and more weights."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    if tensors:
        weights = load_file(folder / "model.safetensors")
        save_file({**weights, **tensors}, folder / "model.safetensors")


@pytest.mark.parametrize("family", sorted(GGUF_FAMILIES))
def test_a_gguf_file_with_more_layers_than_it_says_is_refused(family: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", family, layers=3, keys={"block_count": 2})
    with pytest.raises(DamagedFile, match=r"tensors of 3 layers, but \w+\.block_count is 2; pull it again"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("name", in_tiers(sorted(FAMILIES)))
def test_a_folder_with_more_layers_than_it_says_is_refused(name: str, tmp_path: Path) -> None:
    save(make_reference(name), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    nested = config.get("text_config", config)
    layers = nested["num_hidden_layers"] - 1
    kinds = {
        key: nested[key][:layers] for key in ("layer_types", "mlp_layer_types", "no_rope_layers") if nested.get(key)
    }
    lowered = {**nested, "num_hidden_layers": layers, **kinds}
    change(tmp_path, {"text_config": lowered} if nested is not config else lowered)
    with pytest.raises(DamagedFile, match=rf"weights of the checkpoint, such as '.*layers\.{layers}\..* of one model"):
        load_target(open_checkpoint(str(tmp_path)), CPU)


def test_a_weight_that_no_part_of_the_model_reads_is_refused(tmp_path: Path) -> None:
    save(make_reference("llama2"), tmp_path)
    change(tmp_path, {}, {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    with pytest.raises(DamagedFile, match=r"1 weights .*'model\.layers\.0\.self_attn\.q_norm\.weight'"):
        load_target(open_checkpoint(str(tmp_path)), CPU)


def test_what_decoders_leave_unread_is_no_surplus(tmp_path: Path) -> None:
    """Computed tables, a head that is tied, a tower for pictures, and layers that draft."""
    save(make_reference("smollm2"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": weights["model.embed_tokens.weight"].clone(),
        "model.vision_tower.patch.weight": torch.ones(4),
        "mtp.fc.weight": torch.ones(4),
        f"model.layers.{layers}.eh_proj.weight": torch.ones(4),
        f"model.layers.{layers}.self_attn.q_proj.weight": torch.ones(4),
    }
    change(tmp_path, {}, more)
    assert load_target(open_checkpoint(str(tmp_path)), CPU).vocab_size


@pytest.mark.parametrize(
    ("family", "key", "stack"),
    [
        ("t5", "num_layers", "encoder"),
        ("t5-gated", "num_decoder_layers", "decoder"),
        ("marian", "decoder_layers", "decoder"),
    ],
)
def test_an_encoder_decoder_with_more_layers_than_it_says_is_refused(
    family: str, key: str, stack: str, tmp_path: Path
) -> None:
    make_model(family).save_pretrained(tmp_path)
    assert load_target(open_checkpoint(str(tmp_path)), CPU).vocab_size
    change(tmp_path, {key: 1})
    with pytest.raises(DamagedFile, match=rf"weights of the checkpoint, such as '.*{stack}\..* of one model"):
        load_target(open_checkpoint(str(tmp_path)), CPU)


@pytest.mark.parametrize(("layers", "what"), [(1, "has surplus"), (3, "lacks")])
def test_transformers_models_are_held_to_their_settings_too(layers: int, what: str, tmp_path: Path) -> None:
    config = transformers.GPTNeoXConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=96,
    )  # fmt: skip
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    assert HFTarget.load(str(tmp_path), dtype=torch.float32, device="cpu").vocab_size == 96
    change(tmp_path, {"num_hidden_layers": layers})
    with pytest.raises(DamagedFile, match=rf"{what} \d+ weights, such as .*layers\."):
        HFTarget.load(str(tmp_path), dtype=torch.float32, device="cpu")


OURS = ("config.json", "model.layers", "self_attn", "_proj", "lm_head", "embed_tokens", "num_", "hidden_size")
LIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads": ("llama", {"attention.head_count": 8}, "blk.0.attn_k.weight"),
    "odd heads": ("llama", {"attention.head_count": 3}, "llama.attention.head_count 3 is no multiple of"),
    "key heads": ("qwen2", {"attention.head_count_kv": 4}, "blk.0.attn_k.weight"),
    "key heads that do not divide": ("llama", {"attention.head_count_kv": 3}, "llama.attention.head_count_kv 3"),
    "width": ("llama", {"embedding_length": 32}, "token_embd.weight"),
    "inner": ("llama", {"feed_forward_length": 128}, "blk.0.ffn_gate.weight"),
    "no inner": ("llama", {"feed_forward_length": 0}, "llama.feed_forward_length"),
    "layers": ("qwen3", {"block_count": 1}, "qwen3.block_count"),
    "huge": ("llama", {"context_length": 1 << 30}, ""),
    "experts": ("mixtral", {"expert_count": 2}, "blk.0.ffn_gate_inp.weight"),
    "used experts": ("mixtral", {"expert_used_count": 9}, "llama.expert_used_count"),
    "expert inner": ("qwen3_moe", {"expert_feed_forward_length": 64}, "blk.0.ffn_gate_exps.weight"),
    "shared inner": ("qwen2_moe", {"expert_shared_feed_forward_length": 16}, "blk.0.ffn_gate_shexp.weight"),
    "rope": ("llama", {"rope.scaling.type": "longrope"}, "longrope"),
    "rope width": ("qwen2", {"rope.dimension_count": 64}, "a rope over 64 of 16 dimensions"),
    "phi's rope": ("phi3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, "'yarn'"),
    "key length": ("gemma3_text", {"attention.key_length": 32}, "blk.0.attn_q.weight"),
}


@pytest.mark.parametrize("lie", LIES)
def test_errors_of_a_gguf_file_speak_of_its_keys_and_tensors(lie: str, tmp_path: Path) -> None:
    family, keys, named = LIES[lie]
    path = write_tiny(tmp_path / "m.gguf", family, layers=2 if lie == "layers" else 1, keys=keys)
    try:
        load_target(open_checkpoint(str(path)), CPU)
    except ForerunError as error:
        told = str(error)
    else:
        assert not named, "this one is a lie that shows"
        return
    assert named in told
    assert "m.gguf" in told
    assert "\n" not in told
    assert not [word for word in OURS if word in told], told


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("llama", "blk.0.attn_v.weight"),
        ("llama", "blk.0.ffn_norm.weight"),
        ("qwen3", "blk.0.attn_k_norm.weight"),
        ("mixtral", "blk.0.ffn_up_exps.weight"),
        ("qwen2_moe", "blk.0.ffn_gate_inp_shexp.weight"),
        ("phi3", "blk.0.attn_qkv.weight"),
        ("gemma3_text", "blk.0.post_ffw_norm.weight"),
    ],
)
def test_a_tensor_that_a_gguf_file_lacks_is_called_as_in_the_file(family: str, tensor: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", family, layers=1, drop=tensor)
    with pytest.raises(DamagedFile) as raised:
        load_target(open_checkpoint(str(path)), CPU)
    if tensor != "blk.0.attn_qkv.weight":  # in its place three would do as well
        assert tensor in str(raised.value)
    assert not [word for word in OURS if word in str(raised.value)], raised.value


def test_a_tensor_that_its_family_does_not_have_is_refused(tmp_path: Path) -> None:
    norm = np.ones(HEAD_DIM, np.float32)
    path = write_tiny(tmp_path / "m.gguf", "llama", extra={"blk.0.attn_q_norm.weight": norm})
    with pytest.raises(DamagedFile, match=r"1 of its tensors, such as 'blk\.0\.attn_q_norm\.weight'"):
        load_target(open_checkpoint(str(path)), CPU)
    bias = np.ones(WIDTH, np.float32)
    path = write_tiny(tmp_path / "n.gguf", "llama", extra={"output_norm.bias": bias})
    with pytest.raises(DamagedFile, match=r"1 of its tensors, such as 'output_norm\.bias'"):
        load_target(open_checkpoint(str(path)), CPU)
