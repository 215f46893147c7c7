"""What the referee asks an engine, what comes back, and the interface between them: `Target`.

A new kind of engine needs one class with `answer`; whatever it cannot do it refuses, and the checks that need it are
reported as skipped with the engine's own words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from forerun.core.errors import ForerunError
from forerun.referee.tables import Rules, Table

Mode = Literal["on", "off"]  # speculation
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


class Refused(ForerunError):
    """The engine does not take such a request: the check does not apply."""


class Broken(ForerunError):
    """The engine answered something that is no answer, or not at all; `status` is HTTP's where there is one."""

    def __init__(self, said: str, status: int | None = None) -> None:
        super().__init__(said)
        self.status = status
        self.command = ""  # sends the request again


@dataclass(frozen=True)
class Ask:
    prompt: str
    max_tokens: int = 24
    rules: Rules = field(default_factory=lambda: Rules(temperature=0.0))
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    schema: Mapping[str, Any] | None = None  # JSON schema that the answer must match

    def body(self, ids: Mapping[str, int]) -> dict[str, Any]:
        """The fields of the OpenAI API, and vLLM's for what that API lacks; only what is not the default."""
        rules = self.rules
        values: dict[str, Any] = {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": rules.temperature,
        }
        plain = Rules()
        for name in ("top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            if getattr(rules, name) != getattr(plain, name):
                values[name] = getattr(rules, name)
        if rules.bias:
            values["logit_bias"] = {str(ids[symbol]): value for symbol, value in rules.bias.items()}
        if self.seed is not None:
            values["seed"] = self.seed
        if self.stop:
            values["stop"] = list(self.stop)
        if self.logprobs is not None:
            values["logprobs"] = self.logprobs
        if self.schema is not None:
            shape = {"name": "answer", "schema": dict(self.schema), "strict": True}
            values["response_format"] = {"type": "json_schema", "json_schema": shape}
        return values


@dataclass(frozen=True)
class TokenLogprob:
    text: str
    logprob: float
    top: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A finished text. Figures that the engine does not give are None."""

    text: str
    finish: str | None = None  # stop | length
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    logprobs: Sequence[TokenLogprob] | None = None
    drafted: int | None = None
    accepted: int | None = None
    rounds: int | None = None
    seconds: float = 0.0

    @property
    def ended(self) -> bool:
        """By itself, not at its limit."""
        return self.finish == "stop"


class Target(Protocol):
    name: str

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Can speculation be switched off?"""

    def answer(self, asks: Sequence[Ask], mode: Mode = "on") -> list[Answer]:
        """Raises Refused where the engine does not take one of them."""

    def command(self, ask: Ask, mode: Mode = "on") -> str:
        """A shell command that sends this request."""


def symbol_ids(table: Table) -> dict[str, int]:
    """Token ids by symbol, for logit biases."""
    from forerun.referee.checkpoint import token_ids

    return dict(zip(table.alphabet, token_ids(table), strict=False))


def answer_of(body: Mapping[str, Any], seconds: float = 0.0) -> Answer:
    """From the JSON of /v1/completions: OpenAI's fields, and drafting figures where an engine gives them."""
    try:
        choice = body["choices"][0]
        usage = body.get("usage") or {}
        drafted, accepted, rounds = _drafting(body)
        if not isinstance(choice["text"], str):
            raise TypeError(f"text is {choice['text']!r}")
        counts = (*(usage.get(name) for name in _COUNTS), drafted, accepted, rounds)
        if wrong := [each for each in counts if not isinstance(each, int | None)]:
            raise TypeError(f"a count is {wrong[0]!r}")
        return Answer(
            text=choice["text"],
            finish=choice.get("finish_reason"),
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            total_tokens=usage.get("total_tokens"),
            logprobs=_logprobs(choice.get("logprobs")),
            drafted=drafted,
            accepted=accepted,
            rounds=rounds,
            seconds=seconds,
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        shown = json.dumps(body)[:200]
        raise Broken(f"no completion in the answer ({type(error).__name__}: {error}): {shown}") from None


def _drafting(body: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    """Drafted and accepted tokens and rounds, as Forerun and vLLM or as llama.cpp report them."""
    ours = (body.get("metrics") or {}).get("speculative_decoding") or {}
    if "num_draft_tokens" in ours:
        return ours["num_draft_tokens"], ours.get("num_accepted_draft_tokens"), ours.get("num_spec_steps")
    timings = body.get("timings") or {}
    return timings.get("draft_n"), timings.get("draft_n_accepted"), None


def _logprobs(found: Any) -> list[TokenLogprob] | None:
    if not found:
        return None
    if "content" in found:  # the shape of chats, which llama.cpp uses for completions too
        return [
            TokenLogprob(
                each["token"], each["logprob"], {one["token"]: one["logprob"] for one in each.get("top_logprobs") or ()}
            )
            for each in found["content"] or ()
        ]
    tops = found.get("top_logprobs") or [{}] * len(found["tokens"])
    parts = zip(found["tokens"], found["token_logprobs"], tops, strict=True)
    return [TokenLogprob(text, value, top or {}) for text, value, top in parts]


@runtime_checkable
class CountsDrafts(Protocol):
    """A target that counts drafting over all of its requests, beside or instead of each answer's figures."""

    def drafting(self) -> tuple[int, int] | None:
        """Drafted and accepted tokens so far; None = it does not say."""
