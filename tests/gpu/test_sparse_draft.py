"""sparse_kv on the device: its chains are those of the host, texts are the plain ones, and long texts cost no more."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import NEVER, Budget, Form, Needs, Request, TreeBatch
from forerun.drafters.base import Drafter
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.model import SparseDraft, SparseOnDevice
from forerun.drafters.device.model_graphs import ChainGraphs, Lane
from forerun.drafters.device.protocol import Unread
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.drafters.model.layer_skip import SparseKvDrafter
from forerun.engine.engine import Engine
from forerun.engine.scheduler import PrefillRows, Scheduler
from forerun.models.attention import SparseContext
from forerun.models.base import ON_CPU, LayerSubset
from forerun.models.cuda import graphs
from forerun.models.cuda.target import CudaDecoder
from forerun.models.pages import PAGE
from forerun.testing import FakeSeq
from tests.gpu.host_waits import HostWaits
from tests.gpu.test_captured import record
from tests.gpu.test_following import Forms, Watched, dtype_on, plain_texts, sampled, willing_target, write
from tests.gpu.test_model_following import Noted
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda

SHORT, LONG = Form(2, 2, 1), Form(5, 5, 1)
LEAST = 3 * PAGE  # what a draft reads at least
LENGTHS = (7 * PAGE + 7, 9 * PAGE + 60, 6 * PAGE + 5)
ALL = 2000  # tokens: a draft reads whole contexts


def text_of(length: int, seed: int) -> list[int]:
    """It repeats itself: some pages are like its end."""
    rng = random.Random(seed)
    part = [rng.randrange(2, VOCAB) for _ in range(length // 2 + 3)]
    return (part + part)[:length]


def long_requests(count: int, draw: int, **params: Any) -> list[Request]:
    """Some are read whole by their drafts, and some grow until they are not."""
    rng, made = random.Random(draw), []
    for i in range(count):
        length = rng.choice((1, 40, LEAST - 9, 2 * LEAST + 1, *LENGTHS, *LENGTHS))
        settings = SamplingParams(max_tokens=rng.randint(16, 40), **params)
        made.append(Request(tuple(text_of(length, draw + i)), settings, drafter="device"))
    return made


def talkative_target(device: str = "cpu", **more: Any) -> CudaDecoder:
    target = willing_target(device, **more)
    target.model.head[1] = 0.0  # which would end a text
    return target


def drafter_on(target: CudaDecoder, context: int) -> OnDevice[SparseDraft]:
    pages, layers = SparseContext(context), LayerSubset(target.config.layers)
    part = target.shared().partial
    assert part is not None
    plain = SparseKvDrafter(part(layers, context=pages), VOCAB, pages)
    draft = SparseDraft(target, SparseContext(context))
    if target.device.type == "cuda":
        draft.rehearse(target, 4, 1000)
    return SparseOnDevice(draft, lambda: plain, 2 * context)


def engine_on(
    target: CudaDecoder, forms: Forms, *, context: int = LEAST, follows: bool = True, lookup: bool = False
) -> tuple[Engine, OnDevice[SparseDraft]]:
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(target, frozenset({1}), speculative, EngineConfig(max_batch=4))
    drafter = drafter_on(target, context)
    both: Drafter = HybridDrafter(NgramDrafter(), drafter) if lookup else drafter
    engine.drafters.add("device", both)
    engine.controller, engine.prefill_rows = forms, PrefillRows(ON_CPU.prefill, target.pass_rows, 200)
    engine.timeline.depth = 2 * follows
    return engine, drafter


def is_clean(drafter: OnDevice[SparseDraft]) -> bool:
    draft = drafter.draft
    return not drafter._failed and not draft._proposed and not draft.context._chosen and not draft.context._texts


# ---- chains


def started(target: CudaDecoder, lengths: Sequence[int] = LENGTHS, **more: Any) -> list[FakeSeq]:
    seqs = [FakeSeq(i, text_of(n, i), max_length=1500, **more) for i, n in enumerate(lengths)]
    target.prefill(seqs, Needs())
    return seqs


def chains_of(drafter: Drafter, seqs: Sequence[FakeSeq], form: Form = LONG) -> list[list[int]]:
    trees = drafter.propose(seqs, [Budget(*form.sizes)] * len(seqs))
    tokens = trees.to_host()[0]
    return [tokens[first:end] for first, end in zip(trees.starts, trees.starts[1:], strict=False)]


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("kept", ["", "+int8"])
def test_chains_are_those_that_the_host_drafts(coupled: bool, kept: str) -> None:
    """Of several lengths in one pass, with pages left out: rotations, pages, slots, tokens and noise."""
    target = make_target("llama" + kept, "cpu")
    params = SamplingParams(temperature=0.8, seed=4) if coupled else SamplingParams()
    seqs = started(target, params=params, shares_noise=coupled)
    drafter = drafter_on(target, LEAST)
    wanted = chains_of(drafter.plain, seqs)
    assert chains_of(drafter, seqs) == wanted
    assert len({token for chain in wanted for token in chain[1:]}) > 6
    assert not drafter._failed
    _, skipped = drafter.draft.context.pages_of(seqs[1], LENGTHS[1] - 1, target.kv.extent(1).pages, 10)
    assert skipped > 2 * PAGE


def test_positions_that_were_left_out_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    target = make_target("llama", "cpu")
    seqs, drafter = started(target), drafter_on(target, LEAST)
    wanted, lane = chains_of(drafter.plain, seqs), SparseDraft._lane

    def forgetful(self: SparseDraft, *given: Any) -> Lane:
        return lane(self, *given)._replace(skipped=0)

    monkeypatch.setattr(SparseDraft, "_lane", forgetful)
    assert chains_of(drafter, seqs) != wanted


def test_ropes_with_regimes_count_positions_that_were_left_out() -> None:
    """Where each row of a pass is turned by is worked out before its first layer, by its page and its position."""
    target = make_target("zz-longrope", "cpu")
    seqs, drafter = started(target, (9 * PAGE + 60,)), drafter_on(target, LEAST)
    for chains in (drafter, drafter.plain):
        chains_of(chains, seqs)
        last = len(seqs[0].tokens) - 1 + LONG.depth - 1  # position of the last token that is read
        assert target.buffers.page_turns is not None
        moved = target.buffers.page_turns[target.kv.extent(0).pages[last // PAGE]]
        assert int(target.buffers.turned[0]) == last + int(moved)


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("coupled", [False, True])
def test_a_context_that_is_read_whole_drafts_what_the_target_writes(
    coupled: bool, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind read and unread rounds; a wrong position, page or token would be exact, but accepted less."""
    monkeypatch.setattr(Scheduler, "starters", lambda *_: [])  # whose trees nobody drafts
    target, some = talkative_target(), long_requests(6, 3)
    if coupled:
        heated = [replace(one.params, temperature=0.9, seed=7) for one in some]
        some = [replace(one, params=params, verifier="coupled") for one, params in zip(some, heated, strict=True)]
    some, watched = [one for one in some if len(one.prompt) > 1], Watched(monkeypatch)
    for context, whole in ((ALL, True), (LEAST, False)):
        noted = Noted([LONG], 9)
        engine, drafter = engine_on(target, noted, context=context, follows=follows)
        write(engine, some, 6)
        assert is_clean(drafter)
        assert len(noted.accepted) > 8
        if whole or not coupled:  # noise alone decides in places
            assert all(count == LONG.depth for count in noted.accepted.values()) == whole
    assert (watched.followed > 8) == follows


