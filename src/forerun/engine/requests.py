"""What a request must be, checked when it is submitted: a prompt that fits, tokens of the vocabulary."""

from __future__ import annotations

from forerun.errors import InvalidInput, PromptTooLong
from forerun.types import Request


def check_request(request: Request, vocab: int, longest: int, has_tokenizer: bool) -> None:
    """Raise unless an engine of this vocabulary and context can serve it."""
    length = len(request.prompt)
    if not length:
        raise InvalidInput("the prompt is empty; give at least one token")
    if length >= longest:
        limit = f"the context of {longest} leaves no room to answer; shorten it"
        raise PromptTooLong(f"the prompt has {length} tokens; {limit}")
    if not all(0 <= token < vocab for token in request.prompt):
        raise InvalidInput(f"a prompt token lies outside the vocabulary of {vocab}; check the tokenizer")
    params = request.params
    named = [*params.logit_bias, *(token for word in params.bad_words for token in word)]
    if not all(0 <= token < vocab for token in named):
        raise InvalidInput(f"logit_bias or bad_words name a token outside the vocabulary of {vocab}")
    if params.stop and not has_tokenizer:
        raise InvalidInput("stop strings need a tokenizer; pass one or use stop_token_ids")
