"""Structured output in LLM and AsyncLLM: the same names as the server's, and failures that stay with their text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from forerun import LLM, AsyncLLM, Completion, SamplingParams
from forerun.core.errors import GrammarFailed, InvalidInput
from forerun.core.params import for_schema
from tests.structure.test_grammar import FAILS_LATER

pytestmark = [pytest.mark.model, pytest.mark.slow]
PERSON: dict[str, Any] = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
}  # fmt: skip
ASKED = "Tom is 7. Answer in JSON."
DRAFTERS = [
    "none", "ngram", "suffix", "recycling", "lookahead", "layer_skip", "eagle3", "medusa", "ngram+eagle3",
    "draft_model", "ngram+draft_model",
]  # fmt: skip


@pytest.fixture(scope="module")
def llm(smollm2_path: str) -> LLM:
    return loaded(smollm2_path, drafter="ngram")


def loaded(path: str, **drafting: Any) -> LLM:
    """It drafts in every round."""
    fixed = {"controller": "fixed", "budget": 6, **drafting}
    return LLM(path, max_batch=4, max_length=512, speculative_config=fixed)


@pytest.fixture(scope="module")
def with_model(smollm2_path: str) -> LLM:
    """Its own model drafts, so that nearly everything is accepted."""
    return loaded(smollm2_path, drafter="draft_model", draft_model=smollm2_path)


def is_person(text: str) -> bool:
    found = json.loads(text)
    return list(found) == ["name", "age"] and isinstance(found["age"], int)


def test_all_ways_to_ask_give_the_same_text(llm: LLM) -> None:
    wanted = for_schema(PERSON)
    first = llm.chat(ASKED, json_schema=PERSON, max_tokens=60)
    assert first.finish_reason == "stop"
    assert is_person(first.text)
    assert llm.chat(ASKED, max_tokens=60).text != first.text, "negative control"
    params = SamplingParams(max_tokens=60, response_format=wanted)
    chat = [{"role": "user", "content": ASKED}]
    others = [
        llm.chat(ASKED, response_format=wanted, max_tokens=60),
        llm.chat(ASKED, response_format=wanted, max_tokens=60, logprobs=1),  # by whole masks
        llm.chat(ASKED, params),
        llm.chat(ASKED, {"json_schema": PERSON, "max_tokens": 60}),
        llm.generate(chat, params),
        llm.generate([chat], [params])[0],
    ]
    assert {each.text for each in others} == {first.text}
    assert "".join(event.text for event in llm.stream(chat, params)) == first.text

    async def awaited() -> list[str]:
        async with AsyncLLM(llm) as served:
            whole = await served.generate(chat, params)
            items = [item async for item in served.stream(chat, json_schema=PERSON, max_tokens=60)]
            return [whole.text, "".join(item.text for item in items)]

    assert asyncio.run(awaited()) == [first.text] * 2


def test_several_texts_of_one_prompt_are_each_held_to_it(llm: LLM) -> None:
    texts = llm.chat(ASKED, json_schema=PERSON, max_tokens=60, n=4, temperature=1.0, seed=5)
    assert all(is_person(each.text) for each in texts)
    assert len({each.text for each in texts}) > 1


def test_free_whitespace_is_there_for_whoever_asks(llm: LLM) -> None:
    free = llm.chat(
        "Write a JSON object with indentation.", json_schema=PERSON, max_tokens=80,
        structured_outputs={"disable_any_whitespace": False},
    )  # fmt: skip
    none = llm.chat(ASKED, json_schema=PERSON, structured_outputs={"disable_any_whitespace": True}, max_tokens=60)
    assert "\n" in free.text
    assert none.text == json.dumps(json.loads(none.text), separators=(",", ":"), ensure_ascii=False)


def test_a_schema_that_cannot_be_used_is_refused_at_once(llm: LLM) -> None:
    rounds = llm.engine.stats.rounds
    wrong = SamplingParams(response_format=for_schema({"$ref": "#"}))
    for ask in (llm.generate, llm.chat, lambda *args: [*llm.stream(*args)]):
        with pytest.raises(InvalidInput, match="the JSON schema cannot be used: no text matches"):
            ask("x", wrong)

    async def awaited() -> None:
        async with AsyncLLM(llm) as served:
            await served.generate("x", wrong)

    with pytest.raises(InvalidInput, match="the JSON schema cannot be used"):
        asyncio.run(awaited())
    assert llm.engine.stats.rounds == rounds
    assert not llm.engine.busy


PROMPTS = [ASKED, ASKED, "Count: one, two, three, one, two,", "Anna is 30. JSON, please."]
SCHEMAS = [PERSON, FAILS_LATER, None, FAILS_LATER["properties"]["kind"]]


def settings(heat: Any) -> list[dict[str, Any]]:
    return [{"json_schema": schema, "max_tokens": 40, "seed": 3, **heat} for schema in SCHEMAS]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[bool, list[Completion]]:
    """Each text by itself, not drafted; by whether it is sampled."""
    return {
        bool(heat): [llm.chat(prompt, own, drafter="none") for prompt, own in zip(PROMPTS, settings(heat), strict=True)]
        for heat in ({}, {"temperature": 1.0})
    }


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("heat", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_a_grammar_that_fails_ends_its_own_text_alone(
    drafter: str, heat: Any, llm: LLM, with_model: LLM, alone: dict[bool, list[Completion]]
) -> None:
    llm = with_model if "draft_model" in drafter else llm
    one, failed, free, other = done = llm.chat([[{"role": "user", "content": p}] for p in PROMPTS], settings(heat),
                                               drafter=drafter)  # fmt: skip
    assert [each.token_ids for each in done] == [each.token_ids for each in alone[bool(heat)]]
    assert [each.finish_reason for each in done] == ["stop", "error", free.finish_reason, "stop"]
    assert is_person(one.text)
    assert json.loads(other.text) in ("one", "two")
    assert failed.text.startswith('{"kind":')
    assert failed.error is not None
    assert failed.error.startswith("the answer cannot go on: ")
    assert one.error is free.error is other.error is None
    assert {each.drafter.removeprefix("forced+") for each in done} == {drafter}  # grammars draft what they force
    if drafter != "none":
        assert sum(each.drafted for each in done) > 0, "negative control: it drafts"
    assert not llm.engine.busy


def test_streams_tell_why(llm: LLM) -> None:
    stream = llm.stream(ASKED, json_schema=FAILS_LATER, max_tokens=40)
    *events, last = stream
    done = stream.completion
    assert (last.finished, type(last.error)) == ("error", GrammarFailed)
    assert (done.finish_reason, done.error) == ("error", str(last.error))
    assert "".join(event.text for event in [*events, last]) == done.text

    async def awaited() -> Any:
        async with AsyncLLM(llm) as served:
            return (await served.generate(ASKED, json_schema=FAILS_LATER, max_tokens=40)).error

    assert asyncio.run(awaited()) == done.error


def test_a_text_ends_by_its_limit_before_its_grammar_fails(llm: LLM) -> None:
    done = llm.generate(ASKED, json_schema=FAILS_LATER, max_tokens=3)
    assert (done.finish_reason, done.error) == ("length", None)
