"""Figures from benchmark runs: speeds, ratios with 95% intervals, tokens per round, acceptance, time by part.

The interval of a ratio says how far other prompts of the same kind, and other repeats, would move a speed-up. What
drafting gains varies from prompt to prompt, and the machine from repeat to repeat. Both show in how the ratio changes
when one prompt, with all its repeats, is left out: the jackknife over prompts, on the logarithm of the ratio. With few
prompts that estimate is itself uncertain, so Student's t with one degree less than there are prompts sets the width; a
percentile bootstrap over two prompts would hold the truth half of the time. One prompt gives no interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from forerun.core.errors import InvalidInput
from forerun.engine.sequence import Decodes, Detokenizer
from forerun.engine.stats import PARTS
from forerun.measure.bench.alternate import Contender, Difference, Drafts, Group, Run, agreement
from forerun.measure.bench.settings import PLAIN

# by degrees of freedom, two-sided 95%
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_Z = 1.959964
_One = TypeVar("_One")


@dataclass(frozen=True, slots=True)
class Spread:
    """A ratio and its 95% interval; None where there was one prompt only."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} ({_end(self.low)}-{_end(self.high)})"

    @property
    def interval(self) -> str:
        return "" if self.low is None or self.high is None else f"{_end(self.low)} to {_end(self.high)}"

    def as_document(self, name: str = "value") -> dict[str, float | None]:
        """The figure under this name, and the ends of its interval, as plain JSON values; null where there is none."""
        low, high = interval_of(self) or (None, None)
        return {name: round(self.value, 4), "low": low, "high": high}

    @property
    def is_clear(self) -> bool:
        """Is 1 outside the interval? Without an interval nothing is clear."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high


def _end(value: float) -> str:
    """An end of an interval; two prompts that disagree give one too large to print in full."""
    if value < 0.01:
        return "<0.01"
    return f"{value:.2f}" if value < 100 else ">100"


class Pair(NamedTuple):
    """One of ours and one of the base's, made next to each other."""

    tokens: float
    seconds: float
    base_tokens: float
    base_seconds: float


def mean_interval(values: Sequence[float]) -> Spread:
    """The geometric mean of the ratios of several prompts, every prompt counting alike."""
    if not values:
        raise InvalidInput("there is nothing to average; measure at least one prompt")
    return _jackknife(values, statistics.geometric_mean)


def ratio_interval(prompts: Sequence[Sequence[Pair]]) -> Spread:
    """All our tokens per second by all the base's; each prompt comes with the pairs of its repeats."""
    if not prompts or not all(prompts):
        raise InvalidInput("there is nothing to divide; measure at least one prompt")
    return _jackknife(prompts, lambda some: ratio_of([pair for pairs in some for pair in pairs]))


def ratio_of(pairs: Sequence[Pair]) -> float:
    """Tokens per second of ours by those of the base, each over all pairs together."""
    tokens, seconds, base_tokens, base_seconds = map(sum, zip(*pairs, strict=True))
    return (tokens / seconds) / (base_tokens / base_seconds)


