"""What heads keep of a sequence: the rows of root and path, and the keys and values that they wrote."""

from __future__ import annotations

import math

import pytest
import torch

from forerun.core.clock import WALL, Clock
from forerun.core.errors import InvalidInput
from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Scores, TreeBatch, Verdict
from forerun.drafters.heads.base import (
    UNMEASURED,
    Calibration,
    ObservedRows,
    head_dtype,
    is_drawn,
    is_ready,
    observe_rows,
)
from forerun.drafters.heads.drafter import LastRowDrafter
from forerun.drafters.heads.eagle_head import HeadCache
from forerun.drafters.heads.medusa import HeadSet, HydraDrafter, MedusaDrafter
from forerun.models.base import SharedWeights
from forerun.testing import FakeSeq, TableLM
from tests.drafters.rounds import observe_prompts
from tests.drafters.tiny_heads import eagle_config, heads_config, heads_weights

TREE = ([7, 1, 2, 3, 4], [-1, 0, 0, 1, 2])  # 7 -> 1 -> 3 and 7 -> 2 -> 4
CHAIN = ([8, 5, 6], [-1, 0, 1])


def round_of(paths: list[list[int]], bonus: list[int]) -> tuple[TreeBatch, Scores, Verdict]:
    """A round of the two trees; row i of layer l is [10 l + i]."""
    trees = TreeBatch.trees([TREE, CHAIN])
    hidden = {layer: torch.arange(8.0)[:, None] + 10 * layer for layer in (1, 2)}
    return trees, Scores(None, hidden), Verdict.of(paths, bonus, "cpu")


def test_rows_of_root_and_path_come_with_the_token_that_followed() -> None:
    seqs, texts = [FakeSeq(0, [7]), FakeSeq(1, [8])], dict[int, ObservedRows]()
    observe_rows(texts, (1, 2), seqs, *round_of([[2, 4], [1]], [50, 60]))
    first, second = texts[0], texts[1]
    assert first.tokens == [2, 4, 50]  # after the root, after node 2, after node 4
    assert torch.cat(first.features).tolist() == [[10, 20], [12, 22], [14, 24]]
    assert second.tokens == [5, 60]
    assert torch.cat(second.features).tolist() == [[15, 25], [16, 26]]
    assert (first.seen, second.seen) == (3, 2)


def test_rows_add_up_over_rounds_and_are_taken_once() -> None:
    seqs, texts = [FakeSeq(0, [7]), FakeSeq(1, [8])], dict[int, ObservedRows]()
    observe_rows(texts, (1,), seqs, *round_of([[], [1, 2]], [1, 2]))
    observe_rows(texts, (1,), seqs, *round_of([[1, 3], []], [3, 4]))
    assert texts[0].seen == 4
    assert texts[0].tokens == [1, 1, 3, 3]
    assert torch.cat(texts[0].features).flatten().tolist() == [10, 10, 11, 13]
    pieces = texts[1].take()
    assert [list(rows) for _, rows in pieces] == [[5, 6, 7], [5]]
    assert all(layers[0].shape == (8, 1) for layers, _ in pieces)  # as they lie in the pass
    assert texts[1].take() == []
    assert texts[1].features == []
    assert texts[1].seen == 4


def test_a_prompt_of_one_token_leaves_no_rows() -> None:
    empty = TreeBatch.chains([[]])
    texts: dict[int, ObservedRows] = {}
    observe_rows(
        texts, (-1,), [FakeSeq(0, [3])], empty, Scores(None, {-1: torch.zeros(0, 2)}), Verdict.of([[]], [3], "cpu")
    )
    assert texts[0].seen == 0
    assert texts[0].features == []


def test_when_a_sequence_can_be_drafted_for() -> None:
    rows, seq, budget = ObservedRows(), FakeSeq(0, [1, 2, 3]), Budget(2, 2)
    assert not is_ready(None, seq, budget)
    assert not is_ready(rows, seq, budget)  # nothing was seen
    rows.seen = 2
    assert is_ready(rows, seq, budget)
    assert not is_ready(rows, seq, Budget(0, 0))
    assert not is_ready(rows, seq, Budget(2, 2, source="free"))
    rows.seen = 1
    assert not is_ready(rows, seq, budget)  # a row is missing


@pytest.mark.parametrize(
    ("temperature", "shares_noise", "drawn"), [(0.0, False, False), (1.0, True, False), (1.0, False, True)]
)
def test_whose_tokens_are_drawn(temperature: float, shares_noise: bool, drawn: bool) -> None:
    params = SamplingParams(temperature=temperature)
    assert is_drawn(FakeSeq(0, [1], params=params, shares_noise=shares_noise)) == drawn


