"""The stand-ins of the GPU benchmark: trees that keep the drafters' contract, weights that a decoder takes."""

import torch

from forerun.bench.gpu_stand_ins import AnswerTrees, RandomWeights
from forerun.models.config import DecoderConfig
from forerun.models.cuda.target import CudaDecoder
from forerun.models.inflate import Shape
from forerun.testing import FakeSeq
from forerun.testing.conformance import check_trees
from forerun.types import Budget, Needs, TreeBatch


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
    target = CudaDecoder(config, weights, dtype=torch.bfloat16, device="cpu", kv_slots=2000)
    assert target.kernels == "torch"
    seq = FakeSeq(1, [1, 2, 3], max_length=40)
    target.prefill([seq], Needs())
    logits = target.score([seq], TreeBatch.chains([[3, 4]]), Needs()).logits
    assert logits is not None
    assert logits.shape == (2, 50)
    assert bool(logits.isfinite().all())
