"""Patterns, choices, grammars and tags: every text matches, under every drafter; the names of others; refusals."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance")

from forerun.core.errors import InvalidInput
from forerun.core.params import Prefix, SamplingParams, Structure
from forerun.core.types import Request
from forerun.verify.grammar.compiled import Grammars
from tests.exactness.harness import run
from tests.structure.test_thinking import engine_of, tokenizer

LARK = 'start: "x" sum\nsum: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[0-9]{1,3}/'
EBNF = 'root ::= "x" num ("+" num)+\nnum ::= [0-9] | [0-9] [0-9]'
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TAGS = {
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"},
                   {"begin": "<f=b>", "schema": {"const": 7}, "end": "."}],
    "triggers": ["<f="],
}  # fmt: skip
NEWER = {"type": "triggered_tags", "triggers": TAGS["triggers"], "tags": [
    {"begin": one["begin"], "content": {"type": "json_schema", "json_schema": one["schema"]}, "end": one["end"]}
    for one in TAGS["structures"]
]}  # fmt: skip
SUM = r"x\d{1,3}(\+\d{1,3}){1,3}"
KINDS: dict[str, tuple[dict[str, Any], str]] = {  # and what all of a text matches
    "regex": ({"regex": r"[a-c]{2,4}-[0-9]+x"}, r"[a-c]{2,4}-[0-9]+x"),
    "choice": ({"choice": ["yes", "no", 'a "quoted"\nline', "yes!"]}, r'yes|no|a "quoted"\nline|yes!'),
    "lark": ({"grammar": LARK}, SUM),
    "ebnf": ({"grammar": EBNF}, r"x\d\d?(\+\d\d?)+"),
    "json": ({"json": json.dumps(SCHEMA)}, r'\{"a": ?[12]\}'),
}
SOME = ("none", "ngram", "recycling", "draft_model", "ngram+eagle3", "medusa", "layer_skip")


def asked(name: str, temperature: float) -> list[Request]:
    how = {"max_tokens": 60, "temperature": temperature, "structured_outputs": KINDS[name][0]}
    return [Request((65 + i,), SamplingParams(seed=i, **how)) for i in range(8)]


@cache
def written(name: str, drafter: str, temperature: float) -> list[list[int]]:
    return run(engine_of("plain", drafter), asked(name, temperature))[0]


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", SOME)
def test_every_text_matches_and_drafting_changes_none(drafter: str, temperature: float) -> None:
    own = tokenizer("plain")
    for name, (_, pattern) in KINDS.items():
        tokens = written(name, drafter, temperature)
        assert tokens == written(name, "none", temperature)
        texts = [own.decode(text) for text in tokens if len(text) < 60]
        assert texts, name
        for text in texts:
            assert re.fullmatch(pattern, text), (name, text)


def test_tags_hold_structured_parts_of_a_free_text() -> None:
    own = tokenizer("plain")
    params = SamplingParams(structured_outputs={"structural_tag": TAGS})
    held = Grammars(own, own.vocab_size, own.eos_ids).compile(Request((1,), params)).params.processors[-1]

    def allowed(text: str) -> str:
        """The letters that may follow."""
        prefix = Prefix([1, *own.encode(text, False)], 1)
        kept = (held(prefix, torch.zeros(own.vocab_size)) == 0).nonzero()[:, 0].tolist()
        return "".join(sorted(own.decode([token]) for token in kept))

    assert len(allowed("")) > 90
    assert len(allowed("any < text\n")) > 90
    assert allowed("any <f=") == "ab"
    assert allowed("any <f=a>") == "{"
    assert allowed('any <f=a>{"a": ') == "12"
    assert allowed('any <f=a>{"a": 1}') == "<"
    assert len(allowed('any <f=a>{"a": 1}</f>')) > 90
    assert allowed('any <f=a>{"a": 1}</f> more <f=b>') == "7"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"guided_regex": "a+"}, "regex"),
        ({"guided_choice": ["a", "b"]}, "choice"),
        ({"guided_json": SCHEMA}, "json_schema"),
        ({"guided_grammar": LARK}, "grammar"),
        ({"structured_outputs": {"json_object": True}}, "json_schema"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, "structural_tag"),
        ({"response_format": {"type": "regex", "regex": "a+"}}, "regex"),
        ({"response_format": {"type": "choice", "choice": ["a"]}}, "choice"),
        ({"response_format": {"type": "grammar", "grammar": EBNF}}, "grammar"),
        ({"response_format": {"type": "structural_tag", **TAGS}}, "structural_tag"),
        ({"response_format": {"type": "structural_tag", "format": NEWER}}, "structural_tag"),
    ],
)
def test_the_names_of_others(values: dict[str, Any], kind: str) -> None:
    structure = SamplingParams.from_dict(values).structure
    assert isinstance(structure, Structure)
    assert structure.kind == kind
    own = tokenizer("plain")
    Grammars(own, own.vocab_size, own.eos_ids).compile(Request((1,), SamplingParams.from_dict(values)))


def test_the_newer_form_of_tags_says_the_same() -> None:
    older = SamplingParams(structured_outputs={"structural_tag": TAGS}).structure
    given = json.dumps({"type": "structural_tag", "format": NEWER})
    assert SamplingParams(structured_outputs={"structural_tag": given}).structure == older
    for wrong in ({**NEWER, "at_least_one": True}, {**NEWER, "type": "sequence"}, {**NEWER, "tags": [{"begin": "<f="}]},
                  {**NEWER, "triggers": None}, {**NEWER, "tags": []}, "x"):  # fmt: skip
        with pytest.raises(InvalidInput, match="structural_tag"):
            _ = SamplingParams(structured_outputs={"structural_tag": {"format": wrong}}).structure


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"guided_regex": "(a"}, "regex cannot be used"),
        ({"guided_regex": ""}, "not an empty one"),
        ({"guided_regex": "a" * 300_000}, "at most 200000"),
        ({"guided_choice": []}, "choose from"),
        ({"guided_choice": ["a", ""]}, "choose from"),
        ({"guided_grammar": "start: undefined_rule"}, "grammar cannot be used"),
        ({"guided_grammar": "no grammar at all"}, "grammar cannot be used"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "give one of them"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "give one of them"),
        ({"structured_outputs": {"structural_tag": {"structures": [], "triggers": []}}}, "structural_tag"),
        ({"structured_outputs": {"structural_tag": {**TAGS, "triggers": ["<x"]}}}, "trigger"),
        ({"structured_outputs": {"json": "{"}}, "JSON"),
        ({"structured_outputs": {"rgex": "a"}}, "regex"),
        ({"response_format": {"type": "regex"}}, "needs a field 'regex'"),
    ],
)
def test_what_cannot_be_matched_is_one_line(values: dict[str, Any], said: str) -> None:
    own = tokenizer("plain")
    with pytest.raises(InvalidInput, match=re.escape(said)) as caught:
        Grammars(own, own.vocab_size, own.eos_ids).compile(Request((1,), SamplingParams.from_dict(values)))
    assert "\n" not in str(caught.value)


def test_forced_tokens_are_drafted_for_nothing() -> None:
    """Keys and marks of a schema come in rounds of several tokens, with no drafter that costs."""
    schema = {
        "type": "object", "properties": {name: {"enum": [1, 2]} for name in ("first_key", "second_key", "third_key")},
        "required": ["first_key", "second_key", "third_key"], "additionalProperties": False,
    }  # fmt: skip
    how = {"disable_any_whitespace": True, "json": schema}
    asked_ = Request((65,), SamplingParams(max_tokens=90, structured_outputs=how))
    counts = {}
    for drafter in ("none", "ngram"):
        engine = engine_of("plain", drafter)
        (tokens,), _ = run(engine, [asked_])
        counts[drafter] = tokens, engine.stats.rounds
        assert json.loads(tokenizer("plain").decode(tokens)).keys() == schema["properties"].keys()
    assert counts["none"][0] == counts["ngram"][0]
    assert counts["ngram"][1] < 0.5 * counts["none"][1]
