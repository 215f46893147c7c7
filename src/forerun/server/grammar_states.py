"""JSON schemas as a rule on the law, node by node: what the process that has the engine makes of `SchemaText`.

The mask after a text is part of the law that the target's token is drawn from. So it is exact under speculation: a node
is judged by the grammar along its own path, and a drafted token that the grammar rules out cannot be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forerun.server.grammar import Grammars, SchemaText
from forerun.verify.processors import AllowByState, Allowed

if TYPE_CHECKING:
    from forerun.law_processor import LawProcessor
    from forerun.models.load.tokenizer import Tokenizer


class GrammarStates:
    """Puts real processors in the place of schemas, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._grammars, self._ends = Grammars(tokenizer, vocab_size), sorted(tokenizer.eos_ids)
        self._start = lru_cache(maxsize=64)(self._new_start)

    def real(self, processors: Sequence[LawProcessor]) -> tuple[LawProcessor, ...]:
        """The same processors, those that stand for a schema made real; raises where a schema cannot be used."""
        return tuple(
            AllowByState(self._start(each.text)) if isinstance(each, SchemaText) else each
            for each in processors
        )

    def _new_start(self, schema: str) -> MatcherState:
        return MatcherState(self._grammars.matcher_of(schema), self._ends)


class MatcherState:
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

    def after(self, token: int) -> MatcherState:
        copied = self._matcher.deep_copy()
        if not copied.is_stopped():
            copied.consume_token(token)
        return MatcherState(copied, self._ends)
