"""Generated schemas: whatever a grammar allows validates, and what models write by it, drafted as plain."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forerun import LLM
from forerun.models.load.tokenizer import Tokenizer
from forerun.verify.grammar.compiled import GrammarLaw, Grammars
from tests.structure.conftest import law_of
from tests.structure.generated import check, read, schema_of, settings_of, small_model


@pytest.mark.slow(keep=15)
@pytest.mark.parametrize("seed", range(40))
def test_texts_drawn_from_a_generated_schema_validate(
    seed: int, grammars: Grammars, drawn: Callable[[GrammarLaw, int], str]
) -> None:
    schema = schema_of(seed)
    text = drawn(law_of(grammars, schema), seed)
    check(text, schema)
    found = read(text)
    if isinstance(found, dict) and "properties" in schema:
        known = [name for name in schema["properties"] if name in found]
        assert [name for name in found if name in known] == known, "in the order of the schema"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> LLM:
    """It drafts in every round."""
    fixed = {"drafter": "ngram", "controller": "fixed", "budget": 6}
    folder = small_model(tmp_path_factory.mktemp("small"), tokenizer)
    return LLM(folder, threads=1, max_batch=8, max_length=1024, speculative_config=fixed)


def test_answers_of_a_small_model_validate_drafted_as_plain(small: LLM, tokenizer: Tokenizer) -> None:
    schemas = [schema_of(seed) for seed in range(16)]
    each = [settings_of(schema, i, tokenizer) for i, schema in enumerate(schemas)]
    prompts = [f"Form {i}." for i in range(len(schemas))]
    plain, drafted = small.generate(prompts, each, drafter="none"), small.generate(prompts, each)
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
    assert sum(done.accepted for done in drafted) > 0
    for schema, done in zip(schemas, plain, strict=True):
        assert (done.finish_reason, done.error) == ("stop", None)
        check(done.text, schema)
    wrong = 0
    for schema, done in zip(schemas[1:], plain, strict=False):  # negative control: of the schema beside it
        try:
            check(done.text, schema)
        except ValueError:
            wrong += 1
    assert wrong > len(schemas) // 2
