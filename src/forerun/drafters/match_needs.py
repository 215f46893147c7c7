"""MatchNeeds: what a look-up needs of a target that runs passes ahead: to stop where a match is worth drafting.

Every match would end a row of plain passes that run in one native call. Matches that were refused are run past, until
there is a longer one, or one so short was drafted after all.
"""

from __future__ import annotations

from forerun.types import Needs

WEAK = 4  # tokens: longer matches that were not worth drafting once may be so the next time
# tokens that a native call writes at most: a match that is refused grows with each that it says right
GOES_ON = 8


class MatchNeeds:
    """Of all sequences together."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._wanted = tuple(Needs(match_length=length) for length in range(longest + 2))
        self._least, self._longest = max(1, shortest), longest  # shorter ones were not worth drafting of late
        self.needs = self._wanted[self._least]

    def refuse(self, match: int) -> None:
        """A match so long was not worth drafting (0 = there was none): passes run past others as weak, and past a long
        one, which grows token by token.
        """
        match = min(match, self._longest)
        if match <= WEAK:
            self._least = max(self._least, match + 1)
            self.needs = self._wanted[self._least]
        else:
            # 0 = all
            self.needs = self._wanted[match + GOES_ON if match + GOES_ON < len(self._wanted) else 0]

    def take(self, match: int) -> None:
        """A match so long is drafted: it is worth it after all."""
        if match > 0:
            self._least = min(self._least, match)
        self.rest()

    def rest(self) -> None:
        """Nothing was refused."""
        self.needs = self._wanted[self._least]
