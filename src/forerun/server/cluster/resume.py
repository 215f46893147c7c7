"""A text that goes on after its replica is gone: the request is sent again, and what the client has is left out.

A greedy text, and a sampled one whose verifier shares its noise with no draft (`coupled`, which a seed selects), is a
function of the request. So another replica writes the same tokens; they are compared with those that the client has,
and only what comes behind them is handed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.api.completion import Completion
from forerun.core.errors import ForerunError
from forerun.core.noise import fresh_seed
from forerun.core.types import Event

_BY_REQUEST = ("auto", "coupled")  # verifiers under which a seed fixes the text


class StreamLost(ForerunError):
    """The replica that wrote a text is gone, and the text cannot be gone on with."""


def with_seed(options: Mapping[str, Any], default_verifier: str) -> dict[str, Any]:
    """The same options with a seed, where a seed makes the text a function of the request and none was given."""
    sampled = options.get("temperature", 0.0) != 0.0
    if sampled and options.get("seed") is None and _verifier(options, default_verifier) in _BY_REQUEST:
        return {**options, "seed": fresh_seed()}
    return dict(options)


def can_resume(options: Mapping[str, Any], default_verifier: str) -> bool:
    """Does another replica write the same text for these options? The default is that of the replicas."""
    verifier = _verifier(options, default_verifier)
    if verifier == "typical":  # accepts what the target might have said: depends on the draft
        return False
    greedy = options.get("temperature", 0.0) == 0.0
    return greedy or (options.get("seed") is not None and verifier in _BY_REQUEST)


def _verifier(options: Mapping[str, Any], default: str) -> str:
    return options.get("verifier") or default


@dataclass(slots=True)
class Replay:
    """What the client has of one text, and what is left out when the text comes again from its beginning."""

    resumable: bool
    _tokens: list[int] = field(default_factory=list)  # that the client has
    _text: str = ""
    _token: int = 0  # how far this writing is
    _char: int = 0

    @property
    def started(self) -> bool:
        return bool(self._tokens or self._text)

    def restart(self) -> None:
        """The text comes again; raises where what the client has cannot be gone on with."""
        if self.started and not self.resumable:
            raise StreamLost(
                "the replica that wrote this text is gone, and a text whose tokens depend on how it was drafted cannot "
                "be gone on with; send it again, or with temperature 0, or with a seed and no verifier of its own"
            )
        self._token = self._char = 0

    def take(self, item: Event | Completion) -> Iterator[Event | Completion]:
        """The part of an item that is news to the client."""
        if isinstance(item, Completion):
            self._check(item.token_ids[: len(self._tokens)] == self._tokens)
            yield item
            return
        known, told = self._known(item), len(self._text) - self._char
        old_text, text = item.text[: max(0, told)], item.text[max(0, told) :]
        self._check(self._text[self._char : self._char + len(old_text)] == old_text)
        self._token, self._char = self._token + len(item.tokens), self._char + len(item.text)
        tokens = item.tokens[known:]
        self._tokens += tokens
        self._text += text
        if tokens or text or item.finished:
            if not known and not old_text:
                yield item
                return
            accepted = max(0, item.accepted - known)
            yield replace(
                item, tokens=tokens, text=text, accepted=accepted, logprobs=item.logprobs[known:], rejected=()
            )

    def _known(self, item: Event) -> int:
        """How many tokens of an item the client has; raises where they are not the ones it got."""
        known = max(0, min(len(item.tokens), len(self._tokens) - self._token))
        self._check(list(item.tokens[:known]) == self._tokens[self._token : self._token + known])
        return known

    def _check(self, same: bool) -> None:
        if not same:
            raise StreamLost(
                "the replica that wrote this text is gone, and another one wrote a different text (numbers that round "
                "differently can do that); send the request again"
            )
