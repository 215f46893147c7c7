"""How large the inputs of each matrix are on some texts: rounding errors count by what they are multiplied by."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from forerun.core.errors import UnsupportedModel
from forerun.measure.quality import WINDOW, laws_of, windows_of
from forerun.models.blocks import Block
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.layers import Mlp
from forerun.models.load.checkpoint import Checkpoint
from forerun.models.load.quantized.writing import plain_weights
from forerun.models.pages import TREE_MARGIN

_PRODUCTS = (torch.mm, torch.mv, torch.addmm, Tensor.addmm_, Tensor.addmv_)  # of forerun.models.layers
_MATRIX = re.compile(r"layers\.(\d+)\.\w+\.(\w+)_proj\.weight$")
_JOINED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}  # others have their own names


def input_sizes(checkpoint: Checkpoint, texts: Sequence[str]) -> dict[str, Tensor]:
    """[K] the mean square of what each column of a layer's matrices is multiplied by, in float32 on the CPU."""
    weights, config = plain_weights(checkpoint), DecoderConfig.from_hf(checkpoint.config)
    if config.special:
        raise UnsupportedModel(f"--calibrate cannot read {config.family!r}: it has {config.special}")
    windows = windows_of(checkpoint, texts, WINDOW)
    slots = max(map(len, windows)) + TREE_MARGIN
    decoder = Decoder(config, weights, dtype=torch.float32, device="cpu", kv_slots=slots)
    noted = _Noted(decoder)
    with noted:
        for window in windows:
            laws_of(decoder, window)
    return {name: noted.mean_square(int(match[1]), _JOINED.get(match[2], match[2]))
            for name in weights if (match := _MATRIX.search(name))}  # fmt: skip


class _Noted(TorchFunctionMode):
    """Sums the squares of rows that are multiplied by a layer's matrices."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self._places = dict[int, tuple[int, str]]()
        for index, block in enumerate(decoder.shared().layers):
            assert isinstance(block, Block)
            assert isinstance(block.mlp, Mlp)
            matrices = {"qkv": block.qkv, "o": block.o, "gate_up": block.mlp.gate_up, "down": block.mlp.down}
            self._places |= {weight.data_ptr(): (index, name) for name, weight in matrices.items()}
        self._sums, self._rows = dict[tuple[int, str], Tensor](), dict[tuple[int, str], int]()

    def mean_square(self, index: int, name: str) -> Tensor:
        """Of rows in front of one matrix."""
        return self._sums[index, name] / self._rows[index, name]

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function in _PRODUCTS:
            left, right = args[-2:]
            turned = right.t() if right.dim() == 2 else right[None]
            for weight, rows in ((right, left), (left, turned)):
                if (place := self._places.get(weight.data_ptr())) is not None:
                    squares = rows.float().square().sum(0)
                    self._sums[place] = self._sums.get(place, 0.0) + squares
                    self._rows[place] = self._rows.get(place, 0) + len(rows)
        return function(*args, **(kwargs or {}))
