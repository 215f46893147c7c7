"""Run a training: build teacher, corpus, recipe and loop from the options, and write the drafter."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from forerun.build.engine import load_target
from forerun.core.errors import InvalidInput, MissingDependency
from forerun.core.params import EngineConfig
from forerun.drafters.heads.block_head import BlockConfig
from forerun.drafters.heads.eagle_head import EagleConfig, default_layers
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.drafters.heads.medusa import HeadsConfig
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.train.data.corpus import Batches, Corpus, hash_of
from forerun.train.data.folder import require_texts
from forerun.train.data.settings import other_targets
from forerun.train.loop import Report, Trainer
from forerun.train.lora import require_separate_matrices
from forerun.train.options import TrainOptions
from forerun.train.provenance import write_provenance
from forerun.train.recipes.base import Measured, Recipe
from forerun.train.recipes.block import BlockRecipe, block_config
from forerun.train.recipes.draft_model import DraftModelRecipe
from forerun.train.recipes.eagle import EagleRecipe, eagle_config
from forerun.train.recipes.early_exit import EarlyExitRecipe
from forerun.train.recipes.medusa import HeadsRecipe
from forerun.train.recipes.mtp import MtpRecipe
from forerun.train.recipes.scaling import Sizes, measure_features, measure_sizes
from forerun.train.recipes.specdec import SpecDecRecipe
from forerun.train.source_teacher import load_source_teacher
from forerun.train.start import Start, read_start
from forerun.train.teacher import ServedTeacher, Teacher, device_of, load_teacher

log = logging.getLogger(__name__)


def train(
    options: TrainOptions, report: Report = lambda progress: None, say: Callable[[str], None] = log.info
) -> Measured:
    """Train a drafter into `options.out`; an interrupted run resumes from its checkpoint."""
    require_texts(options)  # before anything is loaded
    accelerator = _accelerator()
    device = device_of(options.device) if accelerator is None else accelerator.device
    corpus = Corpus(
        options.data,
        max_length=options.max_length,
        holdout=options.holdout,
        hottest=options.hottest,
        cut_loops=options.cut_loops,
    )
    say(corpus.in_words(options.steps * options.batch_tokens))
    if (warning := other_targets(options.data, options.target)) is not None:
        say(warning)
    checkpoint, start = open_checkpoint(options.target), None
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        if options.method == "specdec":
            recipe: Recipe = _specdec_recipe(options, checkpoint, corpus, device)
        else:
            teacher = _load_teacher(options, checkpoint, device)
            corpus.must_fit(len(teacher.head))
            start = read_start(options, teacher.head.shape[1], len(teacher.head))
            recipe = make_recipe(options, checkpoint, teacher, corpus, start)
    folder = Path(options.out)
    trainer, started = Trainer(options, recipe, corpus, folder, accelerator), perf_counter()
    try:
        measured = trainer.run(report)
    except KeyboardInterrupt:
        if trainer.is_main and trainer.resume():  # a step may be half made: the last that was saved is whole
            _write(trainer, trainer.measure(), start, perf_counter() - started)
            say(
                f"stopped: {folder} holds the drafter of step {trainer.step}; the same command goes on from there"
            )
        raise
    if trainer.is_main:
        _write(trainer, measured, start, perf_counter() - started)
    return measured


def _write(trainer: Trainer, measured: Measured, start: Start | None, seconds: float) -> None:
    """The drafter of a run, and how it came about."""
    options, folder = trainer.options, trainer.folder
    trainer.recipe.export(folder, measured)
    learnt = sum(parameter.numel() for parameter in trainer.named.values())
    facts: dict[str, Any] = {"data_hash": hash_of(options.data), "parameters": learnt}
    facts |= {"minutes": round(seconds / 60, 1), "step": trainer.step, "measured": asdict(measured)}
    if start is not None:
        facts["init"] = start.record()
    write_provenance(folder, options, **facts)


def _load_teacher(options: TrainOptions, checkpoint: Checkpoint, device: torch.device) -> Teacher:
    teacher = load_teacher(checkpoint, device, compiled=options.compile)
    if options.method == "early-exit" and device.type == "cpu":
        return ServedTeacher(teacher, load_target(checkpoint, EngineConfig(device="cpu")))
    return teacher


def _specdec_recipe(
    options: TrainOptions, checkpoint: Checkpoint, corpus: Corpus, device: torch.device
) -> Recipe:
    """Its target has an encoder, so its teacher is another."""
    teacher = load_source_teacher(checkpoint, device)
    corpus.must_fit(len(teacher.head))
    return SpecDecRecipe(options, teacher, corpus)


def make_recipe(
    options: TrainOptions,
    checkpoint: Checkpoint,
    teacher: Teacher,
    corpus: Corpus,
    start: Start | None = None,
) -> Recipe:
    """The recipe of a method, at its beginning or with the weights of a finished head."""
    _check_shape(options, teacher)
    if options.method == "draft-model":
        return DraftModelRecipe(options, teacher, checkpoint)
    vocab, width = teacher.head.shape
    vocabulary = DraftVocabulary.whole(vocab)
    if start is not None:
        vocabulary = start.vocabulary
    elif 0 < options.vocab < vocab:
        vocabulary = DraftVocabulary.most_frequent(corpus.count_tokens(vocab), options.vocab)
    if options.method == "early-exit":
        return EarlyExitRecipe(options, teacher, checkpoint, vocabulary)
    if options.method in ("medusa", "hydra"):
        family = "medusa" if options.method == "medusa" else "hydra"
        shape = HeadsConfig(family, options.depth, options.blocks, width, vocab, target=options.target)  # type: ignore[arg-type]
        if start is not None:
            start.must_fit(shape)
        if options.joint:
            require_separate_matrices(checkpoint.weights)
        heads = HeadsRecipe(options, teacher, shape, vocabulary, _sizes(options, teacher, corpus))
        if start is not None:
            start.fill(heads.heads, teacher.embedding)
        return heads
    if options.method in ("dflash", "dspark"):
        return _block_recipe(options, checkpoint, teacher, corpus, vocabulary, start)
    if options.one_byte is None and start is not None:
        options = replace(options, one_byte=start.one_byte)
    theirs = start.config if start is not None and isinstance(start.config, EagleConfig) else None
    layers = options.features or (() if theirs is None else theirs.layers)
    config = eagle_config(
        options, checkpoint.config, layers or default_layers(teacher.layer_count), len(vocabulary)
    )
    if theirs is not None:
        config = replace(config, inner=options.inner or theirs.inner)
        if config.kind == "eagle3" and not options.layers:
            config = replace(config, depth=theirs.depth)
    if start is not None:
        start.must_fit(config)
    sizes = None if config.kind == "eagle3" else _sizes(options, teacher, corpus)
    if config.kind == "mtp" and sizes is not None:
        eagle: EagleRecipe = MtpRecipe(options, teacher, config, vocabulary, sizes)
    else:
        eagle = EagleRecipe(options, teacher, config, vocabulary, sizes)
    if start is not None:
        start.fill(eagle.module(), teacher.embedding)
    return eagle


def _check_shape(options: TrainOptions, teacher: Teacher) -> None:
    """Raise where the options ask for more than the target has."""
    most, width = teacher.layer_count, teacher.head.shape[1]
    if wrong := [layer for layer in options.features if not -1 <= layer <= most]:
        raise InvalidInput(f"features={wrong[0]} is out of range: the target has {most} layers; 0 to {most}")
    if options.width > width:
        raise InvalidInput(f"width={options.width} is out of range: at most the target's own, {width}")


def _block_recipe(
    options: TrainOptions,
    checkpoint: Checkpoint,
    teacher: Teacher,
    corpus: Corpus,
    vocabulary: DraftVocabulary,
    start: Start | None,
) -> Recipe:
    counts = corpus.count_tokens(len(teacher.head))
    config = block_config(options, checkpoint.config, teacher.layer_count, counts, len(vocabulary))
    if start is not None and isinstance(start.config, BlockConfig):
        config = replace(config, mask_token=start.config.mask_token)
        start.must_fit(config)
    first = Batches(corpus, corpus.training, options.batch_tokens, options.seed).at(0)
    features = measure_features(teacher, first, config.layers)
    block = BlockRecipe(options, teacher, config, vocabulary, measure_sizes(teacher, first), features)
    if start is not None:
        start.fill(block.module(), teacher.embedding)
    return block


def _sizes(options: TrainOptions, teacher: Teacher, corpus: Corpus) -> Sizes:
    """Of what the target says of the first batch, whichever step a run is at."""
    return measure_sizes(teacher, Batches(corpus, corpus.training, options.batch_tokens, options.seed).at(0))


def _accelerator() -> Any:
    """accelerate's view of several processes, where there are several (`accelerate launch` says so)."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    try:
        return import_module("accelerate").Accelerator()
    except ImportError:
        raise MissingDependency("several GPUs need accelerate; install forerun[train]") from None
