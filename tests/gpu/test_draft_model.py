"""Chains that a draft model drafts on the device are those that the host drafts with it, token by token."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Form, Request, TreeBatch, Verdict
from forerun.drafters.base import Drafter, Parts
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.model import IN_VAIN, ModelDraft, over_model
from forerun.drafters.device.plan import DEEPEST
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.drafters.model.draft_model import ModelDrafter
from forerun.engine.engine import Engine
from forerun.engine.routing import DrafterPool
from forerun.models.cuda import graphs
from forerun.models.cuda.target import CudaDecoder
from forerun.testing import FakeSeq
from forerun.testing.conformance import check_trees
from tests.drafters.rounds import as_lists
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda


def _targets(device: str, *seeds: int | None) -> list[CudaDecoder]:
    need_cuda(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [make_target("llama", device, dtype, seed=seed) for seed in seeds]


def _drafter(draft: CudaDecoder, target: CudaDecoder | None = None) -> OnDevice[ModelDraft]:
    """On the device; graphs are captured where a target is given."""
    model = ModelDraft(draft, VOCAB, None if target is None else target.grown.last)
    if target is not None:
        model.rehearse(target, 4, 256)
    return over_model(model, lambda: ModelDrafter(draft, VOCAB))


def _read(drafter: OnDevice[ModelDraft], target: CudaDecoder, seq: FakeSeq) -> None:
    trees, scores = target.prefill([seq], drafter.needs)
    drafter.observe([seq], trees, scores, Verdict.whole_chain(trees, [seq.tokens[-1]]))


def _advance(
    drafter: OnDevice[ModelDraft], target: CudaDecoder, seqs: list[FakeSeq], trees: TreeBatch, verdict: Verdict
) -> None:
    """One round's end, with a verdict from elsewhere."""
    scores, drafted = target.score(seqs, trees, drafter.needs), as_lists(trees)
    target.commit(seqs, trees, verdict)
    drafter.observe(seqs, trees, scores, verdict)  # starts the next draft, in the same memory
    for seq, (tokens, _), path, bonus in zip(seqs, drafted, *verdict.to_host(), strict=True):
        seq.tokens += [*(tokens[node] for node in path), bonus]


