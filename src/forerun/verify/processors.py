"""Law processors: the caller's functions on logits, applied node by node; ready-made ones for masks and grammars.

`Allow(rule)` keeps what a rule allows after a prefix. `AllowByState(start)` does the same for rules that carry a state
from token to token, such as a grammar: a state is made once for every prefix, and nodes of a tree share those of
their ancestors.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.core.checks import shown
from forerun.core.errors import CannotSample, brief
from forerun.core.params import LawProcessor, Prefix
from forerun.core.types import Seq

# token ids; or a mask [V] of booleans; or one bit per token, 32 to an int32, lowest first; None = everything
Allowed = Sequence[int] | Tensor | None
IMPOSSIBLE = -math.inf
LAG = 256  # committed tokens of which AllowByState keeps the states: more than a round that is undone


def process_block(block: Tensor, seq: Seq, paths: Sequence[Sequence[int]]) -> dict[int, CannotSample]:
    """Put the rows [m, V] of one sequence through its processors, in place; rows that failed, and why.

    Parents come before children. A node whose path was ruled out above it is left alone: no verifier gets there, and
    a grammar has no state for it. A row that failed allows no token, so it matters only where a path reaches it.
    """
    failures: dict[int, CannotSample] = {}
    row_of: dict[tuple[int, ...], int | None] = {}  # by path; None = ruled out
    for row, path in enumerate(map(tuple, paths)):
        above = row_of.get(path[:-1], -1) if path else -1
        if above is None or (above >= 0 and block[above, path[-1]] == IMPOSSIBLE):
            row_of[path] = None
            continue
        row_of[path] = row
        prefix = Prefix(seq.tokens, seq.prompt_length, path)
        try:
            _process(block[row], prefix, seq.params.processors)
        except Exception as error:  # the caller's code may raise anything
            block[row] = IMPOSSIBLE
            failures[row] = error if isinstance(error, CannotSample) else _failed(error)
    return failures


def _failed(error: Exception) -> CannotSample:
    reason = brief(error) or "no reason given"
    return CannotSample(f"a processor failed ({type(error).__name__}: {reason}); fix or remove it")


def _process(row: Tensor, prefix: Prefix, processors: Sequence[LawProcessor]) -> None:
    """Put one row [V] through all of them, in place."""
    for process in processors:
        if isinstance(process, Masks):
            keep_allowed(row, process.allowed(prefix))
            continue
        after = process(prefix, row.clone())
        if not isinstance(after, Tensor) or after.shape != row.shape:
            got = tuple(after.shape) if isinstance(after, Tensor) else type(after).__name__
            raise TypeError(f"{shown(process)} returned {got}, not logits {tuple(row.shape)}")
        row.copy_(after)
        if bool((row.isnan() | (row == math.inf)).any()):
            raise ValueError(f"{shown(process)} returned NaN or +inf")


class Masks:
    """A processor that rules tokens out and changes nothing else: its logits need no copy and no check."""

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        return keep_allowed(logits, self.allowed(prefix))

    @abstractmethod
    def allowed(self, prefix: Prefix) -> Allowed:
        """What may follow."""


class Allow(Masks):
    """A processor that keeps what a rule allows: `Allow(lambda prefix: [5, 6])`."""

    def __init__(self, rule: Callable[[Prefix], Allowed]) -> None:
        self.rule = rule

    def allowed(self, prefix: Prefix) -> Allowed:
        return self.rule(prefix)


class State(Protocol):
    """The state of a grammar after a prefix. Never changed: `after` returns another."""

    def allowed(self) -> Allowed:
        """What may follow here."""

    def after(self, token: int) -> State:
        """The state when an allowed token has followed."""


class AllowByState(Masks):
    """A processor that follows an output through states; committed tokens and drafts share them.

    The state after a prefix comes from that of the prefix without its last token, which is nearly always cached: a
    node's parent was seen just before, and a round starts where the last one ended. The latest `keep` are held.
    Of a long output only the last tokens are looked at: one state stands for all before them.
    """

    def __init__(self, start: State, keep: int = 1024) -> None:
        self.keep = keep
        self._start = self._first = start  # of the output, and behind the trunk
        self._trunk: Sequence[int] = ()  # the beginning of the output, read for good
        self._compared: tuple[Sequence[int] | None, int] = None, 0  # whose beginning it is, and how long that was
        self._states: OrderedDict[tuple[int, ...], State] = OrderedDict()  # by the tokens behind the trunk

    def allowed(self, prefix: Prefix) -> Allowed:
        return self.state(prefix).allowed()

    def state(self, prefix: Prefix) -> State:
        """The state after a prefix."""
        behind = self._behind_trunk(prefix)
        known = next((size for size in range(len(behind), 0, -1) if behind[:size] in self._states), 0)
        state = self._states[behind[:known]] if known else self._first
        for end in range(known + 1, len(behind) + 1):
            state = self._states[behind[:end]] = state.after(behind[end - 1])
        if behind:
            self._states.move_to_end(behind)
        while len(self._states) > self.keep:
            self._states.popitem(last=False)
        return state

    def _behind_trunk(self, prefix: Prefix) -> tuple[int, ...]:
        """The output behind the trunk. Once a round the trunk is compared, and grows; `LAG` tokens may be undone."""
        committed, start = prefix.committed, prefix.prompt_length
        if self._compared[0] is not committed or self._compared[1] != len(committed):
            if self._trunk and committed[start : start + len(self._trunk)] != self._trunk:
                self._trunk, self._first = (), self._start
                self._states.clear()
            if len(committed) - start - len(self._trunk) > 2 * LAG:
                self._grow(tuple(committed[start + len(self._trunk) : -LAG]))
                self._trunk = committed[start:-LAG]
            self._compared = committed, len(committed)
        return (*committed[start + len(self._trunk) :], *prefix.path)

    def _grow(self, more: tuple[int, ...]) -> None:
        """The trunk goes on with these tokens; what is known behind them stays known."""
        for token in more:
            self._first = self._first.after(token)
        size = len(more)
        left = ((key[size:], each) for key, each in self._states.items() if len(key) > size and key[:size] == more)
        self._states = OrderedDict(left)


def keep_allowed(logits: Tensor, allowed: Allowed) -> Tensor:
    """The same logits [V], in which everything that is not allowed has become impossible."""
    if allowed is None:
        return logits
    size = len(logits)
    if isinstance(allowed, Tensor) and allowed.dtype == torch.int32:
        bits = np.unpackbits(~allowed.cpu().numpy().view(np.uint8), bitorder="little")
        banned = bits.view(np.bool_)[:size]
    elif isinstance(allowed, Tensor) and allowed.dtype == torch.bool:
        banned = ~allowed[:size].cpu().numpy()
    else:
        ids = np.asarray(allowed, dtype=np.int64)
        banned = np.ones(size, dtype=np.bool_)
        banned[ids[ids < size]] = False
    if logits.device.type == "cpu":  # by numpy: torch would start threads for it, which takes longer than the work
        row = logits.numpy()
        np.putmask(row[: len(banned)], banned, IMPOSSIBLE)
        row[len(banned) :] = IMPOSSIBLE  # padding of the vocabulary
        return logits
    logits[len(banned) :] = IMPOSSIBLE
    logits[: len(banned)].masked_fill_(torch.from_numpy(banned).to(logits.device), IMPOSSIBLE)
    return logits
