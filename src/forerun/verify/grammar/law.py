"""GrammarLaw: holds one text to a grammar, node by node.

The mask after a text is part of the law that the target's token is drawn from. So it is exact under speculation: a node
is judged by the grammar along its own path, and a drafted token that the grammar rules out cannot be accepted.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.core.errors import GrammarFailed, brief
from forerun.core.params import Prefix
from forerun.verify.processors import Allowed, Masks

_NO_TEXT = "NoExtension"  # llguidance's word where nothing can follow
KEPT = 256  # masks: those of a round, and of a drafter that asked before


class GrammarLaw(Masks):
    """Implements forerun.core.params.LawProcessor, for the nodes of one text.

    One matcher of llguidance goes from node to node: back to where the paths part, then on. What it has built for
    drafts beside the text counts against its limits. So where it meets one, a new matcher reads the path alone, and
    decides: whether a text can go on does not depend on what was drafted.
    """

    def __init__(self, start: Any, make: Callable[[], Any], ends: frozenset[int]) -> None:
        self._start, self._matcher = start, start.deep_copy()  # which share a lexer
        self._make, self._ends = make, ends
        self._read: tuple[int, ...] = ()  # what the matcher has read of the output
        self._known: OrderedDict[tuple[int, ...], Tensor | GrammarFailed] = OrderedDict()  # by output

    def allowed(self, prefix: Prefix) -> Allowed:
        output = prefix.output
        if not self._ends.isdisjoint(output):  # it is complete: whoever ignores the end reads it again
            return sorted(self._ends)
        found = self._mask(output)
        if isinstance(found, GrammarFailed):
            raise found.with_traceback(None)
        return found

    def forced(self, prefix: Prefix) -> list[int]:
        """The tokens that must follow: the mask that is made here is the one that the coming round asks for."""
        output = prefix.output
        if not self._ends.isdisjoint(output) or isinstance(self._mask(output), GrammarFailed):
            return []
        if self._read != output and self._compute(output) is None:
            self._go_back()
            return []
        return list(self._matcher.compute_ff_tokens())

    def _mask(self, output: tuple[int, ...]) -> Tensor | GrammarFailed:
        found = self._known.get(output)
        if found is None:
            found = self._known[output] = self._mask_after(output)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return found

    def _mask_after(self, output: tuple[int, ...]) -> Tensor | GrammarFailed:
        """One bit per token [V / 32] int32; or why there is none."""
        mask = self._compute(output)
        if mask is None and self._is_lexer_full():
            self._start = self._make()
            self._go_back()
            mask = self._compute(output)
        if mask is not None:
            return mask
        failed = GrammarFailed(f"the answer cannot go on: {reason_of(self._matcher)}; simplify what it must match")
        if self._is_lexer_full():
            self._start = self._make()
        self._go_back()  # for other paths: an error is for good
        return failed

    def _compute(self, output: tuple[int, ...]) -> Tensor | None:
        """None where the matcher failed, which a stopped matcher must not be taken for: that one allows the end."""
        matcher, shared = self._matcher, min(len(self._read), len(output))
        while self._read[:shared] != output[:shared]:
            shared -= 1
        matcher.rollback(len(self._read) - shared)
        matcher.consume_tokens(list(output[shared:]))
        self._read = output
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        return None if matcher.is_error() else torch.from_numpy(bits.copy())

    def _is_lexer_full(self) -> bool:
        """Has the matcher failed by what its lexer has built, for this path and for others?"""
        return str(self._matcher.get_error()).startswith("lexer error")

    def _go_back(self) -> None:
        self._matcher, self._read = self._start.deep_copy(), ()


def reason_of(matcher: Any) -> str:
    told = re.split(r"\s*<(?:state|non-verbose/)>", str(matcher.get_error()))[0]
    return "no text matches the schema" if told.startswith(_NO_TEXT) else brief(told) or "no reason given"
