"""Number formats (dtypes) of one checkpoint on a CPU, and what a pass costs in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.bench.machine import weight_bytes
from forerun.build import load_target
from forerun.control.cost import CostModel
from forerun.errors import ForerunError
from forerun.models.load import checkpoint as loading
from forerun.params import EngineConfig

if TYPE_CHECKING:
    from forerun.models.base import Target
    from forerun.models.load.checkpoint import Checkpoint
    from forerun.params import Dtype

MODES: tuple[Dtype, ...] = ("gguf", "q8", "bfloat16", "float32")
REFERENCE: Dtype = "float32"


@dataclass(frozen=True, slots=True)
class Mode:
    """A checkpoint in one number format; `target` is None where it cannot be loaded, and `why_not` says why."""

    name: Dtype
    target: Target | None
    why_not: str = ""


def load_mode(checkpoint: Checkpoint, name: Dtype) -> Mode:
    """The checkpoint's weights on the CPU in one format."""
    try:
        return Mode(name, load_target(checkpoint, EngineConfig(dtype=name, device="cpu")))
    except ForerunError as error:
        return Mode(name, None, str(error))


def load_modes(model: str, names: Sequence[Dtype] = MODES) -> Iterator[Mode]:
    """One after the other, so that only one of them need be in memory."""
    for name in names:
        yield load_mode(loading.open_checkpoint(model), name)


def measure_modes(model: str, gb_per_second: float, names: Sequence[Dtype] = MODES) -> dict[str, Any]:
    """t(n) of every format, the bytes a plain pass reads, and the share of the memory bandwidth that this is."""
    found: dict[str, Any] = {}
    for mode in load_modes(model, names):
        if mode.target is None:
            found[mode.name] = {"t": None, "why_not": mode.why_not}
            continue
        cost, read = CostModel.measure(mode.target), weight_bytes(mode.target)
        share = None if read is None else round(read / cost.pass_seconds(1) / 1e9 / gb_per_second, 3)
        curve = {str(size): round(seconds, 6) for size, seconds in cost.seconds.items()}
        found[mode.name] = {"t": curve, "weight_bytes": read, "bandwidth_share": share}
    return found
