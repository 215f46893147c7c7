"""Base class of recipes: outputs, each of which predicts one token further ahead, and their loss.

Output j of row t is scored, through the draft LM head, against the target's law of the token at t + shift + 1:
Medusa's head k has shift k, EAGLE's step j has shift j + 1, a draft model 0. So one loss, one simulation of tokens
per round and one loop serve them all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.drafters.heads.base import Calibration
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.train.data.corpus import Batch
from forerun.train.options import TrainOptions
from forerun.train.recipes.scaling import fold

CHUNK = 4096  # rows at a time
# losses [n], gradients [n, Vd] but for what the likeliest K add to their own columns, acceptances [n], and that [n, K]
Terms = tuple[Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class LawLoss:
    """A loss between a head's law and the target's, with its gradient, without holding all logits.

    Both laws are made from hidden rows, a chunk of rows at a time, over the draft vocabulary only, and the gradient
    with respect to the head's logits is written down at once (it is a softmax: q * sum(w) - w for a loss
    -sum w log q). So what is kept for the backward pass is as wide as the model, not as the vocabulary.

        kl         KL(p, q): the default
        lk_hybrid  l KL + (1 - l) TV with l = exp(-3 a), a = 1 - TV the acceptance: the better the head, the more
                   directly acceptance itself is trained
        top_k      added with a weight: -sum over the target's K likeliest tokens of p log q (HASS)
    """

    kind: str = "kl"
    top_k: int = 10
    top_weight: float = 0.0

    def of_rows(
        self, rows: Tensor, head: Tensor, truth: Tensor, truth_head: Tensor, weights: Tensor, chunk: int = CHUNK
    ) -> tuple[Tensor, Tensor]:
        """Of each row [N] its weighted loss and its weighted acceptance (to report, without a gradient).

        rows [N, D] by head [Vd, D] against truth [N, D'] by truth_head [Vd, D']; weights [N]. Rows may be weighted once
        more when all are known, if the head is frozen; the gradient of a head that learns is a sum over rows with the
        weights given here.
        """
        apply: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLaw.apply
        return apply(rows, head, truth, truth_head, weights, self, chunk)


def law_terms(z: Tensor, t: Tensor, kind: str, top_weight: float, best: Tensor | None) -> Terms:
    """Losses and gradients with respect to the logits z [n, Vd]; t are the target's logits, best its likeliest."""
    z, t = z.float(), t.float()
    most_z, most_t = z.logsumexp(-1, keepdim=True), t.logsumexp(-1, keepdim=True)
    log_q, log_p = z - most_z, t - most_t
    q, p = log_q.exp(), log_p.exp()
    loss = (p * (log_p - log_q)).sum(-1)
    slope = q - p
    accepted = torch.minimum(p, q).sum(-1)
    if kind == "lk_hybrid":
        share = (-3.0 * accepted).exp()
        sign = -(q < p).to(q.dtype)
        towards = q * (sign - (q * sign).sum(-1, keepdim=True))
        loss = share * loss + (1 - share) * (1 - accepted)
        slope = share[:, None] * slope + (1 - share)[:, None] * towards
    if best is None:
        return loss, slope, accepted, None
    w = (t.gather(-1, best) - most_t).exp()
    loss = loss - top_weight * (w * (z.gather(-1, best) - most_z)).sum(-1)
    slope = slope + top_weight * q * w.sum(-1, keepdim=True)
    return loss, slope, accepted, -top_weight * w


def weighted_terms(
    z: Tensor, t: Tensor, weights: Tensor, dtype: torch.dtype, kind: str, top_weight: float, best: Tensor | None
) -> Terms:
    """The same, weighted: losses and acceptances [n], and gradients as the products want them."""
    losses, slope, accepted, pull = law_terms(z, t, kind, top_weight, best)
    pulled = None if pull is None else (pull * weights[:, None]).to(dtype)
    slope = (slope * weights[:, None]).to(dtype)
    return losses * weights, slope, accepted * weights, pulled


