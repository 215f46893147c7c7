"""The native library: found next to this file, loaded with ctypes by the declarations of its own header.

It is built with the package where there is a C compiler; without it everything runs on torch. The environment
variable FORERUN_NATIVE turns it off (0) or names another build of it (a path); FORERUN_ISA names the instructions to
use, of those that the machine has. Where a processor has fast and slow cores, passes run on the fast ones: panels are
shared out evenly and a pass waits for the slowest, so a core of half the speed costs more than it gives.

The header is written to be read here: a field, or several of one type, a line; arrays by a number or a name of an
`enum`; `FR_API` before what Python calls. A pointer to a struct that Python has is a pointer to that class, all others
are addresses.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from ctypes import POINTER, Structure
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from forerun.core.errors import InvalidInput

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


log = logging.getLogger(__name__)

F32, BF16 = 0, 1  # kinds of weights that are not packed
FLOATS, HALVES, BYTES = 0, 1, 2  # what a KV cache holds
BLOCK = 32  # inputs per block of packed kinds
MOST_TAPS = numbers()["FR_MOST_TAPS"]  # inputs that a convolution of a recurrent layer reads
ABI = 25  # a change of the structs or of the kernels: what was measured with another counts no more
_BUILT = Path(__file__).with_name("_native.so")
_BUILD_AGAIN = (
    "%s was built from other sources, so passes on the CPU run on torch, several times slower; "
    "build it again, in its repository: pip install --no-deps -e ."
)


@in_header("fr_weight")
class Weight(Structure):
    """One matrix [outputs, inputs], packed or plain."""


@in_header("fr_weights")
class Weights(Structure):
    """Up to three matrices that share their input; their outputs lie side by side."""


@in_header("fr_experts")
class Experts(Structure):
    """A router, the experts it picks from, and one that every row goes through."""


@in_header("fr_mixer")
class Mixer(Structure):
    """A recurrent layer."""


@in_header("fr_walk")
class Walk(Structure):
    """The rows of one sequence in a pass, for recurrent layers."""


@in_header("fr_latent")
class Latent(Structure):
    """Attention over latents."""


@in_header("fr_layer")
class Layer(Structure):
    """One layer of a decoder."""


@in_header("fr_table")
class Table(Structure):
    """What tokens are looked up in."""


@in_header("fr_decoder")
class Model(Structure):
    """A decoder."""


@in_header("fr_reach")
class Reach(Structure):
    """What each node sees."""


@in_header("fr_change")
class Change(Structure):
    """A low-rank change of one weight."""


@in_header("fr_adapter_layer")
class AdapterLayer(Structure):
    """The changes of a layer's q, k, v, output, gate, up and down projections."""


@in_header("fr_pass")
class Pass(Structure):
    """The rows of one pass and where everything goes."""


@in_header("fr_run")
class Run(Structure):
    """Passes over one node each behind another pass."""


@in_header("fr_head_layer")
class HeadLayer(Structure):
    """One of its layers."""


@in_header("fr_head")
class Head(Structure):
    """The weights of an EAGLE head."""


@in_header("fr_head_pass")
class HeadPass(Structure):
    """The rows of one pass and where everything goes."""


@in_header("fr_top")
class Top(Structure):
    """Rows of logits, how they are read, and their best entries."""


@in_header("fr_draft")
class Draft(Structure):
    """A whole draft of one sequence, what it may be, and what it became."""


@in_header("fr_lookup")
class Lookup(Structure):
    """What is asked about the end of a text, and what was found."""


MOST_NODES, MOST_STEPS = numbers()["FR_LOOKUP_NODES"], numbers()["FR_LOOKUP_STEPS"]  # of a look-up


def available() -> bool:
    """Is the library there, built for this version, and able to run on this machine?"""
    return _load()[0] is not None


def isa() -> str:
    """Which kernels run here, such as neon-dotprod or avx2; "" without the library."""
    found = _load()[0]
    return found.fr_isa().decode() if found is not None else ""


def paths() -> dict[str, bool]:
    """Every path that the library has on this architecture, best first, and whether this machine can run it."""
    found = _load()[0]
    return {} if found is None else _paths(found)


def why_not() -> str | None:
    """Why the library is not used, and what would mend it; None where it is."""
    return _load()[1]


