"""Requests that nobody would send on purpose: bodies made from the server's own schema, valid ones that were changed,
and bytes that were damaged. The same seed gives the same requests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

POSTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/tokenize", "/detokenize",
)  # fmt: skip
STRANGE = (
    None, True, -1, 0, 1, 10**20, -(10**20), 0.5, 1e308, "", "x", "\x00", "é" * 50, "[1]", [], [[]], [None], {},
    {"": {}}, [1, "a"], [-1], [10**12], {"type": "object"}, "\U0001f600", [[1], ["a"]], {"a": [{"b": None}]},
    "\ud800", "\udfffx", {"\ud800": 1}, float("nan"), float("inf"), 10**4000, "x" * 20_000, [0] * 5000,
    {"self": 1}, {"messages": 1}, {"add_generation_prompt": 1}, "developer", "../../etc", "%s%n{0}{{ x }}", "\r\n",
)  # fmt: skip
KEYS = ("", "x", "max_tokns", "\ud800", "__class__", "self", "model", "0", "a.b", "n" * 300, "é")
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"],
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
HI, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{}"}}]}
TEXT, USAGE = {"type": "text", "text": "Hi"}, {"include_usage": True}
TREE = {"nodes": 4, "depth": 2, "width": 2}
ADD = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
USED = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}
MESSAGES: list[dict[str, Any]] = [
    {"model": "smollm2", "messages": [HI], "system": "Be short."},
    {"messages": [{"role": "user", "content": [TEXT, TEXT]}, ANSWER, HI], "system": [TEXT]},
    {"messages": [HI], "tools": [{"name": "add", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"}},
    {"messages": [HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "s"}, USED]},
                  {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [TEXT]}]}]},
    {"messages": [HI], "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
]  # fmt: skip
VALID: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"model": "smollm2", "messages": [HI], "temperature": 0, "stream": True, "stream_options": USAGE},
        {"messages": [{"role": "system", "content": "Be short."}, HI, ANSWER, HI], "n": 2},
        {"messages": [{"role": "user", "content": [TEXT]}], "logprobs": True, "top_logprobs": 3},
        {"messages": [HI], "tools": [TOOL], "tool_choice": "auto", "chat_template_kwargs": {"x": [1, {"y": None}]}},
        {"messages": [HI], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"messages": [HI], "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"messages": [HI, CALLED, {"role": "tool", "tool_call_id": "1", "content": "2"}]},
        {"messages": [HI], "speculative": {"drafter": "ngram", "budget": TREE}, "seed": 3},
        {"messages": [HI], "prediction": {"type": "content", "content": [TEXT, TEXT]}, "stream": True},
        {"messages": [HI], "reasoning_effort": "low", "parallel_tool_calls": False, "tools": [TOOL], "stream": True},
        {"messages": [HI], "guided_choice": ["a", "b"], "prompt_logprobs": 1, "priority": 5},
        {"messages": [HI], "structured_outputs": {"regex": "[a-c]+"}},
        {"messages": [HI], "response_format": {"type": "grammar", "grammar": 'root ::= "a" | "b"'}},
        {"messages": [HI], "response_format": {"type": "structural_tag", "triggers": ["<f"], "structures": [
            {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}},
    ],
    "/v1/completions": [
        {"prompt": "Once", "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "seed": 7, "stop": ["a", "\n"]},
        {"prompt": ["a b", "c"], "logprobs": 2, "logit_bias": {"100": -5, "200": 3.5}, "presence_penalty": 0.5},
        {"prompt": [1, 2, 3], "stop_token_ids": [5], "min_tokens": 1, "ignore_eos": True, "stream": True},
        {"prompt": [[1, 2], [3]], "repetition_penalty": 1.1, "speculative": "off", "cache_salt": "s", "user": "u"},
        {"prompt": "Once upon", "prompt_logprobs": 2, "priority": -3},
        {"prompt": ["a b", "c"], "echo": True, "logprobs": 1, "prompt_logprobs": 0},
        {"prompt": "a b", "echo": True, "stream": True},
    ],
    "/v1/responses": [
        {"model": "smollm2", "input": "Hi", "instructions": "Be short.", "temperature": 0, "stream": True},
        {"input": [{"role": "developer", "content": "x"}, {"role": "user", "content": [TEXT]}], "metadata": {"a": "b"}},
        {"input": [HI, {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "1", "output": "2"}], "tools": [ADD]},
        {"input": [HI, {"type": "reasoning", "summary": [], "content": [TEXT]}, ANSWER, HI], "store": False},
        {"input": "Hi", "tools": [ADD], "tool_choice": {"type": "function", "name": "add"}, "stream": True},
        {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
        {"input": "Hi", "reasoning": {"effort": "low", "summary": "auto"}, "speculative": "off", "seed": 3},
    ],
    "/v1/messages": [
        *MESSAGES, {"messages": [HI], "stream": True, "stop_sequences": ["a"], "metadata": {"user_id": "x"}},
        {"messages": [HI], "tools": [{"name": "add", "input_schema": SCHEMA}], "stream": True,
         "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True}},
        {"messages": [HI], "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "seed": 3},
    ],
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/embeddings": [
        {"model": "smollm2", "input": "Hi", "encoding_format": "base64", "user": "x"},
        {"input": ["Hi", "Yo"], "pooling": "last", "normalize": False, "dimensions": 576},
        {"input": [[1, 2], [3]]}, {"input": [1, 2, 3], "encoding_format": "float", "cache_salt": "x"},
    ],
    "/tokenize": [
        {"model": "smollm2", "prompt": "Some text", "add_special_tokens": True, "return_token_strs": True},
        {"messages": [HI], "add_generation_prompt": False},
    ],
    "/detokenize": [{"model": "smollm2", "tokens": [1, 500, 49151]}],
}  # fmt: skip


class Maker:
    """Values of a JSON schema, most of them valid."""

    def __init__(self, document: dict[str, Any], dice: random.Random) -> None:
        self.document, self.dice = document, dice

    def value(self, schema: dict[str, Any], depth: int = 0) -> Any:
        dice = self.dice
        if dice.random() < 0.06 or depth > 6:
            return deepcopy(dice.choice(STRANGE))
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
                    dice.choice(["a", "role", "content", "0", "17"]): deepcopy(dice.choice(STRANGE)) for _ in range(2)
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
        return deepcopy(dice.choice(STRANGE))


class Sent(NamedTuple):
    """A request."""

    path: str
    raw: bytes
    how: str  # made, changed or damaged


def requests_of(document: dict[str, Any], path: str, count: int, seed: int) -> Iterator[Sent]:
    """So many requests to one route, the kinds in turn."""
    dice = random.Random(f"{seed} {path}")
    maker = Maker(document, dice)
    content = document["paths"][path]["post"]["requestBody"]["content"]
    for number in range(count):
        how = ("made", "changed", "changed", "damaged")[number % 4]
        if how == "made":
            body = maker.value(content["application/json"]["schema"])
            if isinstance(body, dict) and path.startswith("/v1"):
                if "prompt" in body and dice.random() < 0.5:
                    body["prompt"] = dice.choice(["x", [1, 2], ["a", "b"], [[3], [4]]])
                if "messages" in body and dice.random() < 0.8:
                    body["messages"] = [HI]
                if "input" in body and dice.random() < 0.8:
                    body["input"] = "Hi"
        else:
            body = json.loads(json.dumps(dice.choice(VALID[path])))
            for _ in range(dice.choice((0, 1, 1, 2, 4)) if how == "changed" else 0):
                body = changed(body, dice)
        if path.startswith("/v1") and not path.endswith(("count_tokens", "embeddings")):
            body = short(body, dice, "max_output_tokens" if path == "/v1/responses" else "max_tokens")
        raw = json.dumps(body).encode()
        yield Sent(path, damaged(raw, dice) if how == "damaged" else raw, how)


def short(body: Any, dice: random.Random, most: str = "max_tokens") -> Any:
    """The same body, whose texts are of a few tokens where there are any; `most` is the name of that limit."""
    if not isinstance(body, dict):
        return body
    few = {name: value for name in ("max_completion_tokens", "min_tokens")
           if (value := body.get(name)) is not None and not _is_long(value)}  # fmt: skip
    rest = {name: value for name, value in body.items() if name not in ("max_completion_tokens", "min_tokens")}
    limit = body.get(most)
    if limit is None or _is_long(limit):
        limit = dice.choice([0, -1, 10**9, "x", 1.5] if dice.random() < 0.2 else [1, 2, 3])
    return {**rest, **few, most: limit}


def _is_long(value: Any) -> bool:
    try:
        return 3 < float(value) < 10**6
    except (TypeError, ValueError, OverflowError):
        return False


def changed(body: Any, dice: random.Random) -> Any:
    """The same with one change somewhere in it."""
    places = [*_places(body)]
    if not places or dice.random() < 0.02:
        return deepcopy(dice.choice(STRANGE))
    holder, key = dice.choice(places)
    match dice.randrange(8):
        case 0 | 1 | 2:
            holder[key] = deepcopy(dice.choice(STRANGE))
        case 3:
            del holder[key]
        case 4:
            holder[key] = [holder[key]] if dice.random() < 0.5 else {"x": holder[key]}
        case 5:
            for _ in range(dice.choice((3, 100, 200))):
                holder[key] = [holder[key]]
        case 6 if isinstance(holder, dict):
            holder[dice.choice(KEYS)] = deepcopy(dice.choice(STRANGE))
        case 7 if isinstance(holder, dict):
            holder[dice.choice(KEYS)] = holder.pop(key)
        case _:
            holder[key] = json.loads(json.dumps(holder))
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every key of every object, and every index of every list; not below 20 lists in each other."""
    waiting = [(value, 0)]
    while waiting:
        holder, depth = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys[:50]:
            yield holder, key
            if depth < 20:
                waiting.append((holder[key], depth + 1))


def damaged(raw: bytes, dice: random.Random) -> bytes:
    """The same bytes but for some."""
    at = dice.randrange(len(raw))
    match dice.randrange(7):
        case 0:
            return raw[:at]
        case 1:
            return raw[:at] + bytes([dice.randrange(256)]) + raw[at + 1 :]
        case 2:
            return raw[:at] + dice.choice((b"\xff", b"\x00", b"\\ud800", b'"', b"NaN", b"[" * 5000)) + raw[at:]
        case 3:
            return raw.decode().encode(dice.choice(("utf-16", "utf-8-sig", "utf-32-le")))
        case 4:
            return raw + raw
        case 5:
            return raw[:at] + raw[at + dice.randrange(1, 9) :]
        case _:
            return bytes(dice.randrange(256) for _ in range(dice.randrange(200)))
