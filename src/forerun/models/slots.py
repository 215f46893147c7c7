"""What targets have in common about KV memory: SlotTarget for our own decoders, UnpagedTarget for others.

SlotTarget manages KV pages: a sequence starts with the pages that are cached of its tokens, takes more as it grows and
gives all back when it is released; prompts are cut into passes, and a verdict says which slots move where. How a pass
is run is left to the decoders. UnpagedTarget counts slots, shares none and keeps none.

How much memory that is, how many slots and for how many sequences, comes first: `kv_memory` is in bytes, or a share of
what is free when a model is loaded. Hidden rows that heads need are kept beside keys and values (pages.py) and come on
top: a fifth at most.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.tree import ints_of
from forerun.core.types import Needs, Seq, TreeBatch, Verdict, first_rows, offsets
from forerun.models.base import BaseTarget
from forerun.models.config import DecoderConfig
from forerun.models.pages import PAGE, TREE_MARGIN, Extent, PagedKV, pages_for, start_digest

CPU_SHARE = 0.25  # of the memory that is free: the store grows into it as it is needed
GPU_SHARE = 0.75  # of what the weights leave: the pool is made at once
GPU_BATCHES = (128, 64, 32, 16)  # of sequences: graphs are captured for up to 128
PER_CORE, CPU_BATCH = 4, 64  # on a CPU: more per core make every text slower and hardly more tokens a second
LEAST_BATCH = 8
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # of a KV cache with scales
GPU_KINDS = {"int8": (8, 0), "fp8": (8, 9)}  # of the KV cache, and the compute capability that its kernels need
USUAL_LENGTH = 512  # tokens that the KV cache must hold for each of a batch: pages are taken as texts grow


def row_numbers(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Numbers of one head's keys of one token; those of 8 bits have the four bytes of their scale beside them.

    Where layers differ in size, a row has the keys of all heads.
    """
    heads = max(heads for heads, _ in config.varied.sizes) if config.varied is not None else 1
    return config.head_dim + (4 * heads if dtype.itemsize == 1 else 0)


def slot_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers that have them."""
    return config.kv_parts * config.kv_layers * config.kv_heads * row_numbers(config, dtype) * dtype.itemsize


def reason_against(kv_dtype: str, device: torch.device) -> str | None:
    """Why a KV cache on this device cannot be of this kind, and what can be done; None = it can."""
    if device.type == "cpu" and kv_dtype == "fp8":
        return "kv_dtype='fp8' needs a GPU; on a CPU use kv_dtype='int8' or kv_dtype='auto'"
    if device.type == "cuda" and kv_dtype in GPU_KINDS:
        has, needs = torch.cuda.get_device_capability(device), GPU_KINDS[kv_dtype]
        if has < needs:
            said = f"kv_dtype={kv_dtype!r} needs a GPU of compute capability {needs[0]}.{needs[1]}"
            return f"{said}, and this one has {has[0]}.{has[1]}; use kv_dtype={'int8' if has >= (8, 0) else 'auto'!r}"
    return None


def allowed_bytes(kv_memory: int | float | None, device: torch.device) -> int | None:
    """Bytes that the KV cache may take; None where it cannot be known how much is free."""
    if isinstance(kv_memory, int):
        return kv_memory
    free = free_memory(device)
    share = kv_memory or (CPU_SHARE if device.type == "cpu" else GPU_SHARE)
    return None if free is None else int(share * free)


def usual_batch(device: str, slots: int | None, threads: int) -> tuple[int, str]:
    """How many sequences are decoded together where nobody says, and why; `slots` = None is as many as are needed."""
    fitting = None if slots is None else slots // USUAL_LENGTH
    if device == "cpu":
        most, why = (
            max(LEAST_BATCH, min(PER_CORE * threads, CPU_BATCH)),
            f"{PER_CORE} per CPU thread (threads: {threads})",
        )
    else:
        most, why = GPU_BATCHES[0 if slots is not None else 1], "a GPU"
    if fitting is None or fitting >= most:
        return most, why if slots is None else f"{why}, room for {slots} tokens in the KV cache"
    found = next((batch for batch in (*GPU_BATCHES, LEAST_BATCH) if batch <= fitting), LEAST_BATCH)
    return found, f"room for {slots} tokens in the KV cache, {USUAL_LENGTH} for each"


def free_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one prompt that a pass takes: tokens to write behind what the extent holds."""

    seq: Seq
    extent: Extent
    tokens: list[int]


