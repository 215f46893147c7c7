"""Run a training: build teacher, corpus, recipe and loop from the options, and write the drafter.

A run may start from a finished head (`--init`) of its own method and shape, so that the first step computes what the
head did. Three things may differ: the MLP of an EAGLE head may become wider and an EAGLE-3 head may get further layers,
by output weights that start at zero; and DFlash and DSpark may start from each other's layers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from forerun.build.engine import load_target
from forerun.build.fingerprint import fingerprint_of
from forerun.core.errors import InvalidInput, MissingDependency
from forerun.core.params import EngineConfig
from forerun.drafters.heads.base import vocabulary_of
from forerun.drafters.heads.block_config import BlockConfig, BlockKind
from forerun.drafters.heads.block_head import read_block
from forerun.drafters.heads.eagle import read_mtp
from forerun.drafters.heads.eagle_head import EagleConfig, default_layers, read_head
from forerun.drafters.heads.formats import SCALES, DraftVocabulary, read_config, read_tensors
from forerun.drafters.heads.medusa import HeadsConfig, read_heads
from forerun.heads import kind_of
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.train.checkpoint import refuse_another_run, write_provenance
from forerun.train.data.corpus import Batch, Batches, Corpus, hash_of
from forerun.train.data.folder import other_targets, require_texts
from forerun.train.loop import Report, Trainer
from forerun.train.network import require_separate_matrices
from forerun.train.options import BLOCKS, TrainOptions
from forerun.train.recipes.base import Measured, Recipe
from forerun.train.recipes.block import BlockRecipe, SpecDecRecipe, block_config, kind_for
from forerun.train.recipes.draft_model import DraftModelRecipe, EarlyExitRecipe
from forerun.train.recipes.eagle import EagleRecipe, eagle_config
from forerun.train.recipes.medusa import HeadsRecipe
from forerun.train.recipes.scaling import measure_features, measure_sizes, unfold
from forerun.train.teacher import ServedTeacher, Teacher, load_source_teacher, load_teacher, torch_device

log = logging.getLogger(__name__)


def train(
    options: TrainOptions, report: Report = lambda progress: None, say: Callable[[str], None] = log.info
) -> Measured:
    require_texts(options)  # before anything is loaded
    refuse_another_run(Path(options.out), options)
    accelerator = _accelerator()
    device = torch_device(options.device) if accelerator is None else accelerator.device
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
        if options.method == "specdec":  # its target has an encoder, so its teacher is another
            source = load_source_teacher(checkpoint, device)
            corpus.must_fit(len(source.head))
            recipe: Recipe = SpecDecRecipe(options, source, corpus)
        else:
            teacher = load_teacher(checkpoint, device, compiled=options.compile)
            if options.method == "early-exit" and device.type == "cpu":
                teacher = ServedTeacher(teacher, load_target(checkpoint, EngineConfig(device="cpu")))
            corpus.must_fit(len(teacher.head))
            start = read_start(options, teacher.head.shape[1], len(teacher.head))
            recipe = make_recipe(options, checkpoint, teacher, corpus, start)
    folder = Path(options.out)
    trainer, started = Trainer(options, recipe, corpus, folder, accelerator), perf_counter()
    try:
        measured = trainer.run(report)
    except KeyboardInterrupt:
        if trainer.is_main and trainer.resume():  # a step may be half made: the last that was saved is whole
            goes_on = f"the same command goes on from step {trainer.step}"
            _write(trainer, trainer.result(), checkpoint, start, perf_counter() - started)
            say(f"stopped: {folder} holds the drafter of step {trainer.best_step}; {goes_on}")
        raise
    if trainer.is_main:
        if (best := trainer.best) is not None:
            through = f"{best.tokens_per_round:.3f} tokens per round through the texts of --measure-on"
            say(f"step {best.step} of {trainer.step} is written: {through}")
        _write(trainer, measured, checkpoint, start, perf_counter() - started)
    return measured


def _write(trainer: Trainer, measured: Measured, checkpoint: Checkpoint, start: Start | None, seconds: float) -> None:
    """The drafter of a run, the fingerprint of its target, and how it came about."""
    options, folder = trainer.options, trainer.folder
    trainer.recipe.export(folder, measured)
    if options.method != "draft-model" and (target := fingerprint_of(checkpoint)) is not None:
        target.write(folder)
    learnt = sum(parameter.numel() for parameter in trainer.named.values())
    facts: dict[str, Any] = {"data_hash": hash_of(options.data), "parameters": learnt}
    facts |= {"minutes": round(seconds / 60, 1), "step": trainer.step, "measured": asdict(measured)}
    if trainer.best is not None:
        facts["best"] = trainer.best.facts()
    if start is not None:
        facts["init"] = start.record()
    write_provenance(folder, options, **facts)


def make_recipe(
    options: TrainOptions, checkpoint: Checkpoint, teacher: Teacher, corpus: Corpus, start: Start | None = None
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
    # sizes are those of what the target says of the first batch, whichever step a run is at
    first = Batches(corpus, corpus.training, options.batch_tokens, options.seed).at(0)
    recipe: HeadsRecipe | BlockRecipe | EagleRecipe
    if options.method == "medusa" or options.method == "hydra":
        if options.joint:
            require_separate_matrices(checkpoint.weights)
        shape = HeadsConfig(options.method, options.depth, options.blocks, width, vocab, target=options.target)
        recipe = HeadsRecipe(options, teacher, shape, vocabulary, measure_sizes(teacher, first))
    elif options.method in BLOCKS:
        counts = corpus.count_tokens(vocab)
        block = block_config(options, checkpoint.config, teacher.layer_count, counts, len(vocabulary))
        if start is not None and isinstance(start.config, BlockConfig):
            block = replace(block, mask_token=start.config.mask_token)
        features = measure_features(teacher, first, block.layers)
        recipe = BlockRecipe(options, teacher, block, vocabulary, measure_sizes(teacher, first), features)
    else:
        recipe = _eagle_recipe(options, checkpoint, teacher, vocabulary, first, start)
    if start is not None:
        start.must_fit(recipe.config)
        start.fill(recipe.heads if isinstance(recipe, HeadsRecipe) else recipe.module(), teacher.embedding)
    return recipe


def _eagle_recipe(
    options: TrainOptions, checkpoint: Checkpoint, teacher: Teacher, vocabulary: DraftVocabulary, first: Batch,
    start: Start | None,
) -> EagleRecipe:  # fmt: skip
    if options.one_byte is None and start is not None:
        options = replace(options, one_byte=start.one_byte)
    theirs = start.config if start is not None and isinstance(start.config, EagleConfig) else None
    layers = options.features or (() if theirs is None else theirs.layers)
    config = eagle_config(options, checkpoint.config, layers or default_layers(teacher.layer_count), len(vocabulary))
    if theirs is not None:
        config = replace(config, inner=options.inner or theirs.inner)
        if config.kind == "eagle3" and not options.layers:
            config = replace(config, depth=theirs.depth)
    sizes = None if config.kind == "eagle3" else measure_sizes(teacher, first)
    return EagleRecipe(options, teacher, config, vocabulary, sizes)


def _check_shape(options: TrainOptions, teacher: Teacher) -> None:
    """Raise where the options ask for more than the target has."""
    most, width = teacher.layer_count, teacher.head.shape[1]
    if wrong := [layer for layer in options.features if not -1 <= layer <= most]:
        raise InvalidInput(f"features={wrong[0]} is out of range: the target has {most} layers; 0 to {most}")
    if options.width > width:
        raise InvalidInput(f"width={options.width} is out of range: at most the target's own, {width}")


def _accelerator() -> Any:
    """accelerate's view of several processes, where there are several (`accelerate launch` says so)."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    try:
        return import_module("accelerate").Accelerator()
    except ImportError:
        raise MissingDependency("several GPUs need accelerate; install forerun[train]") from None


