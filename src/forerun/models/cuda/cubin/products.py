"""Launch products of rows with packed weights (packing.py): which kernel, how many programs, how much memory.

Compiled kernels are loaded, and launched on torch's current stream, through the CUDA driver's own library: no compiler
and no CUDA toolkit is needed where this runs. Launches are captured in CUDA graphs like torch's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from forerun.models.cuda.cubin.packing import BLOCK, Strips

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


WARPS = 8  # that multiply
WIDTHS = (8, 16, 32, 64, 128)  # rows of one instruction of the tensor cores
SHARED = 227 << 10  # bytes of a multiprocessor that a program may have
PROGRAMS = 132  # that splits are chosen for: as many as an H200 has multiprocessors
ENOUGH = 5  # strips of a program: fewer do not keep its warps busy
SUMS, GATED = range(2)
OF_GGUF = ("int4_mins", "int4_k", "bytes_k", "int8_groups")  # formats with a kernel for one row

FILES = {  # name: format, columns of a group
    "bf16": ("BF16", 128),
    "e4m3": ("E4M3", 128),
    "int8": ("INT8", 128),
    "e4m3_weights": ("E4M3_WEIGHTS", 128),
    "int4_128": ("INT4", 128),
    "int4_32": ("INT4", 32),
    "int4_zeros_128": ("INT4_ZEROS", 128),
    "int4_zeros_32": ("INT4_ZEROS", 32),
    "int4_mins_32": ("INT4_MINS", 32),
    "int4_k_32": ("INT4_K", 32),
    "bytes_k_16": ("BYTES_K", 16),
    "int8_groups_32": ("INT8_GROUPS", 32),
}

_POINTERS = "weights", "sides", "of_blocks", "channel", "squares", "row_scales", "out", "parts", "counters"
_NUMBERS = (
    "rows", "row_tiles", "outputs", "strips", "pitch", "blocks", "groups", "splits", "height", "stages", "whole",
    "scale_stride", "mode", "half_scales", "pieces", "square_stride", "depth",
)  # fmt: skip


class _Args(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _NUMBERS),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut up: `splits` decides its bits, all else its speed."""

    splits: int
    groups: int
    width: int
    whole: bool = False
    tall: int = 16  # strips of a tile, at most
    four: bool = False  # of 32 rows: by instructions of four warps

    @property
    def height(self) -> int:
        """Strips of a tile, at most: a warp has two, or one where there are many rows."""
        return min(self.tall, WARPS * (2 if self.width <= 64 else 1))

    @property
    def threads(self) -> int:
        """Two warps copy; where registers are moved from those that copy, there are four of them."""
        return WARPS * 32 + (128 if self.width >= 64 or self.four else 64)


@dataclass(frozen=True, slots=True)
class Norm:
    """The norm of rows that come without it: [R, at least `pieces`] fp64 sums of squares of the pieces of each."""

    squares: Tensor
    pieces: int
    width: int
    eps: float

    @property
    def numbers(self) -> tuple[int, int, int, float]:
        """As kernels take them."""
        return self.pieces, self.squares.stride(0), self.width, self.eps


def splits_of(strips: int, blocks: int) -> int:
    """The fewest splits of the depth that give a program enough strips."""
    for splits in (1, 2, 4, 8):
        if strips * splits >= ENOUGH * PROGRAMS or blocks < 8 * splits:
            return splits
    return 8


def path_of(name: str) -> Path:
    """Where a compiled file lies."""
    return Path(__file__).parent / "sm_90a" / f"{name}.cubin"


@lru_cache(maxsize=64)
def _module(name: str) -> Module:
    return Module(path_of(name))


@lru_cache(maxsize=256)
def _function(kind: str, name: str) -> Function:
    return _module(kind).function(f"product_{name}", SHARED - 1024)  # norms of rows have the rest


@lru_cache(maxsize=1)
def _quantiser() -> Function:
    return _module("quantise").function("quantise_rows")


