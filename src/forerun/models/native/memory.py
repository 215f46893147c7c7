"""Memory for packed weights, in huge pages where the system gives them.

A pass over one row reads every weight once: with pages of 4 KB a good part of its time goes into finding them. Weights
are smaller than a huge page, so many share a slab; it is freed with the last of them.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from forerun.models.native.library import library

_PAGE = 2 << 20  # a huge page
_SLAB = 4 * _PAGE
_LINE = 64  # weights start at a cache line

_lock = Lock()
_current: list[Tensor] = []  # what is left of the slab in use, if there is one


def take_memory(size: int) -> Tensor:
    """[size] bytes of uint8, not initialised."""
    if size >= _PAGE:
        return _allocate(size)
    with _lock:
        if not _current or _current[0].numel() < size:
            _current[:] = [_allocate(_SLAB)]
        whole, taken = _current[0], -(-size // _LINE) * _LINE
        _current[0] = whole[taken:]
    return whole[:size]


def _allocate(size: int) -> Tensor:
    """From a huge page's boundary on; the system is asked for huge pages before anything is written."""
    whole = torch.empty(size + _PAGE, dtype=torch.uint8)
    found = whole[-whole.data_ptr() % _PAGE :][:size]
    library().fr_use_huge_pages(found.data_ptr(), size)
    return found
