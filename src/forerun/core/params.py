"""The settings of a user: SamplingParams, SpeculativeConfig, EngineConfig; checked when made. Imports no torch.

The names are the ones people know from transformers, vLLM and the OpenAI API; `from_dict` takes their other spellings.
Numbers may be numpy's or torch's. Penalties and biases have limits, so that no law overflows: see `SamplingParams`.

LawProcessor: a caller's logits processor, a function of the tokens so far and the logits. No torch here.

    def no_token_twice(prefix: Prefix, logits: Tensor) -> Tensor:
        logits[prefix.ids] = -torch.inf
        return logits

    llm.generate("Once", processors=[no_token_twice])

`forerun.verify.processors` calls them and has ready-made ones: `Allow` for masks, `AllowByState` for grammars.

Structure: what an answer is held to, as plain values: made of `response_format` and `structured_outputs`. No torch.

`forerun.verify.grammar` compiles it and makes it part of the law.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, get_args

from forerun.core.checks import (
    as_flag,
    as_functions,
    as_given,
    as_items,
    as_memory,
    as_name,
    as_path,
    as_real,
    as_token_ids,
    as_whole,
    one_format,
    refuse,
    short_repr,
    unknown,
)
from forerun.core.errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor


KvDtype = Literal["auto", "int8", "fp8"]
DraftDtype = Literal["auto", "bfloat16", "int8", "fp8", "w4"]
Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "w4", "q8", "gguf"]
LARGEST_BIAS, LARGEST_PENALTY = 1e9, 1e3  # at the lowest temperature fp32 still has room for them
SPELLINGS = {  # what others call the fields of SamplingParams
    "max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "min_new_tokens": "min_tokens",
    "repeat_penalty": "repetition_penalty", "stop_strings": "stop", "bad_words_ids": "bad_words",
    "logits_processors": "processors", "logits_processor": "processors", "top_logprobs": "logprobs",
    "thinking_token_budget": "max_thinking_tokens",
}  # fmt: skip
_VLLM_DRAFTING = {"method": "drafter", "model": "draft_model", "num_speculative_tokens": "budget"}
ENGINE_SPELLINGS = {
    "max_model_len": "max_length", "n_ctx": "max_length", "max_num_seqs": "max_batch", "n_threads": "threads",
    "torch_dtype": "dtype", "quantization": "dtype", "kv_cache_memory_bytes": "kv_memory", "kv_cache_dtype": "kv_dtype",
}  # fmt: skip


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams as keywords of a call; None = not given."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[Sequence[int]] | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    seed: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    processors: Sequence[LawProcessor] | None
    response_format: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    max_thinking_tokens: int | None


@dataclass(frozen=True, slots=True, repr=False)
class SamplingParams:
    """How the tokens of one request are sampled. The defaults are greedy.

    The law is built in the order transformers uses: bias, repetition penalty, presence and frequency penalties, bad
    words, min tokens, processors, temperature, top-k, top-p, min-p. Penalties count the node's own path. Presence
    and frequency penalties lie within +-1000, a repetition penalty within 0.001 and 1000, a bias within +-1e9 or at
    -inf, which bans the token: beyond, numbers would overflow and the output could depend on the drafts.
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
    prompt_logprobs: int | None = None  # of the prompt's tokens under the model's own law: 0 = theirs only, to 20
    processors: Sequence[LawProcessor] = ()  # change the law, node by node
    response_format: Mapping[str, Any] | None = None  # what the answer must match, as the OpenAI API has it
    structured_outputs: Mapping[str, Any] | None = None  # how, as vLLM has it: {"disable_any_whitespace": False}
    max_thinking_tokens: int | None = None  # of a model that thinks before it answers; None = as many as it takes

    def __post_init__(self) -> None:
        penalties, functions = (1 / LARGEST_PENALTY, LARGEST_PENALTY), "functions of (prefix, logits)"
        _store(
            self,
            max_tokens=as_whole("max_tokens", self.max_tokens, low=1),
            temperature=_temperature(self.temperature),
            top_k=max(0, as_whole("top_k", self.top_k, low=-1)),  # -1 means off in vLLM
            top_p=as_real("top_p", self.top_p, high=1.0, limit="above 0, at most 1 (off)"),
            min_p=as_real("min_p", self.min_p, 0.0, 1.0),
            repetition_penalty=as_real("repetition_penalty", self.repetition_penalty, *penalties),
            presence_penalty=_penalty("presence_penalty", self.presence_penalty),
            frequency_penalty=_penalty("frequency_penalty", self.frequency_penalty),
            logit_bias=_biases(self.logit_bias),
            bad_words=_words(self.bad_words),
            min_tokens=as_whole("min_tokens", self.min_tokens, low=0),
            stop=_strings(self.stop),
            stop_token_ids=as_token_ids("stop_token_ids", self.stop_token_ids),
            ignore_eos=as_flag("ignore_eos", self.ignore_eos),
            seed=None if self.seed is None else as_whole("seed", self.seed),
            logprobs=None if self.logprobs is None else as_whole("logprobs", self.logprobs, 0, 64),
            prompt_logprobs=(
                None if self.prompt_logprobs is None else as_whole("prompt_logprobs", self.prompt_logprobs, 0, 20)
            ),
            processors=as_functions("processors", self.processors, functions, "LawProcessor"),
            response_format=plain("response_format", self.response_format),
            structured_outputs=plain("structured_outputs", self.structured_outputs),
            max_thinking_tokens=_at_least("max_thinking_tokens", self.max_thinking_tokens, 0),
        )
        structure_of(self.response_format, self.structured_outputs)  # raises where they are wrong
        if self.top_p <= 0.0:
            raise refuse("top_p", self.top_p, "above 0, at most 1 (off)")
        if self.min_tokens > self.max_tokens:
            raise refuse("min_tokens", self.min_tokens, f"0 to max_tokens, which is {self.max_tokens}")

    __repr__ = short_repr

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def structure(self) -> Structure | None:
        """What the answer must match; None = nothing."""
        return structure_of(self.response_format, self.structured_outputs)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], over: SamplingParams | None = None) -> SamplingParams:
        """Build one from a mapping in our names or in others' (`SPELLINGS`), on top of another; None = not given.

        `json_schema` is a `response_format` with this schema, `guided_regex` and the like are `structured_outputs`.
        """
        values = dict(values) if isinstance(values, Mapping) else values
        if isinstance(values, dict) and (schema := values.pop("json_schema", None)) is not None:
            if values.get("response_format") is not None:
                raise InvalidInput("json_schema and response_format say the same; give one of them")
            values["response_format"] = for_schema(schema)
        for name in [*_GUIDED] if isinstance(values, dict) else ():
            if (asked := values.pop(name, None)) is not None:
                values["structured_outputs"] = {**(values.get("structured_outputs") or {}), _GUIDED[name]: asked}
        if isinstance(values, dict) and isinstance(values.get("logprobs"), bool):  # as OpenAI's chats have it
            most = values.pop("top_logprobs", None) or 0
            values["logprobs"] = most if values["logprobs"] else None
        given = as_given(cls, values, SPELLINGS, "sampling parameter")
        if over is None:
            return cls(**given)
        return cls(**({each.name: getattr(over, each.name) for each in fields(cls)} | given)) if given else over


