"""Checks logits for NaN: damaged weights, or weights too large for their dtype, give NaN."""

from __future__ import annotations

from torch import Tensor

from forerun.core.errors import ModelError


def check_numbers(logits: Tensor) -> Tensor:
    """The logits, unless a row of them holds NaN or both infinities; on a CPU only, where reading does not wait."""
    if logits.device.type == "cpu" and bool(logits.sum().isnan()):
        raise not_numbers()
    return logits


def not_numbers() -> ModelError:
    """The error of a model whose logits are NaN."""
    return ModelError(
        "the model computes logits that are not numbers (NaN): its weights are damaged or too large for this "
        "dtype; fetch them again, or use dtype='float32'"
    )
