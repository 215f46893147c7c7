"""Block drafters: what is learnt is what drafts, blocks see what they may, and files hold what was learnt."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.core.errors import DamagedFile, InvalidInput
from forerun.core.types import Needs, Verdict
from forerun.drafters.heads.block import BlockDrafter, BlockSteps, load_block
from forerun.drafters.heads.block_head import read_block, write_block
from forerun.drafters.heads.formats import read_config, write_config
from forerun.models.decoder import Decoder
from forerun.models.load.checkpoint import Checkpoint
from forerun.testing import FakeSeq
from forerun.train.data.corpus import Batch, Batches, Corpus
from forerun.train.export import export_head, rows_of_target
from forerun.train.options import Method
from forerun.train.recipes.base import loss_of, shifted, survival_weights
from forerun.train.recipes.block import BlockRecipe, attend_blocks, choose_anchors, kind_for
from forerun.train.recipes.scaling import fold
from forerun.train.run import make_recipe
from forerun.train.teacher import load_teacher
from tests.drafters.tiny_heads import save_head
from tests.train.test_recipes import lending, options_for

BLOCKS: list[Method] = ["dflash", "dflash2", "dspark", "peagle"]


def recipe_for(method: Method, tiny: Checkpoint, texts: Path, out: Path, **more: object) -> BlockRecipe:
    """A drafter of two layers, at its beginning, with every weight away from zero and one."""
    options = options_for(method, tiny, texts, out, layers=2, vocab=40, levels=4, **more)
    teacher = load_teacher(tiny, torch.device("cpu"))
    corpus = Corpus(options.data, max_length=options.max_length, holdout=options.holdout)
    torch.manual_seed(1)
    recipe = make_recipe(options, tiny, teacher, corpus)
    assert isinstance(recipe, BlockRecipe)
    with torch.no_grad():
        for parameter in recipe.module().parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) * parameter.abs().mean().clamp(min=0.1))
    return recipe


def one_batch(texts: Path) -> Batch:
    corpus = Corpus(str(texts), max_length=48, holdout=0.15)
    return Batches(corpus, corpus.held_back, 128, 0).at(0)


def written(recipe: BlockRecipe, folder: Path) -> Path:
    weights = {name: weight.clone() for name, weight in fold(recipe.module()).items()}
    write_block(folder, recipe.config, weights | recipe.vocabulary.tensors())
    return folder


def drafting(kind: Method, folder: Path, target: Decoder) -> BlockDrafter:
    return BlockDrafter(load_block(folder, target, kind_for(kind)))


def show(drafter: BlockDrafter, target: Decoder, tokens: list[int]) -> FakeSeq:
    """The drafter after it observed these tokens as a prompt."""
    seq = FakeSeq(0, tokens)
    trees, scores = target.prefill([seq], Needs(drafter.needs.hidden_layers))
    drafter.observe([seq], trees, scores, Verdict.whole_chain(trees, [tokens[-1]]))
    target.release(seq)
    return seq


@pytest.mark.parametrize("kind", BLOCKS)
@torch.no_grad()
def test_what_is_learnt_is_what_drafts(kind: Method, tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    """Logits of a block in training, anchor by anchor, against those of the drafter behind the same text."""
    recipe, batch = recipe_for(kind, tiny, texts, tmp_path, anchors=1.0), one_batch(texts)
    target = lending(tiny)
    drafter = drafting(kind, written(recipe, tmp_path), target)
    head, outputs = recipe.lm_head(), list(recipe.outputs(batch, recipe.read(batch), None))
    assert len(outputs) == 4
    compared = 0
    for place in outputs[0].at[:: len(outputs[0].at) // 5].tolist():  # type: ignore[index, union-attr]
        row, anchor = divmod(place, batch.tokens.shape[1])
        text = batch.tokens[row].tolist()
        seq = show(drafter, target, text[: anchor + 1])
        drafter._runner.read([seq], [drafter._sequences[0]])
        steps = BlockSteps(drafter.head, drafter._runner.begin([seq]), [seq])
        for level, output in enumerate(outputs):
            tokens = torch.tensor([[text[anchor + level]]]) if level else None
            logits = steps.first() if tokens is None else steps.after(torch.tensor([[0]]), tokens)[:, 0]
            where = (output.at == place).nonzero()  # type: ignore[union-attr]
            if len(where):
                wanted = output.rows[where[0]] @ head.t()
                torch.testing.assert_close(logits, wanted, rtol=2e-3, atol=2e-3)
                compared += 1
                if kind == "dspark":
                    judge = recipe.module().get_submodule("confidence_head.proj")
                    spoken = recipe.teacher.embedding[text[anchor + level]][None]
                    known = recipe.known_of(spoken)
                    plain = 2 * output.rows[where[0]] - recipe.corrected(output.rows[where[0]], known)
                    sure = torch.sigmoid(judge(torch.cat((plain, known), -1)))
                    assert steps.sure is not None
                    torch.testing.assert_close(steps.sure, sure, rtol=2e-3, atol=2e-3)
        drafter.forget(seq)
    assert compared >= 12


@pytest.mark.parametrize("wrong", ["anchor", "block"])
def test_a_block_sees_the_context_before_its_anchor_and_itself(wrong: str) -> None:
    """Against attention written out row by row; with another anchor, or another block's keys, it differs."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = random(2, 4, 6, 8), random(2, 2, 6, 8), random(2, 2, 6, 8)  # two blocks of three rows
    past, kept, anchors = random(2, 2, 5, 8), random(2, 2, 5, 8), torch.tensor([[0, 3], [2, 5]])

    def by_hand(anchors: Tensor, swap: bool = False) -> Tensor:
        found = torch.zeros(2, 6, 4, 8)
        for b in range(2):
            for row in range(6):
                block = slice(0, 3) if (row < 3) != swap else slice(3, 6)
                for head in range(4):
                    length = int(anchors[b, row // 3])
                    keys = torch.cat((past[b, head // 2, :length], k[b, head // 2, block]))
                    values = torch.cat((kept[b, head // 2, :length], v[b, head // 2, block]))
                    weights = (keys @ q[b, head, row] / 8**0.5).softmax(-1)
                    found[b, row, head] = weights @ values
        return found.flatten(2)

    found = attend_blocks(q, k, v, past, kept, anchors)
    torch.testing.assert_close(found, by_hand(anchors))
    other = by_hand(anchors.clamp(max=4)) if wrong == "anchor" else by_hand(anchors, swap=True)
    assert not torch.allclose(found, other, atol=1e-3)


@pytest.mark.parametrize("kind", BLOCKS)
@torch.no_grad()
def test_a_run_begins_with_laws_that_are_nearly_even(
    kind: Method, tiny: Checkpoint, texts: Path, tmp_path: Path
) -> None:
    """No token is certain before anything is learnt; with the last norm at full size one is."""
    options = options_for(kind, tiny, texts, tmp_path, layers=2, levels=4)
    teacher = load_teacher(tiny, torch.device("cpu"))
    corpus = Corpus(options.data, max_length=options.max_length, holdout=options.holdout)
    torch.manual_seed(1)
    recipe, batch = make_recipe(options, tiny, teacher, corpus), one_batch(texts)
    loss = float(loss_of(recipe, batch, None)[0])
    assert loss < 1.3 * math.log(len(teacher.head))
    recipe.module().get_parameter("norm.weight").fill_(1.0)
    assert float(loss_of(recipe, batch, None)[0]) > 2 * loss


def test_survival_weights_are_the_length_that_hangs_on_a_position() -> None:
    """Drafts of three positions and of two: sums of products of the chances up to each later position."""
    a, b, c = 0.9, 0.6, 0.8
    weights = survival_weights(torch.tensor([[a, b, c], [a, b, 0.0]]))
    wanted = [[a + a * b + a * b * c, a * b + a * b * c, a * b * c], [a + a * b, a * b, 0.0]]
    torch.testing.assert_close(weights, torch.tensor(wanted))


@pytest.mark.parametrize("kind", BLOCKS)
def test_positions_count_as_far_as_drafts_get(kind: Method, tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    """The loss against its definition, written out from each level's laws; a decay gives another one."""
    recipe, batch = recipe_for(kind, tiny, texts, tmp_path, anchors=1.0), one_batch(texts)
    found, _ = loss_of(recipe, batch, None)
    reading = recipe.read(batch)
    rows: dict[int, list[tuple[Tensor, Tensor, bool]]] = {}
    for output in recipe.outputs(batch, reading, None):
        assert output.at is not None
        for place, row in zip(output.at.tolist(), output.rows, strict=True):
            if output.shift and place not in rows:
                continue  # it starts within a prompt, where nothing is drafted
            spoken = place + output.shift
            p = (reading.last.flatten(0, 1)[spoken] @ recipe.truth_head().t()).log_softmax(-1)
            q = (row @ recipe.lm_head().t()).log_softmax(-1)
            inside = reading.inside is None or bool(reading.inside.flatten()[spoken])
            overlap = torch.minimum(p.exp(), q.exp()).sum().detach() * inside
            rows.setdefault(place, []).append(((p.exp() * (p - q)).sum() * inside, overlap, inside))
    total, count = torch.zeros(()), 0.0
    for draft in rows.values():
        weights = survival_weights(torch.stack([0.5 + 0.5 * overlap for _, overlap, _ in draft])[None])[0]
        for weight, (loss, _, inside) in zip(weights.tolist(), draft, strict=True):
            total, count = total + weight * loss, count + weight * inside
    torch.testing.assert_close(found, total / count, rtol=1e-3, atol=1e-4)
    names = ("norm.weight", "layers.0.mlp.down_proj.weight", "fc.weight")
    parameters = [recipe.module().get_parameter(name) for name in names]
    ours, wanted = (torch.autograd.grad(one, parameters) for one in (found, total / count))
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)
    recipe.options = replace(recipe.options, positions="decay")
    assert not torch.isclose(loss_of(recipe, batch, None)[0], found, rtol=1e-2)


def test_anchors_are_chosen_before_tokens_to_be_learnt() -> None:
    learnt = torch.zeros(3, 40, dtype=torch.bool)
    learnt[0, 10:30], learnt[1, 20:24], learnt[2, 1:40] = True, True, True
    anchors = choose_anchors(learnt, 0.5, seed=3)
    assert anchors.shape == (3, 24)  # half of 39, in eights
    assert bool((anchors.diff(dim=1) > 0).all())
    useful = shifted(learnt, 1).gather(1, anchors)
    assert useful.sum(1).tolist() == [20, 4, 24]
    assert choose_anchors(learnt, 0.5, seed=3).equal(anchors)
    assert not choose_anchors(learnt, 0.5, seed=4).equal(anchors)


@pytest.mark.parametrize("kind", BLOCKS)
def test_int8_is_half_the_file_and_nearly_the_same(
    kind: Method, tiny: Checkpoint, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.drafters.heads.block_head._SMALLEST", 64)
    recipe = recipe_for(kind, tiny, texts, tmp_path)
    weights = {name: weight.to(torch.bfloat16) for name, weight in fold(recipe.module()).items()}
    weights |= recipe.vocabulary.tensors()
    write_block(tmp_path / "whole", recipe.config, weights)
    write_block(tmp_path / "small", recipe.config, weights, "int8")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "small")]
    assert sizes[1] < 0.8 * sizes[0]
    config, back = read_block(tmp_path / "small")
    assert config == recipe.config
    assert back.keys() == weights.keys()
    for name, weight in weights.items():
        if weight.is_floating_point():
            step = weight.float().abs().amax(-1, keepdim=True) / 127 if weight.dim() == 2 else 0.0
            assert bool(((back[name].float() - weight.float()).abs() <= 0.51 * step + 1e-6).all()), name
    assert torch.equal(back["fc.weight"], weights["fc.weight"])  # unequal columns are not rounded together


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind != "dflash2"])
@torch.no_grad()
def test_what_vllm_gets_drafts_the_same(kind: Method, tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    """Whole tables in place of the small matrices, LM head rows of its own, and keys that vLLM reads."""
    recipe, target = recipe_for(kind, tiny, texts, tmp_path), lending(tiny)
    folder, name = written(recipe, tmp_path / "ours"), str(tiny.path)
    with pytest.raises(InvalidInput, match="--target"):
        export_head(folder, tmp_path / "theirs", "vllm", None)
    rows = {"head_rows": rows_of_target(name), "embed_rows": rows_of_target(name, embedding=True)}
    flag = export_head(folder, tmp_path / "theirs", "vllm", **rows)  # type: ignore[arg-type]
    method = '"eagle3", "parallel_drafting": true' if kind == "peagle" else f'"{kind}"'
    assert f'"method": {method},' in flag
    values, (config, weights) = read_config(tmp_path / "theirs"), read_block(tmp_path / "theirs")
    nested = values.get("dflash_config", values)
    if kind == "peagle":
        assert values["architectures"] == ["LlamaForCausalLMEagle3"]
        assert values["pard_token"] == recipe.config.mask_token
        assert nested["eagle_aux_hidden_state_layer_ids"] == [*recipe.config.layers]
    else:
        assert nested["target_layer_ids"] == [layer - 1 for layer in recipe.config.layers]
    assert nested["mask_token_id"] == recipe.config.mask_token
    assert "forerun" not in values
    assert weights["lm_head.weight"].shape == (40, config.width)
    if kind == "dspark":
        assert values["architectures"] == ["Qwen3DSparkModel"]
        assert weights["markov_head.markov_w1.weight"].shape == (config.vocab_size, config.markov_rank)
    drafts = []
    for one in (folder, tmp_path / "theirs"):
        drafter = drafting(kind, one, target)
        seq = show(drafter, target, [3, 7, 9, 4, 8])
        drafter._runner.read([seq], [drafter._sequences[0]])
        steps = BlockSteps(drafter.head, drafter._runner.begin([seq]), [seq])
        drafts.append(torch.cat((steps.first(), steps.after(torch.tensor([[0]]), torch.tensor([[5]]))[:, 0])))
    torch.testing.assert_close(drafts[0], drafts[1], rtol=0.05, atol=0.15)  # one of them in bfloat16


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("layer_types", ["sliding_attention"], "layer_types"),
        ("layer_types", ["linear_attention", "full_attention"], "layer_types"),
        ("markov_head_type", "rnn", "Markov head of the type 'rnn'"),
        ("projector_type", "domino", "head of the type 'domino'"),
        ("attention_mode", "mla", "attention of the type 'mla'"),
        ("attention_sink_bias", True, "attention sinks"),
        ("fc_norm", True, "norms on every feature"),
        ("mask_token_id", 99999, "mask_token_id"),
    ],
)
def test_variants_that_compute_something_else_are_refused(key: str, value: object, words: str, tmp_path: Path) -> None:
    save_head("dspark", tmp_path, 24)
    read_block(tmp_path)
    write_config(tmp_path, {**read_config(tmp_path), key: value})
    with pytest.raises(DamagedFile, match=words):
        read_block(tmp_path)


def test_a_head_of_the_other_kind_is_named(tmp_path: Path) -> None:
    save_head("dspark", tmp_path, 24)
    with pytest.raises(InvalidInput, match="use drafter='dspark'"):
        read_block(tmp_path, kind="dflash")