class Placement(TypedDict):
    """Where a decoder computes, and what its KV cache may take; see SlotTarget."""

    dtype: torch.dtype
    device: torch.device | str
    kv_slots: NotRequired[int | None]
    kv_memory: NotRequired[int | None]


class SlotTarget(BaseTarget):
    """The part of forerun.models.base.Target that is about slots; `prefill` and `score` are the decoders'."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_slots: int | None = None,
        kv_memory: int | None = None,
        kv_dtype: torch.dtype | None = None,
        scales_apart: bool = False,
    ) -> None:
        """`kv_slots` are made at once; without them pages are made as they are needed, for up to `kv_memory` bytes.

        `scales_apart`: those of rows of 8 bits lie in a tensor of their own, and not behind each row.
        """
        self.config, self._dtype, self.device = config, dtype, torch.device(device)
        self.vocab_size, self.max_length = config.vocab_size, config.max_length
        self._lengths: dict[int, int] = {}  # sequence -> the length that ropes with regimes take for its own
        kinds = {rope.kind: rope.context for rope in config.ropes}
        self._stretches, self._switch = "dynamic" in kinds, kinds.get("longrope")
        self._has_regimes, self._no_regimes = any(rope.has_regimes for rope in config.ropes), (0,) * len(config.ropes)
        self._wanted: frozenset[int] = frozenset()  # hidden layers of the last pass
        kept = kv_dtype or dtype
        self.kv = PagedKV(
            config.kv_layers,
            config.kv_heads,
            config.head_dim if scales_apart else row_numbers(config, kept),
            dtype=kept,
            device=self.device,
            capacity=kv_slots,
            limit=None if kv_memory is None else kv_memory // slot_bytes(config, kept),
            parts=config.kv_parts,
            scaled=scales_apart,
        )

    @property
    def used_slots(self) -> int:
        return self.kv.used

    @property
    def cached_slots(self) -> int:
        return self.kv.cached

    @property
    def slots(self) -> int | None:
        return self.kv.most

    @property
    @abstractmethod
    def pass_rows(self) -> int: ...

    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        moves = self._accept(seqs, verdict)
        if moves:
            self.kv.move(moves)

    def truncate(self, seq: Seq, length: int) -> None:
        self.kv.truncate(seq.id, length)

    def has_room(self, *lengths: int) -> bool:
        """A page more for each, for its trees, and one for each sequence that runs: it will grow."""
        if not lengths:
            return True
        return self.kv.has_pages(self.kv.sequences + sum(pages_for(length) + 1 for length in lengths) - 1)

    def make_room(self, seqs: Sequence[Seq], rows: Sequence[int]) -> bool:
        if len(seqs) == 1:  # in few steps: every round asks
            extent = self.kv.extent(seqs[0].id)
            if extent.length + rows[0] <= extent.writable:
                return True
        extents = zip(self.kv.extents([seq.id for seq in seqs]), rows, strict=True)
        lacking = [(one.id, one.length + count) for one, count in extents if one.length + count > one.writable]
        if not lacking:
            return True
        if not self.kv.has_pages(sum(self.kv.lacking(*one) for one in lacking)):
            return False
        for seq_id, end in lacking:
            self.kv.grow(seq_id, end)
        return True

    def reused_tokens(self, seq: Seq) -> int:
        return self.kv.extent(seq.id).reused

    def cached_tokens(self, seq: Seq) -> int:
        try:  # no check before: another thread may release it in between
            return self.kv.extent(seq.id).length
        except InvalidInput:
            return 0

    def reaches(self, seqs: Sequence[Seq]) -> list[int] | None:
        if (switch := self._switch) is None:
            return None
        return [switch if self._lengths.get(seq.id, 0) <= switch else self.max_length for seq in seqs]

    def release(self, seq: Seq) -> None:
        """Its pages stay, for other sequences to find, until they are needed."""
        self.kv.keep(seq.id, seq.tokens[:-1], ended=True)  # a round that failed may have written more
        self.kv.release(seq.id)
        self._lengths.pop(seq.id, None)

    def occupy(self, seq: Seq) -> None:
        """See forerun.models.base.HoldsUnread."""
        self._lengths[seq.id] = max(min(seq.max_length, self.max_length), len(seq.tokens))
        self.kv.admit(seq.id, (), None, ())
        extent = self.kv.grow(seq.id, len(seq.tokens))
        for page in extent.pages:
            for store in self.kv.stores:
                store[:, :, :, page * PAGE : (page + 1) * PAGE] = 0
        extent.length = len(seq.tokens) - 1

    def _admit(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> list[list[int]]:
        """Pages for all tokens of all, or none for those that had none; which tokens of each are to be cached now.

        These are all that are not, but the last, or the first `rows` of them.
        """
        layers = self._layers(needs)
        new = [seq for seq in seqs if not self.kv.holds(seq.id)]
        try:
            for seq in new:
                self._lengths[seq.id] = self._rope_length(seq)
                self._begin(seq, self.kv.admit(seq.id, seq.tokens[:-1], self._start_of(seq), layers))
            for seq in seqs:
                self.kv.grow(seq.id, len(seq.tokens))
        except BaseException:
            for seq in new:
                self.kv.release(seq.id)
            raise
        fresh = [seq.tokens[self.kv.extent(seq.id).length : -1] for seq in seqs]
        return fresh if rows is None else first_rows(fresh, rows)

    def _rope_length(self, seq: Seq) -> int:
        """Of a sequence that is admitted: its tokens, all of its prompt included, or what it may become."""
        length = max(len(seq.tokens), seq.prompt_length)
        return max(length, min(seq.max_length, self.max_length)) if self._stretches else length

    def _regimes_of(self, seq: Seq) -> tuple[int, ...]:
        """Of every rope; sequences of other regimes have other rotations."""
        if not self._has_regimes:
            return self._no_regimes
        return tuple(rope.regime(self._lengths[seq.id]) for rope in self.config.ropes)

    def _begin(self, seq: Seq, extent: Extent) -> None:
        """A new sequence starts with what was found of it; targets with more than keys and values may take less."""

    def _start_of(self, seq: Seq) -> bytes | None:
        """What its chain of pages starts from: equal pages have equal numbers, so ropes that stretch count too."""
        if seq.cache_salt is None:
            return None
        own = () if seq.adapter is None else (seq.adapter.name, seq.adapter.key)
        return start_digest(seq.cache_salt, *self._regimes_of(seq), *own)

    def _with_found(
        self, seqs: Sequence[Seq], fresh: Sequence[list[int]], hidden: Mapping[int, Tensor]
    ) -> tuple[list[list[int]], dict[int, Tensor]]:
        """The tokens and hidden rows of a prefill, behind those that were found: drafters observe both alike."""
        extents = [self.kv.extent(seq.id) for seq in seqs]
        counts = [extent.found for extent in extents]
        for extent in extents:
            extent.found = 0
        if not any(counts):
            return list(fresh), dict(hidden)
        chains = [seq.tokens[:count] + some for seq, count, some in zip(seqs, counts, fresh, strict=True)]
        sizes = [len(some) for some in fresh]
        slots = [slot for extent, count in zip(extents, counts, strict=True) for slot in extent.slots(0, count)]
        places, joined = ints_of(slots, self.device), {}
        for layer, rows in hidden.items():
            found = torch.split(self.kv.hidden[layer].index_select(0, places), counts)
            pairs = zip(found, torch.split(rows, sizes), strict=True)
            joined[layer] = torch.cat([part for pair in pairs for part in pair])
        return chains, joined

    def _passes(self, seqs: Sequence[Seq], fresh: Sequence[list[int]], size: int) -> Iterator[tuple[int, list[Piece]]]:
        """Prompts in passes of at most `size` rows: the first row of each, and its pieces, cached once it was run."""
        starts = offsets([len(tokens) for tokens in fresh])
        for first in range(0, starts[-1], size):
            pieces = []
            for seq, tokens, start in zip(seqs, fresh, starts, strict=False):
                if some := tokens[max(0, first - start) : max(0, first + size - start)]:
                    pieces.append(Piece(seq, self.kv.extent(seq.id), some))
            yield first, pieces
            self._keep_pieces(pieces)

    @abstractmethod
    def _read_piece(self, piece: Piece) -> None:
        """Write what a pass over a piece of a text keeps, and nothing else."""

    def _pieces(self, seqs: Sequence[Seq], fresh: Sequence[list[int]]) -> list[Piece]:
        """Prompts as pieces of one pass; `_keep_pieces` counts them as cached once it was run."""
        return [Piece(seq, self.kv.extent(seq.id), some) for seq, some in zip(seqs, fresh, strict=True) if some]

    def _keep_pieces(self, pieces: Sequence[Piece]) -> None:
        """Others that start alike may find them from now on."""
        for piece in pieces:
            piece.extent.length, piece.extent.coming = piece.extent.length + len(piece.tokens), 0
            self.kv.keep(piece.seq.id, piece.seq.tokens[:-1])

    def _extent_for(self, seq: Seq, nodes: int) -> Extent:
        """A sequence's pages, with room for a tree of `nodes` nodes."""
        if nodes > TREE_MARGIN:
            raise InvalidInput(f"a tree of {nodes} nodes is too large: at most {TREE_MARGIN} nodes, the root included")
        extent = self.kv.extent(seq.id)
        end = extent.length + extent.coming + nodes
        return extent if end <= extent.writable else self.kv.grow(seq.id, end)

    def _keep_rows(self, hidden: Mapping[int, Tensor], slots: Sequence[int]) -> None:
        """Keep the hidden rows of a pass beside keys and values, for sequences that start alike."""
        if hidden:
            places = ints_of(slots, self.device)
            for layer, rows in hidden.items():
                self.kv.rows_of(layer, rows.shape[1], rows.dtype).index_copy_(0, places, rows)

    def _note_layers(self, seqs: Sequence[Seq], needs: Needs) -> None:
        """A pass over these sequences computes, and keeps, the rows of these hidden layers only."""
        wanted = self._wanted
        if wanted != {*needs.hidden_layers}:
            wanted = self._wanted = frozenset(needs.hidden_layers)
        extents = [self.kv.extent(seqs[0].id)] if len(seqs) == 1 else self.kv.extents([s.id for s in seqs])
        for extent in extents:
            if extent.layers is not wanted:
                common = extent.layers & wanted
                extent.layers = wanted if common == wanted else common

    def _accept(self, seqs: Sequence[Seq], verdict: Verdict) -> list[tuple[int, int]]:
        """Count root and path of every tree as committed; the slots that must move for it."""
        moves: list[tuple[int, int]] = []
        extents = [self.kv.extent(seqs[0].id)] if len(seqs) == 1 else self.kv.extents([s.id for s in seqs])
        for extent, path in zip(extents, verdict.to_host()[0], strict=True):
            if not path or path[-1] == len(path):  # nothing, or the first nodes of a chain: the usual cases
                extent.length += 1 + len(path)
            else:
                moves += self.kv.accept(extent.id, path)
        return moves

    def _layers(self, needs: Needs) -> tuple[int, ...]:
        """The hidden layers needed: i = what enters layer i, -1 = what leaves the last norm."""
        for layer in needs.hidden_layers:
            if not -1 <= layer <= self.config.layers:
                raise InvalidInput(f"hidden layer {layer} is not one of -1 to {self.config.layers}")
        return needs.hidden_layers

    def _empty_rows(self, count: int) -> Tensor:
        return torch.empty(count, self.config.width, dtype=self._dtype, device=self.device)


class UnpagedTarget(BaseTarget, ABC):
    """The part of forerun.models.base.Target that is about room, where a token cached is a slot used."""

    slots: int | None
    cached_slots = 0
    _promised: int  # slots for the trees of the coming round; 0 again once they are committed

    @property
    @abstractmethod
    def used_slots(self) -> int: ...

    def reused_tokens(self, seq: Seq) -> int:
        return 0

    def has_room(self, *lengths: int) -> bool:
        return self.slots is None or self.used_slots + self._promised + sum(lengths) <= self.slots

    def make_room(self, seqs: Sequence[Seq], rows: Sequence[int]) -> bool:
        self._promised = 0
        fits = self.has_room(*rows)
        self._promised = sum(rows) if fits else 0
        return fits
