"""The structs and functions of the native library, read from its own header: what C and Python share is said once.

The header is written for this: a field, or several of one type, a line; arrays by a number or a name of an `enum`;
`FR_API` before what Python calls. A pointer to a struct that Python has is a pointer to that class, all others are
addresses.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from ctypes import POINTER, Structure
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

S = TypeVar("S", bound=Structure)
_FILES = ("linear/linear.h", "forerun.h")
_TYPES: dict[str, Any] = {
    "void": None, "int": ctypes.c_int, "float": ctypes.c_float, "double": ctypes.c_double,
    **{f"{kind}_t": getattr(ctypes, f"c_{kind}") for kind in ("int32", "int64", "uint32")},
}  # fmt: skip
_STRUCT = re.compile(r"typedef struct \{([^}]*)\} (\w+);")
_FUNCTION = re.compile(r"FR_API ([^(;]+?)(\w+)\(([^)]*)\);")
_ENUM = re.compile(r"enum \{([^}]*)\}")
_DECLARED = re.compile(r"(?:const )?(\w+) ?(.*)", re.DOTALL)  # a type, and what is declared of it
_NAMED = re.compile(r"(?P<stars>[* ]|const )*(?P<name>\w*)(?:\[(?P<size>[^]]+)\])?")
_made: dict[str, type[Structure]] = {}  # the classes of structs, by their names in C


def in_header(name: str) -> Callable[[type[S]], type[S]]:
    """Give a class the fields of the header's struct of this name; structs that it holds come before it."""

    def with_fields(cls: type[S]) -> type[S]:
        lines = [line for line in _structs()[name].split(";") if line.strip()]
        cls._fields_ = [field for line in lines for field in _declared(line)]
        _made[name] = cls
        return cls

    return with_fields


def functions() -> Iterator[tuple[str, Any, list[Any]]]:
    """Name, result and arguments of all that Python may call, once the structs have classes."""
    for result, name, given in _FUNCTION.findall(_text()):
        arguments = [kind for one in given.split(",") if one != "void" for _, kind in _declared(one)]
        ((_, returned),) = _declared(result)
        yield name, returned, arguments


@cache
def _structs() -> dict[str, str]:
    """The bodies of all structs, by name."""
    return {name: body for body, name in _STRUCT.findall(_text())}


@cache
def _text() -> str:
    folder = Path(__file__).with_name("c")
    whole = "\n".join((folder / file).read_text(encoding="utf-8") for file in _FILES)
    return re.sub(r"/\*.*?\*/", "", whole, flags=re.DOTALL)


@cache
def numbers() -> dict[str, int]:
    """What the header's enums name."""
    found: dict[str, int] = {}
    for body in _ENUM.findall(_text()):
        value = -1
        for entry in body.split(","):
            name, _, given = (part.strip() for part in entry.partition("="))
            value = (found[given] if given in found else int(given)) if given else value + 1
            found[name] = value
    return found


def _declared(line: str) -> Iterator[tuple[str, Any]]:
    """The names that a line declares, each with its type."""
    found = _DECLARED.fullmatch(line.strip())
    assert found is not None, line
    for part in found[2].split(","):
        named = _NAMED.fullmatch(part.strip())
        assert named is not None, line
        yield named["name"], _kind(found[1], part.count("*"), named["size"])


def _kind(name: str, stars: int, size: str | None) -> Any:
    if stars:
        if name == "char":
            return ctypes.c_char_p
        return POINTER(_made[name]) if stars == 1 and name in _made else ctypes.c_void_p
    kind = _made[name] if name in _made else _TYPES[name]
    if size is None:
        return kind
    return kind * sum(numbers().get(each.strip()) or int(each) for each in size.split("+"))
