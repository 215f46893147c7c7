"""The engine of a scenario: the CPU twin of the GPU decoder, or the native one, and all that it may be hit by."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.build.engine import make_engine
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.params import EngineConfig, SpeculativeConfig
from forerun.core.types import Budget, Form, Round, RoundPlan, Seq
from forerun.drafters.base import Drafter
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.eagle import HeadDraft
from forerun.drafters.device.growth import _same_of_levels
from forerun.drafters.device.head import make_net
from forerun.drafters.device.model import ModelDraft, SparseDraft, SparseOnDevice, over_model
from forerun.drafters.device.plan import DraftJob, DraftMenu, bucket_of
from forerun.drafters.heads.block import DFlashDrafter, DSparkDrafter
from forerun.drafters.heads.block_head import BlockHead
from forerun.drafters.heads.eagle import Eagle2Drafter, Eagle3Drafter, MtpDrafter, MtpHead
from forerun.drafters.heads.eagle_head import EagleHead
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.drafters.heads.medusa import HeadSet, HydraDrafter, MedusaDrafter
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.drafters.model.draft_model import ModelDrafter
from forerun.drafters.model.layer_skip import SparseKvDrafter
from forerun.engine.engine import Engine
from forerun.engine.scheduler import PrefillRows
from forerun.models.attention import SparseContext
from forerun.models.base import ON_CPU, LayerSubset
from forerun.models.config import DecoderConfig
from forerun.models.cuda import graphs, plan
from forerun.models.cuda.target import CudaDecoder
from forerun.models.native.target import NativeDecoder
from forerun.verify.greedy import device_walk
from forerun.verify.sampled import SampledTokens
from tests.drafters.tiny_heads import (
    block_config,
    block_weights,
    eagle_config,
    eagle_weights,
    heads_config,
    heads_weights,
    mtp_weights,
)
from tests.exactness.harness import Letters
from tests.fuzz.scenario import PAGE, STOP, VOCAB, Setting
from tests.gpu.test_captured import record

WIDTH = 32
CPU = torch.device("cpu")
_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_hidden_layers": 2},
    "qwen2": {"model_type": "qwen2"},
    "mistral": {"model_type": "mistral", "sliding_window": 50},
}
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@lru_cache(maxsize=32)
def weights_of(shape: str, words: int, context: int) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """A model that mostly says a few words, so that much of what is drafted is accepted."""
    settings = {**_BASE, **_SHAPES[shape], "max_position_embeddings": context}
    torch.manual_seed(7)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.normal_(0.0, 0.8 / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 0.2)
            if "norm" in key:
                weight.add_(1.0)
        head = model.get_output_embeddings().weight
        head[:words] *= 3.0
        head[words:] *= 0.1
        head[STOP] *= 0.5
    values = {**model.config.to_dict(), "model_type": model.config.model_type}
    return DecoderConfig.from_hf(values), dict(model.state_dict())


def make_target(setting: Setting, *, samples: bool = True, draft: bool = False) -> Any:
    """In float64 where torch computes: sums of other lengths then round alike."""
    config, weights = weights_of(setting.shape, setting.words, setting.context)
    if draft:  # nearly the target
        torch.manual_seed(3)
        weights = {key: one + 0.05 * one.std() * torch.randn_like(one) for key, one in weights.items()}
    slots = PAGE * setting.pages
    if setting.target == "native":
        return NativeDecoder(config, weights, mode="float32", kv_slots=slots)
    return CudaDecoder(
        config, weights, dtype=torch.float64, device="cpu", kv_slots=slots, kernels="torch",
        greedy_walk=device_walk(CPU), sampling=SampledTokens() if samples else None,
    )  # fmt: skip


def make_drafter(name: str, target: Any, setting: Setting) -> Drafter:
    """By name; those that run on a device do so here, too."""
    _, _, rest = name.partition("+")
    if rest:
        return HybridDrafter(NgramDrafter(), make_drafter(rest, target, setting))
    shared, dtype = target.shared(), torch.float64 if setting.target == "twin" else torch.float32
    if name in ("medusa", "hydra"):
        heads = heads_config("medusa" if name == "medusa" else "hydra", VOCAB, WIDTH)
        head_set = HeadSet(heads, heads_weights(heads, 3, own=name == "medusa"), shared, dtype=dtype)
        return MedusaDrafter(head_set) if name == "medusa" else HydraDrafter(head_set)
    if name in ("dflash", "dspark"):
        block = replace(block_config(name, VOCAB, WIDTH, VOCAB - 20), layers=(0, 1, -1))  # type: ignore[arg-type]
        block_head = BlockHead(block, block_weights(block, 3), shared, dtype=dtype, device=CPU)
        return (DFlashDrafter if name == "dflash" else DSparkDrafter)(block_head)
    if name == "draft_model":
        model = make_target(setting, draft=True)
        return over_model(ModelDraft(model, VOCAB, target.grown.last), lambda: ModelDrafter(model, VOCAB))
    if name == "sparse_kv":
        context, layers = SparseContext(3 * PAGE), LayerSubset(target.config.layers)
        part = shared.partial(layers, context=context)
        return SparseOnDevice(SparseDraft(target, context), lambda: SparseKvDrafter(part, VOCAB, context), 100)
    return _eagle(name, target, shared, dtype, on_device=setting.target == "twin" and name != "plain-eagle3")


def _eagle(name: str, target: Any, shared: Any, dtype: torch.dtype, on_device: bool) -> Drafter:
    kind = name if name in ("eagle", "mtp") else "eagle3"
    few, depth = (40, 2) if name == "narrow" else (None, 1)
    config = eagle_config(kind, VOCAB, WIDTH, few, depth=depth)  # type: ignore[arg-type]
    shape = target.config
    layers = (-1,) if kind != "eagle3" else (0, 1, shape.layers if shape.layers > 1 else -1)
    sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "inner": shape.inner}
    config = replace(config, max_length=shape.max_length, layers=layers, **sizes)
    make_weights = mtp_weights if kind == "mtp" else eagle_weights
    weights = make_weights(config, seed=5, borrows=name != "narrow")
    if name == "narrow":  # which says what the target says
        weights |= DraftVocabulary.most_frequent(torch.arange(VOCAB, 0, -1.0), 40).tensors()
        weights["lm_head.weight"][6:] *= 0.1

    def plain() -> Drafter:
        make_head = MtpHead if kind == "mtp" else EagleHead
        head = make_head(config, weights, shared, dtype=dtype, device=CPU)
        return {"eagle3": Eagle3Drafter, "eagle": Eagle2Drafter, "mtp": MtpDrafter}[kind](head)

    if not on_device:
        return plain()
    return OnDevice(HeadDraft(*make_net(config, weights, target, None), capture=False), plain)


class RandomForms:
    """A controller whose forms change now and then, alike for all or not, and whose plans stand for a few rounds."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.rng = setting, random.Random(setting.seed)

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        if self.setting.controller == "forms":
            return [self._budget()] * len(seqs)
        return [self._budget() for _ in seqs]

    def _budget(self) -> Budget:
        nodes, depth, width = self.rng.choice(self.setting.forms)
        return Budget(nodes, depth, width, repeats=self.rng.randint(self.setting.repeats // 2, self.setting.repeats))

    def observe(self, outcome: Round) -> None:
        pass

    def forget(self, seq: Seq) -> None:
        pass


class SwitchingForms(RandomForms):
    """Another form, or none, behind rounds that were not read; one in ten times that must be read first."""

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        return [self._budget()] * len(seqs)

    def follow(self, seqs: Sequence[Seq], last: RoundPlan, switches: Callable[[], bool]) -> RoundPlan | None:
        if (last.repeats > 0 or last.kind != "trees") and self.rng.random() < 0.4:
            return last.again()
        if not switches() or self.rng.random() >= 0.9:
            return None
        budget = self._budget()
        form = Form(budget.nodes, budget.depth, budget.width) if budget.nodes else None
        return RoundPlan("plain" if form is None else "trees", budget.repeats, form)


CONTROLLERS = {"forms": RandomForms, "mixed": RandomForms, "switching": SwitchingForms}


class RandomTimes(AdaptiveController):
    """The real one, told any times instead of those of this machine."""

    def __init__(self, engine: Engine, setting: Setting) -> None:
        cost = CostModel({1: 1.6e-3, 16: 1.8e-3, 32: 1.9e-3, 64: 2.4e-3, 256: 4e-3})
        drafters = engine.drafters

        def offer(seq: Any) -> Any:
            return drafters.offer(seq)

        super().__init__(cost, 60, 10, offer, drafters.looks_up)
        self.rng = random.Random(setting.seed)

    def observe(self, outcome: Round) -> None:
        times = {part: self.rng.choice((1e-4, 5e-4, 2e-3)) for part in ("draft", "pass", "host")}
        super().observe(replace(outcome, seconds=times))


class RandomRows(PrefillRows):
    """Any number of rows of prompts beside trees."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(ON_CPU.prefill, plan.MAX_ROWS, None)
        self.choices, self.rng = setting.prompt_rows, random.Random(setting.seed)

    def rows(self, running: int = 1, waiting: int = 0) -> int:
        return min(plan.MAX_ROWS, self.rng.choice(self.choices))

    def observe(self, seconds: float, rows: int, before: float = 0.0) -> None:
        pass


@dataclass
class World:
    """An engine and its parts."""

    engine: Engine
    target: Any
    drafters: dict[str, Any]

    def build(self, name: str, setting: Setting) -> Drafter:
        """A drafter, with graphs as on a GPU where these are recorded."""
        drafter = make_drafter(name, self.target, setting)
        if setting.captures and setting.target == "twin":
            for draft in drafts_of([drafter]):
                if isinstance(draft, ModelDraft):
                    draft.graphs.replays.capture = True
                    draft.model.passes.capture = draft.model.after.replays.capture = True
                else:
                    draft.replays.capture = True
                    draft.rehearse(self.target, setting.batch, 200)
        return drafter

    def device_drafts(self) -> list[Any]:
        return drafts_of(self.drafters.values())


def drafts_of(drafters: Iterable[Any]) -> list[Any]:
    """What these drafters grow on a device."""
    found = [one.second if isinstance(one, HybridDrafter) else one for one in drafters]
    return [one.draft for one in found if isinstance(one, OnDevice)]


def make_world(setting: Setting, patch: pytest.MonkeyPatch) -> World:
    limit_rows(setting.most_rows, patch)
    target = make_target(setting)
    config = EngineConfig(max_batch=setting.batch)
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(target, frozenset({STOP}), speculative, config, Letters())
    world = World(engine, target, {})
    if setting.captures and setting.target == "twin":
        patch.setattr(graphs, "capture", record)
        jobs = [DraftJob(bucket_of(min(setting.batch, 4)), Form(5, 5, 1), (200,))]
        patch.setattr(DraftMenu, "jobs", lambda *_: jobs)
        target.passes.capture = target.after.replays.capture = True
    make = engine.drafters._make

    def build(name: str, head: str | None = None) -> Drafter:
        made = make(name) if name in ("ngram", "suffix", "recycling", "none") else world.build(name, setting)
        world.drafters[name] = made
        return made

    patch.setattr(engine.drafters, "_make", build)
    for name in () if setting.late else {*setting.drafters}:
        engine.drafters.get(name)
    engine.controller = (
        RandomTimes(engine, setting) if setting.controller == "adaptive" else CONTROLLERS[setting.controller](setting)
    )
    engine.prefill_rows = RandomRows(setting)
    overlaps = setting.follows and setting.target == "twin"
    engine.timeline.depth, engine.scheduler.reads_early = 2 * overlaps, overlaps
    return world


def make_plain(setting: Setting) -> Engine:
    """What a request is written by alone: no drafts, one at a time, decided by the host, memory enough."""
    target = make_target(replace(setting, pages=40), samples=False)
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    return make_engine(target, frozenset({STOP}), speculative, EngineConfig(max_batch=1), Letters())


def limit_rows(most: int, patch: pytest.MonkeyPatch) -> None:
    """Let passes have so few rows that everything is at its limits."""
    _same_of_levels.cache_clear()  # which knows the number
    if most == plan.MAX_ROWS:
        return
    whole = plan.MAX_ROWS
    for name, module in list(sys.modules.items()):
        if not name.startswith("forerun."):
            continue
        for constant in ("MAX_ROWS", "CHUNK"):
            if module.__dict__.get(constant) == whole and ("cuda" in name or "drafters.device" in name):
                patch.setattr(module, constant, most)
        for constant in ("ROW_SIZES", "PROMPT_ROWS", "PASSES"):
            sizes = module.__dict__.get(constant)
            if isinstance(sizes, tuple) and sizes[-1] == whole:
                patch.setattr(module, constant, (*(one for one in sizes if one < most), most))
