"""Rows that nobody scores end with the last layer's keys and values; whatever is returned has the same bits.

A drafter that reads what leaves the last layer forbids it, so both ways can be compared.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.types import Needs, Prompts, Scores, TreeBatch
from forerun.models import decoder as decoder_module
from forerun.models.base import LayerSubset
from forerun.models.config import DecoderConfig
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.native.target import Mode, NativeDecoder
from forerun.testing import FakeSeq, random_tree
from tests.models.tiny_checkpoints import make_reference, save
from tests.models.tiny_gguf import write_tiny
from tests.native.blocks import needs_native

pytestmark = needs_native

FAMILIES = ["llama-biases", "smollm2", "qwen2-window", "qwen3", "smollm3", "phi3", "mixtral", "qwen2_moe"]
WORDS = 24  # of the smallest vocabulary here
BELOW = 5  # nodes of a tree below its root
LAST = 3  # layers of all these models: what leaves the last one
SAVES, FORBID = [(), (0, 2)], [(-1,), (LAST,), (0, 2, LAST), (0, 2, -1)]
Make = Callable[[], NativeDecoder]
Checkpoint = tuple[dict[str, Any], dict[str, Tensor]]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return save(make_reference(request.param), tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(params=["float32", "bfloat16", "q8"])
def make(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Make:
    return _maker(*checkpoint, request.param)


def _maker(config: dict[str, Any], weights: Any, mode: Mode) -> Make:
    shape = DecoderConfig.from_hf(config)
    assert shape.layers == LAST
    return lambda: NativeDecoder(shape, weights, mode=mode, kv_slots=None)


def _text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(WORDS) for _ in range(length)]


def _seqs(*lengths: int) -> list[FakeSeq]:
    return [FakeSeq(b, _text(b, n), max_length=60) for b, n in enumerate(lengths)]


class Recorded:
    """A decoder whose passes are noted: rows of each, and of how many it computed keys and values only."""

    def __init__(self, target: NativeDecoder, lie: bool = False) -> None:
        self.target, self.passes = target, list[tuple[int, int]]()
        really = target._decode

        def decode(model: Any, given: Any) -> int:
            one = given._obj
            if lie:
                one.keys_only = one.nodes - one.scored
            self.passes.append((one.nodes, one.keys_only))
            return int(really(model, given))

        target._decode = decode

    def cache(self, seqs: list[FakeSeq], more: int = 0) -> Tensor:
        """Keys and values of all layers, of what is cached of these sequences and of so many slots behind it."""
        extents = [self.target.kv.extent(seq.id) for seq in seqs]
        slots = [slot for one in extents for slot in one.slots(0, one.length + more)]
        return self.target.kv.data[:, :, :, slots]


def _read(make: Make, layers: tuple[int, ...], lie: bool = False) -> tuple[Recorded, Scores, Scores, list[FakeSeq]]:
    """Read three prompts, then score trees behind them; nothing is compared here."""
    seqs, needs, read = _seqs(21, 1, 13), Needs(layers), Recorded(make(), lie)
    prompts = read.target.prefill(seqs, needs)[1]
    trees = TreeBatch.trees([random_tree(random.Random(7), seq.tokens[-1], WORDS, BELOW) for seq in seqs])
    return read, prompts, read.target.score(seqs, trees, needs), seqs


def _same(made: tuple[Recorded, Scores, Scores, list[FakeSeq]], wanted: Any) -> Iterator[bool]:
    """Keys and values, logits, and the hidden rows that both have, of prompts and of trees."""
    (one, prompts, scores, seqs), (other, other_prompts, other_scores, _) = made, wanted
    yield torch.equal(one.cache(seqs, 1 + BELOW), other.cache(seqs, 1 + BELOW))
    yield torch.equal(scores.required_logits, other_scores.required_logits)
    yield scores.greedy == other_scores.greedy
    for mine, others in ((prompts.hidden, other_prompts.hidden), (scores.hidden, other_scores.hidden)):
        for layer in mine.keys() & others.keys():
            yield torch.equal(mine[layer], others[layer])


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("chunk", [5, 512])
def test_prompts_read_with_and_without_have_the_same_bits(
    make: Make, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_module, "CHUNK", chunk)
    wanted = _read(make, FORBID[0])
    sizes = [5] * 6 + [2] if chunk == 5 else [32]
    assert wanted[0].passes == [*((size, 0) for size in sizes), (3 * (1 + BELOW), 0)]
    for layers in FORBID[1:]:
        made = _read(make, layers)
        assert made[0].passes == wanted[0].passes
        assert all(_same(made, wanted))
    for layers in SAVES:
        made = _read(make, layers)
        assert made[0].passes == [*((size, size) for size in sizes), (3 * (1 + BELOW), 0)]
        assert all(_same(made, wanted))


@pytest.mark.slow(keep=3)
def test_negative_control_hidden_rows_of_the_last_layer_would_be_wrong(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that saves where the last rows are asked for: keys, values and logits are right and these are not."""
    empty = torch.empty

    def filled(*shape: Any, **how: Any) -> Tensor:  # or memory that is new may still hold the right rows
        made = empty(*shape, **how)
        return made.fill_(7.0) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", filled)
    for layers in FORBID:
        found = [*_same(_read(make, layers, lie=True), _read(make, layers))]
        behind = sum(layer in (-1, LAST) for layer in layers)
        assert (found[:3], found.count(False)) == ([True] * 3, behind)


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("pieces", [(7, 11), (18,)])
def test_prompts_beside_trees(make: Make, pieces: tuple[int, ...]) -> None:
    """Trees come first in such a pass; the prompts behind them are read in two passes, or in one."""
    results = []
    for layers in ((-1,), (), (0, 2)):
        seqs, needs, read = _seqs(17, 9, 12, 8), Needs(layers), Recorded(make())
        decoding, coming = seqs[:2], seqs[2:]
        read.target.prefill(decoding, needs)
        trees = TreeBatch.trees([random_tree(random.Random(3), s.tokens[-1], WORDS, BELOW) for s in decoding])
        scores = [read.target.score(decoding, trees, needs, Prompts(coming, rows)) for rows in pieces]
        scores.append(read.target.score(seqs, TreeBatch.chains([seq.tokens[-1:] for seq in seqs]), needs))
        saves, nodes = -1 not in layers, trees.nodes
        assert read.passes == [(24, 24 * saves), *((nodes + rows, rows * saves) for rows in pieces), (4, 0)]
        results.append((torch.cat([one.required_logits for one in scores]), read.cache(seqs, 1)))
    for logits, cache in results[1:]:
        assert torch.equal(logits, results[0][0])
        assert torch.equal(cache, results[0][1])