@dataclass(frozen=True, slots=True, repr=False)
class SpeculativeConfig:
    """How to draft. `from_dict` also takes vLLM's names."""

    drafter: str = "auto"  # auto = by draft_model, else a head that comes for this model, else look-ups
    draft_model: str | None = None  # a checkpoint, or the folder of a trained head
    budget: int | None = None  # drafted nodes per round at most; 0 = do not draft; None = what may pay
    width: int | None = None  # children per node at most: 1 = a chain; None = what may pay
    verifier: str = "auto"  # auto = coupled with a seed or on a GPU, else exact
    controller: str = "adaptive"
    prompt_lookup_max: int = 16  # longest suffix that ngram looks up
    prompt_lookup_min: int = 1
    draft_sample_method: Literal["auto", "greedy", "probabilistic"] = "auto"  # T > 0; auto = drawn on a CPU
    corpus: str | None = None  # a file of `forerun corpus build` that suffix looks up
    shared: bool = False  # suffix, recycling and lookahead learn from earlier requests of the same tenant
    history: str | None = None  # a file that keeps what suffix learnt so; needs shared
    draft_layers: str | None = None  # a plan of layers that layer_skip runs, or a number of first layers
    draft_context: int = 1024  # tokens of a long context that sparse_kv drafts over
    # weights of a head or draft model; auto = int8 in a wide head on a GPU, dtype in a draft model
    draft_dtype: DraftDtype = "auto"

    def __post_init__(self) -> None:
        methods = "auto", "greedy", "probabilistic"
        longest = as_whole("prompt_lookup_max", self.prompt_lookup_max, low=1)
        _store(
            self,
            drafter=as_name("drafter", self.drafter),
            draft_model=_path("draft_model", self.draft_model),
            budget=None if self.budget is None else as_whole("budget", self.budget, 0, 256),
            width=None if self.width is None else as_whole("width", self.width, 1, 64),
            verifier=as_name("verifier", self.verifier),
            controller=as_name("controller", self.controller),
            prompt_lookup_max=longest,
            prompt_lookup_min=as_whole("prompt_lookup_min", self.prompt_lookup_min, 1, longest),
            draft_sample_method=as_name("draft_sample_method", self.draft_sample_method, methods),
            corpus=_path("corpus", self.corpus),
            shared=as_flag("shared", self.shared),
            history=_path("history", self.history),
            draft_layers=_path("draft_layers", self.draft_layers),
            draft_context=as_whole("draft_context", self.draft_context, low=1),
            draft_dtype=as_name("draft_dtype", self.draft_dtype, get_args(DraftDtype)),
        )
        if self.history is not None and not self.shared:
            raise InvalidInput("history keeps what requests share; set shared=True as well")

    __repr__ = short_repr

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Build one from a mapping in our names or in vLLM's (`method`, `model`, `num_speculative_tokens`)."""
        return cls(**as_given(cls, values, _VLLM_DRAFTING, "speculative setting"))


