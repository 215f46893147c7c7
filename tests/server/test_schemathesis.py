"""schemathesis reads the server's own OpenAPI schema, and asks: every answer is one that the schema describes."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("schemathesis")

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.generation import GenerationMode

from tests.server.conftest import Running

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# routes that write texts, and the name of their limit
TEXTS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
POSTS = (*TEXTS, "/v1/messages/count_tokens", "/v1/embeddings", "/tokenize", "/detokenize")
GETS = ("/v1/models", "/v1/models/{name}", "/health", "/ready", "/version", "/metrics", "/stats")
# which nobody may ask without a key: test_adapters.py, test_sleep.py
ADMINS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up", "/is_sleeping")
# requests to each route that takes a body; `make fuzz` asks for more
COUNT = int(os.environ.get("FORERUN_FUZZ", "40"))
LONGEST = 3  # tokens of a text


def ask(served: Running, method: str, path: str, mode: GenerationMode, count: int) -> Counter[int]:
    """Send requests that keep to the schema, or that break it; how many got each status."""
    operation = schemathesis.openapi.from_url(f"{served.url}/openapi.json")[path][method]
    statuses: Counter[int] = Counter()
    with requests.Session() as session:

        @seed(14)
        @settings(
            max_examples=count, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy(mode))
        def check(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body = served_here(short(case.body, TEXTS[path]) if path in TEXTS else case.body)
            # its own limit, 10 s, is for a machine that does nothing else
            answer = case.call(base_url=served.url, session=session, timeout=120)
            statuses[answer.status_code] += 1
            case.validate_response(answer, checks=CHECKS)
            if answer.status_code >= 400:
                more = set() if path.startswith("/v1/messages") else {"param", "code"}
                assert set(answer.json()["error"]) == {"message", "type", *more}
                assert answer.json()["error"]["message"]
            else:
                assert b"server_error" not in answer.content, answer.content  # in the middle of a stream

        check()
    return statuses


def short(body: dict[str, Any], most: str) -> dict[str, Any]:
    """The same body, asking for a few tokens where it may ask for any number of them; 618.0 is a whole number too."""
    few = {name: min(body[name], LONGEST) for name in (most, "max_completion_tokens", "min_tokens")
           if isinstance(body.get(name), int | float) and not isinstance(body[name], bool)}  # fmt: skip
    return {**body, **few} if body.get(most) is not None else {**body, **few, most: LONGEST}


def served_here(body: dict[str, Any]) -> dict[str, Any]:
    """The same body, to a model that is served: which these are is not in the schema."""
    return {**body, "model": "smollm2"} if isinstance(body.get("model"), str) else body


@pytest.mark.slow
@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_keep_to_the_schema(served: Running, path: str) -> None:
    statuses = ask(served, "POST", path, GenerationMode.POSITIVE, COUNT)
    assert statuses[200] >= COUNT // 20, statuses


@pytest.mark.slow
@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_break_the_schema(served: Running, path: str) -> None:
    statuses = ask(served, "POST", path, GenerationMode.NEGATIVE, COUNT)
    assert statuses[400] >= COUNT // 3, statuses


@pytest.mark.parametrize("path", GETS)
def test_routes_without_a_body(served: Running, path: str) -> None:
    statuses = ask(served, "GET", path, GenerationMode.POSITIVE, 8 if "{" in path else 1)
    assert statuses
    assert statuses.keys() <= {200, 404}, statuses


def test_all_routes_are_asked(served: Running) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    assert set(schema) == {*POSTS, *GETS, *ADMINS}
