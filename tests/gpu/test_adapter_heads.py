"""A head of an adapter's own on the GPU decoder: it drafts for that adapter's texts alone, and goes with it.

The same tests run on a CPU with the plain steps.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

from forerun.build.engine import add_own_head, build_drafter, make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.registry import DrafterSpec
from forerun.core.types import Request, Round
from forerun.drafters.base import Drafter, Parts
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.heads.eagle_head import write_head
from forerun.engine.engine import Engine
from forerun.models.base import ON_GPU
from forerun.models.cuda.target import CudaDecoder
from tests.gpu.heads import make_head
from tests.gpu.test_adapters import folders_of, text_of
from tests.gpu.tiny import DEVICES, make_target, need_cuda

OWN = "ngram+eagle3@a0"
pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def as_on_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the same decoder drafts on its device and overlaps rounds too."""
    need_cuda(device)
    if device == "cpu":
        can = replace(ON_GPU, row_dtype=torch.float32)
        monkeypatch.setattr(CudaDecoder, "can", property(lambda target: can))


def engine_of(device: str, folder: Path, own: bool, controller: str = "fixed") -> Engine:
    """The adapter `a0` has a head of its own where that is asked for, `a1` has the engine's."""
    target = make_target("llama", device, torch.bfloat16 if device == "cuda" else torch.float32)
    config, weights = make_head(target, borrows=True)
    write_head(folder / "shared", config, weights)
    write_head(folder / "own", config, {name: -weight for name, weight in weights.items()})
    adapters = folders_of("llama", folder, 2)
    if own:
        adapters["a0"] += f",head={folder / 'own'}"
    speculative = SpeculativeConfig(
        drafter="ngram+eagle3", draft_model=str(folder / "shared"), controller=controller, budget=4
    )
    return make_engine(target, frozenset(), speculative, EngineConfig(max_batch=4, max_length=200, adapters=adapters))


def write(engine: Engine, asked: list[tuple[str | None, int]], **more: Any) -> list[list[int]]:
    """Texts that are begun a few rounds apart, so that they join and leave rounds that are under way."""
    texts = dict[int, list[int]]()
    for adapter, seed in asked:
        params = SamplingParams(14 + 3 * (seed % 3), temperature=0.9 * (seed % 2), seed=seed, ignore_eos=True)
        texts[engine.submit(Request(tuple(text_of(seed, 6)), params, adapter=adapter, **more))] = []
        for event in engine.step() + engine.step():
            texts[event.seq_id] += event.tokens
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            texts[event.seq_id] += event.tokens
    return list(texts.values())


