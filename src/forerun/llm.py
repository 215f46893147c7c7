"""The object users hold.

llm = LLM.load("smollm2")
print(llm.chat("Why is the sky blue?").text)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import torch

from forerun.build import (
    check_names,
    check_vocabulary,
    choose_drafter,
    cost_file,
    drafts_with_checkpoint,
    load_target,
    make_engine,
)
from forerun.control.fixed import budget_of
from forerun.engine.driver import Driver
from forerun.engine.engine import Engine
from forerun.errors import InvalidInput
from forerun.params import Dtype, EngineConfig, SamplingParams, SpeculativeConfig
from forerun.prompts import Message, Prompt, as_messages, as_prompts
from forerun.types import Budget, Event, FinishReason, Request, TokenLogprob

if TYPE_CHECKING:
    from forerun.engine.sequence import SequenceState
    from forerun.models.load.tokenizer import Tokenizer


class Options(TypedDict, total=False):
    """What one call may set for itself; what it leaves out is the engine's."""

    drafter: str | None
    verifier: str | None
    budget: int | Budget | None


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
    seconds: float  # of the engine's work since it was admitted, beside whatever else ran in the batch
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class LLM:
    """A target, its tokenizer, and an engine that writes with them.

    Any number of threads may share one: their calls join the running batch, and each gets its own text.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, name: str = "") -> None:
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.driver = Driver(engine)

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

        `draft_model` is a smaller model or the folder of a trained head; a head that comes with the package is used
        where it fits. `speculative_config` also takes vLLM's names; `drafter` and `draft_model` override it.
        """
        from forerun.models.load.catalog import cache_folder
        from forerun.models.load.checkpoint import open_checkpoint

        if config is not None and (dtype, device) != ("auto", "auto"):
            raise InvalidInput("dtype and device were given beside config; set them in the EngineConfig")
        settings = config or EngineConfig(dtype=dtype, device=device)
        speculative = _speculative(speculative_config, drafter, draft_model)
        check_names(speculative)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        checkpoint = open_checkpoint(model)
        speculative = choose_drafter(speculative, checkpoint, settings.device)
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

    @overload  # a string is also a sequence of strings: the first signature that fits is meant
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[Options],
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[Options],
    ) -> Completion | list[Completion]:
        """A Completion for a prompt (text, token ids or chat messages), or a list of them for several prompts.

        Text is taken as it is; messages go through the model's chat template. `drafter`, `verifier` and `budget`
        hold for this call only. Several prompts may share their parameters or bring a list of them. A request that
        cannot go on raises its error once the others of the call have finished.
        """
        batch, several = as_prompts(prompts)
        each = [params] * len(batch) if params is None or isinstance(params, SamplingParams) else [*params]
        if len(each) != len(batch):
            raise InvalidInput(
                f"{len(batch)} prompts came with {len(each)} sets of parameters; give one or as many"
            )
        pairs = zip(batch, each, strict=True)
        completions = self._write([self._request(prompt, wish, options) for prompt, wish in pairs])
        return completions if several else completions[0]

    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Answer a chat; a plain string is one user message."""
        return self._write([self._request(as_messages(messages, system), params, options)])[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Iterator[Event | Completion]:
        """Yield an Event per round as the text grows, then its Completion."""
        handle = self.driver.submit(self._request(prompt, params, options))
        try:
            for _, event in self.driver.events({0: handle}):
                yield event
            yield self.completion_of(handle.seq)
        finally:  # the caller may stop listening half-way
            self.driver.abort(handle)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids of a prompt in any of its forms."""
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        turns = [part for part in prompt if isinstance(part, Mapping)]
        if turns and len(turns) == len(prompt):
            return tuple(self.tokenizer.chat_ids(turns))
        try:
            return tuple(operator.index(part) for part in prompt)  # type: ignore[arg-type]
        except TypeError:
            raise InvalidInput(
                f"{prompt!r:.80} is no prompt: give text, token ids or chat messages"
            ) from None

    def _request(self, prompt: Prompt, params: SamplingParams | None, options: Options) -> Request:
        budget = options.get("budget")
        if isinstance(budget, int):
            budget = budget_of(budget, width=1)
        names = options.get("drafter"), options.get("verifier")
        return Request(self.encode(prompt), params or SamplingParams(), *names, budget)

    def _write(self, requests: Sequence[Request]) -> list[Completion]:
        return [self.completion_of(seq) for seq in self.driver.write(requests)]

    def completion_of(self, seq: SequenceState) -> Completion:
        """A sequence that has ended as a Completion; raises the error that ended it, if one did."""
        if seq.error is not None:
            raise seq.error
        stats = seq.stats
        return Completion(
            text="".join(event.text for event in seq.events),
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
            seconds=stats.seconds,
            logprobs=[entry for event in seq.events for entry in event.logprobs],
        )


def _speculative(
    given: SpeculativeConfig | Mapping[str, Any] | None, drafter: str | None, draft_model: str | None
) -> SpeculativeConfig:
    config = (
        SpeculativeConfig.from_dict(given) if isinstance(given, Mapping) else given or SpeculativeConfig()
    )
    fields = {name: getattr(config, name) for name in SpeculativeConfig.__dataclass_fields__}
    if draft_model is not None:
        fields.update(draft_model=draft_model, drafter="auto")
    if drafter is not None:
        fields["drafter"] = drafter
    return SpeculativeConfig(**fields)
