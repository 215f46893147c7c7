"""The real `openai` client against the server: whole answers, streams, several choices, logprobs, errors."""

from __future__ import annotations

import asyncio
import json

import pytest

openai = pytest.importorskip("openai")

from forerun import SamplingParams  # noqa: E402
from tests.server.conftest import Running  # noqa: E402

ASKED = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="session")
def client(served: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_a_chat_is_the_text_that_the_library_writes(client: openai.OpenAI, served: Running) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=ASKED, max_tokens=24, temperature=0)
    wanted = served.llm.chat(ASKED, SamplingParams(max_tokens=24))
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason
    assert answer.usage.completion_tokens == wanted.tokens
    assert answer.usage.prompt_tokens == wanted.prompt_tokens
    figures = answer.model_extra["metrics"]["speculative_decoding"]
    assert figures["num_spec_steps"] >= 1
    assert figures["exact"] is True


def test_a_stream_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    options = {"model": "smollm2", "messages": ASKED, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 4


def test_completions_of_several_prompts_and_choices(client: openai.OpenAI, served: Running) -> None:
    prompts = ["Once upon a time", "The capital of France is"]
    answer = client.completions.create(model="alias", prompt=prompts, n=2, max_tokens=8, temperature=0.9, seed=11)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    again = client.completions.create(model="alias", prompt=prompts[1], max_tokens=8, temperature=0.9, seed=11)
    assert answer.choices[2].text == again.choices[0].text
    assert answer.choices[2].text != answer.choices[3].text, "each choice has a seed of its own"


@pytest.mark.parametrize("speculative", ["off", {"drafter": "ngram", "budget": 4}, {"drafter": "eagle3", "budget": 3}])
def test_a_seeded_text_does_not_depend_on_how_it_was_drafted(client: openai.OpenAI, speculative: object) -> None:
    options = {"model": "smollm2", "messages": ASKED, "max_tokens": 20, "temperature": 0.8, "seed": 5}
    one = client.chat.completions.create(**options)
    other = client.chat.completions.create(**options, extra_body={"speculative": speculative})
    assert one.choices[0].message.content == other.choices[0].message.content


def test_logprobs_have_the_apis_shape(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=ASKED, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 6
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token, "greedy: the likeliest was taken"
        assert entry.logprob <= 0
        assert bytes(entry.bytes).decode() == entry.token
    older = client.completions.create(model="smollm2", prompt="One, two,", max_tokens=3, temperature=0, logprobs=2)
    assert len(older.choices[0].logprobs.tokens) == 3
    assert older.choices[0].logprobs.text_offset[0] == 0


def test_bytes_of_tokens_that_are_part_of_a_character(client: openai.OpenAI, served: Running) -> None:
    """Together they are the text's, as the API says; the text of such a token alone is U+FFFD."""
    tokenizer = served.llm.tokenizer
    for text in ("Grüße 👩‍👩‍👧 日本語", "plain �"):
        ids = tokenizer.encode(text, add_special=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    said = [{"role": "user", "content": "Write an emoji: 😀😀😀😀"}]
    emoji = {str(token): 30.0 for token in tokenizer.encode("😀", add_special=False)}
    answer = client.chat.completions.create(
        model="smollm2", messages=said, max_tokens=12, temperature=0, logprobs=True, logit_bias=emoji
    )
    entries = answer.choices[0].logprobs.content
    assert any(entry.token == "�" for entry in entries), "characters are split"
    content = answer.choices[0].message.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == content


def test_stop_bias_and_limits_reach_the_engine(client: openai.OpenAI, served: Running) -> None:
    options = {"model": "smollm2", "messages": ASKED, "max_tokens": 40, "temperature": 0}
    text = client.chat.completions.create(**options).choices[0].message.content
    cut = client.chat.completions.create(**options, stop=[text[10:14]])
    assert cut.choices[0].message.content == text[: text.index(text[10:14])]
    assert cut.choices[0].finish_reason == "stop"
    first = served.llm.tokenizer.encode("Hello", add_special=False)[0]
    biased = client.chat.completions.create(**options | {"max_tokens": 1}, logit_bias={str(first): 100.0})
    assert biased.choices[0].message.content == "Hello"


def test_json_that_was_asked_for_is_json(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"], "additionalProperties": False,
    }  # fmt: skip
    asked = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    texts = []
    for speculative in ("off", {"drafter": "ngram"}):
        answer = client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "A person, as JSON."}], max_tokens=60,
            temperature=0.7, seed=3, response_format=asked, extra_body={"speculative": speculative},
        )  # fmt: skip
        texts.append(answer.choices[0].message.content)
    assert texts[0] == texts[1], "the mask is part of the law, drafted or not"
    found = json.loads(texts[0])
    assert set(found) == {"name", "age"}
    assert isinstance(found["age"], int)


@pytest.mark.slow
def test_many_at_once_are_each_their_own(served: Running) -> None:
    """More than the batch takes, some of them left early: every text is the one written alone."""
    prompts = [f"Write about the number {i}." for i in range(10)]
    wanted = [served.llm.chat(prompt, SamplingParams(max_tokens=16)).text for prompt in prompts]

    async def ask(client: openai.AsyncOpenAI, prompt: str, leaves: bool) -> str | None:
        stream = await client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": prompt}], max_tokens=16, temperature=0, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if leaves:
                await stream.close()
                return None
        return text

    async def all_of_them() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt, i % 4 == 3) for i, prompt in enumerate(prompts)))

    found = asyncio.run(all_of_them())
    for i, text in enumerate(found):
        assert text is None if i % 4 == 3 else text == wanted[i]


def test_what_is_wrong_is_said_in_the_apis_shape(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="gpt-9", messages=ASKED)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="smollm2", messages=ASKED, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="did you mean"):
        client.chat.completions.create(model="smollm2", messages=ASKED, extra_body={"temprature": 1})
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "so " * 3000}])
    assert caught.value.code == "context_length_exceeded"
