"""BlockDrafter: drafts a whole block in one pass (DFlash, DFlash 2, DSpark, P-EAGLE, JetSpec).

Which parts a head has is in its config (forerun.drafters.heads.block_head). Where it guesses positions one by one, a
tree is grown from these laws, the likeliest paths first; a Markov head or a path selector adds what the token before
says of the next; a confidence head decides how many positions are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.clock import WALL, Clock
from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Needs, Offer, Seq
from forerun.drafters.base import NEGLIGIBLE, Parts
from forerun.drafters.device.growth import DraftNoise, Replays, Work, settings_of
from forerun.drafters.heads.base import (
    MOST_CAPTURED,
    NOT_CAPTURED,
    UNMEASURED,
    Calibration,
    Meter,
    ObservedRows,
    head_dtype,
    rehearse,
    wants_sampling,
)
from forerun.drafters.heads.block_config import BlockKind
from forerun.drafters.heads.block_head import BlockHead, masks_of, read_block
from forerun.drafters.heads.drafter import RowsDrafter
from forerun.drafters.heads.eagle_head import attend_to, with_layers
from forerun.drafters.heads.growth import Drawn, Frontier, Ranked, Tree, sample_trees
from forerun.drafters.model.draft_law import DraftLaw, Noised, has_noise, likeliest
from forerun.models.base import Target


class BlockCandidates:
    """The draft of one batch, as the growth of trees asks for it (tree_growth.Ranks)."""

    def __init__(self, scored: Tensor, tokens: Tensor) -> None:
        """As `candidates_of` makes them; this waits for the device."""
        self.size = tokens.shape[-1]
        self._scored, self._level = scored.cpu(), 0
        self._tokens: list[list[list[int]]] = tokens.tolist()
        # values and places [2][B][L][P][count]: numbers, as indexing tensors is slow
        self._ranked: list[Any] = []

    def roots(self, count: int) -> list[Ranked]:
        self._ranked = [part.tolist() for part in self._scored.topk(count)]
        return [self._children(b, [0]) for b in range(len(self._tokens))]

    def below(self, frontiers: Sequence[Frontier], count: int) -> list[Ranked]:
        self._level += 1
        found = []
        for b, frontier in enumerate(frontiers):
            before = self._tokens[b][self._level - 1]
            found.append(self._children(b, [before.index(token) for _, token in frontier]))
        return found

    def _children(self, b: int, parents: list[int]) -> Ranked:
        """Of each parent, by its place among the candidates of the level before."""
        values, places = (part[b][self._level] for part in self._ranked)
        here, some = self._tokens[b][self._level], parents if len(values) > 1 else [0] * len(parents)
        tokens = [here[place] for i in some for place in places[i]]
        return [value for i in some for value in values[i]], tokens


def candidates_of(
    head: BlockHead,
    rows: Tensor,
    roots: Tensor,
    noised: Noised | None = None,
    factors: Tensor | None = None,
    count: int = 0,
) -> tuple[Tensor, Tensor]:
    """Of predicting rows [B, L, D] behind roots [B]: tokens [B, L, K], and log-confidences of each behind each of the
    level before [B, L, K, K], or [B, L, 1, K] where what comes before does not matter.

    `noised` brings logits under temperatures and noise, and `factors` [B, 1, 1] are what it multiplies them by; None =
    as the head says. `count` of a position at most; 0 = as many as the head's.
    """
    count = count or head.config.candidates
    logits = torch.unflatten(head.logits(rows.flatten(0, 1)), 0, rows.shape[:2])  # [B, L, Vd]
    if noised is not None:
        logits = torch.stack([noised(logits[:, level], level) for level in range(rows.shape[1])], 1)
    values, places = likeliest(logits, min(count, logits.shape[-1]))  # [B, L, K]
    tokens = head.vocabulary.ids[places]
    if not head.has_markov:
        return values[:, :, None], tokens
    return corrected(head, rows, roots, values, places, tokens, factors), tokens


def corrected(
    head: BlockHead, rows: Tensor, roots: Tensor, values: Tensor, places: Tensor, tokens: Tensor, factors: Tensor | None
) -> Tensor:
    """Log-confidences [B, L, K, K] of candidates behind each candidate of the level before; the root's all alike.

    `values` [B, L, K] are their log-probabilities by position alone, `places` and `tokens` which they are.
    """
    count = tokens.shape[-1]
    before = torch.cat((roots[:, None, None].expand(-1, 1, count), tokens[:, :-1]), 1)  # [B, L, K]
    previous = torch.unflatten(head.markov(before.flatten()), 0, before.shape)  # [B, L, K, rank]
    known = head.gated(previous, rows[:, :, None])
    bias = (known @ head.markov_columns(places).transpose(-1, -2)).float()  # [B, L, K, K]
    if factors is not None:
        bias = bias * factors[..., None]
    moved = values[:, :, None] + bias
    others = (1.0 - values.exp().sum(-1)).clamp(min=0.0)[:, :, None, None]  # what is no candidate
    scored = moved - (others + moved.exp().sum(-1, keepdim=True)).log()
    sure = head.confidence(rows[:, :, None], previous)  # [B, L, K]
    if sure is None:
        return scored
    # the confidence is that of the likeliest; the others keep their share of it
    log_sure = sure.clamp(1e-6, 1.0).log()[..., None]
    return scored - scored.amax(-1, keepdim=True) + log_sure


CHUNK = 512  # rows per pass while prompts are read


class ContextCache:
    """Keys and values of features [2, L, rows, slots, Hkv, Dh]: a row for each sequence, `lengths` slots are valid."""

    def __init__(self, head: BlockHead) -> None:
        config = head.config
        self._tail = config.kv_heads, config.head_dim
        with torch.inference_mode(False):  # whatever mode a text is written in: graphs write to it
            self.data = torch.zeros(2, config.depth, 0, 0, *self._tail, dtype=head.dtype, device=head.device)
        self.rows: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        self.grown = 0  # how often the data moved

    def admit(self, seq_id: int, slots: int) -> None:
        """A row for a sequence, with room for `slots` slots."""
        if seq_id not in self.rows:
            free = set(range(len(self.rows) + 1)) - set(self.rows.values())
            self.rows[seq_id], self.lengths[seq_id] = min(free), 0
        self.reserve(self.rows[seq_id] + 1, slots)

    def reserve(self, rows: int, slots: int) -> None:
        """Room for `rows` rows of `slots` slots; what there is grows twofold at least, so that it moves seldom."""
        _, depth, have, wide, *_ = self.data.shape
        if rows > have or slots > wide:
            more = max(rows, 2 * have) if rows > have else have
            wider = max(slots, 2 * wide) if slots > wide else wide
            with torch.inference_mode(False):
                data = self.data.new_zeros(2, depth, more, wider, *self._tail)
                data[:, :, :have, :wide] = self.data
            self.data, self.grown = data, self.grown + 1

    def release(self, seq_id: int) -> None:
        self.rows.pop(seq_id, None)
        self.lengths.pop(seq_id, None)

    def view(self, ids: Sequence[int], slots: int) -> Tensor:
        """[2, L, B, slots, Hkv, Dh]: the sequence's own slots where it is alone, else a copy."""
        rows = [self.rows[i] for i in ids]
        if len(rows) == 1:
            return self.data[:, :, rows[0] : rows[0] + 1, :slots]
        return self.data[:, :, rows, :slots]


