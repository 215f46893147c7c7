"""Figures from benchmark runs: speeds, ratios with 95% intervals, tokens per round, acceptance, time by part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from forerun.engine.detokenize import Decodes, Detokenizer
from forerun.engine.stats import PARTS
from forerun.measure.bench.alternate import Contender, Difference, Drafts, Run, agreement
from forerun.measure.bench.settings import PLAIN
from forerun.measure.bench.stats import Pair, Spread, mean_interval, ratio_interval


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


class Figures:
    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
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
        "speedup": {name: _interval(ratios_of[f"{name}_vs_{PLAIN}"], "speedup") for name in drafters},
        "mean_over_prompts": {
            f"{name}_vs_{PLAIN}": _interval(mean_interval([*figures.by_prompt(name, PLAIN).values()]), "mean")
            for name in drafters
        },
        "contenders": {name: _figures(figures, name) for name in names},
        "by_task": by_task,
        "by_task_vs_peers": {
            base: {name: _by_task_vs(figures, name, base) for name in ours} for base in names[: names.index(PLAIN)]
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
        **_interval(figures.speedup(name, PLAIN, task), "speedup"),
        "tokens_per_round": None if per_round is None else round(per_round, 3),
        **acceptance_document(figures.accepted(name, task)),
    }


def _by_task_vs(figures: Figures, name: str, base: str) -> dict[str, dict[str, float | None]]:
    return {task: _interval(figures.speedup(name, base, task), "speedup") for task in figures.tasks}


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
        "seconds": None if spent is None else {part: round(value, 4) for part, value in spent.items()},
    }


def interval_of(spread: Spread) -> list[float] | None:
    """The ends of an interval as plain JSON values; None where there is none."""
    if spread.low is None or spread.high is None:
        return None
    return [round(spread.low, 4), round(spread.high, 4)]


def _interval(spread: Spread, name: str) -> dict[str, float | None]:
    low, high = interval_of(spread) or (None, None)
    return {name: round(spread.value, 4), "low": low, "high": high}


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
