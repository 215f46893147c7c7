"""Seeded damage to files: flipped bytes, truncation, swapped pieces, and JSON values that cannot be."""

from __future__ import annotations

import json
import struct
from random import Random
from typing import Any

_NUMBERS = (0, 1, -1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**40, 2**62, 2**63, -(2**63), 10**30)
_VALUES: tuple[Any, ...] = (
    *_NUMBERS, 0.0, -0.5, 0.5, 1e-320, 1e308, float("inf"), float("nan"), True, False, None, "", "x", "4", "\ud800",
    [], {}, [[]], [1], ["a"], [None], {"a": 1}, [1] * 7, "a" * 5000,
)  # fmt: skip
_KEYS = (
    "quantization_config", "rope_scaling", "rope_parameters", "layer_types", "no_rope_layers", "head_dim",
    "num_experts", "mlp_only_layers", "sliding_window", "use_sliding_window", "hidden_activation", "text_config",
    "partial_rotary_factor", "attn_logit_softcapping", "eos_token_id", "draft_vocab_size", "forerun",
    "transformer_layer_config", "speculators_config", "eagle_config", "target_hidden_size", "architectures",
)  # fmt: skip


def damage_bytes(data: bytes, dice: Random, focus: int) -> bytes:
    """Damage of one of several kinds; most of it falls on the first `focus` bytes, where files describe themselves."""
    kind = dice.choice(("flip", "flip", "flip", "number", "number", "cut", "move", "fill", "append"))
    damaged, end = bytearray(data), len(data) if dice.random() < 0.2 else min(focus, len(data))
    at = dice.randrange(end)
    if kind == "flip":
        for _ in range(dice.choice((1, 1, 3, 10))):
            damaged[dice.randrange(end)] ^= 1 << dice.randrange(8)
    elif kind == "number":
        value = dice.choice(_NUMBERS) & (2**64 - 1)
        damaged[at : at + 8] = struct.pack("<Q", value)[: dice.choice((1, 2, 4, 8))]
        damaged = damaged[: len(data)]
    elif kind == "cut":
        return bytes(data[: dice.randrange(len(data))])
    elif kind == "move":
        length, to = dice.randrange(1, 64), dice.randrange(end)
        damaged[to : to + length] = data[at : at + length]
    elif kind == "fill":
        length = dice.randrange(1, 64)
        damaged[at : at + length] = bytes([dice.choice((0, 255, 127, 32))]) * length
    else:
        damaged += dice.randbytes(dice.randrange(1, 64))
    return bytes(damaged)


def damage_json(text: str, dice: Random) -> str:
    """One or two values of a document replaced, removed or added; sometimes the text itself is damaged instead."""
    if dice.random() < 0.2:
        return damage_bytes(text.encode(), dice, len(text)).decode("utf-8", "replace")
    document = json.loads(text)
    for _ in range(dice.choice((1, 1, 2))):
        places = list(_places(document))
        if places and dice.random() < 0.85:
            holder, key = dice.choice(places)
            if dice.random() < 0.15:
                del holder[key]
            else:
                holder[key] = _other(holder[key], dice)
        elif isinstance(document, dict):
            document[dice.choice(_KEYS)] = dice.choice(_VALUES)
    return json.dumps(document)


def _places(document: Any) -> Any:
    """Every value of a document as (its holder, its key); of long lists only the beginning."""
    pairs = document.items() if isinstance(document, dict) else enumerate(document[:8])
    for key, value in list(pairs):
        yield document, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def _other(value: Any, dice: Random) -> Any:
    """A value near the one given, or one of the usual impossible ones."""
    if type(value) is int and dice.random() < 0.4:
        return dice.choice((value + 1, value - 1, value * 2, value * 1000, -value, float(value), str(value)))
    return dice.choice(_VALUES)
