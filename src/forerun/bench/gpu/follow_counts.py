"""FollowCounts: how many rounds were launched before the last one was read, and what kept others from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from forerun.control import adaptive
from forerun.control.forms import FormChooser
from forerun.control.waiting import Waiting
from forerun.drafters.eagle.cuda.draft_graphs import DeviceDraft
from forerun.drafters.eagle.cuda.drafter import DeviceEagle
from forerun.engine import engine as engine_file
from forerun.engine import following
from forerun.engine.engine import Engine
from forerun.engine.pending import Launched
from forerun.types import TreeBatch


class FollowCounts:
    """Rounds by what was drafted and whether they followed an unread one; what kept others from it, by who said so."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.why: Counter[str] = Counter()
        self.switches: Counter[str] = (
            Counter()
        )  # from one kind of round to another, or to the same: what was read first
        self._last: tuple[str, object] = "", None
        self._said, self._reason, self._parts = list[str](), "the first", False

    @contextmanager
    def watch(self, engine: Engine) -> Iterator[None]:
        asked: list[tuple[Any, str, Callable[[Any], bool]]] = [
            (following, "device_decides", lambda found: not found),
            (type(engine.target), "make_room", lambda found: not found),
            (FormChooser, "keeps", lambda found: found is None),
            (FormChooser, "keeps_plain", lambda found: found is None),
            (adaptive, "ends", bool),
            (Waiting, "waits", bool),
            (DeviceDraft, "follow", lambda found: found is None),
            (adaptive.AdaptiveController, "switches", lambda found: found is None),
            (DeviceDraft, "switch", lambda found: found is None),
        ]
        with ExitStack() as patches:
            for owner, name, refuses in asked:
                noting = self._noting(getattr(owner, name), name, refuses)
                patches.enter_context(patch.object(owner, name, noting))
            replaced: list[tuple[Any, str, Any]] = [
                (engine_file, "follow", self._followed(following.follow)),
                (engine, "_finish", self._finished(engine._finish)),
                (DeviceEagle, "_grow_apart", self._apart(DeviceEagle._grow_apart)),
            ]
            for owner, name, call in replaced:
                patches.enter_context(patch.object(owner, name, call))
            yield

    def _noting(
        self, call: Callable[..., Any], name: str, refuses: Callable[[Any], bool]
    ) -> Callable[..., Any]:
        def noting(*given: Any, **named: Any) -> Any:
            found = call(*given, **named)
            if refuses(found):
                self._said.append(name)
            return found

        return noting

    def _followed(self, follow: Callable[..., Launched | None]) -> Callable[..., Launched | None]:
        def followed(engine: Engine, last: Launched) -> Launched | None:
            self._said.clear()
            found = follow(engine, last)
            if found is None:
                nobody = "no plan for more rounds" if last.repeats <= 0 else "not asked"
                self._reason = f"behind {_kind(last)}: {', '.join(dict.fromkeys(self._said)) or nobody}"
            return found

        return followed

    def _finished(self, finish: Callable[[Launched], None]) -> Callable[[Launched], None]:
        def finished(launched: Launched) -> None:
            kind, follows = _kind(launched), launched.trees.follows is not None
            kind = "mixed" if kind == "look-ups" and self._parts else kind
            self.kinds[f"{kind}, {'followed' if follows else 'read first'}"] += 1
            self._parts = False
            before, self._last = self._last, (kind, launched.trees.form)
            if not follows:
                self.why[self._reason] += 1
                other = " of another form" if before[0] == kind and before != self._last else ""
                self.switches[f"{before[0] or 'nothing'} to {kind}{other}"] += 1
            finish(launched)

        return finished

    def _apart(self, grow: Callable[..., TreeBatch]) -> Callable[..., TreeBatch]:
        """The head drafts for a part of the batch: its trees are joined with those of the host."""

        def apart(*given: Any) -> TreeBatch:
            self._parts = True
            return grow(*given)

        return apart


def _kind(launched: Launched) -> str:
    trees = launched.trees
    return "plain" if trees.is_plain() else "look-ups" if trees.form is None else "head's"
