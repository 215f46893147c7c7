"""How well a part of a target drafts on texts that the target wrote: measured in windows, without decoding.

A window is a place in a greedy text and the tokens that follow it. A chain that is drafted there is accepted while each
of its tokens is the text's own, so the part is fed the text: as long as it is right it sees what it would see in a real
round, and where it is wrong the round would have ended. The windows are prefilled once, by the whole target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from forerun.control.cost import CostModel
from forerun.core.types import Needs, PlainSeq, TreeBatch
from forerun.models.base import LayerSubset, Target
from forerun.models.config import DecoderConfig

DEPTH = 6  # tokens that a window shows behind its first
ROWS = 240  # nodes of one pass
_FIRST_ID = 1 << 50  # of sequences; an engine on the same target counts from 0


@dataclass(frozen=True, slots=True)
class Window:
    """A sequence that the target has cached, but for its last token, and the text from that token on."""

    seq: PlainSeq
    chain: list[int]


def cut_windows(
    target: Target, texts: Sequence[tuple[Sequence[int], Sequence[int]]], most: int
) -> list[Window]:
    """Places in texts (prompt, answer), evenly taken, prefilled; `most` of them at most."""
    places = [(text, at) for text in texts for at in range(0, len(text[1]) - DEPTH, DEPTH)]
    stride = max(1, -(-len(places) // most))
    ids, found = count(_FIRST_ID), []
    for (prompt, answer), at in places[::stride]:
        seq = PlainSeq(next(ids), [*prompt, *answer[: at + 1]], cache_salt="layer windows")
        target.prefill([seq], Needs())
        found.append(Window(seq, list(answer[at : at + DEPTH + 1])))
    return found


def release(target: Target, windows: Sequence[Window]) -> None:
    for window in windows:
        target.release(window.seq)


def survivals(part: Target, windows: Sequence[Window]) -> tuple[float, ...]:
    """How often the first 1, 2, ... DEPTH tokens drafted in a window are all accepted, by a greedy target."""
    reached, at_once = [0] * DEPTH, ROWS // DEPTH
    for low in range(0, len(windows), at_once):
        some = windows[low : low + at_once]
        trees = TreeBatch.chains([window.chain[:-1] for window in some], part.device)
        tops = part.score([window.seq for window in some], trees, Needs()).required_logits.argmax(-1).tolist()
        for b, window in enumerate(some):
            said = tops[trees.starts[b] : trees.starts[b + 1]]
            right = [token == own for token, own in zip(said, window.chain[1:], strict=True)]
            for depth in range(right.index(False) if False in right else DEPTH):
                reached[depth] += 1
        for window in some:
            part.release(window.seq)
    return tuple(count / max(1, len(windows)) for count in reached)


@dataclass(frozen=True, slots=True)
class Shares:
    """What parts of a pass over one node cost, as shares of it, by the weights that they read."""

    attention: float  # of one layer
    mlp: float
    head: float

    @classmethod
    def of(cls, config: DecoderConfig) -> Shares:
        heads = 2 * config.heads + 2 * config.kv_heads
        attention, mlp = config.width * config.head_dim * heads, 3 * config.width * config.inner
        if config.moe is not None:
            mlp = 3 * config.width * config.moe.inner * config.moe.per_token
        head = config.width * config.vocab_size
        whole = config.layers * (attention + mlp) + head
        return cls(attention / whole, mlp / whole, head / whole)

    def layers(self, some: LayerSubset) -> float:
        """Of some layers, without the LM head."""
        inside = range(some.first, some.end)
        attentions = sum(i not in some.without_attention for i in inside)
        mlps = sum(i not in some.without_mlp for i in inside)
        return attentions * self.attention + mlps * self.mlp


def gains(
    layers: LayerSubset, reached: Sequence[float], shares: Shares, cost: CostModel
) -> tuple[float, ...]:
    """How many times faster than plain decoding chains of 1, 2, ... tokens would be, by what passes cost here."""
    plain, run = cost.pass_seconds(1), shares.layers(layers)
    begun = run if layers.is_prefix else 0.0  # of the target's pass: only one row goes through these layers
    found, expected, ratio = [], 1.0, 1.0
    for depth, share in enumerate(reached, start=1):
        expected += share
        # on a busy machine t(2) may seem less than t(1)
        ratio = max(ratio, cost.pass_seconds(depth + 1) / plain)
        passed = begun + (1.0 - begun) * ratio
        found.append(expected / (passed + depth * (run + shares.head)))
    return tuple(found)
