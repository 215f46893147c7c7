"""`/v1/embeddings` by the real `openai` client, against transformers' hidden states of the same model."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

openai = pytest.importorskip("openai")

from forerun import LLM, SamplingParams  # noqa: E402
from tests.models.tiny_checkpoints import VOCAB, make_reference  # noqa: E402
from tests.models.tiny_folder import make_tiny_folder  # noqa: E402
from tests.server.conftest import Running  # noqa: E402

TEXTS = ["The capital of France is Paris.", "x", "one two three " * 60]


@pytest.fixture
def client(served: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def embed(http: httpx.Client, **body: Any) -> list[list[float]]:
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


@pytest.mark.slow
def test_no_bit_depends_on_company_or_cache(http: httpx.Client, client: Any) -> None:
    for how in ("mean", "last"):
        together = embed(http, input=TEXTS, pooling=how)
        again = embed(http, input=TEXTS, pooling=how)  # most of each prompt is found in the prefix cache
        assert together == again
        body = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 200, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json={**body, "ignore_eos": True}) as beside:
            next(beside.iter_lines())
            alone = [embed(http, input=[text], pooling=how, cache_salt=f"{how} {text}")[0] for text in TEXTS]
        assert together == alone
    found = client.embeddings.create(model="smollm2", input=TEXTS)  # the client asks for base64, and decodes it
    assert [each.embedding for each in found.data] == embed(http, input=TEXTS)
    assert [each.index for each in found.data] == [0, 1, 2]


def test_forms_and_lengths(http: httpx.Client, served: Running) -> None:
    (row,) = embed(http, input=TEXTS[0])
    assert math.isclose(math.fsum(each * each for each in row), 1.0, rel_tol=1e-6)
    answer = http.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"}).json()
    coded = base64.b64decode(answer["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(row)}f", coded)) == row
    ids = served.llm.tokenizer.encode(TEXTS[0])
    assert answer["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
    assert embed(http, input=[ids, ids]) == [row, row]
    assert embed(http, input=ids, dimensions=len(row)) == [row]
    (longer,) = embed(http, input=TEXTS[0], normalize=False)
    length = math.sqrt(math.fsum(each * each for each in longer))
    assert length > 1.5
    assert max(abs(a / length - b) for a, b in zip(longer, row, strict=True)) < 1e-6


def test_the_library_has_the_same_rows(http: httpx.Client, llm: LLM) -> None:
    for how in ("mean", "last"):
        done = llm.generate(TEXTS[0], SamplingParams(max_tokens=3), pooling=how)
        assert [done.embedding] == embed(http, input=TEXTS[0], normalize=False, pooling=how)
    plain = llm.generate(TEXTS[0], SamplingParams(max_tokens=3))
    assert plain.embedding is None
    assert plain.text == done.text


def test_many_texts_wait_for_their_turn_and_no_text_is_harmed(http: httpx.Client) -> None:
    """More of them than batch and queue hold."""
    many = [f"number {i}" for i in range(40)]
    assert embed(http, input=many)[::13] == [embed(http, input=text)[0] for text in many[::13]]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama2", "qwen3", "gemma2", "mixtral"])
def test_rows_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """Both compute in float32, in another order: 2e-5 of the largest number in a row. Prompts of 1 to 50 tokens."""
    folder, model = make_tiny_folder(tmp_path, family), make_reference(family)
    with LLM.load(folder, dtype="float32", drafter="none", max_batch=3) as llm:
        prompts = [[i * 7 % VOCAB for i in range(3, 3 + size)] for size in (1, 2, 17, 50)]
        for how in ("mean", "last"):
            done = llm.generate(prompts, SamplingParams(max_tokens=1), pooling=how)
            for ids, one in zip(prompts, done, strict=True):
                with torch.no_grad():
                    rows = model.model(torch.tensor([ids])).last_hidden_state[0]
                wanted = rows.mean(0) if how == "mean" else rows[-1]
                assert float((torch.tensor(one.embedding) - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ({"dimensions": 64}, "dimensions=64"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "cls"}, "pooling"),
        ({"input": []}, "input"),
        ({"input": ""}, "empty"),
        ({"input": ["a", ""]}, "text 1 is empty"),
        ({"input": [[1], []]}, "text 1 is empty"),
        ({"input": ["x"] * 2049}, "2048"),
        ({"input": {"a": 1}}, "input"),
        ({"input": [10**9]}, "vocabulary"),
        ({"input": "so " * 3000}, "context"),
        ({"input": "so " * 60_000}, "context"),
        ({"temperature": 1}, "temperature"),
        ({"stream": True}, "stream"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(http: httpx.Client, field: dict[str, Any], names: str) -> None:
    answer = http.post("/v1/embeddings", json={"input": "Hi", **field})
    assert answer.status_code == 400, answer.text
    assert names in answer.json()["error"]["message"]
    assert "\n" not in answer.json()["error"]["message"]
