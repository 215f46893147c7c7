"""Measure one engine at several batch sizes: plain, and with each drafter; every text is compared with batch 1.

Whole calls are timed: prompts are read, the batch fills and drains. So there are several times as many texts as places
in the batch, or little else than filling and draining would be measured. Each drafter has an engine and a controller of
its own around the same weights, for every size.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from forerun.core.errors import InvalidInput
from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Request
from forerun.engine.engine import Engine
from forerun.measure.bench.alternate import first_difference, in_turn
from forerun.measure.bench.figures import t_quantile

PLAIN = "plain"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
BLOCKS = 10  # stretches of a run whose rates show how far it varies
WARM_UP_TOKENS = 12

Text = tuple[int, ...]


class Setup(NamedTuple):
    """What drafts: a drafter of the engine's, and its budget; None = the controller decides."""

    drafter: str
    budget: Budget | None = None
    others: tuple[str, ...] = ()  # drafters that every third request asks for, in turn, in the same engine

    def drafter_of(self, place: int) -> str:
        return self.others[place // 3 % len(self.others)] if self.others and place % 3 == 2 else self.drafter


@dataclass(slots=True)
class Call:
    texts: list[list[int]]
    started: float
    marks: list[tuple[float, int]] = field(default_factory=list)  # after each step: when, and new tokens
    rounds: int = 0  # of single sequences
    own: tuple[int, int] = (0, 0)  # tokens and rounds of the requests that have the setup's own drafter
    parts: dict[str, float] = field(default_factory=dict)  # seconds by part of a round

    @classmethod
    def joined(cls, calls: Sequence[Call]) -> Call:
        """Several as one, each right behind the other."""
        whole, end = cls([], 0.0), 0.0
        for call in calls:
            whole.texts += call.texts
            whole.marks += [(end + at - call.started, new) for at, new in call.marks]
            whole.rounds, end = whole.rounds + call.rounds, end + call.seconds
            whole.own = whole.own[0] + call.own[0], whole.own[1] + call.own[1]
            whole.parts = {part: whole.parts.get(part, 0.0) + spent for part, spent in call.parts.items()}
        return whole

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def seconds(self) -> float:
        return self.marks[-1][0] - self.started

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def error(self) -> float | None:
        """Half the width of the rate's 95% interval, as a share of it: from the rates of several stretches."""
        step = len(self.marks) // BLOCKS
        if not step:
            return None
        ends = [self.marks[i * step - 1] if i else (self.started, 0) for i in range(BLOCKS + 1)]
        sums = [sum(new for _, new in self.marks[i * step : (i + 1) * step]) for i in range(BLOCKS)]
        rates = [
            tokens / (after[0] - before[0])
            for tokens, before, after in zip(sums, ends, ends[1:], strict=False)
            if after[0] > before[0]
        ]
        mean = sum(rates) / len(rates)
        spread = sum((rate - mean) ** 2 for rate in rates) / max(1, len(rates) - 1)
        return t_quantile(len(rates) - 1) * math.sqrt(spread / len(rates)) / mean


def spread(prompts: list[Text]) -> list[Text]:
    """The same in another order: a suite lists task after task, and the first few should hold all of them."""
    count = len(prompts)
    step = next((n for n in range(round(0.618 * count), count) if math.gcd(n, count) == 1), 1)
    return [prompts[i * step % count] for i in range(count)]


class Sweep:
    def __init__(self, engine: Engine, prompts: Sequence[Text], max_tokens: int, *, ignore_eos: bool = False) -> None:
        self.engine, self.prompts = engine, spread([*dict.fromkeys(prompts)])
        self.params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
        self.short = SamplingParams(max_tokens=min(WARM_UP_TOKENS, max_tokens), ignore_eos=ignore_eos)
        self.plain: dict[Text, list[int]] = {}  # each prompt's text, written plainly at batch 1
        self.differing: list[tuple[Text, list[int]]] = []  # prompts, and what was written in place of that
        self._engines: dict[tuple[str, ...], Engine] = {(engine.default_drafter,): engine}

    def measure(
        self,
        setups: Mapping[str, Setup],
        batches: Sequence[int],
        least: Callable[[int], int],
        say: Callable[[dict[str, Any]], None] = lambda row: None,
        repeats: int = 1,
    ) -> list[dict[str, Any]]:
        """A row for every batch size and setup, which alternate; `least` is how many texts a batch size gets.

        The first setup is plain, and the others are compared with it.
        """
        self.write_plainly()
        rows: list[dict[str, Any]] = []
        for batch in batches:
            prompts = self.prompts_for(least(batch))
            calls: dict[str, list[Call]] = {label: [] for label in setups}
            for repeat in range(repeats):
                for label in in_turn([*setups], repeat):
                    if repeat == 0:
                        self.write(setups[label], batch, prompts[: 2 * batch], self.short)
                    gc.collect()
                    gc.freeze()  # as where a model is loaded: a full collection would stop one call and not another
                    calls[label].append(self.write(setups[label], batch, prompts, self.params))
            found = {label: Call.joined(some) for label, some in calls.items()}
            base = next(iter(found.values()))
            for label, call in found.items():
                row = self._row(call, base, batch, prompts * repeats)
                rows.append({"batch": batch, "setup": label, **row})
                say(rows[-1])
        return rows

    def write_plainly(self) -> None:
        if not self.plain:
            call = self.write(Setup("none"), 1, self.prompts, self.params)
            self.plain = dict(zip(self.prompts, call.texts, strict=True))

    def prompts_for(self, count: int) -> list[Text]:
        """So many prompts: those there are, again and again."""
        return [self.prompts[i % len(self.prompts)] for i in range(count)]

    def write(self, setup: Setup, batch: int, prompts: Sequence[Text], params: SamplingParams) -> Call:
        engine, places = self._engine_of(setup), dict[int, int]()
        engine.max_batch = batch
        engine.captures.up_to(batch)
        before = dict(engine.stats.seconds)
        call = Call([[] for _ in prompts], perf_counter())
        for place, prompt in enumerate(prompts):
            # without a salt every prompt is read, and none found in the prefix cache
            drafter = setup.drafter_of(place)
            request = Request(prompt, params, drafter=drafter, budget=setup.budget, cache_salt=None)
            places[engine.submit(request)] = place
        while engine.busy:
            new = 0
            for event in engine.step():
                if event.error is not None:
                    raise event.error
                call.texts[places[event.seq_id]] += event.tokens
                call.rounds += 1
                if setup.drafter_of(places[event.seq_id]) == setup.drafter:
                    call.own = call.own[0] + len(event.tokens), call.own[1] + 1
                new += len(event.tokens)
            call.marks.append((perf_counter(), new))
        engine.settle()  # no round of this engine is unread when the next one begins
        call.parts = {part: spent - before.get(part, 0.0) for part, spent in engine.stats.seconds.items()}
        return call

    def _engine_of(self, setup: Setup) -> Engine:
        """A setup's own engine: what the controller learns of one decides nothing for another."""
        given, key = self.engine, (setup.drafter, *setup.others)
        if key not in self._engines and given.sibling is not None:
            made = given.sibling("none" if key == ("none",) else given.default_drafter)
            made.stats = given.stats
            for drafter in filter(given.drafters.has, key):
                made.drafters.add(drafter, given.drafters.get(drafter))
            self._engines[key] = made
        return self._engines.get(key, given)

    def _row(self, call: Call, base: Call, batch: int, prompts: Sequence[Text]) -> dict[str, Any]:
        rate, error, other = call.rate, call.error(), base.error()
        ratio, both = rate / base.rate, None if error is None or other is None else math.hypot(error, other)
        off = [pair for pair in zip(prompts, call.texts, strict=True) if pair[1] != self.plain[pair[0]]]
        self.differing += off
        return {
            "texts": len(prompts),
            "distinct": len(set(prompts)),
            "prompt_tokens": sum(map(len, prompts)),
            "tokens": call.tokens,
            "seconds": round(call.seconds, 4),
            "tokens_per_s": round(rate, 2),
            "interval": None if error is None else [round(rate * (1 - error), 2), round(rate * (1 + error), 2)],
            "ms_per_token": round(1e3 * batch / rate, 4),  # of one sequence
            "x_plain": round(ratio, 4),
            "x_interval": None if both is None else [round(ratio * (1 - both), 4), round(ratio * (1 + both), 4)],
            "tokens_per_round": round(call.tokens / max(1, call.rounds), 3),
            "own_tokens_per_round": round(call.own[0] / max(1, call.own[1]), 3),  # without those of other drafters
            "ms_by_part": {part: round(1e3 * spent, 2) for part, spent in call.parts.items()},
            "differing": len(off),
            "first_differences": [first_difference(text, self.plain[prompt]) for prompt, text in off[:16]],
        }


def parse_batches(text: str, flag: str = "--batches") -> list[int]:
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        raise InvalidInput(f"{flag} {text!r} are not numbers by comma, as 1,8,64") from None
    if min(sizes) < 1:
        raise InvalidInput(f"{flag} {text!r} must be 1 or more, by comma")
    return sizes
