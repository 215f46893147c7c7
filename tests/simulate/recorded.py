"""Recorded texts on the simulated device: the real engine, controller and look-ups, and acceptance as recorded.

A RecordedText says, for every place of a text and every form of a head's tree, how much of it would be accepted.
Passes and drafts take the time that they took on a card, the host's work is drawn.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forerun.build.engine import make_engine
from forerun.control.adaptive import MOST_NODES, MOST_WIDTH, AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.params import EngineConfig, SpeculativeConfig
from forerun.core.types import Event, Form, Offer, Round, Seq, TreeForm
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.device.plan import BUCKETS, DraftMenu, bucket_of, form_of
from forerun.drafters.heads.eagle_head import read_head
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.engine.engine import Engine
from forerun.heads import BOX
from lab.simulate.device import SimulatedDevice
from lab.simulate.speeds import Speeds
from tests.simulate.device import DrawnAnswers, SimulatedClock
from tests.simulate.head import SimulatedHead

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10)
TREES, CHAINS = 12, 16  # levels of trees that branch, and of chains
NEVER = 30_000  # better ones of a token that the tree has not

Ints = NDArray[np.int16]

BATCHES = (1, 8, 32, 64, 128)
LEVELS = (0.115, 0.14, 0.2, 0.3, 0.5)  # ms of a level of a chain by BATCHES
WIDER = 0.3  # of that, more for ten children
# ms of a pass by rows: of the sweep on a card (docs/benchmarks.md, "Batches") up to 128 rows, and of wide ones
PASSES = {1: 3.95, 2: 4.0, 4: 4.1, 8: 4.4, 16: 4.45, 32: 4.6, 48: 4.95, 64: 5.15, 96: 5.5, 128: 5.9, 160: 7.0, 192: 7.6,
          224: 8.5, 256: 9.0, 384: 12.3, 512: 15.6, 768: 22.5, 1024: 29.5}  # fmt: skip
NOISE, SLOWER = 0.01, 0.3  # of passes and drafts; of the host's work, more on average
STOP, OTHER = 2, 3  # tokens: the end of a text, and one that no text has
WORDS, PER_PLACE = 50_000, 3
BOTH, HEAD, NGRAM = "both", "head", "ngram"


@dataclass(frozen=True, slots=True)
class RecordedText:
    """A prompt, its answer, and the better candidates of the path behind each place: [places, widths, levels, levels].

    Place 0 is the last token of the prompt. The last index is the path's level, the one before it the tree's depth.
    """

    task: str
    prompt: list[int]
    answer: list[int]
    better: Ints

    def accepted(self, place: int, form: Form) -> int:
        """Tokens that a tree of this form has right at a place."""
        most = min(form.depth, len(self.answer) - place)
        path = self.better[place, WIDTHS.index(form.width), form.depth - 1, :most]
        return int((path < form.nodes).sum())


def load(file: Path) -> list[RecordedText]:
    with np.load(file) as kept:
        said = json.loads(kept["said"].tobytes().decode())
        return [RecordedText(**one, better=kept[f"text{i}"]) for i, one in enumerate(said)]


def draft_seconds(form: Form, batch: int) -> float:
    """What a draft took on a card."""
    level = np.interp(bucket_of(batch), BATCHES, LEVELS) * (1.0 + WIDER * (form.width - 1) / 9)
    return float(form.depth * level) * 1e-3


class CardSpeeds(Speeds):
    """Drafts as they were timed on a card."""

    def of_draft(self, form: Form, batch: int) -> float:
        return draft_seconds(form, batch)


@dataclass(slots=True)
class RecordedAnswers(DrawnAnswers):
    """Recorded texts; of grown trees what was recorded is accepted."""

    texts: dict[tuple[int, ...], RecordedText] = field(default_factory=dict)

    def word(self, seq: Seq, depth: int) -> int:
        text, place = self._place(seq)
        return text.answer[place + depth] if place + depth < len(text.answer) else OTHER

    def accepted(self, seq: Seq, form: TreeForm) -> int:
        text, place = self._place(seq)
        return text.accepted(place, form_of(form)) if place < len(text.better) else 0

    def _place(self, seq: Seq) -> tuple[RecordedText, int]:
        return self.texts[tuple(seq.tokens[: seq.prompt_length])], len(seq.tokens) - seq.prompt_length


@dataclass(slots=True)
class NoisyDevice(SimulatedDevice):
    """Passes and drafts are never quite as long, and the host is sometimes late."""

    rng: random.Random = field(default_factory=random.Random)

    def busy_for(self, seconds: float) -> None:
        SimulatedDevice.busy_for(self, seconds * max(0.8, self.rng.gauss(1.0, NOISE)))

    def host_works(self, sequences: int) -> None:
        work = self.speeds.host + self.speeds.host_row * sequences
        self.clock.spend(work * (1.0 + SLOWER * self.rng.expovariate(1.0)))


class RecordedHead(SimulatedHead):
    """The head of the box, with what its files say."""

    def __init__(self, gpu: SimulatedDevice) -> None:
        super().__init__(gpu, rate=0.0)
        menu = DraftMenu(read_head(BOX / "smollm2-135m-eagle3", kind="eagle3")[0].rates)
        for bucket in BUCKETS:
            for form in menu.forms:
                menu.note(bucket, form, draft_seconds(form, bucket))
        self._offer = Offer(menu=menu)


class Watched(AdaptiveController):
    """Counts rounds by what was drafted in them, and those that were read first."""

    kinds: Counter[str]
    read_first = 0

    def observe(self, outcome: Round) -> None:
        nodes, depth = max(outcome.drafted), max(outcome.depths)
        self.kinds["plain" if not nodes else f"{nodes}:{depth}" if outcome.tree_rows else "look-ups"] += 1
        self.read_first += not outcome.followed
        super().observe(outcome)

    def reset(self) -> None:
        self.kinds, self.read_first = Counter(), 0


def make(texts: Sequence[RecordedText], seed: int) -> tuple[Engine, Watched]:
    """An engine whose drafters are those of the sweep."""
    speeds, clock = CardSpeeds({rows: ms / 1e3 for rows, ms in PASSES.items()}), SimulatedClock()
    by_prompt = {tuple(text.prompt): text for text in texts}
    answers = RecordedAnswers(vocab_size=WORDS, texts=by_prompt)
    gpu = NoisyDevice(clock, speeds, answers, rng=random.Random(seed))
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(gpu, frozenset([STOP]), speculative, EngineConfig(max_batch=max(BUCKETS)))
    head, pools = RecordedHead(gpu), engine.drafters
    for name, drafter in ((HEAD, head), (NGRAM, NgramDrafter()), (BOTH, HybridDrafter(NgramDrafter(), head))):
        pools.add(name, drafter)
    cost = CostModel(speeds.curve())
    watched = Watched(cost, MOST_NODES, MOST_WIDTH, pools.offer, pools.looks_up, follows=True)  # type: ignore[arg-type]
    watched.reset()
    engine.controller = watched
    step = engine.step

    def stepped() -> list[Event]:
        clock.wait_until(clock.seconds + max(0.0, engine.spare_seconds()))
        return step()

    engine.step = stepped  # type: ignore[method-assign]
    return engine, watched
