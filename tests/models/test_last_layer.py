"""A pass of prompts that nobody reads behind the last layer ends with its keys and values, with the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.types import Needs, Prompts, TreeBatch
from forerun.models.base import LayerSubset
from forerun.models.blocks import Block
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.testing import FakeSeq
from tests.models.tiny_checkpoints import FAMILIES, in_tiers, make_reference, save


class Noting(Decoder):
    """Notes which MLPs are run."""

    def __init__(self, *given: Any, **where: Any) -> None:
        super().__init__(*given, **where)
        self.run = list[int]()

    def _add_mlp(self, x: Tensor, block: Block, index: int, layers: LayerSubset) -> None:
        self.run.append(index)
        super()._add_mlp(x, block, index, layers)


def _cache(target: Decoder, seqs: list[FakeSeq]) -> Tensor:
    extents = [target.kv.extent(seq.id) for seq in seqs]
    return target.kv.data[:, :, :, [slot for one in extents for slot in one.slots(0, one.length)]]


@pytest.mark.parametrize("family", in_tiers(sorted(FAMILIES)))
def test_prompts_read_with_and_without_have_the_same_bits(family: str, tmp_path: Path) -> None:
    """Two prompts in one pass, and a third beside a tree, where the last layer is run for all rows."""
    config, weights = save(make_reference(family), tmp_path)
    results = []
    for layers in ((), (0, 2), (-1,), (3,), (0, 2, -1)):
        target = Noting(DecoderConfig.from_hf(config), weights, dtype=torch.float32, device="cpu", kv_slots=None)
        seqs = [FakeSeq(b, list(range(b, 12 + 5 * b)), max_length=40) for b in range(3)]
        read = target.prefill(seqs[:2], Needs(layers))[1]
        assert target.run == ([0, 1, 2] if {-1, 3} & {*layers} else [0, 1])
        trees = TreeBatch.trees([([seq.tokens[-1], 3, 4, 5], [-1, 0, 0, 1]) for seq in seqs[:2]])
        scores = target.score(seqs[:2], trees, Needs(layers), Prompts(seqs[2:], 30))
        assert target.run[-3:] == [0, 1, 2]
        results.append((_cache(target, seqs), scores.required_logits, {**read.hidden}))
    cache, logits, hidden = results[-1]
    assert bool(cache.any(-1).all())  # every slot of every layer was written
    for found in results[:-1]:
        assert torch.equal(found[0], cache)
        assert torch.equal(found[1], logits)
        assert all(torch.equal(found[2][layer], hidden[layer]) for layer in found[2].keys() & hidden.keys())
