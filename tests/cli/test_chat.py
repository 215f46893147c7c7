"""`forerun chat` over piped input: turns, a full context, an interrupt, and what is asked for beyond the context."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.api.llm import LLM
from forerun.cli import loading
from forerun.cli.flags import Settings
from tests.cli.conftest import Prompts, Run, tiny_llm


@pytest.mark.usefixtures("tiny")
def test_turns_accumulate_until_reset(forerun: Run, prompts: Prompts) -> None:
    typed = "hello\n\nand then\n/reset\nanew\n/exit\nnever read\n"
    ran = forerun("chat", "--max-tokens", "6", "--system", "be brief", typed=typed)
    assert ran.code == 0
    roles = [[turn["role"] for turn in prompt] for prompt in prompts]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert prompts[1][2]["content"] in ran.out
    assert prompts[2][1]["content"] == "anew"


def test_a_full_context_drops_the_oldest_exchanges(
    forerun: Run, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_llm", lambda settings: tiny_llm(settings, context=55))
    typed = "first message here\nsecond message here\n" + "x" * 80 + "\nthird\n"
    ran = forerun("chat", "--max-tokens", "10", typed=typed)
    assert ran.code == 0
    assert "the context of 55 tokens is full: the oldest exchange was dropped" in ran.err
    assert ran.err.count("the message takes 81 tokens and the context has 55: send a shorter one") == 1
    assert prompts[1][0]["content"] == "second message here"
    assert [turn["content"] for turn in prompts[-1]][0::2] == ["second message here", "third"]


@pytest.mark.parametrize("shown", [0, 2])
def test_an_interrupt_ends_the_answer_only(
    forerun: Run, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, shown: int
) -> None:
    def load(settings: Settings) -> LLM:
        llm = tiny_llm(settings)
        step, rounds = llm.engine.step, iter(range(1000))

        def interrupted_once() -> Any:
            if next(rounds) == shown:
                raise KeyboardInterrupt
            return step()

        monkeypatch.setattr(llm.engine, "step", interrupted_once)
        return llm

    monkeypatch.setattr(loading, "load_llm", load)
    ran = forerun("chat", "--max-tokens", "6", "--drafter", "none", typed="one\ntwo\n")
    assert ran.code == 0
    assert "stopped · prompt 4 tokens" in ran.err
    assert len(prompts[1]) == (3 if shown else 1)
    assert len(prompts[1][1:2] and prompts[1][1]["content"]) == shown


@pytest.mark.usefixtures("tiny")
def test_more_than_the_context_is_said_once(forerun: Run) -> None:
    words = "--max-tokens 5000 is more than fits: the context of 100 tokens"
    flags = ("--max-length", "100", "--drafter", "none")
    assert forerun("chat", "--max-tokens", "5000", *flags, typed="a\nb\n").err.count(words) == 1
    assert "more than fits" not in forerun("chat", "--max-tokens", "10", *flags, typed="a\nb\n").err