def test_texts_of_mixed_batches_are_the_plain_ones(
    device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked, wanted = [("a0", 2), ("a1", 4), (None, 6), ("a0", 3), ("a1", 5), ("a0", 8), (None, 7)], list[list[int]]()
    for controller in ("fixed", "adaptive"):
        engine = engine_of(device, tmp_path / controller, own=True, controller=controller)
        wanted = wanted or [write(engine, [one], drafter="none")[0] for one in asked]
        assert write(engine, asked) == wanted
        assert write(engine, asked, prediction=tuple(wanted[0])) == wanted
        drafter = engine.drafters.get(OWN)
        assert isinstance(drafter, HybridDrafter)
        assert isinstance(drafter.second, HybridDrafter), "a prediction is put beside the head of all texts"
        assert isinstance(drafter.second.second, OnDevice)
        assert not drafter.second.second._failed
        assert engine.timeline.depth == 2, "rounds of one head overlap, and go on to overlap"
    assert "switched off" not in caplog.text
    assert "decoded plainly" not in caplog.text


def test_the_own_head_drafts_other_tokens_and_for_its_adapter_alone(device: str, tmp_path: Path) -> None:
    drafted = dict[tuple[bool, str | None], Any]()
    for own in (True, False):
        engine = engine_of(device, tmp_path / str(own), own)
        for adapter in (None, "a1", "a0"):  # a drafter learns from its texts: those of the last differ
            seen = list[list[int]]()
            name = OWN if own and adapter == "a0" else "ngram+eagle3"
            inner = engine.drafters.get(name)

            def observe(*args: Any, inner: Any = inner, seen: list[list[int]] = seen) -> None:
                seen.append(args[1].to_host()[0])
                type(inner).observe(inner, *args)

            inner.observe = observe  # type: ignore[method-assign]
            write(engine, [(adapter, 2)])
            assert seen, f"{name} observes the texts of {adapter}"
            drafted[own, adapter] = seen
    assert drafted[True, "a0"] != drafted[False, "a0"]
    assert drafted[True, "a1"] == drafted[False, "a1"]
    assert drafted[True, None] == drafted[False, None]


def test_a_head_comes_and_goes_while_texts_are_written(device: str, tmp_path: Path) -> None:
    engine = engine_of(device, tmp_path, own=False, controller="adaptive")
    wanted = write(engine, [("a0", 2), ("a1", 4)], drafter="none")
    folder = folders_of("llama", tmp_path, 2)["a0"]
    texts = dict[int, list[int]]()

    def submit(adapter: str, seed: int) -> None:
        params = SamplingParams(14 + 3 * (seed % 3), temperature=0.0, seed=seed, ignore_eos=True)
        texts[engine.submit(Request(tuple(text_of(seed, 6)), params, adapter=adapter))] = []

    submit("a0", 2)
    for event in engine.step() + engine.step():
        texts[event.seq_id] += event.tokens
    engine.settle()
    add_own_head(engine.drafters, "a0", f"{folder},head={tmp_path / 'own'}")  # the first text keeps the shared head
    submit("a1", 4)
    submit("a0", 2)
    for event in engine.step() + engine.step() + engine.step():
        texts[event.seq_id] += event.tokens
    drafter: Any = engine.drafters.get(OWN)
    gone = [ref(part) for part in (drafter, drafter.second.draft.net, drafter.second.draft.replays)]
    del drafter
    engine.drafters.drop_own("a0", engine.scheduler.every)
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            texts[event.seq_id] += event.tokens
    assert [*texts.values()] == [wanted[0], wanted[1], wanted[0]]
    assert not engine.drafters.has(OWN)
    gc.collect()
    assert [part() for part in gone] == [None] * 3, "weights, KV and graphs are freed"


def followed_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Which of the rounds to come were launched before the last one was read."""
    found, observe = list[bool](), engine.controller.observe

    def watched(outcome: Round) -> None:
        found.append(outcome.followed)
        observe(outcome)

    monkeypatch.setattr(engine.controller, "observe", watched)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["ngram+eagle3", "prediction+ngram+eagle3"])
def test_a_text_with_a_prediction_is_drafted_by_the_head_of_all_texts(
    device: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is built, captured and weighed once, and rounds of texts with a prediction and without still overlap."""
    made, build = list[str](), build_drafter

    def noted(spec: DrafterSpec, parts: Parts) -> Drafter:
        made.append(spec.name)
        return build(spec, parts)

    monkeypatch.setattr("forerun.build.engine.build_drafter", noted)
    engine = engine_of(device, tmp_path, own=False)
    prompts = [tuple(text_of(seed, 6)) for seed in range(3)]
    params = SamplingParams(30, temperature=0.0, ignore_eos=True)

    def texts(predictions: list[tuple[int, ...]], **more: Any) -> list[list[int]]:
        found = {
            engine.submit(Request(prompt, params, prediction=one, **more)): list[int]()
            for prompt, one in zip(prompts, predictions, strict=True)
        }
        while engine.busy:
            for event in engine.step():
                assert event.error is None
                found[event.seq_id] += event.tokens
        return [*found.values()]

    none: list[tuple[int, ...]] = [()] * 3
    wanted = texts(none, drafter="none")
    followed = followed_of(engine, monkeypatch)
    engine.drafters.get(engine.default_drafter)  # a GPU's captures are those of drafters that are there
    engine.captures.up_to(len(prompts))  # rounds follow once they are captured
    assert texts(none) == wanted
    usual = sum(followed)
    assert usual > 5
    followed.clear()
    mixed: list[tuple[int, ...]] = [tuple(reversed(wanted[0])), (), ()]
    assert texts(mixed, drafter=asked) == wanted
    assert abs(sum(followed) - usual) <= 3
    assert made.count("ngram+eagle3") == 1
    engine.drafters.swap_head(str(tmp_path / "own"), [])
    assert texts(mixed, drafter=asked) == wanted
    assert made.count("ngram+eagle3") == 2
    assert made.count("prediction") == 1
