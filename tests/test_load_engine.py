"""What happens when a model has been loaded."""

from __future__ import annotations

import gc
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

from forerun import LLM
from forerun.build import load as loading
from forerun.build.engine import load_target, make_engine, memory_of
from forerun.build.load import collect_garbage, drafting_of
from forerun.cli.app import main, make_app
from forerun.cli.flags import in_flags, spelt
from forerun.core import registry
from forerun.core.errors import ForerunError, InvalidInput, VocabularyMismatch
from forerun.core.params import Dtype, EngineConfig, KvDtype
from forerun.heads import BOX
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.native.target import NativeDecoder
from forerun.models.slots import usual_batch
from forerun.server.backends.start import load_llm
from forerun.testing import TableLM

MEDUSA, EAGLE3 = str(BOX / "smollm2-135m-medusa"), str(BOX / "smollm2-135m-eagle3")
QWEN = str(BOX / "qwen2.5-coder-1.5b-eagle3")  # a head of another model
LARGER = "LARGER"  # the head of this model, but for a vocabulary of one token more


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


class WeightsAreRead(Exception):
    """Loading came as far as the target's weights."""


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading ends where the target's weights would be read."""

    def read(*args: Any) -> Any:
        raise WeightsAreRead

    monkeypatch.setattr(loading, "load_target", read)


def placed(given: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The same with the folder of the head that is made here."""
    if given.get("draft_model") != LARGER:
        return given
    values = json.loads((Path(EAGLE3) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"vocab_size": values["vocab_size"] + 1}))
    return given | {"draft_model": str(tmp_path)}


_NO_MODEL, _NO_FOLDER = "needs a second model to draft with; pass draft_model=NAME", "there is no folder '/nonexistent'"
_WIDER, _MORE = "is 1536 wide and smollm2 576", "knows 49153 tokens and smollm2 49152"


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"drafter": "draft_model"}, f"drafter='draft_model' {_NO_MODEL}"),
        ({"drafter": "ngram+draft_model"}, f"drafter='ngram+draft_model' {_NO_MODEL}"),
        ({"drafter": "ngram>draft_model"}, f"drafter='ngram>draft_model' {_NO_MODEL}"),
        ({"drafter": "eagle3", "draft_model": "/nonexistent"}, _NO_FOLDER),
        ({"drafter": "ngram+medusa", "draft_model": "/nonexistent"}, _NO_FOLDER),
        ({"drafter": "eagle3", "draft_model": str(BOX)}, "has no config.json; give the folder that holds the head"),
        ({"draft_model": "/nonexistent"}, "there is no file or folder /nonexistent; check the path"),
        ({"draft_model": "my-head"}, "there is no folder 'my-head' with a trained head either"),
        ({"drafter": "eagle3", "draft_model": QWEN}, _WIDER),
        ({"draft_model": QWEN}, _WIDER),
        ({"drafter": "hybrid_eagle3", "draft_model": LARGER}, _MORE),
    ],
)
def test_what_cannot_work_is_refused_before_weights_are_read(
    given: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Library, server and command line say the same, and nothing is warned about before."""
    given = placed(given, tmp_path)
    with pytest.raises(ForerunError) as library:
        LLM.load("smollm2", **given)
    with pytest.raises(ForerunError) as server:
        load_llm("smollm2", {}, given)
    said = str(library.value)
    assert str(server.value) == said
    assert words in said
    assert isinstance(library.value, VocabularyMismatch) == (words == _MORE)
    assert "\n" not in said
    assert not [record for record in caplog.records if "was trained for" in record.getMessage()]
    flags = [word for key, value in given.items() for word in (spelt(key), value)]
    monkeypatch.setattr(sys, "argv", ["forerun", "generate", "hi", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    command = get_command(make_app("generate")).commands["generate"]  # type: ignore[attr-defined]
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", f"forerun: {in_flags(said, command)}\n")


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"drafter": "eagle3"},  # the head comes with the package
        {"draft_model": EAGLE3},
        {"drafter": "ngram+medusa", "draft_model": MEDUSA},
        {"drafter": "draft_model", "draft_model": "smollm2"},
        {"drafter": "ngram", "draft_model": QWEN},  # it does not draft
        {"drafter": "layer_skip"},
        {"drafter": "ngram>layer_skip"},
    ],
)
def test_what_can_work_comes_to_the_weights(given: dict[str, Any]) -> None:
    with pytest.raises(WeightsAreRead):
        LLM.load("smollm2", **given)


@pytest.mark.usefixtures("no_weights")
def test_a_head_of_another_packages_kind_has_sizes_of_its_own(tmp_path: Path) -> None:
    """Of these `hidden_size` may be the head's."""
    registry.drafters.register("guesser", "my_package.guesser:Guesser", needs="head", formats=("guesser",))
    (tmp_path / "config.json").write_text(json.dumps({"forerun": {"format": "guesser"}, "hidden_size": 7}))
    try:
        with pytest.raises(WeightsAreRead):
            LLM.load("smollm2", draft_model=str(tmp_path))
    finally:
        registry.drafters.unregister("guesser")


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


def test_kinds_of_kv_that_a_model_cannot_have_are_not_offered(
    smollm2_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, config = open_checkpoint(smollm2_path), EngineConfig(device="cpu")
    assert {*memory_of(checkpoint, config)[2]} == {"auto", "int8"}

    def refused(checkpoint: object, config: EngineConfig, device: object) -> None:
        if config.kv_dtype != "auto":
            raise InvalidInput("not by this model's layers")

    monkeypatch.setattr("forerun.build.engine._refuse_kv_dtype", refused)
    assert {*memory_of(checkpoint, config)[2]} == {"auto"}