@contextmanager
def _no_waiting(device: str) -> Iterator[None]:
    """On a GPU the host must not wait for the device in here."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("coupled", [False, True])
def test_chains_are_those_that_the_host_drafts(device: str, coupled: bool) -> None:
    """Texts of different lengths, one leaving, chains of different depths, any part of them accepted."""
    target, draft, other = _targets(device, 1, 2, 2)
    drafter, host = _drafter(draft, target if device == "cuda" else None), ModelDrafter(other, VOCAB)
    params = SamplingParams(temperature=0.8) if coupled else SamplingParams()
    rng = random.Random(5)
    seqs = [
        FakeSeq(
            b, [rng.randrange(VOCAB) for _ in range(n)], max_length=400, params=params, seed=7 + b, shares_noise=coupled
        )
        for b, n in enumerate((1, 9, 130))
    ]
    for seq in seqs:
        _read(drafter, target, seq)
    for turn, depth in enumerate((4, 4, 4, 2, 5, 1, 1, 4)):
        some = seqs if turn < 5 else seqs[1:]
        budgets = [Budget(depth, depth)] * len(some)
        wanted = host.propose(some, budgets)
        with _no_waiting(device):
            found = drafter.propose(some, budgets)
        assert found.form is not None
        assert found.form.chain
        assert as_lists(found) == as_lists(wanted), f"round {turn}"
        check_trees(found, some, budgets, VOCAB)
        accepted = [rng.randrange(depth + 1) for _ in some]  # from nothing to all
        paths = [list(range(1, count + 1)) for count in accepted]
        _advance(drafter, target, some, found, Verdict.of(paths, [rng.randrange(VOCAB) for _ in some], device))
        if turn == 4:
            drafter.forget(seqs[0])
    for seq in seqs:
        drafter.forget(seq)
    assert draft.used_slots == 0


def _texts(engine: Engine, params: SamplingParams, count: int = 3) -> list[tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    rng = random.Random(3)
    for n in (3, 40, 90)[:count]:
        found[engine.submit(Request(tuple(rng.randrange(VOCAB) for _ in range(n)), params))] = []
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            found[event.seq_id] += event.tokens
    return [tuple(tokens) for tokens in found.values()]


def _engine(target: CudaDecoder, drafter: Drafter | None, controller: str = "fixed", max_batch: int = 4) -> Engine:
    name = "none" if drafter is None else "ngram"
    engine = make_engine(target, frozenset(), SpeculativeConfig(drafter=name, budget=4, controller=controller))
    engine.max_batch = max_batch
    if drafter is not None:
        engine.drafters.add("ngram", drafter)
    return engine


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("controller", ["fixed", "adaptive"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_texts_are_those_without_drafts(device: str, controller: str, temperature: float) -> None:
    target, draft = _targets(device, 1, 2)
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=4)
    wanted = _texts(_engine(target, None), params)
    drafter = _drafter(draft, target if device == "cuda" else None)
    engine = _engine(target, drafter, controller)
    assert _texts(engine, params) == wanted
    assert isinstance(engine.drafters, DrafterPool)
    assert not engine.drafters._failed
    assert not drafter._failed
    assert target.used_slots == draft.used_slots == 0


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("controller", ["fixed", "adaptive"])
def test_beside_look_ups_texts_are_the_same_and_nothing_is_held(device: str, controller: str) -> None:
    """Rounds of look-ups, of chains, and of chains with look-ups added to them."""
    target, draft = _targets(device, 1, 2)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    wanted = _texts(_engine(target, None), params)
    drafter = _drafter(draft, target if device == "cuda" else None)
    engine = _engine(target, HybridDrafter(NgramDrafter(), drafter), controller)
    assert _texts(engine, params) == wanted
    assert not drafter._failed
    assert not engine.drafters._failed
    assert target.used_slots == draft.used_slots == 0


class Again:
    """Stands for a graph where there is no GPU: what was captured is done again, whatever is asked for by then."""

    def __init__(self, work: Callable[[], None], *_: object) -> None:
        self.replay = work
        work()


@pytest.mark.slow
def test_all_that_drafts_need_is_captured_when_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, other = _targets("cpu", 1, 2, 2)
    wanted = _texts(_engine(target, None), SamplingParams(max_tokens=24, ignore_eos=True))
    monkeypatch.setattr(graphs, "capture", Again)
    model = ModelDraft(draft, VOCAB)
    target.passes.capture = draft.passes.capture = model.graphs.replays.capture = True
    model.rehearse(target, 4, 256)
    drafter = over_model(model, lambda: ModelDrafter(other, VOCAB))
    assert all(0.0 < model.menu.seconds(form, 3) < float("inf") for form in model.menu.forms)
    assert model.menu.knows(model.menu.forms[-1], 3)
    known = model.graphs.replays.captured, draft.passes.captured, target.passes.captured_grown
    assert min(known) > 0
    assert _texts(_engine(target, drafter), SamplingParams(max_tokens=24, ignore_eos=True)) == wanted
    assert not drafter._failed
    assert (model.graphs.replays.captured, draft.passes.captured, target.passes.captured_grown) == known


@pytest.mark.gpu
def test_nothing_is_captured_while_texts_are_written() -> None:
    target, draft = _targets("cuda", 1, 2)
    drafter = _drafter(draft, target)
    target.warm_up(drafter.needs, 4, 256)
    engine, passes = _engine(target, drafter), (target.passes, draft.passes)
    known = [one.captured for one in passes], drafter.draft.graphs.replays.captured
    _texts(engine, SamplingParams(max_tokens=24, ignore_eos=True))
    assert ([one.captured for one in passes], drafter.draft.graphs.replays.captured) == known


@pytest.mark.parametrize("device", DEVICES)
def test_a_perfect_draft_is_accepted_whole_and_read_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights draft: five tokens a round, and each is one row of one pass of the draft model."""
    target, draft = _targets(device, 1, 1)
    drafter = _drafter(draft, target if device == "cuda" else None)
    read: list[int] = []
    prefill = draft.prefill
    monkeypatch.setattr(
        draft, "prefill", lambda seqs, needs: (read.append(len(seqs[0].tokens)), prefill(seqs, needs))[1]
    )
    engine = _engine(target, drafter)
    seq_id = engine.submit(Request((5, 6, 7, 8), SamplingParams(max_tokens=40, ignore_eos=True)))
    seq = engine.find(seq_id)
    assert seq is not None
    while engine.busy:
        engine.step()
    assert seq.stats.rounds == 9, "the first token comes with the pass that reads the prompt"
    assert seq.stats.accepted_per_position == [1.0] * 4
    assert read == [4], "the prompt, and nothing after it"


