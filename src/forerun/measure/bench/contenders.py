"""The contenders of a benchmark: our loop, plain and with every drafter, and the peers asked for, on one checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from time import perf_counter
from typing import Literal, cast

import torch

from forerun.api.llm import LLM
from forerun.build.engine import (
    build_drafter,
    check_names,
    choose_drafter,
    load_target,
    needs_head,
    refuse_missing_head,
    refuse_unfit_head,
    token_map,
)
from forerun.build.load import draft_models, drafting
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core import registry
from forerun.core.errors import InvalidInput
from forerun.core.params import Dtype, EngineConfig, KvDtype, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.drafters.base import Drafter, Parts
from forerun.measure.bench.alternate import Contender, Written
from forerun.measure.bench.settings import LLAMA_CPP, PLAIN, TRANSFORMERS, Cell, DrafterSetup, Settings
from forerun.measure.peers.process import Peers
from forerun.models.base import Target
from forerun.models.load import checkpoint as loading
from forerun.models.native.target import NativeDecoder

LAYERS = "layer_skip"  # what follows `=` is its plan


def load(settings: Settings) -> tuple[LLM, CostModel]:
    refuse_missing_parts(settings)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    config = EngineConfig(
        dtype=cast(Dtype, settings.dtype), kv_dtype=cast(KvDtype, settings.kv_dtype), device=settings.device,
        threads=settings.threads, max_batch=max(8, *settings.batches),
    )  # fmt: skip
    speculative = SpeculativeConfig(draft_model=settings.draft_model, budget=settings.budget)
    llm = LLM.load(settings.model, speculative_config=speculative, config=config)
    models: dict[str, Target] = {}
    for setup in settings.setups:
        if setup.head is not None:
            llm.engine.drafters.add(setup.name, build_head(llm, setup, models))
    return llm, fresh_costs(llm)


def refuse_missing_parts(settings: Settings) -> None:
    """Drafters whose head or second model is missing, or does not fit, are refused before any weights are loaded."""
    given = settings.draft_model
    for setup in settings.setups:
        if setup.drafter is None:
            continue
        if needs_head(setup.drafter) and (setup.head or given) is None:
            checkpoint = loading.open_checkpoint(settings.model)
            refuse_missing_head(
                choose_drafter(SpeculativeConfig(setup.drafter), checkpoint, settings.device), checkpoint
            )
        elif needs_head(setup.drafter) and setup.head is not None:
            wanted = SpeculativeConfig(setup.drafter, draft_model=setup.head)
            check_names(wanted)
            refuse_unfit_head(wanted, loading.open_checkpoint(settings.model))
        elif setup.head is None:
            registry.drafters.spec(setup.drafter).refuse_missing_model(given)


class Engines:
    """An engine for each contender: its own controller and drafters around the same weights.

    What a controller learns of one contender's texts must not change what it decides for another's. `auto` has the
    engine that was loaded. KV cache and rounds' clock are shared: contenders write one after the other.
    """

    def __init__(self, llm: LLM, cost: CostModel | None = None) -> None:
        self.llm, self._cost = llm, cost
        self._made: dict[str, LLM] = {}

    def of(self, setup: DrafterSetup) -> LLM:
        """The engine of this contender, made when it is first asked for."""
        if setup.drafter is None:
            return self.llm
        if setup.name not in self._made:
            self._made[setup.name] = self._make(setup, setup.drafter)
        return self._made[setup.name]

    def _make(self, setup: DrafterSetup, drafter: str) -> LLM:
        given = self.llm.engine
        assert given.sibling is not None, "the engine was not made by make_engine"
        engine = given.sibling(drafter)
        engine.stats = given.stats
        if setup.head is not None:
            engine.drafters.add(setup.name, given.drafters.get(setup.name))
        if self._cost is not None and isinstance(engine.controller, AdaptiveController):
            engine.controller.cost = deepcopy(self._cost)
        return LLM(engine, self.llm.tokenizer, self.llm.name)


def build_head(llm: LLM, setup: DrafterSetup, models: dict[str, Target], *, drawn: bool = True) -> Drafter:
    """A drafter with a head, a plan of layers or second models of its own, beside the engine's default drafter.

    `models` are those that were loaded before; new ones are added. `drawn`: a head's tokens are drawn from
    its law where the verifier can test that, and not chosen.
    """
    assert setup.drafter is not None
    assert setup.head is not None
    spec, engine = registry.drafters.spec(setup.drafter), llm.engine
    drafts: list[Target] = []
    way: Literal["greedy", "probabilistic"] = "probabilistic" if drawn else "greedy"
    speculative = SpeculativeConfig(setup.drafter, draft_model=setup.head, draft_sample_method=way)
    if spec.needs == "checkpoint":
        names = draft_models(replace(speculative, draft_model=setup.head.replace(";", ",")))
        models |= {name: _second_model(llm, name) for name in names if name not in models}
        drafts = [models[name] for name in names]
    elif LAYERS in spec.name:
        speculative = SpeculativeConfig(setup.drafter, draft_layers=setup.head)
    elif spec.needs != "head":
        raise InvalidInput(f"the drafter {setup.drafter!r} has no head; write {setup.drafter} without a folder")
    first, more = (drafts[0], tuple(drafts[1:])) if drafts else (None, ())
    return build_drafter(spec, Parts(engine.target, first, speculative, engine.max_batch, engine.max_length, more))


def _second_model(llm: LLM, name: str) -> Target:
    """A model to draft with, in the vocabulary of the one that is loaded."""
    small, large = (loading.open_checkpoint(model) for model in (name, llm.name))
    return drafting(
        load_target(small, EngineConfig(device=llm.engine.target.device.type)),
        token_map(large, small),
        llm.engine.target,
    )


def fresh_costs(llm: LLM) -> CostModel:
    """Measure t(n) now and give it to the controller."""
    cost = CostModel.measure(llm.engine.target)
    if isinstance(llm.engine.controller, AdaptiveController):
        llm.engine.controller.cost = cost
    return cost


def own_contenders(engines: Engines, settings: Settings, cell: Cell) -> list[Contender]:
    """Our loop in one cell: plain, then every drafter, each in its own engine."""
    setups = [DrafterSetup(PLAIN, "none"), *settings.setups]
    return [own_contender(engines.of(setup), settings, cell, setup) for setup in setups]


def own_contender(llm: LLM, settings: Settings, cell: Cell, setup: DrafterSetup) -> Contender:
    """One drafter in one cell; drafters keep what they learnt between prompts, as in a server."""
    budget = setup.fixed()
    drafter = setup.drafter if setup.head is None else setup.name

    def write(prompts: Sequence[Sequence[int]], max_tokens: int) -> Written:
        params = [_params(settings, cell, ids, max_tokens) for ids in prompts]
        requests = [  # without a salt: a prompt that another contender has read is not found in the prefix cache
            Request(tuple(ids), one, drafter, cell.verifier, budget, cache_salt=None)
            for ids, one in zip(prompts, params, strict=True)
        ]
        with places(llm, cell.batch) as passes:
            llm.engine.captures.up_to(cell.batch)
            started = perf_counter()
            seqs = llm.driver.write(requests)
            seconds = perf_counter() - started
            llm.engine.settle()  # no round of this engine is unread when the next contender begins
        texts = [seq.tokens[seq.prompt_length :] for seq in seqs]
        drafts = [tuple((one.drafted, one.depth, one.accepted) for one in seq.rounds) for seq in seqs]
        decoding = sum(spent for one in passes for part, spent in one.items() if part != "prompt")
        return Written(texts, seconds, len(passes), decoding, passes, drafts)

    return Contender(setup.name, write, exact=is_comparable(llm, cell))


@contextmanager
def places(llm: LLM, batch: int) -> Iterator[list[Mapping[str, float]]]:
    """The seconds of each round meanwhile, by part.

    In a batch, no more texts are written at once than it has places; a text alone has the whole engine.
    """
    engine, most = llm.engine, llm.engine.max_batch
    engine.max_batch = most if batch == 1 else min(batch, most)
    engine.stats.by_round = passes = list[Mapping[str, float]]()
    try:
        yield passes
    finally:
        engine.max_batch, engine.stats.by_round = most, None


def is_comparable(llm: LLM, cell: Cell) -> bool:
    """Must every drafter write the plain loop's text, token for token?

    At temperature 0 every exact verifier guarantees that; above it only one that makes the text a function of the
    seed. The others guarantee the same law, which a single text cannot show.
    """
    name = "coupled" if cell.verifier == "auto" else cell.verifier
    verifier = llm.engine.verifiers.get(name)
    return verifier.exact and (cell.temperature == 0.0 or verifier.shares_noise)


def _params(settings: Settings, cell: Cell, ids: Sequence[int], max_tokens: int) -> SamplingParams:
    """Greedy without a seed; else one seed per prompt, the same for every contender."""
    seed = None if cell.temperature == 0.0 else settings.seed + zlib.crc32(repr(tuple(ids)).encode())
    return SamplingParams(max_tokens, temperature=cell.temperature, seed=seed, ignore_eos=settings.ignore_eos)


def load_peers(llm: LLM, settings: Settings) -> Peers:
    """The peers asked for, around the same weights, each engine in its process; they run in greedy cells of batch 1."""
    found = Peers()
    ends = [] if settings.ignore_eos else sorted(llm.tokenizer.eos_ids)
    threads, target = torch.get_num_threads(), llm.engine.target
    if names := [name for name in settings.peers if not name.startswith(LLAMA_CPP)]:
        # quantised weights and other roundings write other texts: then our own plain loop is the reference
        mode = target.mode if isinstance(target, NativeDecoder) else "float32"
        alike = target.device.type == "cpu" and mode == "float32"
        found.host(
            TRANSFORMERS, names, "forerun.measure.peers.transformers", model=settings.model,
            draft=settings.draft_model, ends=ends, device=str(target.device), alike=alike, threads=threads,
        )  # fmt: skip
    if names := [name for name in settings.peers if name.startswith(LLAMA_CPP)]:
        file = loading.open_checkpoint(settings.model).path
        found.host(
            LLAMA_CPP, names, "forerun.measure.peers.llama_cpp", file=str(file), ends=ends,
            context=llm.engine.max_length, threads=threads,
        )  # fmt: skip
    if settings.url:
        from forerun.measure.peers.process import endpoint_contender

        found.contenders.append(endpoint_contender(settings.url, settings.ignore_eos))
    return found
