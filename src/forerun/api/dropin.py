"""`forerun.wrap(model)`: a transformers model whose `generate` drafts and returns the same token ids.

The call takes what `generate` takes and returns what it returns, padding included. Greedy output equals
transformers' token for token; sampled output has the same law. What would change the result and is not
supported raises `InvalidInput` and names the argument; what only concerns speed or memory is left to us.

Two known differences: a repetition penalty does not count pad tokens, so that a sequence does not depend on its
neighbours; and a stop string must lie in the new text, where transformers lets it begin in the prompt.

Logits processors and stopping criteria are called as transformers' own loop calls them, token by token: a processor for
every node with the tokens up to it, pads included; a criterion for every token that was committed. Both must be
functions of the tokens they get.

The names of arguments and their precedence are transformers': arguments, then the configuration given with the call,
then the model's own, then the defaults. An unknown name in a configuration is ignored, as checkpoints carry many of
them; as an argument it is an error.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from forerun.api.completion import Completion, ended_of
from forerun.build.engine import make_engine
from forerun.core import registry
from forerun.core.checks import as_items, as_name, as_path, as_real, as_token_ids, as_whole, refuse, shown
from forerun.core.errors import ForerunError, InvalidInput, VocabularyMismatch
from forerun.core.params import LawProcessor, Prefix, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Request
from forerun.engine.driver import Driver, Handle
from forerun.engine.engine import Engine
from forerun.engine.sequence import Decodes, SequenceState
from forerun.heads import open_head
from forerun.models.hf import HFTarget

USED = frozenset({
    "max_new_tokens", "max_length", "min_new_tokens", "min_length", "do_sample", "temperature", "top_k",
    "top_p", "min_p", "repetition_penalty", "bad_words_ids", "suppress_tokens", "eos_token_id",
    "pad_token_id", "bos_token_id", "stop_strings", "assistant_model", "prompt_lookup_num_tokens",
    "max_matching_ngram_size", "num_assistant_tokens", "num_return_sequences", "return_dict_in_generate",
    "streamer", "tokenizer", "seed", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
    "no_repeat_ngram_size", "begin_suppress_tokens", "max_time",
})  # fmt: skip
# speed, memory, or beam search alone
HARMLESS = frozenset({
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config",
    "disable_compile", "synced_gpus", "early_stopping", "length_penalty", "diversity_penalty", "low_memory",
    "renormalize_logits", "remove_invalid_values", "prefill_chunk_size", "is_assistant",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "target_lookbehind", "assistant_early_exit", "speculation_type", "use_mtp", "logits_to_keep",
    "decoder_start_token_id", "trust_remote_code", "continuous_batching_config", "use_model_defaults",
    "return_dict",
})  # fmt: skip
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# what would change the text, and the value besides None at which it does not
OFF: dict[str, object] = {
    "num_beams": 1, "num_beam_groups": 1, "guidance_scale": 1, "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0, "penalty_alpha": 0, "token_healing": False,
    "constraints": [], "force_words_ids": [],
}  # fmt: skip
OFF_AT_NONE = frozenset({
    "dola_layers", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty",
    "sequence_bias", "watermarking_config", "negative_prompt_ids",
    "negative_prompt_attention_mask", "custom_generate", "inputs_embeds", "past_key_values", "position_ids",
    "token_type_ids", "assistant_tokenizer", "assistant_ensemble_weight",
})  # fmt: skip
OFF_WHEN_SAMPLING: dict[str, object] = {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None}
KNOWN = USED | HARMLESS | OFF_AT_NONE | {*OUTPUTS, *OFF, *OFF_WHEN_SAMPLING}
DEFAULTS = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "num_return_sequences": 1}
DEFAULT_NEW_TOKENS = 20  # transformers' own default
INSTEAD = "drop it, or call the model's own generate"
WHY_NOT = {
    "past_key_values": "Forerun keeps a KV cache of its own; pass all tokens as input_ids",
    "inputs_embeds": "drafters read tokens; pass input_ids",
    "position_ids": "positions follow from the attention mask; drop it",
    "num_beams": "one sequence is written per row; drop it, or call the model's own generate",
}


def merge_settings(of_model: Any, given: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All settings merged; raises where one is not supported."""
    for name, value in arguments.items():
        if name not in KNOWN and value is not None:
            near = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"did you mean {near[0]!r}? Else " if near else ""
            raise InvalidInput(f"{name}={shown(value)} is not an argument of Forerun's generate; {hint}{INSTEAD}")
    settings = dict[str, Any](DEFAULTS)
    for config in (of_model, given):
        if config is not None:
            settings |= {name: value for name, value in _fields(config).items() if value is not None}
    settings |= arguments
    off = OFF | dict.fromkeys(OFF_AT_NONE) | (OFF_WHEN_SAMPLING if settings["do_sample"] else {})
    if settings.get("return_dict_in_generate"):
        off |= dict.fromkeys(OUTPUTS, False)
    for name, neutral in off.items():
        value = settings.get(name)
        if value is not None and not _same(value, neutral):
            raise InvalidInput(f"{name}={_shown(value)} is not supported: {WHY_NOT.get(name, INSTEAD)}")
    return settings


