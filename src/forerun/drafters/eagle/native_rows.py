"""The true rows that a native head has not read yet, as its kernels take them: addresses and columns of integers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forerun.drafters.eagle.head_cache import HeadCache
from forerun.drafters.head_drafter import Piece
from forerun.models.hidden_rows import LayerRows


class Features:
    """The addresses of the features of some rows, layer by layer, for the kernels."""

    def __init__(self, pieces: Sequence[Piece], width: int) -> None:
        self._kept: list[Sequence[Tensor]] = []  # the memory that is pointed to
        self._parts = 0
        self._addresses: list[int] = []
        for layers, rows in pieces:
            if isinstance(layers, LayerRows):
                steps = [(at, layers.hidden.row_bytes) for at in layers.addresses]
                self._kept.append(layers)
            else:
                steps = self._steps(layers, width)
            self._addresses += [at + row * size for row in rows for at, size in steps]
            self._parts = len(steps)

    def _steps(self, layers: Sequence[Tensor], width: int) -> list[tuple[int, int]]:
        """Where each layer starts, and the bytes of its rows; a tensor has one layer, or several side by side."""
        kept = [layer.float().contiguous() for layer in layers]
        self._kept.append(kept)
        firsts = [(t.data_ptr(), 4 * t.shape[1]) for t in kept]
        return [(at + 4 * i, size) for at, size in firsts for i in range(0, size // 4, width)]

    def of(self, first: int, count: int) -> list[int]:
        """[rows * layers] of so many rows."""
        return self._addresses[first * self._parts : (first + count) * self._parts]


class TrueRows:
    """Rows of one pass, and the columns that `NativeRunner.run` takes: a row sees those before it, then itself."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.features: list[int] = []
        self.columns: list[list[int]] = [[], [], [], [], []]

    def add(
        self, cache: HeadCache, seq_id: int, tokens: Sequence[int], features: Features, first: int, end: int
    ) -> None:
        """Rows `first` to `end` of those that are new, behind what the cache has; they count as cached from now on."""
        if end <= first:
            return
        base, length, count = cache.base(seq_id), cache.lengths[seq_id], end - first
        places, own = range(length, length + count), range(base + length, base + length + count)
        new = ([base] * count, places, [1] * count, places, own)
        for column, numbers in zip(self.columns, new, strict=True):
            column += numbers
        self.tokens += tokens[first:end]
        self.features += features.of(first, count)
        cache.lengths[seq_id] = length + count
