"""Experts woken and time taken by a pass over so many nodes of real text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from time import perf_counter, process_time

import torch

from forerun.core.types import Needs, PlainSeq, TreeBatch
from forerun.models.base import Target
from forerun.models.cuda.target import CudaDecoder
from forerun.models.native.target import NativeDecoder

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
    seconds: dict[int, float]  # of `seconds_now`


def seconds_now(device: torch.device) -> float:
    """CPU seconds of this process; with a GPU, the clock when it has done its work."""
    if device.type == "cpu":
        return process_time()
    torch.cuda.synchronize(device)
    return perf_counter()


def woken_by(target: Target) -> list[int]:
    """Experts that the last pass read, by layer; [] where there are none."""
    if isinstance(target, CudaDecoder):
        return target.passes.steps.active_experts()
    return target.active_experts if isinstance(target, NativeDecoder) else []


def measure_passes(target: Target, texts: Sequence[Text], nodes: Sequence[int] = NODES) -> Passes:
    """Every text in turn, from another place of its answer for every size; medians."""
    if target.device.type != "cpu":  # the first pass of a size captures it
        warm = PlainSeq(-1, texts[0].prompt + texts[0].answer[:1], max_length=4096)
        target.prefill([warm], Needs())
        for size in nodes:
            target.score([warm], TreeBatch.chains([texts[0].answer[:size]]), Needs())
        target.release(warm)
    woken: dict[int, list[float]] = {size: [] for size in nodes}
    seconds: dict[int, list[float]] = {size: [] for size in nodes}
    for i, text in enumerate(texts):
        for place, size in enumerate(nodes):
            room = len(text.answer) - size
            begin = max(1, (i * 7 + place * 11) % max(2, room))
            seq = PlainSeq(i, text.prompt + text.answer[:begin], max_length=4096)
            target.prefill([seq], Needs())
            chain = TreeBatch.chains([text.answer[begin - 1 : begin - 1 + size]])
            started = seconds_now(target.device)
            target.score([seq], chain, Needs())
            seconds[size].append(seconds_now(target.device) - started)
            if experts := woken_by(target):
                woken[size].append(mean(experts))
            target.release(seq)
    return Passes(
        {size: mean(found) for size, found in woken.items() if found},
        {size: median(spent) for size, spent in seconds.items()},
    )


def chance(experts: int, per_token: int, nodes: int) -> float:
    """How many experts nodes would wake that pick independently of each other."""
    return float(experts * (1.0 - (1.0 - per_token / experts) ** nodes))