def test_parts_of_the_layers_return_all_rows(make: Make) -> None:
    """A drafter of some layers reads what leaves their last; a pass that starts behind them scores all of its rows."""
    read, seqs = Recorded(make()), _seqs(14)
    read.target.prefill(seqs, Needs())
    draft = read.target.shared().partial
    assert draft is not None
    part = draft(LayerSubset(2))
    tree = TreeBatch.chains([[seqs[0].tokens[-1], 5, 6]])
    part.score(seqs, tree, Needs())
    assert read.passes == [(13, 13), (3, 0)]


def test_a_gguf_file_of_every_family(tmp_path: Path) -> None:
    for family in ("llama", "qwen3", "phi3", "qwen2_moe"):
        opened = open_checkpoint(str(write_tiny(tmp_path / f"{family}.gguf", family)))
        shape, seqs, caches = DecoderConfig.from_hf(opened.config), _seqs(30), []
        for layers in ((), (-1,)):
            read = Recorded(NativeDecoder(shape, opened.weights, mode="gguf", kv_slots=None))
            read.target.prefill(seqs, Needs(layers))
            assert read.passes == [(29, 0 if layers else 29)]
            caches.append(read.cache(seqs))
        assert torch.equal(*caches)
        assert bool(caches[0].any(-1).all())  # every slot of every layer was written


def test_experts_of_the_last_layer_are_not_read(tmp_path: Path) -> None:
    target = _maker(*save(make_reference("mixtral"), tmp_path), "q8")()
    for layers, read in ((), False), ((-1,), True):
        target.prefill([FakeSeq(len(layers), _text(1, 20), max_length=30)], Needs(layers))
        *others, last = target.active_experts
        assert all(others)
        assert bool(last) is read
