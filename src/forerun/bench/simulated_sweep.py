"""The sweep of batches on an 8B of one H200, in simulation, with real acceptance, on a CPU.

    python -m forerun.bench.forms record --suite spec_bench_open.jsonl --limit 8 --max-tokens 128 --out FILE
    python -m forerun.bench.simulated_sweep FILE [--batches 1,8,32,64,128] [--seeds 8] [--same-texts]

Whole calls over recorded texts (forerun.bench.forms) by forerun.bench.batches.sweep: engine, controller and look-ups
are real, of the head's trees as much is accepted as was recorded, and time is counted (forerun.testing.simulated_gpu).
Seeds differ in the order of the texts and in 1% of noise of every pass; with --same-texts in the noise alone, which
shows how far two runs of one commit differ. `nodes:depth:width` among the setups is a form of the menu that stays.
The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any
from unittest.mock import patch

from forerun.bench.batches import sweep as batch_sweep
from forerun.bench.batches.sweep import PLAIN, Setup, Sweep
from forerun.bench.forms.record import RecordedText, load
from forerun.bench.forms.simulation import draft_seconds
from forerun.bench.gpu.texts import FEWEST, parse_form
from forerun.build import make_engine
from forerun.control.adaptive import MOST_NODES, MOST_WIDTH, AdaptiveController
from forerun.control.cost import CostModel
from forerun.drafters.eagle.cuda.draft_plan import BUCKETS
from forerun.drafters.eagle.cuda.menu import FORMS, DraftMenu
from forerun.drafters.eagle.files import read_head
from forerun.drafters.hybrid import HybridDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.engine.engine import Engine
from forerun.engine.scheduler import PrefillRows
from forerun.heads import BOX
from forerun.models.base import ON_GPU
from forerun.models.cuda.chunks import beside_trees
from forerun.offers import Form, Offer
from forerun.params import EngineConfig, SpeculativeConfig
from forerun.testing.simulated_gpu import SimulatedClock, SimulatedGPU, SimulatedHead
from forerun.testing.simulated_speeds import Speeds
from forerun.types import Event, Greedy, Needs, Prompts, Round, Scores, Seq, TreeBatch, TreeForm, Verdict
from forerun.verify.greedy import greedy_verdict

# ms of a pass by rows: of the sweep on a card (docs/benchmarks.md, "Batches") up to 128 rows, and of wide ones
PASSES = {1: 3.95, 2: 4.0, 4: 4.1, 8: 4.4, 16: 4.45, 32: 4.6, 48: 4.95, 64: 5.15, 96: 5.5, 128: 5.9, 160: 7.0, 192: 7.6,
          224: 8.5, 256: 9.0, 384: 12.3, 512: 15.6, 768: 22.5, 1024: 29.5}  # fmt: skip
NOISE, SLOWER = 0.01, 0.3  # of passes and drafts; of the host's work, more on average
STOP, OTHER = 2, 3  # tokens: the end of a text, and one that no text has
WORDS, PER_PLACE = 50_000, 3
BOTH, HEAD, NGRAM = "both", "head", "ngram"


class CardSpeeds(Speeds):
    """Drafts as they were timed on a card."""

    def of_draft(self, form: Form, batch: int) -> float:
        return draft_seconds(form, batch)


@dataclass(slots=True)
class RecordedGPU(SimulatedGPU):
    """Writes recorded texts, and accepts of trees what was recorded."""

    texts: dict[tuple[int, ...], RecordedText] = field(default_factory=dict)
    rng: random.Random = field(default_factory=random.Random)

    def busy_for(self, seconds: float) -> None:
        SimulatedGPU.busy_for(self, seconds * max(0.8, self.rng.gauss(1.0, NOISE)))

    def host_works(self, sequences: int) -> None:
        work = self.speeds.host + self.speeds.host_row * sequences
        self.clock.seconds += work * (1.0 + SLOWER * self.rng.expovariate(1.0))

    def _place(self, seq: Seq) -> tuple[RecordedText, int]:
        return self.texts[tuple(seq.tokens[: seq.prompt_length])], len(seq.tokens) - seq.prompt_length

    def _word(self, seq: Seq, depth: int) -> int:
        text, place = self._place(seq)
        return text.answer[place + depth] if place + depth < len(text.answer) else OTHER

    def _accepted(self, seq: Seq, form: TreeForm) -> int:
        text, place = self._place(seq)
        shape = next(one for one in FORMS if (one.nodes + 1, one.depth) == (form.nodes, form.depth))
        return text.accepted(place, shape) if place < len(text.better) else 0

    def score(
        self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None
    ) -> Scores:
        """Trees of look-ups are walked by the text."""
        if trees.form is not None or trees.is_plain():
            return SimulatedGPU.score(self, seqs, trees, needs, prompts)
        self.host_works(len(seqs))
        fresh = [] if prompts is None else beside_trees(self._fresh(prompts.seqs), trees, prompts.rows)
        started = max(self.clock.seconds, self._free_at)
        end = self._run(trees.nodes, sum(map(len, fresh)))
        taken, known = end - started, Greedy(verdict=lambda: self._walk(seqs, trees, end))
        read = None if prompts is None else (self._keep(prompts.seqs, fresh), Scores(None))
        return Scores(self._logits.expand(trees.nodes, -1), {}, known, read, seconds=lambda: taken)

    def _walk(self, seqs: Sequence[Seq], trees: TreeBatch, end: float) -> Verdict:
        self.clock.wait_until(end)
        tokens, said = trees.to_host()[0], list[int]()
        for seq, first, shape in zip(seqs, trees.starts, trees.topology(), strict=False):
            right = [True]
            for node in range(1, len(shape)):
                here = tokens[first + node] == self._word(seq, shape.depths[node] - 1)
                right.append(here and right[shape.parents[node]])
            said += [self._word(seq, shape.depths[node]) if ok else OTHER for node, ok in enumerate(right)]
        return greedy_verdict(trees, Greedy(argmax=said))


class RecordedHead(SimulatedHead):
    """The head of the box, with what its files say."""

    def __init__(self, gpu: SimulatedGPU) -> None:
        super().__init__(gpu)
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
    gpu = RecordedGPU(clock, speeds, vocab_size=WORDS, texts=by_prompt, rng=random.Random(seed))
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(gpu, frozenset([STOP]), speculative, EngineConfig(max_batch=max(BUCKETS)))
    head, pools = RecordedHead(gpu), engine.drafters
    for name, drafter in ((HEAD, head), (NGRAM, NgramDrafter()), (BOTH, HybridDrafter(NgramDrafter(), head))):
        pools.add(name, drafter)
    cost = CostModel(speeds.curve())
    watched = Watched(cost, MOST_NODES, MOST_WIDTH, pools.offer, pools.looks_up, follows=True)  # type: ignore[arg-type]
    watched.reset()
    engine.controller, engine.stats.now = watched, clock
    engine.prefill_rows = PrefillRows(ON_GPU.prefill, gpu.pass_rows, None)
    engine.timeline.depth, engine.scheduler.reads_early = 2, True
    step = engine.step

    def stepped() -> list[Event]:
        clock.wait_until(clock.seconds + max(0.0, engine.spare_seconds()))
        return step()

    engine.step = stepped  # type: ignore[method-assign]
    return engine, watched


def ended(recorded: Sequence[RecordedText]) -> list[RecordedText]:
    """The same, where texts that ended before the longest say so."""
    most, found = max([len(text.answer) for text in recorded]), list[RecordedText]()
    for text in recorded:
        prompt, answer = ([OTHER if t == STOP else t for t in part] for part in (text.prompt, text.answer))
        found.append(
            replace(text, prompt=prompt, answer=answer if len(answer) == most else [*answer[:-1], STOP])
        )
    return found


def run(
    texts: Sequence[RecordedText], batches: Sequence[int], setups: Sequence[str], seed: int
) -> list[dict[str, Any]]:
    """A row for every batch size and setup; every text must come out as it was recorded."""
    engine, watched = make(texts, seed)
    most, said = (
        max([len(text.answer) for text in texts]),
        {tuple(text.prompt): text.answer for text in texts},
    )
    sweep, rows = Sweep(engine, [*said], most), list[dict[str, Any]]()
    with patch.object(batch_sweep, "perf_counter", engine.stats.now):
        for batch in batches:
            prompts, base = sweep.prompts_for(max(FEWEST, PER_PLACE * batch)), 0.0
            for name in dict.fromkeys((PLAIN, *setups)):
                sweep.write(_setup(name), batch, prompts[: 2 * batch], sweep.short)
                watched.reset()
                call = sweep.write(_setup(name), batch, prompts, sweep.params)
                if call.texts != [said[prompt] for prompt in prompts]:
                    raise RuntimeError("other texts were written than were recorded")
                base = base or call.rate
                rows.append(
                    {"batch": batch, "setup": name, "seed": seed, "tokens_per_s": call.rate,
                     "x_plain": call.rate / base, "tokens_per_round": call.tokens / call.rounds,
                     "read_first": watched.read_first / watched.kinds.total(), "kinds": dict(watched.kinds)}
                )  # fmt: skip
    return rows


def _setup(name: str) -> Setup:
    return Setup(HEAD, parse_form(name)) if ":" in name else Setup("none" if name == PLAIN else name)


def say(rows: Sequence[dict[str, Any]]) -> None:
    """One batch size and setup, over all seeds."""
    rates, over, each, first = (
        [row[key] for row in rows] for key in ("tokens_per_s", "x_plain", "tokens_per_round", "read_first")
    )
    kinds: Counter[str] = sum([Counter(row["kinds"]) for row in rows], Counter())
    shares = ", ".join(f"{kind} {100 * count / kinds.total():.0f}%" for kind, count in kinds.most_common(5))
    print(
        f"batch {rows[0]['batch']:3d} {rows[0]['setup']:>6}: {fmean(rates):6.0f} tokens/s, {fmean(over):.3f}x "
        f"(sd {pstdev(over):.3f}), {fmean(each):.2f} tokens per round ({min(each):.2f} to {max(each):.2f}), "
        f"{100 * fmean(first):.0f}% read first; {shares}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.simulated_sweep", description=summary)
    parser.add_argument("file", type=Path, help="of `python -m forerun.bench.forms record`")
    parser.add_argument("--batches", default="1,8,32,64,128")
    parser.add_argument("--setups", default=f"{NGRAM},{HEAD},{BOTH}", help="beside plain")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--same-texts", action="store_true", help="in the same order for every seed")
    given = parser.parse_args(arguments)
    recorded, runs = ended(load(given.file)), list[list[dict[str, Any]]]()
    batches = batch_sweep.parse_batches(given.batches)
    for seed in range(given.seeds):
        texts = list(recorded)
        random.Random(0 if given.same_texts else seed).shuffle(texts)
        runs.append(run(texts, batches, given.setups.split(","), seed))
    for same in zip(*runs, strict=True):
        say(same)
    print(json.dumps({"what": "simulated sweep", "rows": [row for rows in runs for row in rows]}))


if __name__ == "__main__":
    main()