class BlockRunner:
    """Runs blocks behind the keys and values of the target's features, and finds each position's candidates.

    A sequence has a row of slots for every draft layer. What is committed is written once; a block is written
    behind it and is overwritten by what comes next, so a draft never depends on earlier drafts. P-EAGLE's committed
    tokens pass through the layers; the last one, the root, is part of the block. The likeliest tokens of all positions
    come from one pass and are read by the host once, which grows the tree. A Markov head or a selector corrects these
    candidates alone: what it would lift from below them is left out, and what all other tokens weigh together stays as
    it was.

    On a GPU a draft is one captured graph (`GraphRunner`), for one number of sequences and one number of slots, a
    power of two, with shared noise or without; lengths, roots and rows of the cache are its inputs, so it holds as
    texts grow. It is captured anew where the cache had to grow. Drafts under a temperature without noise run
    operation by operation.
    """

    def __init__(self, head: BlockHead) -> None:
        self.head, self.cache = head, ContextCache(head)
        self._roots: dict[int, tuple[Tensor, list[int]]] = {}  # P-EAGLE: features [1, F] and token of the root's row

    @property
    def captures(self) -> int:
        return 0

    @torch.no_grad()
    def read(self, seqs: Sequence[Seq], sequences: Sequence[ObservedRows]) -> None:
        """Keys and values of the rows that are new since each sequence's last draft."""
        if self.head.config.reads_rows:
            self._read_rows(seqs, sequences)
            return
        rows, slots, features = list[int](), list[int](), list[Tensor]()
        for seq, observed in zip(seqs, sequences, strict=True):
            self.cache.admit(seq.id, observed.seen + self.head.config.rows)
            first = observed.seen - len(observed.tokens)  # some before these may never be read
            rows += [self.cache.rows[seq.id]] * (observed.seen - first)
            slots += range(first, observed.seen)
            features += observed.features
            self.cache.lengths[seq.id] = observed.seen
            observed.features, observed.tokens = [], []
        if not rows:
            return
        self._write(torch.cat(features), torch.tensor([rows, slots], device=self.head.device))

    def _write(self, features: Tensor, at: Tensor) -> None:
        """Keys and values of features [N, F] into rows and slots [2, N] of the cache."""
        for low in range(0, len(features), CHUNK):
            rows, slots = at[:, low : low + CHUNK]
            self.cache.data[:, :, rows, slots] = self.head.context(features[low : low + CHUNK], slots)

    def _read_rows(self, seqs: Sequence[Seq], sequences: Sequence[ObservedRows]) -> None:
        """The same for tokens that pass through the layers, all but each sequence's last."""
        fresh: list[tuple[int, Tensor, list[int]]] = []
        for seq, observed in zip(seqs, sequences, strict=True):
            self.cache.admit(seq.id, observed.seen + self.head.config.rows)
            kept, token = self._roots.get(seq.id, (None, []))
            features = torch.cat([*([] if kept is None else [kept]), *observed.features])
            tokens = [*token, *observed.tokens]
            self._roots[seq.id] = features[-1:], tokens[-1:]
            fresh.append((seq.id, features[:-1], tokens[:-1]))
            observed.features, observed.tokens = [], []
        for low in range(0, max(len(tokens) for _, _, tokens in fresh), CHUNK):
            some = [(i, rows[low : low + CHUNK], tokens[low : low + CHUNK]) for i, rows, tokens in fresh]
            self._pass_rows([one for one in some if one[2]])

    def _pass_rows(self, fresh: Sequence[tuple[int, Tensor, list[int]]]) -> None:
        """Rows of features [n, F] and the tokens behind them, of each sequence, through the layers."""
        head, cache, device = self.head, self.cache, self.head.device
        wide = max(len(tokens) for _, _, tokens in fresh)
        starts = [cache.lengths[i] for i, _, _ in fresh]
        at: list[tuple[int, int, int]] = []
        for b, (i, _, tokens) in enumerate(fresh):
            at += [(cache.rows[i], starts[b] + n, b * wide + n) for n in range(len(tokens))]
        held, slots, which = torch.tensor(at, device=device).t()
        features = torch.stack([F.pad(rows, (0, 0, 0, wide - len(rows))) for _, rows, _ in fresh])
        padded = torch.tensor([some + [0] * (wide - len(some)) for _, _, some in fresh], device=device)
        places = torch.tensor(starts, device=device)[:, None] + torch.arange(wide, device=device)
        keys = torch.arange(max(starts) + wide, device=device)[None].expand(len(fresh), -1)[:, : cache.data.shape[3]]
        masks = masks_of(head.config, places, keys, torch.ones_like(keys, dtype=torch.bool))
        rows = [cache.rows[i] for i, _, _ in fresh]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.data[0, layer, held, slots], cache.data[1, layer, held, slots] = k[which], v[which]
            kv = cache.data[:, layer, rows, : keys.shape[1]]
            return attend_to(torch.unflatten(q, 0, padded.shape), kv.transpose(2, 3), masks[layer])

        head.read_rows(padded, features, places, attend)
        for i, _, some in fresh:
            cache.lengths[i] += len(some)

    def root_features(self, seqs: Sequence[Seq]) -> Tensor | None:
        """[B, F] that P-EAGLE's root rows carry."""
        return torch.cat([self._roots[seq.id][0] for seq in seqs]) if self.head.config.reads_rows else None

    @torch.no_grad()
    def begin(self, seqs: Sequence[Seq]) -> Tensor:
        """One pass over a block for each of these sequences: predicting rows [B, levels, D]."""
        head, ids = self.head, [seq.id for seq in seqs]
        lengths = [self.cache.lengths[i] for i in ids]
        base, size = max(lengths), head.config.rows
        kv = self.cache.view(ids, base + size)
        starts = torch.tensor(lengths, device=head.device)
        masks: Sequence[Tensor | None] = [None] * head.config.depth
        nearest = min(map(head.config.reach, range(head.config.depth)))
        if len(ids) > 1 or base + size > nearest or any(head.config.span(i)[1] for i in range(head.config.depth)):
            # slots between a sequence's length and the longest's hold nothing of its own
            slots, places = torch.arange(base, device=head.device), torch.arange(size, device=head.device)
            places = starts[:, None] + places  # [B, R]
            keys = torch.cat((slots.expand(len(ids), -1), places), 1)  # [B, S]
            valid = torch.cat((slots < starts[:, None], torch.ones_like(places, dtype=torch.bool)), 1)
            masks = masks_of(head.config, places, keys, valid)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            shape = (len(ids), size)
            kv[0, layer, :, base:] = torch.unflatten(k, 0, shape)
            kv[1, layer, :, base:] = torch.unflatten(v, 0, shape)
            return attend_to(torch.unflatten(q, 0, shape), kv[:, layer].transpose(2, 3), masks[layer])

        roots = torch.tensor([seq.tokens[-1] for seq in seqs], device=head.device)
        return head.run(roots, starts, attend, self.root_features(seqs))

    @torch.no_grad()
    def candidates(self, seqs: Sequence[Seq], levels: int) -> BlockCandidates:
        """One pass over a block for each of these sequences, as trees are grown from it; `levels` levels at most."""
        rows = self.begin(seqs)[:, :levels]
        roots = torch.tensor([seq.tokens[-1] for seq in seqs], device=self.head.device)
        law = DraftLaw(seqs, self.head.vocabulary, self.head.device)

        def noised(logits: Tensor, level: int) -> Tensor:
            return law.applied(logits[:, None], level)[:, 0]

        found = candidates_of(self.head, rows, roots, noised if law.changes else None, law.factors)
        return BlockCandidates(*found)

    def forget(self, seq_id: int) -> None:
        self._roots.pop(seq_id, None)
        self.cache.release(seq_id)


