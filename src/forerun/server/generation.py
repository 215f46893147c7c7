"""From a request's body to texts: sampling parameters, drafting, and the texts of all its choices as they grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import perf_counter
from typing import Any

from forerun.api.completion import Completion
from forerun.core.checks import as_whole
from forerun.core.errors import InvalidInput, PromptTooLong
from forerun.core.request import Budget, Event, derived_seed
from forerun.server.backends.base import Backend
from forerun.server.errors import ApiError
from forerun.server.schemas import (
    MOST_LOGPROBS,
    MOST_PROMPT_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    Generation,
    Speculative,
    TreeBudget,
)

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
             "logit_bias", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "seed",
             "max_thinking_tokens", "priority", "prompt_logprobs")  # fmt: skip


_GUIDED = ("json", "regex", "choice", "grammar")  # vLLM's older names of structured_outputs, with guided_ before


@dataclass(frozen=True, slots=True)
class Job:
    """One text to write."""

    index: int  # the choice it is
    prompt: tuple[int, ...]
    options: dict[str, Any]
    streams: bool = True


@dataclass(slots=True)
class Timing:
    """When a request came, when the first token of one of its texts did, and when that text ended."""

    started: float = field(default_factory=perf_counter)
    first: float | None = None
    ended: float | None = None

    def mark(self) -> None:
        if self.first is None:
            self.first = perf_counter()


def make_jobs(
    body: Generation,
    prompts: Sequence[tuple[tuple[int, ...], int]],  # and how much of the context each takes
    response_format: dict[str, Any] | None,  # None = the body's
    context: int,
) -> list[Job]:
    """The texts that a request asks for: n of each prompt, each with a seed of its own."""
    copies = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != copies:
        raise ApiError(
            400, f"best_of={body.best_of} is not supported: ask for as many with n and choose", param="best_of"
        )
    asked, how = (
        None if each is None else each.model_dump(by_alias=True, exclude_none=True)
        for each in (body.response_format, body.structured_outputs)
    )
    asked = asked if response_format is None else response_format
    guided = {name: value for name in _GUIDED if (value := getattr(body, f"guided_{name}")) is not None}
    how = {**(how or {}), **guided} or None
    jobs = []
    for number, (prompt, taken) in enumerate(prompts):
        options = sampling_of(body, taken, context) | drafting_of(body)
        options |= {"response_format": asked, "structured_outputs": how}
        if body.stream and body.stream_options is not None and body.stream_options.include_rejected:
            options["shows_rejected"] = True
        for copy in range(copies):
            own = dict(options)
            if body.seed is not None:
                own["seed"] = derived_seed(body.seed, copy)
            jobs.append(Job(number * copies + copy, prompt, own, bool(body.stream)))
    return jobs


def check_number(body: Generation, prompts: int, most: int) -> None:
    """Refuse a request for too many texts; before its prompts are looked at."""
    copies = 1 if body.n is None else body.n
    if copies < 1 or copies * prompts > most:
        said = f"n={copies} is out of range: 1 to {most} texts in one request"
        raise ApiError(400, said if prompts == 1 else f"{said}, and there are {prompts} prompts", param="n")


def salted(jobs: Sequence[Job], caller: str | None, asked: str | None) -> list[Job]:
    """The same texts, which share cached prompts with texts of the same caller (None = of all) and salt alone."""
    salt = "" if caller is None and asked is None else repr((caller, asked))
    return [replace(job, options={**job.options, "cache_salt": salt}) for job in jobs]


def sampling_of(body: Generation, prompt_length: int, context: int) -> dict[str, Any]:
    """The body's fields as keywords of `Backend.stream`, with the OpenAI API's defaults."""
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    given.setdefault("temperature", 1.0)
    limit = body.max_tokens
    if isinstance(body, ChatRequest):
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else limit
        if body.logprobs:
            given["logprobs"] = as_whole("top_logprobs", body.top_logprobs or 0, 0, MOST_LOGPROBS)
        elif body.top_logprobs is not None:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    elif isinstance(body, CompletionRequest):
        limit = 16 if limit is None else limit  # the API's own default for completions
        if body.logprobs is not None:
            given["logprobs"] = body.logprobs
        if body.logprobs is not None and body.echo:
            most = as_whole("logprobs with echo", body.logprobs, 0, MOST_PROMPT_LOGPROBS)
            given["prompt_logprobs"] = max(most, given.get("prompt_logprobs", 0))
    if body.stream and "prompt_logprobs" in given:
        raise ApiError(400, "log-probabilities of the prompt are not streamed; leave stream out", param="stream")
    room = context - prompt_length
    if room <= 0:  # said here, before a long list of tokens is looked at
        raise PromptTooLong(
            f"the prompt has {prompt_length} tokens; the context of {context} leaves no room to answer; shorten it"
        )
    if limit is not None and limit > room:
        raise ApiError(
            400,
            f"max_tokens={limit} and a prompt of {prompt_length} tokens are more than the context of {context}; "
            f"ask for at most {room}, or shorten the prompt",
            param="max_tokens",
            code="context_length_exceeded",
        )
    given["max_tokens"] = room if limit is None else limit
    return given


def drafting_of(body: Generation) -> dict[str, Any]:
    """`speculative` as keywords: off, on, or a drafter, a budget and a verifier of this request's own."""
    asked = body.speculative
    if asked is None or asked is True or asked == "on":
        return {}
    if asked is False or asked == "off":
        return {"drafter": "none"}
    assert isinstance(asked, Speculative)
    if not asked.enabled:
        return {"drafter": "none"}
    own = asked.budget
    budget = Budget(own.nodes, own.depth, own.width) if isinstance(own, TreeBudget) else own
    fields = {"drafter": asked.drafter, "budget": budget, "verifier": asked.verifier}
    return {name: value for name, value in fields.items() if value is not None}


