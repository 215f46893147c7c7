"""What begins with a slash in a chat, and how lines become messages."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.api.llm import LLM
from forerun.cli import loading
from forerun.cli.chat import as_command, is_open, join_lines, read_messages
from forerun.cli.flags import Settings, in_chat
from forerun.cli.show import Written
from forerun.core.types import Event
from tests.cli.conftest import Prompts, Run, tiny_llm

pytestmark = pytest.mark.usefixtures("tiny")
FLAGS = ("chat", "--max-tokens", "6", "--drafter", "none")


def roles(prompt: list[dict[str, str]]) -> str:
    return "".join(turn["role"][0] for turn in prompt)


@pytest.mark.parametrize("typed", ["/wat", "/wat now", "/quit", "/", "/?", "/Help", "/reset-all"])
def test_an_unknown_command_is_said_and_never_sent(forerun: Run, prompts: Prompts, typed: str) -> None:
    ran = forerun(*FLAGS, typed=f"{typed}\nhi\n")
    assert [prompt[-1]["content"] for prompt in prompts] == ["hi"]
    assert f"unknown command '{typed.split()[0]}'; known: /help /system " in ran.err


@pytest.mark.parametrize("typed", ["/usr/bin is a folder", "// a comment", "/* one */", " /wat", "a /wat", "1/2"])
def test_what_is_no_command_is_sent(forerun: Run, prompts: Prompts, typed: str) -> None:
    ran = forerun(*FLAGS, typed=f"{typed}\n")
    assert [prompt[-1]["content"] for prompt in prompts] == [typed.strip()]
    assert "unknown command" not in ran.err
    assert as_command(typed) is None


def test_help_names_every_command(forerun: Run, prompts: Prompts) -> None:
    said = forerun(*FLAGS, typed="/help\n").err
    for name in ["help", "system", "save", "load", "reset", "undo", "drafter", "temperature", "stats", "exit"]:
        assert f"\n/{name} " in f"\n{said}"
    assert prompts == []


def test_statistics_count_prompts_and_texts_apart(forerun: Run) -> None:
    ran = forerun(*FLAGS, typed="/stats\nhi\nyou\n/stats\n")
    assert ran.err.startswith("nothing was answered yet\n")
    assert "answers 2 · prompts 17 tokens, " in ran.err  # hi, and hi with its answer and you: a line each
    assert " · text 12 tokens, " in ran.err
    assert " · 1.00 tokens per round · context 21 of 1000\n" in ran.err


def test_undo_takes_back_the_last_exchange(forerun: Run, prompts: Prompts) -> None:
    ran = forerun(*FLAGS, typed="/undo\none\ntwo\n/undo\nthree\n/undo\n/undo\nfour\n")
    assert [[turn["content"] for turn in prompt][0::2] for prompt in prompts] == [
        ["one"],
        ["one", "two"],
        ["one", "three"],
        ["four"],
    ]
    assert ran.err.startswith("there is nothing to undo\n")
    assert "the last exchange is taken back: 1 exchange\n" in ran.err
    assert "the last exchange is taken back: 0 exchanges\n" in ran.err


def test_the_system_message_can_be_set_shown_and_removed(forerun: Run, prompts: Prompts) -> None:
    typed = '/system\na\n/system be brief\n/system\nb\n/reset\nc\n/system none\nd\n"""/system one\ntwo"""\n'
    ran = forerun(*FLAGS, typed=typed)
    assert [roles(prompt) for prompt in prompts] == ["u", "suau", "su", "uau"]
    assert prompts[1][0]["content"] == prompts[2][0]["content"] == "be brief"
    assert ran.err.count("system message: be brief\n") == 2
    assert ran.err.count("there is no system message\n") == 2
    assert "system message: one two\n" in ran.err.replace("one\ntwo", "one two")


def test_a_conversation_is_saved_and_loaded(forerun: Run, prompts: Prompts, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    saved = forerun(*FLAGS, "--system", "be brief", typed=f"one\n/save {file}\n")
    assert f"saved to {file}: 1 exchange\n" in saved.err
    document = json.loads(file.read_text())
    assert document["messages"][0] == {"role": "user", "content": "one"}
    loaded = forerun(*FLAGS, typed=f"lost\n/load {file}\ntwo\n/save {file}\n")
    assert f"loaded {file}: 1 exchange\n" in loaded.err
    assert [roles(prompt) for prompt in prompts] == ["su", "u", "suau"]
    assert prompts[2][:3] == [{"role": "system", "content": "be brief"}, *document["messages"]]
    assert len(json.loads(file.read_text())["messages"]) == 4


def test_messages_of_other_programs_can_be_loaded(forerun: Run, prompts: Prompts, tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "never answered")]
    file.write_text(json.dumps([{"role": role, "content": content} for role, content in turns]))
    forerun(*FLAGS, typed=f"/load {file}\nc\n")
    assert [turn["content"] for turn in prompts[0]] == ["s", "a", "b", "c"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read"),
        ("no json", "is not JSON"),
        ("[]x", "is not JSON"),
        ('{"a": 1}', "holds no messages"),
        ('"text"', "holds no messages"),
        ('[{"role": "tool", "content": "x"}]', "holds no messages"),
        ('[{"role": "user", "content": 5}]', "holds no messages"),
        ('{"messages": [], "system": 5}', "has a system message that is not"),
        ('[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]', "that is not in front"),
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(
    forerun: Run, prompts: Prompts, tmp_path: Path, content: str | None, words: str
) -> None:
    file = tmp_path / "some.json"
    if content is not None:
        file.write_text(content)
    ran = forerun(*FLAGS, typed=f"one\n/load {file}\ntwo\n/load\n")
    line = next(line for line in ran.err.splitlines() if str(file) in line)
    assert words in line
    assert "/load needs a file" in ran.err
    assert [roles(prompt) for prompt in prompts] == ["u", "uau"]


def test_a_file_of_something_else_is_not_written_over(forerun: Run, tmp_path: Path) -> None:
    file = tmp_path / "thesis.txt"
    file.write_text("years of work")
    ran = forerun(*FLAGS, typed=f"/save {file}\n/save {tmp_path}/no/such/folder/x\n/save {tmp_path}\n")
    assert file.read_text() == "years of work"
    assert "is no saved conversation; choose another name" in ran.err
    assert "cannot write" in ran.err
    assert ran.err.count("choose another name\n") == 3


@pytest.mark.parametrize("command", ["/save", "/load"])
def test_a_device_is_not_read_to_its_end(forerun: Run, tmp_path: Path, command: str) -> None:
    """/dev/zero and /dev/full have none."""
    os.mkfifo(tmp_path / "endless")
    ran = forerun(*FLAGS, typed=f"{command} {tmp_path / 'endless'}\n")
    assert f"'{tmp_path / 'endless'}'" in ran.err
    assert "no saved conversation" in ran.err or "is no file" in ran.err


def test_errors_speak_of_commands_and_of_the_flags_to_start_with(forerun: Run) -> None:
    said = forerun(*FLAGS, typed="/drafter draft_model\n/temperature -1\n/temperature hot\n").err.splitlines()
    assert said == [
        "the drafter 'draft_model' needs a second checkpoint; start the chat with --draft-model NAME",
        "/temperature -1.0 is out of range: 0 (greedy), or 0.0001 to 10000",
        "'hot' is no temperature; write /temperature 0.7",
    ]


@pytest.mark.parametrize(
    ("library", "shown"),
    [
        ("use drafter='ngram', or give draft_model=D", "use /drafter ngram, or start the chat with --draft-model D"),
        ("no room; use a larger max_length=N", "no room; use a larger --max-length N"),
    ],
)  # fmt: skip
def test_messages_of_the_library_in_a_chat(library: str, shown: str) -> None:
    assert in_chat(library) == shown


def test_the_temperature_can_be_shown_and_changed(forerun: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[float]()

    def load(settings: Settings) -> LLM:
        llm = tiny_llm(settings)
        stream = llm.stream

        def spy(prompt: Any, params: Any, **more: Any) -> Any:
            seen.append(params.temperature)
            return stream(prompt, params, **more)

        monkeypatch.setattr(llm, "stream", spy)
        return llm

    monkeypatch.setattr(loading, "load_llm", load)
    ran = forerun(*FLAGS, typed="/temperature\na\n/temperature 0.7\nb\n/temperature -1\nc\n/temperature 0\nd\n")
    assert seen == [0.0, 0.7, 0.7, 0.0]
    said = [line for line in ran.err.splitlines() if line.startswith("temperature")]
    assert said == ["temperature 0, which is greedy", "temperature 0.7", "temperature 0, which is greedy"]


def test_the_drafter_can_be_changed(forerun: Run) -> None:
    typed = "/drafter\na\n/drafter ngram\nb\n/drafter ngran\n/drafter auto\nc\n"
    said = forerun(*FLAGS, typed=typed).err
    assert "drafter none; there are auto, " in said
    assert "\nunknown drafter 'ngran'; did you mean 'ngram'?" in said
    lines = [line for line in said.splitlines() if line.startswith("prompt ")]
    assert ["drafter ngram" in line for line in lines] == [False, True, False]


def lines_of(*lines: str) -> Iterator[str]:
    yield from lines


@pytest.mark.parametrize(
    ("lines", "message", "left"),
    [
        (["one", "two"], "one", ["two"]),
        (["one\\", "two", "three"], "one\ntwo", ["three"]),
        (["one\\"], "one\n", []),
        (['"""one', "two\\", 'three"""', "four"], "one\ntwo\\\nthree", ["four"]),
        (['"""', "", "one", "", '"""', "two"], "one", ["two"]),
        (['"""one"""', "two"], "one", ["two"]),
        (['"""', "one"], "one", []),
        (['"quoted"', "two"], '"quoted"', ["two"]),
        (['say """this', "two"], 'say """this', ["two"]),
    ],
)
def test_lines_become_messages(lines: list[str], message: str, left: list[str]) -> None:
    source = lines_of(*lines)

    def line(prompt: str) -> str:
        try:
            return next(source)
        except StopIteration:
            raise EOFError from None

    assert join_lines(line) == message
    assert list(source) == left


def test_a_closed_input_holds_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """`forerun chat <&-`: Python then has no stdin at all."""
    monkeypatch.setattr(sys, "stdin", None)
    assert list(read_messages(print)) == []


def test_three_quotes_alone_are_open() -> None:
    assert [is_open(text) for text in ('"""', '""""', '"""""', '""""""', "a", "a\\", "a\\ ")] == [
        True, True, True, False, False, True, False,
    ]  # fmt: skip


def test_prompt_and_text_are_timed_apart() -> None:
    written = Written(prompt_tokens=10)
    assert (written.prompt_rate, written.text_rate) == (None, None)
    written.take(Event(0, (1, 2, 3), accepted=2, text="abc"), seconds=2.0)
    assert (written.prompt_rate, written.text_rate) == (5.0, None)
    written.take(Event(0, (4,), accepted=0, text="d"), seconds=2.5)
    written.take(Event(0, (5, 6, 7), accepted=2, text="efg"), seconds=3.0)
    assert (written.prompt_rate, written.text_rate) == (5.0, 4.0)  # four tokens in the second after the first
    assert (written.text, written.tokens, written.rounds, written.accepted) == ("abcdefg", 7, 3, 4)
