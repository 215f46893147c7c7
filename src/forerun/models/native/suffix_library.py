"""The part of the native library that looks continuations of a text up, described in the same words as forerun.h.

A library that was built without it is told apart by its layout: look-ups then run in Python.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_double, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any, ClassVar

from forerun.models.native import library as native
from forerun.models.native.library import Fields

MOST_NODES, MOST_STEPS = 256, 24


class Lookup(Structure):
    """fr_lookup: what is asked about the end of a text, and what was found."""

    _fields_: ClassVar[Fields] = [
        *[(name, c_void_p) for name in ("own_hits", "own_tries", "all_hits", "all_tries")],
        ("longest", c_int64),
        ("shortest", c_int64),
        ("shared_tries", c_double),
        ("stops", c_void_p),
        ("stop_count", c_int64),
        ("table", c_void_p),
        ("shares", c_void_p),
        ("rows", c_int64),
        ("kept", c_int64),
        ("factors", c_double * 2),
        ("most_steps", c_int64),
        ("always", c_int64),
        ("negligible", c_double),
        *[(name, c_int64) for name in ("nodes", "depth", "width")],
        ("least", c_double),
        ("price", c_void_p),
        ("prices", c_int64),
        ("steps", c_int64),
        *[(name, c_int32 * MOST_STEPS) for name in ("step_tokens", "step_kinds", "step_matches")],
        ("step_seconds", c_int32 * MOST_STEPS),
        ("step_rates", c_double * MOST_STEPS),
        ("step_survivals", c_double * MOST_STEPS),
        ("count", c_int64),
        ("matched", c_int64),
        *[(name, c_int32 * (MOST_NODES + 1)) for name in ("tokens", "parents", "depths")],
        ("matches", c_int32 * MOST_STEPS),
        ("survivals", c_double * MOST_NODES),
        *[(name, c_int64) for name in ("best", "levels", "next_count")],
        ("by_depth", c_double * MOST_NODES),
        ("nexts", c_int32 * MOST_NODES),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "fr_lookup_layout": (c_int64, []),
    "fr_suffix_new": (c_void_p, []),
    "fr_suffix_free": (None, [c_void_p]),
    "fr_suffix_read": (c_int, [c_void_p, c_void_p, c_int64, c_void_p]),
    "fr_suffix_grow": (None, [c_void_p, c_void_p]),
}


def available() -> bool:
    return _load() is not None


def library() -> Any:
    """The loaded library; only to be called where look-ups are available."""
    found = _load()
    assert found is not None, native.why_not()
    return found


@cache
def _load() -> Any:
    if not native.available():
        return None
    found = native.library()
    try:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError:  # built before this was added
        return None
    return found if found.fr_lookup_layout() == ctypes.sizeof(Lookup) else None
