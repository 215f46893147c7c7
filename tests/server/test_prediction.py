"""Predicted outputs through server, library and command line: the same texts, and what was right of the prediction."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

openai = pytest.importorskip("openai")

from forerun import LLM, AsyncLLM  # noqa: E402
from forerun.cli.app import app  # noqa: E402
from forerun.core.errors import InvalidInput  # noqa: E402
from tests.server.conftest import Running  # noqa: E402

CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
ASKED = [{"role": "user", "content": f"Repeat this code exactly:\n```python\n{CODE}```"}]
WRONG = "It was the best of times, it was the worst of times, it was the age of wisdom."


def content(text: str) -> dict[str, Any]:
    return {"type": "content", "content": text}


def test_a_prediction_changes_no_text_and_saves_rounds(served: Running) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "smollm2", "messages": ASKED, "max_tokens": 64, "temperature": 0}
        plain = client.chat.completions.create(**asked, extra_body={"speculative": "off"})
        text = plain.choices[0].message.content
        assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
        tokens = len(served.llm.tokenizer.encode(text, add_special=False))
        fixed = {"speculative": {"budget": 8}}  # without it a busy machine's clock says how much is drafted
        right = client.chat.completions.create(**asked, prediction=content(text), extra_body=fixed)
        assert right.choices[0].message.content == text
        details = right.usage.completion_tokens_details
        assert details.accepted_prediction_tokens >= tokens - 2
        assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == tokens
        figures = right.model_extra["metrics"]["speculative_decoding"]
        assert figures["drafter"].startswith("prediction+")
        assert figures["num_spec_steps"] < plain.usage.completion_tokens / 2
        wrong = client.chat.completions.create(**asked, prediction=content(WRONG), extra_body=fixed)
        assert wrong.choices[0].message.content == text
        assert wrong.usage.completion_tokens_details.accepted_prediction_tokens <= 4


@pytest.mark.parametrize("temperature", [0, 1])
def test_streams_and_several_choices_have_the_same_texts(http: httpx.Client, temperature: int) -> None:
    body = {"messages": ASKED, "max_tokens": 32, "temperature": temperature, "seed": 5, "n": 2}

    def texts(**more: Any) -> list[str]:
        answer = http.post("/v1/chat/completions", json={**body, **more}).json()
        return [choice["message"]["content"] for choice in answer["choices"]]

    wanted = texts()
    parts = [{"type": "text", "text": CODE[:20]}, {"type": "text", "text": CODE[20:]}]
    for prediction in (content(CODE), content(WRONG), content(""), {"type": "content", "content": parts}):
        assert texts(prediction=prediction) == wanted
    assert texts(prediction=content(CODE * 20)) == wanted
    streamed = ["", ""]
    more = {"stream": True, "prediction": content(CODE), "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/chat/completions", json={**body, **more}) as answer:
        for line in answer.iter_lines():
            chunk = json.loads(line[6:]) if line.startswith("data: {") else {"choices": []}
            for choice in chunk["choices"]:
                streamed[choice["index"]] += choice["delta"].get("content", "")
            usage = chunk.get("usage")
            assert usage is None or usage["completion_tokens_details"]["accepted_prediction_tokens"] >= 0
    assert streamed == wanted


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        ("text", "prediction"),
        ({"type": "tokens", "content": "x"}, "content"),
        ({"content": None}, "content"),
        ({"content": [{"type": "image_url", "text": "x"}]}, "text"),
        ({"content": "x " * 5000}, "the context holds 1024: shorten it"),
        ({"content": "x", "weight": 2}, "weight"),
    ],
)
def test_what_is_no_prediction_is_a_400(http: httpx.Client, prediction: Any, said: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": ASKED, "prediction": prediction})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert said in error["message"]
    assert "\n" not in error["message"]
    assert error["param"].startswith("prediction")


@pytest.mark.slow
def test_the_library_takes_one_for_each_prompt(llm: LLM) -> None:
    prompts = ["Count: 1, 2, 3, 4,", "a b c d e f"]
    plain = llm.generate(prompts, max_tokens=24, drafter="none")
    texts = [one.text for one in plain]
    right = llm.generate(prompts, max_tokens=24, prediction=texts)
    assert [one.text for one in right] == texts
    assert all(one.accepted_prediction_tokens > 20 for one in right)
    ids = [tuple(one.token_ids) for one in plain]
    again = llm.generate(prompts, max_tokens=24, prediction=ids)
    assert [(one.accepted_prediction_tokens, one.rejected_prediction_tokens) for one in again] == [(24, 0)] * 2
    stream = llm.stream(prompts[0], max_tokens=24, prediction=texts[0])
    assert "".join(event.text for event in stream) == texts[0]
    for wrong, said in ((1.5, "prediction"), (["x"], "2 prompts came with 1 predictions")):
        with pytest.raises(InvalidInput, match=said):
            llm.generate(prompts, prediction=wrong)

    async def asked() -> str:
        async with AsyncLLM(llm) as served:
            return (await served.generate(prompts[0], max_tokens=24, prediction=texts[0])).text

    assert asyncio.run(asked()) == texts[0]


@pytest.mark.slow
def test_the_command_line_reads_a_file(tmp_path: Path) -> None:
    file, result = tmp_path / "code.py", tmp_path / "result.json"
    file.write_text(CODE)
    asked = ["generate", ASKED[0]["content"], "--max-tokens", "24", "--json", str(result)]
    told = CliRunner().invoke(app, [*asked, "--prediction", str(file)])
    assert told.exit_code == 0, told.output
    assert json.loads(result.read_text())["drafter"].startswith("prediction+")
    told = CliRunner().invoke(app, [*asked, "--prediction", str(tmp_path / "none.py")])
    assert told.exit_code != 0
    assert "cannot read the prediction file" in told.output
