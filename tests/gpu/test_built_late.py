"""A drafter that is built, or a head that is swapped, while a round is under way: that round is not spoilt by it.

Graphs of a drafter are captured in passes over padding, through the same buffers as the passes over texts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from forerun.core.types import Request
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.eagle import HeadDraft
from forerun.drafters.device.plan import DraftJob, DraftMenu
from forerun.engine.driver import HeadSwap
from forerun.engine.engine import Engine
from forerun.models.cuda import graphs
from forerun.models.cuda.target import CudaDecoder
from tests.gpu.heads import both_drafters
from tests.gpu.test_captured import captures, record
from tests.gpu.test_following import TREE, Forms, make, plain_texts, requests, willing_target

Change = Callable[[Engine, Request], int]


def built(target: CudaDecoder, name: str, head: str | None = None) -> OnDevice[HeadDraft]:
    """As on a GPU, with all of its graphs."""
    drafter = both_drafters(target, borrows=True)[0]
    drafter.draft.replays.capture = True
    drafter.draft.rehearse(target, 4, 200)
    return drafter


def ask_for_another(engine: Engine, request: Request) -> int:
    return engine.submit(Request(request.prompt, request.params, drafter="second"))


def swap_the_head(engine: Engine, request: Request) -> int:
    order = HeadSwap("anywhere")  # type: ignore[arg-type]
    order(engine)
    order.raise_error()
    return engine.submit(request)


def has_accepted(engine: Engine, target: CudaDecoder) -> bool:
    """Is a round under way that nobody has read, and that has accepted something for most of its sequences?"""
    ahead, accepted = engine.timeline.first, target.grown.last.accepted
    return ahead is not None and ahead.trees.form is not None and int((accepted[:4] > 0).sum()) > 2


@pytest.mark.slow
@pytest.mark.parametrize("change", [ask_for_another, swap_the_head])
def test_texts_stay_while_a_drafter_is_built(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    some = [replace(one, params=replace(one.params, ignore_eos=True, max_tokens=16)) for one in requests(6, 6)]
    wanted = plain_texts(willing_target(words=4), some)
    monkeypatch.setattr(graphs, "capture", record)
    monkeypatch.setattr(DraftMenu, "jobs", lambda menu, batch, length: [DraftJob(4, TREE, (100,))])
    target = willing_target(words=4)
    engine = captures(target, make(target, Forms([TREE], 9), follows=True))
    monkeypatch.setattr(engine.drafters, "_make", lambda name, head=None: built(target, name, head))
    monkeypatch.setattr(engine.drafters, "_runs_head", lambda name: name == "device")
    seqs = [engine.find(engine.submit(one)) for one in some[:5]]
    while not has_accepted(engine, target):
        engine.step()
    seqs.append(engine.find(change(engine, some[5])))
    while engine.busy:
        engine.step()
    assert [seq.tokens[seq.prompt_length :] for seq in seqs if seq is not None] == wanted
