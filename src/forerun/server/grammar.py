"""`response_format` and tools that must be called: JSON schemas, checked by llguidance. No torch here.

The server's front checks a schema and hands its text on, as `SchemaText`; the process that has the engine makes the
rule on the law of it (`forerun.server.grammar_states`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from forerun.errors import InvalidInput, MissingDependency

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.law_processor import LawProcessor, Prefix
    from forerun.models.load.tokenizer import Tokenizer
    from forerun.server.schemas import FunctionSpec, ResponseFormat


@dataclass(frozen=True, slots=True)
class SchemaText:
    """Stands for the processor that holds a text to a JSON schema, which the engine's side puts in its place."""

    text: str

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        raise AssertionError("the engine's side puts the real processor here")


class Grammars:
    """Checks response formats for one tokenizer, and hands them on as texts."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._known: Any = None
        self.matcher_of = lru_cache(maxsize=64)(self._new_matcher)  # by the text of a schema; never changed

    def processors_for(self, wanted: ResponseFormat | None) -> list[LawProcessor]:
        """What holds a text to the format asked for; nothing for plain text."""
        if wanted is None or wanted.type == "text":
            return []
        if wanted.type == "json_object":
            schema: Any = {"type": "object"}
        elif wanted.json_schema is None:
            raise InvalidInput("response_format of type json_schema needs a json_schema with a schema")
        else:
            schema = wanted.json_schema.schema_
        return self.held_to(schema)

    def processors_for_call(self, tools: Sequence[FunctionSpec]) -> list[LawProcessor]:
        """What holds a text to a call of one of these functions."""
        calls = [
            {
                "type": "object", "required": ["name", "arguments"], "additionalProperties": False,
                "properties": {"name": {"const": tool.name}, "arguments": tool.parameters or {"type": "object"}},
            }
            for tool in tools
        ]  # fmt: skip
        return self.held_to({"anyOf": calls})

    def held_to(self, schema: Any) -> list[LawProcessor]:
        """What holds a text to a JSON schema; raises where the schema cannot be used."""
        text = json.dumps(schema, sort_keys=True)
        self.matcher_of(text)
        return [SchemaText(text)]

    def _new_matcher(self, schema: str) -> Any:
        guidance = _llguidance()
        if self._known is None:
            end = min(self._tokenizer.eos_ids)
            self._known = guidance.LLTokenizer(
                self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=end
            )
        try:
            grammar = guidance.LLMatcher.grammar_from_json_schema(schema)
            problem = guidance.LLMatcher.validate_grammar(grammar, self._known)
        except ValueError as error:
            problem = str(error) or "no reason given"
        if problem:
            raise InvalidInput(f"the JSON schema cannot be used: {problem.splitlines()[0][:200]}")
        return guidance.LLMatcher(self._known, grammar)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        what = "response_format needs the package llguidance; pip install 'forerun[serve]'"
        raise MissingDependency(what) from None
    return llguidance
