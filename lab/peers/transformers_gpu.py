"""The peer transformers on a GPU: its own `generate` on the weights of an inflated model."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from forerun.core.errors import UnsupportedModel
from lab.inflate.model import InflatedWeights


def load_inflated(weights: InflatedWeights) -> Any:
    """transformers' model with these very weights, on their device; no second copy is made in memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in weights.config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings), dtype=weights.dtype)
    wrong = model.load_state_dict({name: weights[name] for name in weights}, strict=False, assign=True)
    if wrong.missing_keys or wrong.unexpected_keys:
        name = [*wrong.missing_keys, *wrong.unexpected_keys][0]
        raise UnsupportedModel(f"transformers cannot take these weights: {name} does not fit; leave it out")
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):  # made on the meta device, and not in the weights
            fresh = type(module)(config=model.config).to(weights.device)
            module.inv_freq, module.original_inv_freq = fresh.inv_freq, fresh.inv_freq
    return model.eval()


def time_transformers(weights: InflatedWeights, prompts: Sequence[tuple[int, ...]], tokens: int = 24) -> float:
    """Tokens per second of `generate` with the same weights; everything is written once before it is timed."""
    model = load_inflated(weights)
    seconds = 0.0
    for warm in (True, False):
        for prompt in prompts:
            ids = torch.tensor([prompt], device=weights.device)
            started = perf_counter()
            model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
            if weights.device.type == "cuda":
                torch.cuda.synchronize()
            seconds += 0.0 if warm else perf_counter() - started
    return tokens * len(prompts) / seconds
