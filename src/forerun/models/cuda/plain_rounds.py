"""Plain rounds on a GPU without a pause between passes: the next pass is launched before the last one was read.

In a plain round every tree is its root. The next roots are the argmax of this pass, or what was sampled from it on the
device (models/cuda/sampled.py), one position further: so the next pass can be launched before the host knows them. It
is used if the next round is what was expected: the same tokens after the same lengths. Sequences that have ended leave
their rows unused; rows do not depend on their company, so the others stay as they are.

When: where the engine's controller says that the next round will be plain (`Greedy.next_is_plain`); where nobody says
so, once a few plain rounds in a row were decided by `Scores.greedy`. Then a pass that was launched in vain makes the
next attempt wait twice as long. Such a pass has written keys and values behind what is
committed, where whatever comes next writes before it reads: all passes run in one stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.cuda.network import Buffers
from forerun.models.cuda.plan import Plan, SizeFor, Span, plan_pass
from forerun.types import Greedy, Scores, Seq, TreeBatch, Verdict

log = logging.getLogger(__name__)

MOST_ROWS = 128  # of a plain round that may be followed before it was read
FIRST, LONGEST_WAIT = 2, 64  # plain rounds before the first attempt, and after many in vain

Seconds = Callable[[], float | None]
Spans = Callable[
    [Sequence[Seq], Sequence[int], int], list[Span]
]  # sequences, tokens, positions further -> rows


class PlainStep(NamedTuple):
    """Which of two sets of results a plain pass writes, and whether its tokens are the argmax of the other set."""

    into: int
    follows: bool
    kinds: Hashable | None = None  # of sampled sequences: see models/cuda/sampled.py


class PlainResults:
    """Two sets of logits and argmax: one is read while the next pass writes the other."""

    def __init__(self, buffers: Buffers) -> None:
        device = buffers.logits.device
        self._buffers = buffers
        self._second: Tensor | None = None
        on_gpu = device.type == "cuda"
        with torch.inference_mode(False):
            self.tops = torch.zeros(2, MOST_ROWS, dtype=torch.long, device=device)
            self._host = torch.zeros(2, MOST_ROWS, dtype=torch.long, pin_memory=on_gpu)
        self._done = [torch.cuda.Event() for _ in range(2)] if on_gpu else []  # type: ignore[no-untyped-call]

    def logits(self, into: int) -> Tensor:
        """[MOST_ROWS, V]; the second is made when it is first needed."""
        if into == 0:
            return self._buffers.logits[:MOST_ROWS]
        if self._second is None:
            with torch.inference_mode(False):
                self._second = torch.empty_like(self._buffers.logits[:MOST_ROWS])
        return self._second

    def follow(self, tokens: Tensor, step: PlainStep) -> None:
        """Tokens [rows] name rows of the other set: put what follows these there."""
        if step.follows:
            tokens.copy_(self.tops[1 - step.into].index_select(0, tokens.long()))

    def decide(self, rows: int, step: PlainStep) -> None:
        self.tops[step.into, :rows].copy_(self.logits(step.into)[:rows].argmax(-1))

    def send(self, into: int) -> None:
        """Copy the argmax to the host, behind the pass."""
        self._host[into].copy_(self.tops[into], non_blocking=True)
        if self._done:
            self._done[into].record()

    def read(self, into: int, rows: int) -> list[int]:
        """Wait for that pass, and for no later one."""
        if self._done:
            self._done[into].synchronize()
        found: list[int] = self._host[into, :rows].tolist()
        return found


class RunsPlain(Protocol):
    """Launches a planned plain pass, and says what will tell how long it takes."""

    def __call__(self, plan: Plan, hidden: tuple[int, ...], step: PlainStep) -> Seconds: ...


@dataclass(slots=True, eq=False)
class PlainPass:
    """A pass over lone roots that was launched."""

    ids: list[int | None]  # row -> sequence; None = it was released or cut
    lengths: list[int]  # cached tokens before it
    roots: list[int]
    layers: tuple[int, ...]
    into: int
    seconds: Seconds  # on the device
    sampled: bool  # do its tokens hold above temperature 0?
    told: bool | None = None  # is the next round plain? None = nobody said so
    verdict: Verdict | None = None  # once it was read

    def tell(self, plain: bool) -> None:
        """Will the next round be plain? Then its pass is launched before this one is read, else it is not."""
        self.told = plain


class PlainRounds:
    """Scores plain rounds, and goes ahead."""

    def __init__(
        self,
        results: PlainResults,
        buffers: Buffers,
        run: RunsPlain,
        spans: Spans,
        group: int,
        size_for: SizeFor,
        kinds: Callable[[Sequence[Seq]], Hashable | None],
    ) -> None:
        self.results, self.buffers, self._run, self._spans, self._group = results, buffers, run, spans, group
        self._kinds = kinds
        self._size_for = size_for
        self.looks_ahead = True
        self.launched = self.used = 0  # passes ahead
        self._ahead: PlainPass | None = None
        self._streak, self._wait = 0, FIRST
        self._decided = False  # the last round's verdict came from `Scores.greedy`

    def takes(self, trees: TreeBatch) -> bool:
        return len(trees) <= MOST_ROWS and trees.form is None and trees.is_plain()

    def is_ahead_of(self, seqs: Sequence[Seq], trees: TreeBatch) -> bool:
        """Is a pass over their next roots under way already?"""
        known = set(self._ahead.ids) if self._ahead is not None else set()
        return bool(known) and self.takes(trees) and all(seq.id in known for seq in seqs)

    def drop(self) -> bool:
        """Another kind of pass comes. Was one launched ahead in vain, which has to end first?"""
        in_vain, self._streak, self._decided = self._ahead is not None, 0, False
        if in_vain:
            self._ahead, self._wait = None, min(LONGEST_WAIT, 2 * self._wait)
        return in_vain

    def forget(self, seq_id: int) -> None:
        """Its slots are given back or cut: nothing that was written ahead counts for it."""
        ahead = self._ahead
        if ahead is not None:
            ahead.ids = [None if one == seq_id else one for one in ahead.ids]

    def score(self, seqs: Sequence[Seq], tokens: list[int], layers: tuple[int, ...], more: bool) -> Scores:
        """One pass over these roots, or the one that is under way; `more`: the next round may be another kind."""
        if not self._decided:
            self._streak = 0
        self._decided = False
        now = self._spans(seqs, tokens, 0)
        is_ahead = self._ahead is not None
        found = self._under_way(seqs, tokens, [span.length for span in now], layers)
        delayed = is_ahead and found is None
        if found is None:
            step = PlainStep(0, follows=False)
            found = self._launch(seqs, now, tokens, layers, step), list(range(len(seqs)))
        this, rows = found
        self._ahead = None
        logits, hidden = self._results(this, rows)
        verdict = lambda: self._decide(seqs, this, rows, more)  # noqa: E731
        tell = None if more or not self._may_go_on(seqs) else this.tell
        known = Greedy(verdict=verdict, sampled=this.sampled, next_is_plain=tell)
        followed = is_ahead and not delayed
        return Scores(logits, hidden, known, seconds=this.seconds, delayed=delayed, followed=followed)

    def _under_way(
        self, seqs: Sequence[Seq], tokens: list[int], lengths: list[int], layers: tuple[int, ...]
    ) -> tuple[PlainPass, list[int]] | None:
        """The pass that was launched ahead, and which of its rows these roots are; None where it does not fit."""
        ahead = self._ahead
        if ahead is None:
            return None
        place = {seq_id: row for row, seq_id in enumerate(ahead.ids)}
        rows = [place.get(seq.id, -1) for seq in seqs]
        fits = ahead.layers == layers and all(
            row >= 0 and ahead.lengths[row] == length and ahead.roots[row] == token
            for row, length, token in zip(rows, lengths, tokens, strict=True)
        )
        if not fits:
            self.drop()
            return None
        self.used += 1
        self._wait = max(FIRST, self._wait - 1)
        return ahead, rows

    def _launch(
        self,
        seqs: Sequence[Seq],
        spans: list[Span],
        roots: list[int],
        layers: tuple[int, ...],
        step: PlainStep,
    ) -> PlainPass:
        step = step._replace(kinds=self._kinds(seqs))
        seconds = self._run(plan_pass(spans, self._group, self._size_for), layers, step)
        self.results.send(step.into)
        ids, lengths = [seq.id for seq in seqs], [span.length for span in spans]
        return PlainPass([*ids], lengths, roots, layers, step.into, seconds, step.kinds is not None)

    def _results(self, this: PlainPass, rows: list[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits in the buffers; hidden rows as a copy, since the next pass overwrites them."""
        count, logits = len(rows), self.results.logits(this.into)
        if rows == list(range(count)):
            return logits[:count], {n: self.buffers.hidden(n)[:count].clone() for n in this.layers}
        index = torch.tensor(rows, device=logits.device)
        return logits[index], {n: self.buffers.hidden(n)[index] for n in this.layers}

    def _decide(self, seqs: Sequence[Seq], this: PlainPass, rows: list[int], more: bool) -> Verdict:
        """Launch the next pass, then read this one."""
        if this.verdict is not None:
            return this.verdict
        self._streak, self._decided = self._streak + 1, True
        goes = self._streak >= self._wait if this.told is None else this.told
        if goes and not more and self._may_go_on(seqs):
            self._go_ahead(seqs, this, rows)
        read = self.results.read(this.into, len(this.ids))
        tokens = [read[row] for row in rows]
        if self._ahead is not None:
            self._ahead.roots = tokens
        this.verdict = Verdict.of([[] for _ in rows], tokens, self.results.tops.device)
        return this.verdict

    def _may_go_on(self, seqs: Sequence[Seq]) -> bool:
        return self.looks_ahead and any([len(seq.tokens) + 1 < seq.max_length for seq in seqs])  # noqa: C419

    def _go_ahead(self, seqs: Sequence[Seq], this: PlainPass, rows: list[int]) -> None:
        try:
            spans = self._spans(seqs, rows, 1)
            step = PlainStep(1 - this.into, follows=True)
            self._ahead = self._launch(seqs, spans, [], this.layers, step)
            self.launched += 1
        except ForerunError:  # no room behind a sequence: the next round will tell
            self._ahead = None
        except Exception as error:  # a graph that cannot be captured, no memory for the second set of results
            self._ahead, self.looks_ahead = None, False
            log.warning("passes are no longer launched ahead, as one failed: %r", error)
