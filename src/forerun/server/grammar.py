"""`response_format` and tools that must be called: JSON schemas as a rule on the law, node by node, by llguidance.

The mask after a text is part of the law that the target's token is drawn from. So it is exact under speculation: a node
is judged by the grammar along its own path, and a drafted token that the grammar rules out cannot be accepted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forerun.errors import InvalidInput, MissingDependency
from forerun.server.schemas import FunctionSpec, ResponseFormat
from forerun.verify.processors import AllowByState, Allowed

if TYPE_CHECKING:
    from forerun.law_processor import LawProcessor
    from forerun.models.load.tokenizer import Tokenizer


class Grammars:
    """Compiles response formats for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._known: Any = None
        self._compile = lru_cache(maxsize=64)(self._compiled)

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
        return [AllowByState(self._compile(json.dumps(schema, sort_keys=True)))]

    def _compiled(self, schema: str) -> _State:
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
        matcher = guidance.LLMatcher(self._known, grammar)
        return _State(matcher, sorted(self._tokenizer.eos_ids))


class _State:
    """Implements forerun.verify.processors.State: a matcher after some text, never changed."""

    def __init__(self, matcher: Any, ends: Sequence[int]) -> None:
        self._matcher, self._ends = matcher, ends
        self._allowed: Allowed = None

    def allowed(self) -> Allowed:
        if self._allowed is None:
            if self._matcher.is_stopped():
                self._allowed = list(self._ends)
            else:
                bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
                self._allowed = torch.from_numpy(bits.copy())
        return self._allowed

    def after(self, token: int) -> _State:
        copied = self._matcher.deep_copy()
        if not copied.is_stopped():
            copied.consume_token(token)
        return _State(copied, self._ends)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        what = "response_format needs the package llguidance; pip install 'forerun[serve]'"
        raise MissingDependency(what) from None
    return llguidance
