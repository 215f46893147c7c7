"""Passes captured before texts are written: larger sizes than needed change no text, and nothing is captured later."""

import pytest
import torch

from forerun.build import make_engine
from forerun.models.cuda.graphs import menu, scored_rows
from forerun.models.cuda.plan import Need, Size, splits_to
from forerun.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.types import Needs, Request
from tests.gpu.test_plain_rounds import PROMPTS, _write
from tests.gpu.tiny import DEVICES, make_target, need_cuda

BATCH, LENGTH = 5, 400


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_nothing_is_captured_while_texts_are_written(device: str, drafter: str) -> None:
    need_cuda(device)
    target = make_target("llama", device, torch.float32 if device == "cpu" else torch.bfloat16)
    speculative = SpeculativeConfig(drafter=drafter, controller="fixed", budget=6)
    engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=BATCH, max_length=LENGTH))
    requests = [
        Request(prompt * 2, SamplingParams(max_tokens=12 + 4 * i, ignore_eos=True))
        for i, prompt in enumerate(PROMPTS)
    ]
    wanted = _write(engine, requests)
    if device == "cuda":
        target.warm_up(Needs(), BATCH, LENGTH)
    else:
        target.passes.take_sizes(menu(LENGTH))
    captured = target.passes.captured
    assert _write(engine, requests) == wanted
    assert target.passes.captured == captured


@pytest.mark.parametrize("batch", [1, 3, 8, 40, 64, 65, 100, 128])
def test_plain_rounds_of_any_batch_have_a_size(batch: int) -> None:
    jobs = list(menu(4096))
    for farthest in (5, 1020, 3000, 4095):
        need = Need(batch, batch, farthest)
        sizes = [size for size, scored in jobs if scored and need.fits(size)]
        first = min(sizes, key=lambda size: (size.rows, size.groups, size.splits))
        assert first.splits == splits_to(farthest)


def test_a_need_that_no_size_has_room_for_is_rounded() -> None:
    need = Need(1000, 1100, 20)
    assert need.rounded() == Size(1024, 2048, 8)
    assert not any(need.fits(size) for size, _ in menu(4096))
    for scored in (True, False):
        assert any(Need(600, 70, 20).fits(size) for size, kind in menu(4096) if kind == scored)


def test_the_largest_passes_have_fewer_rows_with_logits() -> None:
    assert [scored_rows(Size(rows, 64, 8)) for rows in (128, 512, 768, 1024)] == [128, 512, 384, 384]
