"""What a user may set: frozen, slotted, checked when made. No torch here, so that the CLI can show help at once.

The names are the ones people know from transformers, vLLM and the OpenAI API.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from forerun.errors import InvalidInput

Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "q8", "gguf"]


def _check(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise InvalidInput(f"{name}={value!r} is out of range: {limit}")


def _check_numbers(settings: object, whole: Sequence[str], real: Sequence[str] = ()) -> None:
    """Fields that must be integers (or None where they may be), and fields that must be finite numbers."""
    for name in whole:
        value = getattr(settings, name)
        optional = value is None and "None" in str(settings.__dataclass_fields__[name].type)  # type: ignore[attr-defined]
        _check(
            optional or (isinstance(value, int) and not isinstance(value, bool)), name, value, "an integer"
        )
    for name in real:
        value = getattr(settings, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        _check(number and math.isfinite(value), name, value, "a finite number")


def _check_tokens(name: str, tokens: object) -> None:
    ids = list(tokens) if isinstance(tokens, Sequence | Mapping) and not isinstance(tokens, str) else None
    ok = ids is not None and all(isinstance(token, int) and token >= 0 for token in ids)
    _check(ok, name, tokens, "token ids, which are integers of 0 or more")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request wants its text sampled. The defaults are greedy.

    The law is built in the order transformers uses: bias, repetition penalty, presence and frequency
    penalties, bad words, min tokens, temperature, top-k, top-p, min-p. Penalties count the node's own path.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()  # token sequences that must not appear
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None  # None = off, 0 = the chosen token only, n = and the n likeliest

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.top_k == -1:  # vLLM's way of saying off
            object.__setattr__(self, "top_k", 0)
        _check_numbers(
            self,
            ("max_tokens", "top_k", "min_tokens", "seed", "logprobs"),
            ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        )
        _check_tokens("stop_token_ids", self.stop_token_ids)
        _check_tokens("logit_bias", self.logit_bias)
        for word in self.bad_words:
            _check_tokens("bad_words", word)
        biases = list(self.logit_bias.values())
        _check(all(bias < math.inf for bias in biases), "logit_bias", biases, "numbers below infinity")
        _check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        warm = self.temperature == 0.0 or self.temperature >= 1e-4  # below, logits overflow
        _check(warm, "temperature", self.temperature, "0 (greedy), or at least 0.0001")
        _check(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _check(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0, at most 1 (off)")
        _check(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "0 (off) to 1")
        _check(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0; 1 = off")
        _check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "0 to max_tokens")
        strings = isinstance(self.stop, Sequence) and all(
            isinstance(stop, str) and stop for stop in self.stop
        )
        _check(strings, "stop", self.stop, "strings, none of them empty")
        _check(all(self.bad_words), "bad_words", self.bad_words, "no empty words")
        _check(self.logprobs is None or 0 <= self.logprobs <= 64, "logprobs", self.logprobs, "0 to 64")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How to draft. `from_dict` also takes vLLM's names."""

    drafter: str = "auto"  # auto = by draft_model; without one, a head that comes for this model, else ngram
    draft_model: str | None = None  # a checkpoint, or the folder of a trained head
    budget: int | None = None  # drafted nodes per round at most; 0 = do not draft; None = what may pay
    width: int | None = None  # children per node at most: 1 = a chain; None = what may pay
    verifier: str = "auto"  # auto = coupled when a seed is given, else exact
    controller: str = "adaptive"
    prompt_lookup_max: int = 16  # longest suffix that ngram looks up
    prompt_lookup_min: int = 1
    draft_sample_method: Literal["greedy", "probabilistic"] = (
        "probabilistic"  # heads: where the target draws, draft from their own law; greedy = always the likeliest
    )

    def __post_init__(self) -> None:
        _check_numbers(self, ("budget", "width", "prompt_lookup_max", "prompt_lookup_min"))
        methods = ("greedy", "probabilistic")
        _check(
            self.draft_sample_method in methods, "draft_sample_method", self.draft_sample_method, str(methods)
        )
        _check(self.budget is None or 0 <= self.budget <= 256, "budget", self.budget, "0 to 256 nodes")
        _check(self.width is None or 1 <= self.width <= 64, "width", self.width, "1 to 64")
        lowest = self.prompt_lookup_min
        _check(1 <= lowest <= self.prompt_lookup_max, "prompt_lookup_min", lowest, "1 to prompt_lookup_max")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Build one from a mapping in our names or in vLLM's (`method`, `model`, `num_speculative_tokens`)."""
        ours = {"method": "drafter", "model": "draft_model", "num_speculative_tokens": "budget"}
        known = set(cls.__dataclass_fields__)
        named = {ours.get(key, key): value for key, value in values.items()}
        if unknown := sorted(set(named) - known):
            raise InvalidInput(
                f"unknown speculative setting {unknown[0]!r}; known: {', '.join(sorted(known))}"
            )
        return cls(**named)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Where and how large the engine runs."""

    dtype: Dtype = "auto"  # auto = a GGUF file's own types or float32 on a CPU, bfloat16 on a GPU
    device: str = "auto"
    max_batch: int = 8  # sequences decoded together
    max_length: int | None = None  # prompt and output together; None = the model's own context
    kv_slots: int | None = None  # tokens the KV cache holds in all; None = grows as needed
    threads: int | None = None  # CPU threads; None = one per core

    def __post_init__(self) -> None:
        _check_numbers(self, ("max_batch", "max_length", "kv_slots", "threads"))
        _check(self.max_batch >= 1, "max_batch", self.max_batch, "at least 1")
        _check(self.threads is None or self.threads >= 1, "threads", self.threads, "at least 1")
        _check(self.max_length is None or self.max_length >= 2, "max_length", self.max_length, "at least 2")
