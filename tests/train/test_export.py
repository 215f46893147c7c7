"""Heads for other engines: what is written is what they read, and what they cannot read is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from forerun.cli.app import app
from forerun.core.errors import DamagedFile, InvalidInput
from forerun.drafters.heads.eagle_head import read_head, write_head
from forerun.drafters.heads.formats import write_config
from forerun.heads import heads_in_the_box
from forerun.train import export
from forerun.train.export import READERS, export_head, import_head, kind_of_head
from tests.drafters.tiny_heads import eagle_config, eagle_weights, heads_config, heads_weights, save_head
from tests.models.tiny_checkpoints import VOCAB


def borrowing_head(folder: Path, **settings: Any) -> Path:
    """An EAGLE-3 head of three layers without LM head rows of its own, over half of the vocabulary."""
    config = replace(eagle_config("eagle3", VOCAB), draft_vocab_size=VOCAB // 2, layers=(1, 2, 3), **settings)
    weights = eagle_weights(config, borrows=True)
    weights.pop("lm_head.weight", None)
    weights["d2t"] = torch.arange(VOCAB // 2)  # draft token i is the target's token 2i
    write_head(folder, config, weights)
    return folder


def rows(ids: torch.Tensor) -> torch.Tensor:
    """An LM head whose row i holds the number i."""
    return ids[:, None].expand(-1, eagle_config("eagle3", VOCAB).width).float()


def test_vllm_gets_rows_and_keys(tmp_path: Path) -> None:
    flag = export_head(borrowing_head(tmp_path / "a"), tmp_path / "b", "vllm", rows, tokens=3)
    weights = load_file(tmp_path / "b" / "model.safetensors")
    assert weights["lm_head.weight"][:, 0].tolist() == list(range(0, VOCAB, 2)[: VOCAB // 2])
    values = json.loads((tmp_path / "b" / "config.json").read_text())
    assert values["num_aux_hidden_states"] == 3
    assert values["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert "forerun" not in values
    config = flag.partition("--speculative-config ")[2].strip("'")
    assert json.loads(config) == {
        "method": "eagle3", "model": str(tmp_path / "b"), "num_speculative_tokens": 3
    }  # fmt: skip


def test_the_other_engine_s_name_of_the_target_is_written_and_printed(tmp_path: Path) -> None:
    head = borrowing_head(tmp_path / "a", target="model.gguf")
    flag = export_head(head, tmp_path / "b", "vllm", rows, target_name="org/model")
    assert flag.startswith("vllm serve org/model --speculative-config ")
    for name, wanted in (("", "model.gguf"), ("org/model", "org/model")):
        out = tmp_path / f"spec{len(name)}"
        export_head(head, out, "speculators", rows, target_name=name)
        values = json.loads((out / "config.json").read_text())
        assert values["speculators_config"]["verifier"]["name_or_path"] == wanted


def test_heads_of_several_layers_are_named_as_vllm_names_them(tmp_path: Path) -> None:
    head = borrowing_head(tmp_path / "a", depth=3)
    export_head(head, tmp_path / "b", "vllm", rows)
    weights, values = load_file(tmp_path / "b" / "model.safetensors"), tmp_path / "b" / "config.json"
    assert json.loads(values.read_text())["num_hidden_layers"] == 3
    layers = {name.rpartition("self_attn.")[0] for name in weights if "q_proj" in name}
    assert layers == {"midlayer.", "layers.1.", "layers.2."}
    width = read_head(head)[0].width
    assert weights["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * width
    assert weights["layers.1.self_attn.q_proj.weight"].shape[1] == width
    export_head(head, tmp_path / "c", "speculators", rows)
    inner = json.loads((tmp_path / "c" / "config.json").read_text())["transformer_layer_config"]
    assert inner["num_hidden_layers"] == 3
    with pytest.raises(InvalidInput, match="heads of one layer and this one has 3"):
        export_head(head, tmp_path / "d", "sglang", rows)


def test_sglang_counts_layers_by_their_outputs(tmp_path: Path) -> None:
    head = borrowing_head(tmp_path / "a")
    flag = export_head(head, tmp_path / "b", "sglang", rows)
    values = json.loads((tmp_path / "b" / "config.json").read_text())
    assert values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert "--speculative-algorithm EAGLE3" in flag
    assert "--speculative-num-draft-tokens 6" in flag
    import_head(tmp_path / "b", tmp_path / "c", "sglang")
    assert read_head(tmp_path / "c")[0].layers == read_head(head)[0].layers == (1, 2, 3)
    import_head(tmp_path / "b", tmp_path / "d", "vllm")  # the wrong engine: other layers
    assert read_head(tmp_path / "d")[0].layers == (0, 1, 2)


@pytest.mark.parametrize("setting", ["norm_output", "norm_before_residual", "window"])
def test_what_an_engine_ignores_is_refused(setting: str, tmp_path: Path) -> None:
    more = {"window": 8, "windowed": (True,)} if setting == "window" else {setting: True}
    head = borrowing_head(tmp_path / "a", **more)
    with pytest.raises(InvalidInput, match=setting):
        export_head(head, tmp_path / "b", "sglang", rows)
    export_head(head, tmp_path / "c", "vllm", rows)
    assert read_head(tmp_path / "c")[0].window_of(0) == more.get("window", 0)


def boxed_head() -> Path:
    """The default model's, which is as wide as its target."""
    heads = [head for head in heads_in_the_box() if head.kind == "eagle3" and "SmolLM2" in head.target]
    return heads[0].path


