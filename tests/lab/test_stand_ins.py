"""The stand-ins of the GPU benchmark: trees that keep the drafters' contract, weights that a decoder takes."""

from pathlib import Path

import pytest
import torch

from forerun.core.errors import InvalidInput
from forerun.core.types import Budget, Needs, TreeBatch
from forerun.measure.bench.batches import parse_batches
from forerun.models.config import DecoderConfig
from forerun.models.cuda.target import CudaDecoder
from forerun.testing import FakeSeq
from forerun.testing.conformance import check_trees
from forerun.verify.greedy import walk_by_torch
from lab.gpu import rounds as gpu_rounds
from lab.gpu.command import draw_passes
from lab.gpu.stand_ins import AnswerTrees, RandomWeights
from lab.gpu.texts import parse_form
from lab.inflate.model import Shape
from tests.gpu.tiny import make_target


def test_answer_trees_hold_the_answer_among_others() -> None:
    drafter = AnswerTrees()
    prompt, answer = [3, 4, 5, 3], list(range(10, 60))
    drafter.answers[tuple(prompt)] = answer
    right = 0
    for written in range(40):
        seq = FakeSeq(1, [*prompt, *answer[:written]], prompt_length=4)
        budgets = [Budget(12, 6, 3)]
        trees = drafter.propose([seq], budgets)
        check_trees(trees, [seq], budgets, vocab_size=64)
        children = [t for t, p in zip(trees.tokens.tolist(), trees.parents.tolist(), strict=True) if p == 0]
        right += answer[written] in children
    assert 10 < right < 40, "some rounds must hold the answer and some must not"
    alone = drafter.propose([seq], [Budget(0, 0)])
    assert alone.is_plain()


def test_random_weights_make_a_model() -> None:
    weights = RandomWeights(Shape(64, 2, 4, 2, 16, 96), vocab_size=50, tied=True, device="cpu")
    config = DecoderConfig.from_hf(weights.config)
    target = CudaDecoder(config, weights, dtype=torch.bfloat16, device="cpu", kv_slots=2000, greedy_walk=walk_by_torch)
    assert target.kernels == "torch"
    seq = FakeSeq(1, [1, 2, 3], max_length=40)
    target.prefill([seq], Needs())
    logits = target.score([seq], TreeBatch.chains([[3, 4]]), Needs()).logits
    assert logits is not None
    assert logits.shape == (2, 50)
    assert bool(logits.isfinite().all())


@pytest.mark.slow
def test_rounds_and_long_contexts_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rounds, "ROUNDS", 2)
    monkeypatch.setattr(gpu_rounds, "FORMS", {"chain of 2": Budget(2, 2), "tree of 7": Budget(7, 2, 3)})
    target = make_target("llama", "cpu")
    rows = gpu_rounds.measure_rounds(target, "tiny", ["plain"], [2], context=20)
    assert [row["form"] for row in rows] == ["chain of 2", "tree of 7"]
    assert all(row["round_ms"] > 0.0 and row["draft_ms"] > 0.0 for row in rows)
    row = gpu_rounds.measure_long_context(target, "tiny", length=60)
    assert {"1 node", "chain of 64", "tree of 64"} <= set(row)
    assert target.used_slots == 0


@pytest.mark.slow
def test_the_curve_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    passes = [{"batch": 1, "nodes": n, "pass_ms": 4.0 + n / 60} for n in (1, 8, 64)]
    shapes = [{"shape": "8b", "weights": kind, "weights_ms": 3.5, "passes": passes} for kind in ("plain", "int8")]
    draw_passes({"shapes": shapes, "conditions": {"gpu": "none"}, "context": 512}, tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 5000
    draw_passes({"shapes": [], "machine": {}, "context": 512}, tmp_path / "nothing.png")


def test_forms_of_drafts() -> None:
    assert parse_form("adaptive") is None
    assert parse_form("5:5") == Budget(5, 5, 1)
    assert parse_form("32:6:8") == Budget(32, 6, 8)
    with pytest.raises(InvalidInput, match="nodes:depth:width"):
        parse_form("many")


def test_batch_sizes() -> None:
    assert parse_batches("1,8,64") == [1, 8, 64]
    for wrong in ("", "1,,2", "0", "many"):
        with pytest.raises(InvalidInput, match="--batches"):
            parse_batches(wrong)
