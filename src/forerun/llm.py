"""The object users hold.

llm = LLM.load("smollm2")
print(llm.chat("Why is the sky blue?").text)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from forerun.build import check_vocabulary, cost_file, drafts_with_checkpoint, load_target, make_engine
from forerun.control.fixed import budget_of
from forerun.engine.engine import Engine
from forerun.errors import InvalidInput
from forerun.params import Dtype, EngineConfig, SamplingParams, SpeculativeConfig
from forerun.types import Budget, Event, FinishReason, Request, TokenLogprob

if TYPE_CHECKING:
    from forerun.engine.sequence import Sequence as Text
    from forerun.models.load.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished text, and how it came about."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    rounds: int
    tokens_per_round: float
    accepted_per_position: list[float]
    drafted: int
    accepted: int
    drafter: str
    verifier: str
    exact: bool
    seed: int
    seconds: float  # from the first round to the last token, beside whatever else ran in the batch
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Writing:
    """A request on its way to a Completion."""

    seq: Text
    started: float
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def take(self, event: Event) -> None:
        self.text += event.text
        self.logprobs.extend(event.logprobs)


class LLM:
    """A target, its tokenizer, and an engine that writes with them."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, name: str = "") -> None:
        self.engine, self.tokenizer, self.name = engine, tokenizer, name

    @classmethod
    def load(
        cls,
        model: str = "smollm2",
        *,
        drafter: str | None = None,
        draft_model: str | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        dtype: Dtype = "auto",
        device: str = "auto",
        config: EngineConfig | None = None,
    ) -> LLM:
        """Load a model by known name, GGUF file, Hugging Face folder or hub id, and a drafter for it.

        `speculative_config` also takes vLLM's names; `drafter` and `draft_model` override it.
        """
        from forerun.models.load.catalog import cache_folder
        from forerun.models.load.checkpoint import open_checkpoint

        settings = config or EngineConfig(dtype=dtype, device=device)
        speculative = _speculative(speculative_config, drafter, draft_model)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        checkpoint = open_checkpoint(model)
        draft = None
        if speculative.draft_model is not None and drafts_with_checkpoint(speculative.drafter):
            small = open_checkpoint(speculative.draft_model)
            check_vocabulary(checkpoint, small)
            draft = load_target(small, settings)
        tokenizer = checkpoint.tokenizer()
        costs = cost_file(checkpoint, settings, cache_folder())
        target = load_target(checkpoint, settings)
        stops = tokenizer.eos_ids
        engine = make_engine(target, stops, speculative, settings, tokenizer, draft, costs)
        return cls(engine, tokenizer, model)

    def generate(
        self,
        prompts: Prompt | Sequence[str],
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        verifier: str | None = None,
        budget: int | Budget | None = None,
    ) -> Any:
        """Write a Completion for a prompt (text, token ids or chat messages), or a list of them for several.

        Text is taken as it is; messages go through the model's chat template. `drafter`, `verifier` and `budget`
        hold for this call only.
        """
        several = not isinstance(prompts, str) and all(isinstance(prompt, str) for prompt in prompts)
        batch: Sequence[Any] = prompts if several else [prompts]
        requests = [self._request(prompt, params, drafter, verifier, budget) for prompt in batch]
        completions = self._write(requests)
        return completions if several else completions[0]

    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
        drafter: str | None = None,
        verifier: str | None = None,
        budget: int | Budget | None = None,
    ) -> Completion:
        """Answer a chat; a plain string is one user message."""
        turns = as_messages(messages, system)
        return self._write([self._request(turns, params, drafter, verifier, budget)])[0]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        verifier: str | None = None,
        budget: int | Budget | None = None,
    ) -> Iterator[Event | Completion]:
        """Yield an Event per round as the text grows, then its Completion."""
        writing = self._start(self._request(prompt, params, drafter, verifier, budget))
        try:
            while not writing.seq.finished:
                for event in self.engine.step():
                    if event.seq_id == writing.seq.id:
                        writing.take(event)
                        yield event
            yield self._complete(writing)
        finally:
            self.engine.abort(writing.seq.id)  # the caller may stop listening half-way

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids of a prompt in any of its forms."""
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        turns = [part for part in prompt if isinstance(part, Mapping)]
        if turns:
            return tuple(self.tokenizer.chat_ids(turns))
        return tuple(part for part in prompt if isinstance(part, int))

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        drafter: str | None,
        verifier: str | None,
        budget: int | Budget | None,
    ) -> Request:
        if isinstance(budget, int):
            budget = budget_of(budget, width=1)
        return Request(self.encode(prompt), params or SamplingParams(), drafter, verifier, budget)

    def _start(self, request: Request) -> _Writing:
        seq = self.engine.find(self.engine.submit(request))
        assert seq is not None
        return _Writing(seq, perf_counter())

    def _write(self, requests: Sequence[Request]) -> list[Completion]:
        writings = {w.seq.id: w for w in [self._start(request) for request in requests]}
        completions: dict[int, Completion] = {}
        try:
            while len(completions) < len(writings):
                for event in self.engine.step():
                    if writing := writings.get(event.seq_id):
                        writing.take(event)
                        if event.finished:
                            completions[event.seq_id] = self._complete(writing)
        finally:
            for seq_id in writings:
                self.engine.abort(seq_id)
        return [completions[seq_id] for seq_id in writings]

    def _complete(self, writing: _Writing) -> Completion:
        seq, stats = writing.seq, writing.seq.stats
        return Completion(
            text=writing.text,
            token_ids=seq.tokens[seq.prompt_length :],
            finish_reason=seq.finished or "aborted",
            prompt_tokens=seq.prompt_length,
            rounds=stats.rounds,
            tokens_per_round=stats.tokens_per_round,
            accepted_per_position=stats.accepted_per_position,
            drafted=stats.drafted,
            accepted=stats.accepted,
            drafter=seq.drafter,
            verifier=seq.verifier,
            exact=self.engine.verifiers.get(seq.verifier).exact,
            seed=seq.seed,
            seconds=perf_counter() - writing.started,
            logprobs=writing.logprobs,
        )


def as_messages(messages: str | Sequence[Message], system: str | None = None) -> list[Message]:
    """Chat messages from a plain question or a list, with a system message in front if one is given."""
    turns: list[Message] = (
        [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
    )
    if not turns:
        raise InvalidInput("there is no message to answer; give at least one")
    return [{"role": "system", "content": system}, *turns] if system else turns


def _speculative(
    given: SpeculativeConfig | Mapping[str, Any] | None, drafter: str | None, draft_model: str | None
) -> SpeculativeConfig:
    config = (
        SpeculativeConfig.from_dict(given) if isinstance(given, Mapping) else given or SpeculativeConfig()
    )
    fields = {name: getattr(config, name) for name in SpeculativeConfig.__dataclass_fields__}
    if draft_model is not None:
        fields.update(draft_model=draft_model, drafter="draft_model")
    if drafter is not None:
        fields["drafter"] = drafter
    return SpeculativeConfig(**fields)
