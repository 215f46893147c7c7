"""Tensor parallel: every family split over two ranks computes what one rank does, and sums have one order."""

import threading
from pathlib import Path

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.errors import InvalidInput
from forerun.core.params import SpeculativeConfig
from forerun.core.tree import chain_of, topology_of
from forerun.core.types import Needs, TreeBatch, Verdict
from forerun.models.attention import Span
from forerun.models.config import DecoderConfig
from forerun.models.parallel.decoder import PLAN, Group, Part, PassPlan, SplitWeights, check_split, config_of
from forerun.testing import FakeSeq, check_target
from tests.models.parallel_threads import connect, parallel_target
from tests.models.tiny_checkpoints import VOCAB, make_decoder, make_reference, save

NEEDS = Needs((-1, 1))
# one of each: sinks, biases, tied head, windows, norms of queries and keys, softcaps, fused weights, ropes, experts;
# the fast tier takes every fourth: gemma2 has windows, softcaps and norms behind sums
STRUCTURES = (
    "llama2", "llama-biases", "llama-dynamic", "smollm2", "gemma2", "qwen3", "mistral", "gemma3", "phi3",
    "phi3-longrope", "mixtral", "qwen2_moe", "gpt_oss", "granitemoeshared", "arcee", "exaone4",
)  # fmt: skip


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("family", STRUCTURES)
def test_two_ranks_compute_what_one_computes(family: str, tmp_path: Path) -> None:
    """Trees, commits, prompts that share a pass and pages that are shared, against the decoder on one rank."""
    config, weights = save(make_reference(family), tmp_path)
    with parallel_target(config, weights, tmp_path) as target:
        targets = iter([target, make_decoder(config, weights)])
        check_target(lambda: next(targets), vocab_size=VOCAB, needs=NEEDS, rounds=4, atol=2e-4)


def test_what_rank_0_copies_every_rank_copies(tmp_path: Path) -> None:
    """An accepted path that moves next to its root, and a page that another text shares up to its middle."""
    config, weights = save(make_reference("llama2"), tmp_path)
    one = make_decoder(config, weights)
    with parallel_target(config, weights, tmp_path) as target:
        found = []
        for decoder in (target, one):
            seq = FakeSeq(1, list(range(1, 30)), cache_salt="")
            decoder.prefill([seq], Needs())
            trees = TreeBatch.trees([([29, 5, 6, 7, 8, 9], [-1, 0, 0, 1, 2, 4])])
            decoder.score([seq], trees, Needs())
            decoder.commit([seq], trees, Verdict.of([[2, 4, 5]], [10], "cpu"))  # 6, 8, 9 are at 2, 4 and 5
            seq.tokens += [6, 8, 9, 10]
            after = decoder.score([seq], TreeBatch.chains([[10]]), Needs()).required_logits.clone()
            decoder.release(seq)
            other = FakeSeq(2, [*seq.tokens[:20], 40, 41], cache_salt="")
            decoder.prefill([other], Needs())
            assert decoder.reused_tokens(other) == 20
            shared = decoder.score([other], TreeBatch.chains([[41]]), Needs()).required_logits
            found.append(torch.cat([after, shared]))
        assert torch.allclose(*found, atol=2e-4)


def test_uneven_parts(tmp_path: Path) -> None:
    """Four KV heads, an inner width of 44 and 61 words on three ranks: nothing is divisible."""
    config, weights = save(make_reference("llama2"), tmp_path)
    with parallel_target(config, weights, tmp_path, size=3) as target:
        assert target.kv.data.shape[2] == 2  # the larger part, of 2, 1, 1
        targets = iter([target, make_decoder(config, weights)])
        check_target(lambda: next(targets), vocab_size=VOCAB, rounds=4, atol=2e-4)


def test_runs_are_equal_in_every_bit(tmp_path: Path) -> None:
    config, weights = save(make_reference("qwen3"), tmp_path)
    found = []
    for run in range(2):
        (tmp_path / str(run)).mkdir()
        with parallel_target(config, weights, tmp_path / str(run)) as target:
            seq = FakeSeq(1, list(range(1, 30)), cache_salt="")
            target.prefill([seq], Needs())
            found.append(target.score([seq], TreeBatch.chains([[29, 3, 4, 5]]), NEEDS))
    first, second = found
    assert torch.equal(first.required_logits, second.required_logits)
    assert all(torch.equal(first.hidden[layer], second.hidden[layer]) for layer in NEEDS.hidden_layers)


