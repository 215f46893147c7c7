"""EmulatedDevice: a target that knows its texts and takes the time of a GPU, so that only the host's work is real.

Passes are launched and end when a device with this t(rows) would end them; the verdict waits for that. As on a GPU
(forerun.models.cuda.plain_rounds), the next plain pass can be launched before the last one is read.
With `seconds=None` passes take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter, sleep

import torch

from forerun.core.types import Greedy, Needs, Prompts, Scores, Seq, TreeBatch, Verdict, first_rows
from forerun.models.base import SharedWeights
from forerun.models.slots import UnpagedTarget
from forerun.verify.greedy import greedy_verdict

NEVER_COMES = 0  # what the target would say behind a draft that is wrong


@dataclass(slots=True, kw_only=True)
class CountedTokens(UnpagedTarget):
    """A KV cache that is a number of tokens for each sequence."""

    _promised: int = 0
    _cached: dict[int, int] = field(default_factory=dict)

    @property
    def used_slots(self) -> int:
        return sum(self._cached.values())

    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        self._promised = 0
        for seq, path in zip(seqs, verdict.to_host()[0], strict=True):
            self._cached[seq.id] += 1 + len(path)

    def truncate(self, seq: Seq, length: int) -> None:
        if seq.id in self._cached:
            self._cached[seq.id] = min(length, self._cached[seq.id])

    def cached_tokens(self, seq: Seq) -> int:
        return self._cached.get(seq.id, 0)

    def release(self, seq: Seq) -> None:
        self._cached.pop(seq.id, None)


def next_roots(going: Sequence[tuple[Seq, int]]) -> TreeBatch:
    """The plain round behind one that was not read; whoever knows the texts need not be told its roots."""
    rows = tuple([row for _, row in going])
    return TreeBatch(
        [seq.tokens[-1] for seq, _ in going], [-1] * len(rows), tuple(range(len(rows) + 1)), follows=rows
    )


@dataclass(slots=True)
class EmulatedDevice(CountedTokens):
    """Greedy texts by prompt; t(rows) in seconds."""

    texts: Mapping[tuple[int, ...], Sequence[int]]
    vocab_size: int
    seconds: Callable[[int], float] | None = None
    max_length: int = 1 << 20
    slots: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pass_rows: int = 512
    spent: float = 0.0  # seconds of the host in here, waits included
    _known: dict[int, Sequence[int]] = field(default_factory=dict)
    _free_at: float = 0.0  # when the device has nothing to do
    _row: torch.Tensor | None = None

    def shared(self) -> SharedWeights | None:
        return None

    def prefill(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> tuple[TreeBatch, Scores]:
        trees = self._read(seqs, rows)
        self._launch(trees.nodes)
        return trees, Scores(None)

    def _read(self, seqs: Sequence[Seq], rows: int | None) -> TreeBatch:
        chains = [seq.tokens[self._cached.get(seq.id, 0) : -1] for seq in seqs]
        chains = chains if rows is None else first_rows(chains, rows)
        for seq, chain in zip(seqs, chains, strict=True):
            self._cached[seq.id] = self._cached.get(seq.id, 0) + len(chain)
            if seq.id not in self._known:
                prompt = tuple(seq.tokens[: seq.prompt_length])
                self._known[seq.id] = [*prompt, *self.texts[prompt]]
        return TreeBatch.chains(chains)

    def score(
        self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None
    ) -> Scores:
        """Prompts share the pass."""
        started = perf_counter()
        read = None if prompts is None else self._read(prompts.seqs, prompts.rows)
        rows = trees.nodes + (0 if read is None else read.nodes)
        self._launch(rows)
        end, own = self._free_at, 0.0 if self.seconds is None else self.seconds(rows)
        if self._row is None:
            self._row = torch.zeros(1, self.vocab_size)
        verdict = lambda: self._decide(seqs, trees, end)  # noqa: E731
        known = Greedy(verdict=verdict, next_roots=next_roots if trees.is_plain() else None)
        self.spent += perf_counter() - started
        logits, prompt = self._row.expand(trees.nodes, -1), None if read is None else (read, Scores(None))
        return Scores(logits, {}, known, prompt, seconds=lambda: own)

    def _launch(self, rows: int) -> None:
        if self.seconds is not None and rows:
            self._free_at = max(perf_counter(), self._free_at) + self.seconds(rows)

    def _decide(self, seqs: Sequence[Seq], trees: TreeBatch, end: float) -> Verdict:
        started = perf_counter()
        self._wait(end)
        if trees.is_plain():
            verdict = Verdict.of([()] * len(seqs), [self._after(seq, 0) for seq in seqs], trees.device)
            trees.note_host([seq.tokens[-1] for seq in seqs], trees.to_host()[1])
        else:
            verdict = greedy_verdict(trees, Greedy(argmax=self._argmax(seqs, trees)))
        self.spent += perf_counter() - started
        return verdict

    def _wait(self, end: float) -> None:
        while (left := end - perf_counter()) > 0.0:
            sleep(left)

    def _argmax(self, seqs: Sequence[Seq], trees: TreeBatch) -> list[int]:
        """After every node: what its text says, if it is on that text."""
        (tokens, _), found = trees.to_host(), list[int]()
        for seq, first, shape in zip(seqs, trees.starts, trees.topology(), strict=False):
            right = [True]
            for node in range(1, len(shape)):
                parent = shape.parents[node]
                depth = shape.depths[node]
                right.append(right[parent] and tokens[first + node] == self._after(seq, depth - 1))
            found += [
                self._after(seq, shape.depths[node]) if ok else NEVER_COMES for node, ok in enumerate(right)
            ]
        return found

    def after(self, seq: Seq, count: int) -> list[int]:
        """What the text of a sequence says next."""
        return [self._after(seq, depth) for depth in range(count)]

    def _after(self, seq: Seq, depth: int) -> int:
        known, place = self._known[seq.id], len(seq.tokens) + depth
        return known[place] if place < len(known) else NEVER_COMES

    def release(self, seq: Seq) -> None:
        CountedTokens.release(self, seq)
        self._known.pop(seq.id, None)
