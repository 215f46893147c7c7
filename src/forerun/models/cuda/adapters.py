"""LoRA adapters on a GPU: stacks of their matrices by slot, and which rows of a pass have which.

An adapter is read and laid out on the host by whoever loads it. The engine's thread copies it into a slot when a pass
first has rows of it; the slot is free again when nobody holds the adapter. Graphs read slots and rows from buffers, so
another adapter in a slot needs no new capture: only more slots than there are, or a higher rank, move the stacks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakSet, finalize

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import DamagedFile, InvalidInput
from forerun.core.types import LoadedAdapter
from forerun.models.adapters import Adapter, parts_of
from forerun.models.config import DecoderConfig
from forerun.models.cuda.plan import MAX_ROWS, Runs, SentInts
from forerun.models.layers import pair_up
from forerun.models.pages import Ints

log = logging.getLogger(__name__)

ROWS, RANKS, NONE, EMPTY = 16, 16, -1, -2  # as kernels/adapters.py has them
FEWEST = 4  # slots
HEAD = 16  # ints before those of rows: so that all parts of what is sent are aligned
PARTS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate": ("gate", "up"), "down": ("down",)}  # by product


class Shape(NamedTuple):
    """Of one product that adapters change."""

    outputs: tuple[int, ...]  # of each part
    inputs: int

    @property
    def parts(self) -> int:
        return len(self.outputs)


def shapes_of(config: DecoderConfig) -> dict[str, Shape]:
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "qkv": Shape((queries, keys, keys), config.width),
        "o": Shape((config.width,), queries),
        "gate": Shape((config.inner, config.inner), config.width),
        "down": Shape((config.width,), config.inner),
    }


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CudaAdapter:
    """Implements forerun.core.types.LoadedAdapter; matrices [rank, in] and [out, rank] wait here for a slot."""

    name: str
    key: int
    nbytes: int
    rank: int  # a multiple of RANKS
    scale: float
    stacks: AdapterStacks  # of the target that it was loaded for
    waiting: dict[tuple[int, str, int], tuple[Tensor, Tensor]]  # by layer, product and part


@dataclass(frozen=True, slots=True)
class Adapted:
    """The ints of a pass whose rows have adapters."""

    count: Tensor  # [HEAD] the first: how many adapters the pass has
    owners: Tensor  # [rows] the slot of each row's adapter; below 0: it has none
    chosen: Tensor  # [rows] the slots of all that the pass has; EMPTY behind them
    table: Tensor  # [units, 1 + ROWS] a slot, then rows that have it
    units: int


@dataclass(frozen=True, slots=True)
class Stack:
    """The adapters of one product in one layer."""

    down: Tensor  # [slots, parts, rank, in]
    up: Tensor  # [slots, out, rank], parts one after another
    ranks: Tensor  # [slots, parts] int32; 0 = this part is not changed


class AdapterStacks:
    """Everything that passes read; made when the first adapter is used."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device, self.shapes = config, dtype, device, shapes_of(config)
        self.moved: Callable[[], None] = lambda: None  # called when graphs read memory that is no more
        self.slots = self.rank = 0
        self.layers: list[dict[str, Stack]] = []
        self.scales = torch.ones(0, device=device)  # [slots]
        self._alive, self._lock = WeakSet[CudaAdapter](), Lock()  # any thread loads
        self._placed: dict[int, int] = {}  # slots by an adapter's key
        self._free: list[int] = []
        self._last: tuple[Any, Ints] | None = None  # what was asked of `units_of` last, and the answer
        self._gone: deque[int] = deque()  # keys of adapters that nobody holds; any thread adds to them

    @property
    def in_use(self) -> bool:
        return len(self._alive) > 0

    def load(self, name: str, key: int, adapter: Adapter) -> CudaAdapter:
        """On the host; any thread may call."""
        rank = -(-adapter.rank // RANKS) * RANKS
        places = {part: (product, i) for product, parts in PARTS.items() for i, part in enumerate(parts)}
        waiting, nbytes = dict[tuple[int, str, int], tuple[Tensor, Tensor]](), 0
        for layer, part, down, up in parts_of(adapter, self.config):
            down = F.pad(down, (0, 0, 0, rank - len(down))).to(self.dtype)
            rope = self.config.layer_ropes[layer] if part in "qk" else None
            if rope is not None:  # rows of queries and keys lie as those of the base do
                up = pair_up(up, self.config.head_dim, self.config.ropes[rope].dims)
            up = F.pad(up, (0, rank - up.shape[1])).to(self.dtype)
            ends = torch.stack((*down.aminmax(), *up.aminmax()))
            if not ends.isfinite().all():  # rows of others are multiplied by zero there: never by NaN
                raise DamagedFile(
                    f"the adapter {name!r} has numbers that are not finite in layer {layer}; fetch it again"
                )
            waiting[layer, *places[part]] = down, up
            nbytes += down.nbytes + up.nbytes
        loaded = CudaAdapter(name, key, nbytes, rank, adapter.scale, self, waiting)
        with self._lock:
            self._alive.add(loaded)
        finalize(loaded, self._gone.append, key)
        return loaded

    def slot_of(self, adapter: LoadedAdapter) -> int:
        """Where an adapter lies; it is copied there where a pass has it for the first time."""
        if not isinstance(adapter, CudaAdapter) or adapter.stacks is not self:
            raise InvalidInput(f"the adapter {adapter.name!r} was loaded by another target")
        if adapter.key not in self._placed:
            self._place(adapter)
        return self._placed[adapter.key]

    def _loaded(self) -> list[CudaAdapter]:
        with self._lock:
            return [*self._alive]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _place(self, adapter: CudaAdapter) -> None:
        while self._gone:
            if (slot := self._placed.pop(self._gone.popleft(), None)) is not None:
                self._free.append(slot)
        if not self._free or adapter.rank > self.rank:
            self._make_room(max(self.rank, *(one.rank for one in self._loaded())))
        slot = self._placed[adapter.key] = self._free.pop()
        self._last = None
        self.scales[slot] = adapter.scale
        for layer, products in enumerate(self.layers):
            for product, stack in products.items():
                stack.ranks[slot] = 0
                shape, first = self.shapes[product], 0
                for part, outputs in enumerate(shape.outputs):
                    if (pair := adapter.waiting.pop((layer, product, part), None)) is not None:
                        stack.down[slot, part, : adapter.rank].copy_(pair[0], non_blocking=True)
                        stack.up[slot, first : first + outputs, : adapter.rank].copy_(pair[1], non_blocking=True)
                        stack.ranks[slot, part] = adapter.rank
                    first += outputs

    def _make_room(self, rank: int) -> None:
        """Stacks for all adapters that there are, and for as many as there were; what lies in them moves along."""
        slots = max(FEWEST, 1 << (max(len(self._alive), self.slots + (not self._free)) - 1).bit_length())
        old, self.layers = self.layers, []
        for layer in range(self.config.layers):
            own = {name: shape for name, shape in self.shapes.items() if name in self._products(layer)}
            self.layers.append({product: self._stack(shape, slots, rank) for product, shape in own.items()})
            for product, stack in self.layers[-1].items() if old else ():
                before = old[layer][product]
                stack.down[: self.slots, :, : self.rank] = before.down
                stack.up[: self.slots, :, : self.rank] = before.up
                stack.ranks[: self.slots] = before.ranks
        self.scales = torch.cat((self.scales, self.scales.new_ones(slots - self.slots)))
        self._free += range(self.slots, slots)
        self.slots, self.rank = slots, rank
        self._make_buffers()
        log.info("room for %d adapters of rank %d", slots, rank)
        self.moved()

    def _products(self, layer: int) -> tuple[str, ...]:
        """Those of a layer that adapters may change: not those of experts."""
        return ("qkv", "o") if self.config.sparse[layer] else tuple(PARTS)

    def _stack(self, shape: Shape, slots: int, rank: int) -> Stack:
        down = torch.zeros(slots, shape.parts, rank, shape.inputs, dtype=self.dtype, device=self.device)
        up = torch.zeros(slots, sum(shape.outputs), rank, dtype=self.dtype, device=self.device)
        return Stack(down, up, torch.zeros(slots, shape.parts, dtype=torch.int32, device=self.device))

    def _make_buffers(self) -> None:
        """Where the kernels of a pass work."""
        most = max(shape.parts for shape in self.shapes.values())
        widest = max(sum(shape.outputs) for shape in self.shapes.values())
        self.sent = SentInts(self.device, HEAD + 2 * MAX_ROWS + self.units(MAX_ROWS) * (ROWS + 1), torch.int32)
        self.middle = torch.zeros(2 * MAX_ROWS * most * self.rank, dtype=self.dtype, device=self.device)
        self.delta = torch.zeros(MAX_ROWS * widest, device=self.device)
        blocks = self.units(MAX_ROWS) * most * self.rank // RANKS
        splits = max(splits_of(shape.inputs) for shape in self.shapes.values())
        self.partial = torch.empty(blocks * splits * RANKS * ROWS, device=self.device)
        self.counters = torch.zeros(blocks, dtype=torch.int32, device=self.device)
        self.begun = torch.zeros(len(PARTS) * RANKS, dtype=torch.int32, device=self.device)  # flags of the products

    def units(self, rows: int) -> int:
        """Units of rows of one adapter, or of none, that a pass over so many rows may have."""
        return min(rows, rows // ROWS + self.slots + 1)

    def units_of(self, rows: int, runs: Runs) -> Ints:
        """What is sent with a pass of this size (`Adapted`); `runs` name the adapter of rows first .. end."""
        asked = rows, [(None if adapter is None else adapter.key, first, end) for adapter, first, end in runs]
        if self._last is None or self._last[0] != asked:  # rounds of one batch ask the same again and again
            by_slot = dict[int, list[int]]()
            for adapter, first, end in runs:
                by_slot.setdefault(NONE if adapter is None else self.slot_of(adapter), []).extend(range(first, end))
            self._last = asked, self._sorted(rows, by_slot)
        return self._last[1]

    def _sorted(self, rows: int, by_slot: dict[int, list[int]]) -> Ints:
        sent, owners, units = self.padding(rows), [NONE] * rows, list[int]()
        for slot, some in by_slot.items():
            for row in some:
                owners[row] = slot
            for low in range(0, len(some), ROWS):
                few = some[low : low + ROWS]
                units += [slot, *few, *[EMPTY] * (ROWS - len(few))]
        chosen, table = HEAD + up16(rows), HEAD + 2 * up16(rows)
        own = [slot for slot in by_slot if slot != NONE]
        sent[0], sent[HEAD : HEAD + rows] = len(own), owners
        sent[chosen : chosen + len(own)] = own
        sent[table : table + len(units)] = units
        return sent

    def padding(self, rows: int) -> Ints:
        """Of a pass over nothing."""
        sent = np.full(HEAD + 2 * up16(rows) + self.units(rows) * (ROWS + 1), EMPTY, dtype=np.int32)
        sent[0] = 0
        return sent

    def sent_with(self, rows: int) -> Adapted:
        """Where passes of so many rows find what was sent with them."""
        units, owners = self.units(rows), HEAD + up16(rows)
        head, all_owners, chosen, table = torch.split(
            self.sent.all[: owners + up16(rows) + units * (ROWS + 1)],
            [HEAD, up16(rows), up16(rows), units * (ROWS + 1)],
        )
        return Adapted(head, all_owners, chosen, table, units)

    def prepare(self) -> None:
        """Copy all adapters to the device that there are: before graphs are captured, which would move."""
        for adapter in sorted(self._loaded(), key=lambda one: one.key):
            self.slot_of(adapter)


def splits_of(inputs: int) -> int:
    """Into how many stretches the sums along these inputs are cut: by their number alone."""
    return max((s for s in range(1, 33) if inputs % (64 * s) == 0 and inputs // s >= 512), default=1)


def depth_of(inputs: int) -> int:
    """Inputs that a program multiplies at once."""
    stretch = inputs // splits_of(inputs)
    return next(size for size in (512, 256, 128, 64, 32, 16) if stretch % size == 0)


def up16(rows: int) -> int:
    return -(-rows // 16) * 16
