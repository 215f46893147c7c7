"""Warping against transformers' own processors, node by node, each with its own path as context."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.core.params import SamplingParams
from forerun.core.types import TreeBatch
from forerun.testing import FakeSeq, random_tree
from forerun.verify import warp as truncation
from forerun.verify.decide import token_logprobs
from forerun.verify.warp import _add_bias, coupled_token, keep_top_k, keep_top_p, keep_within_min_p, warp, warp_rows

transformers = pytest.importorskip("transformers")
V = 23
STOPS = frozenset({3, 7})
SETTINGS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.4},
    {"temperature": 1.1, "repetition_penalty": 0.8, "top_k": 4},
    {"logit_bias": {2: 3.0, 5: -4.0}, "repetition_penalty": 1.2},
    {"bad_words": [[4], [1, 2], [2, 2, 2]], "temperature": 1.0},
    {"min_tokens": 6},
    {"temperature": 0.8, "bad_words": [[1, 2]], "min_tokens": 4, "top_p": 0.7, "logit_bias": {1: 2.0}},
]


def transformers_scores(logits: Tensor, context: list[int], seq: FakeSeq) -> Tensor:
    """[V] what transformers makes of one row, in the order its generate applies."""
    given, lib = seq.params, transformers.generation.logits_process
    steps = transformers.LogitsProcessorList()
    if given.logit_bias:
        steps.append(lib.SequenceBiasLogitsProcessor([[[t], float(v)] for t, v in given.logit_bias.items()]))
    if given.repetition_penalty != 1.0:
        steps.append(lib.RepetitionPenaltyLogitsProcessor(given.repetition_penalty))
    if given.bad_words:
        steps.append(lib.NoBadWordsLogitsProcessor([list(word) for word in given.bad_words]))
    if given.min_tokens:
        least = lib.MinNewTokensLengthLogitsProcessor
        steps.append(least(seq.prompt_length, given.min_tokens, torch.tensor(sorted(seq.stop_ids))))
    if not given.is_greedy:
        steps.append(lib.TemperatureLogitsWarper(given.temperature))
        if given.top_k:
            steps.append(lib.TopKLogitsWarper(given.top_k))
        if given.top_p < 1.0:
            steps.append(lib.TopPLogitsWarper(given.top_p))
        if given.min_p:
            steps.append(lib.MinPLogitsWarper(given.min_p))
    scores: Tensor = steps(torch.tensor([context]), logits[None].clone())
    return scores[0]


def batch_of(rng: random.Random, settings: list[dict[str, object]]) -> tuple[list[FakeSeq], TreeBatch, list[list[int]]]:
    """Sequences, a tree for each, and the whole context of every node."""
    seqs, trees, contexts = [], [], []
    for i, setting in enumerate(settings):
        text = [rng.randrange(5) for _ in range(rng.randint(1, 9))]
        params = SamplingParams(**setting)  # type: ignore[arg-type]
        seqs.append(FakeSeq(i, text, max(1, len(text) - 3), params, stop_ids=STOPS))
        tokens, parents = random_tree(rng, text[-1], 5, 7)
        trees.append((tokens, parents))
        for node in range(len(tokens)):
            path = []
            while node:
                path.append(tokens[node])
                node = parents[node]
            contexts.append(text + path[::-1])
    return seqs, TreeBatch.trees(trees), contexts


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_node_is_warped_as_transformers_would_with_its_path(setting: dict[str, object]) -> None:
    rng = random.Random(1)
    for seed in range(5):
        seqs, trees, contexts = batch_of(rng, [setting] * 3)
        check_rows(seqs, trees, contexts, seed)


def test_settings_do_not_leak_within_a_batch() -> None:
    for seed in range(10):
        rng = random.Random(seed)
        check_rows(*batch_of(rng, rng.sample(SETTINGS, 6)), seed)


def check_rows(seqs: list[FakeSeq], trees: TreeBatch, contexts: list[list[int]], seed: int) -> None:
    logits = torch.randn(len(contexts), V, generator=torch.Generator().manual_seed(seed)) * 2
    before = logits.clone()
    laws = warp(logits, seqs, trees)
    assert torch.equal(logits, before), "warp changed its input"
    owners = [seq for seq, size in zip(seqs, trees.sizes(), strict=True) for _ in range(size)]
    for row, (seq, context) in enumerate(zip(owners, contexts, strict=True)):
        wanted = transformers_scores(logits[row], context, seq)
        torch.testing.assert_close(laws.log_weights[row], wanted, rtol=1e-6, atol=1e-6)


def test_presence_and_frequency_count_the_output_and_the_path_only() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    seq = FakeSeq(0, [1, 1, 2, 3, 3], prompt_length=3, params=params)
    trees = TreeBatch.trees([([3, 3, 4, 2], [-1, 0, 1, 0])])
    laws = warp(torch.zeros(4, 6), [seq], trees)
    paths = [[3, 3], [3, 3, 3], [3, 3, 3, 4], [3, 3, 2]]  # output and path of each node
    for row, written in enumerate(paths):
        wanted = [-(0.5 + 0.25 * written.count(t)) if t in written else 0.0 for t in range(6)]
        assert laws.log_weights[row].tolist() == pytest.approx(wanted)


def test_plain_rows_are_handed_on_without_a_copy() -> None:
    logits, trees = torch.randn(3, V), TreeBatch.chains([[1, 2, 3]])
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        assert warp(logits, [FakeSeq(0, [1], params=params)], trees).log_weights is logits


def test_tokens_outside_the_vocabulary_are_ignored() -> None:
    params = SamplingParams(
        logit_bias={V + 1: 9.0}, repetition_penalty=2.0, frequency_penalty=1.0, bad_words=[[V]], min_tokens=9
    )
    seq = FakeSeq(0, [V + 5, 1], 1, params, stop_ids=frozenset({V + 2}))
    laws = warp(torch.ones(1, V), [seq], TreeBatch.chains([[1]]))
    assert laws.log_weights[0, 1] == 0.5 - 1.0
    assert laws.log_weights[0, 2:].eq(1.0).all()


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 3.0])
def test_top_p_keeps_what_a_full_sort_keeps(top_p: float, spread: float) -> None:
    """Flat laws, peaked laws and laws full of ties, over a vocabulary wide enough for the short way."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(6, 6000, generator=generator) * spread
    rows[3:] = (rows[3:] * 2).round() / 2
    rows[5, ::3] = -torch.inf
    wanted = transformers.TopPLogitsWarper(top_p)(None, rows)
    for part in (slice(0, 6), slice(0, 3), slice(0, 1), slice(4, 5)):
        assert torch.equal(keep_top_p(rows[part], top_p), wanted[part])


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [200, 6000])
def test_top_p_of_a_row_does_not_depend_on_its_company(vocabulary: int) -> None:
    """In single precision some rows of a few thousand are cut one token further in company than alone."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    generator = torch.Generator("cuda").manual_seed(7)
    rows = torch.randn(3000, vocabulary, generator=generator, device="cuda") * 0.3
    together = keep_top_p(rows, 0.9)
    for first in range(0, 3000, 4):
        some = slice(first, first + 4)
        assert torch.equal(keep_top_p(rows[some], 0.9), together[some])


def test_top_p_does_not_sort_where_it_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(log_weights: Tensor, top_p: float) -> Tensor:
        raise AssertionError("sorted")

    monkeypatch.setattr(truncation, "_keep_top_p_by_sorting", refuse)
    peaked = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)) * 6
    kept = keep_top_p(peaked, 0.9)
    assert torch.equal(kept, transformers.TopPLogitsWarper(0.9)(None, peaked))
    assert 4 < int(kept.isfinite().sum()) < 4 * 5000 // 10
    with pytest.raises(AssertionError, match="sorted"):
        keep_top_p(torch.zeros(1, 5000), 0.9)


def test_truncation_keeps_ties_as_transformers_does() -> None:
    rows = torch.tensor([list(row) for row in itertools.product([0.0, 1.0, 2.0], repeat=4)])
    for k in (1, 2, 3, 9):
        assert torch.equal(keep_top_k(rows, k), transformers.TopKLogitsWarper(k)(None, rows))
    for p in (0.1, 0.5, 0.9, 1.0):
        assert torch.equal(keep_within_min_p(rows, p), transformers.MinPLogitsWarper(p)(None, rows))


def test_warp_rows_takes_any_rows_in_any_order() -> None:
    params = SamplingParams(temperature=0.6, repetition_penalty=1.3, top_k=6)
    one, two = FakeSeq(0, [1, 2], params=params), FakeSeq(1, [4], params=replace(params, temperature=0.0))
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(3))
    rows = warp_rows(logits, [one, two, one], [[5], [], [6, 6]])
    for row, (seq, path) in enumerate([(one, [5]), (two, []), (one, [6, 6])]):
        wanted = transformers_scores(logits[row], seq.tokens + path, seq)
        torch.testing.assert_close(rows[row], wanted, rtol=1e-6, atol=1e-6)


def test_logprobs_are_those_of_the_law_the_token_came_from() -> None:
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(4))
    trees = TreeBatch.trees([([0], [-1]), ([1, 2, 3, 4], [-1, 0, 0, 2])])
    seqs = [FakeSeq(0, [0]), FakeSeq(1, [1], params=SamplingParams(temperature=0.5, top_k=2))]
    laws = warp(logits, seqs, trees)
    likely = laws.log_weights[4].topk(2).indices.tolist()
    plain = token_logprobs(laws, [0], [5], top=0)
    assert [(e.token, e.top) for e in plain] == [(5, ())]
    assert plain[0].logprob == pytest.approx(float(logits[0].log_softmax(-1)[5]))
    entries = token_logprobs(laws, [1, 3, 4], [3, 4, likely[1]], top=4)
    assert [e.token for e in entries] == [3, 4, likely[1]]
    best = (logits[4] / 0.5).topk(2).values.log_softmax(-1)
    assert [one.token for one in entries[2].top] == likely  # only two tokens are possible
    assert [one.logprob for one in entries[2].top] == pytest.approx(best.tolist(), abs=1e-5)
    assert entries[2].logprob == pytest.approx(float(best[1]), abs=1e-5)


def test_coupled_token_is_the_argmin_of_noise_over_law() -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(50):
        law = torch.rand(V, generator=generator) * (torch.rand(V, generator=generator) > 0.5)
        noise = torch.empty(V).exponential_(generator=generator)
        assert coupled_token((law * 7).log(), -torch.expm1(-noise)) == int((noise / law).argmin())


def test_a_bias_on_every_token_is_added_token_by_token() -> None:
    """Bit for bit what a loop over tokens gives; ids beyond the vocabulary are left out."""
    biases = {token: 1e3 / (token + 0.7) - 9.0 for token in range(3 * V)}
    logits = torch.randn(2, V)
    block = logits.clone()
    _add_bias(block, SamplingParams(logit_bias=biases))
    wanted = logits.clone()
    for token in range(V):
        wanted[:, token] += biases[token]
    assert torch.equal(block, wanted)
    assert not torch.equal(block, logits)
