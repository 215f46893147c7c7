"""The KV cache in pages, which sequences take as they grow and share where they start alike.

`PagedKV` has keys and values of all layers in one tensor. The nodes of a tree are written behind the committed
positions of its sequence, an accepted path moves next to its root, and what lies beyond a sequence's length is never
read. Hidden rows that drafters need lie beside them: a prompt that is found is observed like one that was computed.

`PagePool` knows who holds which pages, and what finished pages contain. A page has PAGE positions, the tile that
attention walks anyway. A page whose positions are committed can be *named* by its tokens and by everything before them;
a sequence that starts with the same tokens then holds the same page. A named page that nobody holds stays (cached)
until its place is needed: the one held least recently goes first, the end of a text before its start. `held` and
`contents` are the truth, and each of their changes is one assignment; everything else is derived from them, anew after
an interrupt: no page is lost, and none has two owners that do not share it knowingly.
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
import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.tree import ints_of

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


CHUNK = 1024  # slots; a store that grows does so by at least this many
KEPT_BYTES = 1 << 30  # of finished texts, beyond which a store that could grow takes their pages instead

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class Extent:
    """One sequence's positions: on which pages they lie, and how many of them, from the start, are committed."""

    __slots__ = ("coming", "digests", "found", "id", "layers", "length", "pool", "reused", "start", "writable")

    def __init__(self, seq_id: int, pool: PagePool, start: bytes | None, layers: Iterable[int]) -> None:
        self.id, self.pool, self.start = seq_id, pool, start  # start None = its pages are not shared
        self.length = 0
        self.coming = 0  # positions behind these that the pass under way writes: prompts that start with it
        self.reused = 0  # positions that were found when it was admitted
        self.found = 0  # of these, the ones that `prefill` has not returned yet
        self.layers = frozenset(layers)  # hidden layers whose rows were kept for all positions so far
        self.digests: list[bytes] = []  # after each page that is named
        self.writable = 0  # positions below this, behind the committed ones, may be written: see PagedKV.grow

    @property
    def pages(self) -> tuple[int, ...]:
        return self.pool.held.get(self.id, ())

    def slots(self, first: int, end: int) -> list[int]:
        return slots_of(self.pages, first, end)


