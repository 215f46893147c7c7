"""Every recipe end to end on a tiny target: it learns, it can be killed, and what it writes drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from forerun.build.engine import make_engine
from forerun.core import registry
from forerun.core.errors import InvalidInput
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.drafters.base import Parts
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.models.load.quantized.writing import Rounding, write_rounded
from forerun.train.data.corpus import Batches, Corpus
from forerun.train.loop import Progress
from forerun.train.options import METHODS, Method, TrainOptions
from forerun.train.run import make_recipe, train
from forerun.train.teacher import NetTeacher, ServedTeacher, load_teacher

FOR_DECODERS = [method for method in METHODS if method != "specdec"]


def lending(checkpoint: Checkpoint) -> Decoder:
    config = DecoderConfig.from_hf(checkpoint.config)
    return Decoder(config, checkpoint.weights, dtype=torch.float32, device="cpu", kv_slots=None)


def options_for(method: Method, tiny: Checkpoint, texts: Path, out: Path, **more: object) -> TrainOptions:
    base = TrainOptions(
        method=method,
        target=str(tiny.path),
        data=str(texts),
        out=str(out),
        steps=60,
        batch_tokens=512,
        max_length=48,
        levels=0 if method == "eagle" else 3,
        layers=1,
        lr=5e-3 if method in ("medusa", "hydra") else 2e-3,
        holdout=0.15,
        eval_every=60,
        save_every=30,
        device="cpu",
    )
    return replace(base, **more)  # type: ignore[arg-type]


def untrained(options: TrainOptions, out: Path) -> float:
    return train(replace(options, steps=1, lr=1e-12, out=str(out))).tokens_per_round


def tokens_per_round(tiny: Checkpoint, drafter: str, folder: Path, width: int = 1) -> float:
    """Of real rounds on prompts that no text began with."""
    target = lending(tiny)
    draft = lending(open_checkpoint(str(folder))) if drafter == "draft_model" else None
    plan = {"draft_layers" if drafter == "layer_skip" else "draft_model": str(folder)}
    speculative = SpeculativeConfig(drafter=drafter, budget=3 * width, width=width, controller="fixed", **plan)
    engine = make_engine(target, frozenset({0}), speculative, draft_target=draft)
    seqs = [engine.find(engine.submit(Request((7, i, 5), SamplingParams(max_tokens=30)))) for i in range(3, 9)]
    while engine.busy:
        engine.step()
    rounds = sum(seq.stats.rounds for seq in seqs if seq is not None)
    return sum(len(seq.tokens) - 3 for seq in seqs if seq is not None) / rounds


@pytest.mark.slow
@pytest.mark.parametrize("method", FOR_DECODERS)
def test_a_recipe_learns_and_what_it_writes_drafts(
    method: Method, tiny: Checkpoint, texts: Path, tmp_path: Path
) -> None:
    more: dict[str, object] = {"vocab": 48} if method in ("eagle3", "hydra") else {}
    if method == "medusa":  # one linear map of 32 dimensions cannot permute 60 words
        more = {"blocks": 3, "steps": 200, "eval_every": 200, "lr": 1e-2}
    if method == "early-exit":
        more = {"exit": 1, "rank": 24, "lr": 1e-2, "steps": 120, "eval_every": 120}
    options = options_for(method, tiny, texts, tmp_path / "out", **more)
    before = untrained(options, tmp_path / "untrained")
    measured = train(options)
    assert measured.tokens_per_round > before + (0.03 if method == "draft-model" else 0.1)  # it starts well
    assert measured.tree_tokens_per_round >= measured.tokens_per_round
    names = {"hass": "eagle2", "draft-model": "draft_model", "early-exit": "layer_skip", "dflash2": "dflash"}
    drafter = names.get(method, method)
    real = tokens_per_round(tiny, drafter, tmp_path / "out")
    assert real > 1.15
    if drafter not in ("draft_model", "layer_skip"):
        assert tokens_per_round(tiny, drafter, tmp_path / "out", width=3) >= real
    record = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert record["arguments"]["method"] == method
    assert len(record["data_hash"]) == 64


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["eagle", "eagle3", "medusa", "hydra", "early-exit", "mtp", "dspark", "dflash2", "peagle"]
)
def test_a_run_that_was_killed_has_the_same_losses(
    method: Method, tiny: Checkpoint, texts: Path, tmp_path: Path
) -> None:
    options = options_for(
        method, tiny, texts, tmp_path / "whole", steps=10, save_every=4, eval_every=100, batch_tokens=192
    )
    train(options)
    broken = replace(options, out=str(tmp_path / "broken"))

    def kill(progress: Progress) -> None:
        if progress.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(broken, kill)
    seen: list[int] = []
    train(broken, lambda progress: seen.append(progress.step))
    assert seen == [5, 6, 7, 8, 9, 10]  # from the checkpoint of step 4
    curves = [
        [json.loads(line)["loss"] for line in (tmp_path / run / "log.jsonl").read_text().splitlines()]
        for run in ("whole", "broken")
    ]
    assert curves[0] == curves[1]
    assert len(set(curves[0])) == 10


def test_a_checkpoint_of_another_run_is_not_resumed(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    options = options_for("medusa", tiny, texts, tmp_path, steps=2, save_every=1)
    train(options)
    with pytest.raises(InvalidInput, match="lr="):
        train(replace(options, lr=0.5, steps=3))


@pytest.mark.slow
def test_an_exit_adapter_starts_as_the_targets_own_exit(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    """A step that learns nothing writes a plan that drafts as the bare exit does; a deeper exit drafts better."""
    found = {}
    for exit in (1, 2):
        options = options_for("early-exit", tiny, texts, tmp_path / str(exit), exit=exit, steps=1, lr=1e-12)
        train(options)
        found[exit] = tokens_per_round(tiny, "layer_skip", tmp_path / str(exit))
        assert found[exit] == tokens_per_round(tiny, "layer_skip", Path(str(exit)))
    assert found[2] > found[1]
    with pytest.raises(InvalidInput, match="exit=3 is out of range: 1 to 2 of 3 layers"):
        train(options_for("early-exit", tiny, texts, tmp_path / "3", exit=3))


def test_an_exit_adapter_reads_each_text_once_on_a_cpu(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    """From the target as it is served; what is kept is what a pass over the padded batch gives."""
    options = options_for("early-exit", tiny, texts, tmp_path, exit=2)
    corpus, net = Corpus(texts, max_length=48, holdout=0.15), load_teacher(tiny, torch.device("cpu"))
    recipe = make_recipe(options, tiny, ServedTeacher(net, lending(tiny)), corpus)
    batch = Batches(corpus, corpus.training, 768, 0).at(0)
    features, last = net.features(batch.tokens, (2,))
    for _ in range(2):
        reading = recipe.read(batch)
        for got, wanted in ((reading.features[2], features[2]), (reading.last, last)):
            assert torch.allclose(got[batch.learnt], wanted[batch.learnt], atol=1e-4)
        recipe.teacher = ServedTeacher(net, None)  # type: ignore[attr-defined, arg-type]  # it cannot read again


def test_eagle3_can_leave_the_lm_head_to_the_target(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    more = {"steps": 3, "train_head": False, "vocab": 40, "fc_norm": True, "norm_output": True}
    train(options_for("eagle3", tiny, texts, tmp_path, **more))
    files = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert files < 40_000
    speculative = SpeculativeConfig(drafter="eagle3", draft_model=str(tmp_path))
    drafter = registry.drafters.get("eagle3").build(Parts(lending(tiny), None, speculative))
    assert len(drafter.head.vocabulary) == 40


@pytest.mark.slow
def test_eagle3_can_be_narrower_than_its_target(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    """It begins with the target's LM head in the directions that matter most, learns, and drafts."""
    assert DecoderConfig.from_hf(tiny.config).width == 32
    more = {"width": 16, "vocab": 48, "one_byte": True, "fc_norm": True, "norm_output": True}
    options = options_for("eagle3", tiny, texts, tmp_path / "out", **more)
    before = untrained(options, tmp_path / "untrained")
    assert train(options).tokens_per_round > before + 0.1
    assert tokens_per_round(tiny, "eagle3", tmp_path / "out") > 1.15
    with pytest.raises(InvalidInput, match="train-head"):
        replace(options, train_head=False)


