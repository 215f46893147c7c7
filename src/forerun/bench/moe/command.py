"""Prints experts woken, cost of a pass, acceptance and best budget of a mixture of experts beside its dense twin.

    python -m forerun.bench.moe --experts 8 --per-token 2

Both are made from a small model and write its text (twins.py), so acceptance is that of a real model and nearly equal,
and what differs is what nodes cost. On a CPU one thread and CPU seconds: the machine may be shared, though its caches
are too. On a GPU (`--device cuda --size 1b --drafter ngram`) the clock, and experts are not counted. Texts are greedy
answers to prompts of the built-in suite. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from math import nan
from typing import Any

import torch

from forerun.bench.machine import load_average, machine_facts
from forerun.bench.moe.passes import NODES, Passes, Text, chance, measure_passes
from forerun.bench.moe.rates import ADAPTIVE, BUDGETS, Rate, best_budget, measure_rates, pays_up_to
from forerun.bench.moe.twins import Place, llm_of, make_mixture, make_twin
from forerun.bench.suites import load_suite
from forerun.llm import LLM
from forerun.models.inflate import PRESETS
from forerun.models.load.checkpoint import open_checkpoint
from forerun.params import SamplingParams

ROUTER_TOKENS = 200  # of each text that routers are balanced on


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print tables and the document."""
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.moe", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="a small Llama model")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--per-token", type=int, default=2)
    parser.add_argument("--mode", choices=["q8", "bfloat16", "float32"], default="q8", help="on a CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", choices=["", *PRESETS], default="", help="make both larger first")
    parser.add_argument("--drafter", default="eagle3")
    parser.add_argument("--prompts", type=int, default=8, help="texts that are measured on")
    parser.add_argument("--tokens", type=int, default=64, help="written per text")
    parser.add_argument(
        "--budgets", type=int, nargs="*", default=BUDGETS, help="beside 0 and the controller's own"
    )
    flags, load = parser.parse_args(words), load_average()
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(flags.model)
    tokenizer = checkpoint.tokenizer()
    prompts = [list(tokenizer.chat_ids(list(item.messages))) for item in load_suite(limit=3)]
    prompts = sorted(prompts, key=len)[: 2 * flags.prompts]
    mine, others = prompts[::2], [prompt[:ROUTER_TOKENS] for prompt in prompts[1::2]]
    place = Place(flags.device, flags.mode, flags.size)
    mixture = make_mixture(checkpoint, others, flags.experts, flags.per_token, place)
    targets = {"mixture": mixture, "dense twin": make_twin(checkpoint, flags.per_token, place)}
    llms = {name: llm_of(checkpoint, target, flags.drafter) for name, target in targets.items()}
    texts = [Text(prompt, _answer(llms["mixture"], prompt, flags.tokens)) for prompt in mine]
    passes = {name: measure_passes(target, texts) for name, target in targets.items()}
    budgets = sorted({0, *flags.budgets} - {ADAPTIVE})
    rates = {
        name: measure_rates(llm, texts, flags.tokens, (*budgets, ADAPTIVE)) for name, llm in llms.items()
    }
    show_passes(passes, flags.experts, flags.per_token)
    for name, (found, same) in rates.items():
        show_rates(name, found, same)
    conditions = {**machine_facts(), "load_before": load, "load_after": load_average(), **vars(flags)}
    print(json.dumps(document(passes, rates, conditions)))
    return 0 if all(same for _, same in rates.values()) else 1


def _answer(llm: LLM, prompt: list[int], tokens: int) -> list[int]:
    return llm.generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), drafter="none").token_ids


def show_passes(passes: dict[str, Passes], experts: int, per_token: int) -> None:
    """A line for each number of nodes."""
    mixture, twin = passes["mixture"], passes["dense twin"]
    print(f"{'nodes':>5} {'woken':>6} {'chance':>7} {'mixture ms':>11} {'x':>5} {'dense ms':>9} {'x':>5}")
    for size in NODES:
        ours, theirs = mixture.seconds[size], twin.seconds[size]
        woken, most = mixture.woken.get(size, nan), chance(experts, per_token, size)
        print(
            f"{size:>5} {woken:>6.2f} {most:>7.2f} {ours * 1e3:>11.2f} {ours / mixture.seconds[1]:>5.2f} "
            f"{theirs * 1e3:>9.2f} {theirs / twin.seconds[1]:>5.2f}"
        )


def show_rates(name: str, rates: dict[int, Rate], same: bool) -> None:
    """A line for each budget."""
    plain = rates[0].per_second
    print(f"{name}: budget, tokens per round, tokens per second, times plain")
    for budget, rate in rates.items():
        label = "adaptive" if budget == ADAPTIVE else str(budget)
        ratio = rate.per_second / plain
        print(f"  {label:>8} {rate.per_round:>6.2f} {rate.per_second:>8.1f} {ratio:>6.2f}")
    best, last = best_budget(rates), pays_up_to(rates)
    print(f"  best budget {best}; pays up to {last} nodes; texts {'equal' if same else 'DIFFER'}")


def document(
    passes: dict[str, Passes], rates: dict[str, tuple[dict[int, Rate], bool]], conditions: dict[str, Any]
) -> dict[str, Any]:
    """Everything as JSON."""
    found: dict[str, Any] = {"benchmark": "moe", "conditions": conditions}
    for name, one in passes.items():
        settings, same = rates[name]
        found[name] = {
            "woken": {str(size): round(value, 3) for size, value in one.woken.items()},
            "seconds": {str(size): round(value, 6) for size, value in one.seconds.items()},
            "tokens_per_round": {str(b): round(rate.per_round, 3) for b, rate in settings.items()},
            "tokens_per_s": {str(b): round(rate.per_second, 2) for b, rate in settings.items()},
            "best_budget": best_budget(settings),
            "pays_up_to": pays_up_to(settings),
            "texts_equal": same,
        }
    return found
