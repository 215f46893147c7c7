"""Drawn drafts of block drafters: the law of the text stays the target's, also where confidence ends a draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from forerun.drafters.heads import block as block_drafter
from forerun.drafters.heads.block import BlockDrafter
from forerun.drafters.heads.growth import sample_trees
from forerun.engine.engine import Engine
from tests.drafters.tiny_heads import save_head
from tests.exactness import harness
from tests.exactness.harness import SETTINGS, chi_square_p, engine_for, joint_law, sample_texts, table

VOCAB, LENGTH, PROMPT, TEXTS = 6, 3, (1, 2, 3, 1, 2, 3, 1, 2), 1000
LIKED = 3  # a token that this head drafts more often than the target says it


def engine_of(drafter: str, shape: str, least: float, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(block_drafter, "wants_sampling", lambda speculative, device: True)
    monkeypatch.setattr(BlockDrafter, "least", least)
    name = drafter.partition(" ")[0]
    if name != drafter:  # another configuration than the usual one of that name
        folder = str(save_head(drafter, Path(mkdtemp()), VOCAB))
        monkeypatch.setattr(harness, "head_folder", lambda name, vocab: folder)
    engine = engine_for(name, "exact", shape, VOCAB, frozenset())
    assert isinstance(engine.drafters.get(name), BlockDrafter)
    return engine


def likelihood(engine: Engine) -> float:
    params = replace(SETTINGS["T=0.8"], max_tokens=LENGTH)
    counts = sample_texts(engine, PROMPT, params, TEXTS)
    return chi_square_p(counts, joint_law(table(VOCAB), PROMPT, params, LENGTH))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "shape", "least"),
    [
        ("dflash", "chain", 0.0),
        ("dspark", "chain", 0.005),
        ("dspark", "tree", 0.02),
        ("peagle", "tree", 0.0),
        ("dflash 2", "chain", 0.0),
        ("dflash 2", "tree", 0.0),
    ],
)
def test_the_law_of_the_text_is_the_targets(
    drafter: str, shape: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = list[int]()

    def counted(*given: Any) -> Any:
        found = sample_trees(*given)
        ends.extend(len(tree[0]) for tree in found[0])
        return found

    monkeypatch.setattr(block_drafter, "sample_trees", counted)
    assert likelihood(engine_of(drafter, shape, least, monkeypatch)) > 1e-4
    assert len(ends) > 100
    if least:
        assert len(set(ends)) > 1  # some drafts ended early, and not all at one length


@pytest.mark.slow
def test_negative_control_a_token_dropped_for_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check of drafts that are cut where the *drawn* token is not liked, which changes the law."""

    def dropped(*given: Any) -> Any:
        trees, rows, laws = sample_trees(*given)
        for tree, came_from in zip(trees, rows, strict=True):
            while len(tree[0]) > 1 and tree[0][-1] != LIKED:
                tree[0].pop()
                tree[1].pop()
                came_from.pop()
        return trees, rows, laws

    monkeypatch.setattr(block_drafter, "sample_trees", dropped)
    assert likelihood(engine_of("dflash", "chain", 0.0, monkeypatch)) < 1e-5
