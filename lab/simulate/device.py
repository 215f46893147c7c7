"""The simulated device: a target that takes the time of a GPU, by a clock that is counted, or by the real one.

Passes take t(rows), rounded up to the sizes that passes have there, and end in the order in which they were launched;
the verdict waits for the end. The next pass can be launched before the last one is read, as on a GPU. What goes into a
pass beside trees is decided by the code that decides it there. With a counted clock the host's work is counted too, and
hidden while the device is busy; with a WallClock it alone is real. Texts are known, or drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import sleep
from typing import Protocol

import torch
from torch import Tensor

from forerun.core.clock import WALL
from forerun.core.types import Greedy, Needs, Prompts, Scores, Seq, TreeBatch, Verdict, first_rows
from forerun.models.base import ON_CPU, ON_GPU, Abilities, SharedWeights
from forerun.models.cuda.plan import MAX_ROWS, beside_trees, least_rows, rows_beside
from forerun.models.slots import UnpagedTarget
from forerun.verify.greedy import greedy_verdict
from lab.simulate.speeds import Speeds

NEVER_COMES = 0  # what the target would say behind a draft that is wrong


class Clock(Protocol):
    """A `forerun.core.clock.Clock` that can wait."""

    @property
    def seconds(self) -> float: ...
    def __call__(self) -> float: ...
    def spend(self, seconds: float) -> None:
        """The host works for so long."""

    def wait_until(self, when: float) -> None: ...


class WallClock:
    """The real one; the host's work takes what it takes."""

    @property
    def seconds(self) -> float:
        return WALL()

    def __call__(self) -> float:
        return WALL()

    def spend(self, seconds: float) -> None:
        """It was spent already."""

    def wait_until(self, when: float) -> None:
        while (left := when - WALL()) > 0.0:
            sleep(left)


class Answers(Protocol):
    vocab_size: int

    def start(self, seq: Seq) -> None:
        """Its prompt is read."""

    def verdict(self, seqs: Sequence[Seq], trees: TreeBatch, starting: Collection[int]) -> Verdict:
        """Sequences of the ids in `starting` have nodes that were not drafted."""

    def forget(self, seq: Seq) -> None: ...


class KnownAnswers:
    def __init__(self, texts: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int) -> None:
        self.texts, self.vocab_size = texts, vocab_size
        self._known: dict[int, Sequence[int]] = {}

    def start(self, seq: Seq) -> None:
        if seq.id not in self._known:
            prompt = tuple(seq.tokens[: seq.prompt_length])
            self._known[seq.id] = [*prompt, *self.texts[prompt]]

    def verdict(self, seqs: Sequence[Seq], trees: TreeBatch, starting: Collection[int]) -> Verdict:
        if not trees.is_plain():
            return walked(seqs, trees, self._after)
        trees.note_host([seq.tokens[-1] for seq in seqs], trees.to_host()[1])
        return Verdict.of([()] * len(seqs), [self._after(seq, 0) for seq in seqs], trees.device)

    def after(self, seq: Seq, count: int) -> list[int]:
        return [self._after(seq, depth) for depth in range(count)]

    def forget(self, seq: Seq) -> None:
        self._known.pop(seq.id, None)

    def _after(self, seq: Seq, depth: int) -> int:
        known, place = self._known[seq.id], len(seq.tokens) + depth
        return known[place] if place < len(known) else NEVER_COMES


