"""Fault injection: raise an error at the k-th call or allocation of some work, and see what it leaves behind.

    for at in range(count_points(work)):
        with Fault(at, MemoryError), suppress(MemoryError):
            work()
        check_that_all_is_well()

A point is the entry into a function, its return, or a call into C, in code of the given packages or modules; and
every tensor operation, which is where torch allocates. Python delivers interrupts at such points, so
KeyboardInterrupt can be injected like any other error. Only the thread that armed the fault is concerned.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal

from torch.utils._python_dispatch import TorchDispatchMode

Kind = Literal["calls", "operations"]


class Fault:
    """Raises `error()` once, at point `at` of what runs in its `with` block; counts points either way.

    `kind` = only calls, or only operations, are points: watching one of them takes less time than both.
    """

    def __init__(
        self,
        at: int | None,
        error: Callable[[], BaseException],
        packages: Sequence[str] = ("forerun",),
        kind: Kind | None = None,
    ) -> None:
        self.at, self.error, self.kind = at, error, kind  # at None = only count
        self.seen = 0
        self.fired = ""  # where
        self._places, self._ours = _known(tuple(packages))
        self._operations = _Operations(self)

    def __enter__(self) -> Fault:
        if self.kind != "calls":
            self._operations.__enter__()  # type: ignore[no-untyped-call]
        if self.kind != "operations":
            sys.setprofile(self._profile)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)
        if self.kind != "calls":
            self._operations.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def point(self, *where: object) -> None:
        """One more point; raises if it is the one."""
        self.seen += 1
        if self.seen - 1 == self.at:
            self.fired = " ".join(map(str, where))
            raise self.error()

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        ours = self._ours.get(code)
        if ours is None:
            file = code.co_filename
            ours = self._ours[code] = file.startswith(self._places) and file != __file__
        if ours:
            self.point(event, code.co_qualname, frame.f_lineno)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every tensor operation is a point."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fault = fault

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._fault.point("operation", operation)
        return operation(*args, **(kwargs or {}))


def count_points(work: Callable[[], object], packages: Sequence[str] = ("forerun",)) -> int:
    """How many points some work has."""
    with Fault(None, RuntimeError, packages) as fault:
        work()
    return fault.seen


@cache
def _known(packages: tuple[str, ...]) -> tuple[tuple[str, ...], dict[CodeType, bool]]:
    """Where they lie, and of every code that was seen whether it is theirs: the same for all faults."""
    return tuple(_place_of(name) for name in packages), {}


def _place_of(name: str) -> str:
    """The folder of a package, or the file of a module."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"there is no module {name}"
    folders = spec.submodule_search_locations
    return str(Path(folders[0])) if folders else str(spec.origin)
