"""LawProcessor: a caller's logits processor, a function of the tokens so far and the logits. No torch here.

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
    """The tokens before the one in question, as they would be if the node were accepted. Read-only."""

    committed: Sequence[int]  # prompt and output: final
    prompt_length: int  # how many of them are the prompt
    path: Sequence[int] = ()  # drafted tokens from there to this node

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return [*self.committed, *self.path]

    @property
    def output(self) -> tuple[int, ...]:
        """All tokens after the prompt."""
        return (*self.committed[self.prompt_length :], *self.path)


class LawProcessor(Protocol):
    """Changes the logits of the token after a prefix.

    It is called for every node of every tree with the node's own path, also for drafts that are rejected,
    in any order and more than once: what it returns must be a function of the prefix and the logits. It
    is not called where the path holds a token that was ruled out. It comes after penalties and bans, before
    temperature.
    """

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        """The logits [V] fp32 to use, -inf = impossible; the ones given may be changed and returned."""
        ...