def test_the_head_in_the_box_goes_to_vllm_and_speculators_but_not_to_sglang(tmp_path: Path) -> None:
    box = boxed_head()
    config = read_head(box)[0]

    def blank(ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids), config.width)

    for name in ("vllm", "speculators"):
        export_head(box, tmp_path / name, name, blank)
        assert read_head(tmp_path / name)[0].layers == config.layers
    with pytest.raises(InvalidInput, match="fc_norm"):
        export_head(box, tmp_path / "sglang", "sglang", blank)


def test_a_head_without_rows_needs_its_target(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--target"):
        export_head(borrowing_head(tmp_path / "a"), tmp_path / "b", "vllm", None)


def test_a_head_that_reads_back_otherwise_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        export, "_engine_keys", lambda values, config: {**values, "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    )
    with pytest.raises(DamagedFile, match="reads back otherwise"):
        export_head(borrowing_head(tmp_path / "a"), tmp_path / "b", "vllm", rows)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa", "hydra", "dflash", "dspark", "peagle", "mtp"])
@pytest.mark.parametrize("engine", READERS)
def test_every_kind_and_engine_either_fits_or_is_refused(name: str, engine: str, tmp_path: Path) -> None:
    save_head(name, tmp_path / "a", VOCAB)
    if (name, engine) == ("dflash", "sglang"):  # it drafts all of the vocabulary, and this head does not
        with pytest.raises(InvalidInput, match="a reduced vocabulary"):
            export_head(tmp_path / "a", tmp_path / "b", engine, rows)
        return
    if name not in READERS[engine].kinds:
        with pytest.raises(InvalidInput, match=f"reads no {name}"):
            export_head(tmp_path / "a", tmp_path / "b", engine, rows)
        return
    export_head(tmp_path / "a", tmp_path / "b", engine, rows)
    assert kind_of_head(tmp_path / "b") == name
    import_head(tmp_path / "b", tmp_path / "c", engine)
    assert kind_of_head(tmp_path / "c") == name


def test_a_pickled_head_is_imported_when_asked(tmp_path: Path) -> None:
    config = heads_config("medusa", VOCAB)
    write_config(tmp_path / "a", config.to_json())
    torch.save(heads_weights(config), tmp_path / "a" / "medusa_lm_head.pt")
    with pytest.raises(InvalidInput, match="forerun drafters import"):
        import_head(tmp_path / "a", tmp_path / "b", "eagle")
    import_head(tmp_path / "a", tmp_path / "b", "eagle", pickle=True)
    assert (tmp_path / "b" / "medusa_lm_head.safetensors").is_file()


def test_the_commands(tmp_path: Path) -> None:
    save_head("eagle3", tmp_path / "a", VOCAB)
    run = CliRunner().invoke(app, ["drafters", "export", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "eagle"])
    assert run.exit_code == 0, run.output
    assert "--draft-model" in run.output
    run = CliRunner().invoke(app, ["drafters", "import", str(tmp_path / "b"), str(tmp_path / "c")])
    assert run.exit_code == 0, run.output
    assert kind_of_head(tmp_path / "c") == "eagle3"
    run = CliRunner().invoke(app, ["drafters", "export", str(tmp_path / "a"), str(tmp_path / "d"), "--to", "tgi"])
    assert run.exit_code == 2
    assert "vllm, sglang, speculators, eagle" in run.output


def test_the_published_classes_of_speculators_read_it(tmp_path: Path) -> None:
    speculators = pytest.importorskip("speculators")
    box = boxed_head()
    width = read_head(box)[0].width
    export_head(box, tmp_path, "speculators", lambda ids: ids[:, None].expand(-1, width).float())
    config = speculators.SpeculatorModelConfig.from_pretrained(str(tmp_path))
    assert type(config).__name__ == "Eagle3SpeculatorConfig"
    assert config.eagle_aux_hidden_state_layer_ids == list(read_head(box)[0].layers)
    assert (config.fc_norm, config.norm_output, config.draft_vocab_size) == (True, True, 16384)


def test_the_published_model_of_speculators_has_every_weight(tmp_path: Path) -> None:
    """The class itself, with the target's own folder beside it: no weight is left out or changed."""
    speculators = pytest.importorskip("speculators")
    head = borrowing_head(tmp_path / "head", target="a-file.gguf")
    width = read_head(head)[0].width
    shape = LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    target = LlamaForCausalLM(shape)
    target.save_pretrained(tmp_path / "target")
    table = target.get_output_embeddings().weight.detach()
    export_head(head, tmp_path / "out", "speculators", lambda ids: table[ids], target_name=str(tmp_path / "target"))
    model = speculators.SpeculatorModel.from_pretrained(str(tmp_path / "out"))
    found, (_, ours) = model.state_dict(), read_head(tmp_path / "out")
    assert torch.equal(found["lm_head.weight"], table[::2][: VOCAB // 2].to(found["lm_head.weight"].dtype))
    for name, weight in ours.items():
        theirs = found[name.replace("midlayer.", "layers.0.")]
        assert torch.equal(theirs.to(weight.dtype), weight), name
