"""ScreenedHead: finds the largest logit of a row without reading the whole LM head in float32, provably the same one.

The head is kept a second time in eight bits, a quarter of the bytes. A pass multiplies by that; what it finds is a
logit's estimate s, and |s - logit| <= e is known for every token. Tokens with s + e below s - e of some other token
cannot be the largest: the rest, a few, are computed in float32 by the kernel that computes all logits, with its bits.

Why e holds. W is a token's row of the head and Q what eight bits keep of it; x is a hidden row and z what the kernel
rounds it to. Then W x - Q z = (W - Q) x + Q (x - z), so |W x - Q z| <= |W - Q| |x| + |Q| |x - z| (Cauchy-Schwarz), and
|Q| <= |W| + |W - Q|. The norms |W| and |W - Q| are computed at loading; |x - z| is at most 0.503 of a step per number,
where a block of 32 numbers has steps of its largest / 127 (quantize.c: half a step, and the step itself rounded to 16
bits). Both sums are computed in float32: n products of any order are within 2 n 2^-24 |W| |x| of their sum
(n = inputs + 64 is more than the roundings of any path, a bias, and the arithmetic here).
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from forerun.models.encoder_decoder.layers import NativeLinear
from forerun.models.load.quants import dequantize
from forerun.models.native import library as native
from forerun.models.native.library import BLOCK, F32
from forerun.models.native.packing import PackedWeight, quantize_q8, side_by_side

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Places = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

STEP = 0.503 / 127  # of a block's largest number: how far rounding may move one of its numbers
MOST = 8  # where more than one token in eight may be the largest, all logits are computed
_UP = 1.000001  # norms are rounded to float32: not down
_ROWS = 4096  # rows of the head whose norms are computed at once


class ScreenedHead:
    """A head in eight bits beside the one in float32, and what eight bits lose of every row."""

    def __init__(self, weight: Tensor, bias: Tensor | None, bannable: Collection[int] = ()) -> None:
        """`weight` [V, D] float32, D a multiple of 32. Any of the `bannable` tokens may later be left out."""
        self._weight, self._rough = weight, NativeLinear(weight, None, "q8")
        self._norms, self._losses = _norms_of(weight)
        self._bias = None if bias is None else bias.numpy()
        self._largest_bias = 0.0 if bias is None else float(bias.abs().max())
        self._bannable = sorted({token for token in bannable if token < len(weight)})
        self._multiply = native.library().fr_linear_rows

    def largest(self, rows: Tensor) -> Tensor | None:
        """[M, D] -> [M, V]: the largest logits of each row are exact, all others estimates that are below.

        None where the estimates decide too little, or where something is not a number.
        """
        x: Floats = rows.numpy()
        logits = self._rough(rows)
        found: Floats = logits.numpy()
        if self._bias is not None:
            found += self._bias
        rivals = np.zeros(found.shape[1], dtype=bool)
        for row, estimates in zip(x, found, strict=True):
            within = self.errors(row)
            least = self._least(estimates, within)
            if not np.isfinite(least):
                return None
            within += estimates
            rivals |= within >= least
        tokens: Places = np.flatnonzero(rivals)
        if len(tokens) * MOST > len(rivals):
            return None
        found[:, tokens] = self._exact(rows, tokens)
        return logits

    def errors(self, x: Floats) -> Floats:
        """[V] how far a row's estimates are from its logits at most."""
        wide = x.astype(np.float64)
        size = float(np.sqrt(wide @ wide))
        steps = np.abs(wide).reshape(-1, BLOCK).max(-1) * STEP
        moved = float(np.sqrt(BLOCK * (steps @ steps)))
        rounded = (len(x) + 64) * 2.0**-23 * (size + moved)
        by_loss, by_norm = size + moved + rounded, moved + rounded
        rest = 2.0**-20 * self._largest_bias + 1e-30
        errors: Floats = self._losses * np.float32(by_loss * _UP)
        errors += self._norms * np.float32(by_norm * _UP)
        errors += np.float32(rest)
        return errors

    def _least(self, estimates: Floats, errors: Floats) -> float:
        """What some logit reaches at least, of a token that is never left out; NaN where an estimate is NaN."""
        best = int(estimates.argmax())  # numpy: the first NaN, where there is one
        if best in self._bannable:
            lower = estimates - errors
            lower[self._bannable] = -np.inf
            best = int(lower.argmax())
        return float(estimates[best]) - float(errors[best])

    def _exact(self, rows: Tensor, tokens: Places) -> Floats:
        """[M, n] these tokens' logits, with the bits that the whole product has."""
        some = self._weight[torch.from_numpy(tokens)]
        weights = side_by_side([PackedWeight(F32, len(some), some.shape[1], some)])
        found = rows.new_empty(len(rows), len(some))
        if self._multiply(ctypes.byref(weights), rows.data_ptr(), found.data_ptr(), len(rows)):
            raise MemoryError(f"no memory for the logits of {len(some)} tokens")
        exact: Floats = found.numpy()
        return exact if self._bias is None else exact + self._bias[tokens]


def _norms_of(weight: Tensor) -> tuple[Floats, Floats]:
    """[V] of each row of the head, and of what eight bits lose of it; rounded up."""
    norms, losses = [], []
    for first in range(0, len(weight), _ROWS):
        rows = weight[first : first + _ROWS]
        kept = dequantize(quantize_q8(rows)).view_as(rows)
        norms.append(rows.double().norm(dim=1))
        losses.append((rows.double() - kept.double()).norm(dim=1))
    both = [(torch.cat(parts) * _UP).float().numpy() for parts in (norms, losses)]
    return both[0], both[1]
