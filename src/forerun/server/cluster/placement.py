"""Which replica a request should go to: the one that has most of its prompt cached, else the least loaded.

What replicas hold is not asked for but remembered: where each prompt was sent, in blocks of tokens, each named by
itself and all before it. A cached prompt is worth as much as some texts that the replica has more than another, by its
length: a chat template that all requests share must not bring all of them to one replica. And no text waits for a place
in a batch while another replica has one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

BLOCK = 16  # tokens
MOST_BLOCKS = 1 << 16  # remembered per replica: a million tokens
MOST_SESSIONS = 1 << 14
PROMISED = 2.0  # seconds that a choice counts before the request has gone there
WORTH = 16  # cached blocks that make up for one more text in the batch
MOST_WORTH = 4.0  # texts that a cached prompt of any length makes up for


def blocks_of(prompt: Sequence[int], salt: str = "") -> list[int]:
    """A name for each whole block of a prompt, which says what it holds and all that comes before it."""
    found, name = list[int](), hash(salt)
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        name = hash((name, *prompt[start : start + BLOCK]))
        found.append(name)
    return found


@dataclass(slots=True)
class Placement:
    batch: int = 8  # texts that a replica writes at once
    # request: replica, until when
    _sent: dict[str, tuple[Hashable, float | None]] = field(default_factory=dict)
    _held: dict[Hashable, OrderedDict[int, None]] = field(default_factory=dict)
    _sessions: OrderedDict[str, Hashable] = field(default_factory=OrderedDict)

    def note(self, replica: Hashable, blocks: Iterable[int], session: str | None = None) -> None:
        held = self._held.setdefault(replica, OrderedDict())
        for block in blocks:
            held[block] = None
            held.move_to_end(block)
        while len(held) > MOST_BLOCKS:
            held.popitem(last=False)
        if session is not None:
            self._sessions[session] = replica
            self._sessions.move_to_end(session)
            while len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)

    def forget(self, replica: Hashable) -> None:
        """The replica is gone, and its cache with it."""
        self._held.pop(replica, None)
        for request in [name for name, (place, _) in self._sent.items() if place == replica]:
            del self._sent[request]
        for session in [name for name, place in self._sessions.items() if place == replica]:
            del self._sessions[session]

    def keep_only(self, replicas: Iterable[Hashable]) -> None:
        """These replicas are left."""
        there = set(replicas)
        sent = [place for place, _ in self._sent.values()]
        for replica in {*self._held, *self._sessions.values(), *sent}:
            if replica not in there:
                self.forget(replica)

    def promise(self, request: str, replica: Hashable, now: float) -> None:
        """A request should go there: it counts as there for a moment, so that those beside it go elsewhere."""
        self._sent[request] = replica, now + PROMISED

    def start(self, request: str, replica: Hashable) -> None:
        self._sent[request] = replica, None

    def end(self, request: str, replica: Hashable) -> None:
        """It is done there, or was turned away there and may be elsewhere by now; others are none of ours."""
        if request in self._sent and self._sent[request][0] == replica:
            del self._sent[request]

    def loads(self, replicas: Iterable[Hashable], request: str, now: float) -> dict[Hashable, float]:
        """Texts of each replica, but for the one in question."""
        for name in [name for name, (_, until) in self._sent.items() if until is not None and until < now]:
            del self._sent[name]
        counts = Counter(replica for name, (replica, _) in self._sent.items() if name != request)
        return {replica: float(counts[replica]) for replica in replicas}

    def held(self, replica: Hashable, blocks: Sequence[int]) -> int:
        """How many blocks from the front of a prompt the replica was sent before."""
        known = self._held.get(replica)
        if known is None:
            return 0
        return next((i for i, block in enumerate(blocks) if block not in known), len(blocks))

    def ranked(
        self, loads: Mapping[Hashable, float], blocks: Sequence[int], session: str | None = None
    ) -> list[Hashable]:
        """The replicas of `loads` (texts there), best first."""
        home = self._sessions.get(session) if session is not None else None

        def badness(replica: Hashable) -> tuple[bool, float, float]:
            load = loads[replica]
            worth = min(MOST_WORTH, self.held(replica, blocks) / WORTH + (replica == home))
            return load >= self.batch, load - worth, load

        return sorted(loads, key=badness)
