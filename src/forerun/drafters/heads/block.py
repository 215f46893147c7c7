"""DFlashDrafter and DSparkDrafter: drafters that make a whole block in one pass over the target's features.

DFlash guesses every position by itself; a tree is grown from these laws, the likeliest paths first. DSpark adds what
the token before says of the next (a Markov head), and a confidence head that decides how many positions are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from forerun.core.clock import WALL, Clock
from forerun.core.offer import Offer
from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Needs, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.base import NEGLIGIBLE, Parts
from forerun.drafters.heads.base import (
    NOT_CAPTURED,
    UNMEASURED,
    Calibration,
    Meter,
    ObservedRows,
    head_dtype,
    is_drawn,
    is_ready,
    observe_rows,
    rehearse,
    wants_sampling,
)
from forerun.drafters.heads.block_head import BlockHead, BlockKind, read_block
from forerun.drafters.heads.block_runner import READ_AT_ONCE, BlockCandidates, BlockRunner, BlockSteps, GraphRunner
from forerun.drafters.heads.growth import Tree, grow_ranked, lay_out, sample_trees
from forerun.models.base import Target

log = logging.getLogger(__name__)

PROMPT = 32  # more rows than this at once are a prompt's
READING = 0.05  # of a pass: what a row of a prompt takes, until one was read
GROWING = 0.05  # of a pass: what a level of the tree takes, until one was grown


class DFlashDrafter:
    """A block drafter; its tokens are chosen, or drawn from the laws of the positions where that is wanted."""

    kind: BlockKind = "dflash"
    least = NEGLIGIBLE  # a drawn draft ends where a confidence head expects less to be reached

    def __init__(self, head: BlockHead, *, sampled: bool = False, clock: Clock = WALL) -> None:
        self.head, self.sampled = head, sampled
        self.needs = Needs(tuple(sorted(set(head.config.layers))))
        self._sequences: dict[int, ObservedRows] = {}
        self._runner: BlockRunner = GraphRunner(head) if head.device.type == "cuda" else BlockRunner(head)
        self._pass, self._growth = Meter(clock), Meter(clock)
        self._reading = 0.0  # seconds per row of a prompt
        self._expected: dict[int, float] = {}  # tokens of the last draft that should be accepted
        self._calibration = Calibration() if head.config.confidence else head.config.calibration

    @classmethod
    def build(cls, parts: Parts) -> DFlashDrafter:
        head = load_block(parts.head_folder(cls.kind), parts.target, cls.kind)
        can = parts.target.can
        drafter = cls(head, sampled=wants_sampling(parts.speculative, can), clock=can.clock)
        drafter.warm_up()
        return drafter

    def warm_up(self) -> None:
        """On a GPU: capture and time drafts in the usual contexts. A first draft in mid-text would seem too slow."""
        if not isinstance(self._runner, GraphRunner):
            return
        config, contexts = self.head.config, self._runner.usual_contexts
        rows = torch.zeros(contexts[-1], config.feature_width, dtype=self.head.dtype, device=self.head.device)
        budget = Budget(config.levels, config.levels)
        try:
            for context in contexts:
                for heat in (1.0, 0.0):
                    params = SamplingParams(temperature=heat)
                    rehearse(self, self._sequences, rows[:context], context, [budget], params)
            for count in READ_AT_ONCE:
                rehearse(self, self._sequences, rows[:count], count, [budget])
        except Exception as error:  # no memory for graphs: that does not stop generation
            log.warning(NOT_CAPTURED, type(error).__name__, error)
            self._runner = BlockRunner(self.head)

    def offer(self, seq: Seq) -> Offer:
        """The pass, which makes all levels; a level adds only its share of growing the tree."""
        once, observed = self._pass.seconds or UNMEASURED, self._sequences.get(seq.id)
        level = self._growth.seconds or GROWING * once
        unread = len(observed.tokens) if observed is not None else 0
        start = unread * (self._reading or READING * once) if unread > PROMPT else 0.0
        chosen = not self._draws(seq)
        return Offer((once + level, level), start, chosen=chosen, stops=chosen, expected=self._expected.get(seq.id))

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        trees = [([seq.tokens[-1]], [-1]) for seq in seqs]
        rows, laws = [[-1] for _ in seqs], list[Tensor]()
        config = self.head.config
        live = [
            b
            for b, seq in enumerate(seqs)
            if is_ready(self._sequences.get(seq.id), seq, budgets[b])
            and len(seq.tokens) + config.rows <= config.max_length
        ]
        for drawn in (False, True):
            which = [b for b in live if self._draws(seqs[b]) == drawn]
            if not which:
                continue
            some = [seqs[b] for b in which]
            limits = [replace(budgets[b], depth=min(budgets[b].depth, config.levels)) for b in which]
            deepest = max(limit.depth for limit in limits)
            captures = self._runner.captures
            self._read(some)
            if drawn:
                steps = BlockSteps(self.head, self._runner.begin(some)[:, :deepest], some, self.least)
                self._pass.stop(1 if self._runner.captures == captures else 0)
                self._growth.start()
                grown, came_from, laws = sample_trees(steps, some, limits, self.head.vocabulary)
            else:
                candidates = self._runner.candidates(some, deepest)
                self._pass.stop(1 if self._runner.captures == captures else 0)
                self._growth.start()
                grown = self._grow(candidates, some, limits)
                came_from = [[-1] * len(tree[0]) for tree in grown]
            self._growth.stop(deepest)
            for b, tree, sources in zip(which, grown, came_from, strict=True):
                trees[b], rows[b] = tree, sources
        return lay_out(trees, rows, laws)

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        observe_rows(self._sequences, self.head.config.layers, seqs, trees, scores, verdict)

    def forget(self, seq: Seq) -> None:
        self._sequences.pop(seq.id, None)
        self._expected.pop(seq.id, None)
        self._runner.forget(seq.id)

    def _draws(self, seq: Seq) -> bool:
        return self.sampled and is_drawn(seq)

    def _read(self, seqs: Sequence[Seq]) -> None:
        """Read the new rows of these sequences, and start the clock: reading a prompt is not booked as a pass."""
        sequences = [self._sequences[seq.id] for seq in seqs]
        unread, captures = sum(len(observed.tokens) for observed in sequences), self._runner.captures
        self._pass.start()
        self._runner.read(seqs, sequences)
        if unread > PROMPT * len(sequences):
            if self._runner.captures == captures:  # else it says nothing of what reading takes
                self._reading = self._pass.elapsed() / unread
            self._pass.start()

    def _grow(self, candidates: BlockCandidates, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> list[Tree]:
        trees, expected = grow_ranked(candidates, seqs, budgets, self._calibration)
        self._expected |= {seq.id: tokens for seq, tokens in zip(seqs, expected, strict=True)}
        return trees


class DSparkDrafter(DFlashDrafter):
    """The same with a Markov head and a confidence head, and a root row that predicts."""

    kind: BlockKind = "dspark"


def load_block(folder: Path, target: Target, kind: BlockKind) -> BlockHead:
    config, weights = read_block(folder, kind=kind)
    shared = target.shared()
    return BlockHead(config, weights, shared, dtype=head_dtype(target, shared), device=target.device)
