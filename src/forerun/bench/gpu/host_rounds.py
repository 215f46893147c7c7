"""The host's Python per token on a GPU's path: passes do nothing (`python -m forerun.bench.gpu.host_rounds`).

Engine, controller, look-ups, the head's staging and the GPU decoder's planning are real and run on a CPU; passes and
drafts compute nothing and make up their outcome. So what is left is what the host does beside a device, whole calls
with prompts, joins and leaves. Printed: microseconds of CPU and function calls per token; calls do not depend on how
busy the machine is. Modes: `plain`, `idle` (a head is there and plain rounds are best), `chain` (every round drafts
two tokens), `default` (look-ups and head, the controller decides, told the times of an H200).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
from collections.abc import Sequence
from dataclasses import replace
from time import process_time
from typing import Any

import numpy as np
import torch

from forerun.bench.gpu.rounds import random_head
from forerun.bench.gpu.stand_ins import RandomWeights
from forerun.bench.machine import machine_facts
from forerun.build import make_engine
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.control.fixed import FixedController
from forerun.drafters.eagle.cuda.draft_graphs import DeviceDraft
from forerun.drafters.eagle.cuda.draft_plan import DraftForm, Lane
from forerun.drafters.eagle.cuda.drafter import DeviceEagle
from forerun.drafters.eagle.cuda.feature_fusion import make_net
from forerun.drafters.hybrid import HybridDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.engine.engine import Engine
from forerun.engine.scheduler import PrefillRows
from forerun.messages import ALWAYS
from forerun.models.base import ON_GPU
from forerun.models.config import DecoderConfig
from forerun.models.cuda.target import CudaDecoder
from forerun.models.inflate import Shape
from forerun.offers import Form
from forerun.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.types import Budget, Request, Round, TreeForm
from forerun.verify.greedy import device_walk

VOCABULARY, PROMPT, TOKENS = 4096, 307, 100
TINY = Shape(64, 3, 4, 2, 16, 64)
H200 = {1: 4.0, 32: 4.3, 64: 4.6, 128: 5.2, 192: 7.5, 256: 8.8, 384: 12.5, 512: 16.0, 1024: 30.0}  # ms of 8B
COST = {rows: ms / 1e3 for rows, ms in H200.items()}
LEVEL, GAP = 1.2e-4, 1.5e-3  # seconds of a drafted level, and of the host where a round was read first
MODES = ("plain", "idle", "chain", "default")


class Told(AdaptiveController):
    """Is told the seconds of a GPU; counts which rounds followed."""

    followed = read_first = drafted = 0

    def observe(self, outcome: Round) -> None:
        rows = outcome.tree_rows or sum(outcome.drafted) + len(outcome.seqs)
        seconds = dict.fromkeys(outcome.seconds, 0.0) | {"pass": COST_MODEL.pass_seconds(rows)}
        seconds |= {"draft": LEVEL * max(outcome.depths), "host": 0.0 if outcome.followed else GAP}
        self.followed += outcome.followed
        self.read_first += not outcome.followed
        self.drafted += any(outcome.drafted)
        super().observe(replace(outcome, seconds=seconds))


COST_MODEL = CostModel(COST)


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

    def silence(self, draft: DeviceDraft | None) -> None:
        """From now on the target's passes, and drafts, do nothing else."""
        target, plain = self.target, self.target.passes.plain
        new: list[tuple[object, str, Any]] = [
            (target.passes, "_replay", lambda key: None if key.form is None else self.decide(key.form)),
            (
                plain,
                "decide",
                lambda step: plain.tops[step.into, : step.rows].copy_(self.next_tokens(step.rows)),
            ),
            (target.grown, "decide", lambda ints, size, form, *_: self.decide(form)),
            (target.grown, "fill", lambda *_: None),
            (target.after.replays, "do", lambda *_: None),
        ]
        if draft is not None:
            new += [(draft.replays, "do", lambda *_: None), (draft, "_draft_for", _with_roots(draft))]
        for owner, name, call in new:
            setattr(owner, name, call)


def _with_roots(draft: DeviceDraft) -> Any:
    real = draft._draft_for

    def draft_for(lanes: Sequence[Lane], form: Form, farthest: int = 0) -> DraftForm:
        planned = real(lanes, form, farthest)
        trees = draft._tree_ints[:, : planned.trees.rows].view(2, planned.sequences, -1)
        trees[1] = torch.arange(-1, planned.trees.nodes - 1) if form.width == 1 else 0
        roots = np.array([lane.root for lane in lanes])  # no tensor of a list: on a GPU that would wait
        trees[0, :, 0], trees[1, :, 0] = torch.from_numpy(roots), -1
        return planned

    return draft_for


