"""Rounds under graphs that are captured while texts are written, emulated: whatever was done first is done again.

A graph does what was done when it was captured, on the same memory: values of Python that its name leaves out stay as
they were. Here work is recorded by name and done again instead, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from forerun.core.types import Form, Request
from forerun.engine.engine import Engine
from forerun.models.cuda import graphs
from forerun.models.cuda.target import CudaDecoder
from tests.gpu.test_following import (
    CHAIN,
    TREE,
    WIDE,
    Forms,
    Watched,
    make,
    plain_texts,
    requests,
    sampled,
    willing_target,
    write,
)


@dataclass
class Recorded:
    """In place of a graph."""

    replay: Callable[[], None]


def record(work: Callable[[], None], device: object, pool: object) -> Recorded:
    """In place of `graphs.capture`: the work is done once on the way."""
    work()
    return Recorded(work)


def captures(target: CudaDecoder, engine: Engine) -> Engine:
    """The same engine, whose passes, drafts and small pieces of work are captured as on a GPU."""
    drafter: Any = engine.drafters.get("device")
    target.passes.capture = target.after.replays.capture = drafter.draft.replays.capture = True
    return engine


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("verifier", "draw", "forms"),
    [
        (None, 6, [TREE]),
        (None, 3, [CHAIN, TREE, WIDE, None]),
        ("coupled", 3, [CHAIN]),
        ("coupled", 3, [WIDE]),
        ("exact", 6, [CHAIN, TREE, WIDE, None]),
    ],
)
def test_texts_stay_where_graphs_are_captured_on_the_way(
    verifier: str | None, draw: int, forms: Sequence[Form | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass of a form is captured in a round that follows an unread one, too: it must be run once there.

    All of these but the second failed where it was run twice.
    """
    some: list[Request] = requests(9, draw) if verifier is None else sampled(9, draw, verifier)
    wanted = plain_texts(willing_target(), some)
    monkeypatch.setattr(graphs, "capture", record)
    target, watched = willing_target(), Watched(monkeypatch)
    engine = captures(target, make(target, Forms(forms, 6), follows=True))
    assert write(engine, some, 5)[0] == wanted
    assert watched.followed > 10
    assert target.passes.captured_grown > 0


def record_twice(work: Callable[[], None], device: object, pool: object) -> Recorded:
    """As on a GPU where kernels are compiled on the way: what was captured has run once more."""
    work()
    work()
    return Recorded(work)


@pytest.mark.parametrize(
    ("verifier", "captured"), [(None, record), (None, record_twice), ("coupled", record), ("exact", record_twice)]
)
def test_plain_rounds_stay_where_graphs_are_captured_on_the_way(
    verifier: str | None, captured: Callable[..., Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of the last pass are put in, and the next ones found, outside of the graph of a pass."""
    some = requests(7, 3) if verifier is None else sampled(7, 3, verifier)
    some = [replace(one, drafter="none") for one in some]
    wanted = plain_texts(willing_target(), some)
    monkeypatch.setattr(graphs, "capture", captured)
    target = willing_target()
    engine = captures(target, make(target, Forms([None], 0), follows=True))
    assert write(engine, some, 5)[0] == wanted
    assert target.plain.followed > 20
    assert target.passes.captured > 3
