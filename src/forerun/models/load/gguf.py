"""GgufFile: a memory-mapped GGUF file, its metadata (typed: `Metadata`), and the position of each tensor's blocks.

The `gguf` package's reader takes many seconds on a real vocabulary; this one takes a fraction of one, and
trusts nothing it reads: every count, length and offset is checked against the size of the file before it is
used, so that a damaged file ends in `DamagedFile` and never in a crash, a hang or a huge allocation. Nothing
is dequantised here: `GgufFile.blocks` gives a tensor's bytes as they are, quants.py makes numbers of them.
"""

from __future__ import annotations

import errno
import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from forerun.core.errors import DamagedFile, ModelNotFound, UnsupportedModel
from forerun.models.load.quants import LAYOUTS, Blocks

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL = 7
_SMALLEST_ENTRY = 13  # a key of one byte, its type and one byte of value
_SMALLEST_TENSOR = 32  # name length and one byte, dimension count, one dimension, type, offset; rounded down
_MOST_DIMENSIONS = 4
_MOST_NESTED = 4
_LONGEST_KEY = 65535


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is; `shape` is as torch has it (the file lists dimensions innermost first)."""

    kind: int
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    size: int  # bytes


class GgufFile:
    """An open GGUF file, version 2 or 3. The map lives as long as this object or a tensor made from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        cursor = _Cursor(self._map, path)
        tensors, entries = _read_header(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = cursor.text(_LONGEST_KEY)
            self.metadata[key] = cursor.value(cursor.number("<I"))
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise UnsupportedModel(f"{path} is one part of a split model; join the parts with gguf-split first")
        self.tensors = _read_tensors(cursor, tensors, self._alignment(cursor))

    def drop_pages(self) -> None:
        """Drop the file's pages from memory: they are read again from the file if they are needed again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def blocks(self, name: str) -> Blocks:
        """The bytes of a tensor as they lie in the file (a view of the map, to be read only)."""
        info = self.tensors[name]
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=info.size, offset=info.offset)
        return Blocks(info.kind, info.shape, data)

    def _alignment(self, cursor: _Cursor) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            cursor.damaged(f"alignment {alignment!r} is not a power of two")
        return alignment


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # Copy-on-write, because torch warns about tensors over read-only memory.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise ModelNotFound(f"there is no file {path}; check the path") from None
    except ValueError:
        raise DamagedFile(f"{path} is empty; pull it again") from None
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        raise ModelNotFound(f"{path} cannot be opened ({error.strerror}); check the path") from None


class _Cursor:
    """Reads through the map; every read is checked against the bytes left."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at, self.size = data, path, 0, len(data)

    def damaged(self, what: str) -> NoReturn:
        raise DamagedFile(f"{self.path} is damaged: {what}; pull it again")

    def need(self, count: int, each: int, what: str) -> None:
        if count * each > self.size - self.at:
            left = self.size - self.at
            self.damaged(f"{count} {what} are announced at byte {self.at}, but {left} bytes are left")

    def number(self, form: str) -> Any:
        width = struct.calcsize(form)
        self.need(width, 1, "bytes")
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += width
        return value

    def text(self, longest: int | None = None) -> str:
        length = self.number("<Q")
        self.need(length, 1, "bytes of text")
        if longest is not None and length > longest:
            self.damaged(f"a name of {length} bytes (the limit is {longest})")
        start, self.at = self.at, self.at + length
        return self.data[start : self.at].decode("utf-8", "replace")

    def texts(self, count: int) -> list[str]:
        # The loop that reads vocabularies: everything is local, because it runs half a million times.
        self.need(count, 8, "texts")
        data, at, size = self.data, self.at, self.size
        length_at = struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(count):
            start = at + 8
            if start > size:
                self.damaged(f"a list of {count} texts runs past the end")
            at = start + length_at(data, at)[0]
            if at > size:
                self.damaged(f"a list of {count} texts runs past the end")
            found.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return found

    def value(self, kind: int, nested: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array(nested + 1)
        if kind not in _NUMBERS:
            self.damaged(f"value type {kind} at byte {self.at} does not exist")
        number = self.number(_NUMBERS[kind])
        return bool(number) if kind == _BOOL else number

    def array(self, nested: int) -> list[Any]:
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _STRING:
            return self.texts(count)
        if kind == _ARRAY:
            if nested >= _MOST_NESTED:
                self.damaged(f"lists nested deeper than {_MOST_NESTED}")
            self.need(count, 12, "lists")
            return [self.value(_ARRAY, nested) for _ in range(count)]
        if kind not in _NUMBERS:
            self.damaged(f"value type {kind} at byte {self.at} does not exist")
        form = np.dtype(_NUMBERS[kind])
        self.need(count, form.itemsize, "numbers")
        numbers = np.frombuffer(self.data, form, count, self.at)
        self.at += count * form.itemsize
        found: list[Any] = (numbers != 0).tolist() if kind == _BOOL else numbers.tolist()
        return found


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    if cursor.data[:4] != _MAGIC:
        cursor.damaged("it does not begin with GGUF")
    cursor.at = 4
    version = cursor.number("<I")
    if version not in (2, 3):
        raise UnsupportedModel(
            f"{cursor.path} is GGUF version {version}; little-endian 2 and 3 can be read: convert it again"
        )
    tensors, entries = cursor.number("<Q"), cursor.number("<Q")
    cursor.need(entries, _SMALLEST_ENTRY, "metadata entries")
    cursor.need(tensors, _SMALLEST_TENSOR, "tensors")
    return tensors, entries


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    listed: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for _ in range(count):
        name = cursor.text(_LONGEST_KEY)
        dimensions = cursor.number("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            cursor.damaged(f"tensor {name[:80]!r} has {dimensions} dimensions")
        shape = tuple(cursor.number("<Q") for _ in range(dimensions))[::-1]
        kind = cursor.number("<I")
        if name in listed:
            cursor.damaged(f"tensor {name[:80]!r} is listed twice")
        listed[name] = (kind, shape, cursor.number("<Q"))
    start = -(-cursor.at // alignment) * alignment
    return {name: _locate(cursor, name, entry, start, alignment) for name, entry in listed.items()}


def _locate(
    cursor: _Cursor, name: str, entry: tuple[int, tuple[int, ...], int], start: int, alignment: int
) -> TensorInfo:
    kind, shape, offset = entry
    if kind not in LAYOUTS:
        raise UnsupportedModel(f"tensor {name[:80]!r} of {cursor.path} has the unknown type {kind}; use another file")
    layout = LAYOUTS[kind]
    if not all(shape) or shape[-1] % layout.weights or offset % alignment:
        cursor.damaged(f"tensor {name[:80]!r} has shape {shape} of {layout.name} at offset {offset}")
    size = prod(shape) // layout.weights * layout.bytes
    if start + offset + size > cursor.size:
        cursor.damaged(f"tensor {name[:80]!r} ends at byte {start + offset + size}, the file at byte {cursor.size}")
    return TensorInfo(kind, shape, start + offset, size)


_LARGEST = 1 << 31


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata under one architecture's prefix; keys that begin with a dot are relative to it."""

    path: Path
    values: dict[str, Any]
    architecture: str

    @classmethod
    def of(cls, file: GgufFile) -> Metadata:
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise DamagedFile(f"{file.path} does not say which architecture it holds; pull it again")
        return cls(file.path, file.metadata, architecture)

    def find(self, key: str) -> Any:
        return self.values.get(self._full(key))

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.find(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value < _LARGEST:
            self.wrong(key, value, f"a whole number from {least}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.find(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self.wrong(key, value, "a positive number")
        # The file has float32; the shortest decimal of the same float32 is what the authors wrote.
        return float(str(np.float32(value)))

    def text(self, key: str, default: str) -> str:
        value = self.find(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.wrong(key, value, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.find(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(key, value, "true or false")
        return value

    def items(self, key: str, kind: type, required: bool = False) -> list[Any]:
        value = self.find(key)
        if value is None and not required:
            return []
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            self.wrong(key, value if not isinstance(value, list) else "a list", f"a list of {kind.__name__}")
        return value

    def wrong(self, key: str, value: object, expected: str) -> NoReturn:
        what = "is missing" if value is None else f"is {str(value)[:40]!r}"
        raise DamagedFile(f"{self.path} is damaged: {self._full(key)} {what}, not {expected}; pull it again")

    def _full(self, key: str) -> str:
        return self.architecture + key if key.startswith(".") else key
