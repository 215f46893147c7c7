"""MedusaDrafter and HydraDrafter: heads on the last hidden row that each draft one position.

Medusa's head k is a few residual blocks, h + SiLU(W h + b), and an LM head: its own, or the target's, which all heads
then share (one pass over it serves them all). Heads do not see each other's guesses, so the tree has a fixed shape: the
nodes whose ranks were most often right, by the product of the rates measured on held-back text.

On a GPU drafts are captured and replayed (`CapturedHeads`, Hydra's base too): a graph holds for one number of sequences
and one form of drafts, with shared noise or without. The usual forms are captured and timed when heads are loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.clock import WALL, Clock
from forerun.core.errors import InvalidInput
from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Seq
from forerun.drafters.base import Parts
from forerun.drafters.heads.base import MOST_CAPTURED, NOT_CAPTURED, Calibration, head_dtype, rehearse, wants_sampling
from forerun.drafters.heads.drafter import LastRowDrafter
from forerun.drafters.heads.formats import (
    DraftVocabulary,
    Matrix,
    check_weight,
    config_of,
    rates_in,
    read_config,
    read_tensors,
    readers,
    settings_in,
    size_in,
    write_config,
    write_shards,
)
from forerun.drafters.heads.growth import Drawn, LogitRanks, Tree, cut_grown, filled_tree, grow_ranked, sample_trees
from forerun.drafters.model.draft_law import DraftLaw, Noised, has_noise, likeliest
from forerun.models.base import SharedWeights, Target

if TYPE_CHECKING:
    from forerun.drafters.device.growth import DraftNoise, Replays


log = logging.getLogger(__name__)

# rows [B, D], roots [B] and noise -> what the host reads
HeadWork = Callable[[Tensor, Tensor, Noised], tuple[Tensor, ...]]


class CapturedHeads(LastRowDrafter):
    """Replays drafts of chosen tokens, once `capture` was called."""

    def __init__(self, heads: HeadSet, clock: Clock = WALL) -> None:
        super().__init__(clock)
        self.heads = heads
        self._calls: Replays | None = None
        self._noise: DraftNoise | None = None
        self.levels = heads.config.count

    def capture(self, budgets: Sequence[Budget]) -> None:
        """From now on what a draft computes is captured; drafts of one sequence with these budgets at once."""
        from forerun.drafters.device.growth import DraftNoise, Replays

        heads = self.heads
        self._calls = Replays(heads.device, capture=True)
        self._noise = DraftNoise(heads.vocabulary.ids)
        row = torch.zeros(1, heads.config.width, dtype=heads.dtype, device=heads.device)
        try:
            for heat in (1.0, 0.0):
                rehearse(self, self._sequences, row, 1, budgets, SamplingParams(temperature=heat))
        except Exception as error:  # no working Triton, no memory: neither stops generation
            log.warning(NOT_CAPTURED, type(error).__name__, error)
            self._calls = None

    @property
    def captures(self) -> int:
        return 0 if self._calls is None else self._calls.captured

    def _replays(self, seqs: Sequence[Seq]) -> bool:
        """Can their draft be captured? A temperature without shared noise changes confidences alone: seldom used."""
        if self._calls is None or len(seqs) > MOST_CAPTURED:
            return False
        return all(seq.params.is_greedy or has_noise(seq) for seq in seqs)

    def _replay(
        self, seqs: Sequence[Seq], hidden: Tensor, form: tuple[int, ...], levels: int, work: HeadWork
    ) -> tuple[Tensor, ...]:
        """The work of a draft of this form, from the last rows [B, D] of these sequences."""
        from forerun.drafters.device.growth import settings_of

        calls, noise = self._calls, self._noise
        assert calls is not None
        assert noise is not None
        noise.send([settings_of(seq) for seq in seqs])
        behind = [(seq.tokens[-1], len(seq.tokens) - 2) for seq in seqs]  # noise counts from the last row
        roots, positions = torch.tensor(behind, device=self.heads.device).t().contiguous()

        def run(hidden: Tensor, roots: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            return work(hidden, roots, noise.of(positions, levels))

        return calls.call((len(seqs), noise.is_on, *form), run, hidden, roots, positions.int())

    def _stop_clock(self, levels: int, captures: int) -> None:
        """So many levels were drafted; a draft that captured a graph says nothing of what drafts take."""
        self._meter.stop(levels if self.captures == captures else 0)


Family = Literal["medusa", "hydra"]
RANKS = 10  # how many of a head's guesses a tree may use
# Until rates are measured: roughly what Medusa's authors report, falling with depth.
_RATES = tuple(
    tuple(0.5 * 0.8**k * r for r in (1.0, 0.25, 0.12, 0.07, 0.05, 0.04, 0.03, 0.02, 0.02, 0.01)) for k in range(8)
)


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """A set of heads on the last hidden row."""

    family: Family
    count: int
    blocks: int  # per head
    width: int
    vocab_size: int
    target: str = ""
    rates: tuple[tuple[float, ...], ...] = ()  # [heads][ranks] how often each rank was right, given those before

    @classmethod
    def from_json(cls, values: Mapping[str, Any], family: Family, width: int, vocab_size: int) -> HeadsConfig:
        with config_of(f"{family}'s"):
            return cls(
                family=family,
                count=size_in(values, f"{family}_num_heads"),
                blocks=size_in(values, f"{family}_num_layers", 1),
                width=size_in(values, "hidden_size", width),
                vocab_size=size_in(values, "vocab_size", vocab_size),
                target=str(values.get("base_model_name_or_path") or ""),
                rates=rates_in(settings_in(values, "forerun")),
            )

    def to_json(self) -> dict[str, Any]:
        return {
            f"{self.family}_num_heads": self.count,
            f"{self.family}_num_layers": self.blocks,
            "base_model_name_or_path": self.target,
            "hidden_size": self.width,
            "vocab_size": self.vocab_size,
            "forerun": {"rates": self.rates},
        }


def read_heads(
    folder: Path, family: Family, width: int = 0, vocab_size: int = 0, *, pickle: bool = False
) -> tuple[HeadsConfig, dict[str, Tensor]]:
    """Config and weights `{head}.{block}.linear.*`, and `{head}.{blocks}.weight` where heads have LM heads."""
    config = HeadsConfig.from_json(read_config(folder), family, width, vocab_size)
    weights = read_tensors(folder, pickle=pickle)
    for i in range(config.count):
        for j in range(config.blocks):
            into = config.width * (2 + i) if family == "hydra" and j == 0 else config.width
            check_weight(folder, weights, f"{i}.{j}.linear.weight", (config.width, into))
            if f"{i}.{j}.linear.bias" in weights:
                check_weight(folder, weights, f"{i}.{j}.linear.bias", (config.width,))
    own = [f"{i}.{config.blocks}.weight" for i in range(config.count)]
    rows = len(weights["d2t"]) if "d2t" in weights and weights["d2t"].dim() == 1 else config.vocab_size
    lm_heads = own if own[0] in weights else ["lm_head.weight"] if "lm_head.weight" in weights else []
    for name in lm_heads:
        check_weight(folder, weights, name, (rows, config.width))
    if "embed_tokens.weight" in weights:
        check_weight(folder, weights, "embed_tokens.weight", (config.vocab_size, config.width))
    return config, weights


def write_heads(folder: Path, config: HeadsConfig, weights: Mapping[str, Tensor]) -> None:
    """In the form of `medusa_lm_head.safetensors`."""
    write_config(folder, config.to_json())
    write_shards(folder, weights, f"{config.family}_lm_head")


class HeadSet:
    def __init__(
        self,
        config: HeadsConfig,
        weights: Mapping[str, Tensor],
        shared: SharedWeights | None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.device, self.dtype = config, torch.device(device), dtype

        have, get = readers(weights, dtype, self.device)
        self.weights = [
            [Matrix(have(f"{i}.{j}.linear.weight")) for j in range(config.blocks)] for i in range(config.count)
        ]
        self.biases = [[get(f"{i}.{j}.linear.bias") for j in range(config.blocks)] for i in range(config.count)]
        own = [get(f"{i}.{config.blocks}.weight") for i in range(config.count)]
        self.own_heads = [Matrix(head) for head in own if head is not None]
        head = get("lm_head.weight")
        rows = self.own_heads[0].outputs if self.own_heads else len(head) if head is not None else None
        if rows is None:
            rows = len(weights["d2t"]) if "d2t" in weights else config.vocab_size
        self.vocabulary = DraftVocabulary.from_file(weights, rows, config.vocab_size).to(self.device)
        self._embedding, self._shared = get("embed_tokens.weight"), shared
        shares = head is None and not self.own_heads
        if shares or (config.family == "hydra" and self._embedding is None):
            if shared is None:
                raise InvalidInput(
                    f"these {config.family} heads share the target's weights and this target shares none; "
                    "use heads that store their own"
                )
            shared.must_fit(config.width, config.vocab_size, config.target)
            if shares:
                head = shared.head_rows(self.vocabulary.ids).to(self.device, dtype).contiguous()
        self.shared_head = None if head is None else Matrix(head)

    def embed(self, tokens: Tensor) -> Tensor:
        if self._embedding is not None:
            return F.embedding(tokens, self._embedding)
        assert self._shared is not None
        return self._shared.embed(tokens.flatten()).to(self.dtype).view(*tokens.shape, -1)

    def block(self, head: int, index: int, rows: Tensor, onto: Tensor) -> Tensor:
        """onto + SiLU(W rows + b)."""
        into, bias = self.weights[head][index].times(rows), self.biases[head][index]
        return onto + F.silu(into if bias is None else into.add_(bias))

    def logits(self, head: int, rows: Tensor) -> Tensor:
        weight = self.own_heads[head] if self.own_heads else self.shared_head
        assert weight is not None
        return weight.times(rows).float()


class MedusaDrafter(CapturedHeads):
    def __init__(self, heads: HeadSet, clock: Clock = WALL) -> None:
        super().__init__(heads, clock)
        self.one_pass = heads.shared_head is not None  # else every level reads an LM head of its own

    @classmethod
    def build(cls, parts: Parts) -> MedusaDrafter:
        drafter = cls(load_heads(parts.head_folder("medusa"), parts.target, "medusa"), parts.target.can.clock)
        if parts.target.can.captures:
            drafter.capture(drafter.usual_budgets())
        return drafter

    def usual_budgets(self) -> list[Budget]:
        return [Budget(depth, depth) for depth in range(1, self.heads.config.count + 1)]

    @torch.no_grad()
    def _choose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> list[Tree]:
        self._meter.start()
        captures, levels, config = self.captures, max(budget.depth for budget in budgets), self.heads.config
        rates = (config.rates or _RATES)[: config.count]
        each = zip(seqs, self._guesses(seqs, levels), budgets, strict=True)
        trees = [filled_tree(seq.tokens[-1], guesses, rates, budget) for seq, guesses, budget in each]
        self._stop_clock(1 if self.one_pass else levels, captures)
        return trees

    def _guesses(self, seqs: Sequence[Seq], levels: int) -> list[list[list[int]]]:
        """[B][levels][ranks] the likeliest tokens of each head."""
        hidden = self._last_rows(seqs, self.heads.dtype)  # [B, D]
        if self._replays(seqs):
            work: HeadWork = lambda rows, _, noised: (self._likeliest(rows, levels, noised),)  # noqa: E731
            (best,) = self._replay(seqs, hidden, (levels,), levels, work)
        else:
            law = DraftLaw(seqs, self.heads.vocabulary, hidden.device)
            best = self._likeliest(hidden, levels, lambda logits, i: law.applied(logits[:, None], i)[:, 0])
        guesses: list[list[list[int]]] = best.tolist()
        return guesses

    def _likeliest(self, hidden: Tensor, levels: int, noised: Noised) -> Tensor:
        """[B, levels, ranks] tokens of each head behind rows [B, D]."""
        heads, rows = self.heads, list[Tensor]()
        for i in range(levels):
            row = hidden
            for j in range(heads.config.blocks):
                row = heads.block(i, j, row, row)
            rows.append(row)
        if heads.shared_head is not None:
            logits = torch.unflatten(heads.logits(0, torch.cat(rows)), 0, (levels, len(hidden)))
        else:
            logits = torch.stack([heads.logits(i, row) for i, row in enumerate(rows)])  # [levels, B, Vd]
        count = min(RANKS, len(heads.vocabulary))
        best = [likeliest(noised(logits[i], i)[:, None], count)[1][:, 0] for i in range(levels)]
        return heads.vocabulary.ids[torch.stack(best, 1)]


def load_heads(folder: Path, target: Target, family: Family) -> HeadSet:
    shared = target.shared()
    width = 0 if shared is None else shared.width
    config, weights = read_heads(folder, family, width, target.vocab_size)
    return HeadSet(config, weights, shared, dtype=head_dtype(target, shared), device=target.device)


WIDTHS = (1, 2, 4, 8)  # of frontiers in captured drafts: the widest that a budget allows


class HydraDrafter(CapturedHeads):
    """Heads that each draft one position further, from the last hidden row and the tokens before it.

    Head k reads the hidden row, the embedding of the root and those of the k - 1 tokens drafted before, side by
    side; one wide block and a few residual ones, then an LM head that all heads share. No attention, so a draft
    costs a few small products per level, and unlike Medusa's the tokens fit each other: the tree is dynamic.

    On a GPU all levels of a draft are one captured graph, and the host reads their candidates once. Drafts that are
    drawn run operation by operation.
    """

    def __init__(self, heads: HeadSet, clock: Clock = WALL, *, sampled: bool = False) -> None:
        super().__init__(heads, clock)
        self.sampled = sampled

    @classmethod
    def build(cls, parts: Parts) -> HydraDrafter:
        heads = load_heads(parts.head_folder("hydra"), parts.target, "hydra")
        can = parts.target.can
        drafter = cls(heads, can.clock, sampled=wants_sampling(parts.speculative, can))
        if can.captures:
            drafter.capture(drafter.usual_budgets())
        return drafter

    def usual_budgets(self) -> list[Budget]:
        sizes = product(range(1, self.heads.config.count + 1), WIDTHS)
        return [Budget(depth * width, depth, width) for depth, width in sizes]

    @torch.no_grad()
    def _choose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> list[Tree]:
        """Where a graph is replayed, all levels are run."""
        self._meter.start()
        heads, captures, hidden = self.heads, self.captures, self._last_rows(seqs, self.heads.dtype)
        if not self._replays(seqs):
            steps = HydraSteps(heads, hidden, _roots(seqs, heads))
            ranks = LogitRanks(steps, seqs, heads.vocabulary)
            trees, _ = grow_ranked(ranks, seqs, budgets, Calibration())
            self._stop_clock(steps.levels, captures)
            return trees
        levels = max(budget.depth for budget in budgets)
        most = min(len(heads.vocabulary), max(min(budget.width, budget.nodes) for budget in budgets))
        width = max(some for some in WIDTHS if some <= most)
        grow = partial(grow_all, heads, levels, width)
        scores, ints = self._replay(seqs, hidden, (levels, width), levels, grow)
        pools = zip(seqs, budgets, scores.tolist(), *ints.tolist(), strict=True)
        trees = [cut_grown(seq.tokens[-1], *pool) for seq, *pool in pools]
        self._stop_clock(levels, captures)
        return trees

    @torch.no_grad()
    def _draw(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> Drawn:
        self._meter.start()
        steps = HydraSteps(self.heads, self._last_rows(seqs, self.heads.dtype), _roots(seqs, self.heads))
        drawn = sample_trees(steps, seqs, budgets, self.heads.vocabulary)
        self._stop_clock(steps.levels, self.captures)
        return drawn


class HydraSteps:
    """The draft of one batch: what each frontier node's head reads, side by side."""

    def __init__(self, heads: HeadSet, hidden: Tensor, roots: Tensor) -> None:
        """Rows [B, D] and the tokens behind them [B]."""
        self.heads, self.levels = heads, 1
        self._hidden = hidden[:, None]  # [B, 1, D]
        self._read = torch.cat((self._hidden, heads.embed(roots[:, None])), -1)  # [B, W, (1 + level) D]

    def first(self) -> Tensor:
        return self._logits()[:, 0]

    def after(self, parents: Tensor, tokens: Tensor) -> Tensor:
        along = self._read.gather(1, parents[:, :, None].expand(-1, -1, self._read.shape[-1]))
        self._read = torch.cat((along, self.heads.embed(tokens)), -1)
        self.levels += 1
        return self._logits()

    def _logits(self) -> Tensor:
        head, count, wide = self.levels - 1, *self._read.shape[:2]
        hidden = self._hidden.expand(-1, wide, -1).flatten(0, 1)
        row = self.heads.block(head, 0, self._read.flatten(0, 1), hidden)
        for j in range(1, self.heads.config.blocks):
            row = self.heads.block(head, j, row, row)
        return torch.unflatten(self.heads.logits(head, row), 0, (count, wide))


