"""An engine on a GPU's path, on a CPU, whose passes and drafts compute nothing and make up their outcome.

Engine, the head's staging and the GPU decoder's planning are real, so tests see what the host does beside a device.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from forerun.build.engine import make_engine
from forerun.control.base import FixedController
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.request import ALWAYS
from forerun.core.types import Budget, Form, Request, TreeForm
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.eagle import HeadDraft
from forerun.drafters.device.head import make_net
from forerun.drafters.device.plan import DraftForm, Lane
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.engine.engine import Engine
from forerun.engine.scheduler import PrefillRows
from forerun.models.base import ON_GPU
from forerun.models.config import DecoderConfig
from forerun.models.cuda.target import CudaDecoder
from forerun.verify.greedy import device_walk
from lab.gpu.rounds import random_head
from lab.gpu.stand_ins import RandomWeights
from lab.inflate.model import Shape

VOCABULARY = 4096
TINY = Shape(64, 3, 4, 2, 16, 64)
COMMON, TEXTS = 24, 64  # tokens that all prompts start with, as chats do; different prompts


class MadeUp:
    """Outcomes of passes that were never run: chains of which some tokens are accepted, and random tokens."""

    def __init__(self, target: CudaDecoder, rate: float) -> None:
        self.target, self.rate, self.rng = target, rate, np.random.default_rng(3)
        self.tokens = torch.from_numpy(self.rng.integers(5, VOCABULARY, 1024))
        self._made: dict[TreeForm, torch.Tensor] = {}

    def decide(self, form: TreeForm) -> None:
        if form not in self._made:
            accepted = np.minimum(self.rng.geometric(1.0 - self.rate, form.trees) - 1, form.depth)
            steps = np.arange(1, form.depth + 1)
            paths = np.where(steps <= accepted[:, None], steps, -1)
            parents = np.tile(np.arange(-1, form.nodes - 1), form.trees)
            tokens = self.rng.integers(5, VOCABULARY, form.rows + form.trees)
            parts = tokens[: form.rows], parents, paths.ravel(), accepted, tokens[form.rows :]
            self._made[form] = torch.from_numpy(np.concatenate(parts))
        values = self._made[form]
        self.target.grown.outcome[: len(values)].copy_(values)

    def next_tokens(self, rows: int) -> torch.Tensor:
        """Of a plain pass."""
        return self.tokens[:rows]

    def silence(self, draft: HeadDraft | None) -> None:
        """From now on the target's passes, and drafts, do nothing else."""
        target, plain = self.target, self.target.passes.plain
        new: list[tuple[object, str, Any]] = [
            (target.passes, "_replay", lambda key: None if key.form is None else self.decide(key.form)),
            (plain, "decide", lambda step: plain.tops[step.into, : step.rows].copy_(self.next_tokens(step.rows))),
            (target.grown, "decide", lambda ints, size, form, *_: self.decide(form)),
            (target.grown, "fill", lambda *_: None),
            (target.after.replays, "do", lambda *_: None),
        ]
        if draft is not None:
            new += [(draft.replays, "do", lambda *_: None), (draft, "_draft_for", _with_roots(draft))]
        for owner, name, call in new:
            setattr(owner, name, call)


def _with_roots(draft: HeadDraft) -> Any:
    real = draft._draft_for

    def draft_for(lanes: Sequence[Lane], form: Form, farthest: int = 0) -> DraftForm:
        planned = real(lanes, form, farthest)
        trees = draft.trees[:, : planned.trees.rows].view(2, planned.sequences, -1)
        trees[1] = torch.arange(-1, planned.trees.nodes - 1) if form.width == 1 else 0
        roots = np.array([lane.root for lane in lanes])  # no tensor of a list: on a GPU that would wait
        trees[0, :, 0], trees[1, :, 0] = torch.from_numpy(roots), -1
        return planned

    return draft_for


def make_silent(batch: int) -> Engine:
    """An engine with look-ups and a head that drafts chains of two tokens in every round."""
    weights = RandomWeights(TINY, VOCABULARY, False, "cpu")
    target = CudaDecoder(
        DecoderConfig.from_hf(weights.config), weights, dtype=torch.float32, device="cpu", kernels="torch",
        kv_slots=(batch + batch // 4 + 4) * 800, greedy_walk=device_walk(torch.device("cpu")),
    )  # fmt: skip
    draft = HeadDraft(*make_net(*random_head(target, 1024), target, "plain"), capture=False)
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(target, frozenset({2}), speculative, EngineConfig(max_batch=batch))
    engine.timeline.depth, engine.scheduler.reads_early = 2, True
    engine.prefill_rows = PrefillRows(ON_GPU.prefill, target.pass_rows)
    engine.drafters.add("device", HybridDrafter(NgramDrafter(), OnDevice(draft, NgramDrafter)))
    engine.default_drafter = "device"
    engine.controller = controller = FixedController(1)
    controller.budget = Budget(2, 2, repeats=ALWAYS)
    MadeUp(target, 0.45).silence(draft)
    return engine


def requests(count: int, salt: str, longest: int = 250, tokens: int = 96, seed: int = 5) -> Iterator[Request]:
    """Prompts of 40 tokens and more, each of which comes again some time, and answers of half to all of the tokens."""
    rng = random.Random(seed)
    words = range(5, 1000)
    start = rng.choices(words, k=COMMON)
    texts = [(*start, *rng.choices(words, k=rng.randrange(15, longest))) for _ in range(TEXTS)]
    for i in range(count):
        params = SamplingParams(max_tokens=rng.randrange(tokens // 2, tokens), ignore_eos=True)
        yield Request(texts[i * 2 // 3 % TEXTS], params, cache_salt=salt)