def sampling_params(
    settings: Mapping[str, Any], width: int, eos: list[int], processors: Sequence[LawProcessor] = ()
) -> SamplingParams:
    """Our parameters for prompts that are `width` tokens wide, padding included."""
    new = _whole(settings, "max_new_tokens")
    if new is None:
        longest = _whole(settings, "max_length")
        new = DEFAULT_NEW_TOKENS if longest is None else longest - width
        if new < 1:
            given = f"max_length={longest} leaves no room"
            raise InvalidInput(f"{given} after {width} prompt tokens; set max_new_tokens instead")
    if new < 1:
        raise refuse("max_new_tokens", new, "at least 1")
    least = _whole(settings, "min_new_tokens")
    if least is None:
        least = max(0, (_whole(settings, "min_length") or 0) - width)
    stops = settings.get("stop_strings") or ()
    sampled: dict[str, Any] = {}
    if settings["do_sample"]:
        sampled = {
            "temperature": 1.0 if settings["temperature"] is None else settings["temperature"],
            "top_k": settings["top_k"] or 0,
            "top_p": 1.0 if settings["top_p"] is None else settings["top_p"],
            "min_p": settings.get("min_p") or 0.0,
        }
    return SamplingParams(
        max_tokens=new,
        min_tokens=min(least, new),
        repetition_penalty=settings.get("repetition_penalty") or 1.0,
        bad_words=_banned(settings, eos),
        stop=stops,
        stop_token_ids=tuple(eos),
        processors=processors,
        **sampled,
    )


def _banned(settings: Mapping[str, Any], eos: list[int]) -> list[tuple[int, ...]]:
    """Words that must not appear; the end token alone may, as transformers has it."""
    words = as_items("bad_words_ids", settings.get("bad_words_ids"), "lists of token ids")
    banned = [as_token_ids("bad_words_ids", word) for word in words]
    kept = [word for word in banned if word not in [(token,) for token in eos]]
    return [*kept, *((token,) for token in token_ids(settings.get("suppress_tokens"), "suppress_tokens"))]


def _whole(settings: Mapping[str, Any], name: str) -> int | None:
    value = settings.get(name)
    return None if value is None else as_whole(name, value)


def _fields(config: Any) -> dict[str, Any]:
    """What a configuration says, given as transformers' own class or as a dict."""
    if isinstance(config, Mapping):
        return dict(config)
    try:
        return dict(vars(config))
    except TypeError:
        raise refuse("generation_config", config, "a GenerationConfig or a dict") from None


def token_ids(value: Any, name: str = "eos_token_id") -> list[int]:
    """Token ids given as nothing, one, several or a tensor; negative ones mean none."""
    ids = as_items(name, value.tolist() if isinstance(value, Tensor) else value, "token ids")
    return [token for token in (as_whole(name, each) for each in ids) if token >= 0]


def _same(value: Any, neutral: object) -> bool:
    if isinstance(value, Tensor):
        return False
    if neutral == []:
        return isinstance(value, Sized) and len(value) == 0
    try:
        return bool(value == neutral)
    except Exception:  # of a caller's own class
        return False


def _shown(value: Any) -> str:
    """A value in a message: short, whatever it is."""
    return shown(value) if isinstance(value, (int, float, str)) else type(value).__name__


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