@pytest.mark.parametrize("device", DEVICES)
def test_the_next_draft_starts_before_it_is_asked_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = _targets(device, 1, 2)
    drafter = _drafter(draft, target if device == "cuda" else None)
    launched: list[int] = []
    launch = ModelDraft._start
    monkeypatch.setattr(
        ModelDraft, "_start", lambda self, going, form: (launched.append(form.depth), launch(self, going, form))[1]
    )
    seq = FakeSeq(0, [3, 4, 5, 6], max_length=60)
    _read(drafter, target, seq)
    for depth in (3, 3, 3, 2, 2, 0, 2):
        trees = drafter.propose([seq], [Budget(depth, depth)])
        _advance(drafter, target, [seq], trees, Verdict.of([[]], [7], device))
    # asked, ahead of rounds 2 to 4, asked for another depth, ahead twice (once in vain), asked and ahead
    assert launched == [3, 3, 3, 3, 2, 2, 2, 2, 2]
    drafter.forget(seq)
    assert draft.used_slots == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_sequence_that_leaves_does_not_waste_the_draft_of_the_others(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, other = _targets(device, 1, 2, 2)
    drafter, host = _drafter(draft, target if device == "cuda" else None), ModelDrafter(other, VOCAB)
    seqs = [FakeSeq(b, [3 + b, 4, 5, 6 + b], max_length=60) for b in range(3)]
    for seq in seqs:
        _read(drafter, target, seq)
    trees = drafter.propose(seqs, [Budget(3, 3)] * 3)
    _advance(drafter, target, seqs, trees, Verdict.of([[], [1], []], [7, 8, 9], device))
    drafter.forget(seqs[1])
    monkeypatch.setattr(drafter.draft, "_start", lambda *args: pytest.fail("it was drafted already"))
    left = [seqs[0], seqs[2]]
    found = drafter.propose(left, [Budget(3, 3)] * 2)
    assert as_lists(found) == as_lists(host.propose(left, [Budget(3, 3)] * 2))


def test_an_idle_draft_model_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds without drafts run no pass of it; after some texts without any, their prompts are not read either."""
    target, draft = _targets("cpu", 1, 2)
    drafter = _drafter(draft)
    passes: list[str] = []
    for name in ("prefill", "score"):
        run = getattr(draft, name)
        monkeypatch.setattr(draft, name, lambda *args, _run=run, _name=name: (passes.append(_name), _run(*args))[1])
    monkeypatch.setattr(drafter.draft.graphs, "draft", lambda *args: pytest.fail("nothing was asked for"))
    for turn in range(IN_VAIN + 2):
        seq = FakeSeq(turn, [3, 4, 5, 6], max_length=60)
        _read(drafter, target, seq)
        for _ in range(3):
            trees = drafter.propose([seq], [Budget(0, 0)])
            assert trees.is_plain()
            _advance(drafter, target, [seq], trees, Verdict.of([[]], [7], "cpu"))
        drafter.forget(seq)
        target.release(seq)
    assert passes == ["prefill"] * IN_VAIN
    monkeypatch.undo()
    seq = FakeSeq(99, [3, 4, 5, 6], max_length=60)
    _read(drafter, target, seq)
    host = ModelDrafter(draft, VOCAB)
    found = drafter.propose([seq], [Budget(3, 3)])
    assert as_lists(found) == as_lists(host.propose([FakeSeq(100, [3, 4, 5, 6])], [Budget(3, 3)]))
    assert drafter.draft.views.in_vain == 0, "prompts are read at once again"


def test_rounds_without_drafts_between_others_are_caught_up_with() -> None:
    """What was not read meanwhile is read as a prompt; chains are those of a model that read all of it."""
    target, draft, other = _targets("cpu", 1, 2, 2)
    drafter, host = _drafter(draft), ModelDrafter(other, VOCAB)
    seq = FakeSeq(0, [3, 4, 5, 6], max_length=90)
    _read(drafter, target, seq)
    rng = random.Random(1)
    for turn, depth in enumerate((3, 0, 2, *[0] * 9, 4, 0, 0, 3)):
        trees = drafter.propose([seq], [Budget(depth, depth)])
        if depth:
            assert as_lists(trees) == as_lists(host.propose([seq], [Budget(depth, depth)])), f"round {turn}"
        path = list(range(1, 1 + rng.randrange(depth + 1)))
        _advance(drafter, target, [seq], trees, Verdict.of([path], [rng.randrange(VOCAB)], "cpu"))
        assert drafter.draft.views._views[0].observed == 3, "of the prompt only"


def test_the_offer_says_what_the_device_takes() -> None:
    draft = _targets("cpu", 2)[0]
    drafter = _drafter(draft)
    drafter.draft.menu.note(1, Form(4, 4, 1), 9e-3)
    offer = drafter.offer(FakeSeq(0, [1, 2]))
    assert offer.menu is drafter.draft.menu
    chain = drafter.draft.menu.forms[3]
    assert chain.depth == 4
    assert drafter.draft.menu.seconds(chain, 1) == pytest.approx(9e-3)
    assert drafter.draft.menu.seconds(chain, 10_000) == float("inf")


def test_a_sequence_without_room_or_with_foreign_tokens_is_written_without_drafts() -> None:
    target, draft = _targets("cpu", 1, 2)
    drafter = _drafter(draft)
    draft.max_length = 20 + DEEPEST
    short, long = FakeSeq(0, [1, 2, 3], max_length=100), FakeSeq(1, [1] * 30, max_length=100)
    for seq in (short, long):
        _read(drafter, target, seq)
    trees = drafter.propose([short, long], [Budget(3, 3)] * 2)
    assert [len(tokens) for tokens, _ in as_lists(trees)] == [4, 1]


def test_penalties_are_drafted_by_the_host() -> None:
    target, draft = _targets("cpu", 1, 2)
    drafter = _drafter(draft)
    seq = FakeSeq(0, [1, 2, 3], max_length=100, params=SamplingParams(repetition_penalty=1.3))
    _read(drafter, target, seq)
    trees = drafter.propose([seq], [Budget(3, 3)])
    assert trees.form is None
    assert as_lists(trees) == as_lists(ModelDrafter(draft, VOCAB).propose([seq], [Budget(3, 3)]))


def test_a_cascade_keeps_its_draft_models_on_the_host() -> None:
    target, draft = _targets("cpu", 1, 2)
    built = ModelDrafter.build(Parts(target, draft, SpeculativeConfig(), by_host=True))
    assert type(built) is ModelDrafter
