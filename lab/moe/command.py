"""Prints experts woken, cost of a pass, acceptance and best budget of a mixture of experts beside its dense twin.

    python -m lab moe --experts 8 --per-token 2

Both are made from a small model and write its text (twins.py), so acceptance is that of a real model and nearly equal,
and what differs is what nodes cost. On a CPU one thread and CPU seconds: the machine may be shared, though its caches
are too. On a GPU (`--device cuda --size 1b`) the clock; with a head, trees have the forms that it offers there. Texts
are greedy answers to prompts of the built-in suite.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace

import torch

from forerun.api.llm import LLM
from forerun.control.cost import CostModel
from forerun.core.params import SamplingParams
from forerun.core.types import Budget
from forerun.drafters.device.plan import FORMS
from forerun.measure.bench.suites import load_suite
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from lab.inflate.model import PRESETS
from lab.moe.passes import (
    ADAPTIVE,
    BUDGETS,
    NODES,
    Passes,
    Rate,
    Text,
    best_budget,
    chance,
    measure_passes,
    measure_rates,
    pays_up_to,
)
from lab.moe.twins import Place, llm_of, make_mixture, make_twin
from lab.runner import Document, Run, share

ROUTER_TOKENS = 200  # of each text that routers are balanced on
MIXTURE, TWIN = "mixture", "dense twin"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    share(parser, model="smollm2", device="cpu")
    add("--experts", type=int, default=8)
    add("--per-token", type=int, default=2)
    add("--mode", choices=["q8", "bfloat16", "float32"], default="q8", help="on a CPU")
    add("--size", choices=["", *PRESETS], default="", help="make both larger first")
    add("--drafter", default="eagle3")
    add("--prompts", type=int, default=8, help="texts that are measured on")
    add("--tokens", type=int, default=64, help="written per text")
    add("--budgets", type=int, nargs="*", help="beside 0 and the controller's own")
    add("--cut", action="store_true", help="fixed trees too leave out nodes that do not gain what they cost")


def measure(run: Run) -> Document:
    flags = run.flags
    if flags.device == "cpu":
        torch.set_num_threads(1)
    forms = (
        {one.nodes: Budget(*one.sizes) for one in FORMS} if flags.device != "cpu" and flags.drafter != "ngram" else {}
    )
    budgets = sorted({0, *(flags.budgets or sorted(forms) or BUDGETS)} - {ADAPTIVE})
    bench = Twins(open_checkpoint(flags.model), flags)
    passes, rates, texts = dict[str, Passes](), dict[str, tuple[dict[int, Rate], bool]](), list[Text]()
    for name in (MIXTURE, TWIN):
        llm = bench.load(name)
        texts = texts or [Text(prompt, _answer(llm, prompt, flags.tokens)) for prompt in bench.prompts]
        run.say(f"{name}: loaded, texts written")
        passes[name] = measure_passes(llm.engine.target, texts)
        run.say(f"{name}: ms of a pass {_in_short(passes[name].seconds, 1e3)}; woken {_in_short(passes[name].woken)}")
        price = CostModel(passes[name].seconds).price_for_all(max(NODES), 1) if flags.cut else None
        priced = {nodes: replace(form, price=price) for nodes, form in forms.items()}
        rates[name] = measure_rates(llm, texts, flags.tokens, (*budgets, ADAPTIVE), priced)
        show_rates(name, *rates[name])
        del llm
        gc.collect()  # on a GPU both may not fit
    show_passes(passes, flags.experts, flags.per_token)
    return document(passes, rates)


class Twins:
    """Both models, loaded one after the other, and the prompts that they are measured on."""

    def __init__(self, checkpoint: Checkpoint, flags: argparse.Namespace) -> None:
        self.checkpoint, self.flags = checkpoint, flags
        tokenizer = checkpoint.tokenizer()
        found = [list(tokenizer.chat_ids(list(item.messages))) for item in load_suite(limit=3)]
        found = sorted(found, key=len)[: 2 * flags.prompts]
        self.prompts = found[::2]
        self.others = [prompt[:ROUTER_TOKENS] for prompt in found[1::2]]  # for routers
        self.place = Place(flags.device, flags.mode, flags.size)

    def load(self, name: str) -> LLM:
        checkpoint, flags, place = self.checkpoint, self.flags, self.place
        target = make_twin(checkpoint, flags.per_token, place) if name == TWIN else None
        target = target or make_mixture(checkpoint, self.others, flags.experts, flags.per_token, place)
        return llm_of(checkpoint, target, flags.drafter, flags.size)


def _in_short(by_nodes: dict[int, float], unit: float = 1.0) -> str:
    return ", ".join(f"{nodes}: {value * unit:.2f}" for nodes, value in by_nodes.items())


def _answer(llm: LLM, prompt: list[int], tokens: int) -> list[int]:
    return llm.generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), drafter="none").token_ids


def show_passes(passes: dict[str, Passes], experts: int, per_token: int) -> None:
    mixture, twin = passes["mixture"], passes["dense twin"]
    print(f"{'nodes':>5} {'woken':>6} {'chance':>7} {'mixture ms':>11} {'x':>5} {'dense ms':>9} {'x':>5}")
    for size in NODES:
        ours, theirs = mixture.seconds[size], twin.seconds[size]
        woken, most = mixture.woken.get(size, float("nan")), chance(experts, per_token, size)
        print(
            f"{size:>5} {woken:>6.2f} {most:>7.2f} {ours * 1e3:>11.2f} {ours / mixture.seconds[1]:>5.2f} "
            f"{theirs * 1e3:>9.2f} {theirs / twin.seconds[1]:>5.2f}"
        )


def show_rates(name: str, rates: dict[int, Rate], same: bool) -> None:
    plain = rates[0].per_second
    print(f"{name}: budget, tokens per round, tokens per second, times plain")
    for budget, rate in rates.items():
        label = "adaptive" if budget == ADAPTIVE else str(budget)
        print(f"  {label:>8} {rate.per_round:>6.2f} {rate.per_second:>8.1f} {rate.per_second / plain:>6.2f}")
    ends = f"best budget {best_budget(rates)}; pays up to {pays_up_to(rates)} nodes"
    print(f"  {ends}; texts {'equal' if same else 'DIFFER'}")


def document(passes: dict[str, Passes], rates: dict[str, tuple[dict[int, Rate], bool]]) -> Document:
    found: Document = {"equal": all(same for _, same in rates.values())}
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
