"""Experts woken and time taken by a pass over so many nodes of real text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from time import perf_counter, process_time

import torch

from forerun.api.llm import LLM
from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Needs, PlainSeq, TreeBatch
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


BUDGETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24)
DEEPEST, WIDEST = 7, 10
ADAPTIVE = -1  # in place of a budget: the controller decides


@dataclass(frozen=True, slots=True)
class Rate:
    tokens: int
    rounds: float
    seconds: float  # of CPU, or of the clock with a GPU

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def per_round(self) -> float:
        return self.tokens / self.rounds


def measure_rates(
    llm: LLM, texts: Sequence[Text], tokens: int, budgets: Sequence[int], forms: Mapping[int, Budget] = {}
) -> tuple[dict[int, Rate], bool]:
    """By budget; every text runs at all settings before the next, and all settings must write the same tokens.

    Prompts are read beforehand and found in the prefix cache, so that what is timed is decoding. On a GPU one text is
    first written at all settings, as their passes are captured then. `forms`: the shapes of trees of so many nodes.
    """
    found = {budget: Rate(0, 0.0, 0.0) for budget in budgets}
    params, same = SamplingParams(max_tokens=tokens, ignore_eos=True), True
    if llm.engine.target.device.type != "cpu":
        for budget in budgets:
            _write(llm, texts[0].prompt, params, budget, forms)
    for text in texts:
        llm.generate(text.prompt, SamplingParams(max_tokens=2))
        written = set()
        for budget in budgets:
            started = seconds_now(llm.engine.target.device)
            done = _write(llm, text.prompt, params, budget, forms)
            spent, before = seconds_now(llm.engine.target.device) - started, found[budget]
            found[budget] = Rate(before.tokens + tokens, before.rounds + done[1], before.seconds + spent)
            written.add(tuple(done[0]))
        same = same and len(written) == 1
    return found, same


def _write(
    llm: LLM, prompt: list[int], params: SamplingParams, budget: int, forms: Mapping[int, Budget]
) -> tuple[list[int], int]:
    if budget == 0:
        done = llm.generate(prompt, params, drafter="none")
    elif budget == ADAPTIVE:
        done = llm.generate(prompt, params)
    else:
        form = forms.get(budget, Budget(budget, min(budget, DEEPEST), WIDEST))
        done = llm.generate(prompt, params, budget=form)
    return done.token_ids, done.rounds


def best_budget(rates: dict[int, Rate]) -> int:
    """The budget with most tokens per second; 0 = drafting does not pay."""
    fixed = {budget: rate for budget, rate in rates.items() if budget != ADAPTIVE}
    return max(fixed, key=lambda budget: fixed[budget].per_second)


def pays_up_to(rates: dict[int, Rate]) -> int:
    """The largest budget that is no slower than plain decoding; 0 = none."""
    plain = rates[0].per_second
    return max((b for b, rate in rates.items() if b > 0 and rate.per_second >= plain), default=0)