@dataclass(frozen=True, slots=True, repr=False)
class EngineConfig:
    """Where and how large the engine runs. `from_dict` also takes vLLM's and llama-cpp-python's names."""

    # auto = what the file has packed (of a GGUF file on a CPU alone), else float32 (CPU) or bfloat16 (GPU);
    # gguf = a GGUF file's own types on both
    dtype: Dtype = "auto"
    device: str = "auto"
    max_batch: int | None = None  # sequences decoded together; None = by device, cores and KV memory
    max_length: int | None = None  # prompt and output together; None = the model's context; kv_slots at most
    kv_slots: int | None = None  # tokens the KV cache holds in all; None = by kv_memory
    kv_memory: int | float | str | None = None  # of the KV cache: bytes, 8GB, 0.5 or 50% of what is free
    kv_dtype: KvDtype = "auto"  # of the KV cache; int8, fp8 (on a GPU) = a byte a number and a scale per head and token
    threads: int | None = None  # CPU threads; None = one per core
    tensor_parallel_size: int = 1  # processes, each on a GPU of its own, that a model is split over
    adapters: Mapping[str, str] = field(default_factory=dict)  # LoRA adapters beside the model: name -> folder
    adapter_memory: int | float | str | None = None  # of adapters: bytes, 1GB, or a share; None = no limit

    def __post_init__(self) -> None:
        dtype, device = self.dtype, self.device
        if type(dtype).__module__ == "torch":  # torch.float32 is what its name says
            dtype = str(dtype).removeprefix("torch.")  # type: ignore[assignment]
        device = str(device) if type(device).__name__ == "device" else device
        _store(
            self,
            dtype=as_name("dtype", dtype, get_args(Dtype)),
            device=as_name("device", device),
            max_batch=_at_least("max_batch", self.max_batch, 1),
            max_length=_at_least("max_length", self.max_length, 2),
            kv_slots=_at_least("kv_slots", self.kv_slots, 2),
            kv_memory=as_memory("kv_memory", self.kv_memory),
            kv_dtype=as_name("kv_dtype", self.kv_dtype, get_args(KvDtype)),
            threads=None if self.threads is None else as_whole("threads", self.threads, 1, 4096),
            tensor_parallel_size=as_whole("tensor_parallel_size", self.tensor_parallel_size, 1, 64),
            adapters=_folders("adapters", self.adapters),
            adapter_memory=as_memory("adapter_memory", self.adapter_memory),
        )

    __repr__ = short_repr

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build one from a mapping in our names or in others' (`max_model_len`, `n_ctx`, `n_threads`, ...)."""
        if isinstance(values, Mapping) and values.get("quantization") is not None:
            left = {**values}
            given = [left.pop(name) for name in ("dtype", "torch_dtype") if name in left]
            if len(given) < 2:  # else told below
                left["dtype"] = one_format(next(iter(given), None), left.pop("quantization"), get_args(Dtype))
                values = left
        return cls(**as_given(cls, values, ENGINE_SPELLINGS, "engine setting"))


