"""Load compiled CUDA kernels and launch them on torch's current stream, through the driver's own library.

No compiler and no CUDA toolkit is needed where this runs. Launches are captured in CUDA graphs like torch's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

_STARTS_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_BYTES, _BF16 = 0, 9  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLE_128, _PROMOTE_256 = 3, 3


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    torch.cuda.init()  # type: ignore[no-untyped-call]  # which also makes the context that modules are loaded into
    torch.cuda.current_stream().synchronize()
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


class Function:
    """A kernel of a module; `shared` bytes of dynamic shared memory at most."""

    def __init__(self, handle: ctypes.c_void_p, shared: int) -> None:
        self.handle = handle
        if shared > 48 << 10:
            _call("cuFuncSetAttribute", handle, _MOST_SHARED, shared)

    def launch(
        self, grid: Sequence[int], threads: int, shared: int, arguments: Sequence[object], early: bool = True
    ) -> None:
        """`early`: it may start before the kernel ahead of it has ended, and waits for it itself."""
        pointers = [ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in arguments]  # type: ignore[type-var]
        attribute = _Attribute(_STARTS_EARLY, 0, (ctypes.c_int * 16)(1))
        sizes = (*grid, 1, 1)[:3]
        config = _Config(
            (ctypes.c_uint * 3)(*sizes),
            (ctypes.c_uint * 3)(threads, 1, 1),
            shared,
            torch.cuda.current_stream().cuda_stream,
            ctypes.pointer(attribute),
            int(early),
        )
        given = (ctypes.c_void_p * len(pointers))(*pointers)
        _call("cuLaunchKernelEx", ctypes.byref(config), self.handle, given, None)


class Module:
    """A file of compiled kernels; it stays loaded."""

    def __init__(self, path: Path) -> None:
        self._handle = ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(self._handle), path.read_bytes())

    def function(self, name: str, shared: int = 0) -> Function:
        handle = ctypes.c_void_p()
        _call("cuModuleGetFunction", ctypes.byref(handle), self._handle, name.encode())
        return Function(handle, shared)


class TensorMap(ctypes.Structure):
    """What the copy engine needs to know of a matrix [R, K] to fetch the columns of some rows."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


def map_rows(rows: Tensor, count: int) -> TensorMap:
    """`count` rows by 128 columns at a time, in lines of 128 bytes with their pieces of 16 bytes exchanged."""
    size, (height, depth) = rows.element_size(), rows.shape
    line = 128 // size
    assert rows.stride(1) == 1
    assert depth % line == 0
    assert rows.data_ptr() % 16 == 0
    room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 64)  # the driver wants 64-byte alignment
    start = -ctypes.addressof(room) % 64
    made = TensorMap.from_buffer(room, start)
    _call(
        "cuTensorMapEncodeTiled",
        ctypes.byref(made),
        _BF16 if size == 2 else _BYTES,
        3,
        ctypes.c_void_p(rows.data_ptr()),
        (ctypes.c_uint64 * 3)(line, height, depth // line),
        (ctypes.c_uint64 * 2)(rows.stride(0) * size, 128),
        (ctypes.c_uint32 * 3)(line, count, size),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        0,
        _SWIZZLE_128,
        _PROMOTE_256,
        0,
    )
    return made
