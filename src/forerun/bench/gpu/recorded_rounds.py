"""Which rounds of real texts follow an unread one, and why others do not: `python -m forerun.bench.gpu.recorded_rounds`.

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
from collections import Counter
from collections.abc import Callable, Sequence
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
from forerun.bench.gpu.host_rounds import MadeUp, make_draft, make_drafting, make_target
from forerun.bench.machine import machine_facts
from forerun.control import adaptive
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.control.forms import FormChooser
from forerun.control.waiting import Waiting
from forerun.drafters.eagle.cuda.draft_graphs import DeviceDraft
from forerun.drafters.eagle.cuda.draft_plan import BUCKETS
from forerun.drafters.eagle.cuda.drafter import DeviceEagle
from forerun.engine import engine as engine_file
from forerun.engine import following
from forerun.engine.engine import Engine
from forerun.engine.pending import Launched
from forerun.models.cuda.target import CudaDecoder
from forerun.offers import Form
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

    def __init__(self, target: CudaDecoder, texts: Sequence[RecordedText], draft: DeviceDraft | None) -> None:
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

        target.score = scored  # type: ignore[method-assign]

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
        assert self.draft is not None and self.draft._last is not None
        shape = self.draft._last.shape
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
        for (seq, text, place), first, shape in zip(self._next(), trees.starts, shapes, strict=False):
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


class Counts:
    """Rounds of one engine by kind, and what kept some from following; by the functions that said so."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.why: Counter[str] = Counter()
        self.dropped = 0
        self._said, self._reason, self._apart = list[str](), "the first", False

    def watch(self, engine: Engine) -> None:
        no: list[tuple[Any, str, Callable[[Any], bool]]] = [
            (following, "_may_follow", lambda found: not found),
            (engine.target, "make_room", lambda found: not found),
            (FormChooser, "keeps", lambda found: found is None),
            (FormChooser, "keeps_plain", lambda found: found is None),
            (adaptive, "ends", bool),
            (Waiting, "waits", bool),
            (DeviceDraft, "follow", lambda found: found is None),
        ]
        for owner, name, refuses in no:
            setattr(owner, name, self._noting(getattr(owner, name), name, refuses))
        follow, finish, apart = engine_file.follow, engine._finish, DeviceEagle._grow_apart

        def followed(engine: Engine, last: Launched) -> Launched | None:
            self._said.clear()
            found = follow(engine, last)
            if found is None:
                kind = "plain" if last.trees.is_plain() else "form" if last.trees.form else "host's trees"
                left = f", {last.repeats} repeats" if last.repeats <= 0 else ""
                self._reason = f"behind {kind}: {self._said[0] if self._said else 'not asked' + left}"
            return found

        def finished(launched: Launched) -> None:
            trees, follows = launched.trees, launched.trees.follows is not None
            kind = (
                "plain"
                if trees.is_plain()
                else "form"
                if trees.form
                else "mixed"
                if self._apart
                else "look-ups"
            )
            self.kinds[f"{kind}, {'followed' if follows else 'read first'}"] += 1
            if not follows:
                self.why[self._reason] += 1
            behind = engine._following
            finish(launched)
            self.dropped += behind is not None and engine._ahead is None

        def grown_apart(drafter: DeviceEagle, *given: Any) -> TreeBatch:
            self._apart = True
            return apart(drafter, *given)

        engine_file.follow, engine._finish = followed, finished  # type: ignore[method-assign]
        DeviceEagle._grow_apart = grown_apart  # type: ignore[method-assign]

    def _noting(
        self, call: Callable[..., Any], name: str, refuses: Callable[[Any], bool]
    ) -> Callable[..., Any]:
        def noting(*given: Any, **named: Any) -> Any:
            found = call(*given, **named)
            if refuses(found):
                self._said.append(name)
            return found

        return noting


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


def measure(
    texts: Sequence[RecordedText], batch: int, per_place: int, counts: Counts | None
) -> dict[str, Any]:
    """One call to warm up, and one that is counted."""
    most = max([len(text.answer) for text in texts])
    texts, vocabulary = renamed(texts, most)
    target = make_target(batch, -(-vocabulary // 64) * 64)
    draft = make_draft(target)
    for bucket in BUCKETS:
        for form in draft.menu.forms:
            draft.menu.note(bucket, form, draft_seconds(form, bucket))
    engine = make_drafting(target, batch, draft)
    pools, cost = engine.drafters, CostModel({rows: ms / 1e3 for rows, ms in PASSES.items()})
    told = Told(cost, MOST_NODES, MOST_WIDTH, pools.offer, pools.looks_up, follows=True)
    engine.controller = told
    Recorded(target, texts, draft).silence(draft)
    order = in_turn(texts, per_place * batch)
    for some in (order[:batch], order):
        if some is order and counts is not None:
            counts.watch(engine)
        rounds, told.spent, told.written = engine.stats.rounds, 0.0, 0
        wanted = {}
        for i in some:
            request = Request(tuple(texts[i].prompt), SamplingParams(max_tokens=most), cache_salt=None)
            wanted[engine.submit(request)] = texts[i].answer
        while engine.busy:
            for event in engine.step():
                if event.finished is not None:
                    wanted.pop(event.seq_id)
        assert not wanted
    row: dict[str, Any] = {"batch": batch, "texts": len(order), "rounds": engine.stats.rounds - rounds}
    row |= {"tokens_per_round": told.written / row["rounds"], "tokens_per_s": told.written / told.spent}
    if counts is not None:
        row |= {"kinds": dict(counts.kinds.most_common()), "why": dict(counts.why.most_common())}
        row |= {"dropped": counts.dropped}
    return row


def main() -> None:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.gpu.recorded_rounds", description=summary)
    parser.add_argument("file", type=Path, help="of `python -m forerun.bench.forms record`")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--per-place", type=int, default=3, help="texts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    row = measure(load(given.file), given.batch, given.per_place, Counts())
    print(json.dumps({"what": "recorded rounds", "machine": machine_facts(), "row": row}))


if __name__ == "__main__":
    main()
