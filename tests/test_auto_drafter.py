"""What `auto` drafts with where there is no head: suffix on a GPU with slow passes, and n-gram everywhere else."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.build import engine as build
from forerun.build.auto_drafter import SLOW_PASS, Choice, choose_lookup, settle
from forerun.build.engine import make_engine
from forerun.control.cost import METHOD, QUICK, CostModel
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.drafters.base import Parts
from forerun.drafters.lookup.suffix import SuffixDrafter
from forerun.drafters.lookup.suffix_table import Successors
from forerun.engine.engine import Engine
from forerun.models.base import ON_GPU
from forerun.models.load.tokenizer import opening_of
from forerun.testing import FakeSeq, TableLM
from tests.gpu.test_hybrid_following import counting_target

OPENING = (3, 1, 4)
LARGE, SMALL = 4.1e-3, 1.45e-3  # seconds of a plain pass of an 8B and of a 1.5B on one H200
GPU = TableLM(8, device=torch.device("meta"))


def parts(target: Any = GPU, opening: tuple[int, ...] = OPENING, **wish: Any) -> Parts:
    return Parts(target, None, SpeculativeConfig(**wish), opening=opening)


def passes_of(seconds: float) -> Any:
    return lambda: CostModel({1: seconds, 64: 2 * seconds})


def never() -> CostModel:
    raise AssertionError("passes are timed where that decides nothing")


@pytest.mark.parametrize(
    ("seconds", "drafter"),
    [(LARGE, "suffix"), (SLOW_PASS, "suffix"), (0.99 * SLOW_PASS, "ngram"), (SMALL, "ngram"), (0.02, "suffix")],
)
def test_on_a_gpu_what_a_plain_pass_takes_decides(seconds: float, drafter: str) -> None:
    found = choose_lookup(parts(), passes_of(seconds))
    assert found.drafter == drafter
    assert f"{1e3 * seconds:.1f} ms" in found.why
    assert "3.0 ms" in found.why


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (parts(TableLM(8), ()), "on a CPU"),
        (parts(SimpleNamespace(can=ON_GPU, source_rules=object()), ()), "encoder-decoder"),
        (parts(opening=()), "a tokenizer"),  # then there is no table, and matches alone are no better
        (parts(controller="fixed"), "adaptive controller"),  # times nothing
    ],
)
def test_elsewhere_it_is_ngram_and_nothing_is_timed(given: Parts, why: str) -> None:
    found = choose_lookup(given, never)
    assert found.drafter == "ngram"
    assert why in found.why


def test_an_encoder_decoder_has_no_opening_whatever_it_runs_on() -> None:
    target = SimpleNamespace(can=ON_GPU, source_rules=object())
    assert opening_of(target, None) == ()  # type: ignore[arg-type]


def test_a_second_model_goes_before_look_ups() -> None:
    given = Parts(GPU, TableLM(8), SpeculativeConfig(), opening=OPENING)
    assert settle(given, never, lambda name: pytest.fail(name)) == Choice("draft_model", "a draft model was given")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder of GPUs runs on a CPU here: its opening is asked for all the same."""
    monkeypatch.setattr(build, "opening_of", lambda target, tokenizer: OPENING)


def engine_of(costs: Path, seconds: float, drafter: str = "auto", shared: bool = False) -> Engine:
    if not costs.exists():
        curve = {rows: seconds * (1 + 0.002 * rows) for rows in QUICK}
        costs.write_text(json.dumps({"seconds": curve, "method": METHOD}))
    return make_engine(counting_target(), frozenset(), SpeculativeConfig(drafter, shared=shared), cost_file=costs)


def write(engine: Engine, *requests: Request) -> list[list[int]]:
    seqs = [engine.prepare(request) for request in requests]
    for seq in seqs:
        engine.enqueue(seq)
    while engine.busy:
        engine.step()
    return [seq.tokens for seq in seqs]


def asked(first: int, salt: str | None = None, temperature: float = 0.0, tokens: int = 20) -> Request:
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=first)
    return Request((first, first + 1), params, cache_salt=salt)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("seconds", "drafter"), [(LARGE, "suffix"), (SMALL, "ngram")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_drafts_so_and_texts_are_those_of_plain_decoding(
    tmp_path: Path, seconds: float, drafter: str, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="forerun.build.engine")
    engine = engine_of(tmp_path / "0.json", seconds)
    assert engine.default_drafter == drafter
    assert f"auto: {drafter}: no head comes" in caplog.text
    some = [asked(first, temperature=temperature) for first in (5, 9, 30)]
    plain = write(engine_of(tmp_path / "0.json", seconds, "none"), *some)
    assert write(engine, *some) == plain
    assert (tmp_path / "0.successors").exists() == (drafter == "suffix"), "n-gram reads no table"


@pytest.mark.usefixtures("as_on_a_gpu")
def test_passes_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller has the curve that the drafter was chosen by, even where it cannot be kept."""
    measured: list[CostModel] = []

    def measure(*given: Any, **more: Any) -> CostModel:
        measured.append(CostModel(dict.fromkeys(QUICK, LARGE)))
        return measured[-1]

    monkeypatch.setattr(CostModel, "measure", measure)
    (tmp_path / "file").write_text("no folder")
    for costs in (None, tmp_path / "file" / "0.json"):
        measured.clear()
        engine = make_engine(counting_target(), frozenset(), cost_file=costs)
        assert engine.default_drafter == "suffix"
        assert [engine.controller.cost.seconds] == [one.seconds for one in measured]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_restart_reads_the_table_and_nothing_of_any_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = engine_of(tmp_path / "0.json", LARGE)
    first.drafters.get("suffix")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(before) == {"0.json", "0.successors"}
    written = write(first, asked(5), asked(20, "a"))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before, "requests leave nothing"
    monkeypatch.setattr(Successors, "of", lambda *_: pytest.fail("it was kept"))
    assert write(engine_of(tmp_path / "0.json", LARGE), asked(5), asked(20, "a")) == written


@pytest.mark.usefixtures("as_on_a_gpu")
def test_nothing_that_was_written_crosses_requests_in_the_default(tmp_path: Path) -> None:
    """Neither under another key nor under the same; the control asks for it, and has it under the same alone."""

    def found(shared: bool, salt: str) -> list[int]:
        """What is looked up for a text that begins as one that was written under the salt `a`."""
        engine = engine_of(tmp_path / "0.json", LARGE, shared=shared)
        drafter = engine.drafters.get(engine.default_drafter)
        assert isinstance(drafter, SuffixDrafter)
        (secret,) = write(engine, asked(5, "a"))
        assert not drafter._sequences, "what is kept of a request ends with it"
        assert not drafter._met
        seq = FakeSeq(99, secret[4:12], cache_salt=salt)
        return [token for token, _ in drafter.chain(seq, 6)]

    assert found(False, "a") == found(False, "b") == found(True, "b") == []
    assert found(True, "a") == [*range(17, 23)]
