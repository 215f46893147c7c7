"""Graphs that wait until the engine is idle, a batch needs them, or a share of a busy engine's time has come."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.models.cuda.compile.together import Compiling

log = logging.getLogger(__name__)
progress = logging.getLogger("forerun.progress")


@dataclass(slots=True)
class _Group:
    what: str  # it captures
    batches: range  # sizes of batches that its graphs are for
    compile: Callable[[], Compiling | None]
    captures: list[Callable[[], None]]
    failed: Callable[[Exception], None] | None  # of the first of a drafter
    compiling: Compiling | None = field(default=None)
    has_begun: bool = False


class LaterCaptures:
    """Implements forerun.models.base.Later. Used by the engine's thread, between rounds."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []

    def __len__(self) -> int:
        return sum(len(group.captures) for group in self._groups)

    def add(
        self,
        what: str,
        batches: range,
        compile_kernels: Callable[[], Compiling | None],
        captures: Sequence[Callable[[], None]],
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        """Graphs for batches of these sizes; `compile_kernels` begins to compile what they launch.

        The first that a drafter adds has `failed`, which is told why one of them could not be captured.
        """
        self._groups.append(_Group(what, batches, compile_kernels, list(captures), failed))
        self._groups.sort(key=lambda group: group.batches.stop)

    def left(self, batch: int) -> int:
        """Captures for batches of this size."""
        return sum(len(group.captures) for group in self._groups if batch in group.batches)

    def is_first(self, batch: int | None) -> bool:
        """Is the next capture of a drafter that has none?"""
        group = self._group_for(batch)
        return group is not None and group.failed is not None

    def wants(self, batch: int, waits: bool = True) -> bool:
        """Is there something for batches of this size, now or (`waits`) once its kernels are compiled?"""
        group = self._group_for(batch)
        return group is not None and (waits or group.compiling is None or group.compiling.is_done)

    def next(self, batch: int | None = None, waits: bool = False) -> bool:
        """Capture one graph, for a batch of this size or the smallest; False = there is none, or it is compiled still.

        `waits`: for its kernels, where they are being compiled. A group that fails is given up: its batches are
        written as they are now.
        """
        group = self._group_for(batch)
        if group is None:
            return False
        try:
            return self._advance(group, waits)
        except Exception as error:  # no memory, or a kernel that does not compile
            self._groups.remove(group)
            log.warning("no more %s: %s: %s", group.what, type(error).__name__, error)
            if group.failed is not None:
                group.failed(error)
            return True

    def _advance(self, group: _Group, waits: bool) -> bool:
        if not group.has_begun:
            group.has_begun, group.compiling = True, group.compile()
            return True
        if group.compiling is not None:
            if not waits and not group.compiling.is_done:
                return False
            group.compiling.finish()
            group.compiling = None
        if group.captures:
            progress.info("capturing %s: %d left", group.what, len(group.captures))
            group.captures[0]()
            del group.captures[0]  # not one that was interrupted
        if not group.captures:
            self._groups.remove(group)
            log.info("captured %s; %d captures left", group.what, len(self))
        return True

    def _group_for(self, batch: int | None) -> _Group | None:
        """The first whose graphs a batch of this size replays, or any."""
        return next((group for group in self._groups if batch is None or batch in group.batches), None)
