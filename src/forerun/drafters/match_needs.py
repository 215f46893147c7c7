"""MatchNeeds: what a look-up needs of a target that runs passes ahead: to stop where a match is worth drafting.

Every match would end a row of plain passes that run in one native call. Matches that were refused are run past, until
there is a longer one, or one so short was drafted after all.
"""

from __future__ import annotations

from forerun.types import Needs


class MatchNeeds:
    """Of all sequences together."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._wanted = tuple(Needs(match_length=length) for length in range(longest + 2))
        self._least, self._longest = max(1, shortest), longest
        self.needs = self._wanted[self._least]

    def refuse(self, match: int) -> None:
        """A match so long was not worth drafting; 0 = there was none."""
        match = min(match, self._longest)
        if match >= self._least:
            self._set(match + 1)

    def take(self, match: int) -> None:
        """A match so long is drafted: it is worth it after all."""
        if 0 < match < self._least:
            self._set(match)

    def _set(self, least: int) -> None:
        self._least, self.needs = least, self._wanted[least]