@dataclass(slots=True)
class SimulatedDevice(UnpagedTarget):
    """Implements forerun.models.base.Target; its KV cache is a number of tokens for each sequence."""

    clock: Clock
    speeds: Speeds
    answers: Answers
    max_length: int = 1 << 16
    slots: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pass_rows: int = MAX_ROWS
    passes: list[tuple[int, int]] = field(default_factory=list)  # rows of trees and of prompts, of every pass
    spent: float = 0.0  # real seconds of the host in here, waits included
    vocab_size: int = field(init=False)
    can: Abilities = field(init=False)  # rounds overlap as on a GPU, nothing is captured, and the clock is its own
    _promised: int = 0
    _cached: dict[int, int] = field(default_factory=dict)
    _free_at: float = 0.0  # when the device has nothing to do
    _paced: float = 0.0  # when the last pass over prompts alone ends
    _logits: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.vocab_size = self.answers.vocab_size
        self.can = replace(ON_CPU, overlap=ON_GPU.overlap, prefill=ON_GPU.prefill, clock=self.clock)
        self._logits = torch.zeros(1, self.vocab_size)

    @property
    def used_slots(self) -> int:
        return sum(self._cached.values())

    def shared(self) -> SharedWeights | None:
        return None

    def busy_for(self, seconds: float) -> None:
        self._free_at = max(self.clock.seconds, self._free_at) + seconds

    def finish(self) -> None:
        self.clock.wait_until(self._free_at)

    def prompt_rows(self, nodes: int, rows: int, waiting: int) -> int:
        return rows_beside(nodes, rows, waiting)

    def prefill(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> tuple[TreeBatch, Scores]:
        fresh = first_rows(self._fresh(seqs), MAX_ROWS if rows is None else rows)
        self.host_works(len(seqs))
        before, (self._paced, taken) = self._paced, self._run(0, seqs, fresh)
        self.clock.wait_until(before)  # as forerun.models.cuda.target.PromptPace does
        return self._keep(seqs, fresh), Scores(None, seconds=lambda: taken)

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        began = WALL()
        self.host_works(len(seqs))
        readers = () if prompts is None else prompts.seqs
        fresh, starting = self._fresh(readers), {seq.id for seq in readers}
        if prompts is not None:
            fresh = beside_trees(fresh, trees, prompts.rows, least_rows(readers, fresh, seqs))
        end, taken = self._run(trees.nodes if trees.form is None else trees.form.rows, readers, fresh)
        roots = next_roots if trees.is_plain() or trees.form is not None else None
        known = Greedy(verdict=lambda: self._decide(seqs, trees, end, starting), next_roots=roots)
        read = None if prompts is None else (self._keep(readers, fresh), Scores(None))
        self.spent += WALL() - began
        return Scores(self._logits.expand(trees.nodes, -1), {}, known, read, seconds=lambda: taken)

    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        self._promised = 0
        for seq, path in zip(seqs, verdict.to_host()[0], strict=True):
            self._cached[seq.id] += 1 + len(path)
        self.host_works(len(seqs))

    def truncate(self, seq: Seq, length: int) -> None:
        if seq.id in self._cached:
            self._cached[seq.id] = min(length, self._cached[seq.id])

    def cached_tokens(self, seq: Seq) -> int:
        return self._cached.get(seq.id, 0)

    def release(self, seq: Seq) -> None:
        self._cached.pop(seq.id, None)
        self.answers.forget(seq)

    def _decide(self, seqs: Sequence[Seq], trees: TreeBatch, end: float, starting: Collection[int]) -> Verdict:
        began = WALL()
        self.clock.wait_until(end)
        verdict = self.answers.verdict(seqs, trees, starting)
        self.spent += WALL() - began
        return verdict

    def host_works(self, sequences: int) -> None:
        self.clock.spend(self.speeds.host + self.speeds.host_row * sequences)

    def _run(self, nodes: int, readers: Sequence[Seq], fresh: Sequence[list[int]]) -> tuple[float, float]:
        """Launch a pass; when it ends, and what it takes."""
        started, prompts = max(self.clock.seconds, self._free_at), sum(map(len, fresh))
        if nodes + prompts:
            self.passes.append((nodes, prompts))
            columns = zip(readers, fresh, strict=True)
            seen = sum([len(rows) * (self.cached_tokens(seq) + len(rows) / 2) for seq, rows in columns])
            self.busy_for(self.speeds.of_pass(nodes + prompts) + self.speeds.context * seen)
        return self._free_at, self._free_at - started

    def _fresh(self, seqs: Sequence[Seq]) -> list[list[int]]:
        return [seq.tokens[self._cached.get(seq.id, 0) : -1] for seq in seqs]

    def _keep(self, seqs: Sequence[Seq], fresh: Sequence[list[int]]) -> TreeBatch:
        for seq, tokens in zip(seqs, fresh, strict=True):
            self._cached[seq.id] = self._cached.get(seq.id, 0) + len(tokens)
            self.answers.start(seq)
        return TreeBatch.chains(fresh)


def next_roots(going: Sequence[tuple[Seq, int]]) -> TreeBatch:
    """The plain round behind one that was not read; whoever knows the texts need not be told its roots."""
    rows = tuple([row for _, row in going])
    return TreeBatch([seq.tokens[-1] for seq, _ in going], [-1] * len(rows), tuple(range(len(rows) + 1)), follows=rows)


def walked(seqs: Sequence[Seq], trees: TreeBatch, says: Callable[[Seq, int], int]) -> Verdict:
    """The greedy verdict: after every node what its text says, if the node is on that text."""
    (tokens, _), said = trees.to_host(), list[int]()
    for seq, first, shape in zip(seqs, trees.starts, trees.topology(), strict=False):
        right = [True]
        for node in range(1, len(shape)):
            here = tokens[first + node] == says(seq, shape.depths[node] - 1)
            right.append(here and right[shape.parents[node]])
        said += [says(seq, shape.depths[node]) if ok else NEVER_COMES for node, ok in enumerate(right)]
    return greedy_verdict(trees, Greedy(argmax=said))
