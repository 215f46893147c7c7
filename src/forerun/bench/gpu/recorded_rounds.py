"""Which rounds of real texts follow an unread one, and why others do not, on a CPU.

    python -m forerun.bench.forms record --suite spec_bench_open.jsonl --limit 8 --max-tokens 128 --out FILE
    python -m forerun.bench.gpu.recorded_rounds FILE --batches 8,32,64

The default drafter along recorded texts (forerun.bench.forms): look-ups search the real tokens, and of the head's trees
as much is accepted as was recorded. Engine, controller, staging and planning are those of a GPU and run on a CPU;
passes and drafts compute nothing (forerun.bench.gpu.host_rounds), and the controller is told the times of an 8B on an
H200. Counted are rounds by what was drafted in them and by whether they followed an unread one; of those that did not,
what said no. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.bench.forms.record import RecordedText, load
from forerun.bench.forms.simulation import (
    MOST_NODES,
    MOST_WIDTH,
    PASSES,
    READ_FIRST,
    draft_seconds,
    host_seconds,
    in_turn,
    pass_seconds,
)
from forerun.bench.gpu.follow_counts import FollowCounts
from forerun.bench.gpu.host_rounds import MadeUp, make_draft, make_drafting, make_target
from forerun.bench.machine import machine_facts
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.drafters.eagle.cuda.draft_graphs import DeviceDraft
from forerun.drafters.eagle.cuda.draft_plan import BUCKETS
from forerun.engine.engine import Engine
from forerun.models.cuda.target import CudaDecoder
from forerun.params import SamplingParams
from forerun.types import Request, Round, Scores, Seq, TreeBatch, TreeForm

STOP, OTHER, FIRST = 2, 3, 5  # tokens: the end of a text, one that no text has, and the first that texts have


class Told(AdaptiveController):
    """Is told the seconds of a GPU, and adds them up."""

    spent = 0.0
    written = 0

    def observe(self, outcome: Round) -> None:
        rows, batch = outcome.tree_rows or sum(outcome.drafted) + len(outcome.seqs), len(outcome.seqs)
        form = self._decisions[0].promise.form if self._decisions else None
        drafts = any(outcome.drafted)
        by_head = drafts and form is not None and form.nodes > 0
        seconds = dict.fromkeys(outcome.seconds, 0.0) | {"pass": pass_seconds(rows)}
        seconds["draft"] = draft_seconds(form, batch) if by_head and form is not None else 0.0
        seconds["host"] = host_seconds(batch, drafts) + (0.0 if outcome.followed else READ_FIRST * 1e-3)
        self.spent += sum(seconds.values())
        self.written += sum(outcome.accepted) + batch
        super().observe(replace(outcome, seconds=seconds))


class Recorded(MadeUp):
    """Outcomes of passes that were never run: what was recorded of the texts that sequences write."""

    def __init__(self, target: CudaDecoder, texts: Sequence[RecordedText], draft: DeviceDraft) -> None:
        super().__init__(target, 0.0)
        self.texts = {tuple(text.prompt): text for text in texts}
        self.draft = draft
        self._seqs: Sequence[Seq] = ()
        self._follows: Sequence[int] = ()
        self._places: dict[
            int, int
        ] = {}  # tokens that sequences have written, those that nobody has read too
        score = target.score

        def scored(seqs: Sequence[Seq], trees: TreeBatch, *others: Any) -> Scores:
            self._seqs, self._follows = seqs, trees.follows or [-1] * len(seqs)
            found = score(seqs, trees, *others)
            if trees.form is None and not trees.is_plain():
                self._answer(trees, found.required_logits)
            return found

        target.score = scored  # type: ignore[method-assign, assignment]

    def _next(self) -> list[tuple[Seq, RecordedText, int]]:
        """The sequences of this pass, their texts, and how far they have got."""
        found = list[tuple[Seq, RecordedText, int]]()
        for seq, tree in zip(self._seqs, self._follows, strict=True):
            place = self._places[seq.id] if tree >= 0 else len(seq.tokens) - seq.prompt_length
            found.append((seq, self.texts[tuple(seq.tokens[: seq.prompt_length])], place))
        return found

    def next_tokens(self, rows: int) -> torch.Tensor:
        tokens = list[int]()
        for seq, text, place in self._next():
            tokens += _after(text, place, 1)
            self._places[seq.id] = place + 1
        return torch.from_numpy(np.array(tokens + [OTHER] * (rows - len(tokens))))

    def decide(self, form: TreeForm) -> None:
        """Trees whose first nodes are what the text says, as far as the head had it right."""
        assert self.draft._proposed is not None, "trees were drafted"
        shape = self.draft._proposed[1]
        tokens = np.full((form.trees, form.nodes), OTHER)
        parents = np.zeros((form.trees, form.nodes), dtype=np.int64)
        parents[:, : form.depth + 1] = np.arange(-1, form.depth)
        paths, ends = np.full((form.trees, form.depth), -1), np.zeros((2, form.trees), dtype=np.int64)
        for b, (seq, text, place) in enumerate(self._next()):
            right = text.accepted(place, shape) if place < len(text.better) else 0
            after = _after(text, place, right + 1)
            tokens[b, 1 : right + 1], paths[b, :right] = after[:-1], range(1, right + 1)
            ends[:, b] = right, after[-1]
            self._places[seq.id] = place + right + 1
        parts = [part.ravel() for part in (tokens, parents, paths, ends)]
        values = torch.from_numpy(np.concatenate(parts))
        self.target.grown.outcome[: len(values)].copy_(values)

    def _answer(self, trees: TreeBatch, logits: torch.Tensor) -> None:
        """Of trees that the host made: behind every node what its text says, if it is on that text."""
        tokens, shapes, said = trees.to_host()[0], trees.topology(), list[int]()
        for (_, text, place), first, shape in zip(self._next(), trees.starts, shapes, strict=False):
            after, right = _after(text, place, max(shape.depths) + 1), [True]
            for node in range(1, len(shape)):
                here = tokens[first + node] == after[shape.depths[node] - 1]
                right.append(right[shape.parents[node]] and here)
            said += [after[shape.depths[node]] if ok else OTHER for node, ok in enumerate(right)]
        logits.zero_()
        logits[torch.arange(len(said)), torch.from_numpy(np.array(said))] = 1.0


def _after(text: RecordedText, place: int, count: int) -> list[int]:
    found = text.answer[place : place + count]
    return [*found, *[OTHER] * (count - len(found))]


def renamed(texts: Sequence[RecordedText], most: int) -> tuple[list[RecordedText], int]:
    """The same with few different tokens: those that occur, one after the other. Texts that ended say so."""
    known: dict[int, int] = {}
    found = list[RecordedText]()
    for text in texts:
        prompt, answer = (
            [known.setdefault(t, FIRST + len(known)) for t in part] for part in (text.prompt, text.answer)
        )
        if len(answer) < most:
            answer[-1] = STOP
        found.append(replace(text, prompt=prompt, answer=answer))
    return found, FIRST + len(known)


def make(texts: Sequence[RecordedText], vocabulary: int, batch: int) -> tuple[Engine, Told]:
    """The default drafter over these texts, and its controller."""
    target = make_target(batch, -(-vocabulary // 64) * 64)
    draft = make_draft(target)
    for bucket in BUCKETS:
        for form in draft.menu.forms:
            draft.menu.note(bucket, form, draft_seconds(form, bucket))
    engine = make_drafting(target, batch, draft)
    pools, cost = engine.drafters, CostModel({rows: ms / 1e3 for rows, ms in PASSES.items()})
    told = Told(cost, MOST_NODES, MOST_WIDTH, pools.offer, pools.looks_up, follows=True)  # type: ignore[arg-type]
    engine.controller = told
    Recorded(target, texts, draft).silence(draft)
    return engine, told


def write(engine: Engine, texts: Sequence[RecordedText], most: int) -> None:
    """All of them, which must come out as they were recorded."""
    written = dict[int, list[int]]()
    for text in texts:
        request = Request(tuple(text.prompt), SamplingParams(max_tokens=most), cache_salt=None)
        written[engine.submit(request)] = []
    while engine.busy:
        for event in engine.step():
            written[event.seq_id] += event.tokens
    if [*written.values()] != [text.answer for text in texts]:
        raise RuntimeError("other texts were written than were recorded")


def measure(recorded: Sequence[RecordedText], batch: int, per_place: int) -> dict[str, Any]:
    """One call to warm up, and one that is counted."""
    most = max([len(text.answer) for text in recorded])
    texts, vocabulary = renamed(recorded, most)
    engine, told = make(texts, vocabulary, batch)
    order = [texts[i] for i in in_turn(texts, per_place * batch)]
    write(engine, order[:batch], most)
    rounds, counts, told.spent, told.written = engine.stats.rounds, FollowCounts(), 0.0, 0
    with counts.watch(engine):
        write(engine, order, most)
    row: dict[str, Any] = {"batch": batch, "texts": len(order), "rounds": engine.stats.rounds - rounds}
    row |= {"tokens_per_round": told.written / row["rounds"], "tokens_per_s": told.written / told.spent}
    found = {"kinds": counts.kinds, "why": counts.why, "switches": counts.switches}
    return row | {name: dict(some.most_common()) for name, some in found.items()}


def main() -> None:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.gpu.recorded_rounds", description=summary)
    parser.add_argument("file", type=Path, help="of `python -m forerun.bench.forms record`")
    parser.add_argument("--batches", default="8,32,64")
    parser.add_argument("--per-place", type=int, default=3, help="texts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    texts, rows = load(given.file), []
    for batch in map(int, given.batches.split(",")):
        rows.append(row := measure(texts, batch, given.per_place))
        print(
            f"batch {batch:3d}: {row['rounds']} rounds: {row['kinds']}; read first: {row['why']}, {row['switches']}",
            flush=True,
        )
    print(json.dumps({"what": "recorded rounds", "machine": machine_facts(), "rows": rows}))


if __name__ == "__main__":
    main()
