"""PagedKV: the KV cache in pages, which sequences take as they grow and share where they start alike.

One tensor has the keys and values of all layers; PagePool says whose pages are where. The nodes of a tree are written
behind the committed positions of its sequence, an accepted path is moved next to its root, and what lies beyond a
sequence's length is never read. Pages that are shared or named are never written: see `PagedKV.grow`. Hidden rows that
drafters need are kept beside keys and values, so that a prompt that is found is observed like one that was computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.tree import ints_of
from forerun.models.pages import PAGE, Content, Match, PagePool, digest_of, pages_for

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

    @property
    def size(self) -> int:
        """Positions that its pages have room for."""
        return PAGE * len(self.pages)

    def slots(self, first: int, end: int) -> list[int]:
        return slots_of(self.pages, first, end)


def slots_of(pages: Sequence[int], first: int, end: int) -> list[int]:
    return [pages[position // PAGE] * PAGE + position % PAGE for position in range(first, end)]


class PagedKV:
    """Keys and values of all sequences: `data` [L, 2, Hkv, S, D], keys at 0 and values at 1, or one row that is both.

    A row of D numbers is copied as a whole: what else it holds (kv_budget.row_numbers) is of no concern here. `scales`
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