def test_drafters_see_the_whole_model(tmp_path: Path) -> None:
    """Heads take rows of the embedding and of the LM head: of all words, though a rank scores a part of them."""
    config, weights = save(make_reference("llama2"), tmp_path)
    one = make_decoder(config, weights)
    with parallel_target(config, weights, tmp_path) as target:
        ids, shared, own = torch.arange(VOCAB), target.shared(), one.shared()
        assert torch.equal(shared.head_rows(ids), own.head_rows(ids))
        assert torch.equal(shared.embed(ids), own.embed(ids))
        assert shared.config == own.config


@pytest.mark.parametrize("drafter", ["layer_skip", "sparse_kv"])
def test_drafters_that_would_run_the_model_alone_are_refused(tmp_path: Path, drafter: str) -> None:
    config, weights = save(make_reference("llama2"), tmp_path)
    with parallel_target(config, weights, tmp_path) as target:
        engine = make_engine(target, frozenset(), SpeculativeConfig(drafter=drafter, draft_context=128))
        with pytest.raises(InvalidInput, match=f"the drafter '{drafter}' needs a target .* ParallelTarget"):
            engine.drafters.get(drafter)


def _on_all(groups: list[Group], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    sums: dict[int, torch.Tensor] = {}

    def work(rank: int) -> None:
        sums[rank] = groups[rank].sum_in_order(parts[rank])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [sums[rank] for rank in range(len(groups))]


def test_sums_are_made_in_the_order_of_ranks(tmp_path: Path) -> None:
    """Numbers whose sum depends on the order in which they are added: (1e8 + 1) - 1e8 is 0, 1e8 - 1e8 + 1 is 1."""
    parts = [torch.tensor([[value]]) for value in (1e8, 1.0, -1e8)]
    assert float(parts[0] + parts[2] + parts[1]) == 1.0  # another order, another sum
    for total in _on_all(connect(tmp_path, 3), parts):
        assert float(total) == float(parts[0] + parts[1] + parts[2]) == 0.0


@pytest.mark.parametrize("words", [3, PLAN - 26, PLAN - 25, PLAN, 3 * PLAN])
def test_plans_arrive_as_they_were_sent(words: int, tmp_path: Path) -> None:
    tree = topology_of((-1, 0, 0, 1))
    spans = [Span(0, 4, [7, 2], 20, tree), Span(4, 4 + words, range(9, 400), 0, chain_of(words))]
    copies = [[(1, 2), (5, 3)], [(9, 8)]]
    plan = PassPlan(64, copies, list(range(4 + words)), spans, [100, 200], 4, words > 3)
    sender, receiver = connect(tmp_path, 2)
    thread = threading.Thread(target=sender.send_plan, args=(plan.to_numbers(),))
    thread.start()
    found = PassPlan.from_numbers(receiver.receive_plan())
    thread.join(60)
    assert (found.slots, found.copies, found.scored) == (plan.slots, plan.copies, plan.scored)
    assert found.ends_with_keys is plan.ends_with_keys
    assert (found.tokens, found.limits) == (plan.tokens, plan.limits)
    for got, sent in zip(found.spans, spans, strict=True):
        assert (got.first, got.end, got.length) == (sent.first, sent.end, sent.length)
        assert got.shape.parents == sent.shape.parents
        assert got.slots == sent.slots


def test_parts_cover_everything_once() -> None:
    for total, size in ((3, 2), (61, 4), (8, 8), (5, 3)):
        ranges = [part.of(total) for part in Part(0, size).all]
        assert [i for mine in ranges for i in range(mine.start, mine.stop)] == list(range(total))


def test_weights_that_are_not_split_come_back_whole(tmp_path: Path) -> None:
    config, weights = save(make_reference("qwen2_moe"), tmp_path)
    parsed = DecoderConfig.from_hf(config)
    split = SplitWeights(weights, parsed, Part(1, 2))
    whole = [name for name in weights if split[name].shape == weights[name].shape]
    assert all(any(word in name for word in ("norm", "embed", "gate.weight", "lm_head")) for name in whole)
    assert config_of(parsed, Part(1, 2)).kv_heads == 1


def test_more_ranks_than_kv_heads_are_refused(tmp_path: Path) -> None:
    config, _ = save(make_reference("qwen3"), tmp_path)
    with pytest.raises(InvalidInput, match="has 2 KV heads"):
        check_split(DecoderConfig.from_hf(config), 3)
