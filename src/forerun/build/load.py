"""Load an engine from a model's name and settings, as `LLM("smollm2", drafter="ngram")` does.

Settings are checked before any file is read, so that a mistake is reported at once.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

import torch

from forerun.build.auto_drafter import settle
from forerun.build.engine import (
    build_named,
    check_names,
    choose_drafter,
    default_batch,
    drafts_with_checkpoint,
    held_as,
    load_target,
    make_engine,
    memory_of,
    needs_head,
    refuse_draft_dtype,
    refuse_missing_head,
    refuse_unfit_head,
    token_map,
)
from forerun.build.memory_limit import as_out_of_memory
from forerun.control.cost import CostModel
from forerun.core import registry
from forerun.core.checks import as_path, shown, unknown
from forerun.core.errors import InvalidInput, UnsupportedModel
from forerun.core.params import (
    ENGINE_SPELLINGS,
    DraftDtype,
    Dtype,
    EngineConfig,
    KvDtype,
    SamplingParams,
    SpeculativeConfig,
)
from forerun.core.types import Request, Scores, TreeBatch
from forerun.drafters.base import Parts
from forerun.drafters.model.translated import TokenMap, TranslatedTarget
from forerun.engine.engine import Engine
from forerun.heads import open_head
from forerun.models.base import CapturesLater, CompilesAhead, Target
from forerun.models.load.checkpoint import Checkpoint
from forerun.models.load.tokenizer import Tokenizer, opening_of

log = logging.getLogger(__name__)

_DRAFTING = ("drafter", "draft_model", "speculative_config")
# nodes of chains, and the first token's logit; how much a kernel reads at once goes by where the nodes' numbers lie
_REHEARSED = ((6, 0.0), (7, 30.0), (8, 30.0), (24, 30.0))


class LoadOptions(TypedDict, total=False):
    """What may be set when a model is loaded: how to draft, and where and how large the engine runs."""

    drafter: str | None
    draft_model: str | PathLike[str] | None
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None
    config: EngineConfig | Mapping[str, Any] | None
    dtype: Dtype | None
    device: str | None
    max_batch: int | None
    max_length: int | None
    kv_slots: int | None
    kv_memory: int | float | str | None
    kv_dtype: KvDtype | None
    threads: int | None
    tensor_parallel_size: int | None
    adapters: Mapping[str, str] | None
    adapter_memory: int | float | str | None


def load_engine(model: str | PathLike[str], options: Mapping[str, Any]) -> tuple[Engine, Tokenizer]:
    """An engine around a model by known name, GGUF file, Hugging Face folder or hub id; and its tokenizer."""
    try:
        return _load(as_path("model", model), options)
    except Exception as error:
        told = as_out_of_memory(error)
        if told is None:
            raise
        raise told from error


def _load(name: str, options: Mapping[str, Any]) -> tuple[Engine, Tokenizer]:
    from forerun.models.load.catalog import cache_folder, find_draft_model
    from forerun.models.load.checkpoint import open_checkpoint

    settings = _engine_config(options)
    speculative = drafting_of(options)
    checkpoint = open_checkpoint(name)
    refuse_unfit_head(speculative, checkpoint)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    elif settings.tensor_parallel_size > 1:  # ranks on one CPU share its cores
        torch.set_num_threads(max(1, torch.get_num_threads() // settings.tensor_parallel_size))
    speculative = choose_drafter(speculative, checkpoint, settings.device)
    refuse_missing_head(speculative, checkpoint)
    models = draft_models(speculative)
    refuse_draft_dtype(speculative, settings.device, models)
    for given in models:
        find_draft_model(given)
    opened = [open_checkpoint(given) for given in models]
    smaller = [(small, token_map(checkpoint, small)) for small in opened]
    tokenizer = checkpoint.tokenizer()
    costs = cost_file(checkpoint, settings, cache_folder())
    target = load_target(checkpoint, settings)
    if isinstance(target, CompilesAhead):  # the first passes are timed
        target.compile_ahead(settings.max_length or target.max_length)
    alone = replace(settings, tensor_parallel_size=1)  # a draft model is small: rank 0 runs it
    read = partial(load_draft, settings=alone, dtype=speculative.draft_dtype)
    drafts = [drafting(read(small), tokens, target) for small, tokens in smaller]
    first, more = (drafts[0], tuple(drafts[1:])) if drafts else (None, ())
    around = partial(make_engine, loaded_from=str(checkpoint.path))
    engine = around(target, tokenizer.eos_ids, speculative, settings, tokenizer, first, costs, more)
    if engine.max_length < (wanted := min(target.max_length, settings.max_length or target.max_length)):
        log.warning(
            "the KV cache holds %d tokens: prompt and output together are limited to that, not to %d; raise kv_memory "
            "or kv_slots",
            engine.max_length,
            wanted,
        )
    if target.can.captures:
        if isinstance(target, CapturesLater):
            target.capture_few_first()
        drafter = engine.drafters.get(engine.default_drafter)  # captures its graphs
        target.warm_up(drafter.needs, engine.max_batch, engine.max_length)  # no text should wait for either
        rehearse_verdicts(engine)
        collect_garbage()
    return engine, tokenizer


def rehearse_verdicts(engine: Engine) -> None:
    """Verify looked-up chains above temperature 0, rejected and accepted: the device loads operations at first use.

    Trees that a head grows on the device are decided there, by graphs; trees that the host has laid are decided by it.
    """
    shared = engine.target.shared()
    device = None if shared is None else shared.embed(torch.tensor([0])).device
    usual = SamplingParams(max_tokens=8, temperature=1.0, seed=0)
    for params in (usual, replace(usual, temperature=0.7, top_p=0.9), replace(usual, top_k=20, min_p=0.05)):
        for nodes, likely in _REHEARSED:
            seq = engine.prepare(Request((0,), params, drafter="none"))
            logits = torch.zeros(nodes, engine.target.vocab_size, device=device)
            logits[:, 0] = likely
            _, verdict = engine.verifiers.decide([seq], TreeBatch.chains([[0] * nodes]), Scores(logits))
            verdict.to_host()


def drafting_of(options: Mapping[str, Any]) -> SpeculativeConfig:
    """How to draft, of the options of `LLM.load`; raises what is wrong with it, and reads no model for that."""
    speculative = _speculative(*(options.get(key) for key in _DRAFTING))
    check_names(speculative)
    return speculative


def draft_models(speculative: SpeculativeConfig) -> list[str]:
    """The second models that `draft_model` names: several, with commas between, where a cascade runs several.

    Also where the drafter itself runs none: single requests may ask for one that does.
    """
    drafter, given = speculative.drafter, speculative.draft_model
    if given is None:
        return []
    is_head = drafter == "auto" or needs_head(drafter) or open_head(Path(given).expanduser()) is not None
    if is_head and not drafts_with_checkpoint(drafter):
        return []
    wanted = max(1, registry.drafters.spec(drafter).checkpoints)
    names = given.split(",") if wanted > 1 else [given]
    if len(names) != wanted:
        raise InvalidInput(
            f"the drafter {speculative.drafter!r} runs {wanted} models; name them by comma: draft_model=SMALL,MEDIUM"
        )
    return [name.strip() for name in names]


def collect_garbage() -> None:
    """Collect what loading has left: a full collection, a tenth of a second, would else fall into the first texts.

    Python collects all objects again once a quarter more have survived. Objects are not frozen, as commands do with
    what they load: a program may drop a model and load another, and frozen cycles would keep its memory.
    """
    if gc.isenabled():
        gc.collect()


def load_draft(checkpoint: Checkpoint, settings: EngineConfig, dtype: DraftDtype) -> Target:
    """A second model, in a number format of its own if one was asked for."""
    if dtype == "auto":
        return load_target(checkpoint, settings)
    try:
        return load_target(checkpoint, replace(settings, dtype=dtype))
    except (InvalidInput, UnsupportedModel) as error:
        raise type(error)(f"draft_dtype={dtype!r} for {checkpoint.name}: {error}") from error


def drafting(model: Target, tokens: TokenMap | None, target: Target) -> Target:
    """A draft model, in the target's vocabulary."""
    if tokens is not None and target.source_rules is not None:
        raise InvalidInput("a draft model for an encoder-decoder must have the target's own tokenizer")
    return model if tokens is None else TranslatedTarget(model, tokens.padded(target.vocab_size))


