"""Grammars: which schemas are refused, and that a law is that of its node's path alone, whatever was asked before."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest

from forerun.core.errors import GrammarFailed, InvalidInput
from forerun.core.params import SamplingParams
from forerun.core.request import Request
from forerun.engine.sequence import compiled as with_grammar
from forerun.models.load.tokenizer import Tokenizer
from forerun.server.reading import schema_of_calls
from forerun.server.schemas import FunctionSpec
from forerun.verify.grammar import compiled
from forerun.verify.grammar.compiled import GrammarLaw, Grammars
from tests.structure.answers import SCHEMAS
from tests.structure.conftest import allowed, law_of

Draw = Callable[[GrammarLaw, int], str]
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
HARD = "^[a-z ]*a[a-z ]{200}$"  # a thousand states for each word
# behind `"x":` the parser would have to keep 2,100 objects in mind
WIDE = [{"type": "object", "properties": {"a": {"const": i}}} for i in range(2100)]
FAILS_LATER: dict[str, Any] = {
    "type": "object", "properties": {"kind": {"enum": ["one", "two"]}, "x": {"anyOf": WIDE}},
    "required": ["kind", "x"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "integer", "multipleOf": 99991, "minimum": 1}, "fuel exhausted"),
        ({"$ref": "#"}, "no text matches the schema"),
        (LOOP, "no text matches the schema"),
        (False, "schema is false"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5)"),
        ({"anyOf": [{**each, "required": ["a"]} for each in WIDE]}, "2100 items"),
        ({"const": -(2**63) + 1}, "-9223372036854775807 is too low"),  # llguidance ends the process by it
        ({"type": "integer", "minimum": -1e300, "maximum": -1e19}, "-1e+300 is too low"),
        ({"not": {}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "https://example.com/schema.json"}, "example.com"),
        ({"$ref": "#/$defs/nobody"}, "nobody"),
        ({"type": "string", "pattern": "(a"}, "unclosed group"),
        ({"type": "string", "pattern": "(?=a)b"}, "look"),
        ({"type": "string", "format": "no-such"}, "no-such"),
        ({"type": "no-such"}, ""),
        ({"x-guidance": {"no_such": 1}}, "no_such"),
        ([1, 2], ""),
        ("object", ""),
    ],
)
def test_schemas_that_cannot_be_used_are_refused_before_anything_is_written(
    schema: Any, said: str, grammars: Grammars
) -> None:
    with pytest.raises(InvalidInput, match="the JSON schema cannot be used: ") as found:
        law_of(grammars, schema)
    assert said in str(found.value)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 300


def test_a_request_without_a_structure_is_left_alone() -> None:
    plain, held = Request((1,), SamplingParams(response_format={"type": "text"})), list[Request]()
    grammars: Any = SimpleNamespace(compile=lambda request: (held.append(request), request)[1])
    for asked in (
        plain,
        Request((1,), SamplingParams(response_format={"type": "json_object"})),
        Request((1,), SamplingParams(max_thinking_tokens=5)),
    ):
        assert with_grammar(grammars, asked) is asked
    assert plain not in held
    assert len(held) == 2


def test_a_model_without_an_end_or_a_tokenizer_is_refused(tokenizer: Tokenizer) -> None:
    for wrong in (Grammars(tokenizer, 49152, ()), Grammars(object(), 49152, [2]), Grammars(None, 49152, [2])):
        with pytest.raises(InvalidInput, match=r"needs a tokenizer with a tokenizer\.json and an end-of-text"):
            law_of(wrong, {"type": "object"})


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("how", [{}, {"disable_any_whitespace": True}, {"disable_any_whitespace": False}])
def test_whatever_is_drawn_validates(name: str, how: Any, grammars: Grammars, drawn: Draw) -> None:
    schema = SCHEMAS[name][0]
    for seed in range(2):
        text = drawn(law_of(grammars, schema, **how), seed)
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


OBJECTS = {"type": "object", "required": ["b", "a"], "additionalProperties": False, "properties": {
    "b": {"type": "array", "items": {"type": "boolean"}, "minItems": 2}, "a": {"enum": ["x  y"]},
}}  # fmt: skip


def test_whitespace_is_bounded_unless_it_is_asked_for(grammars: Grammars, tokenizer: Tokenizer) -> None:
    def texts_behind(so_far: str, **how: Any) -> set[str]:
        law, output = law_of(grammars, OBJECTS, **how), tokenizer.encode(so_far, add_special=False)
        return {tokenizer.decode([token]) for token in allowed(law, output)}

    blank = {text for text in texts_behind('{"b":', disable_any_whitespace=False) if text.isspace()}
    assert {" ", "\n", "    ", "\n\n"} <= blank, "negative control: without a bound there is any amount"
    assert not {text for text in texts_behind('{"b":', disable_any_whitespace=True) if text[:1].isspace()}
    bounded = {text for text in texts_behind('{"b":') if text.isspace()}
    assert bounded == {" "}
    for so_far in ("{", '{"b"', '{"b": ', '{"b": [', '{"b": [true', '{"b": [true, ', '{"b": [true, true], "a": "x  y"'):
        assert not {text for text in texts_behind(so_far) if text[:1].isspace()}, so_far


def test_the_schema_may_say_how_by_itself(grammars: Grammars, tokenizer: Tokenizer) -> None:
    output = tokenizer.encode('{"b":', add_special=False)

    def blanks(**how: Any) -> bool:
        law = law_of(grammars, {**OBJECTS, "x-guidance": {"whitespace_flexible": False}}, **how)
        return any(tokenizer.decode([token]) == "\n\n" for token in allowed(law, output))

    assert not blanks()
    assert blanks(disable_any_whitespace=False), "what the request says by name comes first"


def keys_in_order(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [key for own, inner in value.items() for key in (own, *keys_in_order(inner))]
    return [key for each in value for key in keys_in_order(each)] if isinstance(value, list) else []


def test_keys_come_in_the_order_of_the_schema(grammars: Grammars, drawn: Draw) -> None:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    inner = {"type": "object", "properties": {"z": digit, "a": digit, "m": digit}, "required": ["a", "m", "z"]}
    schema = {
        "type": "object", "required": ["a", "list", "nested", "reasoning"], "additionalProperties": False,
        "$defs": {"Inner": {**inner, "additionalProperties": False}},
        "properties": {
            "reasoning": digit, "nested": {"$ref": "#/$defs/Inner"},
            "list": {"type": "array", "items": {"$ref": "#/$defs/Inner"}, "minItems": 1, "maxItems": 1}, "a": digit,
        },
    }  # fmt: skip
    for seed in range(3):
        found = json.loads(drawn(law_of(grammars, schema), seed))
        assert keys_in_order(found) == ["reasoning", "nested", "z", "a", "m", "list", "z", "a", "m", "a"]


def test_a_call_of_a_tool_has_the_name_first_and_its_own_references(grammars: Grammars, drawn: Draw) -> None:
    """As pydantic makes them: each schema has `$defs` of its own, under the same names."""

    def tool(name: str, city: Any) -> FunctionSpec:
        parameters = {
            "type": "object", "properties": {"to": {"$ref": "#/$defs/City"}, "days": {"enum": [1, 2]}},
            "required": ["to", "days"], "additionalProperties": False, "$defs": {"City": city},
            "examples": [{"$ref": "#/$defs/City"}],
        }  # fmt: skip
        return FunctionSpec(name=name, parameters=parameters)

    tools = [tool("visit", {"enum": ["Rome", "Oslo"]}), tool("leave", {"enum": [7, 8]}), FunctionSpec(name="stay")]
    schema = schema_of_calls(tools)
    assert schema["$defs"]["0"]["examples"] == [{"$ref": "#/$defs/City"}], "a value, and no reference"
    called = set()
    for seed in range(12):
        found = json.loads(drawn(law_of(grammars, schema), seed))
        assert list(found) == ["name", "arguments"]
        called.add(found["name"])
        if found["name"] == "stay":
            assert found["arguments"] == {}, "a function without parameters takes none"
        else:
            assert list(found["arguments"]) == ["to", "days"]
            assert found["arguments"]["to"] in (["Rome", "Oslo"] if found["name"] == "visit" else [7, 8])
    assert called == {"visit", "leave", "stay"}


def fresh_mask(grammars: Grammars, schema: Any, output: list[int]) -> list[int]:
    """By a matcher that has read nothing else."""
    matcher = law_of(grammars, schema)._make()
    assert matcher.consume_tokens(output)
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    assert not matcher.is_error()
    return bits.nonzero()[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["nested", "limits", "with $defs", "formats"])
def test_matchers_say_at_every_node_what_a_fresh_one_does(name: str, grammars: Grammars) -> None:
    """Over trees that grow, are cut and begin again, as rounds and rejected drafts have it."""
    schema, numbers = SCHEMAS[name][0], random.Random(name)
    law, output, ends = law_of(grammars, schema), list[int](), {2}
    for _ in range(30):
        nodes: list[tuple[int, ...]] = [()]
        for _ in range(6):
            path = numbers.choice(nodes)
            may = allowed(law, output, path)
            assert may == fresh_mask(grammars, schema, [*output, *path])
            token = numbers.choice(may)
            if token not in ends:
                nodes.append((*path, token))
        output += numbers.choice(nodes)
        if numbers.random() < 0.1:
            output = output[: numbers.randrange(len(output) + 1)]  # a round is undone


def test_a_draft_that_was_rejected_leaves_nothing_behind(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """llguidance's own rollback does: here it left `{` allowed behind `"is":`, where a string must follow."""
    properties = {"more": {"$ref": "#/$defs/one"}, "is": {"type": "string"}}
    schema = {"$ref": "#/$defs/one", "$defs": {"one": {
        "type": "object", "properties": properties, "required": ["is"], "additionalProperties": False,
    }}}  # fmt: skip
    law = law_of(grammars, schema)
    output, draft, other = (
        [token for piece in pieces for token in tokenizer.encode(piece, add_special=False)]
        for pieces in (['{"more": {"'], ["m", "ore", '"', ":"], ["is", '"', ":"])
    )
    for size in range(len(draft) + 1):
        allowed(law, output, tuple(draft[:size]))
    for size in range(len(other) + 1):
        assert allowed(law, output + other[:size]) == fresh_mask(grammars, schema, output + other[:size])