def library() -> Any:
    """The loaded library; only to be called where it is available."""
    found, reason = _load()
    assert found is not None, reason
    return found


def match_threads(threads: int) -> None:
    """Give the pool as many threads as torch has, slow cores left out; every pass asks."""
    global _matched
    if threads != _matched:
        library().fr_set_threads(thread_count(threads))
        _matched = threads


def _forget_threads() -> None:
    global _matched
    _matched = 0


_matched = 0  # what `match_threads` was last given; a forked child has no pool yet
if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_threads)


@cache
def _load() -> tuple[Any, str | None]:
    setting = os.environ.get("FORERUN_NATIVE", "")
    if setting == "0":
        return None, "FORERUN_NATIVE=0 turns it off; unset it"
    path = Path(setting) if setting else _BUILT
    if setting and not path.is_file():
        log.warning("FORERUN_NATIVE=%s names no file, so torch computes, more slowly: unset it", setting)
        return None, f"FORERUN_NATIVE={setting} names no file; unset it"
    if not path.is_file():
        return None, "it was not built: install a C compiler and then forerun again"
    try:
        found = ctypes.CDLL(str(path))
        for name, result, arguments in functions():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:  # a symbol is missing: an older build, as after `git pull`
        log.warning(_BUILD_AGAIN, path)
        return None, f"{path.name} does not load ({error}): install forerun again"
    layouts = found.fr_layout(), found.fr_head_layout(), found.fr_draft_layout(), found.fr_lookup_layout()
    if layouts != (
        ABI * 10**9 + _sizes(Model, Layer, Pass), _sizes(HeadLayer, Head, HeadPass, Top), _sizes(Draft), _sizes(Lookup)
    ):  # fmt: skip
        log.warning(_BUILD_AGAIN, path)
        return None, f"{path.name} is of another version: install forerun again"
    if not found.fr_isa():
        return None, "this processor lacks AVX2 and FMA"
    _choose(found, os.environ.get("FORERUN_ISA", ""))
    return found, None


def _sizes(*structs: type[Structure]) -> int:
    """As the library gives them: sizes in one number, three digits each."""
    return sum(ctypes.sizeof(one) * 1000**i for i, one in enumerate(reversed(structs)))


def _paths(found: Any) -> dict[str, bool]:
    names, i = dict[str, bool](), 0
    while (name := found.fr_variant(i)) is not None:
        names[name.decode()] = bool(found.fr_has(name))
        i += 1
    return names


def _choose(found: Any, wanted: str) -> None:
    if wanted and found.fr_choose(wanted.encode()):
        here = ", ".join(name for name, has in _paths(found).items() if has)
        raise InvalidInput(f"FORERUN_ISA={wanted}: this machine cannot run that; it can run {here}")


_SYSTEM = Path("/sys/devices")


@cache
def fast_cores(system: Path = _SYSTEM) -> int | None:
    """How many of the cores that this process may use are fast; None where all are alike or nobody says."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    allowed = os.sched_getaffinity(0)
    fast = allowed & (_intel_fast(system) or _arm_fast(system))
    return len(fast) if fast and fast != allowed else None


def thread_count(asked: int) -> int:
    """As many threads as torch has, fewer where some would sit on slow cores; OMP_NUM_THREADS is obeyed."""
    fast = None if "OMP_NUM_THREADS" in os.environ else fast_cores()
    return min(asked, 64) if fast is None else min(asked, fast, 64)


def _intel_fast(system: Path) -> set[int]:
    """Intel names its two kinds cpu_core and cpu_atom."""
    listed = system / "cpu_core" / "cpus"
    return _parse(listed.read_text()) if listed.is_file() else set()


def _arm_fast(system: Path) -> set[int]:
    """ARM gives every core a capacity, 1024 for the fastest; cores within a fifth of it count as fast."""
    capacities: dict[int, int] = {}
    for file in (system / "system" / "cpu").glob("cpu[0-9]*/cpu_capacity"):
        capacities[int(file.parent.name.removeprefix("cpu"))] = int(file.read_text())
    most = max(capacities.values(), default=0)
    return {core for core, capacity in capacities.items() if 5 * capacity >= 4 * most}


def _parse(text: str) -> set[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