def check_streamer(streamer: Any, texts: int) -> Any:
    """transformers' streamers take one sequence."""
    if streamer is None:
        return None
    if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise InvalidInput(f"streamer={shown(streamer)} has no put and end; give one of transformers' streamers")
    if texts > 1:
        raise InvalidInput(f"streamer takes one sequence, not {texts}; drop it or pass one prompt")
    return streamer


def run(
    engine: Engine,
    requests: Sequence[Request],
    prompts: Sequence[list[int]],
    streamer: Any,
    criteria: Sequence[Hook],
    tokenizer: Decodes | None,
) -> list[Completion]:
    """All sequences, in order. `prompts` are the rows as they came, pads included. Nothing stays in the engine."""
    driver, handles = Driver(engine), dict[int, Handle]()
    texts = [_Text(prompt) for prompt in prompts]
    driver.expect(requests)
    try:
        for place, request in enumerate(requests):
            handles[place] = driver.submit(request)
        for place, event in driver.events(handles):
            fresh = texts[place].take(event.tokens, criteria)
            if texts[place].stopped:
                driver.abort(handles[place])
            if streamer is not None and fresh:
                streamer.put(torch.tensor(fresh))
    finally:
        for handle in handles.values():
            driver.abort(handle)
    if errors := [handle.seq.error for handle in handles.values() if handle.seq.error is not None]:
        raise errors[0]
    if streamer is not None:
        streamer.end()
    return [text.completion(handles[place].seq, engine, tokenizer) for place, text in enumerate(texts)]


