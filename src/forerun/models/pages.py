"""PagePool: who holds which pages of the KV cache, and what finished pages contain; no tensors.

A page has PAGE positions, the tile that attention walks anyway. A sequence holds pages in the order of its positions
and takes more as it grows. A page whose positions are committed can be *named* by its tokens and by everything before
them; a sequence that starts with the same tokens then holds the same page. A named page that nobody holds stays
(cached) until its place is needed: the one that was held least recently goes first, the end of a text before its start.

`held` and `contents` are the truth, and each of their changes is one assignment. Everything else is derived from them,
and is derived anew after an interrupt: no page is lost, and none has two owners that do not share it knowingly.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heappop, heappush
from operator import itemgetter

import numpy as np

TREE_MARGIN = 257  # slots beyond a sequence's length: the root and 256 nodes, the largest budget
PAGE = 64  # positions; the attention kernels read tiles of as many


@dataclass(frozen=True, slots=True)
class Content:
    """What is in a named page: its tokens, and which hidden layers have their rows kept beside keys and values."""

    before: bytes  # the digest of all tokens before it
    tokens: tuple[int, ...]  # PAGE of them, or fewer where a text ended
    layers: frozenset[int]

    @property
    def digest(self) -> bytes:
        return digest_of(self.before, self.tokens)


@dataclass(frozen=True, slots=True)
class Match:
    """The start of a text that is cached: whole pages to share, and the page whose first `part` positions to copy."""

    pages: tuple[int, ...]
    digests: tuple[bytes, ...]  # after each of them
    layers: frozenset[int]
    source: int = -1
    part: int = 0

    @property
    def tokens(self) -> int:
        return len(self.pages) * PAGE + self.part


def start_digest(salt: str, *conditions: object) -> bytes:
    """What every chain of one salt starts from; `conditions` are what else decides the numbers in a page."""
    return blake2b(repr((salt, conditions)).encode(), digest_size=16).digest()


def digest_of(before: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a page's tokens and of all before them."""
    return blake2b(np.asarray(tokens, dtype=np.int64).tobytes(), digest_size=16, key=before).digest()


