"""Checks of arguments: numbers of any library, names, token ids; each error is one line.

numpy's and torch's scalars are numbers; text that looks like a number is not. No torch here.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from forerun.core.errors import InvalidInput, ModelNotFound

Given = TypeVar("Given")
LONGEST = 60  # characters of a value that a message shows


def shown(value: object) -> str:
    """A value in a message: one short line, whatever it is."""
    try:
        text = " ".join(ascii(value).split()) if isinstance(value, str) else " ".join(repr(value).split())
        text = text.encode("utf-8", "backslashreplace").decode()
    except Exception:  # a caller's own class may raise anything
        text = type(value).__name__
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def refuse(name: str, value: object, limit: str) -> InvalidInput:
    """The error for a value that cannot be used."""
    return InvalidInput(f"{name}={shown(value)} is out of range: {limit}")


def as_whole(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """An integer within limits; booleans, fractions and text are none."""
    try:
        number = None if _is_bool(value) else int(operator.index(value))
    except Exception:  # a caller's own class may raise anything
        number = None
    if number is None:
        limits = _limits(low, high)
        raise refuse(name, value, f"an integer, {limits}" if limits else "an integer")
    if (low is not None and number < low) or (high is not None and number > high):
        raise refuse(name, value, _limits(low, high))
    return number


def as_real(name: str, value: Any, low: float = -math.inf, high: float = math.inf, limit: str | None = None) -> float:
    """A finite number within limits; booleans and text are none."""
    try:
        number = math.nan if _is_bool(value) or isinstance(value, str | bytes | bytearray) else float(value)
    except Exception:
        number = math.nan
    if not (math.isfinite(number) and low <= number <= high):
        limits = _limits(low, high)
        raise refuse(name, value, limit or (f"a finite number, {limits}" if limits else "a finite number"))
    return number


def as_flag(name: str, value: Any) -> bool:
    """True or False, numpy's included."""
    if not _is_bool(value):
        raise refuse(name, value, "True or False")
    return bool(value)


def as_name(name: str, value: Any, choices: Iterable[str] | None = None) -> str:
    """A string, one of `choices` if they are given."""
    known = None if choices is None else tuple(choices)
    if not isinstance(value, str) or (known is not None and value not in known):
        raise refuse(name, value, f"one of {', '.join(known)}" if known else "a name, as text")
    return value


def as_functions(name: str, value: Any, what: str, kind: str) -> tuple[Any, ...]:
    """One function or several; `what` says what they take, `kind` where to read about them."""
    given = (value,) if callable(value) and not isinstance(value, list) else value
    made = tuple(as_items(name, given, what))
    if wrong := [each for each in made if not callable(each) or isinstance(each, type)]:
        raise InvalidInput(f"{name} holds {shown(wrong[0])}: give {what}, see {kind}")
    return made


def as_path(name: str, value: Any) -> str:
    """A name or a path, as text."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise refuse(name, value, "a name or a path")
    return os.fsdecode(os.fspath(value))


def as_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids: one, or any number of them in a list, a set, an array or a tensor."""
    limit = "token ids, which are integers of 0 or more"
    ids = as_items(name, value, limit)
    if {*map(type, ids)} == {int} and min(ids) >= 0:  # the usual case, many at once
        return tuple(ids)
    try:
        return tuple(as_whole(name, token, low=0) for token in ids)
    except InvalidInput:
        raise refuse(name, value, limit) from None


def as_memory(name: str, value: Any) -> int | float | None:
    """Bytes (8GB, 512MiB, an integer above 1) or a share of what is free (50%, 0.5)."""
    if value is None:
        return None
    parts = _MEMORY.fullmatch(value) if isinstance(value, str) else None
    try:
        amount = math.nan if _is_bool(value) else float(parts[1] if parts is not None else value)
    except Exception:  # a caller's own class may raise anything
        amount = math.nan
    unit = "" if parts is None else parts[2].upper()
    if unit == "%":
        amount /= 100
    elif unit:
        amount *= (1024 if "I" in unit else 1000) ** (1 + "KMGT".find(unit[0]))
    if not 0 < amount < 2**60 or (unit == "%" and amount > 1):
        raise refuse(name, value, "bytes such as 8GB or 512MiB, or a share of what is free such as 50%")
    if unit == "" and 1 < amount <= 100:
        raise refuse(name, value, f"bytes such as 8GB or 512MiB; {amount:g}% is a share of what is free")
    return amount if amount <= 1 else int(amount)


