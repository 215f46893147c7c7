"""`forerun generate`: where prompts come from, what is shown, and what the JSON document holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.api.llm import LLM
from forerun.cli import loading
from forerun.cli.flags import Settings
from forerun.cli.show import Shades
from forerun.core.types import Event
from tests.cli.conftest import Letters, Run, plain, tiny_llm

pytestmark = pytest.mark.usefixtures("tiny")

PROMPT = "the cat sat on the cat"


def expected() -> str:
    """What the library itself writes for the prompt, as the only turn of a chat."""
    settings = Settings.of({"max_tokens": 40})
    return tiny_llm(settings).chat(PROMPT, settings.sampling).text


def test_into_a_pipe_goes_the_text_and_nothing_else(forerun: Run) -> None:
    ran = forerun("generate", PROMPT, "--max-tokens", "40")
    assert ran.code == 0
    assert ran.out.removesuffix("\n") == expected().removesuffix("\n")
    assert "tokens per round · drafter ngram · verifier exact · exact" in ran.err
    assert "\x1b" not in ran.out + ran.err


def test_a_terminal_sees_drafted_tokens_in_green(forerun: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    ran = forerun("generate", PROMPT, "--max-tokens", "40")
    assert "\x1b[32m" in ran.out
    assert "= drafted" in ran.out
    assert plain(ran.out).startswith(expected())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in forerun("generate", PROMPT, "--max-tokens", "40").out


def test_a_lossy_verifier_is_called_lossy(forerun: Run) -> None:
    ran = forerun("generate", PROMPT, "--verifier", "typical", "--temperature", "1", "--max-tokens", "4")
    assert "NOT EXACT (lossy)" in ran.err
    lossy = forerun("generate", PROMPT, "--verifier", "typical", "--max-tokens", "4", "--json", "-")
    assert json.loads(lossy.out)["exact"] is False


def test_a_trace_has_every_round(forerun: Run, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    ran = forerun("generate", PROMPT, "--max-tokens", "40", "--trace", str(file))
    assert ran.out.removesuffix("\n") == expected().removesuffix("\n")
    rounds = [one for one in json.loads(file.read_text()) if one["name"].startswith("round ")]
    assert sum(one["args"]["tokens"] for one in rounds) == 40
    ran = forerun("generate", PROMPT, "--trace", str(tmp_path))
    assert ran.code == 2
    assert f"--trace '{tmp_path}' is a folder" in ran.err


def test_json_is_one_document(forerun: Run) -> None:
    ran = forerun("generate", PROMPT, "--max-tokens", "40", "--seed", "5", "--json", "-")
    document = json.loads(ran.out)
    assert ran.err == ""
    assert document["text"] == expected()
    assert document["tokens"] == len(document["token_ids"]) == 40
    assert document["rounds"] < 40
    assert document["tokens_per_round"] == pytest.approx(40 / document["rounds"])
    assert document["accepted_per_position"]
    facts = {"model": "smollm2", "drafter": "ngram", "verifier": "coupled", "exact": True, "seed": 5}
    assert {key: document[key] for key in facts} == facts
    assert document["finish_reason"] == "length"
    assert document["prompt_tokens"] == len(PROMPT) + 1
    assert document["tokens_per_second"] > 0


def test_json_times_prompt_and_text_apart(forerun: Run) -> None:
    document = json.loads(forerun("generate", PROMPT, "--max-tokens", "40", "--budget", "2", "--json", "-").out)
    assert document["prompt_tokens_per_second"] == pytest.approx(document["prompt_tokens"] / document["prompt_seconds"])
    first = round(40 - document["text_tokens_per_second"] * document["text_seconds"])
    assert 1 <= first <= 3  # what the first round wrote is the prompt's time


def test_more_than_the_context_is_said(forerun: Run) -> None:
    flags = ("--max-length", "100", "--drafter", "none")
    ran = forerun("generate", "a" * 30, "--max-tokens", "5000", *flags)
    expected = "the context of 100 tokens has room for 69 behind a prompt of 31 tokens"
    assert f"--max-tokens 5000 is more than fits: {expected}\n" in ran.err
    assert "text 69 tokens" in ran.err
    assert "more than fits" not in forerun("generate", "a" * 30, "--max-tokens", "69", *flags).err
    document = forerun("generate", "a" * 30, "--max-tokens", "5000", "--json", "-", *flags)
    assert document.err == ""
    assert json.loads(document.out)["max_tokens"] == 69


@pytest.mark.parametrize("rounds", [0, 3])
def test_an_interrupt_ends_the_text_with_its_statistics(
    forerun: Run, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    def load(settings: Settings) -> LLM:
        llm = tiny_llm(settings)
        step, count = llm.engine.step, iter(range(1000))

        def interrupted() -> list[Event]:
            if next(count) == rounds:
                raise KeyboardInterrupt
            return step()

        monkeypatch.setattr(llm.engine, "step", interrupted)
        return llm

    monkeypatch.setattr(loading, "load_llm", load)
    ran = forerun("generate", PROMPT, "--max-tokens", "40", "--drafter", "none")
    assert ran.code == 130
    assert ran.out == (expected()[:rounds] + "\n" if rounds else "")
    said = f"stopped · prompt {len(PROMPT) + 1} tokens"
    assert ran.err.startswith(f"{said}, " if rounds else f"{said}\n")
    assert ("text 3 tokens, " in ran.err) is bool(rounds)
    document = forerun("generate", PROMPT, "--max-tokens", "40", "--drafter", "none", "--json", "-")
    assert (document.code, document.out, document.err) == (130, "", "")


def test_budget_and_drafter_change_the_rounds_not_the_text(forerun: Run) -> None:
    runs = [
        json.loads(forerun("generate", PROMPT, "--max-tokens", "40", "--json", "-", *flags).out)
        for flags in ([], ["--budget", "2"], ["--budget", "0"], ["--drafter", "none"])
    ]
    assert len({run["text"] for run in runs}) == 1
    assert [run["rounds"] for run in runs[2:]] == [40, 40]
    assert runs[0]["rounds"] < runs[1]["rounds"] < 40
    assert len(runs[1]["accepted_per_position"]) == 2


def test_a_prompt_may_come_from_anywhere(forerun: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    flags = ("--max-tokens", "40")
    ways = [
        forerun("generate", "--file", str(file), *flags),
        forerun("generate", f"@{file}", *flags),
        forerun("generate", "-", *flags, typed=PROMPT + "\n"),
        forerun("generate", *flags, typed=PROMPT),
    ]
    assert {ran.out for ran in ways} == {forerun("generate", PROMPT, *flags).out}


def test_raw_and_system_reach_the_model(forerun: Run) -> None:
    def prompt_tokens(*flags: str) -> int:
        document = json.loads(forerun("generate", "abc", *flags, "--max-tokens", "1", "--json", "-").out)
        return int(document["prompt_tokens"])

    assert prompt_tokens("--raw") == 3
    assert prompt_tokens() == 4
    assert prompt_tokens("--system", "be brief") == 4 + len("be brief\n")


def test_an_interrupt_exits_with_130(forerun: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(settings: Settings) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load_llm", interrupted)
    ran = forerun("generate", "hi")
    assert (ran.code, ran.out, ran.err) == (130, "", "")


class Bytes:
    """A tokenizer whose tokens are bytes, so that most of them are half a character."""

    def decode(self, ids: list[int], /) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_colours_follow_text_that_lags_its_tokens() -> None:
    shades, e_acute = Shades(Bytes()), "é".encode()
    first = Event(0, (ord("a"), e_acute[0]), accepted=1, text="a")
    # c is held back: a stop string?
    second = Event(0, (e_acute[1], ord("b"), ord("c")), accepted=2, text="éb")
    third = Event(0, (ord("d"),), accepted=1, text="cd!")  # more than the tokens say: still all shown
    pieces = [list(shades.split(event)) for event in (first, second, third)]
    assert pieces == [[("a", True)], [("é", True), ("b", True)], [("c", False), ("d", True), ("!", False)]]


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_pieces_always_add_up_to_the_text(accepted: int) -> None:
    shades = Shades(Letters())
    event = Event(0, (0, 1, 2), accepted, "abc")
    assert list(shades.split(event)) == [(letter, i < accepted) for i, letter in enumerate("abc")]