def grow_all(
    heads: HeadSet, levels: int, width: int, hidden: Tensor, roots: Tensor, noised: Noised
) -> tuple[Tensor, Tensor]:
    """Candidates of all levels: log-survivals [B, N], and tokens and parents [2, B, N]; nothing is read on the way."""
    from forerun.drafters.device.growth import Frontier, HeadOutput, Pool, grow_level

    count, output, steps = len(roots), HeadOutput(heads.vocabulary.ids), HydraSteps(heads, hidden, roots)
    by_kernels = heads.device.type == "cuda" and find_spec("triton") is not None
    pool, frontier = (Pool(count, width, width, levels, heads.device), Frontier.of_roots(count, heads.device))
    logits = steps.first()
    for level in range(levels):
        wide = frontier.tokens.shape[1]
        frontier = grow_level(pool, frontier, noised(logits.flatten(0, -2), level), output, fused=by_kernels)
        if level + 1 < levels:
            firsts = torch.arange(0, count * wide, wide, device=heads.device)[:, None]
            logits = steps.after(frontier.parents.view(count, -1) - firsts, frontier.tokens)
    return pool.scores, torch.stack((pool.tokens, pool.parents))


def _roots(seqs: Sequence[Seq], heads: HeadSet) -> Tensor:
    return torch.tensor([seq.tokens[-1] for seq in seqs], device=heads.device)
