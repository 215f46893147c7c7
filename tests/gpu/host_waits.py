"""HostWaits: where the host sends numbers to a device, or reads some, so that it waits for all that was launched.

    with HostWaits() as waits: engine.step()
    waits.places            # e.g. {"models/slots.py:174 _with_found": 3}

On a GPU, a tensor made of a list, an index that is a list and a value that is read all wait until the device has done
everything before; behind a round that was just launched that is the whole round. torch tells of these on a GPU. On a
CPU, where nothing waits, they are found by the calls: all but `ints_of`, which goes through pinned memory on a GPU, and
reading lists, which the verdict of a round is read by.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import forerun

MAKES, READS = {"tensor", "as_tensor"}, {"item", "nonzero", "__bool__", "__int__", "cpu"}
PINNED = "ints_of"  # of forerun.core.tree
INDEXES = {"__getitem__", "__setitem__"}
ROOT = str(Path(forerun.__file__).parent)


class HostWaits(TorchFunctionMode):
    """Counts waits by the line of the package that causes them."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self._warned: Any = None

    def __enter__(self) -> HostWaits:
        if torch.cuda.is_available():
            self._warned = warnings.catch_warnings()
            self._warned.__enter__()
            warnings.simplefilter("always")
            warnings.showwarning = self._take_warning
            torch.cuda.set_sync_debug_mode("warn")
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._warned is not None:
            torch.cuda.set_sync_debug_mode("default")
            self._warned.__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._warned is None and _waits(func.__name__, args):
            self._note()
        return func(*args, **(kwargs or {}))

    def _take_warning(self, message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self._note()

    def _note(self) -> None:
        frames = traceback.extract_stack()
        ours = [one for one in frames if one.filename.startswith(ROOT)]
        if ours and (ours[-1].name != PINNED or self._warned is not None):
            last = ours[-1]
            self.places[f"{Path(last.filename).relative_to(ROOT)}:{last.lineno} {last.name}"] += 1


def _waits(name: str, args: tuple[Any, ...]) -> bool:
    if name in INDEXES:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(one, list) for one in index)
    return name in MAKES or name in READS
