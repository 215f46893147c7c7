"""Sampled tokens on a device: the target's own token after every node of all trees at once, above temperature 0.

Where drafted tokens were chosen, not drawn, a verdict is a walk along the target's own tokens: the argmax of a greedy
sequence, the draw under shared noise of a coupled one (coupled.py), the draw x ~ p of all others (exact.py). So the
tokens are found for all nodes at once, in operations on the device that never ask the host, and the device form of the
greedy rule walks along them. Random numbers are the host's: hashed from seed and position, which the device knows.

Not every law is made here: penalties, bans, bias and processors depend on the path and are the host's (warp.py). Rows
do not depend on each other: every sum is over one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.core.noise import DRAW, device_uniform, mixed_seed
from forerun.core.types import Seq
from forerun.verify.base import Verifier
from forerun.verify.coupled import CoupledVerifier
from forerun.verify.exact import BlockVerifier, ExactVerifier
from forerun.verify.walk import CHUNK_ENTRIES, coupled_tokens, drawn_tokens, noise_of
from forerun.verify.warp import adjusts, truncate

MOST_TRUNCATIONS = 4  # different ones in a batch: each is computed for all rows
GREEDY, COUPLED, DRAWN = range(3)  # how a sequence's tokens are found

Truncation = tuple[int, float, float]  # top-k, top-p, min-p
_NONE: Truncation = (0, 1.0, 0.0)


class Kinds(NamedTuple):
    """What the sequences of a batch need: batches that agree in it run the same operations."""

    coupled: bool
    drawn: bool
    truncations: tuple[Truncation, ...]  # without the one that cuts nothing


def kinds_of(seqs: Sequence[Seq]) -> Kinds | None:
    """None where all are greedy, or where a law is not made here."""
    sampled = [seq for seq in seqs if seq.params.temperature != 0.0]  # a property is a call
    if not sampled or any(map(adjusts, seqs)):
        return None
    cut = sorted({truncation_of(seq) for seq in sampled} - {_NONE})
    if len(cut) > MOST_TRUNCATIONS:
        return None
    couples = {seq.shares_noise for seq in sampled}
    return Kinds(True in couples, False in couples, tuple(cut))


def truncation_of(seq: Seq) -> Truncation:
    params = seq.params
    return params.top_k, params.top_p, params.min_p


def decides_alike(verifier: Verifier) -> bool:
    """Does this verifier come to the device's verdict wherever drafted tokens were chosen?"""
    return isinstance(verifier, (ExactVerifier, BlockVerifier, CoupledVerifier))


class SampledTokens:
    """Implements forerun.core.tree.DeviceSampling."""

    fields = 4  # of a sequence: mixed seed, rule, temperature, which truncation

    def kinds(self, seqs: Sequence[Seq]) -> Kinds | None:
        return kinds_of(seqs)

    def usual(self) -> Sequence[Kinds]:
        """What is worth capturing before anybody asks for it: requests with a seed or without, cut or not."""
        return (Kinds(True, False, ()),)

    def settings(self, seqs: Sequence[Seq], kinds: Kinds) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[fields, B] to be sent to the device."""
        table = np.zeros((self.fields, len(seqs)), dtype=np.int64)
        for b, seq in enumerate(seqs):
            if seq.params.is_greedy:
                table[2, b] = _bits(1.0)
                continue
            cut = truncation_of(seq)
            rule = COUPLED if seq.shares_noise else DRAWN
            group = 0 if cut == _NONE else 1 + kinds.truncations.index(cut)
            table[:, b] = mixed_seed(seq.seed), rule, _bits(seq.params.temperature), group
        return table

    def tokens(self, logits: Tensor, positions: Tensor, table: Tensor, kinds: Kinds, depth: int) -> Tensor:
        """[B, N] from logits [B, N, V], the positions of the nodes [B, N], and what was sent of B sequences.

        The first node of a tree is its root; no node is more than `depth` positions further.
        """
        if logits.device.type == "cuda" and _has_kernels(kinds):
            from forerun.verify.kernels import coupled_by_kernels

            return coupled_by_kernels(logits, positions, table, COUPLED)  # type: ignore[no-any-return]
        trees, nodes, vocab = logits.shape
        step = max(1, CHUNK_ENTRIES // (nodes * vocab))
        parts = [
            _tokens(logits[b : b + step], positions[b : b + step].long(), table[:, b : b + step], kinds, depth)
            for b in range(0, trees, step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _has_kernels(kinds: Kinds) -> bool:
    """Are there kernels for what these sequences need?"""
    return kinds == Kinds(True, False, ()) and find_spec("triton") is not None


def _tokens(logits: Tensor, positions: Tensor, table: Tensor, kinds: Kinds, depth: int) -> Tensor:
    """Of a few trees. A token has the position behind that of the node it follows."""
    seeds, rule, hot, group = table[:, :, None]  # [B, 1] each
    found = logits.argmax(-1)
    laws = _laws(logits, hot.contiguous().view(torch.float64).float()[..., None], group, kinds)
    if kinds.coupled:
        tokens = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
        steps = torch.arange(1, depth + 2, device=logits.device)
        noise = noise_of(seeds, positions[:, :1] + steps, tokens)  # [B, depth + 1, V]
        coupled = coupled_tokens(laws, _by_depth(noise, positions - positions[:, :1]))
        found = torch.where(rule == COUPLED, coupled, found)
    if kinds.drawn:
        u = device_uniform(seeds, positions + 1, DRAW)
        found = torch.where(rule == DRAWN, drawn_tokens(laws.softmax(-1), u), found)
    return found


def _laws(logits: Tensor, hot: Tensor, group: Tensor, kinds: Kinds) -> Tensor:
    """Log-weights [B, N, V], to the bit those of warp.py."""
    # torch divides by a number of the host through its reciprocal on a GPU, and truly on a CPU
    laws = logits / hot if logits.device.type == "cpu" else logits * hot.reciprocal()
    whole = laws
    for i, cut in enumerate(kinds.truncations):
        kept = truncate(whole.flatten(0, 1), *cut).view_as(whole)
        laws = torch.where((group == i + 1)[..., None], kept, laws)
    return laws


def _by_depth(noise: Tensor, depths: Tensor) -> Tensor:
    """Noise [B, depth + 1, V] -> that of every node [B, N, V]."""
    trees, levels, vocab = noise.shape
    if levels == 1:
        return noise
    first = torch.arange(0, trees * levels, levels, device=noise.device)[:, None]
    places = (first + depths.clamp(0, levels - 1)).flatten()  # padding, and rehearsals, have any positions
    return noise.view(-1, vocab).index_select(0, places).view(*depths.shape, vocab)


def _bits(number: float) -> int:
    return int(np.float64(number).view(np.int64))
