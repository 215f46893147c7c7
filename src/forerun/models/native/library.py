"""The native library: found next to this file, loaded with ctypes, described in the same words as native/c/forerun.h.

It is built with the package where there is a C compiler; without it everything runs on torch. The environment
variable FORERUN_NATIVE turns it off (0) or names another build of it (a path); FORERUN_ISA names the instructions to
use, of those that the machine has. Where a processor has fast and slow cores, passes run on the fast ones: panels are
shared out evenly and a pass waits for the slowest, so a core of half the speed costs more than it gives.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from forerun.core.errors import InvalidInput

log = logging.getLogger(__name__)

F32, BF16 = 0, 1  # kinds of weights that are not packed
FLOATS, HALVES, BYTES = 0, 1, 2  # what a KV cache holds
BLOCK = 32  # inputs per block of packed kinds
MOST_TAPS = 16  # inputs that a convolution of a recurrent layer reads
_MOST_PARTS = 3
ABI = 21  # a change of the structs or of the kernels: what was measured with another counts no more
_BUILT = Path(__file__).with_name("_native.so")
_BUILD_AGAIN = (
    "%s was built from other sources, so passes on the CPU run on torch, several times slower; "
    "build it again, in its repository: pip install --no-deps -e ."
)

Fields = list[tuple[str, Any]]


class Weight(Structure):
    """fr_weight: one matrix [outputs, inputs], packed or plain."""

    _fields_: ClassVar[Fields] = [
        ("kind", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("data", c_void_p),
        ("bias", c_void_p),
    ]


class Weights(Structure):
    """fr_weights: up to three matrices that share their input; their outputs lie side by side."""

    _fields_: ClassVar[Fields] = [("count", c_int64), ("part", Weight * _MOST_PARTS)]


class Experts(Structure):
    """fr_experts: a router, the experts it picks from, and one that every row goes through."""

    _fields_: ClassVar[Fields] = [
        *[(name, c_int64) for name in ("count", "per_token", "inner", "renormalise", "shared_inner", "activation")],
        ("limit", c_float),
        ("alpha", c_float),
        ("router", Weights),
        ("gate_up", POINTER(Weights)),
        ("down", POINTER(Weights)),
        *[(name, Weights) for name in ("shared_gate_up", "shared_down", "shared_gate")],
    ]


class Mixer(Structure):
    """fr_mixer: a recurrent layer."""

    _fields_: ClassVar[Fields] = [
        *[(name, c_int64) for name in ("kind", "kernel", "channels", "wide", "convolved_at", "gates_at", "steps_at")],
        *[(name, c_int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "state", "norm_size")],
        *[(name, Weights) for name in ("inputs", "output")],
        *[(name, c_void_p) for name in ("taps", "bias", "rates", "step_bias", "skip", "norm")],
        ("least_step", c_float),
    ]


class Walk(Structure):
    """fr_walk: the rows of one sequence in a pass, for recurrent layers."""

    _fields_: ClassVar[Fields] = [
        *[(name, c_int64) for name in ("first", "nodes")],
        *[(name, c_void_p) for name in ("parents", "start")],
        ("kept", c_int64),
        *[(name, c_void_p) for name in ("kept_nodes", "states")],
    ]


class Layer(Structure):
    """fr_layer."""

    _fields_: ClassVar[Fields] = [
        *[(name, c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")],
        *[(name, Weights) for name in ("qkv", "output", "gate_up", "down")],
        ("window", c_int64),
        ("rotate", c_int64),
        ("experts", POINTER(Experts)),
        ("after_attention", c_void_p),
        ("after_mlp", c_void_p),
        ("sinks", c_void_p),
        ("mixer", POINTER(Mixer)),
        ("gate", Weights),
    ]


class Table(Structure):
    """fr_table: what tokens are looked up in."""

    _fields_: ClassVar[Fields] = [("type", c_int64), ("row_bytes", c_int64), ("rows", c_void_p)]


class Model(Structure):
    """fr_decoder."""

    _fields_: ClassVar[Fields] = [
        *[(name, c_int64) for name in ("layers", "width", "heads", "kv_heads")],
        *[(name, c_int64) for name in ("head_dim", "rotary", "inner", "vocab")],
        ("eps", c_float),
        ("attention_scale", c_float),
        ("layer", POINTER(Layer)),
        ("final_norm", c_void_p),
        ("head", Weights),
        ("embedding", Table),
        ("activation", c_int64),
        ("whole_norms", c_int64),
        *[(name, c_float) for name in ("embedding_scale", "residual_scale", "logit_scale")],
        *[(name, c_float) for name in ("attention_cap", "logit_cap")],
    ]


class Reach(Structure):
    """fr_reach: what each node sees."""

    _fields_: ClassVar[Fields] = [
        *[(name, c_void_p) for name in ("first", "context", "tail", "tails")],
        ("tail_stride", c_int64),
        ("most", c_int64),
        ("pages", c_void_p),
    ]


class Change(Structure):
    """fr_change: a low-rank change of one weight."""

    _fields_: ClassVar[Fields] = [("rank", c_int64), ("down", c_void_p), ("up", c_void_p), ("scale", c_float)]


class AdapterLayer(Structure):
    """fr_adapter_layer: the changes of a layer's q, k, v, output, gate, up and down projections."""

    _fields_: ClassVar[Fields] = [("changes", Change * 7)]


