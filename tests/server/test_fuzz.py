"""Bodies made from the server's own OpenAPI schema, then damaged: whatever is sent, no answer is a 5xx."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import httpx
import pytest

STRANGE = (
    None, True, -1, 0, 1, 10**20, -(10**20), 0.5, 1e308, "", "x", "\x00", "é" * 50, "[1]", [], [[]], [None], {},
    {"": {}}, [1, "a"], [-1], [10**12], {"type": "object"}, "\U0001f600", [[1], ["a"]], {"a": [{"b": None}]},
)  # fmt: skip
POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


class Maker:
    """Values of a JSON schema, most of them valid."""

    def __init__(self, document: dict[str, Any], dice: random.Random) -> None:
        self.document, self.dice = document, dice

    def value(self, schema: dict[str, Any], depth: int = 0) -> Any:
        dice = self.dice
        if dice.random() < 0.06 or depth > 6:
            return dice.choice(STRANGE)
        if "$ref" in schema:
            found = self.document
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            return self.value(found, depth + 1)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self.value(dice.choice(schema[key]), depth + 1)
        if "enum" in schema:
            return dice.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        return self._of_type(schema, depth)

    def _of_type(self, schema: dict[str, Any], depth: int) -> Any:
        dice = self.dice
        match schema.get("type"):
            case "object" if "properties" in schema:
                needed = schema.get("required", ())
                chosen = [name for name in schema["properties"] if name in needed or dice.random() < 0.1]
                return {name: self.value(schema["properties"][name], depth + 1) for name in chosen}
            case "object":
                return {
                    dice.choice(["a", "role", "content", "0", "17"]): dice.choice(STRANGE) for _ in range(2)
                }
            case "array":
                return [self.value(schema.get("items", {}), depth + 1) for _ in range(dice.randint(0, 3))]
            case "string":
                return dice.choice(["", "word", "smollm2", "user", "ngram", "exact", "a b c", "\ud800", "{}"])
            case "integer":
                return dice.choice([0, 1, 2, 5, 100, -1, 2**63, 49151])
            case "number":
                return dice.choice([0, 0.5, 1, 2.0, -3, 1e9, 1e-9])
            case "boolean":
                return dice.random() < 0.5
            case "null":
                return None
        return dice.choice(STRANGE)


def bodies(document: dict[str, Any], path: str, count: int, seed: int) -> list[Any]:
    dice = random.Random(seed)
    maker = Maker(document, dice)
    content = document["paths"][path]["post"]["requestBody"]["content"]
    made = []
    for _ in range(count):
        body = maker.value(content["application/json"]["schema"])
        if isinstance(body, dict) and path.startswith("/v1"):
            body["max_tokens"] = dice.choice([1, 1, 2, 2, 3, 0, -1, 10**9, "x", 1.5])  # texts stay short
            body.pop("max_completion_tokens", None)
            if "prompt" in body and dice.random() < 0.5:
                body["prompt"] = dice.choice(["x", [1, 2], ["a", "b"], [[3], [4]]])
            if "messages" in body and dice.random() < 0.8:
                body["messages"] = [
                    {"role": "user", "content": dice.choice(["Hi", "", [{"type": "text", "text": "x"}]])}
                ]
        made.append(body)
    return made


@pytest.mark.parametrize("path", POSTS)
def test_no_body_gives_a_5xx(http: httpx.Client, path: str) -> None:
    document = http.get("/openapi.json").json()
    statuses: dict[int, int] = {}
    count = int(os.environ.get("FORERUN_FUZZ", "150"))  # more for a long look
    for number, body in enumerate(bodies(document, path, count, seed=14)):
        answer = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert answer.status_code < 500, (number, body, answer.text)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"], (number, body)
        else:
            assert "server_error" not in answer.text, (number, body, answer.text)
    assert statuses.get(200, 0) >= 5, f"too few bodies were valid: {statuses}"
    assert statuses.get(400, 0) >= 20, f"too few bodies were damaged: {statuses}"


def test_every_path_is_in_the_schema(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert {*POSTS, "/v1/models", "/health", "/ready", "/version", "/metrics", "/stats"} <= set(paths)


@pytest.mark.parametrize(
    "path", ["/v1/models/", "/v1/models/%00", "/page/..%2fapp.py", "/page/%ff", "/v1/models/é"]
)
def test_strange_paths_are_not_found(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code in (307, 404)