class _Text:
    """One sequence being written."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt, self.written = prompt, list[int]()
        self.stopped = False  # by a criterion of the caller

    def take(self, tokens: Sequence[int], criteria: Sequence[Hook]) -> list[int]:
        """Add the tokens of a round, up to the one at which a criterion stops; those that were added."""
        if self.stopped:
            return []
        count = tokens_until_stop(criteria, [*self.prompt, *self.written], tokens) if criteria else None
        self.stopped = count is not None
        fresh = list(tokens[:count])
        self.written += fresh
        return fresh

    def completion(self, seq: SequenceState, engine: Engine, tokenizer: Decodes | None) -> Completion:
        done = ended_of(seq, engine.verifiers.get(seq.verifier).exact).completion()
        text = "" if tokenizer is None else tokenizer.decode(self.written)
        ended = "stop" if self.stopped else done.finish_reason
        return replace(done, text=text, token_ids=self.written, finish_reason=ended)


log = logging.getLogger(__name__)


def wrap(
    hf_model: Any, tokenizer: Decodes | None = None, *, drafter: str | None = None, draft_model: Any = None
) -> Wrapped:
    """A transformers causal language model whose `generate` drafts; everything else is the model's own.

    `drafter` is one of `forerun drafters`; `draft_model` a smaller transformers model, or the folder of a trained head.
    """
    return Wrapped(hf_model, tokenizer, drafter=drafter, draft_model=draft_model)


class Wrapped:
    """The model, and an engine around it that is kept from call to call."""

    def __init__(
        self, hf_model: Any, tokenizer: Decodes | None = None, *, drafter: str | None = None, draft_model: Any = None
    ) -> None:
        _check_model("wrap", hf_model)
        self._draft, head = None, None
        if isinstance(draft_model, str | PathLike):
            head = as_path("draft_model", draft_model)
        elif draft_model is not None:
            _check_model("draft_model", draft_model)
            self._draft = draft_model
        self._drafter = _drafter_named(drafter, self._draft, head)
        self._head = head
        self._model, self._tokenizer = hf_model, tokenizer
        self._target = HFTarget(hf_model)
        self._engines: dict[tuple[int, int | None], Engine] = {}
        self._lock = Lock()  # streamers are read from another thread, which may call again
        self.last: list[Completion] = []  # the completions of the last call

    def __getattr__(self, name: str) -> Any:
        if name == "_model":  # not set yet: the object is being copied or unpickled
            raise AttributeError(name)
        return getattr(self._model, name)

    def __repr__(self) -> str:
        return f"wrap({type(self._model).__name__}, drafter={self._drafter!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Token ids [B, prompt + new], as transformers' `generate` returns them; `last` has their completions."""
        settings = merge_settings(self._model.generation_config, generation_config, kwargs)
        eos = token_ids(settings.get("eos_token_id"))
        pad = next(iter([*token_ids(settings.get("pad_token_id"), "pad_token_id"), *eos]), None)
        ids = _input_ids(inputs if input_ids is None else input_ids, settings)  # [B, T]
        mask = _mask(ids, attention_mask, pad, eos)
        copies = _copies(settings)
        rows = [b for b in range(len(ids)) for _ in range(copies)]
        streamer = check_streamer(settings.get("streamer"), len(rows))
        seed = _seed(settings)
        requests = []
        for place, b in enumerate(rows):
            prompt = ids[b][mask[b]].tolist()
            params = sampling_params(settings, ids.shape[1], eos, law_processors(settings, ids[b], len(prompt), b))
            own = replace(params, seed=None if seed is None else seed + place)
            requests.append(_request(prompt, own, settings))
        self._warn_of_context(max(len(each.prompt) for each in requests), requests[0].params.max_tokens)
        criteria = stopping_criteria(settings)
        with self._lock:
            engine = self._engine(settings, len(requests))
            if streamer is not None:
                streamer.put(ids.cpu())
            tokenizer = _decoder(settings, self._tokenizer)
            self.last = run(engine, requests, [ids[b].tolist() for b in rows], streamer, criteria, tokenizer)
        written = [done.token_ids for done in self.last]
        sequences = _joined(ids.repeat_interleave(copies, 0), written, pad)
        if not settings.get("return_dict_in_generate"):
            return sequences
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=sequences)

    def _engine(self, settings: Mapping[str, Any], batch: int) -> Engine:
        """The engine for this draft model and lookup length: what it has learnt about costs stays with it."""
        given, lookup = settings.get("assistant_model"), settings.get("max_matching_ngram_size")
        draft = self._draft if given is None else given
        key = (id(draft), None if lookup is None else as_whole("max_matching_ngram_size", lookup, low=1))
        if key not in self._engines:
            drafter = self._drafter if given is None else "draft_model"
            speculative = SpeculativeConfig(drafter=drafter, draft_model=self._head)
            if lookup:
                speculative = replace(speculative, prompt_lookup_max=lookup)
            self._engines[key] = make_engine(
                self._target,
                frozenset(),
                speculative,
                draft_target=None if draft is None else self._draft_target(draft),
            )
        engine = self._engines[key]
        engine.max_batch = batch  # the caller has chosen: all rows in one batch, as in transformers
        engine.tokenizer = _decoder(settings, self._tokenizer) if settings.get("stop_strings") else None
        return engine

    def _draft_target(self, draft: Any) -> HFTarget:
        """The assistant as a target; padding may differ, more than that means other tokens."""
        _check_model("assistant_model", draft)
        target = HFTarget(draft)
        ours, theirs = self._target.vocab_size, target.vocab_size
        if abs(ours - theirs) > max(ours, theirs) // 100:
            raise VocabularyMismatch(
                f"assistant_model ({target.family}) has {theirs} tokens and the model ({self._target.family}) "
                f"{ours}: they do not share a vocabulary; use one of the same family"
            )
        return target

    def _warn_of_context(self, longest: int, new: int) -> None:
        if longest + new > self._target.max_length:
            log.warning(
                "%d tokens exceed the context of %d; sequences end there", longest + new, self._target.max_length
            )


def _check_model(name: str, model: Any) -> None:
    """A name or a path is no model yet, and neither is anything that transformers did not make."""
    if isinstance(model, str | PathLike):
        load = f"AutoModelForCausalLM.from_pretrained({shown(model)})"
        raise InvalidInput(f"{name} takes a model that is loaded, not a name; pass {load}, or use LLM")
    if isinstance(model, type) or not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise InvalidInput(f"{name} takes a transformers causal language model, not {type(model).__name__}")


