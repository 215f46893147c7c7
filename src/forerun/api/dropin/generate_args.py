"""Translate the arguments of transformers' `generate`: which are used, ignored or refused.

The names and the precedence are transformers': arguments, then the configuration given with the call, then
the model's own, then the defaults. An unknown name in a configuration is ignored, as checkpoints
carry many of them; as an argument it is an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from torch import Tensor

from forerun.core.checks import as_items, as_token_ids, as_whole, refuse, shown
from forerun.core.errors import InvalidInput
from forerun.core.params import LawProcessor, SamplingParams

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