class Pass(Structure):
    """fr_pass: the rows of one pass and where everything goes."""

    _fields_: ClassVar[Fields] = [
        ("nodes", c_int64),
        ("scored", c_int64),
        ("keys_only", c_int64),
        *[(name, c_void_p) for name in ("tokens", "x", "cosines", "sines")],
        ("rope_stride", c_int64),
        *[(name, c_void_p) for name in ("position", "write")],
        ("reach", Reach),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("kind", c_int64),
        ("layer_stride", c_int64),
        ("head_stride", c_int64),
        ("hidden_layers", c_void_p),
        ("hidden", c_void_p),
        ("hidden_count", c_int64),
        ("kept", c_void_p),
        ("normed", c_void_p),
        ("logits", c_void_p),
        ("tops", c_void_p),
        ("active_experts", c_void_p),
        ("adapters", c_void_p),
        ("walks", c_void_p),
        ("walk_count", c_int64),
        ("inputs", c_void_p),
        ("replayed", c_int64),
    ]


class Run(Structure):
    """fr_run: passes over one node each behind another pass."""

    _fields_: ClassVar[Fields] = [
        ("most", c_int64),
        ("seconds", c_double),
        ("stops", c_void_p),
        *[(name, c_int64) for name in ("stop_count", "match")],
        ("text", c_void_p),
        ("length", c_int64),
        ("logits", c_void_p),
        ("tops", c_void_p),
        ("hidden", c_void_p),
        ("kept", c_int64),
        ("count", c_int64),
        ("own", c_double),
    ]


class HeadLayer(Structure):
    """fr_head_layer: one of its layers."""

    _fields_: ClassVar[Fields] = [
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        *[(name, Weights) for name in ("qkv", "output", "gate_up", "down")],
    ]


class Head(Structure):
    """fr_head: the weights of an EAGLE head."""

    _fields_: ClassVar[Fields] = [
        *[(name, c_int64) for name in ("width", "heads", "kv_heads", "head_dim", "inner", "features", "parts")],
        *[(name, c_int64) for name in ("joins_token", "norm_before_residual", "norm_output", "depth")],
        ("eps", c_float),
        ("attention_scale", c_float),
        *[(name, c_void_p) for name in ("token_norm", "feature_norm", "out_norm")],
        *[(name, c_void_p) for name in ("input_norm", "part_norms")],
        *[(name, Weights) for name in ("fc", "lm_head")],
        ("layers", POINTER(HeadLayer)),
        ("embedding", Table),
    ]


class HeadPass(Structure):
    """fr_head_pass: the rows of one pass and where everything goes."""

    _fields_: ClassVar[Fields] = [
        ("rows", c_int64),
        ("keys_only", c_int64),
        *[(name, c_void_p) for name in ("tokens", "embedded", "features", "before", "parents", "out")],
        *[(name, c_void_p) for name in ("cosines", "sines", "position", "write")],
        ("reach", Reach),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("head_stride", c_int64),
        ("layer_stride", c_int64),
    ]


