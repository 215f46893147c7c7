"""Heads that learn with a window, and from long rows: what is served is what was learnt, and scores stay in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.drafters.heads.block_head import read_block
from forerun.drafters.heads.eagle import read_mtp
from forerun.drafters.heads.eagle_head import read_head
from forerun.models.load.checkpoint import Checkpoint
from forerun.train.options import Method, TrainOptions
from forerun.train.recipes import block, eagle
from forerun.train.run import train
from forerun.train.teacher import load_teacher
from tests.drafters.test_eagle import far_apart
from tests.train.test_recipes import options_for


@pytest.mark.parametrize("packed", [False, True])
def test_a_trained_window_is_served_as_it_was_learnt(
    packed: bool, tiny: Checkpoint, texts: Path, tmp_path: Path
) -> None:
    options = options_for(
        "eagle3", tiny, texts, tmp_path, window=4, packed=packed, steps=3, eval_every=3, max_length=96
    )
    train(options)
    config, weights = read_head(tmp_path)
    assert (config.window, config.windowed, config.trained) == (4, (True,), 96)
    table = load_teacher(tiny, torch.device("cpu")).embedding
    weights = {name: weight.float() for name, weight in weights.items()} | {"embed_tokens.weight": table.float()}
    assert far_apart(config, weights=weights)[1] < 1e-4
    for other in (3, 5):
        assert far_apart(config, replace(config, window=other), weights)[1] > 1e-3


def test_a_finished_head_goes_on_with_a_window(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    options = options_for("eagle3", tiny, texts, tmp_path / "whole", steps=2, eval_every=2)
    train(options)
    train(replace(options, out=str(tmp_path / "windowed"), init=str(tmp_path / "whole"), window=8))
    assert read_head(tmp_path / "whole")[0].windowed == ()
    assert read_head(tmp_path / "windowed")[0].windowed == (True,)


@pytest.mark.parametrize(("method", "read"), [("eagle", read_head), ("hass", read_head), ("mtp", read_mtp)])
def test_every_head_writes_its_window(
    method: Method, read: Callable[[Path], Any], tiny: Checkpoint, texts: Path, tmp_path: Path
) -> None:
    train(options_for(method, tiny, texts, tmp_path, steps=2, eval_every=2, window=8))
    assert [read(tmp_path)[0].window_of(0)] == [8]


def test_a_block_drafter_names_the_length_of_its_texts(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    train(options_for("dflash", tiny, texts, tmp_path, steps=2, eval_every=2, packed=True, max_length=64))
    config = read_block(tmp_path)[0]
    assert (config.trained, [config.reach(i) for i in range(config.depth)]) == (64, [64])


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("steps", [1, 3])
def test_scores_of_long_texts_are_made_in_parts(window: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients are those of the whole; what is kept for gradients is never as large as the scores."""
    torch.manual_seed(0)
    given = [torch.randn(2, 2, 40, 4) for _ in range(1 + 2 * steps)]

    def run(part: int) -> tuple[list[Tensor], int]:
        monkeypatch.setattr(eagle, "PART", part)
        q, *kept = (one.clone().requires_grad_() for one in given)
        largest = [0]

        def pack(saved: Tensor) -> Tensor:
            largest[0] = max(largest[0], saved.numel())
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            found = eagle.attend_rollout(q, list(zip(kept[::2], kept[1::2], strict=True)), window)
        found.square().sum().backward()
        grads = [one.grad for one in (q, *kept)]
        return [found, *[grad for grad in grads if grad is not None]], largest[0]

    (whole, most), (parts, least) = run(1024), run(8)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    if steps > 1:
        assert least < 2 * 2 * 40 * 40 <= most


@pytest.mark.parametrize(("window", "causal"), [(0, False), (5, True)])
def test_blocks_of_long_texts_are_attended_to_in_parts(
    window: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    anchors = torch.tensor([[3, 9, 20, 21, 30], [1, 2, 4, 17, 39]])
    given = [torch.randn(2, 4, 15, 4), *(torch.randn(2, 2, count, 4) for count in (15, 15, 40, 40))]

    def run(scores: int) -> list[Tensor]:
        monkeypatch.setattr(block, "SCORES", scores)
        leaves = [one.clone().requires_grad_() for one in given]
        found = block.attend_blocks(*leaves, anchors, window, causal)
        found.square().sum().backward()
        return [found, *[one.grad for one in leaves if one.grad is not None]]

    whole = run(1 << 20)
    assert len(whole) == 6
    for scores in (1, 3 * 40 * 2):
        for one, other in zip(whole, run(scores), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "more", "words"), [("medusa", {"window": 8}, "window=8"), ("specdec", {"packed": True}, "packed=True")]
)
def test_nonsense_is_refused(method: Method, more: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        TrainOptions(method=method, target="t", data="d", out="o", **more)
