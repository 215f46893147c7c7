"""transformers' own `generate` on the same weights, beside our texts."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from forerun.models.inflate import InflatedWeights


def time_transformers(
    weights: InflatedWeights, prompts: Sequence[tuple[int, ...]], tokens: int = 24
) -> float:
    """Tokens per second of `generate` with the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in weights.config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama", **settings), dtype=torch.bfloat16
        )
    model.load_state_dict({name: weights[name] for name in weights}, strict=False, assign=True)
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):  # made on the meta device, and not in the weights
            fresh = type(module)(config=model.config).to("cuda")
            module.inv_freq, module.original_inv_freq = fresh.inv_freq, fresh.inv_freq
    model.eval()
    seconds = 0.0
    for warm in (True, False):
        for prompt in prompts:
            ids = torch.tensor([prompt], device="cuda")
            started = perf_counter()
            model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
            torch.cuda.synchronize()
            seconds += 0.0 if warm else perf_counter() - started
    return tokens * len(prompts) / seconds
