"""transformers' logits processors and stopping criteria, called as its own loop calls them: token by token.

A processor is called for every node with the tokens up to it, pads of the prompt included, one row at a
time; a criterion for every token that was committed, in order, and the sequence ends at the first where it stops.
Both must be functions of the tokens they get.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.core.checks import as_items, as_real, as_token_ids, as_whole, shown
from forerun.core.errors import ForerunError, InvalidInput
from forerun.core.params import LawProcessor, Prefix

Hook = Callable[[Tensor, Any], Any]  # transformers' LogitsProcessor and StoppingCriteria


class ProcessorOfTransformers:
    """Some of their processors as one of ours, for one row of a batch."""

    def __init__(self, theirs: Sequence[Hook], row: Tensor, length: int) -> None:
        self._theirs = theirs
        self._pads = row[: len(row) - length].tolist()  # what comes before the prompt's own tokens

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        ids = torch.tensor([[*self._pads, *prefix.ids]], device=logits.device)
        scores = logits[None]  # [1, V]
        for process in self._theirs:
            scores = process(ids, scores)
        return scores[0]


def law_processors(settings: Mapping[str, Any], row: Tensor, length: int, place: int) -> tuple[LawProcessor, ...]:
    """The caller's logits processors for one row [T], `length` tokens of which are the prompt."""
    theirs = _own_processors(settings, len(row), place) + _hooks(settings, "logits_processor")
    return (ProcessorOfTransformers(theirs, row, length),) if theirs else ()


def stopping_criteria(settings: Mapping[str, Any]) -> list[Hook]:
    """What ends a sequence besides its end token, its length and stop strings."""
    criteria = _hooks(settings, "stopping_criteria")
    if settings.get("max_time") is not None:
        from transformers import MaxTimeCriteria

        criteria.append(MaxTimeCriteria(as_real("max_time", settings["max_time"], low=0.0)))
    return criteria


def tokens_until_stop(criteria: Sequence[Hook], text: Sequence[int], fresh: Sequence[int]) -> int | None:
    """How many of the fresh tokens are written until a criterion stops; None = none does."""
    for count in range(1, len(fresh) + 1):
        ids = torch.tensor([[*text, *fresh[:count]]])
        if any(_stops(criterion, ids) for criterion in criteria):
            return count
    return None


def _stops(criterion: Hook, ids: Tensor) -> bool:
    try:
        return bool(torch.as_tensor(criterion(ids, None)).any())
    except ForerunError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InvalidInput(
            f"stopping_criteria: {shown(criterion)} failed ({type(error).__name__}: {reason})"
        ) from error


def _own_processors(settings: Mapping[str, Any], width: int, place: int) -> list[Hook]:
    """transformers' own processors that only rule tokens out, which our order of steps cannot change."""
    from transformers.generation import logits_process as theirs

    found: list[Hook] = []
    size = settings.get("no_repeat_ngram_size")
    if size is not None and as_whole("no_repeat_ngram_size", size, low=0):
        found.append(theirs.NoRepeatNGramLogitsProcessor(as_whole("no_repeat_ngram_size", size)))
    rule = settings.get("prefix_allowed_tokens_fn")
    if rule is not None:
        if not callable(rule):
            raise InvalidInput(
                f"prefix_allowed_tokens_fn={shown(rule)} is no function of (row, ids); give one or drop it"
            )
        found.append(theirs.PrefixConstrainedLogitsProcessor(lambda _, ids: rule(place, ids), num_beams=1))
    first = as_token_ids("begin_suppress_tokens", settings.get("begin_suppress_tokens"))
    if first:
        found.append(theirs.SuppressTokensAtBeginLogitsProcessor(list(first), width))
    return found


def _hooks(settings: Mapping[str, Any], name: str) -> list[Hook]:
    """The caller's functions of (ids, scores): one, a list of them, or none."""
    given = settings.get(name)
    hooks = [given] if callable(given) and not isinstance(given, list) else as_items(name, given, "functions")
    if wrong := [hook for hook in hooks if not callable(hook) or isinstance(hook, type)]:
        raise InvalidInput(f"{name} holds {shown(wrong[0])}, which is no function of (ids, scores)")
    return hooks
