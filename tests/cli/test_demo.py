"""`forerun demo`: two texts, plain and drafted; what it shows of them, and that it says where they differ."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from forerun.cli import generate
from forerun.cli.flags import Settings
from forerun.cli.generate import PROMPTS, Compared
from forerun.cli.show import Written, write_text
from forerun.core.params import SamplingParams
from forerun.models.load.catalog import known_models
from tests.cli.conftest import Run, tiny_llm

PRESENT = any(model.name == "smollm2" and model.path for model in known_models())


def test_both_texts_are_shown_and_compared(forerun: Run, tiny: None) -> None:
    ran = forerun("demo", "--max-tokens", "24")
    assert ran.code == 0
    summary = ran.out[ran.out.index("letters on cpu") :]
    assert "drafter ngram" in summary
    for about, why, _ in PROMPTS:
        assert f"{about}: {why}" in summary
    assert len(re.findall(r"plain +█+ \d+ tokens/s\n", summary)) == 2
    assert len(re.findall(r"drafted +█+ \d+ tokens/s, \d+\.\d\dx, texts equal\n", summary)) == 2
    assert [f"{about}, {how}" in ran.err for about, _, _ in PROMPTS for how in ("plain", "with drafting")] == [True] * 4


def test_a_text_that_differs_is_said_and_ends_with_an_error(
    forerun: Run, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny_llm(Settings.of({}))
    asked = [{"role": "user", "content": "a"}]
    one, other = (write_text(llm, asked, SamplingParams(max_tokens=length)) for length in (6, 7))
    assert Compared(one, one).equal
    assert not Compared(one, other).equal
    assert not Compared(one, replace(one, completion=None)).equal
    monkeypatch.setattr(generate, "_compare", lambda *given: Compared(one, other))
    ran = forerun("demo")
    assert ran.code == 1
    assert ran.out.count("TEXTS DIFFER") == 2


def test_nothing_is_divided_by_a_text_of_one_round() -> None:
    assert Compared(Written(1), Written(1)).gain == 1.0


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(not PRESENT, reason="the default model is absent; run: forerun models pull smollm2")
def test_the_default_model_repeats_its_prompt_in_the_edit_alone(forerun: Run) -> None:
    """Rounds are what it takes to gain; how many tokens a second they make is the machine's.

    Whether the head drafts the question, for up to two tokens a round, is the controller's choice by that time.
    """
    ran = forerun("demo")
    assert ran.code == 0
    edit, question = (float(rate) for rate in re.findall(r"tokens, (\d+\.\d+) per round", ran.err)[1::2])
    assert edit > 2.5 > question
    code = ran.out[: ran.out.index("```", 3)]
    changed, kept = code.count("must be non-negative"), code.count("must not be negative")
    # in float32 the third message is a tie, 0.01 nats apart: the machine's instructions decide it
    assert (changed >= 2, changed + kept) == (True, 3), "the edit that was asked for is made"