def test_confidences_are_calibrated_and_never_above_one() -> None:
    assert Calibration().log_confidences([-0.5, -1.0]) == [-0.5, -1.0]
    found = Calibration(scale=2.0, power=2.0).log_confidences([-0.1, -1.0])
    assert found == pytest.approx([0.0, math.log(2.0) - 2.0])
    for scale in (0.0, -1.0, math.nan):
        with pytest.raises(InvalidInput, match="fit it again"):
            Calibration(scale=scale)


def test_heads_compute_in_the_targets_format() -> None:
    table = torch.zeros(4, 2, dtype=torch.bfloat16)
    assert head_dtype(TableLM(4), SharedWeights.of(table, table)) == torch.bfloat16
    assert head_dtype(TableLM(4), None) == torch.float32


def medusa(own: bool, clock: Clock = WALL) -> MedusaDrafter:
    config = heads_config("medusa", 12)
    return MedusaDrafter(HeadSet(config, heads_weights(config, own=own), None), clock)


def test_medusa_costs_one_pass_where_its_heads_share_an_lm_head() -> None:
    assert medusa(own=False).offer(FakeSeq(0, [1])).seconds == (UNMEASURED, 0.0)
    assert medusa(own=True).offer(FakeSeq(0, [1])).seconds == (UNMEASURED,)


@pytest.mark.parametrize("own", [True, False])
def test_what_a_draft_took_is_offered_for_the_next(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    drafter, target, seq = medusa(own, lambda: now[0]), TableLM(12), FakeSeq(0, [1, 2, 3])
    guesses = drafter._guesses

    def slow(*arguments: object) -> object:
        now[0] += 8.0
        return guesses(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(drafter, "_guesses", slow)
    observe_prompts(drafter, target, [seq])
    for _ in range(2):  # the first draft warms up
        drafter.propose([seq], [Budget(4, 4)])
    assert drafter.offer(seq).until(4) == pytest.approx(8.0)
    assert drafter.offer(seq).until(2) == pytest.approx(4.0 if own else 8.0)


def test_sampled_heads_say_whose_nodes_are_chosen() -> None:
    config = heads_config("hydra", 12)
    drafter = HydraDrafter(HeadSet(config, heads_weights(config), None), sampled=True)
    hot = SamplingParams(temperature=1.0)
    assert drafter.offer(FakeSeq(0, [1])).chosen
    assert not drafter.offer(FakeSeq(0, [1], params=hot)).chosen
    assert drafter.offer(FakeSeq(0, [1], params=hot, shares_noise=True)).chosen


def test_heads_on_the_last_row_keep_just_that() -> None:
    drafter, target, seq = LastRowDrafter(), TableLM(12), FakeSeq(0, [1, 2, 3, 4])
    observe_prompts(drafter, target, [seq])  # type: ignore[arg-type]
    (kept,) = drafter._sequences[0].features
    assert kept.shape == (1, target.width)
    wanted = target.prefill([FakeSeq(9, [1, 2, 3, 4])], drafter.needs)[1].hidden[-1][-1:]
    torch.testing.assert_close(kept, wanted)
    drafter.forget(seq)
    assert not drafter._sequences


def cache() -> HeadCache:
    return HeadCache(eagle_config("eagle3", 24), torch.float32, torch.device("cpu"))  # 2 key heads of 4


def test_a_cache_grows_and_keeps_what_it_has() -> None:
    kept = cache()
    kept.admit(5, slots=4)
    keys = torch.randn(1, 3, 2, 4)
    kept.write([5], torch.tensor([0]), keys, -keys, 0)
    kept.admit(6, slots=40)
    view = kept.view([5], 3)[0]
    torch.testing.assert_close(view[0].transpose(1, 2), keys)
    torch.testing.assert_close(view[1].transpose(1, 2), -keys)
    assert kept.data.shape[2] == 2
    assert kept.data.shape[4] >= 40
    assert kept.base(6) == 2 * kept.data.shape[4]


def test_rows_are_used_again_and_lengths_start_anew() -> None:
    kept = cache()
    for seq_id in (1, 2, 3):
        kept.admit(seq_id, 4)
        kept.lengths[seq_id] = 3
    kept.release(2)
    kept.release(99)
    kept.admit(4, 4)
    assert kept.rows == {1: 0, 3: 2, 4: 1}
    assert kept.lengths[4] == 0
    assert kept.data.shape[2] == 3


def test_sequences_write_behind_what_each_has() -> None:
    kept = cache()
    kept.admit(1, 6)
    kept.admit(2, 6)
    keys = torch.randn(2, 2, 2, 4)
    kept.write([2, 1], torch.tensor([1, 3]), keys, keys, 0)
    both = kept.view([1, 2], 6)[0, 0]  # [B, Hkv, slots, Dh]
    torch.testing.assert_close(both[0, :, 3:5].transpose(0, 1), keys[1])
    torch.testing.assert_close(both[1, :, 1:3].transpose(0, 1), keys[0])
    assert float(both[0, :, :3].abs().sum() + both[1, :, 3:].abs().sum()) == 0.0
