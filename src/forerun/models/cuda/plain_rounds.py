"""Plain rounds on a GPU: a row for each sequence, whose next token the device finds and the host reads later.

In a plain round every tree is its root. The next roots are the argmax of this pass, or sampled from it on the device
(after_pass.py), one position further: so the next pass can be launched before the host knows them
(forerun.engine.engine). Sequences that have joined meanwhile, and chunks of prompts, are known to the host and go
into the same pass. Sequences that have ended leave their rows unused; rows do not depend on their company, so the
others stay as they are. A pass whose rows are not used has written keys and values behind what is committed, where
whatever comes next writes before it reads: all passes run in one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forerun.core.types import Greedy, Scores, Seq, TreeBatch, Verdict
from forerun.models.cuda.device_trees import LastRound, Placing, TreesPass
from forerun.models.cuda.network import Buffers, Run
from forerun.models.cuda.plan import Plan, Size, SizeFor, Span, plan_pass, splits_at
from forerun.models.pages import PAGE

MOST_ROWS = 256  # sequences of a plain round whose tokens the device finds


class PlainStep(NamedTuple):
    """The roots of a plain pass: how many, which of two sets their tokens go to, and do some come from the other?"""

    rows: int
    into: int
    follows: bool = False
    kinds: Hashable | None = None  # of sampled sequences: see after_pass.py
    behind_trees: bool = False  # roots that follow are behind trees, not behind other roots


class PlainResults:
    """Two sets of tokens: one is read while the next pass, which follows it, writes the other."""

    def __init__(self, buffers: Buffers) -> None:
        device = buffers.logits.device
        self._buffers = buffers
        on_gpu = device.type == "cuda"
        with torch.inference_mode(False):
            self.tops = torch.zeros(2, MOST_ROWS, dtype=torch.long, device=device)
            self._host = torch.zeros(2, MOST_ROWS, dtype=torch.long, pin_memory=on_gpu)
        self._done = [torch.cuda.Event() for _ in range(2)] if on_gpu else []  # type: ignore[no-untyped-call]

    def follow(self, tokens: Tensor, step: PlainStep) -> None:
        """Tokens [rows] below 0 name rows of the other set, -1 the first: put what follows these there."""
        if step.follows and not step.behind_trees:
            roots = tokens[: step.rows]
            found = self.tops[1 - step.into].index_select(0, (-1 - roots).clamp_(min=0).long())
            roots.copy_(torch.where(roots < 0, found, roots))

    def decide(self, step: PlainStep) -> None:
        self.tops[step.into, : step.rows].copy_(self._buffers.logits[: step.rows].argmax(-1))

    def send(self, into: int) -> None:
        """Copy the tokens to the host, behind the pass."""
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
    """Launches a planned pass over roots, with chunks of prompts behind them."""

    def __call__(self, plan: Plan, hidden: tuple[int, ...], step: PlainStep) -> None: ...


@dataclass(slots=True, eq=False)
class PlainPass:
    """A pass over lone roots that was launched."""

    number: int
    into: int
    sampled: bool  # do its tokens hold above temperature 0?
    verdict: Verdict | None = None  # once it was read


class PlainRounds:
    """Scores plain rounds, behind unread ones too."""

    def __init__(
        self,
        results: PlainResults,
        buffers: Buffers,
        run: RunsPlain,
        placing: Placing,
        group: int,
        tiled: int,
        size_for: SizeFor,
        kinds: Callable[[Sequence[Seq]], Hashable | None],
        decided: LastRound,
        with_adapters: Callable[[Plan, Sequence[Seq], int, Sequence[Span], int], Plan],
    ) -> None:
        self.results, self.buffers, self._run = results, buffers, run
        self._placing, self._group, self._tiled = placing, group, tiled
        self._kinds, self._size_for, self._decided = kinds, size_for, decided
        self._with_adapters = with_adapters
        self.followed = 0  # passes that were launched before the last one was read
        self._last: PlainPass | None = None

    def takes(self, trees: TreeBatch) -> bool:
        return len(trees) <= MOST_ROWS and trees.is_plain()

    def score(
        self, seqs: Sequence[Seq], trees: TreeBatch, layers: tuple[int, ...], chunks: Sequence[Span]
    ) -> tuple[Scores, dict[int, Tensor]]:
        """One pass over these roots and the chunks; scores of the roots, and hidden rows of the chunks.

        Logits lie in the buffers until the next pass; hidden rows are copies.
        """
        last, rows = self._last, len(seqs)
        follows, placing = trees.follows or (-1,) * rows, self._placing
        grown = None if trees.follows is None else placing.last
        roots = placing.roots(seqs, trees.to_host()[0], follows)
        added = 0 if grown is None else placing.added
        plan = plan_pass(chunks, self._group, self._size_for, roots, added, self._tiled)
        plan = self._with_adapters(plan, seqs, 1, chunks, rows)
        into = 0 if last is None else 1 - last.into
        step = PlainStep(rows, into, trees.follows is not None, self._kinds(seqs), grown is not None)
        self._run(plan, layers, step)
        self.results.send(into)
        placing.last = None
        this = self._last = PlainPass(1 if last is None else last.number + 1, into, step.kinds is not None)
        self.followed += step.follows
        found = {layer: self.buffers.hidden(layer) for layer in layers}
        hidden = {layer: some[:rows].clone() for layer, some in found.items()}
        behind = {layer: some[rows : plan.rows].clone() for layer, some in found.items() if chunks}
        known = Greedy(
            verdict=lambda: self._read(this, trees, grown or last),
            sampled=this.sampled,
            next_roots=lambda going: self.next_roots(this, going),
            hand_on=lambda: self._decided.note_roots(self.results.tops[into, :rows]),
            tokens=lambda: self.results.tops[into, :rows],
        )
        return Scores(self.buffers.logits[:rows], hidden, known), behind

    def next_roots(self, this: PlainPass | TreesPass, going: Sequence[tuple[Seq, int]]) -> TreeBatch | None:
        """The round behind this pass, of sequences and their rows or trees in it; -1 = they had none."""
        if (self._placing.last or self._last) is not this or len(going) > MOST_ROWS:
            return None
        count = len(going)
        roots = [seq.tokens[-1] for seq, _ in going]  # of those that follow, `_read` tells them
        rows = tuple([row for _, row in going])
        device = self.results.tops.device
        return TreeBatch(roots, [-1] * count, tuple(range(count + 1)), device=device, follows=rows)

    def _read(self, this: PlainPass, trees: TreeBatch, last: PlainPass | TreesPass | None) -> Verdict:
        """Wait for a pass; what its roots were is known once the one before it was read."""
        if this.verdict is None:
            assert self._last is not None
            if self._last.number - this.number > 1:
                raise RuntimeError("the tokens of a pass were overwritten by those that follow it")
            if trees.follows is not None:
                before = None if last is None else last.verdict
                assert before is not None, "rounds are read one after the other"
                known, found = trees.to_host(), before.to_host()[1]
                roots = [t if row < 0 else found[row] for t, row in zip(known[0], trees.follows, strict=True)]
                trees.note_host(roots, known[1])
            tokens = self.results.read(this.into, len(trees))
            this.verdict = Verdict.of([[]] * len(trees), tokens, self.results.tops.device)
        return this.verdict


def complete_roots(ints: Tensor, size: Size, rows: int, last: LastRound) -> None:
    """Lone roots behind trees that were not read: the token, the position and what follows from it, on the device."""
    run = Run.of(size, ints)
    tokens, positions, slots, groups = (run.tokens[:rows], run.positions[:rows], run.slots[:rows], run.groups[:rows])
    follows, trees = tokens < 0, (-1 - tokens).clamp(min=0).long()
    accepted = last.accepted[trees]
    found = last.tokens[trees].gather(1, accepted[:, None])[:, 0]
    tokens.copy_(torch.where(follows, found.int(), tokens))
    positions.add_(torch.where(follows, accepted.int() + 1, 0))
    slots.copy_(ints[(groups[:, 7] + positions // PAGE).long()] * PAGE + positions % PAGE)
    groups[:, 1] = splits_at(positions) + 1
    groups[:, 5] = positions
