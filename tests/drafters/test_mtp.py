"""MTP layers: both styles of names are the same layer, a whole checkpoint's is found in it, other kinds are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.build.engine import choose_drafter, load_target, make_engine
from forerun.core.errors import DamagedFile, InvalidInput, UnsupportedModel
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.drafters.heads.eagle import MtpHead, load_head, read_mtp, write_mtp
from forerun.drafters.heads.eagle_head import EagleConfig
from forerun.drafters.heads.formats import read_config, write_config
from forerun.engine.driver import Driver
from forerun.heads import open_head
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.hybrid.target import torch_decoder
from forerun.models.load.checkpoint import open_checkpoint
from tests.drafters.tiny_heads import eagle_config, mtp_weights
from tests.models.tiny_checkpoints import VOCAB, make_reference, save

_DEEPSEEK = {"fc.": "eh_proj.", "norm.": "shared_head.norm.", "lm_head.": "shared_head.head.", "midlayer.": ""}
_QWEN = {"enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden.", "midlayer.": "layers.0."}


def named(weights: dict[str, Tensor], places: dict[str, str], before: str) -> dict[str, Tensor]:
    found = {}
    for name, weight in weights.items():
        start = next((ours for ours in places if name.startswith(ours)), "")
        found[before + places.get(start, "") + name.removeprefix(start)] = weight.contiguous()
    return found


def layer_of(width: int = 8) -> tuple[EagleConfig, dict[str, Tensor]]:
    config = eagle_config("mtp", VOCAB, width=width)
    return config, mtp_weights(config, seed=3, borrows=True)


def carrying(folder: Path) -> Path:
    """A tiny Llama of three layers with a random MTP layer behind them, as one checkpoint."""
    save(make_reference("smollm2"), folder)
    values = read_config(folder)
    weights = load_file(folder / "model.safetensors")
    shape = EagleConfig.from_json(values, "mtp")
    layer = mtp_weights(shape, seed=3, borrows=True)
    layer = {name: weight for name, weight in layer.items() if "self_attn.q_norm" not in name}
    layer = {name: weight for name, weight in layer.items() if "self_attn.k_norm" not in name}
    save_file(weights | named(layer, _DEEPSEEK, "model.layers.3."), folder / "model.safetensors")
    write_config(folder, {**values, "num_nextn_predict_layers": 1})
    return folder


def by_hand(head: MtpHead, weights: dict[str, Tensor], token: Tensor, hidden: Tensor) -> Tensor:
    """The layer on one row by its definition: attention over itself alone is its own value."""
    config = head.config

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[name]

    both = torch.cat((norm(head._embed(token), "enorm.weight"), norm(hidden, "hnorm.weight")), -1)
    x = both @ weights["fc.weight"].t()
    value = norm(x, "midlayer.input_layernorm.weight") @ weights["midlayer.self_attn.v_proj.weight"].t()
    group = config.heads // config.kv_heads
    value = value.view(-1, config.kv_heads, 1, config.head_dim).expand(-1, -1, group, -1).flatten(1)
    x = x + value @ weights["midlayer.self_attn.o_proj.weight"].t()
    rows = norm(x, "midlayer.post_attention_layernorm.weight")
    gate = torch.nn.functional.silu(rows @ weights["midlayer.mlp.gate_proj.weight"].t())
    inner = gate * (rows @ weights["midlayer.mlp.up_proj.weight"].t())
    return x + inner @ weights["midlayer.mlp.down_proj.weight"].t()


@pytest.mark.parametrize("style", ["deepseek", "qwen", "ours"])
def test_both_styles_of_names_are_the_same_layer(style: str, tmp_path: Path) -> None:
    config, weights = layer_of()
    write_mtp(tmp_path, config, weights)
    if style != "ours":
        theirs = named(weights, _DEEPSEEK, "model.layers.61.") if style == "deepseek" else named(weights, _QWEN, "mtp.")
        save_file(theirs, tmp_path / "model.safetensors")
    found, read = read_mtp(tmp_path)
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    assert (found.kind, found.layers, found.norm_output) == ("mtp", (-1,), style == "qwen")


def test_the_layer_computes_what_its_definition_says(tmp_path: Path) -> None:
    target = _decoder(carrying(tmp_path))
    head, weights = load_head(tmp_path, target, "mtp"), read_mtp(tmp_path)[1]
    token, hidden = (torch.tensor([5]), torch.randn(1, head.config.width, generator=torch.Generator().manual_seed(1)))

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        group = head.config.heads // head.config.kv_heads
        return v.repeat_interleave(group, 1).flatten(1)

    out = head.run(token, head.fuse(hidden), torch.tensor([7]), attend)
    torch.testing.assert_close(out, by_hand(head, weights, token, hidden), rtol=1e-4, atol=1e-4)
    swapped = weights | {"enorm.weight": weights["hnorm.weight"], "hnorm.weight": weights["enorm.weight"]}
    assert not torch.allclose(out, by_hand(head, swapped, token, hidden), atol=1e-2)  # the negative control


def test_a_checkpoint_that_brings_a_layer_drafts_with_it_and_writes_what_it_would_alone(tmp_path: Path) -> None:
    folder = carrying(tmp_path)
    checkpoint = open_checkpoint(str(folder))
    chosen = choose_drafter(SpeculativeConfig(drafter="mtp", controller="fixed", budget=3), checkpoint)
    assert chosen.draft_model == str(folder)
    assert open_head(folder) is None  # a model, which may be somebody's draft model
    texts = []
    for speculative in (SpeculativeConfig(drafter="none", controller="fixed"), chosen):
        engine = make_engine(_decoder(folder), frozenset({0}), speculative)
        prompts = [(3, 5, 7), (9, 2, 4, 6), (8,)]
        seqs = Driver(engine).write(Request(prompt, SamplingParams(max_tokens=12)) for prompt in prompts)
        texts.append([seq.tokens for seq in seqs])
        drafted = sum(seq.stats.drafted for seq in seqs)
    assert texts[0] == texts[1]
    assert drafted > 0


FAMILY_LAYERS = ["glm4_moe", "deepseek_v3", "deepseek_v3-odd", "glm4_moe_lite", "qwen3_next"]


def with_own_layer(name: str, folder: Path) -> tuple[Any, Any]:
    """A tiny model of a family, saved with a random layer of its own kind behind it; both as transformers has them."""
    from transformers.modeling_layers import MtpLayer

    model = make_reference(name)
    base, config = model.model, model.config
    last = next(i for i, one in reversed(list(enumerate(base.layers))) if hasattr(one, "self_attn"))
    config.rms_norm_eps = 1e-5 if name == "glm4_moe" else config.rms_norm_eps
    layer = MtpLayer(config, type(base.layers[last]), type(base.norm), last).float().eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for key, weight in [*layer.named_parameters(), *layer.named_buffers()]:
            weight.normal_(0.0, 0.25)
            if "norm" in key and name != "qwen3_next":
                weight.add_(1.0)
    _, weights = save(model, folder)
    held = dict[str, Tensor]()
    for key, weight in layer.state_dict().items():
        inside = key.removeprefix("mtp_block.")
        if name == "qwen3_next":
            outside = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
            outside |= {"post_norm": "norm"}
            start, _, rest = inside.partition(".")
            held["mtp." + (f"layers.0.{inside}" if inside != key else f"{outside[start]}.{rest}")] = weight
        else:
            count = config.num_hidden_layers
            held[f"model.layers.{count}.{inside.replace('post_norm', 'shared_head.norm')}"] = weight
    save_file(weights | {key: one.contiguous() for key, one in held.items()}, folder / "model.safetensors")
    return model, layer


def seen_before(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
    """Causal attention of rows in the order of their positions."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (one.transpose(0, 1)[None] for one in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("name", FAMILY_LAYERS)
