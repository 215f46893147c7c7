"""The peer transformers: its own `generate` on the same weights.

The model is built in memory from our checkpoint, because transformers takes half a minute to read a GGUF
file, and so that both sides hold the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from forerun.core.errors import UnsupportedModel
from forerun.measure.bench.alternate import Contender, Written
from forerun.measure.bench.settings import ASSISTED, LOOKUP, TRANSFORMERS
from forerun.models.load import checkpoint as loading
from forerun.models.load.checkpoint import Checkpoint

LOOKUP_TOKENS = 10  # what transformers' documentation uses for prompt lookup


def load(
    names: Sequence[str], model: str, draft: str | None, ends: Sequence[int], device: str, alike: bool, threads: int
) -> list[Contender]:
    """Its contenders that are asked for (plain, lookup, assisted), around the weights of a checkpoint.

    `alike` says that our own loop computes in the same precision, so that texts can be compared.
    """
    torch.set_num_threads(threads)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    stops = frozenset(ends)
    loaded = load_transformers_model(loading.open_checkpoint(model), stops, dtype).to(device)
    like = TRANSFORMERS if TRANSFORMERS in names else None
    found = []
    if TRANSFORMERS in names:
        found.append(transformers_contender(TRANSFORMERS, loaded, alike))
    if LOOKUP in names:
        options = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        found.append(transformers_contender(LOOKUP, loaded, alike, like, **options))
    if ASSISTED in names and draft is not None:
        small = load_transformers_model(loading.open_checkpoint(draft), stops, dtype).to(device)
        found.append(transformers_contender(ASSISTED, loaded, alike, like, assistant_model=small))
    return found


def isa() -> str:
    """The instructions that torch's kernels use on this CPU."""
    return f"torch {torch.backends.cpu.get_cpu_capability()}"


def load_transformers_model(checkpoint: Checkpoint, eos_ids: frozenset[int], dtype: torch.dtype) -> Any:
    """A transformers model with the checkpoint's weights; it decodes greedily and ends on the same tokens."""
    from transformers import AutoConfig, GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    advice = "leave the transformers peers out"
    try:
        config = AutoConfig.for_model(**checkpoint.config)
        cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (KeyError, ValueError) as error:
        family = checkpoint.config.get("model_type")
        raise UnsupportedModel(f"transformers has no causal model of type {family!r}; {advice}") from error
    weights = {name: checkpoint.weights[name] for name in checkpoint.weights}
    model, report = cls.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True)
    wrong = [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in report[kind]]
    if wrong:
        found = f"{len(wrong)} of its tensors do not fit, such as {wrong[0]}"
        raise UnsupportedModel(f"transformers cannot take the weights of {checkpoint.name!r}: {found}; {advice}")
    ends = sorted(eos_ids)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0
    )
    return model.eval()


def transformers_contender(
    name: str, model: Any, exact: bool = True, like: str | None = None, **options: Any
) -> Contender:
    """`model.generate` with some options, timed; its passes are counted from outside.

    `exact` says that its texts can be compared with ours: where both compute in one precision. `like` names the
    contender that is the same model's plain loop.
    """

    def write(prompts: Sequence[Sequence[int]], max_tokens: int) -> Written:
        (ids,) = prompts  # transformers speculates at batch 1 only
        prompt = torch.tensor([list(ids)], device=model.device)  # [1, n]
        passes: list[float] = []  # when each ended; the first is the one over the prompt
        hook = model.register_forward_hook(lambda *_: passes.append(perf_counter()))
        started = perf_counter()
        try:
            with torch.no_grad():
                text = model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, **options
                )
            tokens = text[0, len(ids) :].tolist()
            ended = perf_counter()
        finally:
            hook.remove()
        return Written([tokens], ended - started, len(passes), ended - passes[0])

    return Contender(name, write, exact, like)
