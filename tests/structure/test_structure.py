"""Structure: what `response_format`, `json_schema` and `structured_outputs` say, and what is wrong with others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forerun.core.errors import InvalidInput
from forerun.core.params import SamplingParams, Structure, for_schema, structure_of

SCHEMA = {"type": "object", "properties": {"reasoning": {"type": "string"}, "answer": {"type": "integer"}}}


def test_the_order_of_keys_is_kept() -> None:
    found = structure_of(for_schema(SCHEMA), None)
    assert found is not None
    assert found.text == json.dumps(SCHEMA)
    assert found.text.index("reasoning") < found.text.index("answer")


def test_free_texts_and_any_object() -> None:
    assert structure_of(None, None) is structure_of({"type": "text"}, None) is None
    assert SamplingParams().structure is None
    assert structure_of({"type": "json_object"}, None) == Structure("json_schema", '{"type": "object"}')


@pytest.mark.parametrize(
    ("given", "whitespace"),
    [
        (None, "compact"),
        ({}, "compact"),
        ({"disable_any_whitespace": None}, "compact"),
        ({"disable_any_whitespace": True}, "none"),
        ({"disable_any_whitespace": False}, "any"),
    ],
)
def test_whitespace(given: Any, whitespace: str) -> None:
    found = structure_of({"type": "json_object"}, given)
    assert found is not None
    assert found.whitespace == whitespace


def test_a_schema_by_itself_means_the_same() -> None:
    short = SamplingParams.from_dict({"json_schema": SCHEMA})
    assert short == SamplingParams(response_format=for_schema(SCHEMA))
    assert SamplingParams.from_dict({"json_schema": None}) == SamplingParams()
    with pytest.raises(InvalidInput, match="give one of them"):
        SamplingParams.from_dict({"json_schema": SCHEMA, "response_format": {"type": "json_object"}})
    over = SamplingParams.from_dict({"response_format": {"type": "text"}}, over=short)
    assert over.structure is None


def test_what_was_given_may_be_changed_later() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    params = SamplingParams.from_dict({"json_schema": schema})
    schema["type"] = "string"
    assert params.structure == structure_of(for_schema({"type": "object", "properties": {}}), None)


@pytest.mark.parametrize(
    ("response_format", "outputs", "said"),
    [
        ("json", None, "response_format='json'"),
        ({}, None, "response_format.type=None"),
        ({"type": "xml"}, None, "one of text, json_object, json_schema"),
        ({"type": "json_schema"}, None, "needs a json_schema with a schema"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, None, "needs a json_schema with a schema"),
        (for_schema({"const": float("nan")}), None, "what JSON can hold"),
        (for_schema({"const": {1, 2}}), None, "what JSON can hold"),
        (for_schema({"const": 1j}), None, "what JSON can hold"),
        (None, {"disable_whitespace": True}, "did you mean 'disable_any_whitespace'"),
        (None, {"disable_any_whitespace": "no"}, "disable_any_whitespace='no'"),
        (None, True, "structured_outputs=True"),
    ],
)
def test_others_are_refused_in_one_line(response_format: Any, outputs: Any, said: str) -> None:
    with pytest.raises(InvalidInput) as found:
        SamplingParams(response_format=response_format, structured_outputs=outputs)
    assert said in str(found.value)
    assert "\n" not in str(found.value)


def test_a_schema_that_contains_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["anyOf"] = [schema]
    with pytest.raises(InvalidInput):
        SamplingParams.from_dict({"json_schema": schema})