def cost_file(checkpoint: Checkpoint, config: EngineConfig, cache: Path) -> Path:
    """Where t(n) of this model on this machine is kept."""
    from forerun.models.native.library import ABI, isa

    stat = checkpoint.path.stat()
    facts = (
        str(checkpoint.path.resolve()), stat.st_size, int(stat.st_mtime), config.dtype, config.device,
        torch.get_num_threads(), torch.__version__, platform.machine(), platform.node(), os.cpu_count(), isa(), ABI,
        os.environ.get("OMP_WAIT_POLICY"), *([config.tensor_parallel_size] if config.tensor_parallel_size > 1 else []),
        *([config.kv_dtype] if config.kv_dtype != "auto" else []),
    )  # fmt: skip
    return cache / "costs" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}.json"


def explain_defaults(model: str) -> tuple[str, str]:
    """What would draft for this model on this machine, and how many sequences would be written together; and why."""
    from forerun.models.load.catalog import cache_folder
    from forerun.models.load.checkpoint import open_checkpoint

    checkpoint, settings = open_checkpoint(model), EngineConfig()
    speculative = choose_drafter(SpeculativeConfig(), checkpoint, settings.device)
    costs, target = cost_file(checkpoint, settings, cache_folder()), load_target(checkpoint, settings)
    batch = "up to {} sequences together: {}".format(*default_batch(target))
    if speculative.drafter != "auto":
        why = "a head comes with the package, and on a GPU more nodes cost a pass little"
        return f"{speculative.drafter}: {why}", batch
    opening = opening_of(target, checkpoint.tokenizer())
    parts = Parts(target, None, speculative, opening=opening, cost_file=costs)
    choice = settle(parts, partial(CostModel.measure_or_load, target, costs), partial(build_named, parts))
    return f"{choice.drafter}: {choice.why}", batch


