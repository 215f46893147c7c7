"""What surrounds texts: operator routes, limits, keys, bad bodies, clients that leave."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from forerun.server.errors import ApiError
from forerun.server.limits import Gate
from forerun.server.parsers import ToolParser, found_in
from tests.server.conftest import Running

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/version", "/metrics", "/v1/models", "/stats", "/", "/page/app.js"]
)
def test_operator_routes_answer(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200


def test_tokens_there_and_back(http: httpx.Client, served: Running) -> None:
    found = http.post("/tokenize", json={"prompt": "Grüße, world"}).json()
    assert found["tokens"] == served.llm.tokenizer.encode("Grüße, world")
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"] == "Grüße, world"
    assert http.post("/detokenize", json={"tokens": [10**9]}).status_code == 400


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{", 400), ("[]", 400), ("null", 400), ('"x"', 400), ("{}", 400), ('{"messages": []}', 400),
        ('{"messages": 5}', 400), ('{"messages": [{"role": "user"}]}', 400), ('{"messages": [{"content": "x"}]}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e99}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "n": 0}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "n": 10000}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"x": 1}}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"999999": 1}}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "stop": [""]}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "speculative": {"drafter": "nosuch"}}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "speculative": {"budget": -3}}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "best_of": 5}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema"}}', 400),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        ('{"messages": [{"role": "\\ud800", "content": "x"}]}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "\\ud800": 1}', 400),
        ('{"messages": [{"role": "user", "content": "x", "\\ud800": "\\udfff"}]}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"add_generation_prompt": 1}}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}}', 400),
        ('{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"self": 1}}', 400),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_bad_bodies_get_a_4xx_that_says_why(http: httpx.Client, body: str, status: int, stream: bool) -> None:
    if stream and body.startswith('{"messages": [{"role"'):
        body = body[:-1] + ', "stream": true}'
    answer = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    said = answer.json()["error"]
    assert said["message"]
    assert "\n" not in said["message"]
    assert said["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "size"), [("logit_bias", 1025), ("stop", 129), ("stop_token_ids", 1025), ("prompt", 30_000)]
)
def test_long_lists_are_refused_before_they_cost_others_time(http: httpx.Client, field: str, size: int) -> None:
    values = {str(i): 1 for i in range(size)} if field == "logit_bias" else [1] * size
    body = {"prompt": "x", field: ["a"] * size if field == "stop" else values}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "at most" in answer.text or "no room" in answer.text


@pytest.mark.parametrize("chunks", [1, 30])
def test_a_body_that_is_too_large_is_not_read(http: httpx.Client, chunks: int) -> None:
    parts = (b"x" * (300_000 // chunks) for _ in range(chunks))
    answer = http.post("/v1/chat/completions", content=b"".join(parts) if chunks == 1 else parts)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_unknown_places_and_methods_have_the_same_shape(http: httpx.Client) -> None:
    absent = http.get("/v1/nothing").json()["error"]
    assert (absent["type"], absent["message"]) == (
        "not_found_error",
        "there is no /v1/nothing here; GET /docs lists what there is",
    )
    wrong = http.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["message"]) == (
        405,
        "/v1/chat/completions takes no GET; GET /docs lists what it takes",
    )


@pytest.mark.parametrize(
    ("field", "begins", "param"),
    [
        ({"max_tokns": 5}, "unknown field 'max_tokns'; did you mean 'max_tokens'? known: ", "max_tokns"),
        ({"speculative": {"budjet": 3}}, "speculative: unknown field 'budjet'; ", "speculative.budjet"),
        ({"use_beam_search": True}, "use_beam_search='True' is not supported; ", "use_beam_search"),
        ({"max_tokens": 0}, "max_tokens=0 is out of range", "max_tokens"),
        ({"max_tokens": True}, "max_tokens: a truth value is no number", "max_tokens"),
        ({"temperature": -1}, "temperature=-1.0 is out of range", "temperature"),
        ({"speculative": {"budget": -3}}, "budget=-3 is out of range", "speculative.budget"),
        ({"logprobs": True, "top_logprobs": 100}, "top_logprobs=100 is out of range: 0 to 64", "top_logprobs"),
    ],
)
def test_errors_name_the_field_as_the_client_wrote_it(
    http: httpx.Client, field: dict[str, object], begins: str, param: str
) -> None:
    said = http.post("/v1/chat/completions", json={**CHAT, **field}).json()["error"]
    assert said["message"].startswith(begins), said
    assert said["param"] == param


def test_more_tokens_than_fit_are_refused_with_the_number_that_fits(http: httpx.Client) -> None:
    body = {**CHAT, "max_tokens": 10**6}
    said = http.post("/v1/chat/completions", json=body).json()["error"]
    assert said["code"] == "context_length_exceeded"
    fits = int(said["message"].split("ask for at most ")[1].split(",")[0])
    over = http.post("/v1/chat/completions", json={**body, "max_tokens": fits + 1}).json()["error"]
    assert over["code"] == "context_length_exceeded"
    taken = http.post("/v1/chat/completions", json={**body, "max_tokens": fits, "stop": [" "]})
    assert taken.status_code == 200


@pytest.mark.parametrize(
    ("route", "name"), [("chat/completions", "n"), ("chat/completions", "max_tokens"), ("embeddings", "dimensions")]
)
def test_a_number_of_4000_digits_is_not_repeated_to_the_client(http: httpx.Client, route: str, name: str) -> None:
    body = {"input": "Hi"} if route == "embeddings" else CHAT
    said = http.post(f"/v1/{route}", json={**body, name: 10**4000}).json()["error"]
    assert len(said["message"]) < 300
    assert f"{name}=1000" in said["message"]


def test_metrics_count_what_was_written(http: httpx.Client) -> None:
    def count(name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"forerun:{name}"))

    before = count("generation_tokens_total"), count("spec_decode_num_drafts_total")
    # with a budget of its own: what the controller would draft depends on what the server did before
    http.post("/v1/chat/completions", json={**CHAT, "speculative": {"budget": 4}})
    assert count("generation_tokens_total") == before[0] + 4
    assert count("spec_decode_num_drafts_total") > before[1]
    assert count("time_to_first_token_seconds_count") >= 1


def test_a_client_that_leaves_frees_its_slots(http: httpx.Client, served: Running) -> None:
    body = {**CHAT, "max_tokens": 900, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    body["stream"] = False
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json=body, timeout=0.3)
    deadline = time.monotonic() + 60
    while served.stats()["used_slots"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (served.stats()["used_slots"], served.stats()["running"]) == (0, 0)


@pytest.mark.slow
def test_more_than_the_queue_takes_is_turned_away(http: httpx.Client, served: Running) -> None:
    """Batch 4 and a queue of 8: of 20 at once, some get 429 with a word on when to come again."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(f"{served.url}/v1/chat/completions", json={**CHAT, "max_tokens": 30}, timeout=60))

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = sorted(answer.status_code for answer in answers)
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 12
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused, "twenty at once are more than twelve"
    assert refused[0].headers["retry-after"]
    texts = {answer.json()["choices"][0]["message"]["content"] for answer in answers if answer.status_code == 200}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("field", "param", "says"),
    [
        ({"stop": ["a"] * 200}, "stop", "at most 128"),
        ({"stop": 5}, "stop", "valid"),
        ({"stream_options": 5}, "stream_options", "valid"),
        ({"speculative": "sometimes"}, "speculative", "'off' or 'on'"),
        ({"speculative": {"drafterr": "ngram"}}, "speculative", "did you mean 'drafter'"),
        ({"speculative": {"budget": {"nodes": 999}}}, "speculative.budget.nodes", "256"),
        ({"prompt": [1, "a"]}, "prompt", "valid"),
        ({"stream_options": {"include_usge": True}}, "stream_options", "did you mean 'include_usage'"),
    ],
)
def test_what_is_wrong_is_said_of_the_field(
    http: httpx.Client, field: dict[str, object], param: str, says: str
) -> None:
    error = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **field}).json()["error"]
    assert error["param"].startswith(param)
    assert "[" not in error["param"]
    assert says in error["message"]


