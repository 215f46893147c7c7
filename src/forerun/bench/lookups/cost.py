"""What look-ups take the host: microseconds of CPU time for what a round asks of a drafter, along recorded texts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import thread_time_ns
from typing import NamedTuple

from forerun.bench.lookups.record import RecordedText
from forerun.drafters.base import LookupDrafter
from forerun.types import Budget, PlainSeq, Scores, TreeBatch, Verdict

NODES, DEPTH, WIDTH = 60, 24, 10
FLAT = tuple([0.002 * n for n in range(NODES + 1)])  # what nodes cost where they are nearly free
CHAIN, TREE = Budget(DEPTH, DEPTH, 1, FLAT), Budget(NODES, DEPTH, WIDTH, FLAT)


class LookupCost(NamedTuple):
    """Median microseconds: of an offer where nothing matches, and of all that a round with a match asks for."""

    no_match: float
    offer: float
    propose: float
    observe: float

    @property
    def draft(self) -> float:
        return self.offer + self.propose + self.observe


def measure(drafter: LookupDrafter, texts: Sequence[RecordedText], budget: Budget) -> LookupCost:
    """Every token of the texts comes alone, whatever was drafted."""
    spent: dict[str, list[int]] = {"no_match": [], "offer": [], "propose": [], "observe": []}
    for number, text in enumerate(texts):
        seq = PlainSeq(number, [*text.prompt], len(text.prompt), max_length=1 << 20)
        drafter.offer(seq)  # reads the prompt
        for token in text.answer:
            times = [thread_time_ns()]
            drafter.offer(seq)
            times.append(thread_time_ns())
            drafter.propose([seq], [budget])
            times.append(thread_time_ns())
            matches = next(drafter.chain(seq, 1), None) is not None
            root, verdict = TreeBatch.chains([seq.tokens[-1:]]), Verdict.of([[]], [token], "cpu")
            before = thread_time_ns()
            drafter.observe([seq], root, Scores(None), verdict)
            observed = thread_time_ns() - before
            if matches:
                spent["offer"].append(times[1] - times[0])
                spent["propose"].append(times[2] - times[1])
                spent["observe"].append(observed)
            else:
                spent["no_match"].append(times[1] - times[0])
            seq.tokens.append(token)
        drafter.forget(seq)
    return LookupCost(*[median(times) / 1e3 if times else 0.0 for times in spent.values()])
