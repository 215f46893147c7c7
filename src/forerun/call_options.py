"""Options of one call of `generate`, `chat` or `stream`, and the requests made from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from forerun.checks import as_name, as_whole, shown, unknown
from forerun.completion import Completion
from forerun.errors import InvalidInput
from forerun.messages import Budget, Request, budget_of
from forerun.params import SPELLINGS, SamplingOptions, SamplingParams
from forerun.prompts import Prompt
from forerun.seeds import derived_seed

Params = SamplingParams | Mapping[str, Any]
Encode = Callable[[Prompt], tuple[int, ...]]
MOST_COPIES = 1024  # of one prompt in a call
_DEFAULTS = SamplingParams()


class Options(SamplingOptions, total=False):
    """Options of one call; the engine's defaults hold for what is left out."""

    drafter: str | None
    verifier: str | None
    budget: int | Budget | None
    json_schema: Mapping[str, Any] | bool | None  # short for a `response_format` with this schema
    shows_rejected: bool  # events tell what was drafted in vain
    cache_salt: str | None  # cached prompts are shared with calls of the same salt; None = with none


def make_request(
    prompt: Prompt, params: Params | None, options: Mapping[str, Any], encode: Encode
) -> Request:
    """The request of a prompt and its options; keywords override `params`."""
    known = [*Options.__annotations__, *SPELLINGS]
    if strange := [name for name in options if name not in known]:
        raise InvalidInput(unknown("option", strange[0], known))
    if params is not None and not isinstance(params, SamplingParams):
        params = SamplingParams.from_dict(params)
    ours = ("drafter", "verifier", "budget", "shows_rejected", "cache_salt")
    sampling = {name: value for name, value in options.items() if name not in ours}
    budget = options.get("budget")
    if budget is not None and not isinstance(budget, Budget):
        budget = budget_of(as_whole("budget", budget, 0, 256), width=1)
    drafter, verifier = (
        None if options.get(name) is None else as_name(name, options[name]) for name in ours[:2]
    )
    merged = SamplingParams.from_dict(sampling, over=params or _DEFAULTS)
    rest = options.get("shows_rejected", False), options.get("cache_salt", "")
    return Request(encode(prompt), merged, drafter, verifier, budget, *rest)


def make_requests(
    prompts: Sequence[Prompt],
    params: Params | Sequence[Params] | None,
    n: int | None,
    options: Mapping[str, Any],
    encode: Encode,
) -> list[list[Request]]:
    """The requests of each prompt: one, or with `n` as many, unless all their texts would be alike."""
    copies = None if n is None else as_whole("n", n, 1, MOST_COPIES)
    pairs = zip(prompts, _each(params, len(prompts)), strict=True)
    return [_copies(make_request(prompt, own, options, encode), copies) for prompt, own in pairs]


def in_shape(
    done: Iterable[Completion], asked: Sequence[Sequence[Request]], several: bool, n: int | None
) -> Completion | list[Completion] | list[list[Completion]]:
    """Completions as they were asked for: one for each prompt, or with `n` a list for each."""
    left = iter(done)
    texts = [[next(left) for _ in requests] for requests in asked]
    if n is None:
        return [own[0] for own in texts] if several else texts[0][0]
    whole = [own if len(own) == n else own * n for own in texts]  # greedy texts are written once
    return whole if several else whole[0]


def _each(params: Any, count: int) -> Sequence[Params | None]:
    """The parameters of each of so many prompts: shared, or one set for each."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [params] * count
    if not isinstance(params, Sequence) or isinstance(params, str | bytes | bytearray):
        raise InvalidInput(
            f"params={shown(params)} are no sampling parameters: give SamplingParams or a dict"
        )
    if len(params) != count:
        raise InvalidInput(f"{count} prompts came with {len(params)} sets of parameters; give one or as many")
    return params


def _copies(request: Request, count: int | None) -> list[Request]:
    """A request so many times, each with a seed of its own; once where all texts would be alike."""
    params = request.params
    if count is None or params.is_greedy:
        return [request]
    if params.seed is None:
        return [request] * count
    seeds = [derived_seed(params.seed, i) for i in range(count)]
    return [replace(request, params=replace(params, seed=seed)) for seed in seeds]