class TestGate:
    def test_keys(self) -> None:
        gate = Gate(["one", "two"], None)
        assert gate.check("Bearer two", "") == "key 1"
        for wrong in (None, "", "Bearer", "Bearer three", "Basic one", "Bearer on"):
            with pytest.raises(ApiError) as caught:
                gate.check(wrong, "")
            assert caught.value.status == 401

    def test_rates_refill(self) -> None:
        now = [0.0]
        gate = Gate([], 2, lambda: now[0])
        gate.check(None, "a")
        gate.check(None, "a")
        gate.check(None, "b")
        with pytest.raises(ApiError) as caught:
            gate.check(None, "a")
        assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "30"})
        now[0] = 31.0
        gate.check(None, "a")


class TestTools:
    def test_tagged_calls(self) -> None:
        text = 'Sure.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        rest, calls, _ = found_in(ToolParser({"add": {}}), text)
        assert rest == "Sure."
        assert [(call.name, call.arguments) for call in calls] == [("add", '{"a": 1}')]

    @pytest.mark.parametrize(
        "text", ["no call", "{broken", '{"name": "rm"}', '<tool_call>{"name": 5}</tool_call>', "[]"]
    )
    def test_what_is_no_call_stays_text(self, text: str) -> None:
        assert found_in(ToolParser({"add": {}}), text) == (text, [], None)