def _store(settings: object, **values: Any) -> None:
    """Put checked values into a frozen object while it is made."""
    for name, value in values.items():
        object.__setattr__(settings, name, value)


def _at_least(name: str, value: Any, low: int) -> int | None:
    return None if value is None else as_whole(name, value, low=low)


def _path(name: str, value: Any) -> str | None:
    return None if value is None else as_path(name, value)


def _folders(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise refuse(name, value, "folders by name, as {'support': 'adapters/support'}")
    return {as_name(name, key): as_path(name, folder) for key, folder in value.items()}


def _temperature(value: Any) -> float:
    limit = "0 (greedy), or 0.0001 to 10000"  # beyond, logits overflow
    number = as_real("temperature", value, 0.0, 1e4, limit)
    if 0.0 < number < 1e-4:
        raise refuse("temperature", value, limit)
    return number


def _penalty(name: str, value: Any) -> float:
    return as_real(name, value, -LARGEST_PENALTY, LARGEST_PENALTY)


def _biases(value: Any) -> dict[int, float]:
    """Token id to bias; ids may be text, as they are in JSON."""
    limit = "token ids to numbers from -1e9 to 1e9, or to -inf, which bans the token"
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refuse("logit_bias", value, limit)
    try:
        pairs = [(_bias_token(token), bias) for token, bias in value.items()]
        return {token: _bias(bias) for token, bias in pairs}
    except InvalidInput:
        raise refuse("logit_bias", value, limit) from None


def _bias_token(token: Any) -> int:
    if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 20:
        token = int(token)
    return as_whole("logit_bias", token, low=0)


def _bias(value: Any) -> float:
    if isinstance(value, float) and value == -math.inf:
        return value
    return as_real("logit_bias", value, -LARGEST_BIAS, LARGEST_BIAS)


def _words(value: Any) -> tuple[tuple[int, ...], ...]:
    limit = "sequences of token ids (llm.tokenizer.encode makes them of text), none of them empty"
    words = as_items("bad_words", value, limit)
    if any(not isinstance(word, Sequence) and not hasattr(word, "tolist") for word in words):
        raise refuse("bad_words", value, limit)
    try:
        made = tuple(as_token_ids("bad_words", word) for word in words)
    except InvalidInput:
        raise refuse("bad_words", value, limit) from None
    if not all(made):
        raise refuse("bad_words", value, limit)
    return made


def _strings(value: Any) -> tuple[str, ...]:
    limit = "a string or several, none of them empty"
    strings = (value,) if isinstance(value, str) else tuple(as_items("stop", value, limit))
    if not all(isinstance(stop, str) and stop for stop in strings):
        raise refuse("stop", value, limit)
    return strings


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens before the one in question, as they would be if the node were accepted. Read-only."""

    committed: Sequence[int]  # prompt and output: final
    prompt_length: int  # how many of them are the prompt
    path: Sequence[int] = ()  # drafted tokens from there to this node

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return [*self.committed, *self.path]

    @property
    def output(self) -> tuple[int, ...]:
        """All tokens after the prompt."""
        return (*self.committed[self.prompt_length :], *self.path)


class LawProcessor(Protocol):
    """Changes the logits of the token after a prefix.

    It is called for every node of every tree with the node's own path, also for drafts that are rejected,
    in any order and more than once: what it returns must be a function of the prefix and the logits. It
    is not called where the path holds a token that was ruled out. It comes after penalties and bans, before
    temperature.
    """

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        """The logits [V] fp32 to use, -inf = impossible; the ones given may be changed and returned."""


class Forces:
    """A LawProcessor that rules tokens out, and can say of one without looking at all others."""

    @abstractmethod
    def forced(self, prefix: Prefix) -> Sequence[int]:
        """The tokens that must follow, as far as that is known; empty where there is a choice."""

    @abstractmethod
    def choice(self, prefix: Prefix, top: int) -> int | None:
        """The likeliest token that may follow, where `top` is the likeliest of all; None = not known without a mask."""


# between the parts of a JSON text: one space at most, behind a comma or a colon | none | any amount of it
Whitespace = Literal["compact", "none", "any"]
StructureKind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]
_FORMATS = "text", "json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"
_HOW = ("disable_any_whitespace",)  # of vLLM's structured_outputs: how, beside what
_OUTPUTS = (*_HOW, "json", "json_object", "regex", "choice", "grammar", "structural_tag")
_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}  # vLLM's older names
LONGEST_STRUCTURE = 200_000  # characters of a pattern or a grammar, and of all choices


@dataclass(frozen=True, slots=True)
class Structure:
    """What every answer must match."""

    kind: StructureKind
    text: str  # a JSON schema, a pattern or a grammar; of choices and tags their JSON
    whitespace: Whitespace = "compact"


def structure_of(response_format: Any, structured_outputs: Any) -> Structure | None:
    """What these two ask for, in the OpenAI API's and vLLM's shape; None = a free text."""
    whitespace = _whitespace(structured_outputs)
    asked = _asked_by_vllm(structured_outputs)
    own = _asked_by_format(response_format)
    if asked is not None and own is not None:
        raise InvalidInput("response_format and structured_outputs both say what to match; give one of them")
    found = asked or own
    return None if found is None else Structure(found[0], found[1], whitespace)


def _asked_by_format(response_format: Any) -> tuple[StructureKind, str] | None:
    if response_format is None:
        return None
    limit = "a mapping such as {'type': 'json_schema', 'json_schema': {'name': 'answer', 'schema': {...}}}"
    if not isinstance(response_format, Mapping):
        raise refuse("response_format", response_format, limit)
    kind = as_name("response_format.type", response_format.get("type"), _FORMATS)
    if kind == "text":
        return None
    if kind == "json_object":
        return _checked("json_object", True)
    if kind == "json_schema":
        named = response_format.get("json_schema")
        if not isinstance(named, Mapping) or "schema" not in named:
            raise InvalidInput("response_format of type json_schema needs a json_schema with a schema")
        return _checked("json", named["schema"])
    if kind == "structural_tag":
        return _checked(kind, {key: response_format.get(key) for key in ("structures", "triggers", "format")})
    if response_format.get(kind) is None:
        raise InvalidInput(f"response_format of type {kind} needs a field {kind!r}: what to match")
    return _checked(kind, response_format[kind])


def _asked_by_vllm(structured_outputs: Any) -> tuple[StructureKind, str] | None:
    given = structured_outputs or {}
    asked = {name: given[name] for name in _OUTPUTS if name not in _HOW and given.get(name) not in (None, False)}
    if len(asked) > 1:
        raise InvalidInput(f"structured_outputs says {' and '.join(asked)}; give one of them")
    for name, value in asked.items():
        if name in ("json", "structural_tag") and isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise refuse(f"structured_outputs.{name}", value, "JSON") from None
        return _checked(name, value)
    return None


def _checked(name: str, value: Any) -> tuple[StructureKind, str]:
    """What must be matched, by its kind, as a text."""
    match name:
        case "json_object":
            return "json_schema", json.dumps({"type": "object"})
        case "json":
            return "json_schema", _as_json("json_schema", value)
        case "choice":
            choices = as_items("choice", value, "texts to choose from, none of them empty")
            if not choices or not all(isinstance(one, str) and one for one in choices):
                raise refuse("choice", value, "texts to choose from, none of them empty")
            return "choice", _not_too_long("choice", json.dumps([*dict.fromkeys(choices)]))
        case "structural_tag":
            return "structural_tag", _tags(value)
    if not isinstance(value, str) or not value:
        raise refuse(name, value, "a text, and not an empty one")
    return ("regex" if name == "regex" else "grammar"), _not_too_long(name, value)


def _tags(value: Any) -> str:
    """Free text in which tags hold structured parts: vLLM's `structures` and `triggers`, or its newer `format`."""
    limit = (
        "{'structures': [{'begin': '<f>', 'schema': {...}, 'end': '</f>'}], 'triggers': ['<f']}, "
        "where a trigger is how a begin begins"
    )
    if isinstance(value, Mapping) and value.get("format") is not None:
        value = _triggered(value["format"])
    structures, triggers = (
        value.get(key) if isinstance(value, Mapping) else None for key in ("structures", "triggers")
    )
    if not isinstance(structures, Sequence) or not isinstance(triggers, Sequence) or not structures:
        raise refuse("structural_tag", value, limit)
    tags = list[dict[str, Any]]()
    for one in structures:
        begin, end = (one.get(key) if isinstance(one, Mapping) else None for key in ("begin", "end"))
        trigger = next((t for t in triggers if isinstance(t, str) and t and str(begin).startswith(t)), None)
        if not (isinstance(begin, str) and isinstance(end, str)) or trigger is None:
            raise refuse("structural_tag", one, limit)
        tags.append({"trigger": trigger, "begin": begin, "schema": one.get("schema", {}), "end": end})
    return _not_too_long("structural_tag", _as_json("structural_tag", tags))


def _triggered(form: Any) -> dict[str, Any]:
    """The same in vLLM's older form, where the newer one says no more than that."""
    limit = (
        "{'type': 'triggered_tags', 'triggers': ['<f'], 'tags': [{'begin': '<f>', 'content': "
        "{'type': 'json_schema', 'json_schema': {...}}, 'end': '</f>'}]}"
    )
    fits = isinstance(form, Mapping) and form.get("type") == "triggered_tags" and isinstance(form.get("tags"), list)
    if not fits or any(form.get(name) for name in ("at_least_one", "stop_after_first")):
        raise refuse("structural_tag.format", form, limit)
    structures = list[dict[str, Any]]()
    for tag in form["tags"]:
        content = tag.get("content") if isinstance(tag, Mapping) else None
        if not isinstance(content, Mapping) or content.get("type") != "json_schema" or "json_schema" not in content:
            raise refuse("structural_tag.format", tag, limit)
        structures.append({"begin": tag.get("begin"), "schema": content["json_schema"], "end": tag.get("end")})
    return {"structures": structures, "triggers": form.get("triggers")}


def _not_too_long(name: str, text: str) -> str:
    if len(text) > LONGEST_STRUCTURE:
        raise InvalidInput(f"{name} has {len(text)} characters; at most {LONGEST_STRUCTURE} are taken: shorten it")
    return text


def for_schema(schema: Any) -> dict[str, Any]:
    """The `response_format` of answers that match a JSON schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def plain(name: str, value: Any) -> Any:
    """A value of JSON in Python's own types, which another process can be sent."""
    return None if value is None else json.loads(_as_json(name, value))


def _as_json(name: str, value: Any) -> str:
    try:
        text = json.dumps(value, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise refuse(name, value, f"what JSON can hold ({type(error).__name__})") from None
    return text


def _whitespace(structured_outputs: Any) -> Whitespace:
    if structured_outputs is None:
        return "compact"
    if not isinstance(structured_outputs, Mapping):
        raise refuse("structured_outputs", structured_outputs, "a mapping: {'disable_any_whitespace': False}")
    if strange := [name for name in structured_outputs if name not in _OUTPUTS]:
        raise InvalidInput(unknown("field of structured_outputs", strange[0], _OUTPUTS))
    disabled = structured_outputs.get("disable_any_whitespace")
    if disabled is None:
        return "compact"
    return "none" if as_flag("disable_any_whitespace", disabled) else "any"
