"""Answers of the real default model under JSON schemas: all end by themselves and validate, drafted as plain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from forerun import LLM, Completion
from tests.structure.answers import ANSWERS

Answers = Sequence[tuple[str, Any, str]]
MOST = 512  # tokens: more than any of these schemas has room for
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


@pytest.fixture(scope="module")
def llm(smollm2_path: str) -> LLM:
    return LLM(smollm2_path, max_batch=11, max_length=1024)


def write(llm: LLM, asked: Answers, drafter: str | None, heat: Any) -> list[Completion]:
    chats = [[{"role": "user", "content": f"{prompt} Answer in JSON."}] for *_, prompt in asked]
    each = [{"json_schema": schema, "max_tokens": MOST, "seed": i, **heat} for i, (_, schema, _) in enumerate(asked)]
    return llm.chat(chats, each, drafter=drafter)


def check(llm: LLM, asked: Answers, heat: Any) -> None:
    plain, drafted = (write(llm, asked, drafter, heat) for drafter in ("none", None))
    for (name, schema, prompt), done, same in zip(asked, plain, drafted, strict=True):
        assert (done.finish_reason, done.error) == ("stop", None), (name, prompt, done.text)
        jsonschema.validate(json.loads(done.text), schema, format_checker=jsonschema.FormatChecker())
        assert done.token_ids == same.token_ids, (name, prompt)
    assert sum(done.accepted for done in drafted) > 0, "negative control: drafts were accepted"


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("heat", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_one_answer_under_each_schema(heat: Any, llm: LLM) -> None:
    check(llm, ANSWERS[::6], heat)


@pytest.mark.long
@pytest.mark.model
@pytest.mark.parametrize("heat", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_all_66_answers(heat: Any, llm: LLM) -> None:
    assert len(ANSWERS) == 66
    check(llm, ANSWERS, heat)
