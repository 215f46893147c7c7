"""`prompt_logprobs` in vLLM's shape, and `echo` with `logprobs` in the OpenAI API's: both are the library's figures."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from forerun import LLM, SamplingParams
from tests.server.conftest import Running

PROMPT = "The early bird catches the worm, and the second mouse gets the cheese."


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json={"max_tokens": 4, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def expected(llm: LLM, prompt: Any, most: int) -> list[Any]:
    entries = llm.generate(prompt, SamplingParams(max_tokens=4, prompt_logprobs=most)).prompt_logprobs
    assert entries is not None
    known: list[Any] = [None]
    for one in filter(None, entries):
        ranked = {each.token: (each, rank) for rank, each in enumerate(one.top, start=1)}
        every = {one.token: (one, None), **ranked}.values()
        known.append({
            str(each.token): {"logprob": each.logprob, "rank": rank, "decoded_token": each.text} for each, rank in every
        })  # fmt: skip
    return known


def test_completions_and_chats_have_those_of_the_library(http: httpx.Client, llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    plain = post(http, "/v1/completions", prompt=PROMPT)["choices"][0]
    for most in (0, 2):
        asked = {"prompt": [ids, ids[:3]], "prompt_logprobs": most, "logprobs": 1}
        one, two = post(http, "/v1/completions", **asked)["choices"]
        assert one["prompt_logprobs"] == expected(llm, PROMPT, most)
        assert two["prompt_logprobs"] == one["prompt_logprobs"][:3]
        assert one["text"] == plain["text"]
        assert len(one["logprobs"]["tokens"]) == 4
    messages = [{"role": "user", "content": PROMPT}]
    whole = post(http, "/v1/chat/completions", messages=messages, prompt_logprobs=1, n=2, logprobs=True)
    assert whole["prompt_logprobs"] == expected(llm, llm.tokenizer.chat_ids(messages), 1)
    assert len(whole["choices"][1]["logprobs"]["content"]) == 4
    assert "prompt_logprobs" not in plain


def test_echo_repeats_the_prompt_and_its_log_probabilities(http: httpx.Client, llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    plain = post(http, "/v1/completions", prompt=PROMPT, logprobs=2)["choices"][0]
    echoed = post(http, "/v1/completions", prompt=[PROMPT, PROMPT], logprobs=2, echo=True, n=1)["choices"]
    assert echoed[0]["text"] == echoed[1]["text"] == PROMPT + plain["text"]
    known, own = echoed[0]["logprobs"], plain["logprobs"]
    assert known == echoed[1]["logprobs"]
    assert "".join(known["tokens"]) == PROMPT + plain["text"]
    assert (known["token_logprobs"][0], known["top_logprobs"][0], known["text_offset"][0]) == (None, None, 0)
    entries = llm.generate(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=2)).prompt_logprobs
    assert entries is not None
    assert known["token_logprobs"][1 : len(ids)] == [each.logprob for each in entries if each is not None]
    assert known["token_logprobs"][len(ids) :] == own["token_logprobs"]
    assert known["top_logprobs"][len(ids) :] == own["top_logprobs"]
    assert known["text_offset"][len(ids)] == len(PROMPT)
    assert post(http, "/v1/completions", prompt=PROMPT, echo=True)["choices"][0]["text"] == PROMPT + plain["text"]


def test_echo_in_a_stream(served: Running) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "echo": True}
        whole = client.completions.create(**asked).choices[0].text
        pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
    assert pieces[0] == PROMPT
    assert "".join(pieces) == whole


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "stream"),
        ({"echo": True, "logprobs": 1, "stream": True}, "stream"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(http: httpx.Client, field: dict[str, Any], names: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1, **field})
    assert answer.status_code == 400, answer.text
    assert names in answer.json()["error"]["message"]
    assert "\n" not in answer.json()["error"]["message"]
