"""Passes captured before texts are written: larger sizes than needed change no text, and nothing is captured later."""

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.build.load import rehearse_verdicts
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Needs, Request
from forerun.models.cuda.graphs import menu, scored_rows
from forerun.models.cuda.plan import Need, Plan, Size, padding, splits_to
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
        Request(prompt * 2, SamplingParams(max_tokens=12 + 4 * i, ignore_eos=True)) for i, prompt in enumerate(PROMPTS)
    ]
    wanted = _write(engine, requests)
    if device == "cuda":
        target.warm_up(Needs(), BATCH, LENGTH)
    else:
        target.passes.take_sizes(menu(LENGTH))
    captured = target.passes.captured
    assert _write(engine, requests) == wanted
    assert target.passes.captured == captured


@pytest.mark.parametrize("device", DEVICES)
def test_a_rehearsed_verdict_leaves_nothing_behind(device: str) -> None:
    need_cuda(device)
    target = make_target("llama", device, torch.float32 if device == "cpu" else torch.bfloat16)
    speculative = SpeculativeConfig(drafter="ngram", controller="fixed", budget=6)
    engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=BATCH, max_length=LENGTH))
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=4, ignore_eos=True)
    wanted = _write(engine, [Request(PROMPTS[0] * 2, params)])
    rehearse_verdicts(engine)
    assert not engine.busy
    assert target.used_slots == 0
    assert _write(engine, [Request(PROMPTS[0] * 2, params)]) == wanted


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
        assert any(Need(600, 70, 20).fits(size) for size, kind in menu(4096) if (kind > 0) == scored)


def test_passes_with_many_rows_of_prompts_have_fewer_with_logits() -> None:
    assert [scored_rows(rows) for rows in (128, 256, 512, 768, 1024)] == [
        [128], [128, 256], [128, 256, 512], [128, 256, 384], [128, 256, 384],
    ]  # fmt: skip


def test_a_pass_takes_the_graph_with_the_fewest_logits_that_are_enough() -> None:
    passes = make_target("llama", "cpu", torch.float32).passes
    passes.take_sizes(menu(LENGTH))
    size = passes.scored_size(Need(600, 70, 20))
    found = [passes._key(Plan(size, 600, padding(size).ints), (), scored).scored for scored in (1, 128, 129, 300, 500)]
    assert found == [128, 128, 256, 384, 512]  # the last is captured when it comes
