"""What a person sees and types: `chat` and `generate` in a real terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forerun.api.llm import LLM
from forerun.cli import loading
from forerun.cli.flags import Settings
from forerun.core.params import SamplingParams
from forerun.core.types import Needs, Scores, Seq
from forerun.testing import TableLM
from tests.cli.conftest import Run, tiny_llm
from tests.cli.terminal import CTRL_C, CTRL_D, ENTER, UP, Terminal, paste

BEGINNING = tiny_llm(Settings.of({})).chat("abc", SamplingParams(max_tokens=4)).text  # whatever is asked
PROMPT = ">"  # nothing else that is shown has one
HINT = "Ctrl-C once more leaves"
EDITOR, LINES = "with prompt_toolkit", "without prompt_toolkit"


class SlowRounds(TableLM):
    """Rounds that take long enough for a person to press a key."""

    def score(self, *given: Any) -> Scores:
        time.sleep(0.03)
        return super().score(*given)


class SlowPrompt(TableLM):
    """A prompt that is read in two passes, each of which takes a while."""

    def prefill(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> Any:
        time.sleep(0.8)
        for seq in seqs:
            self._cached[seq.id] = seq.tokens[:20]
        time.sleep(0.8)
        return super().prefill(seqs, needs, rows)


def slow_rounds(settings: Settings) -> LLM:
    return tiny_llm(settings, target=SlowRounds)


def slow_prompt(settings: Settings) -> LLM:
    return tiny_llm(settings, target=SlowPrompt)


@pytest.fixture(params=[EDITOR, LINES])
def editor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Both ways to type a message; the second is what there is where prompt_toolkit is missing."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    if request.param == LINES:
        monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    else:
        pytest.importorskip("prompt_toolkit")
    return str(request.param)


@pytest.mark.usefixtures("editor")
def test_an_interrupt_stops_the_answer_and_keeps_the_conversation(tmp_path: Path) -> None:
    flags = ("chat", "--max-tokens", "900", "--drafter", "none")
    chat = Terminal(*flags, prompts=tmp_path / "prompts", load=slow_rounds)
    chat.wait_for(PROMPT)
    chat.type("one" + ENTER)
    chat.wait_for(BEGINNING)
    chat.type(CTRL_C)
    chat.wait_for("stopped · prompt 4 tokens, ")
    chat.wait_for("tokens per round")
    chat.wait_for(PROMPT)
    chat.type("/stats" + ENTER)
    chat.wait_for("answers 1 · prompts 4 tokens, ")
    chat.type("two" + ENTER)
    chat.wait_for(BEGINNING)
    chat.type(CTRL_C)
    chat.wait_for("stopped")
    chat.wait_for(PROMPT)
    chat.type(CTRL_D)
    assert chat.end() == 0
    first, second = chat.prompts
    assert [turn["role"] for turn in second] == ["user", "assistant", "user"]
    assert second[1]["content"]
    assert second[1]["content"].split("\n")[0] in chat.text
    assert len(second[1]["content"]) < 500
    assert (first[0]["content"], second[2]["content"]) == ("one", "two")


def interrupt(chat: Terminal) -> None:
    """Press Ctrl-C at an empty prompt; Python's input() overlooks one that comes before it listens."""
    for _ in range(5):
        time.sleep(0.3)
        chat.type(CTRL_C)
        if chat.shows(HINT, within=10.0):
            return
    raise AssertionError(f"nothing was said of Ctrl-C; the terminal shows {chat.text!r}")


@pytest.mark.usefixtures("editor")
def test_two_interrupts_at_an_empty_prompt_leave(tmp_path: Path) -> None:
    chat = Terminal("chat", "--max-tokens", "3", prompts=tmp_path / "prompts")
    chat.wait_for(PROMPT)
    interrupt(chat)
    chat.wait_for(PROMPT)
    chat.type("hi" + ENTER)  # between the two: the next one is the first again
    chat.wait_for("tokens per round")
    chat.wait_for(PROMPT)
    interrupt(chat)
    chat.wait_for(PROMPT)
    time.sleep(0.3)
    assert chat.end(presses=CTRL_C) == 0
    assert chat.messages == ["hi"]
    assert chat.text.count(HINT) == 2


@pytest.mark.usefixtures("editor")
@pytest.mark.parametrize("editor", [EDITOR], indirect=True)  # input() does not tell what was typed
def test_an_interrupt_drops_what_is_typed_and_stays(tmp_path: Path) -> None:
    chat = Terminal("chat", "--max-tokens", "3", prompts=tmp_path / "prompts")
    chat.wait_for(PROMPT)
    for _ in range(3):
        chat.type("never mind" + CTRL_C)
    chat.type("hi" + ENTER)
    chat.wait_for("tokens per round")
    chat.wait_for(PROMPT)
    chat.type("/exit" + ENTER)
    assert chat.end() == 0
    assert chat.messages == ["hi"]
    assert HINT not in chat.text


@pytest.mark.usefixtures("editor")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (paste("def f(x):\n    return \\\n        x\n"), "def f(x):\n    return \\\n        x"),
        ("one \\" + ENTER + "two\\" + ENTER + "three", "one \ntwo\nthree"),
        ('"""' + ENTER + "one\\" + ENTER + "/wat" + ENTER + '"""', "one\\\n/wat"),
        ('"""one' + ENTER + 'two"""', "one\ntwo"),
    ],
    ids=["paste", "backslash", "quotes", "quotes beside the text"],
)
def test_several_lines_are_one_message(keys: str, message: str, tmp_path: Path) -> None:
    chat = Terminal("chat", "--max-tokens", "3", prompts=tmp_path / "prompts")
    chat.wait_for(PROMPT)
    chat.type(keys)
    time.sleep(0.2)  # a person looks at what was pasted
    chat.type(ENTER)
    chat.wait_for("tokens per round")
    chat.wait_for(PROMPT)
    chat.type(CTRL_D)
    assert chat.end() == 0
    assert chat.messages == [message]


