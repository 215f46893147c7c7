"""Drafts of block drafters: candidates are the whole laws, confidence ends a draft, and fixed shapes change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Needs, Verdict
from forerun.drafters.heads.block import (
    BlockCandidates,
    BlockDrafter,
    BlockSteps,
    GraphRunner,
    candidates_of,
    load_block,
)
from forerun.drafters.model.draft_law import DraftLaw
from forerun.models.cuda.graphs import Replays
from forerun.models.load.checkpoint import Checkpoint
from forerun.testing import FakeSeq
from forerun.train.options import Method
from forerun.train.recipes.block import kind_for
from tests.train.test_block import BLOCKS, drafting, recipe_for, show, written
from tests.train.test_recipes import lending


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("heat", [0.0, 0.7])
@torch.no_grad()
def test_candidates_are_the_whole_laws_where_none_is_left_out(
    kind: Method, heat: float, tiny: Checkpoint, texts: Path, tmp_path: Path
) -> None:
    """Log-probabilities that trees grow from, for all levels at once, against one position after another."""
    recipe, target = recipe_for(kind, tiny, texts, tmp_path), lending(tiny)
    drafter = drafting(kind, written(recipe, tmp_path), target)
    seq = show(drafter, target, [3, 7, 9, 4, 8])
    seq.params = SamplingParams(temperature=heat)
    drafter._runner.read([seq], [drafter._sequences[0]])
    rows = drafter._runner.begin([seq])
    steps = BlockSteps(drafter.head, rows, [seq])
    law = DraftLaw([seq], drafter.head.vocabulary, drafter.head.device)
    cooled = lambda logits, level: law.applied(logits[:, None], level)[:, 0]  # noqa: E731
    found, few = (
        BlockCandidates(*candidates_of(drafter.head, rows, torch.tensor([8]), cooled, law.factors, count))
        for count in (64, 8)
    )
    (values, tokens), logits = found.roots(3)[0], steps.first()
    assert few.roots(3)[0][1] == tokens
    for level in range(3):
        wanted = (logits / (heat or 1.0)).log_softmax(-1).topk(3)
        sure = None if steps.sure is None else float(steps.sure[0, 0].log())
        shift = 0.0 if sure is None else sure - float(wanted.values[0, 0])
        assert tokens == drafter.head.vocabulary.ids[wanted.indices[0]].tolist()
        torch.testing.assert_close(torch.tensor(values), wanted.values[0] + shift, rtol=1e-3, atol=1e-3)
        after = tokens[level % 3]
        values, tokens = found.below([[(0, after)]], 3)[0]
        logits = steps.after(torch.tensor([[0]]), torch.tensor([[after]]))[:, 0]


def test_a_confidence_head_ends_a_draft(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    """Where it is unsure, positions that would not pay are left out; where it is sure, none is."""
    recipe, target = recipe_for("dspark", tiny, texts, tmp_path), lending(tiny)
    counts = {}
    for name, bias in (("sure", 9.0), ("unsure", -1.0)):
        with torch.no_grad():
            recipe.module().get_parameter("confidence_head.proj.weight").zero_()
            recipe.module().get_parameter("confidence_head.proj.bias").fill_(bias)
        drafter = drafting("dspark", written(recipe, tmp_path / name), target)
        seq = show(drafter, target, [3, 7, 9, 4, 8])
        price = tuple(1.0 + 0.1 * n for n in range(9))
        trees = drafter.propose([seq], [Budget(4, 4, price=price)])
        counts[name] = len(trees.tokens) - 1
        expected = drafter.offer(seq).expected
        assert expected is not None
        assert abs(expected - {"sure": 4.0, "unsure": 0.269 + 0.072}[name]) < 0.1
    assert counts["sure"] == 4
    assert 1 <= counts["unsure"] < 4


@pytest.mark.parametrize("kind", BLOCKS)
@torch.no_grad()
def test_what_a_graph_replays_is_the_same_draft(
    kind: Method, tiny: Checkpoint, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form with fixed shapes, run here without a graph: alone and beside sequences of other lengths."""
    monkeypatch.setattr(Replays, "call", lambda self, key, work, *inputs: work(*inputs))
    recipe, target = recipe_for(kind, tiny, texts, tmp_path), lending(tiny)
    head = load_block(written(recipe, tmp_path), target, kind_for(kind))
    drafter = BlockDrafter(head)
    drafter._runner = runner = GraphRunner(head)
    seqs = [FakeSeq(i, tokens) for i, tokens in enumerate(([3, 7, 9, 4, 8], [5, 6], [2, 9, 1, 4, 4, 7, 30]))]
    trees, scores = target.prefill(seqs, Needs(drafter.needs.hidden_layers))
    drafter.observe(seqs, trees, scores, Verdict.whole_chain(trees, [seq.tokens[-1] for seq in seqs]))
    runner.read(seqs, [drafter._sequences[seq.id] for seq in seqs])
    for some in (seqs, seqs[1:2]):
        rows, inputs = runner.begin(some), runner.inputs(some)
        features = runner.root_features(some)
        scored, tokens = runner.static(runner.slots_for(some), inputs, features)
        wanted = candidates_of(head, rows, inputs[0])
        assert torch.equal(tokens, wanted[1])
        torch.testing.assert_close(scored, wanted[0], rtol=1e-4, atol=1e-4)
    inputs, features = runner.inputs(seqs[:1]), runner.root_features(seqs[:1])
    other = runner.static(256, inputs + torch.tensor([[0], [-1], [0]]), features)[0]
    # lengths matter
    assert not torch.allclose(other, runner.static(256, inputs, features)[0], atol=1e-3)


def test_the_offer_of_one_pass(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    """The first level costs the pass, further ones only their part in growing the tree; a prompt is read first."""
    target = lending(tiny)
    drafter = drafting("dspark", written(recipe_for("dspark", tiny, texts, tmp_path), tmp_path), target)
    drafter._first.seconds, drafter._growth.seconds, drafter._reading = 0.5, 0.01, 0.002
    seq = show(drafter, target, [1 + i % 50 for i in range(41)])
    offer = drafter.offer(seq)
    assert offer.until(1) == pytest.approx(0.51)
    assert offer.until(4) == pytest.approx(0.54)
    assert offer.start == pytest.approx(40 * 0.002)
    assert offer.chosen
    drafter.propose([seq], [Budget(3, 3)])
    assert drafter.offer(seq).start == 0.0
    assert drafter.offer(seq).expected is not None
