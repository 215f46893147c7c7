"""From a request to a sequence: what it must be (a prompt that fits, tokens of the vocabulary), and what it becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.engine.detokenize import Detokenizer
from forerun.engine.sequence import SequenceState, Tokens
from forerun.errors import InvalidInput, PromptTooLong
from forerun.noise import fresh_seed
from forerun.sources import SourceRules
from forerun.types import Request

if TYPE_CHECKING:
    from forerun.engine.engine import Engine


def check_request(
    request: Request, vocab: int, longest: int, has_tokenizer: bool, source: SourceRules | None = None
) -> None:
    """Raise unless an engine of this vocabulary and context can serve it; `source` is an encoder-decoder's."""
    length = len(request.prompt)
    if not length:
        raise InvalidInput("the prompt is empty; give at least one token")
    if source is not None and length > source.longest:
        raise PromptTooLong(f"the source has {length} tokens; the encoder reads {source.longest}: shorten it")
    if source is None and length >= longest:
        limit = f"the context of {longest} leaves no room to answer; shorten it"
        raise PromptTooLong(f"the prompt has {length} tokens; {limit}")
    if min(request.prompt) < 0 or max(request.prompt) >= vocab:
        raise InvalidInput(f"a prompt token lies outside the vocabulary of {vocab}; check the tokenizer")
    params = request.params
    named = [*params.logit_bias, *(token for word in params.bad_words for token in word)]
    if not all(0 <= token < vocab for token in named):
        raise InvalidInput(f"logit_bias or bad_words name a token outside the vocabulary of {vocab}")
    if params.stop and not has_tokenizer:
        raise InvalidInput("stop strings need a tokenizer; pass one or use stop_token_ids")


def new_sequence(engine: Engine, request: Request, seq_id: int) -> SequenceState:
    """The sequence of a request, if the engine can serve it; a drafter that it is the first to ask for is built."""
    source = engine.target.source_rules
    check_request(request, engine.target.vocab_size, engine.max_length, engine.tokenizer is not None, source)
    request = engine.grammars.compile(request)
    start = request.prompt if source is None else (source.start,)
    params, drafter = request.params, request.drafter or engine.default_drafter
    if not engine.drafters.has(drafter):
        engine.settle()  # graphs of a drafter are captured by passes in the same buffers: no other is under way
    engine.drafters.get(drafter)  # an unknown or unloadable one is the caller's error, now
    verifier = request.verifier or engine.default_verifier
    # a GPU drafts and decides under shared noise by itself; drawn trees are the host's work
    if verifier == "auto":
        on_gpu = engine.target.device.type == "cuda"
        verifier = "exact" if params.seed is None and not on_gpu else "coupled"
    return SequenceState(
        id=seq_id,
        request=request,
        seed=fresh_seed() if params.seed is None else params.seed,
        max_length=min(len(start) + params.max_tokens, engine.max_length),
        stop_ids=(frozenset() if params.ignore_eos else engine.stop_ids) | frozenset(params.stop_token_ids),
        drafter=drafter,
        verifier=verifier,
        shares_noise=engine.verifiers.get(verifier).shares_noise,
        detokenizer=Detokenizer(engine.tokenizer, params.stop),
        tokens=Tokens(start),
        prompt_length=len(start),
        drafting=drafter,
        source_rules=source,
    )
