"""CostModel: what a pass costs on this machine, t(n), the seconds of one target pass over n nodes.

Whether drafting pays follows from this curve and from how often drafts are accepted. It is measured in a
second or two on the real target, stored in a file, and corrected by every round that follows.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from time import perf_counter

from forerun.models.base import Target
from forerun.types import Needs, PlainSeq, TreeBatch

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # for a benchmark
QUICK = (1, 2, 4, 8, 16)  # at load: what a controller needs, in about a second
WIDE = (*QUICK, 32, 64)  # where passes are nearly flat, trees are large
ALIKE = 0.9  # of what one size is slower by: what the others are expected to be
CONTEXT = 128  # tokens cached while measuring
STRIDE = 7919  # a prime, so that tokens of a chain differ


class CostModel:
    """t(n) by straight lines between measured sizes."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = dict(sorted(seconds.items()))
        self._sizes = tuple(self.seconds)

    def pass_seconds(self, nodes: int) -> float:
        """Seconds of a pass over so many nodes."""
        sizes = self._sizes
        place = bisect_left(sizes, nodes)
        if place == len(sizes):
            return self.seconds[sizes[-1]] * nodes / sizes[-1]
        above = sizes[place]
        if above == nodes or place == 0:
            return self.seconds[above]
        below = sizes[place - 1]
        share = (nodes - below) / (above - below)
        return self.seconds[below] * (1 - share) + self.seconds[above] * share

    def observe(self, nodes: int, seconds: float) -> None:
        """Move the curve towards what a round took; outliers (a pause of the machine) count little.

        A machine that has become slower is slower for every size: the whole curve moves, this size a bit more.
        """
        known = self.pass_seconds(nodes)
        step = 0.05 * (min(max(seconds / known, 0.5), 2.0) - 1.0)
        for size in self._sizes:
            self.seconds[size] *= 1.0 + (step if size == nodes else ALIKE * step)

    def price(self, nodes: int, neighbours: int = 0, rate: float = 1.0, others: int = 0) -> tuple[float, ...]:
        """What a pass with 0..nodes more nodes of one sequence costs it, in tokens written in the same time.

        `rate` is how many tokens a sequence writes in the time of a plain pass. More nodes for one delay its
        neighbours too: it is charged for all of them, on top of the nodes that the others draft.
        """
        batch = neighbours + 1
        plain, before = self.pass_seconds(batch), self.pass_seconds(batch + others)
        share = rate * batch / plain
        more = range(batch + others, batch + others + nodes + 1)
        return tuple(rate + share * max(0.0, self.pass_seconds(size) - before) for size in more)

    @classmethod
    def measure(cls, target: Target, sizes: Sequence[int] = SIZES, repeats: int = 3) -> CostModel:
        """Time passes over chains of several sizes on a scratch sequence; the best of a few, as noise only adds."""
        context = max(2, min(CONTEXT, target.max_length - max(sizes) - 1))
        while context > 2 and not target.has_room(context + 1):
            context //= 2  # a small KV cache: measure on a shorter sequence
        probe = PlainSeq(-1, [1] * context, max_length=context + 1)  # no engine gives that id
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        target.prefill([probe], Needs())
        try:
            for repeat in range(repeats + 1):
                for size in sizes:
                    # tokens that differ: in a mixture of experts every node then uses its own experts, as in real text
                    tokens = [(1 + STRIDE * i) % target.vocab_size for i in range(size)]
                    chain = TreeBatch.chains([tokens], target.device)
                    started = perf_counter()
                    scores = target.score([probe], chain, Needs())
                    assert scores.logits is not None
                    float(scores.logits[-1, -1])  # wait for the device
                    if repeat:  # the first round warms up
                        seconds[size].append(perf_counter() - started)
        finally:
            target.release(probe)
        return cls({size: min(times) for size, times in seconds.items()})

    @classmethod
    def measure_or_load(cls, target: Target, file: Path | None) -> CostModel:
        """The curve kept in a file, else measured now and kept there."""
        sizes = QUICK if target.device.type == "cpu" else WIDE
        if file is not None and file.is_file():
            try:
                kept = {int(n): float(t) for n, t in json.loads(file.read_text())["seconds"].items()}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                kept = {}
            if set(sizes) <= set(kept) and all(0.0 < t < inf and n > 0 for n, t in kept.items()):
                return cls(kept)
            file.unlink()  # not ours any more: measure again
        model = cls.measure(target, sizes, repeats=2)
        if file is not None:
            with suppress(OSError):  # a cache that cannot be written costs time, nothing else
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps({"seconds": model.seconds}))
        return model
