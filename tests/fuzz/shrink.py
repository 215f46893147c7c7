"""Makes a scenario that fails smaller: fewer requests, fewer orders, shorter prompts, simpler settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic

from forerun.core.params import SamplingParams
from forerun.core.types import Request
from tests.fuzz.play import Wrong, play
from tests.fuzz.scenario import Order, Scenario, Setting

Fails = Callable[[Scenario], bool]


def fails(scenario: Scenario) -> bool:
    try:
        play(scenario)
    except Wrong:
        return True
    return False


def shrink(scenario: Scenario, seconds: float = 120.0, still: Fails = fails) -> Scenario:
    """The smallest that was found in this time, and that fails as well."""
    end, goes_on = monotonic() + seconds, True
    while goes_on and monotonic() < end:
        goes_on = False
        for smaller in _smaller(scenario):
            if monotonic() > end:
                break
            if still(smaller):
                scenario, goes_on = smaller, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Large steps first."""
    count = len(scenario.requests)
    size = count // 2
    while size:
        for first in range(0, count, size):
            if size < count:
                yield _without(scenario, set(range(first, first + size)))
        size //= 2
    for setting in _simpler_settings(scenario.setting):
        yield replace(scenario, setting=setting)
    for i, orders in enumerate(scenario.steps):
        for j, order in enumerate(orders):
            if order.kind != "submit":
                yield _with_steps(scenario, i, orders[:j] + orders[j + 1 :])
        if not orders:
            yield replace(scenario, steps=scenario.steps[:i] + scenario.steps[i + 1 :])
    for i, one in enumerate(scenario.requests):
        for simpler in _simpler_requests(one):
            yield replace(scenario, requests=(*scenario.requests[:i], simpler, *scenario.requests[i + 1 :]))


def _with_steps(scenario: Scenario, at: int, orders: tuple[Order, ...]) -> Scenario:
    return replace(scenario, steps=(*scenario.steps[:at], orders, *scenario.steps[at + 1 :]))


def _without(scenario: Scenario, dropped: set[int]) -> Scenario:
    """The same without some requests; the others get other numbers."""
    kept = [i for i in range(len(scenario.requests)) if i not in dropped]
    numbers = {old: new for new, old in enumerate(kept)}

    def renumbered(order: Order) -> Order | None:
        if order.kind not in ("submit", "abort"):
            return order
        return replace(order, which=numbers[order.which]) if order.which in numbers else None

    steps = [tuple(one for order in orders if (one := renumbered(order))) for orders in scenario.steps]
    return replace(scenario, requests=tuple(scenario.requests[i] for i in kept), steps=tuple(steps))


def _simpler_settings(setting: Setting) -> Iterator[Setting]:
    changes: list[dict[str, object]] = [
        {"captures": False}, {"most_rows": 1024}, {"pages": 200}, {"controller": "forms"},
        {"forms": setting.forms[:1]}, {"prompt_rows": setting.prompt_rows[:1]}, {"shape": "llama"},
        {"batch": max(1, setting.batch // 2)}, {"follows": False}, {"repeats": 60},
    ]  # fmt: skip
    for change in changes:
        simpler = replace(setting, **change)  # type: ignore[arg-type]
        if simpler != setting:
            yield simpler


def _simpler_requests(request: Request) -> Iterator[Request]:
    params, plain = request.params, SamplingParams()
    for name in ("logprobs", "stop", "processors", "stop_token_ids", "min_tokens", "top_k", "top_p", "min_p",
                 "temperature", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
                 "bad_words"):  # fmt: skip
        if getattr(params, name) != getattr(plain, name):
            yield replace(request, params=replace(params, **{name: getattr(plain, name)}))
    for name in ("budget", "cache_salt", "shows_rejected", "prediction"):
        usual = Request((1,), plain)
        if getattr(request, name) != getattr(usual, name):
            yield replace(request, **{name: getattr(usual, name)})
    if len(request.prompt) > 3:
        yield replace(request, prompt=request.prompt[: len(request.prompt) // 2])
        yield replace(request, prompt=request.prompt[:-1])
    if params.max_tokens > 1 and not params.min_tokens:
        yield replace(request, params=replace(params, max_tokens=params.max_tokens // 2))
