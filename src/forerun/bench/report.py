"""From runs to figures: speeds, ratios with their spread, tokens per round, and what is printed of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from forerun.bench.measure import Contender, Difference, Run
from forerun.bench.stats import Spread, bootstrap_mean, paired_ratio

WIDTH = 110  # columns of a table that is not on a terminal


class Ledger:
    """Runs, and the figures that can be asked of them."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self.repeats = sorted({run.repeat for run in self.runs})
        self.tasks = list(dict.fromkeys(run.task for run in self.runs))

    def of(self, contender: str, task: str | None = None, repeat: int | None = None) -> list[Run]:
        return [
            run
            for run in self.runs
            if run.contender == contender and task in (None, run.task) and repeat in (None, run.repeat)
        ]

    def rate(self, contender: str, task: str | None = None, repeat: int | None = None) -> float:
        """Tokens per second: all tokens by all seconds, prompts included."""
        return rate_of(self.of(contender, task, repeat))

    def decode_rate(self, contender: str) -> float | None:
        """Tokens per second without the passes over prompts."""
        runs = self.of(contender)
        if any(run.decode_seconds is None for run in runs):
            return None
        return sum(len(run.tokens) for run in runs) / sum(run.decode_seconds or 0.0 for run in runs)

    def speedup(self, contender: str, base: str, task: str | None = None) -> Spread:
        """Median, lowest and highest over repeats of the ratio of the two rates."""
        rates = ([self.rate(name, task, repeat) for repeat in self.repeats] for name in (contender, base))
        return paired_ratio(*rates)

    def mean_speedup(self, contender: str, base: str) -> Spread:
        """The mean over prompts, each counting the same, with its bootstrap interval."""
        prompts = dict.fromkeys(run.prompt for run in self.of(contender))
        ratios = []
        for prompt in prompts:
            ours, theirs = (
                rate_of([run for run in self.of(name) if run.prompt == prompt]) for name in (contender, base)
            )
            ratios.append(ours / theirs)
        return bootstrap_mean(ratios)

    def tokens_per_round(self, contender: str, task: str | None = None) -> float | None:
        runs = self.of(contender, task)
        rounds = sum(run.rounds or 0 for run in runs)
        return sum(len(run.tokens) for run in runs) / rounds if rounds else None


def rate_of(runs: Sequence[Run]) -> float:
    """Tokens per second of some runs together."""
    return sum(len(run.tokens) for run in runs) / sum(run.seconds for run in runs)


def summarise(
    ledger: Ledger, contenders: Sequence[Contender], found: Sequence[Difference], plain: str, blind: str
) -> dict[str, Any]:
    """Everything that was measured, as plain JSON values; `blind` is shown, but is nobody's worst case."""
    names = [contender.name for contender in contenders]
    drafters = [name for name in names if name != plain and not name.startswith("transformers")]
    by_task = {
        name: {task: _by_task(ledger, name, plain, task) for task in ledger.tasks} for name in drafters
    }
    spreads = {f"{name}_vs_{plain}": ledger.speedup(name, plain) for name in drafters}
    for base in (name for name in names if name.startswith("transformers")):
        spreads |= {
            f"{name}_vs_{base}": ledger.speedup(name, base) for name in names[names.index(base) + 1 :]
        }
    ratios = {name: round(spread.value, 4) for name, spread in spreads.items()}
    if weighed := [name for name in drafters if name != blind]:
        by_cell = [ledger.speedup(name, plain, task).value for name in weighed for task in ledger.tasks]
        ratios[f"worst_drafter_vs_{plain}"] = min(ratios[f"{name}_vs_{plain}"] for name in weighed)
        ratios[f"worst_task_vs_{plain}"] = round(min(by_cell), 4)
        ratios[f"best_task_vs_{plain}"] = round(max(by_cell), 4)
    return {
        "ratios": ratios,
        "spread": {name: [round(spread.low, 4), round(spread.high, 4)] for name, spread in spreads.items()},
        "mean_over_prompts": {
            f"{name}_vs_{plain}": _interval(ledger.mean_speedup(name, plain)) for name in drafters
        },
        "contenders": {name: _speeds(ledger, name) for name in names},
        "by_task": by_task,
        "equal": not found,
        "compared": sum(len(ledger.of(contender.name)) for contender in contenders if contender.exact),
        "differing": [
            {"contender": d.contender, "prompt": d.prompt, "repeat": d.repeat, "position": d.position}
            for d in found
        ],
    }