def slots_of(pages: Sequence[int], first: int, end: int) -> list[int]:
    return [pages[position // PAGE] * PAGE + position % PAGE for position in range(first, end)]


class PagedKV:
    """Keys and values of all sequences: `data` [L, 2, Hkv, S, D], keys at 0 and values at 1, or one row that is both.

    A row of D numbers is copied as a whole: what else it holds (slots.row_numbers) is of no concern here. `scales`
    [L, 2, Hkv, S] are those of rows of 8 bits that lie apart from them.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int | None,
        limit: int | None = None,
        parts: int = 2,
        scaled: bool = False,
    ) -> None:
        """`capacity` slots, made at once; None = as many as are needed, up to `limit`."""
        pages = pages_for(capacity or 0)
        self._most = pages if capacity is not None else None if limit is None else max(1, limit // PAGE)
        self.pool = PagePool(pages)
        self.hidden: dict[int, Tensor] = {}  # layer -> [S, width] rows kept for drafters
        with torch.inference_mode(False):  # written in every mode
            self.data = torch.empty(layers, parts, kv_heads, pages * PAGE, head_dim, dtype=dtype, device=device)
            self.scales = torch.empty(self.data.shape[:4], device=device) if scaled else None
        self._extents: dict[int, Extent] = {}
        # slots copied since it was emptied, for processes with parts of the cache; None = there are none
        self.journal: list[list[tuple[int, int]]] | None = None

    @property
    def stores(self) -> list[Tensor]:
        """What a slot has, in dimension 3 of each: numbers of 8 bits as int8, for copies know no others."""
        data = self.data.view(torch.int8) if self.data.itemsize == 1 else self.data
        return [data] if self.scales is None else [data, self.scales]

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores)

    @property
    def used(self) -> int:
        """Slots on pages that sequences hold."""
        return PAGE * self.pool.used

    @property
    def cached(self) -> int:
        """Slots on pages of finished texts, which are kept until they are needed."""
        return PAGE * self.pool.cached

    @property
    def capacity(self) -> int:
        return PAGE * self.pool.size

    @property
    def most(self) -> int | None:
        """Slots that there can be; None = no limit."""
        return None if self._most is None else PAGE * self._most

    @property
    def sequences(self) -> int:
        return len(self._extents)

    def holds(self, seq_id: int) -> bool:
        return seq_id in self._extents

    def extent(self, seq_id: int) -> Extent:
        extent = self._extents.get(seq_id)
        if extent is None:
            raise InvalidInput(f"sequence {seq_id} holds no KV slots: prefill it first")
        return extent

    def extents(self, seq_ids: Sequence[int]) -> list[Extent]:
        """`extent` of several."""
        known = self._extents
        try:
            return [known[seq_id] for seq_id in seq_ids]
        except KeyError:
            return [self.extent(seq_id) for seq_id in seq_ids]  # which says whose there is none

    def has_pages(self, count: int) -> bool:
        return self._most is None or count <= self._most - self.pool.size + self.pool.available

    def admit(self, seq_id: int, tokens: Sequence[int], start: bytes | None, layers: Sequence[int]) -> Extent:
        """A new sequence: it starts with what is cached of these tokens together with the rows of these layers."""
        self.release(seq_id)
        match = Match((), (), frozenset()) if start is None else self.pool.find(start, tokens, layers)
        extent = Extent(seq_id, self.pool, start, match.layers if match.tokens else layers)
        unheld = sum(self.pool.holders(page) == 0 for page in (*match.pages, match.source))
        copies = match.part > 0 and self.has_pages(1 + unheld)  # the source is held until it is copied
        self.pool.share(seq_id, (*match.pages, match.source) if copies else match.pages)
        self._extents[seq_id] = extent
        extent.digests, extent.length = list(match.digests), PAGE * len(match.pages)
        if copies:
            self._own(extent, len(match.pages))
            extent.length += match.part
        extent.reused = extent.found = extent.length
        return extent

    def lacking(self, seq_id: int, positions: int) -> int:
        """Pages that a sequence lacks to be written up to `positions`."""
        extent = self.extent(seq_id)
        pages, needed = extent.pages, pages_for(positions)
        shared = sum(self.pool.holders(page) > 1 for page in pages[extent.length // PAGE : needed])
        return max(0, needed - len(pages)) + shared

    def grow(self, seq_id: int, positions: int) -> Extent:
        """Pages for `positions` positions; those behind the committed ones become its own, to be written."""
        extent = self.extent(seq_id)
        if positions <= extent.writable:  # usually; only full pages of committed positions are named later
            return extent
        pages, needed = extent.pages, pages_for(positions)
        for index in range(extent.length // PAGE, min(len(pages), needed)):
            if self.pool.holders(pages[index]) > 1:
                self._own(extent, index)
            elif pages[index] in self.pool.contents:
                self.pool.unname(pages[index])
        if needed > len(pages):
            self._find_room(seq_id, needed - len(pages))
            self.pool.take(seq_id, needed - len(pages))
        extent.writable = PAGE * needed
        return extent

    def keep(self, seq_id: int, tokens: Sequence[int], ended: bool = False) -> None:
        """Name the full pages of a sequence that has these tokens, for others to find; at its end the last one too."""
        extent = self._extents.get(seq_id)
        if extent is None or extent.start is None:
            return
        length, pages = min(extent.length, len(tokens)), extent.pages
        for index in range(len(extent.digests), length // PAGE + ended):
            some = tuple(tokens[index * PAGE : min(length, (index + 1) * PAGE)])
            if not some:
                break
            before = extent.digests[index - 1] if index else extent.start
            self.pool.name(pages[index], Content(before, some, extent.layers))
            if len(some) == PAGE:
                extent.digests.append(digest_of(before, some))

    def release(self, seq_id: int) -> None:
        """Give a sequence's pages back; those that are named stay until they are needed."""
        self._extents.pop(seq_id, None)
        self.pool.release(seq_id)

    def accept(self, seq_id: int, path: Sequence[int]) -> list[tuple[int, int]]:
        """Commit a root, written at the first position behind the committed ones, and some nodes behind it.

        `path` has the nodes' places relative to the root, ascending. Returns the slots to `move` next to the root, as
        (from, to): none where the nodes are already in place.
        """
        extent = self.extent(seq_id)
        root = extent.length
        extent.length += 1 + len(path)
        if not path or path[-1] == len(path):  # nothing, or the first nodes of a chain: the usual cases
            return []
        pages = extent.pages
        moved = [(root + node, root + i) for i, node in enumerate(path, start=1) if node != i]
        return [(slots_of(pages, a, a + 1)[0], slots_of(pages, b, b + 1)[0]) for a, b in moved]

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy slots, in all layers. A path moves towards its root: no slot is written before it was read."""
        if not moves:
            return
        if self.journal is not None:  # first: what is copied and not noted would be lost
            self.journal.append(list(moves))
        if self.data.device.type == "cpu":
            for source, place in moves:  # quicker than a gather, for the few that there are
                for store in self.stores:
                    store.select(3, place).copy_(store.select(3, source))
                for rows in self.hidden.values():
                    rows[place] = rows[source]
        else:
            both = ints_of(list(zip(*moves, strict=True)), self.data.device)  # [2, P]
            self.move_on_device(both[0], both[1])

    def move_on_device(self, sources: Tensor, places: Tensor) -> None:
        for store in self.stores:
            store.index_copy_(3, places, store.index_select(3, sources))
        for rows in self.hidden.values():
            rows.index_copy_(0, places, rows.index_select(0, sources))

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget what is committed beyond the first `length`; unknown sequences are ignored."""
        extent = self._extents.get(seq_id)
        if extent is not None and length < extent.length:
            extent.length = length
            extent.found = min(extent.found, length)
            extent.writable = 0  # what is cut off may be named, or shared
            del extent.digests[length // PAGE :]

    def rows_of(self, layer: int, width: int, dtype: torch.dtype) -> Tensor:
        """[S + 1, width] where the rows of a hidden layer are kept; behind the last slot, what belongs nowhere."""
        if layer not in self.hidden:
            with torch.inference_mode(False):
                self.hidden[layer] = torch.zeros(self.capacity + 1, width, dtype=dtype, device=self.data.device)
        return self.hidden[layer]

    def _own(self, extent: Extent, index: int) -> None:
        """Replace a page that others may read by a copy."""
        length, extent.length = extent.length, min(extent.length, index * PAGE)  # until it is copied
        self._find_room(extent.id, 1)
        exchanged = self.pool.replace(extent.id, index)
        assert exchanged is not None
        if self.journal is not None:
            pages = (range(page * PAGE, (page + 1) * PAGE) for page in exchanged)
            self.journal.append(list(zip(*pages, strict=True)))
        source, place = (slice(page * PAGE, (page + 1) * PAGE) for page in exchanged)
        for store in self.stores:
            store[:, :, :, place] = store[:, :, :, source]
        for rows in self.hidden.values():
            rows[place] = rows[source]
        extent.length = length

    def _find_room(self, seq_id: int, count: int) -> None:
        """Make `count` pages available: free ones, then new ones, then those of finished texts."""
        pool = self.pool
        free = pool.available - pool.cached
        slot_bytes = self.nbytes // max(1, self.data.shape[3])
        spares = pool.cached * PAGE * slot_bytes < KEPT_BYTES
        if count > (free if spares else pool.available) and (self._most is None or pool.size < self._most):
            self._enlarge(count - free)
        if count > pool.available:
            raise InvalidInput(
                f"sequence {seq_id} needs {count} more pages of {PAGE} KV slots, but {pool.available} of {pool.size} "
                "are free: raise kv_slots, lower max_tokens, or wait for a sequence to finish"
            )

    def _enlarge(self, pages: int) -> None:
        """Grow the tensor by `pages` pages, by half its size at least; the copy is rare."""
        pages = pages_for(max(pages * PAGE, self.capacity // 2, CHUNK))
        if self._most is not None:
            pages = min(pages, self._most - self.pool.size)
        old, held = self.data, self.capacity
        with torch.inference_mode(False):
            larger = old.new_empty(*old.shape[:3], held + pages * PAGE, old.shape[4])
        larger[:, :, :, :held] = old[:, :, :, :held]  # it may be larger already, if this was interrupted once
        assert self.scales is None, "a store with scales apart is made at once"
        for layer, rows in self.hidden.items():
            with torch.inference_mode(False):
                longer = rows.new_zeros(held + pages * PAGE + 1, rows.shape[1])
            longer[:held] = rows[:held]
            self.hidden[layer] = longer
        self.data = larger
        self.pool.grow(pages)