# ---- texts


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("verifier", [None, "coupled", "exact"])
@pytest.mark.parametrize("forms", [[LONG], [SHORT, LONG, None]])
def test_texts_are_those_of_plain_decoding(
    device: str, verifier: str | None, forms: Sequence[Form | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    need_cuda(device)
    target = talkative_target(device, dtype=dtype_on(device))
    some = long_requests(9, 6)
    if verifier is not None:
        settings = [(one.params, one.verifier) for one in sampled(9, 6, verifier)]
        some = [replace(one, params=params, verifier=name) for one, (params, name) in zip(some, settings, strict=True)]
    wanted, watched = plain_texts(target, some), Watched(monkeypatch)
    engine, drafter = engine_on(target, Forms(forms, 6))
    assert write(engine, some, 5)[0] == wanted
    assert engine.stats.drafted > 40
    assert watched.followed > 4
    assert is_clean(drafter)


@pytest.mark.parametrize("lookup", [False, True])
def test_texts_stay_under_graphs_and_beside_look_ups(lookup: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is recorded by name, as graphs are, and done again."""
    target, some = talkative_target(), long_requests(8, 3)
    wanted = plain_texts(target, some)
    monkeypatch.setattr(graphs, "capture", record)
    engine, drafter = engine_on(target, Forms([SHORT, LONG, None], 6), lookup=lookup)
    replays = drafter.draft.graphs.replays
    target.passes.capture = target.after.replays.capture = replays.capture = True
    drafter.draft.rehearse(target, 4, 1000)
    captured = replays.captured
    assert write(engine, some, 5)[0] == wanted
    assert engine.stats.drafted > 40
    assert replays.captured == captured, "nothing is captured in mid-text"
    assert target.used_slots == 0
    assert is_clean(drafter)


def test_sequences_that_leave_in_mid_round_change_no_other_text() -> None:
    """One is aborted while it is drafted for, and the KV cache has too few pages for all: some are preempted."""
    target, params = talkative_target(kv_slots=17 * PAGE), SamplingParams(max_tokens=120)
    some = [Request(tuple(text_of(6 * PAGE + 20, i)), params, drafter="device") for i in range(4)]
    wanted = plain_texts(target, some)
    engine, drafter = engine_on(target, Forms([SHORT, LONG, None], 6))
    ids = [engine.submit(one) for one in some]
    texts: dict[int, list[int]] = {i: [] for i in ids}
    while engine.busy:
        if len(texts[ids[1]]) > 30:
            engine.abort(ids[1])
        for event in engine.step():
            texts[event.seq_id] += event.tokens
    left, whole = texts.pop(ids[1]), wanted.pop(1)
    assert left == whole[: len(left)] != whole
    assert [*texts.values()] == wanted
    assert engine.stats.preemptions > 0
    assert engine.stats.drafted > 40
    assert target.used_slots == 0
    assert is_clean(drafter)


def test_a_draft_changes_no_bit_of_the_target() -> None:
    """Keys and values that it left are written anew, and those of committed tokens are not touched."""
    target = make_target("llama", "cpu")
    seqs, drafter = started(target), drafter_on(target, LEAST)
    slots = [slot for seq in seqs for slot in target.kv.extent(seq.id).slots(0, len(seq.tokens) - 1)]
    before = target.kv.data[:, :, :, slots].clone()
    chain = TreeBatch.chains([[seq.tokens[-1], 9, 8, 7] for seq in seqs])
    plain = target.score(seqs, chain, Needs()).required_logits.clone()
    chains_of(drafter, seqs)
    assert torch.equal(target.kv.data[:, :, :, slots], before)
    assert torch.equal(target.score(seqs, chain, Needs()).required_logits, plain)


# ---- the host's work


class Counted(list[int]):
    """Counts the tokens that are copied or looked at."""

    seen = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        Counted.seen += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        Counted.seen += len(self)
        return super().__iter__()


def host_work(length: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Of a round for two texts of this length: tokens looked at, calls made and integers sent. No pass is run."""
    target = make_target("llama", "cpu")
    drafter, sent = drafter_on(target, LEAST), list[int]()
    for name in ("_do_first", "_do_further", "_do_layout"):
        monkeypatch.setattr(ChainGraphs, name, lambda *_: None)
    monkeypatch.setattr(drafter.draft.graphs.ints, "send", lambda ints, at: sent.append(ints.size))
    seqs = started(target, (length, length))
    for seq in seqs:
        seq.tokens = Counted(seq.tokens)
    seats, calls = [(seq, i) for i, seq in enumerate(seqs)], 0
    roots = TreeBatch.chains([[1], [1]])

    def count(frame: object, event: str, value: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def draft() -> None:
        drafter.draft.launch([(seq, -1) for seq in seqs], LONG)
        drafter.draft.launch(seats, LONG, Unread(roots, {}))
        drafter.draft.observe(seqs, roots, None, None)  # type: ignore[arg-type]

    draft()  # which reads the texts, and looks for pages like their end
    with HostWaits() as waits:
        draft()
    assert waits.places == {}
    Counted.seen = 0
    sent.clear()
    sys.setprofile(count)
    try:
        draft()
    finally:
        sys.setprofile(None)
    assert sum(sent) > 0
    return Counted.seen, calls, sum(sent)


def test_a_round_costs_the_host_as_much_behind_any_context(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = (host_work(length, monkeypatch) for length in (10 * PAGE, 20 * PAGE))
    assert short == long
    assert short[0] < 20, "of the tokens, the roots alone are looked at"


def test_pages_are_looked_up_for_new_tokens_alone() -> None:
    """What the target committed since the last search is read once; nothing is copied in between."""
    context, seq = SparseContext(LEAST), FakeSeq(1, [], max_length=2000)
    seq.tokens = Counted(text_of(1000, 1))
    pages = range(1000, 1000 + 2000 // PAGE)
    context.pages_of(seq, 999, pages, 16)
    for committed in range(1000, 1200):
        seq.tokens = Counted([*seq.tokens, committed % 50])
        Counted.seen = 0
        context.pages_of(seq, committed, pages, 20)
        assert Counted.seen <= 16


# ---- prices


def test_it_offers_nothing_until_most_of_a_context_is_left_out() -> None:
    drafter = drafter_on(make_target("llama", "cpu"), LEAST)
    short, long = (FakeSeq(i, text_of(n, i), max_length=1500) for i, n in ((1, 2 * LEAST - 1), (2, 2 * LEAST)))
    assert drafter.offer(short) is NEVER
    assert drafter.offer(long).menu is drafter.draft.menu


def test_the_menu_learns_what_drafts_take_in_mid_text() -> None:
    target = make_target("llama", "cpu")
    drafter, seqs = drafter_on(target, LEAST).draft, started(target)
    for depth in (1, 2, 5):
        drafter.menu.note(4, Form(depth, depth, 1), 1e-9 * depth)
    for _ in range(30):
        drafter.launch([(seq, -1) for seq in seqs], LONG)
    taken = drafter.menu.seconds(LONG, 3)
    assert taken > 1e-8, "padding was timed: a pass over a context takes longer"
    assert drafter.menu.seconds(SHORT, 3) == pytest.approx(0.4 * taken)
    drafter.menu.correct(4, LONG, 1e6 * taken)
    assert drafter.menu.seconds(LONG, 3) < 1.2 * taken, "a pause of the machine"
