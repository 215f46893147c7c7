"""GrammarLaw: holds one text to a grammar, node by node.

The mask after a text is part of the law that the target's token is drawn from. So it is exact under speculation: a node
is judged by the grammar along its own path, and a drafted token that the grammar rules out cannot be accepted.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.core.errors import GrammarFailed, brief
from forerun.core.params import Forces, Prefix
from forerun.verify.processors import Allowed, Masks

_NO_TEXT = "NoExtension"  # llguidance's word where nothing can follow
KEPT = 256  # masks, those of a round among them


class GrammarLaw(Masks, Forces):
    """Implements forerun.core.params.LawProcessor, for the nodes of one text.

    Matchers of llguidance only ever read on, since masks behind a rollback were seen to be wrong: one reads what is
    committed, and a copy of it reads the path of a draft. What a lexer has built for drafts beside the text counts
    against its limits. So where it meets one, a new matcher reads the path alone, and decides: whether a text can go
    on does not depend on what was drafted.
    """

    def __init__(self, start: Any, make: Callable[[], Any], ends: frozenset[int]) -> None:
        self._start, self._make, self._ends = start, make, ends  # copies share a lexer
        self._text, self._draft = _Reader(start), _Reader(start)
        self._known: OrderedDict[tuple[int, ...], Tensor | GrammarFailed] = OrderedDict()  # by output

    def allowed(self, prefix: Prefix) -> Allowed:
        output = prefix.output
        if not self._ends.isdisjoint(output):  # it is complete: whoever ignores the end reads it again
            return sorted(self._ends)
        found = self._mask(output, len(prefix.path))
        if isinstance(found, GrammarFailed):
            raise found.with_traceback(None)
        return found

    def forced(self, prefix: Prefix) -> Sequence[int]:
        output = prefix.output
        return self._read(output, len(prefix.path)).forced() if self._ends.isdisjoint(output) else ()

    def choice(self, prefix: Prefix, top: int) -> int | None:
        """Where tokens are forced, a mask has the first of them alone; elsewhere it has those that can be read."""
        output, drafted = prefix.output, len(prefix.path)
        if not self._ends.isdisjoint(output):
            return None
        reader = self._read(output, drafted)
        token = reader.choice(top)
        if token is None and reader.is_lexer_full():
            self._start_over(self._make())
            token = self._read(output, drafted).choice(top)
        return token

    def _mask(self, output: tuple[int, ...], drafted: int) -> Tensor | GrammarFailed:
        found = self._known.get(output)
        if found is None:
            found = self._known[output] = self._mask_after(output, drafted)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return found

    def _mask_after(self, output: tuple[int, ...], drafted: int) -> Tensor | GrammarFailed:
        """One bit per token [V / 32] int32; or why there is none."""
        reader = self._read(output, drafted)
        if (mask := reader.mask()) is None and reader.is_lexer_full():
            self._start_over(self._make())
            reader = self._read(output, drafted)
            mask = reader.mask()
        if mask is not None:
            return mask
        failed = GrammarFailed(f"the answer cannot go on: {reason_of(reader.matcher)}; simplify what it must match")
        self._start_over(self._make() if reader.is_lexer_full() else self._start)  # an error is for good
        return failed

    def _read(self, output: tuple[int, ...], drafted: int) -> _Reader:
        """A matcher that has read the output, whose last tokens are drafted."""
        text = output[: len(output) - drafted]
        if len(self._text.output) < len(self._draft.output) and self._draft.is_before(text):
            self._text, self._draft = self._draft, self._text  # what was accepted has been read
        if not self._text.is_before(text):
            self._text = _Reader(self._start)
        self._text.read(text)
        if not drafted:
            return self._text
        if not self._draft.is_before(output) or len(self._draft.output) < len(text):
            self._draft = _Reader(self._text.matcher, text)
        self._draft.read(output)
        return self._draft

    def _start_over(self, start: Any) -> None:
        self._start, self._text, self._draft = start, _Reader(start), _Reader(start)


class _Reader:
    """A copy of a matcher, and what it has read of an output."""

    def __init__(self, matcher: Any, output: tuple[int, ...] = ()) -> None:
        self.matcher, self.output = matcher.deep_copy(), output
        self._forced: Sequence[int] | None = None  # behind it; None = not asked

    def is_before(self, output: tuple[int, ...]) -> bool:
        return output[: len(self.output)] == self.output

    def read(self, output: tuple[int, ...]) -> None:
        if len(output) > len(self.output):
            self.matcher.consume_tokens(list(output[len(self.output) :]))
            self.output, self._forced = output, None

    def forced(self) -> Sequence[int]:
        if self._forced is None:
            self._forced = self.matcher.compute_ff_tokens()
        return self._forced

    def choice(self, top: int) -> int | None:
        """As GrammarLaw's; the end of the text is never known without a mask."""
        if forced := self.forced():
            return forced[0]
        return top if self.matcher.validate_tokens([top]) == 1 else None

    def mask(self) -> Tensor | None:
        """None where the matcher failed, which a stopped matcher must not be taken for: that one allows the end."""
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.int32)
        return None if self.matcher.is_error() else torch.from_numpy(bits.copy())

    def is_lexer_full(self) -> bool:
        """Has the matcher failed by what its lexer has built, for this path and for others?"""
        return str(self.matcher.get_error()).startswith("lexer error")


def reason_of(matcher: Any) -> str:
    told = re.split(r"\s*<(?:state|non-verbose/)>", str(matcher.get_error()))[0]
    return "no text matches the schema" if told.startswith(_NO_TEXT) else brief(told) or "no reason given"
