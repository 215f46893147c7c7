"""PassClock: seconds of passes on a device, by events in its stream; read later, without waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from itertools import cycle
from time import perf_counter
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from forerun.core.tree import Seconds
from forerun.core.types import Scores

if TYPE_CHECKING:
    from forerun.models.cuda.graphs import Passes

LAST = 32  # calls whose times can still be asked for

P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(slots=True)
class Span:
    """From the start of a call's first pass to the end of its last."""

    start: Any = None  # torch.cuda.Event, or seconds where there is no device
    end: Any = None
    uses: int = 0

    def seconds(self) -> float | None:
        """None where the device has not got so far."""
        if isinstance(self.end, float):
            return self.end - float(self.start)
        return float(self.start.elapsed_time(self.end)) / 1e3 if self.end.query() else None


class PassClock:
    """Marks where passes start and end. Events are used again after LAST calls."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        spans = [Span() for _ in range(LAST)]
        if self._on_gpu:
            for span in spans:
                span.start, span.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._spans = cycle(spans)
        self._open: Span | None = None

    def start(self) -> None:
        """A pass is about to be launched."""
        if self._open is None:
            span = self._open = next(self._spans)
            span.uses += 1
            if self._on_gpu:
                span.start.record()
            else:
                span.start = perf_counter()

    def stop(self) -> None:
        """It was launched."""
        assert self._open is not None
        if self._on_gpu:
            self._open.end.record()
        else:
            self._open.end = perf_counter()

    def taken(self) -> Seconds:
        """What the passes since the last call of this took, to be asked once they are done."""
        span, self._open = self._open, None
        if span is None:
            return lambda: None
        uses = span.uses
        return lambda: span.seconds() if span.uses == uses else None


class HasPasses(Protocol):
    """A target whose passes are timed."""

    passes: Passes


Target = TypeVar("Target", bound=HasPasses)


def timed(method: Callable[Concatenate[Target, P], Result]) -> Callable[Concatenate[Target, P], Result]:
    """Add what a method's passes took to the scores that it returns, alone or last."""

    @wraps(method)
    def run(self: Target, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        self.passes.clock.taken()  # what a call that failed has left
        result: Any = method(self, *args, **kwargs)
        if isinstance(result, Scores):
            if result.seconds is not None:  # a plain pass, launched in an earlier call perhaps
                return result  # type: ignore[return-value]
            return replace(result, seconds=self.passes.clock.taken())  # type: ignore[return-value]
        chains, scores = result
        return chains, replace(scores, seconds=self.passes.clock.taken())  # type: ignore[return-value]

    return run


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of some work, the mean of several; on a GPU between two events of the device."""
    if device.type != "cuda":
        started = perf_counter()
        for _ in range(repeats):
            work()
        return (perf_counter() - started) / repeats
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    events[0].record()
    for _ in range(repeats):
        work()
    events[1].record()
    events[1].synchronize()
    return float(events[0].elapsed_time(events[1])) / 1e3 / repeats
