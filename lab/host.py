"""The host's time per round, by part, over a target that takes no time of the host (`python -m lab host`).

The engine, the drafters and the controller are real. The target knows its texts (lab.simulate.device) and
takes the time of a GPU with the t(rows) given, so that rounds are launched and hidden as there. Printed: plan,
propose, observe, outcome, verdict and the rest of the host's work in milliseconds per round, what a round took in all,
and tokens/s over those of plain decoding. `--copied` is the share of copied text in made-up answers; `--texts` reads
pairs of prompt and answer from a JSON file instead.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from forerun.build.engine import make_engine
from forerun.cli.bench import words
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Form, Offer, Request, Seq, TreeBatch
from forerun.drafters.base import BaseDrafter, Drafter
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.engine import engine as engine_module
from forerun.engine.engine import Engine
from forerun.engine.sequence import SequenceState
from forerun.measure.bench.batches import parse_batches
from lab.runner import Document, Run, share
from lab.simulate.device import KnownAnswers, SimulatedDevice, WallClock
from lab.simulate.speeds import AT_ONCE, SimulatedMenu, Speeds, h200

VOCABULARY, PROMPT, ANSWER = 32768, 256, 128
WARM_UP = 24  # rounds that are not counted
PARTS = ("plan", "propose", "observe", "outcome", "verdict", "target")
HEAD, NGRAM_HEAD = "head", "ngram+head"

Text = tuple[tuple[int, ...], list[int]]  # prompt and answer


class HeadLike(BaseDrafter):
    """Chains from a menu, as a head's captured drafts are: right with a fixed chance per token, known in advance."""

    def __init__(self, known: KnownAnswers, rate: float = 0.6) -> None:
        forms = tuple(Form(n, n, 1) for n in (1, 2, 3, 5))
        self._known, self._rate = known, rate
        self._offer = Offer(menu=SimulatedMenu(forms, level=1.1e-4, claimed_rate=rate))

    def offer(self, seq: Seq) -> Offer:
        return self._offer

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return TreeBatch.chains([self._chain(*pair) for pair in zip(seqs, budgets, strict=True)])

    def _chain(self, seq: Seq, budget: Budget) -> list[int]:
        place = len(seq.tokens)
        after = self._known.after(seq, budget.depth)
        wrong = (hash((seq.id, place + i)) % 1000 > 1000 * self._rate for i in range(budget.depth))
        return [seq.tokens[-1], *((token + miss) % VOCABULARY for token, miss in zip(after, wrong, strict=True))]


def made_texts(count: int, copied: float, seed: int = 1) -> list[Text]:
    """Texts of which so much is copied from earlier on, in stretches of eight tokens, and the rest is random."""
    rng, found = random.Random(seed), list[Text]()

    def draw() -> int:  # some tokens are frequent
        return min(VOCABULARY - 1, int(rng.paretovariate(0.4)))

    for _ in range(count):
        tokens = [draw() for _ in range(PROMPT)]
        while len(tokens) < PROMPT + ANSWER:
            at = rng.randrange(len(tokens) - 8)
            chance = copied / 8.0 / (copied / 8.0 + 1.0 - copied) if copied < 1.0 else 1.0
            tokens += tokens[at : at + 8] if rng.random() < chance else [draw()]
        found.append((tuple(tokens[:PROMPT]), tokens[PROMPT : PROMPT + ANSWER]))
    return found


def read_texts(file: Path) -> list[Text]:
    return [(tuple(prompt), answer) for prompt, answer in json.loads(file.read_text(encoding="utf-8"))]


