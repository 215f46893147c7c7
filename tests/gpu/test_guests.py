"""Requests that ask for look-ups, or for nothing, beside others that a head drafts for on the device (`gather`)."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from forerun.core.params import SamplingParams
from forerun.core.types import Form, Offer, Request, Seq
from forerun.drafters.base import NoDrafter
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.eagle import HeadDraft
from forerun.drafters.device.protocol import DeviceDrafter
from forerun.engine.engine import Engine
from forerun.engine.routing import DrafterPool
from forerun.engine.sequence import SequenceState
from forerun.models.cuda.target import CudaDecoder
from tests.gpu.test_following import Forms, Watched, dtype_on, make, plain_texts, requests, willing_target, write
from tests.gpu.tiny import DEVICES, need_cuda

CHAIN, WIDE = Form(3, 3, 1), Form(20, 4, 6)
OTHERS = "ngram", "suffix", "none"


def made(target: CudaDecoder, forms: Sequence[Form | None], lookup: bool = False, gathers: bool = True) -> Engine:
    engine = make(target, Forms(forms, 1 << 30), follows=True, lookup=lookup)
    engine.drafters._captures = gathers
    return engine


def head_of(engine: Engine) -> HeadDraft:
    drafter = engine.drafters.get("device")
    if isinstance(drafter, HybridDrafter):
        drafter = drafter.second
    assert isinstance(drafter, OnDevice)
    assert not drafter._failed
    return drafter.draft


def mixture(count: int, seed: int, **params: object) -> list[Request]:
    """A third of the requests asks for other drafters."""
    some = requests(count, seed, **params)
    return [replace(one, drafter=OTHERS[i // 3 % 3]) if i % 3 == 1 else one for i, one in enumerate(some)]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("forms", [[CHAIN], [CHAIN, Form(8, 3, 3), None]])
def test_texts_of_a_mixture_are_the_plain_ones(
    device: str, forms: list[Form | None], lookup: bool, caplog: pytest.LogCaptureFixture
) -> None:
    need_cuda(device)
    target, some = willing_target(device, dtype=dtype_on(device)), mixture(18, 3)
    wanted = plain_texts(target, some)
    engine = made(target, forms, lookup)
    for seed in range(2):
        assert write(engine, some, seed)[0] == wanted
    assert write(engine, some, 0, at_once=True)[0] == wanted
    assert engine.timeline.depth == 2
    assert not engine.drafters._guests
    assert not head_of(engine).rows.held
    assert "switched off" not in caplog.text


class Broken(NoDrafter):
    """It drafts nothing, and raises where it is asked what drafts for nobody; later its offers fail too."""

    def __init__(self, head: OnDevice[HeadDraft] | None = None) -> None:
        self.head = head

    def device(self, seqs: Sequence[Seq]) -> DeviceDrafter | None:
        if self.head is not None:
            return self.head.device(seqs)
        raise IndexError("no sequence")

    def offer(self, seq: Seq) -> Offer:
        raise RuntimeError("no offer")


@pytest.mark.parametrize("offers", [False, True])
def test_a_drafter_that_fails_harms_nobody_beside_it(offers: bool) -> None:
    target, some = willing_target(), mixture(6, 3)
    wanted = plain_texts(target, some)
    engine = made(target, [None])
    head = engine.drafters.get("device")
    assert isinstance(head, OnDevice)
    engine.drafters.add("device", Broken(head if offers else None))
    assert write(engine, some, 0, at_once=True)[0] == wanted
    assert not engine.drafters._guests


def long_mixture() -> list[Request]:
    """Three that a head drafts for and three that ask for others, all of the same length."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    some = requests(6, 5)
    return [
        replace(one, params=params, drafter=OTHERS[i // 2] if i % 2 else "device", prompt=(*one.prompt, 3, 4))
        for i, one in enumerate(some)
    ]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("gathers", [True, False])
def test_rounds_of_a_mixture_overlap(gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of one drafter do; where nothing is gathered, each round waits for the last one."""
    target, some = willing_target(), long_mixture()
    engine = made(target, [CHAIN], gathers=gathers)
    engine.max_batch = len(some)
    watched = Watched(monkeypatch)
    write(engine, some, 0, at_once=True)
    if gathers:
        assert watched.followed > 0.7 * watched.asked
    else:
        assert watched.followed < 0.3 * watched.asked


@pytest.mark.slow(keep=1)
def test_a_text_that_had_no_head_is_drafted_for_from_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head has not read what comes before; what it drafts is accepted all the same, now and then."""
    target = willing_target(words=4)
    engine, params = made(target, [WIDE]), SamplingParams(max_tokens=60, ignore_eos=True)
    first, second = (replace(one, params=params, prompt=(*one.prompt, 3, 4)) for one in requests(2, 5))
    wanted, gather = plain_texts(target, [first, second]), DrafterPool.gather
    drafting, spans = list[str](), set[tuple[int, int]]()  # for the first one, and of its rows

    def watched(pool: DrafterPool, seqs: Sequence[SequenceState], beside: Sequence[SequenceState] = ()) -> None:
        gather(pool, seqs, beside)
        drafting.extend([seq.drafting for seq in seqs if seq.id == 0])

    monkeypatch.setattr(DrafterPool, "gather", watched)
    texts, accepted = {engine.submit(replace(first, drafter="none")): list[int]()}, 0
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            texts[event.seq_id] += event.tokens
            accepted += event.accepted if event.seq_id == 0 else 0
            if (state := head_of(engine).rows.get(0)) is not None and state.seen:
                spans.add((state.base, state.base + state.seen))
            if len(texts) == 1 and len(texts[0]) >= 10:
                assert not accepted
                texts[engine.submit(replace(second, params=replace(params, max_tokens=30)))] = []
    assert [texts[0], texts[1]] == [wanted[0], wanted[1][:30]]
    assert accepted, "by trees that are as wide as what it says"
    assert min(begin for begin, _ in spans) > len(first.prompt), "the head has not read what comes before"
    assert max(end - begin for begin, end in spans) > 20
    assert list(dict.fromkeys(drafting)) == ["none", "device"]
    assert drafting[-1] == "none", "alone again, it has what it asked for"
    assert not head_of(engine).rows.held
