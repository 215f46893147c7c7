"""History: past outputs of each tenant, indexed in bounded memory, and kept in a file on request.

Outputs of one tenant are never looked up for another. A tenant's outputs go into an automaton; when that is half as
large as allowed, a second one is started and the one before it is dropped: so nothing is ever rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from forerun.drafters.suffix.automaton import BREAK, SuffixAutomaton
from forerun.drafters.suffix.sources import AutomatonPlace, Place
from forerun.errors import InvalidInput

log = logging.getLogger(__name__)

MOST_TOKENS, MOST_TENANTS = 32768, 16  # tokens kept of each, tenants kept; beyond, the oldest are dropped
_KIND = "forerun suffix history"


class _Tenant:
    """The automata of one tenant, the one that grows last."""

    __slots__ = ("texts",)

    def __init__(self) -> None:
        self.texts = [SuffixAutomaton()]

    def add(self, tokens: Sequence[int], most: int) -> None:
        if not self.texts[-1].whole:  # an interrupt came while it grew
            self.texts[-1] = SuffixAutomaton()
        if self.texts[-1].size >= most // 2:
            self.texts = [self.texts[-1], SuffixAutomaton()]
        self.texts[-1].extend([*tokens[-most // 2 :], BREAK])


class Reader:
    """How far the end of one sequence matches the past outputs of its tenant."""

    def __init__(self, tenant: _Tenant) -> None:
        self._tenant = tenant
        self._at: list[tuple[SuffixAutomaton, int, int]] = []
        self._recent: list[int] = []  # tokens to find the place with in an automaton that is new

    def read(self, tokens: Iterable[int]) -> None:
        """Tokens that were added to the sequence."""
        tokens = list(tokens)
        known = {id(text): (state, length) for text, state, length in self._at}
        self._at = []
        for text in self._tenant.texts:
            state, length = known.get(id(text), (0, 0))
            for token in tokens if id(text) in known else [*self._recent, *tokens]:
                state, length = text.follow(state, length, token)
            self._at.append((text, state, length))
        self._recent = [*self._recent, *tokens][-32:]

    def places(self) -> list[Place]:
        return [AutomatonPlace(text, state, length) for text, state, length in self._at if text.whole]


class History:
    """Past outputs by tenant."""

    def __init__(self, vocab_size: int, most: int = MOST_TOKENS, file: Path | None = None) -> None:
        self._vocab_size, self._most, self._file = vocab_size, most, file
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        if file is not None:
            self._open(file)

    def reader(self, tenant: str) -> Reader:
        return Reader(self._tenant(_digest(tenant)))

    def add(self, tenant: str, tokens: Sequence[int]) -> None:
        """Index an output."""
        if len(tokens) < 2:
            return
        self._tenant(_digest(tenant)).add(tokens, self._most)
        if self._file is not None:
            row = json.dumps({"tenant": _digest(tenant), "tokens": tokens})
            try:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(row + "\n")
            except OSError as error:  # drafting goes on without the file
                log.warning("outputs are no longer kept in %s: %s", self._file, error)
                self._file = None

    def _tenant(self, name: str) -> _Tenant:
        if name not in self._tenants:
            while len(self._tenants) >= MOST_TENANTS:
                self._tenants.popitem(last=False)
            self._tenants[name] = _Tenant()
        self._tenants.move_to_end(name)
        return self._tenants[name]

    def _open(self, path: Path) -> None:
        """Index what a file holds, and write it anew without what is too old to be kept."""
        head = {"kind": _KIND, "vocab_size": self._vocab_size}
        rows: list[str] = []
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            if not lines or _parsed(lines[0]) != head:
                raise InvalidInput(
                    f"{str(path)!r} holds no outputs of a model with {self._vocab_size} tokens"
                )
            rows = self._newest(lines[1:])
        for row in rows:
            entry = json.loads(row)
            self._tenant(entry["tenant"]).add(entry["tokens"], self._most)
        try:
            path.write_text("".join(f"{row}\n" for row in (json.dumps(head), *rows)), encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"cannot keep outputs in {str(path)!r}: {error.strerror}") from None

    def _newest(self, rows: Sequence[str]) -> list[str]:
        """The last rows that fit; a row that an interrupted run left unfinished is dropped."""
        kept, sizes = list[str](), dict[str, int]()
        for row in reversed(rows):
            entry = _parsed(row)
            tenant, tokens = entry.get("tenant"), entry.get("tokens")
            if not isinstance(tenant, str) or not isinstance(tokens, list):
                continue
            if not all(type(token) is int and 0 <= token < self._vocab_size for token in tokens):
                continue
            sizes[tenant] = sizes.get(tenant, 0) + len(tokens)
            if sizes[tenant] <= self._most:
                kept.append(row)
        return kept[::-1]


def _digest(tenant: str) -> str:
    """A tenant's name as it may stand in a file."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]


def _parsed(row: str) -> dict[str, Any]:
    try:
        found = json.loads(row)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
