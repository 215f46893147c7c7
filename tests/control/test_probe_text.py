"""What passes are timed with: a model with experts is timed on text of its own, which wakes them as real text does."""

from pathlib import Path
from unittest.mock import patch

import pytest

from forerun.control import cost
from forerun.control.cost import PIECE_LENGTH, PIECES, CostModel, has_experts, probe_text
from forerun.core.types import Needs, PlainSeq, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.native.target import NativeDecoder
from forerun.testing import TableLM
from tests.models.tiny_checkpoints import make_decoder, make_reference, save
from tests.native.blocks import needs_native


def _target(name: str, folder: Path) -> NativeDecoder:
    config, weights = save(make_reference(name), folder)
    return NativeDecoder(DecoderConfig.from_hf(config), weights, mode="float32", kv_slots=None)


@pytest.mark.slow
@needs_native
def test_only_experts_ask_for_text(tmp_path: Path) -> None:
    dense, routed = _target("llama2", tmp_path / "dense"), _target("qwen3_moe", tmp_path / "routed")
    assert not has_experts(dense)
    assert not has_experts(TableLM(vocab_size=7, order=1, seed=0))
    assert has_experts(routed)
    assert len(set(probe_text(dense, 40))) == 40  # all differ
    text = probe_text(routed, 40)
    assert len(text) == PIECES * PIECE_LENGTH
    assert text == probe_text(routed, 40)
    assert routed.used_slots == 0


@needs_native
def test_the_text_is_what_the_model_finds_likely(tmp_path: Path) -> None:
    target = _target("mixtral", tmp_path)
    text = probe_text(target, 40)
    ranks = []
    for piece in range(PIECES):
        tokens = text[piece * PIECE_LENGTH : (piece + 1) * PIECE_LENGTH]
        seq = PlainSeq(1, tokens[:1], max_length=PIECE_LENGTH + 1)
        target.prefill([seq], Needs())
        logits = target.score([seq], TreeBatch.chains([tokens]), Needs()).required_logits
        target.release(seq)
        for row, token in zip(logits[:-1], tokens[1:], strict=True):
            ranks.append(int((row > row[token]).sum()))
    assert max(ranks) < 8
    assert len(set(ranks)) > 4  # drawn, not only the likeliest: that soon repeats itself


@needs_native
def test_repeats_wake_other_experts(tmp_path: Path) -> None:
    """The same tokens again would read the same experts, from the cache: passes must differ, at every size."""
    target = _target("qwen3_moe", tmp_path)
    seen: dict[int, set[tuple[int, ...]]] = {}
    timed = cost.time_pass

    def watch(*given: object) -> float:
        spent = timed(*given)  # type: ignore[arg-type]
        probes, rows, text = given[1:]
        assert isinstance(text, list)
        assert isinstance(probes, list)
        assert probes[0].tokens[-1] == text[0]  # the root is the sequence's last token
        seen.setdefault(int(str(rows)), set()).add(tuple(text[: int(str(rows))]))
        return spent

    with patch.object(cost, "time_pass", watch):
        CostModel.measure(target, (1, 4), repeats=2)
    assert len(seen[4]) >= 4
    assert len(seen[1]) >= 3  # a single token may come twice
    assert target.used_slots == 0


@pytest.mark.parametrize("slots", [64, 200])
def test_a_small_cache_is_enough(slots: int, tmp_path: Path) -> None:
    config, weights = save(make_reference("mixtral"), tmp_path)
    target = make_decoder(config, weights, kv_slots=slots)
    measured = CostModel.measure(target, (1, 2, 4), repeats=1)
    assert set(measured.seconds) == {1, 2, 4}
    assert target.used_slots == 0