class BlockSteps:
    """A draft to be drawn: whole laws of all positions from one pass, corrected by the token before.

    A path selector chooses among the likeliest of each position; others are impossible. Where a confidence head finds
    that too little is reached nothing is drawn: the laws are impossible there.
    """

    def __init__(self, head: BlockHead, rows: Tensor, seqs: Sequence[Seq], least: float = 0.0) -> None:
        """Predicting rows [B, levels, D] of one pass."""
        self.head, self.levels, self._least = head, 1, least
        self._rows, self._roots = rows, torch.tensor([seq.tokens[-1] for seq in seqs], device=rows.device)
        self._base = torch.unflatten(head.logits(rows.flatten(0, 1)), 0, rows.shape[:2])  # [B, levels, Vd]
        count = head.config.candidates
        if head.config.markov == "selector" and count < self._base.shape[-1]:
            least_likely = self._base.topk(count).values[..., -1:]
            self._base = self._base.masked_fill(self._base < least_likely, -torch.inf)
        self._reach = torch.ones(len(rows), 1, device=rows.device)  # [B, W] of the last frontier
        self.sure: Tensor | None = None  # [B, W] confidence of what follows it

    @torch.no_grad()
    def first(self) -> Tensor:
        return self._after(self._roots[:, None])[:, 0]

    @torch.no_grad()
    def after(self, parents: Tensor, tokens: Tensor) -> Tensor:
        self.levels += 1
        self._reach = self._reach.gather(1, parents)
        return self._after(tokens)

    def _after(self, tokens: Tensor) -> Tensor:
        """[B, W, Vd] of the next position behind these tokens [B, W]."""
        level, shape = self.levels - 1, tokens.shape
        logits = self._base[:, level, None].expand(-1, shape[1], -1)
        if not self.head.has_markov:
            return logits.contiguous()
        previous = self.head.markov(tokens.flatten())
        rows = self._rows[:, level, None].expand(-1, shape[1], -1).flatten(0, 1)
        logits = logits + torch.unflatten(self.head.bias(self.head.gated(previous, rows)), 0, shape)
        sure = self.head.confidence(rows, previous)
        if sure is not None:
            self.sure = sure.view(shape)
            self._reach = self._reach * self.sure
            if level:
                logits = logits.masked_fill((self._reach < self._least)[..., None], -torch.inf)
        return logits


