"""The server's part of `forerun train refresh`: records texts to train on, and follows the newest version of a head.

Only texts of requests that say `"record": true` are recorded, and only where the server has `--record FOLDER`: one JSON
object a line with the token ids of prompt and answer, in a file that its owner alone can read. `HeadWatch` follows the
link `current` of a folder of heads: it swaps a new head in, and moves the link back where tokens per round fall.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

from forerun.api.completion import Completion
from forerun.core.errors import ForerunError, InvalidInput
from forerun.heads import HeadVersions

log = logging.getLogger(__name__)
MOST_BYTES = 1 << 30  # of one server's file; then it records no more


class Recorder:
    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._left = most_bytes
        started = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        self.file = folder / f"traffic-{started}-{os.getpid()}.jsonl"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise InvalidInput(
                f"texts cannot be recorded in {folder}: {error.strerror}; name another --record"
            ) from None

    def write(self, prompt: Sequence[int], done: Completion, temperature: float | None) -> None:
        """One text that has ended by itself; what was dropped or failed is not recorded."""
        if done.finish_reason not in ("stop", "length") or not done.token_ids:
            return
        facts = {
            "prompt": list(prompt), "tokens": done.token_ids, "temperature": temperature, "drafter": done.drafter,
            "rounds": done.rounds, "drafted": done.drafted, "accepted": done.accepted,
        }  # fmt: skip
        line = json.dumps(facts, separators=(",", ":")).encode() + b"\n"
        if len(line) > self._left:
            if self._left >= 0:
                log.warning("%s is full: nothing more is recorded", self.file)
            self._left = -1
            return
        try:
            os.write(self._descriptor, line)
            self._left -= len(line)
        except OSError as error:  # a full disk is no reason to fail a request
            log.warning("a text could not be recorded in %s: %s", self.file, error.strerror)

    def close(self) -> None:
        os.close(self._descriptor)


ENOUGH = 2000  # rounds with a head until it is judged
FALL = 0.97  # of the tokens per round before, below which a head is taken out again


class Window:
    def __init__(self, texts: int = 1000) -> None:
        self._texts: deque[tuple[int, int]] = deque(maxlen=texts)

    def add(self, done: Completion) -> None:
        self._texts.append((done.tokens, done.rounds))

    @property
    def rounds(self) -> int:
        return sum(rounds for _, rounds in self._texts)

    @property
    def rate(self) -> float:
        return sum(tokens for tokens, _ in self._texts) / max(1, self.rounds)


class HeadWatch:
    def __init__(
        self,
        folder: Path,
        drafter: str,
        swap: Callable[[Path], Awaitable[None]],
        *,
        enough: int = ENOUGH,
        fall: float = FALL,
    ) -> None:
        self._versions, self._drafter, self._swap = HeadVersions(folder), drafter, swap
        self._enough, self._fall = enough, fall
        self.running = self._versions.must_have_current()
        self._previous: tuple[Path, Window] | None = None
        self._now, self._since = Window(), 0.0

    def observe(self, done: Completion, started: float) -> None:
        """A text that has ended; those that began with another head are not counted."""
        if done.drafter == self._drafter and started >= self._since:
            self._now.add(done)

    async def check(self) -> None:
        """Swap where the link has moved, and move it back where that was a mistake. Asked often."""
        wanted = self._versions.current()
        if wanted is not None and wanted != self.running:
            await self._change(wanted)
        elif self._previous is not None and self._has_fallen(self._previous[1]):
            await self._roll_back(*self._previous)

    def _has_fallen(self, before: Window) -> bool:
        if self._now.rounds < self._enough or before.rounds < self._enough:
            return False
        return self._now.rate < self._fall * before.rate

    async def _change(self, wanted: Path) -> None:
        former, window = self.running, self._now
        try:
            await self._swap(wanted)
        except ForerunError as error:
            log.error("the head %s cannot be used, and %s stays: %s", wanted.name, former.name, error)
            self._publish(former)
            return
        log.info("drafting with the head %s now, instead of %s", wanted.name, former.name)
        self.running, self._previous = wanted, (former, window)
        self._now, self._since = Window(), perf_counter()

    async def _roll_back(self, former: Path, before: Window) -> None:
        failed, found = self.running, {"tokens_per_round": self._now.rate, "before": before.rate}
        log.warning(
            "the head %s gives %.2f tokens per round and %s gave %.2f: rolled back",
            failed.name, self._now.rate, former.name, before.rate,
        )  # fmt: skip
        await self._swap(former)
        self.running, self._previous = former, None
        self._now, self._since = before, perf_counter()
        self._publish(former)
        try:
            (failed / "rolled_back.json").write_text(json.dumps(found), encoding="utf-8")
        except OSError as error:
            log.warning("%s cannot be written: %s", failed, error.strerror)

    def _publish(self, version: Path) -> None:
        try:
            self._versions.publish(version.name)
        except (OSError, ForerunError) as error:
            log.warning("the link in %s could not be moved back: %s", version.parent, error)
            # else it would be swapped again and again
            self.running = self._versions.current() or self.running
