"""Generated schemas: whatever a grammar allows validates, also what the real model writes, drafted as plain."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from forerun import LLM
from forerun.verify.grammar.compiled import Grammars
from forerun.verify.grammar.law import GrammarLaw
from tests.structure.conftest import law_of

WORDS = ["name", "zeta", "id", "a b", "Größe", 'quote"d', "tags", "value", "x", "y"]


def schema_of(seed: int, bounded: bool = False) -> dict[str, Any]:
    """A schema of every kind that there is, nested; all its texts are short where it is `bounded`."""
    numbers = random.Random(seed)

    def one(depth: int) -> dict[str, Any]:
        kinds: list[Callable[[int], dict[str, Any]]] = [string, integer, number, choice, other]
        return numbers.choice(kinds + [array, record, record, union] * (depth < 3))(depth)

    def string(depth: int) -> dict[str, Any]:
        pattern = numbers.choice(["^[a-z]{2,6}$", "^(yes|no|maybe)$", "^[0-9]{3}-[A-F]+x?$", "^\\d{1,3}%$"])
        least = numbers.randrange(4)
        kinds = [
            {"minLength": least, "maxLength": least + numbers.randrange(12)}, {"pattern": pattern},
            {"format": numbers.choice(["date", "uuid", "ipv4"])},
        ]  # fmt: skip
        return {"type": "string", **numbers.choice(kinds if bounded else [*kinds, {}])}

    def integer(depth: int) -> dict[str, Any]:
        low = numbers.randrange(-50, 50)
        limits = {"minimum": low, "maximum": low + numbers.randrange(100)}
        return {"type": "integer", **numbers.choice([limits] if bounded else [limits, {"multipleOf": 7}, {}])}

    def number(depth: int) -> dict[str, Any]:
        limits = {"minimum": -1.5, "exclusiveMaximum": 2.25}
        return {"type": "integer" if bounded else "number", **limits}

    def choice(depth: int) -> dict[str, Any]:
        return {"enum": numbers.sample([1, 2.5, None, True, "a", "é\n", ["x", 1], {"k": [0]}], 3)}

    def other(depth: int) -> dict[str, Any]:
        return numbers.choice([{"type": "boolean"}, {"type": "null"}, {"const": numbers.choice(WORDS)}])

    def array(depth: int) -> dict[str, Any]:
        least = numbers.randrange(2)
        return {"type": "array", "items": one(depth + 1), "minItems": least, "maxItems": least + 2}

    def union(depth: int) -> dict[str, Any]:
        return {"anyOf": [one(depth + 1), one(depth + 1)]}

    def record(depth: int) -> dict[str, Any]:
        names = numbers.sample(WORDS, numbers.randrange(1, 4))
        return {
            "type": "object", "properties": {name: one(depth + 1) for name in names}, "additionalProperties": False,
            "required": [name for name in names if bounded or numbers.random() < 0.7],
        }  # fmt: skip

    inner = record(2)
    whole = record(0)
    whole["properties"]["again"] = {"$ref": "#/$defs/inner"}
    return {**whole, "$defs": {"inner": inner}}


def check(text: str, schema: dict[str, Any]) -> None:
    found = json.loads(text)
    jsonschema.validate(found, schema, format_checker=jsonschema.FormatChecker())
    known = [*schema["properties"]]
    assert list(found) == [name for name in known if name in found], "in the order of the schema"


@pytest.mark.slow(keep=15)
@pytest.mark.parametrize("seed", range(40))
def test_texts_drawn_from_a_generated_schema_validate(
    seed: int, grammars: Grammars, drawn: Callable[[GrammarLaw, int], str]
) -> None:
    schema = schema_of(seed)
    jsonschema.Draft202012Validator.check_schema(schema)
    check(drawn(law_of(grammars, schema), seed), schema)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_of_the_model_validate(temperature: float, smollm2_path: str) -> None:
    llm = LLM(smollm2_path, max_batch=12, max_length=1024)
    schemas = [schema_of(seed, bounded=True) for seed in range(24)]
    chats = [[{"role": "user", "content": f"Fill this form, number {i}."}] for i in range(24)]
    each = [
        {"json_schema": schema, "max_tokens": 700, "temperature": temperature, "seed": i}
        for i, schema in enumerate(schemas)
    ]
    plain, drafted = (llm.chat(chats, each, drafter=drafter) for drafter in ("none", "ngram"))
    for schema, done in zip(schemas, plain, strict=True):
        assert done.finish_reason == "stop", done.text
        check(done.text, schema)
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
