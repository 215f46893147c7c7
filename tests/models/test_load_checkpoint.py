"""Opening by name: folders, hub ids and known names; what is missing or unsafe is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from forerun.core.errors import DamagedFile, ModelNotFound, UnknownName, UnsupportedModel
from forerun.models.load.catalog import cache_folder, known_models, pull
from forerun.models.load.checkpoint import open_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4}))
    return tmp_path


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_with_one_file(folder: Path) -> None:
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}, folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config["hidden_size"] == 4
    assert sorted(checkpoint.weights) == ["a", "b"]
    assert checkpoint.weights.shape("a") == (2, 3)
    assert checkpoint.weights["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(KeyError):
        checkpoint.weights["c"]


def shard(folder: Path) -> dict[str, Any]:
    save_file({"a": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(3)}, folder / "model-00002-of-00002.safetensors")
    return {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


@pytest.mark.parametrize("indexed", [True, False])
def test_a_folder_of_shards(folder: Path, indexed: bool) -> None:
    listed = shard(folder)
    if indexed:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    weights = open_checkpoint(str(folder)).weights
    assert weights["a"].tolist() == [1, 1]
    assert weights["b"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"c": "model-00003-of-00003.safetensors"}, "lacks model-00003"),
        ({"c": "model-00002-of-00002.safetensors"}, "lacks 'c'"),
        ({"c": "../elsewhere.safetensors"}, "outside"),
    ],
)
def test_an_index_that_lies(folder: Path, change: dict[str, str], says: str) -> None:
    listed = shard(folder) | change
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(DamagedFile, match=says):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": 3}', "null"])
def test_an_index_that_is_none(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(DamagedFile, match="index"):
        open_checkpoint(str(folder))


def test_damaged_files_in_a_folder(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(DamagedFile, match="damaged"):
        open_checkpoint(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(DamagedFile, match="JSON"):
        open_checkpoint(str(folder))


def test_pickles_are_never_opened(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin.*safetensors"):
        open_checkpoint(str(folder))


def test_folders_that_are_no_checkpoints(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no .*safetensors"):
        open_checkpoint(str(folder))
    (folder / "config.json").unlink()
    (folder / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"config\.json.*some\.gguf"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nothing", "~/no-such-model-here"])
def test_paths_that_do_not_exist(name: str) -> None:
    with pytest.raises(ModelNotFound, match="check the path"):
        open_checkpoint(name)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'smollm2'"):
        open_checkpoint("smolm2")
    with pytest.raises(UnknownName, match="did you mean 'smollm2'"):
        pull("smolm2")


def test_a_known_name_that_is_absent(own_cache: Path) -> None:
    assert known_models()[0].path is None
    with pytest.raises(ModelNotFound, match="forerun models pull smollm2"):
        open_checkpoint("smollm2")


def test_where_files_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORERUN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "forerun"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/forerun")
    monkeypatch.setenv("FORERUN_CACHE", "/y")
    assert cache_folder() == Path("/y")


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    monkeypatch.setattr(hub.HfApi, "model_info", fail)
    with pytest.raises(ModelNotFound, match=r"no route to the hub.*local folder"):
        open_checkpoint("some-org/some-model")


def test_a_hub_id_takes_no_pickles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    asked: list[Any] = []

    def fetch(name: str, allow_patterns: list[str], local_files_only: bool = False, local_dir: None = None) -> str:
        asked.extend(allow_patterns)
        if local_files_only:
            raise OSError("not cached")
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *args, **options: None)
    assert "a" in open_checkpoint("some-org/some-model").weights
    assert not any(pattern.endswith((".bin", ".pt", ".pth", "*")) for pattern in asked)


@pytest.mark.model
def test_the_default_model_opens() -> None:
    if known_models()[0].path is None:
        pytest.skip("the default model has not been pulled")
    checkpoint = open_checkpoint("smollm2")
    expected = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "head_dim": 64}
    expected |= {"num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 100000.0}
    assert {key: checkpoint.config[key] for key in expected} == expected
    weight = checkpoint.weights["model.layers.0.self_attn.q_proj.weight"]
    assert weight.shape == (576, 576)
    assert 0.01 < weight.std().item() < 1
    assert len(checkpoint.weights) == 272