def test_a_complete_text_may_only_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    several = Grammars(tokenizer, tokenizer.vocab_size, [0, 2])
    law, output = law_of(several, {"enum": ["a", "b"]}), tokenizer.encode('"a"', add_special=False)
    assert allowed(law, output) == [0, 2]
    assert allowed(law, output, (2,)) == allowed(law, [*output, 0, 0], (2, 2)) == [0, 2], "also when it is ignored"
    assert 2 not in allowed(law, output[:1]), "and goes on where a draft had ended it"


@pytest.mark.slow
def test_a_grammar_that_fails_later_is_never_taken_for_done(grammars: Grammars, tokenizer: Tokenizer) -> None:
    law = law_of(grammars, FAILS_LATER)
    before, behind = (tokenizer.encode(text, add_special=False) for text in ('{"kind":"one","x"', ": "))
    for _ in range(2):
        with pytest.raises(GrammarFailed, match=r"^the answer cannot go on: .*2101 items.*; simplify"):
            allowed(law, before, tuple(behind))
    assert allowed(law, before), "other paths of the same text go on"
    assert allowed(law_of(grammars, FAILS_LATER), before), "and so do other texts"


def test_texts_of_one_structure_share_what_is_compiled(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_KEPT", 2)
    own, schemas = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids), [{"enum": [i]} for i in range(3)]
    first = law_of(own, schemas[0])
    assert law_of(own, schemas[0])._start is first._start
    assert law_of(own, schemas[0], disable_any_whitespace=True)._start is not first._start
    for schema in schemas[1:]:
        law_of(own, schema)
    assert len(own._compiled) == 2
    assert law_of(own, schemas[0])._start is not first._start, "the two that were used last are kept"


