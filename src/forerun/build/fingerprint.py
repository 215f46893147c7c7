"""Fingerprint: a few values of a model's weights and tokenizer, by which a head finds the model it was trained for.

File names say little: people rename, convert and merge checkpoints. Norm weights are never quantised, so they agree to
the rounding of 16 bits in every format. A sample of matrices agrees as well as the quantisation allows. A fine-tune
moves norms a little, or matrices less than a quantisation does: heads are offered for it with a warning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from forerun.core.errors import ForerunError
from forerun.heads import BOX, HeadFolder, fitting_heads
from forerun.models.load.checkpoint import Checkpoint

FILE = "fingerprint.json"
Likeness = Literal["same", "tuned", "other"]

_NORMS = ("model.norm.weight", "model.layers.{}.input_layernorm.weight")
_MATRICES = ("model.layers.{}.self_attn.k_proj.weight",)
_OF_A_NORM, _OF_A_MATRIX, _TOKENS = 16, 64, 64  # values of each tensor, tokens of the vocabulary
# the root of the mean squared difference of two samples, over that of the values themselves
_ROUNDED = 0.005  # of norms: bfloat16 rounds by 0.002
_TUNED = 0.05  # of norms: instruct models differ from their base by 0.001 to 0.02
_QUANTISED = 0.35  # of matrices: 4 bits differ by 0.08, 2 bits by 0.25, unrelated matrices by 1.4
_SPELT_ALIKE = 0.9  # of the tokens: a fine-tune may add special ones


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Samples of a model's weights by name, and some of its tokens by id."""

    norms: Mapping[str, tuple[float, ...]]
    matrices: Mapping[str, tuple[float, ...]]
    tokens: Mapping[int, str]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Fingerprint | None:
        """The fingerprint of a checkpoint; None for a model whose weights have other names."""
        weights = checkpoint.weights
        layers = {int(found[1]) for name in weights if (found := re.match(r"model\.layers\.(\d+)\.", name))}
        if not layers:
            return None
        places = sorted({0, max(layers) // 2, max(layers)})
        norms = {name: _OF_A_NORM for form in _NORMS for name in {form.format(at): 0 for at in places}}
        matrices = {form.format(at): _OF_A_MATRIX for form in _MATRICES for at in places}
        if any(name not in weights for name in (*norms, *matrices)):
            return None
        tokenizer = checkpoint.tokenizer()
        ids = [i * tokenizer.vocab_size // _TOKENS for i in range(_TOKENS)]
        return cls(
            {name: _sample(weights[name], count) for name, count in norms.items()},
            {name: _sample(weights[name], count) for name, count in matrices.items()},
            {index: token for index in ids if (token := tokenizer.token(index)) is not None},
        )

    @classmethod
    def read(cls, folder: Path) -> Fingerprint | None:
        """The fingerprint of the target that the head in a folder was trained for; None where it has none."""
        try:
            values = json.loads((folder / FILE).read_text(encoding="utf-8"))
            norms, matrices = (
                {str(name): tuple(map(float, sample)) for name, sample in values[part].items()}
                for part in ("norms", "matrices")
            )
            return cls(norms, matrices, {int(index): str(token) for index, token in values["tokens"].items()})
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def write(self, folder: Path) -> None:
        """Beside the head that was trained for this model."""
        values: dict[str, Any] = {
            "norms": self.norms, "matrices": self.matrices, "tokens": {str(i): t for i, t in self.tokens.items()},
        }  # fmt: skip
        (folder / FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    def likeness(self, other: Fingerprint) -> Likeness:
        """Is the other model this one in any format, a fine-tune of it, or something else?"""
        alike = [other.tokens.get(index) == token for index, token in self.tokens.items()]
        norms, matrices = _distance(self.norms, other.norms), _distance(self.matrices, other.matrices)
        if matrices > _QUANTISED or norms > _TUNED or sum(alike) < _SPELT_ALIKE * len(alike):
            return "other"
        return "same" if norms <= _ROUNDED and all(alike) else "tuned"


class FoundHead(NamedTuple):
    """A head of the box for a model, and how like the model is to the one that it was trained for."""

    head: HeadFolder
    likeness: Likeness

    def __str__(self) -> str:
        name, target = self.head.path.name, self.head.target
        if self.likeness == "same":
            return f"the head {name} drafts for this model: its weights and tokenizer are those of {target}"
        return (
            f"the head {name} was trained for {target}, and this model looks like a fine-tune of it: drafts may be "
            "accepted less often, which the texts' acceptance shows; drafter='ngram' leaves the head out"
        )


def find_head(checkpoint: Checkpoint, drafter: str = "auto", box: Path = BOX) -> FoundHead | None:
    """The head of the box for this model, and for this drafter if one is named."""
    heads = fitting_heads(checkpoint.config, drafter, box)
    own = fingerprint_of(checkpoint) if heads else None
    found = [FoundHead(head, _likeness(head, checkpoint, own)) for head in heads]
    same = (each for each in found if each.likeness == "same")
    return next(same, next((each for each in found if each.likeness == "tuned"), None))


def other_target(head: HeadFolder, checkpoint: Checkpoint) -> str | None:
    """What is wrong with a head that a user gave: its fingerprint is of another model. None = nothing is known."""
    wanted = Fingerprint.read(head.path)
    own = None if wanted is None else fingerprint_of(checkpoint)
    if wanted is None or own is None or wanted.likeness(own) != "other":
        return None
    return (
        f"the head {head.path.name} was trained for {head.target or 'another model'}, and weights or tokenizer of "
        f"{checkpoint.name} differ: few drafts will be accepted; train a head for this model with `forerun train`"
    )


def _likeness(head: HeadFolder, checkpoint: Checkpoint, own: Fingerprint | None) -> Likeness:
    """By fingerprints; a head that has none, as older trainers wrote it, is told by its target's name."""
    wanted = Fingerprint.read(head.path)
    if wanted is None:
        return "same" if head.is_for([checkpoint.name, checkpoint.path.name]) else "other"
    found = "other" if own is None else wanted.likeness(own)
    return "tuned" if found == "same" and checkpoint.adapted_from else found


def fingerprint_of(checkpoint: Checkpoint) -> Fingerprint | None:
    """The same as `Fingerprint.of`; None too where the checkpoint is damaged, which loading it reports better."""
    try:
        return Fingerprint.of(checkpoint)
    except (ForerunError, OSError, ValueError, RuntimeError):
        return None


def _sample(weight: Tensor, count: int) -> tuple[float, ...]:
    flat = weight.flatten()
    places = torch.arange(count) * flat.numel() // count
    return tuple(float(f"{value:.5g}") for value in flat[places].float().tolist())


def _distance(ours: Mapping[str, tuple[float, ...]], theirs: Mapping[str, tuple[float, ...]]) -> float:
    """The largest relative difference of two samples of the same tensor; infinite where one is missing."""
    largest = 0.0
    for name, values in ours.items():
        others = theirs.get(name, ())
        if len(others) != len(values):
            return float("inf")
        size = sum(value * value for value in values)
        apart = sum((a - b) ** 2 for a, b in zip(values, others, strict=True))
        largest = max(largest, (apart / max(size, 1e-30)) ** 0.5)
    return largest