class Top(Structure):
    """fr_top: rows of logits, how they are read, and their best entries."""

    _fields_: ClassVar[Fields] = [
        *[(name, c_int64) for name in ("rows", "count", "k")],
        *[(name, c_void_p) for name in ("x", "scale", "noise", "noise_row", "values", "indices", "totals")],
    ]


class Draft(Structure):
    """fr_draft: a whole draft of one sequence, what it may be, and what it became."""

    _fields_: ClassVar[Fields] = [
        ("fresh", c_int64),
        *[(name, c_void_p) for name in ("tokens", "features", "out")],
        *[(name, c_int64) for name in ("base", "length", "nodes", "depth", "width", "frontier", "branch")],
        ("price", c_void_p),
        ("prices", c_int64),
        *[(name, c_double) for name in ("level", "power", "shift")],
        ("ids", c_void_p),
        ("vocabulary", c_int64),
        ("logits", c_void_p),
        ("tree", c_void_p),
        *[(name, c_int64) for name in ("count", "levels", "drafted")],
        *[(name, c_double) for name in ("expected", "first", "further")],
        ("scale", c_float),
    ]


MOST_NODES, MOST_STEPS = 256, 24  # of a look-up


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
    "fr_layout": (c_int64, []),
    "fr_isa": (c_char_p, []),
    "fr_variant": (c_char_p, [c_int]),
    "fr_prefers_half": (c_int, []),
    "fr_has": (c_int, [c_char_p]),
    "fr_choose": (c_int, [c_char_p]),
    "fr_threads": (c_int, []),
    "fr_set_threads": (None, [c_int]),
    "fr_use_huge_pages": (None, [c_void_p, c_int64]),
    "fr_packed_kind": (c_int, [c_int]),
    "fr_packed_bytes": (c_int64, [c_int, c_int64, c_int64]),
    "fr_pack": (None, [c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "fr_unpack_rows": (None, [c_int, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p]),
    "fr_linear_rows": (c_int, [POINTER(Weights), c_void_p, c_void_p, c_int64]),
    "fr_decode": (c_int, [POINTER(Model), POINTER(Pass)]),
    "fr_state_numbers": (c_int64, [POINTER(Mixer)]),
    "fr_replay": (c_int, [POINTER(Model), c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p]),
    "fr_decode_run": (c_int, [POINTER(Model), POINTER(Pass), POINTER(Run)]),
    "fr_argmax_rows": (None, [c_void_p, c_int64, c_int64, c_void_p]),
    "fr_head_layout": (c_int64, []),
    "fr_head_run": (c_int, [POINTER(Head), POINTER(HeadPass)]),
    "fr_head_rank": (c_int, [POINTER(Head), c_void_p, c_void_p, POINTER(Top)]),
    "fr_top_rows": (c_int, [POINTER(Top)]),
    "fr_log_noise": (None, [c_void_p, c_int64, c_uint32, c_uint32, c_void_p]),
    "fr_draft_layout": (c_int64, []),
    "fr_head_draft": (c_int, [POINTER(Head), POINTER(HeadPass), POINTER(Draft)]),
    "fr_lookup_layout": (c_int64, []),
    "fr_suffix_new": (c_void_p, []),
    "fr_suffix_free": (None, [c_void_p]),
    "fr_suffix_read": (c_int, [c_void_p, c_void_p, c_int64, c_void_p]),
    "fr_suffix_grow": (None, [c_void_p, c_void_p]),
}


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
        return None, f"FORERUN_NATIVE={setting} names no file; unset it"
    if not path.is_file():
        return None, "it was not built: install a C compiler and then forerun again"
    try:
        found = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:  # a symbol is missing: an older build, as after `git pull`
        log.warning(_BUILD_AGAIN, path)
        return None, f"{path.name} does not load ({error}): install forerun again"
    layouts = found.fr_layout(), found.fr_head_layout(), found.fr_draft_layout(), found.fr_lookup_layout()
    if layouts != (
        ABI * 10**9 + _sizes(Model, Layer, Pass), _sizes(Head, HeadPass, Top), _sizes(Draft), _sizes(Lookup)
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
