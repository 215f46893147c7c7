"""Medusa-2: heads and a LoRA on the target learn together; the target is another one then, and is marked as such."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.build.engine import make_engine
from forerun.core.errors import DamagedFile, ForerunError, InvalidInput, UnsupportedModel
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.drafters.heads.medusa import read_heads
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.train.data.corpus import Batches, Corpus
from forerun.train.loop import Progress
from forerun.train.network import LoraNet
from forerun.train.options import TrainOptions
from forerun.train.run import make_recipe, train
from forerun.train.teacher import load_net, load_teacher
from tests.train.test_recipes import lending, options_for

CPU = torch.device("cpu")


def joint(tiny: Checkpoint, texts: Path, out: Path, **more: object) -> TrainOptions:
    usual = {"steps": 16, "warmup": 0.25, "joint": True, "rank": 4}
    return options_for("medusa", tiny, texts, out, **{**usual, **more})


@pytest.fixture(scope="module")
def trained(tiny: Checkpoint, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("medusa2")
    train(joint(tiny, texts, out))
    return out


def test_a_lora_begins_as_its_base_and_is_written_as_it_computes(tiny: Checkpoint, tmp_path: Path) -> None:
    """Fused and reordered matrices are split into those of checkpoints, so the adapter can be added to any copy."""
    torch.manual_seed(0)
    net, tokens = load_net(tiny, CPU), torch.randint(1, 60, (2, 12))
    lora = LoraNet(load_net(tiny, CPU), 4)
    assert torch.equal(lora(tokens)[1], net(tokens)[1])
    learnt = {name for name, parameter in lora.named_parameters() if parameter.requires_grad}
    assert len(learnt) == 2 * 4 * len(net.layers)
    with torch.no_grad():
        for up in lora.up.values():
            up.normal_(0.0, 0.1)
    lora.write(tmp_path, str(tiny.path))
    changed = open_checkpoint(str(tmp_path))
    again = load_net(changed, CPU)(tokens)[1]
    torch.testing.assert_close(again, lora(tokens)[1], rtol=1e-4, atol=1e-4)
    assert float((again - net(tokens)[1]).abs().max()) > 0.05


@pytest.mark.slow
def test_the_target_learns_with_its_heads_and_is_marked_as_another(
    trained: Path, tiny: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        moved = open_checkpoint(str(trained / "target"))
    assert f"is {tiny.path} with a LoRA of rank 4: another target" in caplog.text
    assert moved.adapted_from == str(tiny.path)
    assert moved.name == str(trained / "target")
    assert tiny.adapted_from == ""
    drift = {name: float((moved.weights[name] - tiny.weights[name]).abs().max()) for name in tiny.weights}
    changed = {name for name, by in drift.items() if by}
    assert changed == {name for name in tiny.weights if "_proj" in name}
    assert max(drift.values()) < 0.1
    heads, _ = read_heads(trained, "medusa")
    assert heads.target == f"{trained.name}/target"
    record = json.loads((trained / "provenance.json").read_text())
    assert record["arguments"]["joint"] is True


def test_drafting_for_the_adapted_target_writes_its_own_text(trained: Path) -> None:
    """What is drafted for the adapted target is verified by it: the text is its own, whatever the heads guess."""
    texts_of = {}
    for name, target in (("plain", "none"), ("drafted", "medusa")):
        speculative = SpeculativeConfig(
            drafter=target, draft_model=str(trained) if target == "medusa" else None, controller="fixed"
        )
        engine = make_engine(lending(open_checkpoint(str(trained / "target"))), frozenset({0}), speculative)
        ids = [engine.submit(Request((7, i, 5), SamplingParams(max_tokens=30))) for i in range(3, 9)]
        written: dict[int, list[int]] = {i: [] for i in ids}
        while engine.busy:
            for event in engine.step():
                written[event.seq_id] += event.tokens
        texts_of[name] = list(written.values())
    assert texts_of["plain"] == texts_of["drafted"]


def test_the_target_moves_after_the_warmup_and_slower_than_the_heads(
    tiny: Checkpoint, texts: Path, tmp_path: Path
) -> None:
    options = joint(tiny, texts, tmp_path, steps=4, warmup=0.5)
    corpus = Corpus(options.data, max_length=48, holdout=0.15)
    recipe = make_recipe(options, tiny, load_teacher(tiny, CPU), corpus)
    assert recipe.rates() == {"target.": 0.25}
    batch = Batches(corpus, corpus.training, 256, 0).at(0)
    reading, noise = recipe.read(batch), torch.Generator().manual_seed(0)
    shifts = [output.shift for output in recipe.outputs(batch, reading, noise)]
    assert shifts == [1, 2, 3, 0]  # the heads, and the target's own next token while it learns
    assert [output.shift for output in recipe.outputs(batch, reading, None)] == [1, 2, 3]


@pytest.mark.slow
def test_a_joint_run_that_was_killed_goes_on(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    def kill(progress: Progress) -> None:
        if progress.step == 4:
            raise KeyboardInterrupt

    whole, broken = (joint(tiny, texts, tmp_path / run, steps=6, save_every=3, eval_batches=1) for run in "ab")
    train(whole)
    with pytest.raises(KeyboardInterrupt):
        train(broken, kill)
    train(broken)
    adapters = [load_file(tmp_path / run / "target" / "adapter_model.safetensors") for run in "ab"]
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert any(float(tensor.abs().max()) > 0 for name, tensor in adapters[0].items() if "lora_B" in name)


def test_what_cannot_be_trained_jointly_is_refused(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="whole vocabulary"):
        train(joint(tiny, texts, tmp_path, vocab=40))
    fused = replace(tiny, weights={"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(1)})  # type: ignore[arg-type]
    options = joint(tiny, texts, tmp_path)
    corpus = Corpus(options.data, max_length=48, holdout=0.15)
    with pytest.raises(InvalidInput, match="name q_proj"):
        make_recipe(options, fused, load_teacher(tiny, CPU), corpus)
    with pytest.raises(InvalidInput, match="only for medusa"):
        replace(joint(tiny, texts, tmp_path), method="hydra")


def test_adapters_that_compute_something_else_are_refused(trained: Path, tmp_path: Path) -> None:
    settings = json.loads((trained / "target" / "adapter_config.json").read_text())
    tensors = load_file(trained / "target" / "adapter_model.safetensors")
    some = next(name for name in tensors if name.endswith("q_proj.lora_B.weight"))

    def refused(values: dict[str, object], kept: dict[str, torch.Tensor]) -> ForerunError:
        (tmp_path / "adapter_config.json").write_text(json.dumps(values))
        save_file(kept, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ForerunError) as found:
            open_checkpoint(str(tmp_path))
        return found.value

    assert isinstance(refused(settings | {"use_dora": True}, tensors), UnsupportedModel)
    assert isinstance(refused(settings | {"peft_type": "IA3"}, tensors), UnsupportedModel)
    assert isinstance(refused(settings | {"r": 0}, tensors), DamagedFile)
    assert isinstance(refused(settings | {"r": 3}, tensors), DamagedFile)
    assert "no two matrices" in str(refused(settings, {k: v for k, v in tensors.items() if k != some}))
    assert "another model's" in str(refused(settings, tensors | {some: torch.zeros(7, 4)}))
    assert "no part of a LoRA" in str(refused(settings, tensors | {"model.norm.weight": torch.zeros(4)}))
    assert "of another adapter" in str(
        refused(settings | {"base_model_name_or_path": str(trained / "target")}, tensors)
    )
