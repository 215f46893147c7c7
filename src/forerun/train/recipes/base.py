"""Base class of recipes: outputs, each of which predicts one token further ahead, and their loss.

Output j of row t is scored, through the draft LM head, against the target's law of the token at t + shift + 1:
Medusa's head k has shift k, EAGLE's step j has shift j + 1, a draft model 0. So one loss, one simulation of tokens
per round and one loop serve them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.drafters.heads.base import Calibration
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.train.data.corpus import Batch
from forerun.train.options import TrainOptions
from forerun.train.recipes.losses import LawLoss, Survival
from forerun.train.recipes.scaling import fold


@dataclass(frozen=True, slots=True)
class Output:
    """A prediction of one token further ahead."""

    rows: Tensor  # [B, T, D], ready for the LM head; [N, D] of the rows named in `at`
    shift: int
    weight: float = 1.0
    # [B, T, D] a prediction of the target's own rows, where the recipe has one
    features: Tensor | None = None
    unit: Tensor | None = None  # [D] what a gap between features is measured in
    at: Tensor | None = None  # [N] which rows of [B T] it predicts from; None = all
    aside: Tensor | None = None  # a further loss, of what is learnt beside the law
    # weigh each row by how far its draft gets (losses.Survival), instead of by `weight`
    survives: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """A head measured on held-back text."""

    tokens_per_round: float  # a chain, simulated
    tree_tokens_per_round: float  # any of the likeliest `RANKS` at every level
    rates: tuple[tuple[float, ...], ...]  # [levels][ranks]
    calibration: Calibration


class Recipe(Protocol):
    """A drafter in training: a module with the trained parameters."""

    vocabulary: DraftVocabulary
    law_loss: LawLoss
    feature_weight: float
    law_weight: float

    def read(self, batch: Batch) -> Reading:
        """The frozen target's features and laws for a batch."""
        ...

    def outputs(self, batch: Batch, reading: Reading, noise: torch.Generator | None) -> Iterable[Output]: ...

    def lm_head(self) -> Tensor:
        """[Vd, D]"""
        ...

    def truth_head(self) -> Tensor:
        """[Vd, D'] the target's rows of the draft vocabulary."""
        ...

    def module(self) -> nn.Module: ...
    def rates(self) -> dict[str, float]:
        """Learning rates, relative to the run's, of parameters whose names start so."""
        ...

    def export(self, folder: Path, measured: Measured) -> None:
        """Write a drafter that `forerun` loads."""
        ...


class WithTargetHead:
    """Part of a recipe whose drafter uses the target's own LM head: it is not trained."""

    feature_weight, law_weight = 0.0, 1.0
    _module: nn.Module

    def __init__(self, options: TrainOptions, head: Tensor, vocabulary: DraftVocabulary) -> None:
        self.options, self.vocabulary = options, vocabulary.to(head.device)
        self._truth_head = self.vocabulary.rows_of(head)  # [Vd, D]
        self.law_loss = LawLoss(options.loss)

    def module(self) -> nn.Module:
        return self._module

    def tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """A module's weights as a head's file has them, and the draft vocabulary."""
        weights = {name: weight.to(torch.bfloat16) for name, weight in fold(module).items()}
        return weights if self.vocabulary.is_whole else weights | self.vocabulary.tensors()

    def rates(self) -> dict[str, float]:
        return {}

    def lm_head(self) -> Tensor:
        return self._truth_head

    def truth_head(self) -> Tensor:
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
