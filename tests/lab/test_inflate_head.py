"""A head inflated with its target drafts the same trees."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.core.errors import UnsupportedModel
from forerun.core.types import Budget, Scores, TreeBatch, Verdict
from forerun.drafters.heads.block import DFlashDrafter
from forerun.drafters.heads.block_config import BlockKind
from forerun.drafters.heads.block_head import BlockHead, read_block, write_block
from forerun.drafters.heads.eagle import (
    Eagle2Drafter,
    Eagle3Drafter,
    EagleDrafter,
    MtpDrafter,
    MtpHead,
    read_mtp,
    write_mtp,
)
from forerun.drafters.heads.eagle_head import EagleHead, Kind, read_head, write_head
from forerun.drafters.heads.medusa import Family, HeadSet, HydraDrafter, MedusaDrafter, read_heads, write_heads
from forerun.testing import FakeSeq
from lab.inflate.heads import inflate_block, inflate_folder, inflate_head, inflate_heads
from lab.inflate.model import Shape
from tests.drafters.rounds import as_lists
from tests.drafters.tiny_heads import (
    block_config,
    block_weights,
    eagle_config,
    eagle_weights,
    heads_config,
    heads_weights,
    mtp_weights,
)

VOCAB, WIDTH = 23, 16
SHAPE = Shape(width=40, layers=5, heads=12, kv_heads=4, head_dim=8, inner=70)


def drafter_of(head: EagleHead) -> EagleDrafter:
    return (Eagle3Drafter if head.config.kind == "eagle3" else Eagle2Drafter)(head)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_an_inflated_block_drafter_drafts_the_same_trees(kind: BlockKind, tmp_path: Path) -> None:
    config = block_config(kind, VOCAB, WIDTH, VOCAB - 4)
    weights = block_weights(config, seed=3)
    write_block(tmp_path / "small", config, weights)
    inflate_folder(tmp_path / "small", "dflash", SHAPE, tmp_path / "large")
    assert read_block(tmp_path / "large")[0].feature_width == 3 * SHAPE.width
    larger, large_weights = inflate_block(config, weights, SHAPE, dtype=torch.float32)
    torch.manual_seed(1)
    tokens, rows = torch.randint(VOCAB, (9,)).tolist(), torch.randn(8, 3, WIDTH)
    found = []
    for settings, values, width in ((config, weights, WIDTH), (larger, large_weights, SHAPE.width)):
        drafter = DFlashDrafter(BlockHead(settings, values, None))
        hidden = {
            layer: torch.nn.functional.pad(rows[:, i], (0, width - WIDTH)) for i, layer in enumerate(config.layers)
        }
        seq, chain = FakeSeq(0, tokens), TreeBatch.chains([tokens[:-1]])
        drafter.observe([seq], chain, Scores(None, hidden), Verdict.whole_chain(chain, [tokens[-1]]))
        found.append((as_lists(drafter.propose([seq], [Budget(12, 4, 3)])), drafter.offer(seq).expected))
    assert found[0][0] == found[1][0]
    assert len(found[0][0][0][0]) == 13
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("eagle3", {}),
        ("eagle3", {"fc_norm": True, "norm_output": True}),
        ("eagle3", {"norm_before_fc": True}),
        ("eagle3", {"depth": 3}),
        ("eagle", {}),
    ],
)
def test_an_inflated_head_drafts_the_same_trees(kind: Kind, more: dict[str, int]) -> None:
    config = eagle_config(kind, VOCAB, WIDTH, VOCAB - 4 if kind == "eagle3" else None, **more)
    weights = eagle_weights(config, seed=3)
    larger, large_weights = inflate_head(config, weights, SHAPE, dtype=torch.float32)
    assert larger.feature_width == len(config.layers) * SHAPE.width
    torch.manual_seed(1)
    tokens, rows = torch.randint(VOCAB, (9,)).tolist(), torch.randn(8, len(config.layers), WIDTH)
    found = []
    for settings, values, width in ((config, weights, WIDTH), (larger, large_weights, SHAPE.width)):
        drafter = drafter_of(EagleHead(settings, values, None))
        hidden = {
            layer: torch.nn.functional.pad(rows[:, i], (0, width - WIDTH)) for i, layer in enumerate(config.layers)
        }
        seq, chain = FakeSeq(0, tokens), TreeBatch.chains([tokens[:-1]])
        drafter.observe([seq], chain, Scores(None, hidden), Verdict.whole_chain(chain, [tokens[-1]]))
        found.append(as_lists(drafter.propose([seq], [Budget(12, 4, 3)])))
    assert found[0] == found[1]
    assert len(found[0][0][0]) == 13


@pytest.mark.parametrize("family", ["medusa", "hydra"])
@pytest.mark.parametrize("own", [False, True])
def test_inflated_heads_draft_the_same_trees(family: Family, own: bool, tmp_path: Path) -> None:
    config = heads_config(family, VOCAB, WIDTH)
    weights = heads_weights(config, seed=3, own=own)
    write_heads(tmp_path / "small", config, weights)
    inflate_folder(tmp_path / "small", family, SHAPE, tmp_path / "large")
    assert read_heads(tmp_path / "large", family)[0].width == SHAPE.width
    larger, large_weights = inflate_heads(config, weights, SHAPE, dtype=torch.float32)
    cls = MedusaDrafter if family == "medusa" else HydraDrafter
    torch.manual_seed(1)
    tokens, rows = torch.randint(VOCAB, (9,)).tolist(), torch.randn(8, WIDTH)
    found = []
    for settings, values, width in ((config, weights, WIDTH), (larger, large_weights, SHAPE.width)):
        drafter = cls(HeadSet(settings, values, None))
        hidden = {-1: torch.nn.functional.pad(rows, (0, width - WIDTH))}
        seq, chain = FakeSeq(0, tokens), TreeBatch.chains([tokens[:-1]])
        drafter.observe([seq], chain, Scores(None, hidden), Verdict.whole_chain(chain, [tokens[-1]]))
        found.append(as_lists(drafter.propose([seq], [Budget(12, 4, 3)])))
    assert found[0] == found[1]
    assert len(found[0][0][0]) == 13


def test_an_inflated_prediction_layer_drafts_the_same_trees(tmp_path: Path) -> None:
    config = eagle_config("mtp", VOCAB, WIDTH)
    normed = mtp_weights(config, seed=3)
    weights = {name: weight for name, weight in normed.items() if "q_norm" not in name and "k_norm" not in name}
    write_mtp(tmp_path / "small", config, weights)
    inflate_folder(tmp_path / "small", "mtp", SHAPE, tmp_path / "large")
    assert read_mtp(tmp_path / "large")[0].width == SHAPE.width
    larger, large_weights = inflate_head(config, weights, SHAPE, dtype=torch.float32)
    torch.manual_seed(1)
    tokens, rows = torch.randint(VOCAB, (9,)).tolist(), torch.randn(8, WIDTH)
    found = []
    for settings, values, width in ((config, weights, WIDTH), (larger, large_weights, SHAPE.width)):
        drafter = MtpDrafter(MtpHead(settings, values, None))
        hidden = {-1: torch.nn.functional.pad(rows, (0, width - WIDTH))}
        seq, chain = FakeSeq(0, tokens), TreeBatch.chains([tokens[:-1]])
        drafter.observe([seq], chain, Scores(None, hidden), Verdict.whole_chain(chain, [tokens[-1]]))
        found.append(as_lists(drafter.propose([seq], [Budget(12, 4, 3)])))
    assert found[0] == found[1]
    with pytest.raises(UnsupportedModel, match="norms of queries and keys"):
        inflate_head(config, normed, SHAPE)


def test_heads_of_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'strange' cannot be inflated"):
        inflate_folder(tmp_path, "strange", SHAPE, tmp_path / "large")


def test_a_folder_is_inflated_into_a_folder(tmp_path: Path) -> None:
    config = eagle_config("eagle3", VOCAB, WIDTH, VOCAB - 4)
    write_head(tmp_path / "small", config, eagle_weights(config))
    inflate_folder(tmp_path / "small", "eagle3", SHAPE, tmp_path / "large")
    larger, weights = read_head(tmp_path / "large", kind="eagle3")
    assert (larger.width, larger.draft_vocab_size, larger.layers) == (40, VOCAB - 4, config.layers)
    assert weights["lm_head.weight"].shape == (VOCAB - 4, 40)


def test_a_head_that_is_not_as_wide_as_its_target_is_refused() -> None:
    config = eagle_config("eagle3", VOCAB, WIDTH)
    with pytest.raises(UnsupportedModel, match="on a target 99 wide"):
        inflate_head(replace(config, target_width=99), {}, SHAPE)