def _drafter_named(drafter: str | None, draft: Any, head: str | None) -> str:
    """The drafter to use by default: as named, or what the draft model is, or lookup."""
    if drafter is not None and as_name("drafter", drafter) != "auto":
        return registry.drafters.spec(drafter).name  # an unknown one is the caller's error, now
    if head is not None:
        found = open_head(Path(head).expanduser())
        if found is None:
            raise InvalidInput(f"draft_model={shown(head)} holds no trained head; for a model, pass it loaded")
        return found.drafter
    return "ngram" if draft is None else "draft_model"


def _decoder(settings: Mapping[str, Any], own: Decodes | None) -> Decodes | None:
    tokenizer: Decodes | None = settings.get("tokenizer") or own
    try:
        assert tokenizer is None or isinstance(tokenizer.decode([0]), str)
    except Exception:  # not a tokenizer: it may fail at anything
        raise InvalidInput(
            f"tokenizer={shown(tokenizer)} cannot decode token ids; pass the model's tokenizer"
        ) from None
    return tokenizer


def _request(prompt: list[int], params: SamplingParams, settings: Mapping[str, Any]) -> Request:
    """The request of one row; the caller's number of drafted tokens is fixed, else the controller decides."""
    drafter, name = None, "prompt_lookup_num_tokens"
    if settings.get(name):
        drafter = "ngram"
    elif settings.get("assistant_model") is not None:
        drafter, name = "draft_model", "num_assistant_tokens"
    nodes = as_whole(name, settings[name], 0, 256) if settings.get(name) and drafter else 0
    budget = Budget(nodes, nodes) if nodes else None
    return Request(tuple(prompt), params, drafter=drafter, budget=budget)


def _joined(prompts: Tensor, rows: list[list[int]], pad: int | None) -> Tensor:
    """[B, T + new]: prompts as they came, and the new tokens padded on the right."""
    longest = max(map(len, rows))
    if pad is None and any(len(row) < longest for row in rows):
        raise InvalidInput("sequences ended at different lengths and pad_token_id is not set; pass pad_token_id")
    new = [[*row, *[pad] * (longest - len(row))] for row in rows]
    return torch.cat([prompts, torch.tensor(new, dtype=prompts.dtype, device=prompts.device)], 1)


def _input_ids(given: Any, settings: Mapping[str, Any]) -> Tensor:
    if given is None:
        bos = settings.get("bos_token_id")
        if bos is None:
            raise InvalidInput("neither input_ids nor a bos_token_id to start from was given; pass input_ids")
        given = [[as_whole("bos_token_id", bos, low=0)]]
    ids = _as_tensor("input_ids", given)
    if ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise InvalidInput(f"input_ids has shape {tuple(ids.shape)} and type {ids.dtype}; give token ids [B, T]")
    return ids


def _as_tensor(name: str, value: Any) -> Tensor:
    """Lists and arrays are fine; text is not."""
    try:
        return torch.as_tensor(value)
    except Exception:
        raise InvalidInput(f"{name}={shown(value)} are no token ids [B, T]; encode text first") from None


def _mask(ids: Tensor, given: Any, pad: int | None, eos: list[int]) -> Tensor:
    """[B, T] which tokens count; inferred from the pads, as transformers does, where that is unambiguous."""
    if given is None:
        guess = pad is not None and pad not in eos
        mask = ids.ne(pad) if guess and pad is not None else torch.ones_like(ids)
    else:
        mask = _as_tensor("attention_mask", given)
    if mask.shape != ids.shape:
        raise InvalidInput(
            f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}; pass one for all"
        )
    if not bool(mask[:, -1].all()):
        raise InvalidInput("attention_mask hides the last token of a prompt; pad with padding_side='left'")
    return mask.to(device=ids.device, dtype=torch.bool)


def _copies(settings: Mapping[str, Any]) -> int:
    copies = as_whole("num_return_sequences", settings["num_return_sequences"] or 1, 1, 1024)
    if copies > 1 and not settings["do_sample"]:
        raise InvalidInput(f"num_return_sequences={copies} would repeat one greedy sequence; set do_sample=True")
    return copies


def _seed(settings: Mapping[str, Any]) -> int | None:
    """The caller's, else one from torch's generator, so that torch.manual_seed makes sampling repeatable."""
    if settings.get("seed") is not None:
        return as_whole("seed", settings["seed"])
    return int(torch.randint(1 << 62, ())) if settings["do_sample"] else None
