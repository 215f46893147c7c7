"""What a simulated device takes, and what drafts gain: seconds of passes and drafts, acceptance, menus of heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from forerun.core.types import Form
from forerun.drafters.device.features import PASSES
from forerun.models.cuda.plan import MAX_ROWS, ROW_SIZES, round_up

# milliseconds of a pass of an 8B by rows: docs/benchmarks.md, "More than 64 rows" and "GPU, one H200"
H200_8B = {1: 4.1, 8: 4.4, 16: 4.6, 32: 5.0, 48: 5.2, 64: 5.4, 96: 5.7, 128: 6.1, 160: 7.0, 192: 7.6, 224: 8.5,
           256: 9.0, 384: 12.3, 512: 15.6, 768: 22.5, 1024: 29.5}  # fmt: skip

SIBLING = 0.4  # times the rate, of what its better siblings leave: how likely the next sibling is accepted


def accepted_of(form: Form, rate: float) -> float:
    """Expected accepted tokens of a tree of this form, whose nodes are its likeliest."""
    level, found = [1.0], list[float]()
    for _ in range(form.depth):
        ranks = [rate]
        while len(ranks) < form.width:
            ranks.append((1.0 - sum(ranks)) * SIBLING * rate)
        level = sorted((above * rank for above in level for rank in ranks), reverse=True)[: form.width]
        found += level
    return sum(sorted(found, reverse=True)[: form.nodes])


@lru_cache(maxsize=4096)
def level_rate(form: Form, rate: float) -> float:
    """The acceptance rate of every level of a chain as deep as this form that gains as much."""
    mean = accepted_of(form, rate)
    if mean == 0.0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        below = sum(middle**depth for depth in range(1, form.depth + 1)) < mean
        low, high = (middle, high) if below else (low, middle)
    return high


def draw_accepted(form: Form, rate: float, most: int, draw: Callable[[int], float]) -> int:
    """How many tokens of a tree are accepted: a draw for each level, whose mean is what such a tree gains."""
    each, accepted = level_rate(form, round(rate, 3)), 0
    while accepted < most and draw(accepted) < each:
        accepted += 1
    return accepted


@dataclass(frozen=True, slots=True)
class Speeds:
    passes: Mapping[int, float]  # rows -> seconds
    level: float = 1.1e-4  # of a draft, at batch 1
    slope: float = 0.03  # of that, more for each further sequence
    # the head's reading of prompts: not measured, but its 0.1e9 multiplications at the rate of the target's full passes
    prompt_row: float = 4e-7
    prompt_pass: float = 3e-5  # and the start of a handful of kernels
    host: float = 1.5e-4  # of launching a round, and the same of ending it
    host_row: float = 1.2e-5  # and of every sequence in it
    context: float = 0.0  # of every row of a prompt, for every token before it

    def of_pass(self, rows: int) -> float:
        """Of the next size that passes have; of several where one does not take all rows."""
        whole, rest = divmod(rows, MAX_ROWS)
        spent = whole * self.passes[MAX_ROWS]
        return spent + (self._of_size(round_up(rest, ROW_SIZES)) if rest else 0.0)

    def _of_size(self, rows: int) -> float:
        if rows in self.passes:
            return self.passes[rows]
        low = max(size for size in self.passes if size < rows)
        high = min(size for size in self.passes if size > rows)
        share = (rows - low) / (high - low)
        return self.passes[low] * (1 - share) + self.passes[high] * share

    def curve(self) -> dict[int, float]:
        return {rows: self._of_size(rows) for rows in ROW_SIZES}

    def of_reading(self, rows: int) -> float:
        whole, rest = divmod(rows, MAX_ROWS)
        padded = whole * MAX_ROWS + (round_up(rest, PASSES) if rest else 0)
        return self.prompt_pass * (whole + (rest > 0)) + self.prompt_row * padded

    def of_draft(self, form: Form, batch: int) -> float:
        return self.level * form.depth * (1.0 + self.slope * (batch - 1))


def h200(**other: float) -> Speeds:
    return Speeds({rows: ms / 1e3 for rows, ms in H200_8B.items()}, **other)


AT_ONCE = Speeds({1: 0.0, MAX_ROWS: 0.0}, host=0.0, host_row=0.0)  # passes take no time


@dataclass(frozen=True, slots=True)
class SimulatedMenu:
    """Forms, what drafting them takes, and what they are said to gain at one acceptance rate."""

    forms: tuple[Form, ...]
    level: float  # seconds of a level at batch 1
    slope: float = 0.02  # of that, more for each further sequence
    claimed_rate: float = 0.6  # acceptance in the drafter's files

    def seconds(self, form: Form, batch: int) -> float:
        return self.level * form.depth * (1.0 + self.slope * (batch - 1))

    def rows(self, form: Form, batch: int) -> int:
        return batch * (form.nodes + 1)

    def expected(self, form: Form) -> float:
        return accepted_of(form, self.claimed_rate)