class Products:
    """Launches products on one device; unfinished sums lie in `parts`."""

    def __init__(self, device: torch.device) -> None:
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.parts = torch.empty(0, device=device)
        self.counters = torch.zeros(1 << 16, dtype=torch.int32, device=device)
        self._maps: dict[tuple[int, ...], TensorMap] = {}

    def reserve(self, weight: Strips, most: int) -> None:
        """Memory for products of up to `most` rows: captured graphs hold its address, so it must not move later."""
        for count in range(1, most + 1):
            cut = self.choose(weight, count)
            if cut.splits > 1 and not cut.whole:
                self._provide(*self._unfinished(weight, cut, count))

    @staticmethod
    def _unfinished(weight: Strips, cut: Cut, count: int) -> tuple[int, int]:
        """How many numbers splits leave for the last of them, and how many counters they need."""
        tiles = -(-count // cut.width) * weight.strips
        return tiles * cut.splits * cut.width * 16, tiles

    def choose(self, weight: Strips, count: int) -> Cut:
        """Every program has a multiprocessor; rows beyond 128 are further tiles of rows."""
        width = next((width for width in WIDTHS if count <= width), WIDTHS[-1])
        splits = splits_of(weight.strips, weight.blocks)
        groups = max(1, min(self.processors // splits, weight.strips))
        if width <= 64:
            four = width == 32 and weight.format != "e4m3" and weight.strips > groups * WARPS
            return Cut(splits, groups, width, four=four)
        if count > width and splits == 1 and weight.format in ("bf16", "int8", "e4m3_weights"):
            width = 256
        units = -(-weight.strips // WARPS) * -(-count // width)
        whole = units / (-(-units // self.processors) * self.processors) > 0.6
        return Cut(splits, self.processors if whole else groups, width, whole)

    def room(self, weight: Strips, cut: Cut) -> tuple[int, int, int]:
        """Stages, strips of a tile, and bytes of shared memory."""
        most = cut.height if cut.whole else -(-weight.strips // cut.groups)
        height = -(-most // -(-most // cut.height))
        chunk = weight.data.shape[2]
        sides = 0 if weight.sides is None else weight.sides.shape[2]
        row = 128 + 4 if weight.format == "e4m3" else 256
        stage = height * (chunk + sides) + cut.width * row + 16
        beyond = (2 * WARPS - height) * chunk  # what warps without a strip may read
        totals = WARPS * 64 * cut.width * (2 if cut.width <= 64 else 1) if cut.whole and cut.splits > 1 else 0
        fixed = 1024 + max(beyond, totals)
        stages = min(32, (SHARED - 1024 - fixed) // stage)
        return stages, height, fixed + stages * stage

    def multiply(
        self,
        weight: Strips,
        rows: Tensor,
        count: int,
        out: Tensor,
        cut: Cut | None = None,
        scales: Tensor | None = None,
        norm: Norm | None = None,
    ) -> None:
        """`count` rows [R, K] times a weight; `scales` [K / 128, R] of rows in e4m3, `norm` of what they are worth."""
        cut = cut or self.choose(weight, count)
        stages, height, shared = self.room(weight, cut)
        assert stages >= 2, f"{cut} leaves no room for two stages"
        assert scales is None or scales.stride(0) % 256 == 0, "rows' scales need room for whole tiles of rows"
        row_tiles = -(-count // cut.width)
        programs = cut.groups if cut.whole else cut.groups * cut.splits
        if cut.splits > 1 and not cut.whole:
            self._provide(*self._unfinished(weight, cut, count))
        args = _Args(
            weight.data.data_ptr(), _pointer(weight.sides), _pointer(weight.of_blocks), _pointer(weight.channel),
            _pointer(None if norm is None else norm.squares), _pointer(scales), out.data_ptr(),
            self.parts.data_ptr(), self.counters.data_ptr(),
            count, row_tiles, weight.outputs, weight.strips, weight.data.shape[1], weight.blocks, cut.groups,
            cut.splits, height, stages, cut.whole, 0 if scales is None else scales.stride(0),
            GATED if weight.gated else SUMS, weight.half_scales, *(0, 0, 0, 0.0) if norm is None else norm.numbers,
        )  # fmt: skip
        kind = weight.format + (f"_{weight.group}" if weight.sides is not None else "")
        name = "1" if count == 1 and cut.width == 8 and weight.format in OF_GGUF else str(cut.width)
        if cut.four:
            name += "_four"
        elif cut.whole and cut.width == 128 and weight.format == "e4m3" and (row_tiles % 2 == 0 or row_tiles > 4):
            name += "_pairs"
            programs -= programs % 2
        kernel = _function(kind, name)
        kernel.launch((programs,), cut.threads, shared, (self._map(rows, cut.width), args))

    def _provide(self, numbers: int, counters: int) -> None:
        if numbers > self.parts.numel():
            self.parts = torch.empty(numbers, device=self.parts.device)
        assert counters <= self.counters.numel()

    def _map(self, rows: Tensor, width: int) -> TensorMap:
        key = rows.data_ptr(), rows.element_size(), *rows.shape, width
        if key not in self._maps:
            self._maps[key] = map_rows(rows, width)
        return self._maps[key]


def quantise_rows(rows: Tensor, count: int, out: Tensor, scales: Tensor) -> None:
    """bf16 [R, K] to e4m3 [R, K], each 128 columns of a row by their own scale [K / 128, R]."""
    depth = rows.shape[1]
    assert depth % BLOCK == 0
    given = (
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_void_p(scales.data_ptr()),
        ctypes.c_int(depth),
        ctypes.c_int(scales.stride(0)),
    )
    _quantiser().launch((-(-depth // BLOCK // 4), count), 128, 0, given)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