async def write_one(backend: Backend, job: Job) -> AsyncGenerator[Event | Completion]:
    """One text as it grows; leaving it early aborts it."""
    try:
        async with aclosing(backend.stream(job.prompt, every_round=job.streams, **job.options)) as items:
            async for item in items:
                yield item
    except InvalidInput:
        raise
    except (TypeError, ValueError) as error:  # options that no engine takes
        raise InvalidInput(str(error)) from error


async def write_all(backend: Backend, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Event | Completion]]:
    """The texts of all jobs as they grow, whichever comes first; if one fails, all end."""
    if len(jobs) == 1:
        async with aclosing(write_one(backend, jobs[0])) as items:
            async for item in items:
                yield jobs[0].index, item
        return
    found: asyncio.Queue[tuple[int, Event | Completion | BaseException | None]] = asyncio.Queue(maxsize=64)

    async def pump(job: Job) -> None:
        try:
            async with aclosing(write_one(backend, job)) as items:
                async for item in items:
                    await found.put((job.index, item))
            await found.put((job.index, None))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            await found.put((job.index, error))

    tasks = [asyncio.create_task(pump(job)) for job in jobs]
    try:
        left = len(tasks)
        while left:
            index, news = await found.get()
            if news is None:
                left -= 1
            elif isinstance(news, BaseException):
                raise news
            else:
                yield index, news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def usage_of(done: Sequence[Completion], prompts: int, thought: int | None = None) -> dict[str, Any]:
    """Tokens read and written, and those of thinking; a prompt that several choices share counts once."""
    own, first = sum(each.tokens for each in done), done[:: max(1, len(done) // max(1, prompts))]
    read = sum(each.prompt_tokens for each in first)
    details = {"cached_tokens": sum(each.cached_tokens for each in first)}
    known = {} if thought is None else {"reasoning_tokens": thought}
    known |= {
        "accepted_prediction_tokens": sum(each.accepted_prediction_tokens for each in done),
        "rejected_prediction_tokens": sum(each.rejected_prediction_tokens for each in done),
    }
    tokens = {"prompt_tokens": read, "completion_tokens": own, "total_tokens": read + own}
    return {**tokens, "prompt_tokens_details": details, "completion_tokens_details": known}


def speculation_of(done: Sequence[Completion]) -> dict[str, Any]:
    """What drafting came to, under the names that users of vLLM know."""
    rounds, tokens = sum(each.rounds for each in done), sum(each.tokens for each in done)
    drafted, accepted = sum(each.drafted for each in done), sum(each.accepted for each in done)
    return {
        "mean_acceptance_length": tokens / rounds if rounds else 0.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": histogram_of(done),
        "num_spec_steps": rounds,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "drafter": done[0].drafter if done else None,
        "verifier": done[0].verifier if done else None,
        "exact": all(each.exact for each in done),
    }


def histogram_of(done: Sequence[Completion]) -> list[int]:
    """How many rounds had 0, 1, 2, ... of their drafted tokens accepted, up to the deepest draft."""
    counts = [0] * (1 + max((len(each.kept) for each in done), default=0))
    for each in done:
        at_least = [each.rounds, *each.kept, 0]  # rounds with so many accepted, or more
        for i, (these, more) in enumerate(pairwise(at_least)):
            counts[i] += these - more
    return counts
