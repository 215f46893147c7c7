"""The command line in this process, and a model so small that loading it costs nothing."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from forerun.api.llm import LLM
from forerun.build.engine import make_engine
from forerun.cli import loading
from forerun.cli.app import main
from forerun.cli.flags import Settings
from forerun.testing import TableLM

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,\n[]"
END = len(ALPHABET)  # one more id, which ends a text


class Letters:
    """A tokenizer whose tokens are letters; a conversation is its turns, one a line."""

    has_chat_template = True
    eos_ids = frozenset({END})

    def encode(self, text: str) -> list[int]:
        return [ALPHABET.index(letter) for letter in text if letter in ALPHABET]

    def decode(self, ids: Sequence[int], /) -> str:
        return "".join(ALPHABET[i] for i in ids if i != END)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode("".join(turn["content"] + "\n" for turn in messages))


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def plain(text: str) -> str:
    """Text without the colours that help and usage errors have where the environment forces them."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def tiny_llm(settings: Settings, context: int = 1000, target: type[TableLM] = TableLM) -> LLM:
    """A model of letters under the settings given; it goes round in circles, brackets and all."""
    engine = make_engine(
        target(END + 1, order=1, seed=18, max_length=context),
        frozenset(),
        replace(settings.speculative, controller="fixed"),
        settings.engine,
        Letters(),
    )
    return LLM(engine, Letters(), "letters")  # type: ignore[arg-type]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands load the model of letters."""
    monkeypatch.setattr(loading, "load_llm", tiny_llm)


Prompts = list[list[dict[str, str]]]


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> Prompts:
    """The conversations that reached the model, in order."""
    seen: Prompts = []
    stream = LLM.stream

    def spy(self: LLM, prompt: Any, *rest: Any, **more: Any) -> Iterator[Any]:
        seen.append([dict(turn) for turn in prompt])
        return stream(self, prompt, *rest, **more)

    monkeypatch.setattr(LLM, "stream", spy)
    return seen


@pytest.fixture
def forerun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """forerun("generate", "hi", typed=...) runs the command line."""

    def run(*arguments: str, typed: str | bytes = "") -> Ran:
        data = typed.encode() if isinstance(typed, str) else typed
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setattr(sys, "argv", ["forerun", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Ran(int(ended.value.code or 0), captured.out, captured.err)

    return run
