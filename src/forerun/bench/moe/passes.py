"""Experts woken and time taken by a pass over so many nodes of real text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from time import process_time

from forerun.models.native.target import NativeDecoder
from forerun.types import Needs, PlainSeq, TreeBatch

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the answer that the model itself writes: an accepted draft is a stretch of it."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Passes:
    """By number of nodes."""

    woken: dict[int, float]  # experts per layer; {} where there are none
    seconds: dict[int, float]  # of CPU


def measure_passes(target: NativeDecoder, texts: Sequence[Text], nodes: Sequence[int] = NODES) -> Passes:
    """Every text in turn, from another place of its answer for every size; medians of CPU seconds."""
    woken: dict[int, list[float]] = {size: [] for size in nodes}
    seconds: dict[int, list[float]] = {size: [] for size in nodes}
    for i, text in enumerate(texts):
        for place, size in enumerate(nodes):
            room = len(text.answer) - size
            begin = max(1, (i * 7 + place * 11) % max(2, room))
            seq = PlainSeq(i, text.prompt + text.answer[:begin], max_length=4096)
            target.prefill([seq], Needs())
            chain = TreeBatch.chains([text.answer[begin - 1 : begin - 1 + size]])
            started = process_time()
            target.score([seq], chain, Needs())
            seconds[size].append(process_time() - started)
            woken[size].append(mean(target.woken or [0]))
            target.release(seq)
    experts = target.config.moe is not None
    return Passes(
        {size: mean(found) for size, found in woken.items()} if experts else {},
        {size: median(spent) for size, spent in seconds.items()},
    )


def chance(experts: int, per_token: int, nodes: int) -> float:
    """How many experts nodes would wake that pick independently of each other."""
    return float(experts * (1.0 - (1.0 - per_token / experts) ** nodes))