_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%|[KMGT]I?B?|B|)\s*", re.IGNORECASE)


def as_items(name: str, value: Any, limit: str) -> list[Any]:
    """The items of any collection but text and mappings; a number is a collection of one, None an empty one."""
    if value is None:
        return []
    if isinstance(value, str | bytes | bytearray | Mapping):
        raise refuse(name, value, limit)
    try:
        return list(value)
    except Exception:
        return [value]


def refuse_special(path: Path) -> None:
    """Raise where this, or what lies in this folder, is no file: whoever opens a FIFO waits for its other end."""
    inside = list[Path]()
    with suppress(OSError):  # whoever reads the folder says what is wrong with it
        inside = list(path.iterdir()) if path.is_dir() else []
    for each in (path, *inside):
        mode = os.stat(each).st_mode if os.path.exists(each) else stat.S_IFREG
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
            kind = kinds.get(stat.S_IFMT(mode), "a device")
            raise ModelNotFound(f"{each} is {kind}, and models are read from files; give a file or a folder of files")


def as_given(cls: type[Given], values: Any, renamed: Mapping[str, str], what: str) -> dict[str, Any]:
    """The fields of a settings class out of a mapping: in its own names or others' (`renamed`); None = not given."""
    if not isinstance(values, Mapping):
        raise InvalidInput(f"{shown(values)} are no {what}s: give a {cls.__name__} or a dict of its fields")
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = renamed.get(key, key) if isinstance(key, str) else key
        if name not in known:
            raise InvalidInput(unknown(what, key, [*known, *renamed]))
        if value is not None:
            if name in found:
                raise InvalidInput(f"{what} {name!r} was given twice, once as {key!r}; give it once")
            found[name] = value
    return found


def one_format(dtype: Any, quantization: Any, known: Sequence[str]) -> Any:
    """What two names of one setting say, ours and vLLM's; either may be None or auto beside the other."""
    if quantization is None:
        return dtype
    if quantization not in known:
        raise InvalidInput(
            f"quantization={shown(quantization)} is no format to load weights in: {', '.join(known)}; leave it out for "
            "a checkpoint that is quantised already, whose files say how"
        )
    if dtype in (None, "auto"):
        return quantization
    if quantization not in (dtype, "auto"):
        said = f"dtype={shown(dtype)} and quantization={shown(quantization)}"
        raise InvalidInput(f"{said} are two formats for the same weights; give one of them")
    return dtype


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """The message for an unknown name, with the nearest spelling."""
    names = list(known)
    near = difflib.get_close_matches(name[:LONGEST], names, n=1) if isinstance(name, str) else []
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {what} {shown(name)}; {hint}known: {', '.join(names)}"


def short_repr(settings: Any) -> str:
    """The class and the fields that differ from their defaults."""
    parts = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        factory: Callable[[], Any] | Any = field.default_factory
        default = field.default if factory is MISSING else factory()
        if value != default:
            parts.append(f"{field.name}={shown(value)}")
    return f"{type(settings).__name__}({', '.join(parts)})"


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


def _limits(low: float | None, high: float | None) -> str:
    least, most = (None if value is None or value in (-math.inf, math.inf) else value for value in (low, high))
    if least is not None and most is not None:
        return f"{_number(least)} to {_number(most)}"
    if least is not None:
        return f"at least {_number(least)}"
    return "" if most is None else f"at most {_number(most)}"


def _number(value: float) -> str:
    return shown(value) if isinstance(value, int) else f"{value:g}"
