"""A drop-in for transformers users: `model = forerun.wrap(model)`, and `model.generate` drafts: the same ids.

The call takes what `generate` takes and returns what it returns, padding included. Greedy output equals
transformers' token for token; sampled output has the same law. What would change the result and is not
supported raises `InvalidInput` and names the argument; what only concerns speed or memory is left to us.

Two known differences: a repetition penalty does not count pad tokens, so that a text does not depend on its
neighbours; and a stop string must lie in the new text, where transformers lets it begin in the prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from forerun.build import make_engine
from forerun.dropin.generate_args import merge_settings, sampling_params, token_ids
from forerun.engine.detokenize import Decodes
from forerun.engine.driver import Driver
from forerun.engine.engine import Engine
from forerun.errors import InvalidInput, VocabularyMismatch
from forerun.models.hf.target import HFTarget
from forerun.params import SamplingParams, SpeculativeConfig
from forerun.types import Budget, Request

log = logging.getLogger(__name__)


def wrap(hf_model: Any, tokenizer: Decodes | None = None) -> Wrapped:
    """A transformers causal language model whose `generate` drafts; everything else is the model's own."""
    return Wrapped(hf_model, tokenizer)


class Wrapped:
    """The model, and an engine around it that is kept from call to call."""

    def __init__(self, hf_model: Any, tokenizer: Decodes | None = None) -> None:
        self._model, self._tokenizer = hf_model, tokenizer
        self._target = HFTarget(hf_model)
        self._engines: dict[tuple[int, int | None], Engine] = {}
        self._lock = Lock()  # streamers are read from another thread, which may call again

    def __getattr__(self, name: str) -> Any:
        if name == "_model":  # not there yet: somebody copies or unpickles
            raise AttributeError(name)
        return getattr(self._model, name)

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
        """Token ids [B, prompt + new], as transformers' `generate` returns them."""
        wish = merge_settings(self._model.generation_config, generation_config, kwargs)
        eos = token_ids(wish.get("eos_token_id"))
        pad = next(iter([*token_ids(wish.get("pad_token_id")), *eos]), None)
        ids = _input_ids(inputs if input_ids is None else input_ids, wish)  # [B, T]
        mask = _mask(ids, attention_mask, pad, eos)
        copies = _copies(wish)
        prompts = [ids[b][mask[b]].tolist() for b in range(len(ids)) for _ in range(copies)]
        streamer = wish.get("streamer")
        if streamer is not None and len(prompts) > 1:
            raise InvalidInput(f"streamer takes one text, not {len(prompts)}; drop it or pass one prompt")
        params = sampling_params(wish, ids.shape[1], eos)
        self._warn_of_context(max(map(len, prompts)), params.max_tokens)
        seed = _seed(wish)
        requests = [
            _request(prompt, params, None if seed is None else seed + i, wish)
            for i, prompt in enumerate(prompts)
        ]
        with self._lock:
            engine = self._engine(wish, len(requests))
            if streamer is not None:
                streamer.put(ids.cpu())
            rows = _run(engine, requests, streamer)
        sequences = _joined(ids.repeat_interleave(copies, 0), rows, pad)
        if not wish.get("return_dict_in_generate"):
            return sequences
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=sequences)

    def _engine(self, wish: Mapping[str, Any], batch: int) -> Engine:
        """The engine for this draft model and lookup length: what it has learnt about costs stays with it."""
        draft, lookup = wish.get("assistant_model"), wish.get("max_matching_ngram_size")
        key = (id(draft), lookup)
        if key not in self._engines:
            draft_target = None if draft is None else self._draft_target(draft)
            drafter = "ngram" if draft is None else "draft_model"
            speculative = SpeculativeConfig(
                drafter=drafter, **({"prompt_lookup_max": lookup} if lookup else {})
            )
            self._engines[key] = make_engine(
                self._target, frozenset(), speculative, draft_target=draft_target
            )
        engine = self._engines[key]
        engine.max_batch = batch  # the caller has chosen: the whole batch at once, as in transformers
        engine.tokenizer = (wish.get("tokenizer") or self._tokenizer) if wish.get("stop_strings") else None
        return engine

    def _draft_target(self, draft: Any) -> HFTarget:
        """The assistant as a target; padding may differ, more than that means other tokens."""
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
                "%d tokens exceed the context of %d; texts end there", longest + new, self._target.max_length
            )