def pages_for(positions: int) -> int:
    return -(-positions // PAGE)


class PagePool:
    """Pages by number, their holders and their contents."""

    def __init__(self, pages: int) -> None:
        self.size = pages
        self.held: dict[int, tuple[int, ...]] = {}  # owner -> its pages, by position
        self.contents: dict[int, Content] = {}  # page -> what is in it, if it is named
        self._cached: dict[int, None] = {}  # named pages that nobody holds, least recently held first
        self._is_sound = False
        self.taken: Callable[[int, Sequence[int]], None] | None = None  # told of pages that an owner gets to write
        self._derive()

    @property
    def used(self) -> int:
        """Pages that sequences hold; one that several share counts once. Any thread may ask."""
        return len(self._holders)

    @property
    def cached(self) -> int:
        """Cached pages without a holder: they are reused when no free one is left. Any thread may call this."""
        return len(self._cached)

    @property
    def free(self) -> int:
        """Pages with nothing in them."""
        return len(self._free)

    @property
    def available(self) -> int:
        self._check()
        return self.size - len(self._holders)

    def holders(self, page: int) -> int:
        self._check()
        return self._holders.get(page, 0)

    def grow(self, pages: int) -> None:
        with self._changing():
            self.size += pages
            for page in range(self.size - pages, self.size):
                self._free.add(page)
                heappush(self._heap, page)

    def take(self, owner: int, count: int) -> bool:
        """Give an owner `count` more pages, in a row where possible; False = there are too few, and none is given."""
        if count > self.available:
            return False
        with self._changing():
            pages = list(self.held.get(owner, ()))
            for _ in range(count):
                page = self._pick(pages[-1] + 1 if pages else -1)
                pages.append(page)
                self.held[owner] = tuple(pages)
                self._holders[page] = 1
        if self.taken is not None:
            self.taken(owner, pages[len(pages) - count :])
        return True

    def share(self, owner: int, pages: Sequence[int]) -> None:
        """Let a new owner start with named pages."""
        assert owner not in self.held, f"owner {owner} has pages already"
        with self._changing():
            self.held[owner] = tuple(pages)
            for page in pages:
                self._holders[page] = self._holders.get(page, 0) + 1
                self._cached.pop(page, None)

    def replace(self, owner: int, index: int) -> tuple[int, int] | None:
        """Exchange one of an owner's pages for one that is its alone: (old, new), or None where none is left."""
        if not self.available:
            return None
        with self._changing():
            pages = list(self.held[owner])
            old, new = pages[index], self._pick(-1)
            pages[index] = new
            self.held[owner] = tuple(pages)
            self._holders[new] = 1
            self._let_go(old)
        if self.taken is not None:
            self.taken(owner, (new,))
        return old, new

    def release(self, owner: int) -> None:
        """Take an owner's pages back; unknown owners are ignored."""
        self._check()
        if owner not in self.held:
            return
        with self._changing():
            for page in reversed(self.held.pop(owner)):  # so that the start of a text goes last
                self._let_go(page)

    def name(self, page: int, content: Content) -> None:
        """Say what is in a page that is held. Of two alike, the one with more hidden layers keeps the name."""
        self._check()
        digest = content.digest
        other = self._whole.get(digest) if len(content.tokens) == PAGE else self._twin(content)
        if other == page or (other is not None and content.layers <= self.contents[other].layers):
            return
        with self._changing():
            if other is not None:
                self._unname(other)
                if other not in self._holders:
                    self._cached.pop(other, None)
                    self._give(other)
            self._unname(page)
            self.contents[page] = content
            self._index(page, content)

    def unname(self, page: int) -> None:
        """Forget what is in a page that is held: it will be written again."""
        self._check()
        if page in self.contents:
            with self._changing():
                self._unname(page)

    def find(self, start: bytes, tokens: Sequence[int], layers: Iterable[int] = ()) -> Match:
        """The longest start of these tokens that is cached with the rows of these hidden layers."""
        self._check()
        wanted, digest, pages, digests = frozenset(layers), start, list[int](), list[bytes]()
        shared: frozenset[int] | None = None
        for low in range(0, len(tokens) - PAGE + 1, PAGE):
            some = tuple(tokens[low : low + PAGE])
            after = digest_of(digest, some)
            page = self._whole.get(after)
            if page is None or self.contents[page].tokens != some or not wanted <= self.contents[page].layers:
                break
            digest, have = after, self.contents[page].layers
            pages.append(page)
            digests.append(digest)
            shared = have if shared is None else shared & have
        source, part = self._longest(digest, tokens[len(pages) * PAGE :][:PAGE], wanted)
        if part:
            have = self.contents[source].layers
            shared = have if shared is None else shared & have
        return Match(tuple(pages), tuple(digests), shared or frozenset(), source, part)

    def _longest(self, before: bytes, tokens: Sequence[int], layers: frozenset[int]) -> tuple[int, int]:
        """Of the pages behind these: which shares the longest start with some tokens, and how long it is."""
        key, behind = tuple(tokens), self._behind.get(before, [])
        place, best, length = bisect_left(behind, key, key=_tokens), -1, 0
        for near in (range(place, len(behind)), range(place - 1, -1, -1)):  # the further away, the less they share
            for i in near:
                alike, page = _alike(behind[i][0], key), behind[i][1]
                if alike <= length:
                    break
                if layers <= self.contents[page].layers:
                    best, length = page, alike
                    break
        return best, length

    def _twin(self, content: Content) -> int | None:
        """Another page with the same few tokens at the same place."""
        behind = self._behind.get(content.before, [])
        place = bisect_left(behind, content.tokens, key=_tokens)
        return behind[place][1] if place < len(behind) and behind[place][0] == content.tokens else None

    def _pick(self, wanted: int) -> int:
        """A page without a holder: the wanted one if it is free, else the first free one, else the oldest cached."""
        if wanted in self._free:
            self._free.remove(wanted)
            return wanted
        while self._heap:
            page = heappop(self._heap)
            if page in self._free:
                self._free.remove(page)
                return page
        page = next(iter(self._cached))
        self._unname(page)
        del self._cached[page]
        return page

    def _let_go(self, page: int) -> None:
        left = self._holders[page] - 1
        if left:
            self._holders[page] = left
            return
        del self._holders[page]
        if page in self.contents:
            self._cached[page] = None
        else:
            self._give(page)

    def _give(self, page: int) -> None:
        self._free.add(page)
        heappush(self._heap, page)

    def _index(self, page: int, content: Content) -> None:
        insort(self._behind.setdefault(content.before, []), (content.tokens, page))
        if len(content.tokens) == PAGE:
            self._whole[content.digest] = page

    def _unname(self, page: int) -> None:
        content = self.contents.pop(page, None)
        if content is None:
            return
        behind = self._behind[content.before]
        place = bisect_left(behind, (content.tokens, page))
        if place < len(behind) and behind[place] == (content.tokens, page):
            del behind[place]
        if not behind:
            del self._behind[content.before]
        if self._whole.get(content.digest) == page:
            del self._whole[content.digest]

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Between its start and its end what is derived cannot be relied on."""
        self._check()
        self._is_sound = False
        yield
        self._is_sound = True

    def _check(self) -> None:
        if not self._is_sound:
            self._derive()

    def _derive(self) -> None:
        """Everything but the truth, from the truth; what was cached keeps its order."""
        holders: dict[int, int] = {}
        for pages in self.held.values():
            for page in pages:
                holders[page] = holders.get(page, 0) + 1
        old = [page for page in self._cached if page in self.contents and page not in holders]
        rest = [page for page in self.contents if page not in holders and page not in self._cached]
        self._holders = holders
        self._cached = dict.fromkeys([*old, *rest])
        self._free = {page for page in range(self.size) if page not in holders and page not in self.contents}
        self._heap = sorted(self._free)
        self._whole: dict[bytes, int] = {}
        # pages by all before them, sorted by their tokens: those that share most with others are neighbours
        self._behind: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}
        for page, content in self.contents.items():
            self._index(page, content)
        self._is_sound = True


_tokens = itemgetter(0)  # of an entry of `PagePool._behind`


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens at the start of both are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