def test_layers_of_the_family_compute_what_transformers_does(name: str, tmp_path: Path) -> None:
    model, layer = with_own_layer(name, tmp_path)
    head = load_head(tmp_path, _decoder(tmp_path), "mtp")
    draws, count = torch.Generator().manual_seed(1), 9
    tokens = torch.randint(0, VOCAB, (count,), generator=draws)
    hidden = torch.randn(count, head.config.width, generator=draws)
    positions = torch.arange(count)
    with torch.no_grad():
        turns = model.model.rotary_emb(hidden[None], positions[None])
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        embedded = model.get_input_embeddings()(tokens)[None]
        wanted = layer(embedded, hidden[None], turns, mask, positions[None], None)[0]
        out = head.run(tokens, head.fuse(hidden), positions, seen_before)
        torch.testing.assert_close(head._normed(out), wanted, rtol=1e-4, atol=2e-4)
        alone = head.run(tokens, head.fuse(hidden), positions * 2, seen_before)  # the control: other positions
    assert not torch.allclose(head._normed(alone), wanted, atol=1e-2)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "qwen3_next"])
def test_checkpoints_that_bring_a_layer_of_their_own_kind_draft_with_it(name: str, tmp_path: Path) -> None:
    with_own_layer(name, tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    chosen = choose_drafter(SpeculativeConfig(drafter="mtp", controller="fixed", budget=5), checkpoint)
    assert chosen.draft_model == str(tmp_path)
    texts, drafted = [], 0
    for speculative in (SpeculativeConfig(drafter="none", controller="fixed"), chosen):
        engine = make_engine(load_target(checkpoint, EngineConfig(device="cpu")), frozenset({0}), speculative)
        prompts = [(3, 5, 7), (9, 2, 4, 6), (8,)]
        seqs = Driver(engine).write(Request(prompt, SamplingParams(max_tokens=12)) for prompt in prompts)
        texts.append([seq.tokens for seq in seqs])
        drafted = sum(seq.stats.drafted for seq in seqs)
    assert texts[0] == texts[1]
    assert drafted > 0


def test_a_weight_that_the_family_does_not_read_is_refused(tmp_path: Path) -> None:
    with_own_layer("glm4_moe", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"model.layers.3.self_attn.sinks": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="sinks") as raised:
        read_mtp(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("self_attn.kv_a_proj_with_mqa.weight", "kv_a_proj"),
        ("mlp.experts.0.gate_proj.weight", "experts"),
        ("self_attn.q_proj.bias", "q_proj.bias"),
    ],
)
def test_layers_of_another_kind_are_refused(name: str, words: str, tmp_path: Path) -> None:
    config, weights = layer_of()
    write_mtp(tmp_path, config, {**weights, f"midlayer.{name}": torch.zeros(4, 4)})
    with pytest.raises(UnsupportedModel, match=words):
        read_mtp(tmp_path)


def test_gated_attention_and_missing_layers_are_refused(tmp_path: Path) -> None:
    config, weights = layer_of()
    name = "midlayer.self_attn.q_proj.weight"
    write_mtp(tmp_path, config, {**weights, name: torch.cat((weights[name], weights[name]))})
    with pytest.raises(UnsupportedModel, match="gated attention"):
        read_mtp(tmp_path)
    write_mtp(tmp_path, config, {n: w for n, w in weights.items() if n != "midlayer.mlp.down_proj.weight"})
    with pytest.raises(DamagedFile, match="down_proj"):
        read_mtp(tmp_path)
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidInput, match="no multi-token-prediction layer"):
        read_mtp(tmp_path)


def _decoder(folder: Path) -> Decoder:
    checkpoint = open_checkpoint(str(folder))
    config = DecoderConfig.from_hf(checkpoint.config)
    return torch_decoder(config)(config, checkpoint.weights, dtype=torch.float32, device="cpu", kv_slots=None)