def test_a_text_that_uses_up_the_shared_lexer_ends_no_other(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(compiled._LIMITS, "max_lexer_states", 1500)
    own, schema = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids), {"type": "string", "pattern": HARD}
    output = tokenizer.encode('"a mat', add_special=False)
    expected = fresh_mask(own, schema, output)
    before, greedy = law_of(own, schema), law_of(own, schema)
    shared, copy = greedy._start, greedy._start.deep_copy()
    assert before._start is shared
    for numbers in map(random.Random, range(100)):
        path: tuple[int, ...] = ()
        for _ in range(6):
            path += (numbers.choice(allowed(greedy, output, path)),)
        if greedy._start is not shared:
            break
    copy.consume_tokens(output)
    copy.compute_bitmask()
    assert copy.is_error(), "negative control: the limit was reached"
    behind = law_of(own, schema)
    assert behind._start is not shared
    assert allowed(before, output) == allowed(behind, output) == expected
    assert law_of(own, schema)._start is behind._start, "a text that met the limit takes no good one away"


@pytest.mark.slow
def test_what_drafts_have_built_does_not_end_a_text(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lexer of a matcher may build so many states; drafts beside the text use them up, time and again."""
    monkeypatch.setitem(compiled._LIMITS, "max_lexer_states", 3000)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    schema = {"type": "string", "pattern": HARD}
    output, numbers = tokenizer.encode('"the cat sat on a mat', add_special=False), random.Random(0)
    law, made = law_of(grammars, schema), 0
    greedy = law._start.deep_copy()  # which shares what the first matcher builds
    expected = fresh_mask(grammars, schema, output)
    for _ in range(20):
        path: tuple[int, ...] = ()
        for _ in range(6):
            path += (numbers.choice(allowed(law, output, path)),)
        before = law._start
        law._known.clear()
        assert allowed(law, output) == expected
        made += law._start is not before
    assert made > 0
    greedy.consume_tokens(output)
    greedy.compute_bitmask()
    assert greedy.is_error(), "negative control: the limit was reached"


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "format": "time"}, "23:59:59.5Z", "23:59:60Z"),
        ({"type": "string", "format": "time"}, "08:07:04+04:34", "08:07:04"),
        ({"type": "string", "format": "date-time"}, "2024-02-28T00:00:00Z", "2024-02-30T00:00:00Z"),
        ({"enum": [{"format": "time"}, "x"]}, "x", "23:59:59Z"),  # a value, no schema
        ({"type": "string", "format": "time", "pattern": "^1"}, "11:00:00Z", "21:00:00Z"),
    ],
)
def test_times_are_those_that_every_validator_takes(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, object], right: str, wrong: str
) -> None:
    def allows(text: str) -> bool:
        law, output = law_of(grammars, schema), list[int]()
        for token in tokenizer.encode(json.dumps(text), False):
            if token not in allowed(law, output):
                return False
            output.append(token)
        return True

    assert allows(right)
    assert not allows(wrong)
