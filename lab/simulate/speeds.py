"""What a simulated device takes: Speeds of passes and drafts, and the menu of a head with these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from forerun.core.offer import Form
from forerun.drafters.device.features import PASSES
from forerun.drafters.device.plan import FORMS, bucket_of, forms_for
from forerun.models.cuda.plan import MAX_ROWS, ROW_SIZES, round_up
from lab.simulate.menu import accepted_of

# milliseconds of a pass of an 8B by rows: docs/benchmarks.md, "More than 64 rows" and "GPU, one H200"
H200_8B = {1: 4.1, 8: 4.4, 16: 4.6, 32: 5.0, 48: 5.2, 64: 5.4, 96: 5.7, 128: 6.1, 160: 7.0, 192: 7.6, 224: 8.5,
           256: 9.0, 384: 12.3, 512: 15.6, 768: 22.5, 1024: 29.5}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a device and its host take."""

    passes: Mapping[int, float]  # rows -> seconds
    level: float = 1.1e-4  # of a draft, at batch 1
    slope: float = 0.03  # of that, more for each further sequence
    # the head's reading of prompts: not measured, but its 0.1e9 multiplications at the rate of the target's full passes
    prompt_row: float = 4e-7
    prompt_pass: float = 3e-5  # and the start of a handful of kernels
    host: float = 1.5e-4  # of launching a round, and the same of ending it
    host_row: float = 1.2e-5  # and of every sequence in it

    def of_pass(self, rows: int) -> float:
        """Of the next size that passes have."""
        return self._of_size(round_up(rows, ROW_SIZES))

    def _of_size(self, rows: int) -> float:
        if rows in self.passes:
            return self.passes[rows]
        low = max(size for size in self.passes if size < rows)
        high = min(size for size in self.passes if size > rows)
        share = (rows - low) / (high - low)
        return self.passes[low] * (1 - share) + self.passes[high] * share

    def curve(self) -> dict[int, float]:
        """t(rows) as it is measured at load."""
        return {rows: self._of_size(rows) for rows in ROW_SIZES}

    def of_reading(self, rows: int) -> float:
        """The head's reading of prompts."""
        whole, rest = divmod(rows, MAX_ROWS)
        padded = whole * MAX_ROWS + (round_up(rest, PASSES) if rest else 0)
        return self.prompt_pass * (whole + (rest > 0)) + self.prompt_row * padded

    def of_draft(self, form: Form, batch: int) -> float:
        return self.level * form.depth * (1.0 + self.slope * (batch - 1))


def h200(**other: float) -> Speeds:
    """An 8B on one H200."""
    return Speeds({rows: ms / 1e3 for rows, ms in H200_8B.items()}, **other)


@dataclass(frozen=True, slots=True)
class SimulatedForms:
    """The menu of a head on a GPU; implements forerun.drafters.device.protocol.DeviceMenu."""

    speeds: Speeds
    rate: float
    switches: bool = True
    complete_to: int = 0

    def fitting(self, batch: int, nodes: int, depth: int, width: int) -> Form | None:
        return Form(nodes, depth, width)

    def knows(self, form: Form, batch: int) -> bool:
        return True

    def drafting(self, form: Form, batch: int) -> float:
        return self.speeds.of_draft(form, bucket_of(batch))

    @property
    def forms(self) -> tuple[Form, ...]:
        return FORMS

    def seconds(self, form: Form, batch: int) -> float:
        listed = form in forms_for(bucket_of(batch))
        return self.speeds.of_draft(form, bucket_of(batch)) if listed else math.inf

    def rows(self, form: Form, batch: int) -> int:
        return bucket_of(batch) * (form.nodes + 1)

    def expected(self, form: Form) -> float:
        return accepted_of(form, self.rate)
