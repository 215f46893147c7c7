"""The table of successors in a file beside t(n): a later start reads it and runs no passes for it.

The file's name stands for the model, its number format and the machine, as that of t(n) does. What else the table
depends on is part of the checksum, so that a file that is damaged, or of another table, is made again. A table that
does not fit its model costs speed, and never changes a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from forerun.drafters.suffix.successors import KEPT, READ, Successors
from forerun.models.base import Target

FORMAT = 1
_DIGEST = hashlib.sha256().digest_size


def load_or_read(target: Target, opening: Sequence[int], cost_file: Path | None) -> Successors | None:
    """The table of this target behind this opening: kept at an earlier start, else read now and kept."""
    file = None if cost_file is None else cost_file.with_suffix(".successors")
    shape = min(READ, target.vocab_size), min(KEPT, target.vocab_size)
    facts = repr((FORMAT, target.vocab_size, tuple(opening), shape)).encode()
    found = None if file is None else _load(file, facts, shape)
    if found is None:
        found = Successors.of(target, opening)
        if file is not None and found is not None:
            with suppress(OSError):  # a cache that cannot be written costs time, nothing else
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(_content(facts, found))
    return found


def _content(facts: bytes, table: Successors) -> bytes:
    body = table.tokens.int().numpy().tobytes() + table.shares.numpy().tobytes()
    return hashlib.sha256(facts + body).digest() + body


def _load(file: Path, facts: bytes, shape: tuple[int, int]) -> Successors | None:
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, body = content[:_DIGEST], bytearray(content[_DIGEST:])
    if hashlib.sha256(facts + body).digest() != digest:
        return None
    half = len(body) // 2
    tokens = torch.frombuffer(body, dtype=torch.int32, count=half // 4).view(shape)
    shares = torch.frombuffer(body, dtype=torch.float32, offset=half).view(shape)
    return Successors(tokens, shares)
