"""From options to a trained drafter: the composition of teacher, texts, recipe and loop."""

from __future__ import annotations

import os
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from forerun.drafters.eagle.config import default_layers
from forerun.drafters.medusa import HeadsConfig
from forerun.drafters.vocab import DraftVocabulary
from forerun.errors import MissingDependency
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.train.corpus import Corpus, hash_of
from forerun.train.draft_model import DraftModelRecipe
from forerun.train.eagle import EagleRecipe, eagle_config
from forerun.train.heads import HeadsRecipe
from forerun.train.loop import Report, Trainer
from forerun.train.options import TrainOptions
from forerun.train.provenance import write_provenance
from forerun.train.recipe import Measured, Recipe
from forerun.train.teacher import Teacher, device_of, load_teacher


def train(options: TrainOptions, report: Report = lambda progress: None) -> Measured:
    """Train a drafter into `options.out`; a run that was interrupted goes on where its checkpoint is."""
    accelerator = _accelerator()
    device = device_of(options.device) if accelerator is None else accelerator.device
    checkpoint = open_checkpoint(options.target)
    teacher = load_teacher(checkpoint, device, compiled=options.compile)
    corpus = Corpus(options.data, max_length=options.max_length, holdout=options.holdout)
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        recipe = make_recipe(options, checkpoint, teacher, corpus)
    folder = Path(options.out)
    trainer = Trainer(options, recipe, corpus, folder, accelerator)
    measured = trainer.run(report)
    if trainer.is_main:
        recipe.export(folder, measured)
        learnt = sum(parameter.numel() for parameter in trainer.named.values())
        facts = {"data_hash": hash_of(options.data), "parameters": learnt, "measured": asdict(measured)}
        write_provenance(folder, options, **facts)
    return measured


def make_recipe(options: TrainOptions, checkpoint: Checkpoint, teacher: Teacher, corpus: Corpus) -> Recipe:
    """The recipe of a method."""
    if options.method == "draft-model":
        return DraftModelRecipe(options, teacher, checkpoint)
    vocab, width = teacher.head.shape
    vocabulary = DraftVocabulary.whole(vocab)
    if 0 < options.vocab < vocab:
        vocabulary = DraftVocabulary.most_frequent(corpus.count_tokens(vocab), options.vocab)
    if options.method in ("medusa", "hydra"):
        family = "medusa" if options.method == "medusa" else "hydra"
        heads = HeadsConfig(family, options.depth, options.blocks, width, vocab, target=options.target)  # type: ignore[arg-type]
        return HeadsRecipe(options, teacher, heads, vocabulary, checkpoint)
    layers = options.features or default_layers(teacher.layer_count)
    config = eagle_config(options, checkpoint.config, layers, len(vocabulary))
    return EagleRecipe(options, teacher, config, vocabulary)


def _accelerator() -> Any:
    """accelerate's view of several processes, where there are several (`accelerate launch` says so)."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    try:
        return import_module("accelerate").Accelerator()
    except ImportError:
        raise MissingDependency("several GPUs need accelerate; install forerun[train]") from None
