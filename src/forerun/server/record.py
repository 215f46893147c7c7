"""Records texts for `forerun train refresh`: only those of requests that say `"record": true`, into one folder.

One JSON object a line: token ids of prompt and answer, and how many rounds the answer took. Files are readable by their
owner alone. Nothing is recorded without `--record FOLDER`, whatever a request says, and nothing of a request that does
not say it, whatever the server was started with.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from forerun.api.completion import Completion
from forerun.core.errors import InvalidInput

log = logging.getLogger(__name__)
MOST_BYTES = 1 << 30  # of one server's file; then it records no more


class Recorder:
    """Appends to a file of this server's own."""

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