FEWEST = 256  # slots of the smallest graph
RESERVED = 1024  # slots of each sequence from the start: where the cache grows, graphs are captured anew
READ_AT_ONCE = (1, 2, 4, 8, 16, 32, 64, 128)  # rows that one graph reads: a round's; more are a prompt's


class GraphRunner(BlockRunner):
    """The same drafts as BlockRunner's."""

    def __init__(self, head: BlockHead) -> None:
        super().__init__(head)
        self.cache.reserve(MOST_CAPTURED, RESERVED)
        self._calls, self._grown = Replays(head.device, capture=True), self.cache.grown
        self._noise = DraftNoise(head.vocabulary.ids)

    @torch.no_grad()
    def candidates(self, seqs: Sequence[Seq], levels: int) -> BlockCandidates:
        if len(seqs) > MOST_CAPTURED or not all(seq.params.is_greedy or has_noise(seq) for seq in seqs):
            return super().candidates(seqs, levels)
        inputs, slots, features = [self.inputs(seqs)], self.slots_for(seqs), self.root_features(seqs)
        self._noise.send([settings_of(seq) for seq in seqs])
        key = len(seqs), slots, self._noise.is_on
        inputs += [] if features is None else [features]
        scored, tokens = self._call(key, lambda *given: self.static(slots, *given), *inputs)
        return BlockCandidates(scored[:, :levels], tokens[:, :levels])

    def _write(self, features: Tensor, at: Tensor) -> None:
        count = len(features)
        size = next((some for some in READ_AT_ONCE if some >= count), None)
        if size is None:
            super()._write(features, at)
            return
        if size > count:  # the last once more: the same values at the same place
            rows = torch.arange(size, device=at.device).clamp_(max=count - 1)
            features, at = features[rows], at[:, rows]
        self._call(("read", size), self._written, features, at)

    def _written(self, features: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        super()._write(features, at)
        return ()

    def _call(self, key: Hashable, work: Work, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self._grown != self.cache.grown:
            self._grown = self.cache.grown
            self._calls.clear()  # they read a cache that is no more
        return self._calls.call(key, work, *inputs)

    @property
    def captures(self) -> int:
        return self._calls.captured

    @property
    def usual_contexts(self) -> list[int]:
        """The longest of each number of slots that is there from the start."""
        slots = [FEWEST << i for i in range((RESERVED // FEWEST).bit_length())]
        return [some - self.head.config.rows for some in slots]

    def inputs(self, seqs: Sequence[Seq]) -> Tensor:
        cache = self.cache
        columns = [(seq.tokens[-1], cache.lengths[seq.id], cache.rows[seq.id]) for seq in seqs]
        return torch.tensor(columns, device=self.head.device).t().contiguous()

    def slots_for(self, seqs: Sequence[Seq]) -> int:
        """Slots that hold every context and a block behind it; the cache grows to as many."""
        need = max(self.cache.lengths[seq.id] for seq in seqs) + self.head.config.rows
        slots = FEWEST
        while slots < need:
            slots *= 2
        self.cache.admit(seqs[0].id, slots)
        return slots

    def static(self, slots: int, inputs: Tensor, features: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores and tokens of the candidates, whose shapes depend on the number of sequences and slots alone."""
        head, (roots, lengths, held) = self.head, inputs
        count, size = len(roots), head.config.rows
        kv = self.cache.data[:, :, :, :slots].index_select(2, held)  # [2, L, B, S, Hkv, Dh]
        places = lengths[:, None] + torch.arange(size, device=head.device)  # [B, R]
        which = torch.arange(count, device=head.device)[:, None]
        keys = torch.arange(slots, device=head.device).expand(count, -1)
        masks = masks_of(head.config, places, keys, keys < lengths[:, None] + size)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv[0, layer, which, places] = torch.unflatten(k, 0, (count, size))
            kv[1, layer, which, places] = torch.unflatten(v, 0, (count, size))
            return attend_to(torch.unflatten(q, 0, (count, size)), kv[:, layer].transpose(2, 3), masks[layer])

        noise, rows = self._noise, head.run(roots, lengths, attend, features)
        behind = lengths if head.config.reads_rows else lengths - 1  # P-EAGLE's root is not among the slots yet
        noised = noise.of(behind.int(), rows.shape[1]) if noise.is_on else None
        return candidates_of(head, rows, roots, noised, noise.factors(count) if noise.is_on else None)


log = logging.getLogger(__name__)

GROWING = 0.05  # of a pass: what a level of the tree takes, until one was grown


class BlockDrafter(RowsDrafter):
    """Its tokens are chosen, or drawn from the laws of the positions where that is wanted."""

    kind: BlockKind
    row_share = 0.05
    least = NEGLIGIBLE  # a drawn draft ends where a confidence head expects less to be reached

    def __init__(self, head: BlockHead, *, sampled: bool = False, clock: Clock = WALL) -> None:
        self.head, self.sampled, self.levels, config = head, sampled, head.config.levels, head.config
        depends_on = None if config.reads_rows else max(map(config.reach, range(config.depth)))
        super().__init__(config.layers, depends_on, Meter(clock))
        self.needs = Needs(tuple(sorted(set(config.layers))))
        self._runner: BlockRunner = GraphRunner(head) if head.device.type == "cuda" else BlockRunner(head)
        self._growth = Meter(clock)  # of trees, by level
        self._calibration = Calibration() if head.config.confidence else head.config.calibration

    @classmethod
    def build(cls, parts: Parts) -> BlockDrafter:
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
        once = self._first.seconds or UNMEASURED
        level, chosen = self._growth.seconds or GROWING * once, not self._draws(seq)
        start, expected = self._start_of(seq, once), self._expected.get(seq.id)
        return Offer((once + level, level), start, chosen=chosen, stops=chosen, expected=expected, key=id(self))

    def forget(self, seq: Seq) -> None:
        super().forget(seq)
        self._runner.forget(seq.id)

    def _choose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> list[Tree]:
        captures, deepest = self._read(seqs), max(budget.depth for budget in budgets)
        candidates = self._runner.candidates(seqs, deepest)
        self._stop_pass(captures)
        trees = self._grow_ranked(candidates, seqs, budgets, self._calibration)
        self._growth.stop(deepest)
        return trees

    def _draw(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> Drawn:
        captures, deepest = self._read(seqs), max(budget.depth for budget in budgets)
        steps = BlockSteps(self.head, self._runner.begin(seqs)[:, :deepest], seqs, self.least)
        self._stop_pass(captures)
        drawn = sample_trees(steps, seqs, budgets, self.head.vocabulary)
        self._growth.stop(deepest)
        return drawn

    def _read(self, seqs: Sequence[Seq]) -> int:
        """Read the new rows of these sequences, behind the clock's start; how much was captured before that."""
        sequences, captures = [self._sequences[seq.id] for seq in seqs], self._runner.captures
        unread = sum(len(observed.tokens) for observed in sequences)
        self._first.start()
        self._runner.read(seqs, sequences)
        self._note_reading(unread, len(sequences), self._runner.captures == captures)
        return captures

    def _stop_pass(self, captures: int) -> None:
        """The pass has ended, and a tree is grown; one that captured a graph says nothing of what passes take."""
        self._first.stop(1 if self._runner.captures == captures else 0)
        self._growth.start()


class DFlashDrafter(BlockDrafter):
    kind = "dflash"


class DSparkDrafter(BlockDrafter):
    kind = "dspark"


class PEagleDrafter(BlockDrafter):
    kind = "peagle"


def load_block(folder: Path, target: Target, kind: BlockKind) -> BlockHead:
    """A head from its folder, for this target; layers that the file does not name are EAGLE-3's usual ones."""
    config, weights = read_block(folder, kind=kind)
    shared = target.shared()
    config = with_layers(config, folder, shared)
    return BlockHead(config, weights, shared, dtype=head_dtype(target, shared), device=target.device)
