"""Benchmark of coupled against exact verification above temperature 0: tokens per round and time.

    python -m forerun.bench.verifiers --drafters ngram eagle3 --temperatures 0.7 1.0 --limit 3

Coupled verification makes a text a function of its seed, whatever the drafter; this shows what that costs where
no seed was given. The two verifiers alternate prompt by prompt, one text at a time, each with a seed of its
own per text. Time is the CPU time of this process per token after the first round, so a busy machine shifts it little.
Ratios are coupled / exact, paired by prompt, with a 95% interval. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from time import process_time
from typing import Any

from forerun.bench.suites import Item, load_suite
from forerun.llm import LLM, Completion
from forerun.messages import budget_of
from forerun.params import EngineConfig, SamplingParams
from forerun.types import Budget, Event

VERIFIERS = ("exact", "coupled")
SEED = 20261115


def measure(
    llm: LLM, drafter: str, items: Sequence[Item], temperature: float, tokens: int, budget: Budget | None
) -> dict[str, Any]:
    """Both verifiers over the same prompts, alternating; the ratios are of one prompt's two texts."""
    rates: dict[str, list[float]] = {name: [] for name in VERIFIERS}
    times: dict[str, list[float]] = {name: [] for name in VERIFIERS}
    for i, item in enumerate(items):
        order = VERIFIERS if i % 2 else VERIFIERS[::-1]
        for name in order:
            params = SamplingParams(
                max_tokens=tokens, temperature=temperature, seed=SEED + i, ignore_eos=True
            )
            stream = llm.stream(list(item.messages), params, drafter=drafter, verifier=name, budget=budget)
            first = next(stream)  # with the prompt's pass
            assert isinstance(first, Event), "a text starts with an event"
            started, tokens_before = process_time(), len(first.tokens)
            *_, done = stream
            assert isinstance(done, Completion), "a stream ends with its completion"
            times[name].append((process_time() - started) / (done.tokens - tokens_before))
            rates[name].append(done.tokens / done.rounds)
    return {
        "drafter": drafter,
        "temperature": temperature,
        "budget": budget.nodes if budget else "what pays",
        "prompts": len(items),
        **{f"tokens_per_round_{name}": round(statistics.fmean(rates[name]), 3) for name in VERIFIERS},
        "tokens_per_round_ratio": ratio(rates["coupled"], rates["exact"]),
        **{f"cpu_ms_per_token_{name}": round(1e3 * statistics.fmean(times[name]), 3) for name in VERIFIERS},
        "cpu_time_ratio": ratio(times["coupled"], times["exact"]),
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The geometric mean of the paired ratios, and its 95% interval."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    middle = statistics.fmean(logs)
    half = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return [round(math.exp(value), 4) for value in (middle, middle - half, middle + half)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; the last line is the document."""
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.verifiers", description=__doc__)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafters", nargs="*", default=["none", "ngram", "eagle3"])
    parser.add_argument("--budgets", nargs="*", default=["auto", "5"], help="nodes a round, or auto")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.7, 1.0])
    parser.add_argument("--suite", default="builtin")
    parser.add_argument("--limit", type=int, help="prompts per task")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    items = load_suite(given.suite, limit=given.limit)
    llm = LLM.load(given.target, drafter=given.drafters[-1], config=EngineConfig(device=given.device))
    rows = []
    for drafter in given.drafters:
        for asked in given.budgets if drafter != "none" else ["auto"]:
            budget = None if asked == "auto" else budget_of(int(asked), width=1)
            for temperature in given.temperatures:
                row = measure(llm, drafter, items, temperature, given.max_tokens, budget)
                print(json.dumps(row), flush=True)
                rows.append(row)
    made = datetime.now(UTC).isoformat(timespec="seconds")
    print(json.dumps({"made": made, "suite": given.suite, "max_tokens": given.max_tokens, "rows": rows}))


if __name__ == "__main__":
    main()