class Timed:
    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def wrap(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[part] += perf_counter() - started

        return timed

    def watch(self, engine: Engine) -> None:
        for owner, call, part in (
            (engine.controller, "plan", "plan"),
            (engine.controller, "observe", "observe"),
            (engine.drafters, "propose", "propose"),
            (engine.drafters, "observe", "observe"),
            (engine.verifiers, "decide", "verdict"),
            (engine_module, "outcome_of", "outcome"),
        ):
            setattr(owner, call, self.wrap(part, getattr(owner, call)))


def make(drafter: str, texts: Sequence[Text], batch: int, speeds: Speeds | None = None) -> Engine:
    """An engine over the simulated device, by the real clock; without speeds passes take no time."""
    known = KnownAnswers(dict(texts), VOCABULARY + 65536)
    target = SimulatedDevice(WallClock(), speeds or AT_ONCE, known)
    name = "ngram" if drafter in (HEAD, NGRAM_HEAD) else drafter
    speculative = SpeculativeConfig(drafter=name, controller="fixed")
    engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=batch))
    if drafter in (HEAD, NGRAM_HEAD):
        head: Drafter = HeadLike(known)
        engine.drafters.add("ngram", head if drafter == HEAD else HybridDrafter(NgramDrafter(), head))
    if drafter != "none":
        engine.controller = _controller(engine, speeds or h200())
    return engine


def _controller(engine: Engine, speeds: Speeds) -> AdaptiveController:
    def offer(seq: Seq) -> Offer:
        assert isinstance(seq, SequenceState)
        return engine.drafters.offer(seq)

    return AdaptiveController(CostModel(speeds.curve()), 60, 10, offer, engine.drafters.looks_up, follows=True)


def measure_rounds(engine: Engine, texts: Sequence[Text], batch: int, rounds: int) -> dict[str, float]:
    """Rounds of a batch that is always full: whoever ends is followed by the next text."""
    timed, tokens, following = Timed(), 0, 0
    target = engine.target
    assert isinstance(target, SimulatedDevice)
    timed.watch(engine)
    gc.collect()
    gc.freeze()  # else a full collection, a tenth of a second, falls into one run and not into another
    started, counted, drafted, waits = perf_counter(), 0, 0, 0.0
    while counted < rounds:
        while len(engine.running) + len(engine.waiting) + len(engine.reading) < batch:
            prompt, answer = texts[following % len(texts)]
            # they do not end at once
            early = ANSWER * (following + 1) // batch if following < batch else len(answer)
            engine.submit(Request(prompt, SamplingParams(max_tokens=min(max(8, early), len(answer)), ignore_eos=True)))
            following += 1
        before = engine.stats.rounds
        tokens += sum(len(event.tokens) for event in engine.step())
        if engine.stats.rounds > before:
            counted += 1
        if counted == WARM_UP and engine.stats.rounds > before:
            started, tokens, waits = perf_counter(), 0, target.spent
            drafted = engine.stats.drafted
            timed.seconds = dict.fromkeys(PARTS, 0.0)
    spent, each = perf_counter() - started, 1e3 / (rounds - WARM_UP)
    timed.seconds["target"] = target.spent - waits
    found = {f"{part}_ms": seconds * each for part, seconds in timed.seconds.items()}
    found["verdict_ms"] = max(0.0, found["verdict_ms"] - found["target_ms"])  # the wait is in there
    host = spent * each - found.pop("target_ms")
    found |= {"host_ms": host, "round_ms": spent * each, "tokens_per_s": tokens / spent}
    return found | {"nodes": (engine.stats.drafted - drafted) / (rounds - WARM_UP)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    share(parser, batches="32,64", drafters=f"none,ngram,suffix,{HEAD},{NGRAM_HEAD}")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--copied", type=float, default=0.2, help="share of the answers that is copied")
    parser.add_argument("--texts", type=Path, help="JSON file of pairs of prompt and answer, as token ids")
    parser.add_argument("--at-once", action="store_true", help="passes take no time")


def measure(run: Run) -> Document:
    given, rows = run.flags, list[dict[str, Any]]()
    texts = read_texts(given.texts) if given.texts else made_texts(64, given.copied)
    speeds = None if given.at_once else h200(host=0.0, host_row=0.0)
    for batch in parse_batches(given.batches):
        plain = 0.0
        for drafter in words(given.drafters):
            row = measure_rounds(make(drafter, texts, batch, speeds), texts, batch, given.rounds)
            plain = row["tokens_per_s"] if drafter == "none" else plain
            row["over_plain"] = row["tokens_per_s"] / plain if plain else 0.0
            parts = "  ".join(f"{name.removesuffix('_ms')} {value:.3f}" for name, value in row.items())
            print(f"batch {batch:3d} {drafter:>11}: {parts}", flush=True)
            rows.append({"batch": batch, "drafter": drafter, **row})
    return {"rounds": rows}