@cache
def fused(work: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Compiled on a GPU: written out, the passes over [n, Vd] or over [B, H, T, T] cost as much as the products."""
    return torch.compile(work, dynamic=True) if device == "cuda" else work


class _ChunkedLaw(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        head: Tensor,
        truth: Tensor,
        truth_head: Tensor,
        weights: Tensor,
        loss: LawLoss,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = truth_head.dtype
        small, narrow = rows.to(dtype), head.to(dtype)
        slopes = torch.empty_like(small)
        head_slope = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        total, accepted = (torch.zeros(len(rows), device=rows.device) for _ in range(2))
        terms = fused(weighted_terms, rows.device.type)
        for low in range(0, len(rows), chunk):
            part, some = slice(low, low + chunk), weights[low : low + chunk]
            z, t = small[part] @ narrow.t(), truth[part] @ truth_head.t()
            best = t.topk(min(loss.top_k, t.shape[-1])).indices if loss.top_weight else None
            losses, slope, alphas, pull = terms(z, t, some, dtype, loss.kind, loss.top_weight, best)
            if best is not None and pull is not None:
                slope.scatter_add_(-1, best, pull)
            total[part], accepted[part] = losses, alphas
            torch.mm(slope, narrow, out=slopes[part])
            if head_slope is not None:
                head_slope += slope.t() @ small[part]
        ctx.save_for_backward(slopes, head_slope)
        ctx.dtypes = rows.dtype, head.dtype
        ctx.mark_non_differentiable(accepted)
        return total, accepted

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        slopes, head_slope = ctx.saved_tensors
        onto_rows = (slopes * grads[0][:, None]).to(ctx.dtypes[0])
        # a head that learns is given the sum over all rows, so that they all have the same factor
        onto_head = None if head_slope is None else (head_slope * grads[0][:1].sum()).to(ctx.dtypes[1])
        return onto_rows, onto_head, None, None, None, None, None


FLOOR = 0.5  # of a position's chance: a hard position must not silence all behind it


@dataclass(slots=True)
class Survival:
    """The positions of all drafts of a batch, weighed by how far their draft gets, as D-PACE does.

    A token counts only if those before it were accepted: with overlaps a_i of laws, softened to q_i = (1 + a_i) / 2,
    position j weighs the sum over m >= j of q_1 ... q_m, the expected length that hangs on it.
    """

    rows: int  # of the batch: drafts are named by the row that they start from
    _places: list[Tensor] = field(default_factory=list)  # [N] by level
    _losses: list[Tensor] = field(default_factory=list)
    _overlaps: list[Tensor] = field(default_factory=list)
    _learnt: list[Tensor] = field(default_factory=list)

    def add(self, places: Tensor, losses: Tensor, overlaps: Tensor, learnt: Tensor) -> None:
        """One level: which drafts have it [N], and of each its loss, its overlap, and 1 where it is learnt."""
        self._places.append(places)
        self._losses.append(losses)
        self._overlaps.append(overlaps.detach())
        self._learnt.append(learnt)

    def __bool__(self) -> bool:
        return bool(self._places)

    def loss(self) -> Tensor:
        chances = torch.zeros(len(self._places), self.rows, device=self._losses[0].device)
        for level, (places, overlaps) in enumerate(zip(self._places, self._overlaps, strict=True)):
            chances[level, places] = FLOOR + (1 - FLOOR) * overlaps
        weights = survival_weights(chances.t()).t()
        total, count = torch.zeros((), device=chances.device), torch.zeros((), device=chances.device)
        for mine, places, losses, learnt in zip(weights, self._places, self._losses, self._learnt, strict=True):
            total = total + (mine[places] * losses).sum()
            count = count + (mine[places] * learnt).sum()
        return total / count.clamp(min=1e-6)


def survival_weights(chances: Tensor) -> Tensor:
    """[N, levels] from the chances of every position [N, levels]; zero from where a draft ends."""
    reached = chances.cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1)


@dataclass(frozen=True, slots=True)
class Output:
    rows: Tensor  # [B, T, D], ready for the LM head; [N, D] of the rows named in `at`
    shift: int
    weight: float = 1.0
    # [B, T, D] a prediction of the target's own rows, where the recipe has one
    features: Tensor | None = None
    unit: Tensor | None = None  # [D] what a gap between features is measured in
    at: Tensor | None = None  # [N] which rows of [B T] it predicts from; None = all
    aside: Tensor | None = None  # a further loss, of what is learnt beside the law
    # weigh each row by how far its draft gets (`Survival`), instead of by `weight`
    survives: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    tokens_per_round: float  # a chain, simulated
    tree_tokens_per_round: float  # any of the likeliest `RANKS` at every level
    rates: tuple[tuple[float, ...], ...]  # [levels][ranks]
    calibration: Calibration


class Recipe(ABC):
    """A drafter in training: a module with the trained parameters. By default the LM head is the target's own."""

    feature_weight, law_weight = 0.0, 1.0
    layers: tuple[int, ...] = ()  # hidden layers of the target that it reads
    teacher: Any  # a Teacher; SpecDec's is a SourceTeacher
    _module: nn.Module

    def __init__(self, options: TrainOptions, teacher: Any, vocabulary: DraftVocabulary) -> None:
        self.options, self.teacher, self.vocabulary = options, teacher, vocabulary.to(teacher.head.device)
        self._truth_head = self.vocabulary.rows_of(teacher.head)  # [Vd, D]
        self.law_loss = LawLoss(options.loss)

    def read(self, batch: Batch) -> Reading:
        """The frozen target's features and laws for a batch."""
        kept = self.teacher.features(batch.tokens, self.layers)
        with torch.no_grad():
            return read_teacher(kept, self.teacher.head, self.vocabulary, batch)

    @abstractmethod
    def outputs(self, batch: Batch, reading: Reading, noise: torch.Generator | None) -> Iterable[Output]: ...

    @abstractmethod
    def export(self, folder: Path, measured: Measured) -> None:
        """Write a drafter that `forerun` loads."""

    def module(self) -> nn.Module:
        return self._module

    def tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """A module's weights as a head's file has them, and the draft vocabulary."""
        weights = {name: weight.to(torch.bfloat16) for name, weight in fold(module).items()}
        return weights if self.vocabulary.is_whole else weights | self.vocabulary.tensors()

    def rates(self) -> dict[str, float]:
        """Learning rates, relative to the run's, of parameters whose names start so."""
        return {}

    def lm_head(self) -> Tensor:
        """[Vd, D]"""
        return self._truth_head

    def truth_head(self) -> Tensor:
        """[Vd, D'] the target's rows of the draft vocabulary."""
        return self._truth_head


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one batch: features of the layers asked for, the last rows, and where the argmax can be drafted."""

    features: dict[int, Tensor]  # [B, T, D]
    last: Tensor  # [B, T, D]
    # [B, T] is the target's argmax in the draft vocabulary, where that was asked? None = always
    inside: Tensor | None


def read_teacher(
    features: tuple[dict[int, Tensor], Tensor],
    head: Tensor,
    vocabulary: DraftVocabulary,
    batch: Batch | None = None,
    chunk: int = 8192,
) -> Reading:
    """Complete a teacher's pass with what the draft vocabulary leaves out.

    With a batch only its rows before a token to be learnt are looked at: an argmax over a vocabulary of 150,000 costs a
    1.5B teacher an eighth of a step, and a third of the rows are prompts and padding.
    """
    kept, last = features
    if vocabulary.is_whole:
        return Reading(kept, last, None)
    known = torch.zeros(len(head), dtype=torch.bool, device=head.device)
    known[vocabulary.ids.to(head.device)] = True
    rows = last.flatten(0, 1)
    inside = torch.zeros(len(rows), dtype=torch.bool, device=head.device)
    wanted = torch.arange(len(rows), device=head.device) if batch is None else learnt_rows(batch, 0)
    parts: Sequence[Tensor] = wanted.split(chunk)  # type: ignore[no-untyped-call]
    for part in parts:
        inside[part] = known[(rows[part] @ head.t()).argmax(-1)]
    return Reading(kept, last, inside.view(last.shape[:2]))


def loss_of(recipe: Recipe, batch: Batch, noise: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The loss of a batch, per learnt token, and the mean acceptance of the first level."""
    reading = recipe.read(batch)
    head, truth_head = recipe.lm_head(), recipe.truth_head()
    total: Tensor = torch.zeros((), device=batch.tokens.device)
    first: Tensor | None = None
    last, drafts = reading.last.flatten(0, 1), Survival(batch.tokens.numel())
    for output in recipe.outputs(batch, reading, noise):
        rows, said = rows_of(batch, output)  # prompts and padding need no logits
        spoken = said + output.shift  # the target's rows for the same tokens; never past a sequence's end
        weights = torch.ones(len(said), device=said.device)
        if reading.inside is not None:
            weights = reading.inside.flatten()[spoken].float()
        count = weights.sum().clamp(min=1.0)
        truth = last[spoken]
        losses, accepted = recipe.law_loss.of_rows(rows, head, truth, truth_head, weights)
        if output.survives:
            drafts.add(said, losses, accepted, weights)
            part = torch.zeros_like(total)
        else:
            part = recipe.law_weight * losses.sum() / count
        if output.features is not None and recipe.feature_weight:
            part = part + recipe.feature_weight * _gap(output, said, truth)
        if output.aside is not None:
            part = part + output.aside
        total = total + output.weight * part
        first = accepted.sum() / count if first is None else first
    assert first is not None, "a recipe has at least one output"
    return (total + recipe.law_weight * drafts.loss() if drafts else total), first


def _gap(output: Output, said: Tensor, truth: Tensor) -> Tensor:
    """Between predicted features and the target's own, per row."""
    assert output.features is not None
    unit = 1.0 if output.unit is None else output.unit
    guess, wanted = output.features.flatten(0, 1)[said].float() / unit, truth.float() / unit
    return F.smooth_l1_loss(guess, wanted, reduction="none").mean(-1).sum() / max(1, len(said))


def rows_of(batch: Batch, output: Output) -> tuple[Tensor, Tensor]:
    """An output's rows [N, D] that predict a token to be learnt, and which of [B T] they are."""
    if output.at is not None:
        return output.rows, output.at
    said = learnt_rows(batch, output.shift)
    return output.rows.flatten(0, 1)[said], said


def shifted(values: Tensor, shift: int) -> Tensor:
    """values[:, t + shift] at t, zero past the end."""
    if not shift:
        return values
    pad = [0, 0] * (values.dim() - 2) + [0, shift]
    return F.pad(values[:, shift:], pad)


def learnt_rows(batch: Batch, shift: int) -> Tensor:
    """Which rows of [B T], in an output with this shift, predict a token to be learnt; computed on the host."""
    rows = shifted(batch.learnt, shift + 1).flatten().nonzero()[:, 0]
    return rows.to(batch.tokens.device, non_blocking=True)
