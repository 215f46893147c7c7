"""The frozen target in its two forms, and the loop in one of several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun.core.errors import InvalidInput, UnsupportedModel
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.train.data.corpus import Batch, Corpus
from forerun.train.loop import Trainer
from forerun.train.options import Method
from forerun.train.run import make_recipe
from forerun.train.teacher import NetTeacher, TransformersTeacher, load_teacher, torch_device
from tests.models.gguf_writer import write_gguf
from tests.models.tiny_checkpoints import VOCAB, make_reference, save
from tests.train.test_recipes import options_for

CPU = torch.device("cpu")


def test_transformers_and_our_network_teach_the_same(tiny: Checkpoint) -> None:
    ours = load_teacher(tiny, CPU)
    theirs = TransformersTeacher(AutoModelForCausalLM.from_pretrained(str(tiny.path), dtype=torch.float32))
    assert isinstance(ours, NetTeacher)
    assert ours.layer_count == theirs.layer_count == 3
    tokens = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    kept, last = ours.features(tokens, (1, 2, -1))
    wanted, wanted_last = theirs.features(tokens, (1, 2, -1))
    torch.testing.assert_close(last, wanted_last, rtol=1e-3, atol=1e-3)
    for layer, rows in kept.items():
        torch.testing.assert_close(rows, wanted[layer], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.head, theirs.head)


def test_other_families_are_taught_by_transformers(texts: Path, tmp_path: Path) -> None:
    save(make_reference("mistral"), tmp_path / "target")
    checkpoint = open_checkpoint(str(tmp_path / "target"))
    teacher = load_teacher(checkpoint, CPU)
    assert isinstance(teacher, TransformersTeacher)
    options = options_for("eagle3", checkpoint, texts, tmp_path / "out", steps=2)
    corpus = Corpus(texts, max_length=48, holdout=0.15)
    trainer = Trainer(options, make_recipe(options, checkpoint, teacher, corpus), corpus, tmp_path / "out")
    losses = [trainer.one_step().loss for _ in range(2)]
    assert all(loss > 0 for loss in losses)


@pytest.mark.parametrize("name", ["lfm2", "nemotron_h", "glm4_moe", "gemma4"])
def test_gguf_files_of_other_families_teach_as_their_folders_do(name: str, tmp_path: Path) -> None:
    more = {"time_step_min": 0.001} if name == "nemotron_h" else None
    model = make_reference(name, more)
    config, weights = save(model, tmp_path)
    teacher = load_teacher(open_checkpoint(write_gguf(tmp_path / "tiny.gguf", config, weights)), CPU)
    tokens = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    kept, last = teacher.features(tokens, (1, -1))
    wanted, wanted_last = TransformersTeacher(model).features(tokens, (1, -1))
    torch.testing.assert_close((kept[1], last), (wanted[1], wanted_last), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(teacher.head, model.get_output_embeddings().weight)


def test_a_gguf_file_in_another_form_than_transformers_cannot_teach(tmp_path: Path) -> None:
    config, weights = save(make_reference("granite4"), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"cannot teach.*Hugging Face folder"):
        load_teacher(open_checkpoint(write_gguf(tmp_path / "tiny.gguf", config, weights)), CPU)


@pytest.mark.parametrize("method", ["draft-model", "medusa"])
def test_the_teacher_does_not_move_while_others_learn(
    method: Method, tiny: Checkpoint, texts: Path, tmp_path: Path
) -> None:
    """A student starts from the same file: were memory shared, it would drag its teacher along."""
    options = options_for(method, tiny, texts, tmp_path, joint=method == "medusa")
    corpus, teacher = Corpus(texts, max_length=48, holdout=0.15), load_teacher(tiny, CPU)
    trainer = Trainer(options, make_recipe(options, tiny, teacher, corpus), corpus, tmp_path)
    before = [teacher.embedding.clone(), tiny.weights["model.norm.weight"].clone()]
    for _ in range(4):  # past the warmup
        trainer.one_step()
    assert torch.equal(teacher.embedding, before[0])
    assert torch.equal(tiny.weights["model.norm.weight"], before[1])
    assert not torch.equal(next(iter(trainer.named.values())), before[0])


class Second:
    """accelerate as the second of two processes sees it."""

    num_processes, process_index, is_main_process = 2, 1, False

    def __init__(self) -> None:
        self.reduced = 0

    def reduce(self, gradient: torch.Tensor, how: str) -> torch.Tensor:
        assert how == "mean"
        self.reduced += 1
        return gradient


def test_every_process_takes_its_own_batches(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    options = options_for("medusa", tiny, texts, tmp_path, steps=2)
    corpus = Corpus(texts, max_length=48, holdout=0.15)
    recipe, other = make_recipe(options, tiny, load_teacher(tiny, CPU), corpus), Second()
    trainer = Trainer(options, recipe, corpus, tmp_path, other)
    seen: list[Batch] = []
    read: Any = recipe.read

    def watched(batch: Batch) -> Any:
        seen.append(batch)
        return read(batch)

    recipe.read = watched  # type: ignore[method-assign]
    trainer.one_step()
    trainer.one_step()
    assert all(torch.equal(batch.tokens, trainer.batches.at(i).tokens) for batch, i in zip(seen, (1, 3), strict=True))
    assert other.reduced == 2 * len(trainer.named)
    assert not trainer.is_main
    # all stop at the same step: what they count is the mean
    trainer.walked_texts, other.reduce = trainer.tests, lambda mean, how: mean + 1  # type: ignore[method-assign]
    added = trainer.walk()
    trainer.accelerator = None
    assert added == pytest.approx((trainer.walk() or 0) + 1)


def test_a_device_that_is_not_there() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(InvalidInput, match="no GPU"):
            torch_device("cuda")
    assert torch_device("cpu") == CPU
