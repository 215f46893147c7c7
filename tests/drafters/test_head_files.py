"""The files of a head: what is written is read again, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forerun.core.errors import DamagedFile, InvalidInput, ModelNotFound, UnsupportedModel
from forerun.drafters.heads import formats as head_formats
from forerun.drafters.heads.base import Calibration
from forerun.drafters.heads.eagle_head import EagleConfig, default_layers, read_head, write_head
from forerun.drafters.heads.formats import read_config, read_tensors, write_config, write_shards
from forerun.heads import kind_of
from tests.drafters.tiny_heads import eagle_config, eagle_weights

EAGLE_WEIGHTS = {"fc.weight", "layers.0.self_attn.q_proj.weight"}


def test_a_config_is_read_again(tmp_path: Path) -> None:
    write_config(tmp_path / "new" / "folder", {"a": [1, 2]})
    assert read_config(tmp_path / "new" / "folder") == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        (None, ModelNotFound, "has no config.json"),
        ("{", DamagedFile, "is not JSON"),
        ("[1]", DamagedFile, "does not hold an object"),
    ],
)
def test_a_config_that_cannot_be_used_is_named(
    text: str | None, error: type[Exception], said: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=said) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is no folder"):
        read_config(tmp_path / "absent")


def test_a_head_of_several_files_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_formats, "_SHARD_BYTES", 100)
    tensors = {name: torch.randn(size) for name, size in (("a", 10), ("b", 10), ("c", 40), ("d", 5))}
    write_shards(tmp_path, tensors)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert (index["a"], index["b"], index["d"]) == (files[0], files[0], files[2])
    read = read_tensors(tmp_path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_files_of_an_earlier_head_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(head_formats, "_SHARD_BYTES", 10)
        write_shards(tmp_path, {"a": torch.zeros(10), "b": torch.zeros(10)})
    write_shards(tmp_path, {"c": torch.zeros(3)})
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert read_tensors(tmp_path).keys() == {"c"}


def test_a_tensor_larger_than_a_file_has_one_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_formats, "_SHARD_BYTES", 100)
    write_shards(tmp_path, {"large": torch.zeros(1000)}, "medusa_lm_head")
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["medusa_lm_head.safetensors"]


def test_weights_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="holds no safetensors file"):
        read_tensors(tmp_path)
    torch.save({"a": torch.zeros(2)}, tmp_path / "head.bin")
    with pytest.raises(InvalidInput, match=r"head\.bin is a pickle, which is not read by default"):
        read_tensors(tmp_path)
    assert read_tensors(tmp_path, pickle=True).keys() == {"a"}
    (tmp_path / "model.safetensors").write_bytes(b"not a header")
    with pytest.raises(DamagedFile, match=r"model\.safetensors cannot be read"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("kind", [torch.int8, torch.int32, torch.float8_e4m3fn])
def test_quantised_weights_are_refused_by_name(kind: torch.dtype, tmp_path: Path) -> None:
    """Their numbers without their scales would draft nonsense, and nobody would know why."""
    config = eagle_config("eagle3", 24)
    weights = eagle_weights(config)
    write_head(tmp_path, config, weights)
    assert read_head(tmp_path)[1].keys() == weights.keys()
    name = "midlayer.mlp.down_proj.weight"
    write_head(tmp_path, config, {**weights, name: weights[name].to(kind)})
    with pytest.raises(UnsupportedModel, match=rf"down_proj\.weight' of .* is {str(kind)[6:]}: use a head whose files"):
        read_head(tmp_path)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_an_eagle_config_is_read_again(kind: str) -> None:
    written = EagleConfig(
        **{
            **{name: getattr(eagle_config(kind, 24), name) for name in EagleConfig.__dataclass_fields__},  # type: ignore[arg-type]
            "target": "org/model",
            "calibration": Calibration(0.9, 1.1),
            "rates": ((0.5, 0.2), (0.4, 0.1)),
        }
    )
    assert EagleConfig.from_json(json.loads(json.dumps(written.to_json())), written.kind) == written
    if kind == "eagle3":
        nested = json.loads(json.dumps(written.to_speculators_json(7)))
        assert EagleConfig.from_json(nested, "eagle3") == written
        (method,) = nested["speculators_config"]["proposal_methods"]
        assert method["speculative_tokens"] == 7


def test_what_an_eagle_config_leaves_out() -> None:
    small = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 90}
    config = EagleConfig.from_json(small, "eagle3")
    assert (config.kv_heads, config.head_dim, config.draft_vocab_size, config.target_width) == (4, 8, 90, 32)
    assert config.layers == ()
    assert EagleConfig.from_json(small, "eagle").layers == (-1,)
    nested = EagleConfig.from_json(
        {**small, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5]}, "rope_scaling": {"rope_theta": 5e5}},
        "eagle3",
    )
    assert nested.layers == (1, 5)
    assert nested.rope_theta == 5e5
    assert nested.feature_width == 64
    with pytest.raises(DamagedFile, match="lacks or garbles"):
        EagleConfig.from_json({**small, "intermediate_size": None}, "eagle3")
    with pytest.raises(DamagedFile, match="hidden_size"):
        EagleConfig.from_json({}, "eagle")


@pytest.mark.parametrize(("layers", "found"), [(30, (2, 15, 27)), (4, (2, 2, 1)), (1, (1, 0, 0))])
def test_layers_that_heads_read_by_default(layers: int, found: tuple[int, ...]) -> None:
    assert default_layers(layers) == found


@pytest.mark.parametrize(
    ("values", "weights", "kind"),
    [
        ({"forerun": {"format": "mine"}, "medusa_num_heads": 4}, set(), "mine"),
        ({"medusa_num_heads": 4}, set(), "medusa"),
        ({"hydra_num_heads": 4, "architectures": ["LlamaForCausalLMEagle"]}, set(), "hydra"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, set(), "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, set(), "eagle"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, set(), "eagle3"),
        ({"speculators_model_type": "dflash"}, set(), "dflash"),
        ({"architectures": ["LlamaForCausalLM"]}, EAGLE_WEIGHTS, "eagle"),
        ({}, EAGLE_WEIGHTS | {"midlayer.hidden_norm.weight"}, "eagle3"),
        ({"forerun": None, "architectures": None}, {"fc.weight"}, None),
        ({}, set(), None),
    ],
)
def test_one_place_tells_kinds_of_heads_apart(values: dict[str, object], weights: set[str], kind: str | None) -> None:
    assert kind_of(values, lambda: weights) == kind


def test_weights_are_not_read_where_the_config_tells() -> None:
    def read() -> set[str]:
        raise AssertionError("weights were read")

    assert kind_of({"architectures": ["LlamaForCausalLMEagle3"]}, read) == "eagle3"
    with pytest.raises(AssertionError):
        kind_of({}, read)