def explain_weights(model: str) -> str:
    """The format of a checkpoint's weights, and what they are held as on this machine."""
    from forerun.models.config import DecoderConfig, supports
    from forerun.models.load.checkpoint import open_checkpoint

    checkpoint, device = open_checkpoint(model), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not supports(checkpoint.config):
        return f"{model}: as the backend of its family reads them"
    held = held_as(checkpoint, DecoderConfig.from_hf(checkpoint.config), EngineConfig().dtype, device)
    return f"{model}: {held or 'not quantised by its config.json'}"


def memory_here(model: str, kv_dtype: KvDtype = "auto") -> tuple[int, int | None, dict[str, int]]:
    """See memory_of: of a model by name, loaded with usual settings."""
    from forerun.models.load.checkpoint import open_checkpoint

    return memory_of(open_checkpoint(model), EngineConfig(kv_dtype=kv_dtype))


def longest_here(model: str) -> int:
    """Tokens of a sequence at most, as the checkpoint says."""
    from forerun.models.config import DecoderConfig
    from forerun.models.load.checkpoint import open_checkpoint

    return DecoderConfig.from_hf(open_checkpoint(model).config).max_length


def bytes_packed(model: str) -> tuple[int, int] | None:
    """Of a GGUF file on a Hopper GPU: with dtype=gguf, and in bfloat16; None where it cannot stay packed."""
    from forerun.models.config import DecoderConfig, supports
    from forerun.models.cuda.file_weights import StoredBlocks, is_packed
    from forerun.models.cuda.network import check_supported
    from forerun.models.cuda.pool import against_compiled
    from forerun.models.load.checkpoint import open_checkpoint
    from forerun.models.load.weights import GgufWeights

    checkpoint = open_checkpoint(model)
    weights = checkpoint.weights
    if not (supports(checkpoint.config) and isinstance(weights, GgufWeights) and is_packed(weights)):
        return None
    config = DecoderConfig.from_hf(checkpoint.config)
    try:
        check_supported(config)
    except UnsupportedModel:
        return None
    if against_compiled(config):
        return None
    plain = 2 * sum(math.prod(weights.shape(name)) for name in weights)
    return StoredBlocks(weights, config, torch.device("cpu")).nbytes(), plain


def _engine_config(options: Mapping[str, Any]) -> EngineConfig:
    single = {key: value for key, value in options.items() if key not in (*_DRAFTING, "config")}
    known = [field.name for field in fields(EngineConfig)]
    for key in single:
        if key not in known and key not in ENGINE_SPELLINGS:
            names = [*_DRAFTING, "config", *known, *ENGINE_SPELLINGS]
            raise InvalidInput(unknown("option of LLM", key, names))
    single = {key: value for key, value in single.items() if value is not None}
    config = options.get("config")
    if config is None:
        return EngineConfig.from_dict(single)
    if any(value != "auto" for value in single.values()):
        raise InvalidInput(f"{', '.join(single)} came beside config; set them in the EngineConfig")
    return config if isinstance(config, EngineConfig) else EngineConfig.from_dict(config)


def _speculative(drafter: Any, draft_model: Any, given: Any) -> SpeculativeConfig:
    """The configuration given, with a drafter and a draft model of the caller's over it."""
    if isinstance(given, str):
        raise InvalidInput(f"speculative_config={shown(given)} is a name; pass drafter={shown(given)} instead")
    if given is None:
        given = {}
    config = given if isinstance(given, SpeculativeConfig) else SpeculativeConfig.from_dict(given)
    if draft_model is not None:
        config = replace(config, draft_model=draft_model, drafter="auto")
    return config if drafter is None else replace(config, drafter=drafter)