def test_nonsense_options_are_refused() -> None:
    for wrong in ({"steps": 0}, {"holdout": 0.0}, {"method": "eagle9"}, {"joint": True}):
        with pytest.raises(InvalidInput):
            TrainOptions(**{"method": "eagle", "target": "t", "data": "d", "out": "o", **wrong})  # type: ignore[arg-type]


def with_wide_layers(tiny: Checkpoint, folder: Path) -> Checkpoint:
    """The same model with MLPs of 64, as groups of 32 need them: what is added is zero."""
    folder.mkdir()
    weights = {name: tiny.weights[name].clone() for name in tiny.weights}
    for name, weight in weights.items():
        more = 64 - tiny.config["intermediate_size"]
        if "mlp" in name:
            weights[name] = torch.nn.functional.pad(weight, (0, more) if "down" in name else (0, 0, 0, more))
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**tiny.config, "intermediate_size": 64}))
    return open_checkpoint(str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8", "w4"])
def test_a_head_learns_for_a_quantised_target(kind: Rounding, tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    """As it will be served: the head reads the rows of the rounded weights, and knows that checkpoint as its target."""
    write_rounded(with_wide_layers(tiny, tmp_path / "wide") if kind == "w4" else tiny, tmp_path / "rounded", kind)
    rounded = open_checkpoint(str(tmp_path / "rounded"))
    assert rounded.weights.quantization is not None
    teacher = load_teacher(rounded, torch.device("cpu"))
    assert isinstance(teacher, NetTeacher)
    assert torch.equal(
        teacher.net.get_parameter("layers.1.down"), rounded.weights["model.layers.1.mlp.down_proj.weight"]
    )
    options = options_for("eagle3", rounded, texts, tmp_path / "out", vocab=48)
    measured = train(options)
    assert measured.tokens_per_round > untrained(options, tmp_path / "untrained") + 0.1
    assert tokens_per_round(rounded, "eagle3", tmp_path / "out") > 1.15