def _by_task(ledger: Ledger, name: str, plain: str, task: str) -> dict[str, float | None]:
    spread = ledger.speedup(name, plain, task)
    per_round = ledger.tokens_per_round(name, task)
    return {
        "speedup": round(spread.value, 4),
        "low": round(spread.low, 4),
        "high": round(spread.high, 4),
        "tokens_per_round": None if per_round is None else round(per_round, 3),
    }


def _speeds(ledger: Ledger, name: str) -> dict[str, float | None]:
    figures = {
        "tokens_per_second": ledger.rate(name),
        "decode_tokens_per_second": ledger.decode_rate(name),
        "tokens_per_round": ledger.tokens_per_round(name),
    }
    return {key: None if value is None else round(value, 3) for key, value in figures.items()}


def _interval(spread: Spread) -> dict[str, float]:
    return {"mean": round(spread.value, 4), "low": round(spread.low, 4), "high": round(spread.high, 4)}


def show(result: Mapping[str, Any], plain: str) -> None:
    """Print the tables that a person reads; the JSON line comes after them."""
    wide = Console()
    console = wide if wide.is_terminal else Console(width=WIDTH)
    for table in (_speed_table(result, plain), _task_table(result, plain), _cost_table(result["t"])):
        console.print(table)
    total, wrong = result["compared"], len(result["differing"])
    console.print(f"Texts: {total - wrong} of {total} equal what {result['conditions']['reference']} wrote.")


def _speed_table(result: Mapping[str, Any], plain: str) -> Table:
    bases = [name for name in ("transformers", plain) if name in result["contenders"]]
    table = Table(title="All tasks", box=box.SIMPLE, title_justify="left")
    for column in ("", "tokens/s", "decoding only", "tokens/round", *(f"x {base}" for base in bases)):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, figures in result["contenders"].items():
        cells = [_number(figures[key]) for key in figures]
        table.add_row(name, *cells, *(_ratio_cell(result, name, base) for base in bases))
    return table


def _ratio_cell(result: Mapping[str, Any], name: str, base: str) -> str:
    key = f"{name}_vs_{base}"
    if key not in result["ratios"]:
        return "1.00" if name == base else ""
    return str(Spread(result["ratios"][key], *result["spread"][key]))


def _task_table(result: Mapping[str, Any], plain: str) -> Table:
    table = Table(
        title=f"By task: x {plain} (lowest-highest of the repeats), tokens/round",
        box=box.SIMPLE,
        title_justify="left",
    )
    table.add_column("", no_wrap=True)
    for name in result["by_task"]:
        table.add_column(name, justify="right", no_wrap=True)
    for task in result["conditions"]["tasks"]:
        cells = [column[task] for column in result["by_task"].values()]
        spreads = [Spread(cell["speedup"], cell["low"], cell["high"]) for cell in cells]
        rows = zip(spreads, cells, strict=True)
        table.add_row(task, *(f"{s}  {_number(cell['tokens_per_round'])}" for s, cell in rows))
    return table


def _cost_table(curve: Mapping[str, float]) -> Table:
    table = Table(title="t(n): one pass over n nodes", box=box.SIMPLE, title_justify="left")
    table.add_column("n", no_wrap=True)
    for size in curve:
        table.add_column(size, justify="right", no_wrap=True)
    table.add_row("ms", *(f"{1000 * seconds:.1f}" for seconds in curve.values()))
    table.add_row("t(n)/t(1)", *(f"{seconds / curve['1']:.2f}" for seconds in curve.values()))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
