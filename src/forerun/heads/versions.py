"""A folder of versions of one head: v0001, v0002, ..., and a link `current` to the one that is to draft. No torch here.

`forerun train refresh` adds versions and moves the link; a server that was given the folder follows it. The link is
replaced in one step, so that a reader finds the old version or the new one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from forerun.core.errors import InvalidInput

_NAME = re.compile(r"v\d{4,}")
CURRENT = "current"


class HeadVersions:
    """Versions of one head on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """All versions, the oldest first."""
        if not self.folder.is_dir():
            return []
        found = [path.name for path in self.folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda name: int(name[1:]))

    def next_name(self) -> str:
        """The name of a version to come; numbers are not used twice."""
        return f"v{max((int(name[1:]) for name in self.names()), default=0) + 1:04d}"

    def current(self) -> Path | None:
        """The version that is to draft; None where there is none yet, or the link leads nowhere."""
        try:
            name = os.readlink(self.folder / CURRENT)
        except OSError:
            return None
        path = self.folder / name
        return path if _NAME.fullmatch(name) and path.is_dir() else None

    def must_have_current(self) -> Path:
        """The version that is to draft; raises where there is none."""
        found = self.current()
        if found is None:
            raise InvalidInput(
                f"{self.folder} has no link `{CURRENT}` to a version of a head; "
                f"make the first with `forerun train refresh --out {self.folder}`"
            )
        return found

    def publish(self, name: str) -> None:
        """Let this version draft from now on."""
        if name not in self.names():
            raise InvalidInput(
                f"{self.folder} has no version {name[:80]!r}; it has {', '.join(self.names()) or 'none'}"
            )
        part = self.folder / f".{CURRENT}-{os.getpid()}"
        part.unlink(missing_ok=True)
        part.symlink_to(name)
        part.replace(self.folder / CURRENT)
