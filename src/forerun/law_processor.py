"""The seam by which callers change the law of the next token: a function of the text so far. No torch here.

    def no_token_twice(prefix: Prefix, logits: Tensor) -> Tensor:
        logits[prefix.ids] = -torch.inf
        return logits

    llm.generate("Once", processors=[no_token_twice])

`forerun.verify.processors` calls them and has ready-made ones: `Allow` for masks, `AllowByState` for grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prefix:
    """The text before the token in question, as it would be if the node were accepted. To be read only."""

    committed: Sequence[int]  # prompt and output: written for good
    prompt_length: int  # how many of them are the prompt
    path: Sequence[int] = ()  # drafted tokens on the way from there to this node

    @property
    def ids(self) -> list[int]:
        """All of it."""
        return [*self.committed, *self.path]

    @property
    def output(self) -> tuple[int, ...]:
        """All of it after the prompt."""
        return (*self.committed[self.prompt_length :], *self.path)


class LawProcessor(Protocol):
    """Changes what may follow a text.

    It is called for every node of every tree with the node's own path, also for texts that are drafted and never
    written, in any order and more than once: what it returns must be a function of the prefix and the logits. It
    is not called where the path holds a token that was ruled out. It comes after penalties and bans, before
    temperature.
    """

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        """The logits [V] fp32 to use, -inf = impossible; the ones given may be changed and returned."""
        ...