_FREE = (
    "inner", "depth", "target", "calibration", "rates", "max_length", "draft_vocab_size", "markov", "markov_rank",
    "confidence", "window", "windowed", "trained",
)  # fmt: skip
_HEADS = ("markov_head.", "candidate_selector.", "confidence_head.")  # beside the layers
_BESIDE = ("d2t", "t2d", "embed_tokens.weight")  # entries of a head's file that are not trained
_WIDER = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")  # of an EAGLE head
_WRITES = ("self_attn.o_proj.weight", "mlp.down_proj.weight")  # what a layer adds to the rows that pass it


@dataclass(frozen=True, slots=True)
class Start:
    folder: Path
    config: EagleConfig | HeadsConfig | BlockConfig
    weights: dict[str, Tensor]  # as files hold them
    vocabulary: DraftVocabulary
    one_byte: bool = False  # do its files hold one byte per weight?

    def must_fit(self, config: EagleConfig | HeadsConfig | BlockConfig) -> None:
        """Raise where the run's head is another than this one."""
        for name in sorted((field.name for field in fields(config)), key=lambda name: name != "kind"):
            theirs, ours = getattr(self.config, name), getattr(config, name)
            unnamed = name == "layers" and not theirs  # then the default layers
            if name not in _FREE and theirs != ours and not unnamed:
                _refuse(self.folder, f"{name}={theirs!r}", f"{name}={ours!r}")
        if isinstance(self.config, EagleConfig) and isinstance(config, EagleConfig):
            for name in ("inner", "depth"):
                theirs, ours = getattr(self.config, name), getattr(config, name)
                if ours < theirs:
                    _refuse(self.folder, f"{name}={theirs}", f"{name}={ours}, which is less")

    @torch.no_grad()
    def fill(self, module: nn.Module, embedding: Tensor) -> None:
        """Give a module this head's weights, as the module learns them."""
        own = self.weights.get("embed_tokens.weight")
        if own is not None and not torch.allclose(own.float(), embedding.float().cpu(), rtol=0.02, atol=1e-3):
            _refuse(self.folder, "an embedding of its own", "the target's")
        learnt = {name: weight for name, weight in self.weights.items() if name not in _BESIDE}
        known = dict(module.named_parameters())
        if unknown := sorted(learnt.keys() - known.keys()):
            _refuse(self.folder, f"the weight {unknown[0]!r}", "none of that name")
        for name, weight in unfold(module, learnt).items():
            parameter, shape = known[name], tuple(weight.shape)
            wider = isinstance(self.config, EagleConfig) and name.endswith(_WIDER)
            if not wider and shape != tuple(parameter.shape):
                _refuse(self.folder, f"{name!r} of {shape}", f"{tuple(parameter.shape)}")
            if name.endswith("down_proj.weight"):
                parameter.zero_()  # new units start at zero
            parameter[tuple(slice(size) for size in shape)] = weight.to(parameter.device)
        if isinstance(self.config, EagleConfig):
            for name in known.keys() - learnt.keys():
                if name.startswith("layers.") and name.endswith(_WRITES):
                    known[name].zero_()  # so do new layers

    def record(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for file in sorted(self.folder.glob("*.safetensors")):
            digest.update(file.read_bytes())
        record: dict[str, Any] = {"folder": self.folder.resolve().name, "sha256": digest.hexdigest()}
        if (kept := self.folder / "provenance.json").is_file():
            record["provenance"] = json.loads(kept.read_text(encoding="utf-8"))
        return record


def read_start(options: TrainOptions, width: int, vocab_size: int) -> Start | None:
    """The head that a run starts from, if it names one."""
    if not options.init:
        return None
    folder = Path(options.init)
    kind = kind_of(read_config(folder), lambda: read_tensors(folder))
    if _family_of(str(kind)) != _family_of(options.method):
        _refuse(folder, f"a head of the kind {kind}", options.method)
    if options.method == "medusa" or options.method == "hydra":
        heads, weights = read_heads(folder, options.method, width, vocab_size)
        rows = len(weights["d2t"]) if "d2t" in weights else heads.vocab_size
        start = Start(folder, heads, weights, DraftVocabulary.from_file(weights, rows, heads.vocab_size))
    elif options.method in BLOCKS:
        start = _block_start(folder, kind_for(options.method))
    else:
        config, weights = read_mtp(folder) if options.method == "mtp" else read_head(folder)
        in_bytes = bool(read_tensors(folder, wanted=lambda name: name.endswith(SCALES)))
        start = Start(folder, config, weights, vocabulary_of(config, weights), in_bytes)
    if options.vocab not in (0, len(start.vocabulary)):
        _refuse(folder, f"a draft vocabulary of {len(start.vocabulary)}", f"vocab={options.vocab}")
    return start


def _block_start(folder: Path, kind: BlockKind) -> Start:
    """A block drafter; of the other kind its layers alone, whose rows then predict one token more or less far."""
    block, weights = read_block(folder)
    if block.kind != kind:
        weights = {name: weight for name, weight in weights.items() if not name.startswith(_HEADS)}
        first = int(kind == "dflash")
        block = replace(block, kind=kind, rows=block.levels + first, first=first)
    return Start(folder, block, weights, vocabulary_of(block, weights))


def _family_of(method: str) -> str:
    families = {"eagle3": "eagle", "hass": "eagle", "dspark": "dflash", "dflash2": "dflash"}
    return families.get(method, method)


def _refuse(folder: Path, theirs: str, ours: str) -> None:
    raise InvalidInput(
        f"the head in {folder} has {theirs} and this run {ours}; give the run the head's, or another --init"
    )
