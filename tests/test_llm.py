"""The object users hold, around a TableLM: prompts in all forms, streams side by side, errors that leave nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forerun.api.llm import LLM
from forerun.build.engine import make_engine
from forerun.core.errors import InvalidInput, ModelNotFound, UnknownName
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.testing import TableLM
from tests.models.tiny_gguf import write_tiny


class Letters:
    """Token i is a letter; a chat is its contents, one after the other."""

    eos_ids = frozenset({0})

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [ord(c) - 97 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)

    def token_text(self, index: int) -> str:
        return self.decode([index])

    def token_bytes(self, index: int) -> bytes:
        return self.token_text(index).encode()

    def chat_ids(self, messages: Any, /, **variables: Any) -> list[int]:
        return self.encode("".join(turn["content"] for turn in messages))


def make(**config: Any) -> LLM:
    target = TableLM(vocab_size=26)
    speculative = SpeculativeConfig(controller="fixed", budget=3)
    engine = make_engine(target, frozenset({0}), speculative, EngineConfig(**config), Letters())
    return LLM(engine, Letters())  # type: ignore[arg-type]


async def until(holds: Callable[[], bool]) -> None:
    """Wait for it, much longer than it takes on a busy machine."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def test_prompts_in_every_form_mean_the_same() -> None:
    llm = make()
    text = llm.generate("hello", PARAMS).text
    ids = [7, 4, 11, 11, 14]
    forms: list[Any] = [ids, tuple(ids), np.array(ids), torch.tensor(ids), [np.int64(i) for i in ids]]
    forms.append([{"role": "user", "content": "hel"}, {"role": "user", "content": "lo"}])
    assert [llm.generate(form, PARAMS).text for form in forms] == [text] * len(forms)
    batches: list[Any] = [
        ["hello"] * 2,
        [ids, ids],
        torch.tensor([ids, ids]),
        [[{"role": "user", "content": "hello"}]] * 2,
    ]
    for batch in batches:
        assert [completion.text for completion in llm.generate(batch, PARAMS)] == [text] * 2


@pytest.mark.parametrize("prompt", [{"prompt": "hi"}, 7, None, [], [1, "a"], [{"role": "user", "content": "a"}, 3]])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    llm = make()
    with pytest.raises(InvalidInput):
        llm.generate(prompt, PARAMS)
    assert not llm.engine.busy


def test_several_prompts_may_bring_their_own_parameters() -> None:
    llm = make()
    lengths = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 5)]
    assert [c.tokens for c in llm.generate(["abc", "def"], lengths)] == [3, 5]
    with pytest.raises(InvalidInput, match="2 prompts came with 1"):
        llm.generate(["abc", "def"], lengths[:1])


def test_streams_side_by_side_keep_their_own_text() -> None:
    llm = make()
    alone = [llm.generate(prompt, PARAMS).text for prompt in ("abc", "xyz")]
    first, second = llm.stream("abc", PARAMS), llm.stream("xyz", PARAMS)
    texts = ["", ""]
    for _ in range(40):
        for i, stream in enumerate((first, second)):
            event = next(stream, None)
            texts[i] += "" if event is None else event.text
    assert texts == alone
    assert [stream.completion.text for stream in (first, second)] == alone


def test_a_call_in_the_middle_of_a_stream_takes_nothing_from_it() -> None:
    llm = make()
    alone = llm.generate("abc", PARAMS).text
    pieces = []
    for event in llm.stream("abc", PARAMS):
        pieces.append(event.text)
        llm.generate("xyz", PARAMS)
    assert "".join(pieces) == alone


def test_a_stream_closed_early_frees_its_place() -> None:
    llm = make()
    stream = llm.stream("abc", PARAMS)
    next(stream)
    stream.close()
    assert not llm.engine.busy


def test_one_bad_prompt_takes_the_others_back_out_of_the_queue() -> None:
    llm = make()
    with pytest.raises(InvalidInput, match="empty"):
        llm.generate(["abc", ""], PARAMS)
    assert not llm.engine.busy


def test_names_are_checked_before_anything_is_loaded() -> None:
    for wrong in ({"drafter": "nope"}, {"speculative_config": {"verifier": "nope"}}):
        with pytest.raises(UnknownName, match="nope"):
            LLM.load("there-is-no-such-model", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="EngineConfig"):
        LLM.load("smollm2", config=EngineConfig(), dtype="bfloat16")


def test_single_options_win_over_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model that is named is used, whatever drafter the configuration names; a drafter that is named wins."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    path = str(write_tiny(tmp_path / "m.gguf", "llama", layers=1))
    lookup = {"drafter": "ngram", "controller": "fixed", "budget": 4}
    drafted = LLM.load(path, draft_model=path, speculative_config=lookup, drafter=None)
    assert drafted.engine.default_drafter == "draft_model"
    done = drafted.generate([3, 4, 5], max_tokens=10, ignore_eos=True)
    assert done.rounds == 2  # a model that drafts for itself is always right
    plain = LLM.load(path, draft_model=path, speculative_config=lookup, drafter="none")
    assert plain.engine.default_drafter == "none"
    assert LLM.load(path, speculative_config=lookup).engine.default_drafter == "ngram"
    assert plain.generate([3, 4, 5], max_tokens=10, ignore_eos=True).token_ids == done.token_ids
    asked = plain.generate([3, 4, 5], max_tokens=10, ignore_eos=True, drafter="draft_model", budget=4)
    assert asked.rounds == 2  # the model was loaded, so a request may ask for it
    assert asked.token_ids == done.token_ids
    with pytest.raises(ModelNotFound):
        LLM.load(path, draft_model=str(tmp_path / "none.gguf"), drafter="ngram")
