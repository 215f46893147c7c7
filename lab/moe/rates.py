"""Tokens per second at fixed budgets, without drafting, and with the controller deciding; and what that says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.api.llm import LLM
from forerun.core.params import SamplingParams
from forerun.core.types import Budget
from lab.moe.passes import Text, seconds_now

BUDGETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24)
DEEPEST, WIDEST = 7, 10
ADAPTIVE = -1  # in place of a budget: the controller decides


@dataclass(frozen=True, slots=True)
class Rate:
    """One setting over all texts."""

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