@pytest.mark.usefixtures("editor")
@pytest.mark.parametrize("editor", [EDITOR], indirect=True)
def test_history_survives_and_is_the_users_alone(tmp_path: Path) -> None:
    for keys in ("remember me", UP):
        chat = Terminal("chat", "--max-tokens", "3", prompts=tmp_path / "prompts")
        chat.wait_for(PROMPT)
        chat.type(keys)
        for _ in range(10):
            if chat.shows("remember me", within=3.0):
                break
            chat.type(UP)  # the editor reads its history while one types: it was too early
        chat.type(ENTER)
        chat.wait_for("tokens per round")
        chat.wait_for(PROMPT)
        chat.type(CTRL_D)
        assert chat.end() == 0
        assert chat.messages == ["remember me"]
    assert (tmp_path / "cache" / "chat-history").stat().st_mode & 0o777 == 0o600


def test_an_interrupt_ends_generate_with_a_newline_and_the_statistics(tmp_path: Path) -> None:
    flags = ("generate", "abc", "--max-tokens", "900", "--drafter", "none")
    run = Terminal(*flags, prompts=tmp_path / "prompts", load=slow_rounds)
    run.wait_for(BEGINNING)
    run.type(CTRL_C)
    assert run.end() == 130
    text, _, line = run.text.rstrip("\n").rpartition("\n")
    assert text
    assert line.startswith("stopped · prompt 4 tokens, ")
    assert " · text " in line
    assert "Traceback" not in run.text


def test_a_long_prompt_shows_progress_that_goes_away(tmp_path: Path) -> None:
    run = Terminal("generate", "a" * 40, "--max-tokens", "3", prompts=tmp_path / "p", load=slow_prompt)
    run.wait_for("reading the prompt: 0 of 40 tokens")
    run.wait_for("reading the prompt: 20 of 40 tokens")
    assert run.end() == 0
    before, erased, after = run.raw.rpartition("\r\x1b[K")
    assert "reading" in before
    assert erased
    assert "reading" not in after
    assert "text 3 tokens" in after


def test_colours_are_off_where_they_are_not_wanted(tmp_path: Path) -> None:
    command = Terminal("generate", "the cat sat on the cat", "--max-tokens", "40", prompts=tmp_path / "p")
    assert command.end() == 0
    assert "\x1b[32m" in command.raw  # the control: a terminal does get colours
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        plain = Terminal(
            "generate", "the cat sat on the cat", "--max-tokens", "40", prompts=tmp_path / "p", **{name: value}
        )
        assert plain.end() == 0
        assert "\x1b[3" not in plain.raw
        assert "\x1b[9" not in plain.raw


def test_into_a_pipe_goes_no_progress(forerun: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_llm", slow_prompt)
    ran = forerun("generate", "a" * 40, "--max-tokens", "3")
    assert ran.code == 0
    assert ran.err.count("\n") == 1
    assert "text 3 tokens" in ran.err
    assert "\x1b" not in ran.out + ran.err


def test_chat_in_a_terminal_without_colours(tmp_path: Path) -> None:
    chat = Terminal("chat", "--max-tokens", "40", prompts=tmp_path / "p", NO_COLOR="1", FORERUN_CACHE=str(tmp_path))
    chat.wait_for(PROMPT)
    chat.type("the cat sat on the cat" + ENTER)
    chat.wait_for("tokens per round")
    chat.wait_for(PROMPT)
    chat.type(CTRL_D)
    assert chat.end() == 0
    assert "\x1b[32m" not in chat.raw
    assert chat.messages == ["the cat sat on the cat"]


def test_answers_can_go_into_a_file_while_a_person_types(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    chat = Terminal("chat", "--max-tokens", "6", "--drafter", "none", prompts=tmp_path / "p", into=file)
    for message in ("one\\" + ENTER + "two", "three"):
        chat.wait_for(PROMPT)
        chat.type(message + ENTER)
    chat.wait_for(PROMPT)
    chat.type(CTRL_D)
    assert chat.end() == 0
    assert chat.messages == ["one\ntwo", "three"]
    assert [len(line) for line in file.read_text().splitlines()] == [6, 6]
    assert "\x1b" not in file.read_text()


def test_lines_of_an_answer_break_between_words(tmp_path: Path) -> None:
    flags = ("chat", "--max-tokens", "120", "--temperature", "1", "--seed", "3", "--drafter", "none")
    chat = Terminal(*flags, prompts=tmp_path / "p", columns=42, FORERUN_CACHE=str(tmp_path))
    for message in ("abc", "and then"):
        chat.wait_for(PROMPT)
        chat.type(message + ENTER)
        chat.wait_for("tokens per round")
    chat.wait_for(PROMPT)
    chat.type(CTRL_D)
    assert chat.end() == 0
    answer = chat.prompts[1][1]["content"]
    long = next(line for line in answer.split("\n") if len(line) > 42)
    place = long.rindex(" ", 0, 43) + 1
    assert long not in chat.text
    assert f"{long[:place]}\n{long[place:]}\n" in chat.text