def _request(prompt: list[int], params: SamplingParams, seed: int | None, wish: Mapping[str, Any]) -> Request:
    """One text; a number of drafted tokens that the caller names is kept to, else the controller decides."""
    drafter, nodes = None, wish.get("prompt_lookup_num_tokens")
    if nodes:
        drafter = "ngram"
    elif wish.get("assistant_model") is not None:
        drafter, nodes = "draft_model", wish.get("num_assistant_tokens")
    budget = Budget(int(nodes), int(nodes)) if nodes else None
    return Request(tuple(prompt), replace(params, seed=seed), drafter=drafter, budget=budget)


def _run(engine: Engine, requests: Sequence[Request], streamer: Any) -> list[list[int]]:
    """Write all texts; the new tokens of each, in order. Nothing is left in the engine, whatever happens."""
    rows: list[list[int]] = [[] for _ in requests]
    errors: list[Exception] = []
    for place, event in Driver(engine).stream(requests):
        rows[place] += event.tokens
        if event.error is not None:
            errors.append(event.error)
        if streamer is not None:
            streamer.put(torch.tensor(event.tokens))
    if errors:
        raise errors[0]
    if streamer is not None:
        streamer.end()
    return rows


def _joined(prompts: Tensor, rows: list[list[int]], pad: int | None) -> Tensor:
    """[B, T + new]: prompts as they came, and the new tokens padded on the right."""
    longest = max(map(len, rows))
    if pad is None and any(len(row) < longest for row in rows):
        raise InvalidInput("texts ended at unlike lengths and pad_token_id is not set; pass pad_token_id")
    new = [[*row, *[pad] * (longest - len(row))] for row in rows]
    return torch.cat([prompts, torch.tensor(new, dtype=prompts.dtype, device=prompts.device)], 1)


def _input_ids(ids: Tensor | None, wish: Mapping[str, Any]) -> Tensor:
    if ids is None:
        bos = wish.get("bos_token_id")
        if bos is None:
            raise InvalidInput("neither input_ids nor a bos_token_id to start from was given; pass input_ids")
        ids = torch.tensor([[bos]])
    if ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise InvalidInput(
            f"input_ids has shape {tuple(ids.shape)} and type {ids.dtype}; give token ids [B, T]"
        )
    return ids


def _mask(ids: Tensor, given: Tensor | None, pad: int | None, eos: list[int]) -> Tensor:
    """[B, T] which tokens count; told from the pads, as transformers does, where that is unambiguous."""
    if given is None:
        guess = pad is not None and pad not in eos
        given = ids.ne(pad) if guess and pad is not None else torch.ones_like(ids)
    if given.shape != ids.shape:
        raise InvalidInput(
            f"attention_mask has shape {tuple(given.shape)}, input_ids {tuple(ids.shape)}; pass one for all"
        )
    if not bool(given[:, -1].all()):
        raise InvalidInput("attention_mask hides the last token of a prompt; pad with padding_side='left'")
    return given.to(device=ids.device, dtype=torch.bool)


def _copies(wish: Mapping[str, Any]) -> int:
    copies = int(wish["num_return_sequences"] or 1)
    if copies > 1 and not wish["do_sample"]:
        raise InvalidInput(f"num_return_sequences={copies} would repeat one greedy text; set do_sample=True")
    return copies


def _seed(wish: Mapping[str, Any]) -> int | None:
    """The caller's, else one from torch's generator, so that torch.manual_seed makes sampling repeatable."""
    if wish.get("seed") is not None:
        return int(wish["seed"])
    return int(torch.randint(1 << 62, ())) if wish["do_sample"] else None
