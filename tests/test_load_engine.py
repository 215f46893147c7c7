"""What happens when a model has been loaded."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.build.engine import load_target, make_engine, memory_of
from forerun.build.load import collect_garbage, drafting_of
from forerun.core.errors import InvalidInput
from forerun.core.params import Dtype, EngineConfig, KvDtype
from forerun.heads import BOX
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.native.target import NativeDecoder
from forerun.models.slots import usual_batch
from forerun.server.backends.start import load_llm
from forerun.testing import TableLM

MEDUSA, EAGLE3 = str(BOX / "smollm2-135m-medusa"), str(BOX / "smollm2-135m-eagle3")


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_of_loading_is_collected_unless_the_collector_is_off(is_on: bool) -> None:
    """Where it is off, as in commands, what was loaded is left out of collections altogether."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            found.append(info["generation"])

    if not is_on:
        gc.disable()
    gc.callbacks.append(note)
    try:
        collect_garbage()
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert found == ([2] if is_on else [])


@pytest.mark.parametrize(
    "given",
    [
        {"drafter": "eagle3", "draft_model": MEDUSA},
        {"drafter": "ngram+medusa", "draft_model": Path(EAGLE3)},
        {"drafter": "draft_model", "draft_model": EAGLE3},
        {"drafter": "ngram>draft_model", "draft_model": MEDUSA},
        {"speculative_config": {"method": "eagle3", "model": MEDUSA}},
    ],
)
def test_a_head_that_the_drafter_cannot_run_is_refused(given: dict[str, Any]) -> None:
    """No model is needed to know: /nowhere is not looked at."""
    with pytest.raises(InvalidInput, match=r"draft_model=.* is a head of the kind (medusa|eagle3); leave") as one:
        LLM.load("/nowhere", **given)
    with pytest.raises(InvalidInput) as other:
        load_llm("/nowhere", {}, given)
    assert str(one.value) == str(other.value)
    assert "\n" not in str(one.value)


@pytest.mark.parametrize(
    "given",
    [
        {"draft_model": MEDUSA},
        {"drafter": "medusa", "draft_model": MEDUSA},
        {"drafter": "hybrid_eagle3", "draft_model": EAGLE3},  # an old name
        {"drafter": "ngram", "draft_model": MEDUSA},  # single requests may ask for it
        {"drafter": "draft_model", "draft_model": "smollm2"},
    ],
)
def test_a_head_that_the_drafter_runs_is_taken(given: dict[str, Any]) -> None:
    assert drafting_of(given).draft_model == given["draft_model"]


@pytest.mark.parametrize(
    ("device", "slots", "threads", "expected"),
    [
        ("cuda", 135_232, 16, 128),  # the default model on a large card
        ("cuda", 46_000, 16, 64),  # an 8B on a card of 24 GB
        ("cuda", 16_400, 16, 32),
        ("cuda", 3_000, 16, 8),
        ("cuda", None, 16, 64),
        ("cpu", None, 2, 8),
        ("cpu", 120_000, 1, 8),
        ("cpu", 120_000, 8, 32),
        ("cpu", 1 << 20, 96, 64),
        ("cpu", 10_000, 8, 16),
    ],
)
def test_how_many_sequences_go_together_unless_it_is_said(
    device: str, slots: int | None, threads: int, expected: int
) -> None:
    most, why = usual_batch(device, slots, threads)
    assert most == expected
    assert slots is None or most == 8 or most * 512 <= slots
    assert why


def test_library_and_server_have_one_rule_and_say_what_it_gives(caplog: pytest.LogCaptureFixture) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        with caplog.at_level(logging.INFO):
            engine = make_engine(TableLM(vocab_size=9), frozenset())
    finally:
        torch.set_num_threads(threads)
    assert engine.max_batch == 20
    said = [record.getMessage() for record in caplog.records if "max_batch" in record.getMessage()]
    assert said == ["at most 20 sequences in a batch (max_batch): 4 per CPU thread (threads: 5)"]
    assert make_engine(TableLM(vocab_size=9), frozenset(), None, EngineConfig(max_batch=3)).max_batch == 3
    assert EngineConfig.from_dict({"max_num_seqs": None}).max_batch is None


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("auto", "auto"), ("auto", "int8"), ("q8", "auto"), ("bfloat16", "int8")]
)
def test_what_a_model_takes_is_known_before_it_is_loaded(smollm2_path: str, dtype: Dtype, kv_dtype: KvDtype) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    config = EngineConfig(dtype=dtype, kv_dtype=kv_dtype, kv_memory="64MB", device="cpu")
    weights, room, token_bytes = memory_of(checkpoint, config)
    target = load_target(checkpoint, config)
    assert isinstance(target, NativeDecoder)
    assert room == 64_000_000
    assert target.slots == room // token_bytes[kv_dtype] // 64 * 64  # whole pages
    held = sum(kept.nbytes for kept in target._kept if isinstance(kept, torch.Tensor))
    assert weights == pytest.approx(held, rel=0.05)


def test_a_kv_cache_that_cannot_be_had_is_refused_before_it_is_counted(smollm2_path: str) -> None:
    with pytest.raises(InvalidInput, match="needs a GPU"):
        memory_of(open_checkpoint(smollm2_path), EngineConfig(kv_dtype="fp8", device="cpu"))