def make_target(batch: int, vocabulary: int = VOCABULARY) -> CudaDecoder:
    """A small one, with room for so many sequences."""
    weights = RandomWeights(TINY, vocabulary, False, "cpu")
    return CudaDecoder(
        DecoderConfig.from_hf(weights.config), weights, dtype=torch.float32, device="cpu", kernels="torch",
        kv_slots=(batch + batch // 4 + 4) * 800, greedy_walk=device_walk(torch.device("cpu")),
    )  # fmt: skip


def make_draft(target: CudaDecoder) -> DeviceDraft:
    """Of a head with random weights, with a GPU's times on its menu."""
    draft = DeviceDraft(*make_net(*random_head(target, 1024), target, "plain"), capture=False)
    for form in draft.menu.forms:
        draft.menu.note(128, form, LEVEL * form.depth)
    return draft


def make_drafting(target: CudaDecoder, batch: int, draft: DeviceDraft | None) -> Engine:
    """An engine that launches rounds as on a GPU, with look-ups and the head, if there is one."""
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(target, frozenset({2}), speculative, EngineConfig(max_batch=batch))
    engine.timeline.depth, engine.scheduler.reads_early = 2, True
    engine.prefill_rows = PrefillRows(ON_GPU.prefill, target.pass_rows)
    if draft is not None:
        engine.drafters.add("device", HybridDrafter(NgramDrafter(), DeviceEagle(draft, NgramDrafter)))
        engine.default_drafter = "device"
    return engine


def make(mode: str, batch: int) -> Engine:
    """An engine of so many places whose passes do nothing."""
    target = make_target(batch)
    draft = None if mode == "plain" else make_draft(target)
    engine = make_drafting(target, batch, draft)
    if draft is not None:
        dear = CostModel({rows: (1 if rows <= batch else 5) * spent for rows, spent in COST.items()})
        cost = dear if mode == "idle" else CostModel(COST)
        pools = engine.drafters
        engine.controller = Told(cost, 60, 10, pools.offer, pools.looks_up, follows=True)  # type: ignore[arg-type]
        if mode == "chain":
            fixed = FixedController(1)
            fixed.budget = Budget(2, 2, repeats=ALWAYS)
            engine.controller = fixed
    MadeUp(target, 0.0 if mode == "idle" else 0.45).silence(draft)
    return engine


def write(
    engine: Engine, texts: int, tokens: int, profile: cProfile.Profile | None = None
) -> tuple[float, int]:
    """Seconds of CPU and tokens of one call."""
    rng = random.Random(5)
    sizes = [PROMPT + rng.randrange(-60, 60) for _ in range(texts)]
    for size in sizes:
        prompt = tuple(rng.randrange(5, VOCABULARY) for _ in range(size))
        engine.submit(Request(prompt, SamplingParams(max_tokens=tokens), cache_salt=None))
    gc.collect()
    gc.freeze()
    written, started = 0, process_time()
    if profile is not None:
        profile.enable()
    while engine.busy:
        written += sum([len(event.tokens) for event in engine.step()])
    if profile is not None:
        profile.disable()
    return process_time() - started, written


def measure(mode: str, batch: int, texts: int, tokens: int = TOKENS, top: int = 0) -> dict[str, Any]:
    """One call to warm up, one that is timed, and one whose function calls are counted."""
    engine, profile = make(mode, batch), cProfile.Profile()
    write(engine, batch, min(12, tokens))
    rounds = engine.stats.rounds
    seconds, written = write(engine, texts, tokens)
    rounds = engine.stats.rounds - rounds
    _, counted = write(engine, texts, tokens, profile)
    stats = pstats.Stats(profile)
    if top:
        stats.sort_stats("tottime").print_stats(top)
    row: dict[str, Any] = {"mode": mode, "batch": batch, "us_per_token": 1e6 * seconds / written}
    row |= {"calls_per_token": stats.total_calls / counted, "rounds": rounds, "tokens": written}  # type: ignore[attr-defined]
    if isinstance(engine.controller, Told):
        told = engine.controller
        row |= {"followed": told.followed, "read_first": told.read_first, "drafted": told.drafted}
    return row


def main() -> None:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.gpu.host_rounds", description=summary)
    parser.add_argument("--batches", default="64,128")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--texts", type=int, default=2, help="to a place of the batch")
    parser.add_argument("--top", type=int, default=0, help="show so many functions that take most time")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for batch in map(int, given.batches.split(",")):
        for mode in given.modes.split(","):
            row = measure(mode, batch, given.texts * batch, top=given.top)
            rows.append(row)
            shown = {name: round(value, 1) for name, value in row.items() if isinstance(value, float)}
            print(f"batch {batch:3d} {mode:>8}: {shown} {row['rounds']} rounds", flush=True)
    print(json.dumps({"machine": machine_facts(), "rows": rows}))


if __name__ == "__main__":
    main()
