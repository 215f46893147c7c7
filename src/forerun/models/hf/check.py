"""Checks whether a transformers model can be a target: its configuration, and a test with two small trees.

Whether a family honours masks and positions of our own does not follow from its configuration, so each model
is tested when it is wrapped: two small trees are scored and compared with plain passes over their paths. A
model that scores them differently is refused with `UnsupportedModel`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forerun.core.errors import UnsupportedModel
from forerun.core.types import Needs, PlainSeq, TreeBatch
from forerun.models.base import Target

ADVICE = "run it with transformers alone"


def arguments(model: Any) -> frozenset[str]:
    """The names that the model's forward takes; models that take **kwargs also return hidden states."""
    parameters = inspect.signature(model.forward).parameters
    more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return frozenset(parameters) | ({"output_hidden_states"} if more else frozenset())


def refuse_by_shape(model: Any, accepts: frozenset[str]) -> None:
    """Refuse what cannot work whatever it computes."""
    family = model.config.model_type
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{family} has an encoder and Forerun runs decoder-only models; {ADVICE}")
    if "past_key_values" not in accepts or getattr(model, "_is_stateful", False):
        raise UnsupportedModel(f"{family} keeps a state that cannot be rolled back; {ADVICE}")
    if "position_ids" not in accepts and not hasattr(model.base_model, "build_alibi_tensor"):
        raise UnsupportedModel(f"{family} takes no positions, which a tree needs; {ADVICE}")
    if "local" in (getattr(model.config, "attention_layers", None) or ()):
        raise UnsupportedModel(f"{family} limits its attention by slot, not by position; {ADVICE}")


def check_trees(target: Target, model: Any) -> int:
    """Score two small trees after sequences of unlike length and compare; returns the number of logits."""
    family, rng = model.config.model_type, torch.Generator().manual_seed(0)

    def words(count: int) -> list[int]:
        drawn: list[int] = torch.randint(target.vocab_size, (count,), generator=rng).tolist()
        return drawn

    probes = [PlainSeq(-1, words(6), max_length=64), PlainSeq(-2, words(3), max_length=64)]
    shapes = [-1, 0, 0, 0, 1, 2], [-1, 0, 0]
    trees = TreeBatch.trees(
        [([probe.tokens[-1], *words(len(shape) - 1)], shape) for probe, shape in zip(probes, shapes, strict=True)],
        device=target.device,
    )
    try:
        target.prefill(probes, Needs())
        logits = target.score(probes, trees, Needs()).logits
        assert logits is not None
        errors = torch.tensor([e for b in range(2) for e in _errors(model, probes[b].tokens, trees, b, logits)])
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedModel(f"{family} cannot score trees ({reason}); {ADVICE}") from error
    finally:
        for probe in probes:
            target.release(probe)
    # in 16 bits an expert's router may flip at one node; a mask that is ignored shows at nearly all of them
    worst, limit = (errors.max(), 1e-3) if model.dtype == torch.float32 else (errors.median(), 0.1)
    if not worst <= limit:  # a NaN is refused too
        found = f"off by {float(worst):.2g} of the logits' spread, limit {limit:g}"
        raise UnsupportedModel(f"{family} scores trees unlike text ({found}); {ADVICE}")
    return int(logits.shape[-1])


@torch.no_grad()
def _errors(model: Any, tokens_before: list[int], trees: TreeBatch, b: int, logits: Tensor) -> Iterator[float]:
    """For every leaf of tree b: how far its logits are from a plain pass over its path, in their spread."""
    first, end = trees.starts[b], trees.starts[b + 1]
    tokens, parents = trees.tokens[first:end].tolist(), trees.parents[first:end].tolist()
    for leaf in sorted(set(range(end - first)) - set(parents)):
        path, node = list[int](), leaf
        while node > 0:  # the root is the last of the tokens before
            path.insert(0, tokens[node])
            node = parents[node]
        plain = model(input_ids=torch.tensor([tokens_before + path], device=logits.device), use_cache=False)
        wanted = plain.logits[0, -1].float()
        yield float((logits[first + leaf] - wanted).norm() / (wanted - wanted.mean()).norm())
