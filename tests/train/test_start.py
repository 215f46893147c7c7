"""A run that starts from a finished head: it is that head, in the units it learns in; another shape is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.build.engine import make_engine
from forerun.core.errors import InvalidInput
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.drafters.heads.block_head import read_block
from forerun.drafters.heads.eagle import read_mtp
from forerun.drafters.heads.eagle_head import read_head
from forerun.drafters.heads.formats import read_tensors
from forerun.drafters.heads.medusa import read_heads
from forerun.engine.driver import Driver
from forerun.models.load.checkpoint import Checkpoint
from forerun.train.data.corpus import Batches, Corpus
from forerun.train.options import Method, TrainOptions
from forerun.train.recipes.base import Recipe
from forerun.train.recipes.scaling import fold
from forerun.train.run import make_recipe, read_start, train
from forerun.train.teacher import Teacher, load_teacher
from tests.train.test_recipes import lending, options_for

HEADS: list[Method] = ["eagle", "hass", "eagle3", "medusa", "hydra", "mtp", "dspark"]


def begun(options: TrainOptions, tiny: Checkpoint, teacher: Teacher) -> Recipe:
    start = read_start(options, teacher.head.shape[1], len(teacher.head))
    corpus = Corpus(options.data, max_length=options.max_length, holdout=options.holdout)
    return make_recipe(options, tiny, teacher, corpus, start)


def said(recipe: Recipe, options: TrainOptions) -> list[Tensor]:
    corpus = Corpus(options.data, max_length=options.max_length, holdout=options.holdout)
    batch = Batches(corpus, corpus.held_back, 256, 0).at(0)
    with torch.no_grad():
        return [output.rows for output in recipe.outputs(batch, recipe.read(batch), None)]


def half(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.to(torch.bfloat16) for name, weight in weights.items()}


def written(tiny: Checkpoint, drafter: str, folder: Path) -> tuple[list[list[int]], int]:
    """Greedy texts and the rounds they took, in trees."""
    plan = {"draft_model": str(folder)} if drafter != "none" else {}
    speculative = SpeculativeConfig(drafter=drafter, budget=8, width=3, controller="fixed", **plan)
    engine = make_engine(lending(tiny), frozenset({0}), speculative)
    prompts = [Request((7, i, 5), SamplingParams(max_tokens=30)) for i in range(3, 7)]
    seqs = Driver(engine).write(prompts)
    return [seq.tokens for seq in seqs], sum(seq.stats.rounds for seq in seqs)


@pytest.fixture(scope="module")
def teacher(tiny: Checkpoint) -> Teacher:
    return load_teacher(tiny, torch.device("cpu"))


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("method", HEADS)
def test_a_run_starts_as_the_head_it_is_given(
    method: Method, tiny: Checkpoint, texts: Path, tmp_path: Path, teacher: Teacher
) -> None:
    first = options_for(
        method, tiny, texts, tmp_path / "a", steps=4, vocab=0 if method == "medusa" else 40, eval_batches=1
    )
    train(first)
    again = replace(first, out=str(tmp_path / "b"), init=str(tmp_path / "a"), vocab=0, seed=7)
    recipe = begun(again, tiny, teacher)
    if method in ("medusa", "hydra"):
        written = read_heads(tmp_path / "a", "medusa" if method == "medusa" else "hydra")[1]
    elif method == "dspark":
        written = read_block(tmp_path / "a")[1]
    else:
        config, written = read_mtp(tmp_path / "a") if method == "mtp" else read_head(tmp_path / "a")
        assert len(config.rates) == 6  # as deep a simulation for one step as for six
    folded = half(fold(recipe.module()))
    assert all(torch.equal(folded[name], written[name]) for name in folded)
    assert len(recipe.vocabulary) == (len(teacher.head) if method == "medusa" else 40)
    if "d2t" in written:
        assert torch.equal(recipe.vocabulary.tensors()["d2t"], written["d2t"])
    train(replace(again, steps=1, lr=1e-12))
    record = json.loads((tmp_path / "b" / "provenance.json").read_text())
    assert record["arguments"]["init"] == record["init"]["folder"] == "a"
    assert len(record["init"]["sha256"]) == 64
    assert record["init"]["provenance"]["arguments"]["method"] == method
    losses = [json.loads((tmp_path / run / "log.jsonl").read_text().split("\n")[0])["loss"] for run in "ab"]
    assert losses[1] < losses[0]  # four steps of learning were not lost


def test_a_checkpoint_counts_more_than_the_head_it_began_with(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    first = options_for("hydra", tiny, texts, tmp_path / "a", steps=2, eval_batches=1)
    train(first)
    second = replace(first, out=str(tmp_path / "b"), init=str(tmp_path / "a"))
    train(second)
    seen: list[int] = []
    train(replace(second, steps=4), lambda progress: seen.append(progress.step))
    assert seen == [3, 4]
    with pytest.raises(InvalidInput, match="init="):
        train(replace(second, init="", steps=5))


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_wider_mlp_says_the_same_at_first(
    method: Method, tiny: Checkpoint, texts: Path, tmp_path: Path, teacher: Teacher
) -> None:
    first = options_for(method, tiny, texts, tmp_path / "a", steps=2, eval_batches=1)
    train(first)
    inner = read_head(tmp_path / "a")[0].inner
    same = replace(first, init=str(tmp_path / "a"))
    recipes = [begun(replace(same, inner=width), tiny, teacher) for width in (inner, 2 * inner)]
    rows, wider = (said(recipe, first) for recipe in recipes)
    counts = [sum(p.numel() for p in recipe.module().parameters()) for recipe in recipes]
    assert counts[1] > counts[0]
    for ours, theirs in zip(rows, wider, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    with pytest.raises(InvalidInput, match=f"inner={inner} and this run inner={inner // 2}"):
        begun(replace(same, inner=inner // 2), tiny, teacher)


@pytest.mark.slow
@pytest.mark.parametrize("one_byte", [False, True])
def test_further_layers_say_the_same_at_first_and_then_learn(
    tiny: Checkpoint, texts: Path, tmp_path: Path, teacher: Teacher, one_byte: bool
) -> None:
    """To the bit: a new layer adds nothing until it has learnt something."""
    more = {"fc_norm": True, "norm_output": True, "inner": 512}  # wide enough for one byte per weight
    first = options_for("eagle3", tiny, texts, tmp_path / "a", steps=4, eval_batches=1, one_byte=one_byte, **more)
    train(first)
    same = replace(first, init=str(tmp_path / "a"), out=str(tmp_path / "b"), seed=3)
    recipes = [begun(replace(same, layers=layers), tiny, teacher) for layers in (1, 3)]
    counts = [sum(p.numel() for p in recipe.module().parameters()) for recipe in recipes]
    assert counts[1] > counts[0]
    for ours, theirs in zip(*(said(recipe, first) for recipe in recipes), strict=True):
        assert torch.equal(ours, theirs)
    train(replace(same, layers=2))
    config, weights = read_head(tmp_path / "b")
    assert config.depth == 2
    assert float(weights["layers.1.self_attn.o_proj.weight"].abs().max()) > 0
    assert float(weights["layers.1.mlp.down_proj.weight"].abs().max()) > 0
    texts_of = [written(tiny, drafter, tmp_path / "b") for drafter in ("none", "eagle3")]
    assert texts_of[0][0] == texts_of[1][0]
    assert texts_of[1][1] < texts_of[0][1], "something was accepted, so fewer rounds"
    stored = read_tensors(tmp_path / "b")
    assert (stored["layers.1.mlp.down_proj.weight"].dtype == torch.int8) == one_byte
    again = begun(replace(first, init=str(tmp_path / "b"), layers=0), tiny, teacher)  # as deep as it was
    folded = half(fold(again.module()))
    assert all(torch.equal(folded[name], weights[name]) for name in folded)
    assert any(name.startswith("layers.1.") for name in folded)
    with pytest.raises(InvalidInput, match="depth=2 and this run depth=1, which is less"):
        begun(replace(first, init=str(tmp_path / "b"), layers=1), tiny, teacher)


def test_another_kind_or_shape_is_refused(tiny: Checkpoint, texts: Path, tmp_path: Path, teacher: Teacher) -> None:
    train(options_for("eagle3", tiny, texts, tmp_path / "a", steps=1, vocab=40, eval_batches=1))
    train(options_for("hydra", tiny, texts, tmp_path / "h", steps=1, eval_batches=1))
    wrong: list[tuple[Method, str, dict[str, object], str]] = [
        ("eagle", "a", {}, "kind='eagle3' and this run kind='eagle'"),
        ("eagle3", "a", {"fc_norm": True}, "fc_norm=False and this run fc_norm=True"),
        ("eagle3", "a", {"features": (1, 2)}, "layers="),
        ("eagle3", "a", {"vocab": 30}, "vocabulary of 40 and this run vocab=30"),
        ("eagle3", "a", {"train_head": False}, "lm_head.weight"),
        ("medusa", "h", {}, "hydra and this run medusa"),
        ("hydra", "h", {"blocks": 2}, "blocks=1 and this run blocks=2"),
    ]
    for method, folder, more, words in wrong:
        options = options_for(method, tiny, texts, tmp_path / "b", init=str(tmp_path / folder), **more)
        with pytest.raises(InvalidInput, match=words):
            begun(options, tiny, teacher)
    with pytest.raises(InvalidInput, match="draft-model"):
        options_for("draft-model", tiny, texts, tmp_path / "b", init=str(tmp_path / "a"))


def test_hass_starts_from_a_finished_eagle_1_head(
    tiny: Checkpoint, texts: Path, tmp_path: Path, teacher: Teacher
) -> None:
    """The same head and drafts at first; then three passes, detached, with the top-K loss at its full weight."""
    first = options_for("eagle", tiny, texts, tmp_path / "a", steps=4, vocab=40, eval_batches=1)
    train(first)
    hass = options_for(
        "hass", tiny, texts, tmp_path / "b", init=str(tmp_path / "a"), vocab=40, levels=0, eval_batches=1
    )
    ours, theirs = begun(hass, tiny, teacher), begun(replace(first, init=str(tmp_path / "a")), tiny, teacher)
    for rows, before in zip(said(ours, hass), said(theirs, first), strict=True):
        assert torch.equal(rows, before)
    assert ours.law_weight * ours.law_loss.top_weight == pytest.approx(1.0)
    assert ours.law_loss.top_k == 10
    assert theirs.law_loss.top_weight == 0.0
    corpus = Corpus(hass.data, max_length=hass.max_length, holdout=hass.holdout)
    batch, noise = Batches(corpus, corpus.training, 256, 0).at(0), torch.Generator().manual_seed(0)
    assert len(list(ours.outputs(batch, ours.read(batch), noise))) == 3
    train(replace(hass, steps=2))
    record = json.loads((tmp_path / "b" / "provenance.json").read_text())
    assert record["arguments"]["method"] == "hass"
    assert record["init"]["provenance"]["arguments"]["method"] == "eagle"


def test_a_head_in_one_byte_is_trained_further_and_written_as_it_was(
    tiny: Checkpoint, texts: Path, tmp_path: Path, teacher: Teacher
) -> None:
    more = {"steps": 2, "train_head": False, "inner": 512, "fc_norm": True, "norm_output": True, "vocab": 40}
    first = options_for("eagle3", tiny, texts, tmp_path / "a", one_byte=True, eval_batches=1, **more)
    train(first)
    again = replace(first, init=str(tmp_path / "a"), inner=0, vocab=0, one_byte=None)
    recipe = begun(again, tiny, teacher)
    written = read_head(tmp_path / "a")[1]  # widened
    folded = half(fold(recipe.module()))
    assert all(torch.equal(folded[name], written[name]) for name in folded)
    train(replace(again, out=str(tmp_path / "b")))
    train(replace(again, out=str(tmp_path / "c"), one_byte=False))
    kinds = [{name: (tuple(t.shape), t.dtype) for name, t in read_tensors(tmp_path / run).items()} for run in "abc"]
    assert kinds[0] == kinds[1]
    assert any(dtype == torch.int8 for _, dtype in kinds[0].values())
    assert all(dtype != torch.int8 for _, dtype in kinds[2].values())
    sizes = [(tmp_path / run / "model.safetensors").stat().st_size for run in "abc"]
    assert sizes[0] == sizes[1] < sizes[2]


@pytest.mark.parametrize(("first", "then"), [("dspark", "dflash"), ("dflash", "dspark")])
def test_a_block_drafter_may_start_from_the_layers_of_the_other_kind(
    first: Method, then: Method, tiny: Checkpoint, texts: Path, tmp_path: Path, teacher: Teacher
) -> None:
    """As many tokens a pass; DSpark's own two heads are left out, or begin anew."""
    options = options_for(first, tiny, texts, tmp_path / "a", steps=2, vocab=40, eval_batches=1)
    train(options)
    recipe = begun(replace(options, method=then, init=str(tmp_path / "a")), tiny, teacher)
    written, folded = read_block(tmp_path / "a")[1], half(fold(recipe.module()))
    heads = ("markov_head", "confidence_head")
    for name, weight in folded.items():
        assert name.startswith(heads) or torch.equal(weight, written[name]), name
    assert any(name.startswith(heads) for name in folded) == (then == "dspark")
    assert len(said(recipe, options)) == options.depth
    with pytest.raises(InvalidInput, match="a head of the kind"):
        begun(replace(options, method="mtp", init=str(tmp_path / "a")), tiny, teacher)
