"""Random EAGLE heads for the small targets of these tests."""

import random
import re
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from forerun.core.types import Scores, TreeBatch, Verdict
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.eagle import HeadDraft
from forerun.drafters.device.head import make_net
from forerun.drafters.heads.eagle import Eagle2Drafter, Eagle3Drafter, EagleDrafter, MtpDrafter, MtpHead
from forerun.drafters.heads.eagle_head import EagleConfig, EagleHead, Kind
from forerun.models.cuda.network import Run
from forerun.models.cuda.target import CudaDecoder
from forerun.models.cuda.weights import WeightKind
from tests.drafters.rounds import as_lists
from tests.drafters.tiny_heads import eagle_config, eagle_weights, mtp_weights

_NORM_OF_HEADS = re.compile(r"self_attn\.[qk]_norm")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"draft_vocab": 130},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True},
    {"eagle": "eagle"},
    {"depth": 2, "fc_norm": True, "norm_output": True},
    {"depth": 3, "draft_vocab": 130},
    {"eagle": "mtp"},
    {"eagle": "mtp", "norm_output": True, "qk_norm": True, "draft_vocab": 130},
    {"window": 3, "windowed": (True,)},
    {"depth": 2, "window": 70, "windowed": (False, True), "longest": 150, "rope_scaling": LLAMA3},
]


def make_head(
    target: CudaDecoder,
    *,
    eagle: Kind = "eagle3",
    draft_vocab: int | None = None,
    borrows: bool = False,
    qk_norm: bool = False,
    longest: int = 2048,
    **more: Any,
) -> tuple[EagleConfig, dict[str, Tensor]]:
    config = eagle_config(eagle, target.vocab_size, target.config.width, draft_vocab, **more)
    shape = target.config
    config = replace(
        config, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, inner=shape.inner,
        max_length=longest, layers=(0, 1, 2) if eagle == "eagle3" else (-1,),
    )  # fmt: skip
    if eagle == "mtp":
        weights = mtp_weights(config, seed=5, borrows=borrows)
        return config, {name: w for name, w in weights.items() if qk_norm or not _NORM_OF_HEADS.search(name)}
    return config, eagle_weights(config, seed=5, borrows=borrows)


def plain_drafter(target: CudaDecoder, config: EagleConfig, weights: dict[str, Tensor]) -> EagleDrafter:
    """A head run as everywhere, in trees that follow its confidence."""
    drafters = {"eagle": Eagle2Drafter, "eagle3": Eagle3Drafter, "mtp": MtpDrafter}
    make = MtpHead if config.kind == "mtp" else EagleHead
    head = make(config, weights, target.shared(), dtype=target.model.dtype, device=target.device)
    return drafters[config.kind](head)


def both_drafters(
    target: CudaDecoder, kind: WeightKind | None = None, **more: Any
) -> tuple[OnDevice[HeadDraft], EagleDrafter]:
    """A head drafting on the device, and the same head as everywhere."""
    config, weights = make_head(target, **more)
    plain = plain_drafter(target, config, weights)
    draft = HeadDraft(*make_net(config, weights, target, kind), capture=target.kernels == "triton")
    return OnDevice(draft, lambda: plain), plain


def settled(scores: Scores) -> Verdict:
    """The verdict that the device has reached on trees it grew."""
    assert scores.greedy is not None
    assert scores.greedy.verdict is not None
    return scores.greedy.verdict()


def agree(target: CudaDecoder, trees: TreeBatch, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the target say, after most nodes, what one of their children says."""
    said = {}
    for first, (tokens, parents) in zip(trees.starts, as_lists(trees), strict=False):
        for node in range(len(tokens)):
            children = [i for i, parent in enumerate(parents) if parent == node]
            if children and rng.random() < 0.8:
                said[first + node] = tokens[rng.choice(children)]
    steps = target.passes.steps

    def head(run: Run) -> None:
        type(steps).head(steps, run)
        for row, token in said.items():
            target.buffers.logits[row, token] = 1e4

    monkeypatch.setattr(steps, "head", head)