def t_quantile(degrees: int) -> float:
    """Student's t that 95% of draws stay within, on both sides; beyond ten degrees by its expansion."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    first = (_Z**3 + _Z) / 4
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    return _Z + first / degrees + second / degrees**2


def _jackknife(items: Sequence[_One], ratio: Callable[[Sequence[_One]], float]) -> Spread:
    count = len(items)
    left_out = [ratio([*items[:i], *items[i + 1 :]]) for i in range(count)] if count > 1 else []
    return jackknife(ratio(items), left_out)


def jackknife(value: float, left_out: Sequence[float]) -> Spread:
    """A ratio with its interval, from the ratios that leave one item out each; none of fewer than two items."""
    count = len(left_out)
    if count < 2:
        return Spread(value)
    logs = [math.log(one) for one in left_out]
    middle = statistics.fmean(logs)
    error = math.sqrt((count - 1) / count * sum((one - middle) ** 2 for one in logs))
    width = math.exp(t_quantile(count - 1) * error)
    return Spread(value, value / width, value * width)


class Accepted(NamedTuple):
    accepted: int  # trees whose accepted path reached this depth
    drafted: int  # trees that reached it

    @property
    def share(self) -> float:
        return self.accepted / self.drafted


def acceptance_by_depth(texts: Iterable[Drafts]) -> list[Accepted]:
    """Rounds of some sequences, counted by the depth that trees and accepted paths reached."""
    rounds = [one for text in texts for one in text]
    deepest = max((depth for _, depth, _ in rounds), default=0)
    found = []
    for level in range(1, deepest + 1):
        reached = [kept >= level for _, depth, kept in rounds if depth >= level]
        found.append(Accepted(sum(reached), len(reached)))
    return found


def acceptance_document(found: Sequence[Accepted]) -> dict[str, Any]:
    """Acceptance as plain JSON values: the shares, and [accepted, drafted] beside them."""
    return {
        "accepted_per_position": [round(one.share, 4) for one in found],
        "accepted_counts": [list(one) for one in found],
    }


CONTEXTS = {2048: "<2k", 8192: "2-8k", 32768: "8-32k", math.inf: ">32k"}  # tokens before a round, fewer than


def acceptance_by_context(texts: Iterable[tuple[int, Drafts]]) -> dict[str, dict[str, Any]]:
    """Tokens per round, and [accepted, drafted] at depth 1, by what a round's context was; of prompts' lengths with
    the rounds behind them. Nothing where all contexts are in one range: then these are the figures over everything.
    """
    found: dict[float, list[int]] = {}
    for at, rounds in texts:
        for _, depth, kept in rounds:
            counts = found.setdefault(next(end for end in CONTEXTS if at < end), [0, 0, 0, 0])
            for i, more in enumerate((1, kept + 1, kept > 0, depth > 0)):
                counts[i] += more
            at += kept + 1
    if len(found) < 2:
        return {}
    return {
        CONTEXTS[end]: {"tokens_per_round": round(tokens / rounds, 3), "accepted_counts": counts}
        for end, (rounds, tokens, *counts) in sorted(found.items())
    }


class Figures:
    def __init__(self, runs: Sequence[Run], groups: Sequence[Group] = ()) -> None:
        self.runs, self._groups = list(runs), {one.id: one for one in groups}
        self.tasks = list(dict.fromkeys(run.task for run in self.runs))
        self.prompts = list(dict.fromkeys(run.prompt for run in self.runs))

    def of(self, contender: str, task: str | None = None) -> list[Run]:
        return [run for run in self.runs if run.contender == contender and task in (None, run.task)]

    def rate(self, contender: str, task: str | None = None) -> float:
        """Tokens per second: all tokens by all seconds, prompts included."""
        return rate_of(self.of(contender, task))

    def decode_rate(self, contender: str) -> float | None:
        """Tokens per second without the passes over prompts."""
        runs = self.of(contender)
        if any(run.decode_seconds is None for run in runs):
            return None
        return sum(run.tokens for run in runs) / sum(run.decode_seconds or 0.0 for run in runs)

    def speedup(self, contender: str, base: str, task: str | None = None) -> Spread:
        """The ratio of the two rates over everything, with its 95% interval."""
        ours = {run.key[1:]: run for run in self.of(contender, task)}
        theirs = {run.key[1:]: run for run in self.of(base, task)}
        by_prompt: dict[str, list[Pair]] = {}
        for (prompt, repeat), run in ours.items():
            other = theirs[prompt, repeat]
            pair = Pair(run.tokens, run.seconds, other.tokens, other.seconds)
            by_prompt.setdefault(prompt, []).append(pair)
        return ratio_interval(list(by_prompt.values()))

    def by_prompt(self, contender: str, base: str) -> dict[str, float]:
        rates: dict[str, dict[str, list[Run]]] = {contender: {}, base: {}}
        for run in self.runs:
            if run.contender in rates:
                rates[run.contender].setdefault(run.prompt, []).append(run)
        return {prompt: rate_of(runs) / rate_of(rates[base][prompt]) for prompt, runs in rates[contender].items()}

    def tokens_per_round(self, contender: str, task: str | None = None) -> float | None:
        """Committed tokens of a sequence divided by its rounds, bonus included."""
        runs = self.of(contender, task)
        if any(run.drafts for run in runs):
            rounds = sum(len(text) for run in runs for text in run.drafts)
        else:
            rounds = sum(run.rounds or 0 for run in runs)
        return sum(run.tokens for run in runs) / rounds if rounds else None

    def accepted(self, contender: str, task: str | None = None) -> list[Accepted]:
        return acceptance_by_depth(text for run in self.of(contender, task) for text in run.drafts)

    def acceptance(self, contender: str) -> list[float]:
        """Of the rounds whose tree reached depth 1, 2, ...: the share whose path did."""
        return [one.share for one in self.accepted(contender)]

    def by_context(self, contender: str) -> dict[str, dict[str, Any]]:
        """See `acceptance_by_context`; nothing where prompts are not known."""
        runs = [run for run in self.of(contender) if run.prompt in self._groups]
        texts = [
            (len(prompt.ids), rounds)
            for run in runs
            for prompt, rounds in zip(self._groups[run.prompt].prompts, run.drafts, strict=False)
        ]
        return acceptance_by_context(texts)

    def seconds(self, contender: str) -> dict[str, float] | None:
        """Where the time went, over everything: passes over prompts, and the parts of rounds."""
        runs = self.of(contender)
        if not any(run.passes for run in runs):
            return None
        spent = dict.fromkeys(PARTS, 0.0)
        for one in (one for run in runs for one in run.passes):
            for part, seconds in one.items():
                spent[part] += seconds
        return spent | {"prompt": sum(run.seconds - (run.decode_seconds or 0.0) for run in runs)}


def rate_of(runs: Sequence[Run]) -> float:
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def summarise(
    figures: Figures, contenders: Sequence[Contender], found: Sequence[Difference], fixed: str = ""
) -> dict[str, Any]:
    """Everything that was measured in a cell, as plain JSON values.

    `fixed` names a contender that is reported but not counted as the worst drafter.
    """
    names = [contender.name for contender in contenders]
    ours = names[names.index(PLAIN) :]
    drafters = ours[1:]
    by_task = {name: {task: _by_task(figures, name, task) for task in figures.tasks} for name in drafters}
    ratios_of = _all_ratios(figures, names)
    ratios: dict[str, float] = {name: round(spread.value, 4) for name, spread in ratios_of.items()}
    if weighed := [name for name in drafters if name != fixed]:
        cells = [by_task[name][task]["speedup"] for name in weighed for task in figures.tasks]
        ratios[f"worst_drafter_vs_{PLAIN}"] = min(ratios[f"{name}_vs_{PLAIN}"] for name in weighed)
        ratios[f"worst_task_vs_{PLAIN}"], ratios[f"best_task_vs_{PLAIN}"] = min(cells), max(cells)
    exact = [contender.name for contender in contenders if contender.exact]
    compared = sum(len(run.texts) for name in exact for run in figures.of(name))
    return {
        "ratios": ratios,
        "intervals": {name: interval_of(spread) for name, spread in ratios_of.items()},
        "speedup": {name: ratios_of[f"{name}_vs_{PLAIN}"].as_document("speedup") for name in drafters},
        "mean_over_prompts": {
            f"{name}_vs_{PLAIN}": mean_interval([*figures.by_prompt(name, PLAIN).values()]).as_document("mean")
            for name in drafters
        },
        "contenders": {name: _figures(figures, name) for name in names},
        "by_task": by_task,
        "by_task_vs_peers": {
            base: {
                name: {task: figures.speedup(name, base, task).as_document("speedup") for task in figures.tasks}
                for name in ours
            }
            for base in names[: names.index(PLAIN)]
        },
        "equal_to_own_plain": {
            name: {"plain": other, "equal": equal, "texts": texts}
            for name, (other, equal, texts) in agreement(figures.runs, contenders).items()
        },
        "equal": None if len(exact) < 2 else not found,
        "compared": compared,
        "differing": [
            {"contender": d.contender, "prompt": d.prompt, "repeat": d.repeat, "position": d.position} for d in found
        ],
    }


def _all_ratios(figures: Figures, names: Sequence[str]) -> dict[str, Spread]:
    """Ours over our plain loop, and every contender over every peer that is listed before it."""
    first = names.index(PLAIN)
    pairs = [(name, PLAIN) for name in names[first + 1 :]]
    pairs += [(name, base) for i, base in enumerate(names[:first]) for name in names[i + 1 :]]
    return {f"{name}_vs_{base}": figures.speedup(name, base) for name, base in pairs}


def _by_task(figures: Figures, name: str, task: str) -> dict[str, Any]:
    per_round = figures.tokens_per_round(name, task)
    return {
        **figures.speedup(name, PLAIN, task).as_document("speedup"),
        "tokens_per_round": None if per_round is None else round(per_round, 3),
        **acceptance_document(figures.accepted(name, task)),
    }


def _figures(figures: Figures, name: str) -> dict[str, Any]:
    rates = {
        "tokens_per_second": figures.rate(name),
        "decode_tokens_per_second": figures.decode_rate(name),
        "tokens_per_round": figures.tokens_per_round(name),
    }
    spent = figures.seconds(name)
    return {
        **{key: None if value is None else round(value, 3) for key, value in rates.items()},
        **acceptance_document(figures.accepted(name)),
        "by_context": figures.by_context(name),
        "seconds": None if spent is None else {part: round(value, 4) for part, value in spent.items()},
    }


def interval_of(spread: Spread) -> list[float] | None:
    """The ends of an interval as plain JSON values; None where there is none."""
    if spread.low is None or spread.high is None:
        return None
    return [round(spread.low, 4), round(spread.high, 4)]


def samples(figures: Figures, drafter: str, tokenizer: Decodes, each: int = 2) -> list[dict[str, Any]]:
    """The texts that gained most, best first, then those that gained least, worst last."""
    gains = sorted(figures.by_prompt(drafter, PLAIN).items(), key=lambda pair: -pair[1])
    chosen = gains if len(gains) <= 2 * each else [*gains[:each], *gains[-each:]]
    found = []
    for prompt, gain in chosen:
        run = next(run for run in figures.of(drafter) if run.prompt == prompt)
        rounds = len(run.drafts[0]) if run.drafts else 0
        found.append(
            {
                "prompt": prompt,
                "task": run.task,
                "drafter": drafter,
                "speedup": round(gain, 4),
                "tokens_per_round": round(len(run.texts[0]) / rounds, 3) if rounds else None,
                "pieces": pieces(run.texts[0], run.drafts[0] if run.drafts else (), tokenizer),
            }
        )
    return found


def pieces(tokens: Sequence[int], rounds: Drafts, tokenizer: Decodes) -> list[list[Any]]:
    """[text, was it drafted?] of every token; a character that spans tokens belongs to the last of them."""
    drafted = [flag for _, _, accepted in rounds for flag in [*[True] * accepted, False]]
    drafted += [False] * (len(tokens) - len(drafted))
    detokenizer, shown, found = Detokenizer(tokenizer), 0, []
    for token, flag in zip(tokens, drafted, strict=False):
        detokenizer.push(token)
        found.append([detokenizer.text[shown:], flag])
        shown = len(detokenizer.text)
    return [piece for piece in found if piece[0]]
