"""Drafts for batches whose sequences join, leave, idle and end: texts, trees and how often the head must run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Form, Request, Round, Seq, TreeBatch, TreeForm, Verdict
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.eagle import HeadDraft
from forerun.drafters.device.features import ROOM, FeatureRows
from forerun.drafters.device.plan import FORMS, DraftJob
from forerun.drafters.heads.eagle import EagleDrafter
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.engine.engine import Engine
from forerun.models.cuda.plan import MAX_ROWS, Span
from forerun.models.cuda.target import CudaDecoder
from forerun.models.pages import PAGE, pages_for
from forerun.testing import FakeSeq
from tests.drafters.rounds import as_lists
from tests.gpu.heads import both_drafters, settled
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda

NOTHING = Budget(0, 0)


class RandomForms:
    """A controller that draws a form for the whole batch every few rounds; now and then one sequence sits out."""

    def __init__(self, seed: int, forms: Sequence[Form | None]) -> None:
        self.rng, self.forms, self.form = random.Random(seed), forms, forms[0]

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        if self.rng.random() < 0.3:
            self.form = self.rng.choice(self.forms)
        budget = NOTHING if self.form is None else Budget(*self.form.sizes)
        idle = self.rng.randrange(len(seqs)) if self.rng.random() < 0.3 else -1
        return [NOTHING if b == idle else budget for b in range(len(seqs))]

    def observe(self, outcome: Round) -> None:
        pass

    def forget(self, seq: Seq) -> None:
        pass


def _engine(device: str, drafter: OnDevice[HeadDraft], target: CudaDecoder, batch: int) -> Engine:
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(target, frozenset({1}), speculative, EngineConfig(max_batch=batch))
    engine.drafters.add("device", drafter)
    return engine


def _write(engine: Engine, requests: Sequence[Request], rng: random.Random) -> list[list[int]]:
    """Requests come at any time, several at once or none."""
    waiting, texts = list(requests), dict[int, list[int]]()
    while waiting or engine.busy:
        for _ in range(rng.choice((0, 0, 1, 2)) if engine.busy else 1):
            if waiting:
                texts[engine.submit(waiting.pop(0))] = []
        for event in engine.step():
            assert event.error is None
            texts[event.seq_id] += event.tokens
    return [texts[key] for key in sorted(texts)]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [1, 2])
def test_texts_do_not_depend_on_who_joins_leaves_or_idles(
    device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_cuda(device)
    target = make_target("llama", device, torch.float32 if device == "cpu" else torch.bfloat16)
    drafter = both_drafters(target, borrows=True)[0]
    engine = _engine(device, drafter, target, 5)
    rng = random.Random(seed)
    lengths = [1, 2, 9, 3, 40, 17, 1, 30, 5]
    prompts = [tuple(rng.randrange(2, VOCAB) for _ in range(n)) for n in (3, 1, 40, 7, 2, 130, 5, 11, 4)]
    wanted = [SamplingParams(max_tokens=length) for length in lengths]

    def requests(name: str) -> list[Request]:
        return [Request(prompt, params, drafter=name) for prompt, params in zip(prompts, wanted, strict=True)]

    engine.max_batch = 1
    plain = _write(engine, requests("none"), rng)
    forms_used = FORMS[:7] if device == "cpu" else (FORMS[2], FORMS[5])  # a GPU compiles and captures each
    engine.max_batch, engine.controller = 5, RandomForms(seed, [*forms_used, None])
    forms = _forms_scored(target, monkeypatch)
    assert _write(engine, requests("device"), rng) == plain
    assert not drafter._failed
    assert sum(form is not None for form in forms) > len(forms) // 3, "most batches stay on the device"
    sizes = {form.trees for form in forms if form is not None}
    assert sizes > {1, 4} or (device == "cuda" and len(sizes) > 1)  # a graph for more serves few as well
    assert drafter.draft.rows.held == target.used_slots == 0


def _forms_scored(target: CudaDecoder, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The form, or None, of every pass over trees that follows."""
    forms, score = list[object](), target.score
    monkeypatch.setattr(
        target, "score", lambda seqs, trees, *more: (forms.append(trees.form), score(seqs, trees, *more))[1]
    )
    return forms


def launched(draft: HeadDraft, seqs: Sequence[Seq], budget: Budget) -> TreeBatch:
    grown = draft.launch([(seq, -1) for seq in seqs], Form(budget.nodes, budget.depth, budget.width))
    assert grown is not None
    return grown


class Batch:
    """Rounds without an engine: a target, a head on the device, the same head as everywhere, and some sequences."""

    def __init__(self, device: str = "cpu", layers: int = 1, **more: Any) -> None:
        self.target = make_target("llama", device, torch.float32 if device == "cpu" else torch.bfloat16)
        self.ours, self.plain = both_drafters(self.target, depth=layers, **more)
        self.seqs: list[FakeSeq] = []
        self.joined = 0

    @property
    def drafters(self) -> tuple[OnDevice[HeadDraft], EagleDrafter]:
        return self.ours, self.plain

    def join(self, *lengths: int, longest: int = 400) -> None:
        count, self.joined = self.joined, self.joined + len(lengths)
        new = [
            FakeSeq(count + i, [(5 * j + 3 * count + i) % VOCAB for j in range(n)], max_length=longest)
            for i, n in enumerate(lengths)
        ]
        trees, scores = self.target.prefill(new, self.ours.needs)
        for drafter in self.drafters:
            drafter.observe(new, trees, scores, Verdict.whole_chain(trees, [seq.tokens[-1] for seq in new]))
        self.seqs += new

    def leave(self, seq: FakeSeq) -> None:
        for drafter in self.drafters:
            drafter.forget(seq)
        self.target.release(seq)
        self.seqs.remove(seq)

    def draft(self, budget: Budget) -> tuple[TreeBatch, TreeBatch]:
        budgets = [budget] * len(self.seqs)
        return self.ours.propose(self.seqs, budgets), self.plain.propose(self.seqs, budgets)

    def end_round(self, trees: TreeBatch) -> None:
        scores = self.target.score(self.seqs, trees, self.ours.needs)
        if scores.greedy is not None:
            verdict = settled(scores)
        else:
            assert scores.logits is not None
            said = scores.logits.argmax(-1).tolist()
            verdict = Verdict.of([[] for _ in self.seqs], [said[first] for first in trees.starts[:-1]], "cpu")
        self.target.commit(self.seqs, trees, verdict)
        for drafter in self.drafters:
            drafter.observe(self.seqs, trees, scores, verdict)
        tokens, (paths, bonus) = trees.to_host()[0], verdict.to_host()
        for seq, first, path, root in zip(self.seqs, trees.starts, paths, bonus, strict=False):
            seq.tokens += [*(tokens[first + node] for node in path), root]

    def round(self, budget: Budget) -> None:
        """One whole round; what is drafted is what the head drafts everywhere."""
        ours, plain = self.draft(budget)
        assert as_lists(ours) == as_lists(plain)
        self.end_round(ours)


@pytest.mark.parametrize("budget", [Budget(5, 5), Budget(8, 3, 3)])
@pytest.mark.parametrize("layers", [1, 2])
def test_padding_changes_no_tree(budget: Budget, layers: int) -> None:
    """Three sequences in a bucket of four, and each of them alone."""
    batch = Batch(layers=layers)
    batch.join(4, 30, 9)
    together = as_lists(launched(batch.ours.draft, batch.seqs, budget))
    assert batch.ours.draft._last is not None
    assert batch.ours.draft._last.sequences == 4
    for seq, tree in zip(batch.seqs, together, strict=True):
        alone = launched(batch.ours.draft, [seq], budget)
        assert as_lists(alone) == [tree]
    assert as_lists(batch.draft(budget)[0]) == together
    rows = batch.ours.draft.rows
    rows.rows[: 4 * ROOM] = rows.rows[: 4 * ROOM].roll(ROOM, 0)  # a negative control: rows of others
    assert as_lists(batch.draft(budget)[0]) != together


def test_a_capture_for_a_larger_batch_drops_the_draft_that_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing runs a draft of padding, which overwrites trees: on a GPU sequences then got each other's roots."""
    batch, budget = Batch(), Budget(*FORMS[5].sizes)
    draft = batch.ours.draft
    batch.join(9)
    batch.end_round(batch.draft(budget)[0])
    assert draft._ahead is not None
    batch.join(12)
    captured = list[int]()
    rehearse = draft._rehearse
    monkeypatch.setattr(draft.menu, "knows", lambda form, sequences: sequences < 2 or bool(captured))
    monkeypatch.setattr(draft, "_rehearse", lambda *args: (captured.append(1), rehearse(*args))[1])
    ours, plain = batch.draft(budget)
    assert captured
    assert ours.to_host() == plain.to_host()


def read_passes(rows: FeatureRows, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every pass that reads for keys and values alone, from now on."""
    passes, keep = list[int](), rows.reader.keep

    def counted(spans: Sequence[Span]) -> None:
        passes.append(sum(len(span.tokens) for span in spans))
        keep(spans)

    monkeypatch.setattr(rows.reader, "keep", counted)
    return passes


@pytest.mark.parametrize("layers", [1, 3])
def test_rows_of_sequences_that_idle_are_read_together_and_rarely(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(layers=layers)
    batch.join(4, 30, 9)
    passes = read_passes(batch.ours.draft.rows, monkeypatch)
    for _ in range(ROOM + 5):
        batch.end_round(batch.ours.propose(batch.seqs, [NOTHING] * 3))
    assert len(passes) == 2, "one pass for all of them, when the first has no places left"
    assert passes[0] == 29, "and before it the prompt, which comes first"
    assert passes[1] > 2 * ROOM
    for _ in range(3):
        batch.round(Budget(5, 5))


@pytest.mark.parametrize("layers", [1, 2])
def test_rows_that_wait_are_read_before_many_that_come(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a prompt's last piece is short, and the pass behind it keeps more rows than a draft reads."""
    batch = Batch(layers=layers)
    batch.join(30)
    (seq,) = batch.seqs
    for _ in range(3):
        batch.end_round(batch.ours.propose(batch.seqs, [NOTHING]))
    passes = read_passes(batch.ours.draft.rows, monkeypatch)
    chain = TreeBatch.chains([[seq.tokens[-1], *range(3, 21)]])
    scores = batch.target.score(batch.seqs, chain, batch.ours.needs)
    verdict = Verdict.of([list(range(1, 19))], [9], "cpu")
    batch.target.commit(batch.seqs, chain, verdict)
    for drafter in batch.drafters:
        drafter.observe(batch.seqs, chain, scores, verdict)
    seq.tokens += [*range(3, 21), 9]
    assert passes == [29, 3], "the many wait for a draft"
    batch.round(Budget(5, 5))
    assert passes == [29, 3, 19]
    batch.round(Budget(5, 5))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layers", [1, 2])
def test_a_prompt_of_several_passes_is_read_in_order(layers: int) -> None:
    """What is cut into passes attends to what was read before; others begin in the middle of a pass."""
    batch = Batch(layers=layers)
    batch.join(20, MAX_ROWS + 40, 150, longest=1400)
    for budget in (Budget(8, 3, 3), Budget(5, 5), Budget(5, 5)):
        batch.round(budget)


def test_a_draft_that_was_started_survives_a_leave_and_a_join(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, launch = list[list[int]](), HeadDraft._start
    monkeypatch.setattr(
        HeadDraft,
        "_start",
        lambda self, going, form: (launched.append([seq.id for seq, _ in going]), launch(self, going, form))[1],
    )
    batch, budget = Batch(), Budget(8, 3, 3)
    batch.join(4, 30, 9)
    batch.round(budget)
    assert launched == [[0, 1, 2]] * 2, "asked for, and then ahead"
    batch.leave(batch.seqs[1])
    batch.round(budget)
    assert launched[2:] == [[0, 2]], "ahead of the next round only"
    batch.join(12)
    batch.round(budget)
    assert launched[3:] == [[3], [0, 2, 3]], "the one that joined alone"
    batch.seqs.reverse()
    batch.round(budget)
    assert len(launched) == 6, "another order is no other draft"
    batch.round(Budget(3, 3))
    assert len(launched) == 8, "another form is"


def test_whoever_is_read_beside_a_round_is_drafted_for_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next draft starts when a round ends: it includes sequences whose prompts were read in the same pass."""
    launched, launch = list[list[int]](), HeadDraft._start
    monkeypatch.setattr(
        HeadDraft,
        "_start",
        lambda self, going, form: (launched.append([seq.id for seq, _ in going]), launch(self, going, form))[1],
    )
    target = make_target("llama", "cpu")
    drafter = both_drafters(target, borrows=True)[0]
    engine = _engine("cpu", drafter, target, 4)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    ids = [engine.submit(Request((3, 4, 5), params, drafter="device", budget=Budget(3, 3))) for _ in range(1)]
    for prompt in ((9, 8, 7, 6), (2, 5, 11)):
        engine.step()
        ids.append(engine.submit(Request(prompt, params, drafter="device", budget=Budget(3, 3))))
    engine.step()
    engine.step()
    assert [0, 1] in launched
    assert [0, 1, 2] in launched
    assert [1] not in launched
    assert [2] not in launched
    while engine.busy:
        engine.step()
    assert not drafter.draft._joining


def test_a_sequence_at_its_last_token_keeps_the_batch_on_the_device() -> None:
    batch = Batch()
    batch.join(4, 30, 9, 6, 7)
    batch.round(Budget(4, 4))
    batch.seqs[2].max_length = len(batch.seqs[2].tokens) + 1
    batch.seqs[1].max_length = len(batch.seqs[1].tokens) + 3
    budgets = [Budget(4, 4), Budget(4, 2), NOTHING, Budget(4, 4), Budget(4, 4)]
    trees = batch.ours.propose(batch.seqs, budgets)
    assert trees.form is not None
    assert (trees.form.nodes, trees.form.depth) == (5, 4)
    assert [tokens[0] for tokens, _ in as_lists(trees)] == [seq.tokens[-1] for seq in batch.seqs]
    batch.end_round(trees)
    few = [NOTHING, NOTHING, Budget(4, 4), NOTHING, NOTHING]
    assert batch.ours.propose(batch.seqs, few).sizes() == [1, 1, 5, 1, 1], "four wide trees for nobody do not pay"


def test_a_prompt_of_one_token_and_one_that_is_too_long_ride_along() -> None:
    batch = Batch()
    batch.join(1, 30, 9, 20, 25)
    batch.ours.draft.net.model.max_length = 44  # less DEEPEST: the prompt of 30 is too long
    trees = batch.ours.propose(batch.seqs, [Budget(8, 3, 3)] * 5)
    assert trees.sizes() == [1, 1, 9, 9, 9], "three of five are too few to share"
    batch.join(8, 8, 8)
    trees = batch.ours.propose(batch.seqs, [Budget(8, 3, 3)] * 8)
    assert trees.form is not None
    assert [tokens[0] for tokens, _ in as_lists(trees)] == [seq.tokens[-1] for seq in batch.seqs]
    batch.end_round(trees)
    assert as_lists(batch.draft(Budget(8, 3, 3))[0])[2:] == as_lists(batch.draft(Budget(8, 3, 3))[1])[2:]


def test_more_sequences_than_there_are_places_are_written_without_drafts() -> None:
    batch = Batch()
    batch.ours.draft.rows._free = batch.ours.draft.rows._free[-2:]
    batch.join(4, 5, 6)
    assert batch.ours.draft.rows.held == 2
    ours = batch.ours.propose(batch.seqs, [Budget(3, 3)] * 3)
    assert ours.sizes() == [4, 4, 1]
    batch.end_round(ours)
    batch.leave(batch.seqs[0])
    batch.leave(batch.seqs[1])
    batch.join(7)
    assert batch.ours.draft.rows.held == 2


@pytest.mark.slow
def test_a_head_takes_pages_as_texts_grow() -> None:
    """Texts that may become long hold few pages while they are short; where none is left, others are drafted for."""
    batch = Batch()
    pool = batch.ours.draft.net.pool
    before = pool.used
    batch.join(*[5, 9, 20, 30], longest=1 << 20)
    batch.round(Budget(8, 3, 3))
    assert pool.used == before + 4
    for _ in range(12):
        batch.round(Budget(5, 5))
    held = [len(pool.held[seq.id]) for seq in batch.seqs]
    assert held == [pages_for(len(seq.tokens) - 1 + 4) for seq in batch.seqs]
    assert pool.take(999, pool.available)
    while batch.ours.draft.rows.held == 4:
        batch.end_round(batch.ours.propose(batch.seqs, [Budget(3, 3)] * 4))
    assert batch.ours.propose(batch.seqs, [Budget(3, 3)] * 4).nodes > 4, "the others are drafted for"
    assert not batch.ours._failed
    for seq in list(batch.seqs):
        batch.leave(seq)
    pool.release(999)
    assert pool.used == before


@pytest.mark.parametrize("layers", [1, 2])
def test_a_rehearsal_changes_nothing(layers: int) -> None:
    """Capturing a form while sequences are there writes to none of their slots and rows."""
    batch, form = Batch(layers=layers), Form(8, 3, 3)
    batch.join(4, 30, 9)
    batch.round(Budget(8, 3, 3))
    draft, target = batch.ours.draft, batch.target
    before = target.kv.data.clone(), draft.net.kv.clone(), draft.rows.rows.clone()
    for bucket, reach in ((1, 100), (4, 3000), (12, 100)):
        draft._rehearse(target, DraftJob(bucket, form, (reach,)))
    draft.rows.rehearse_reading()
    after = target.kv.data.clone(), draft.net.kv.clone(), draft.rows.rows.clone()
    assert torch.equal(before[0].nan_to_num(), after[0].nan_to_num())
    padding = len(draft.rows._padding.pages) * PAGE  # the first slots of all
    mine, then = (data[:, :, :, padding:].nan_to_num() for data in (before[1], after[1]))
    assert torch.equal(mine, then)
    assert torch.equal(before[2][:-1], after[2][:-1]), "all but the row for what is dropped"
    batch.round(Budget(8, 3, 3))


@pytest.mark.slow
def test_the_adaptive_controller_chooses_from_the_menu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where passes cost the same whatever their rows, it drafts; what it asks for is what is drafted."""
    target = make_target("llama", "cpu")
    drafter = both_drafters(target, borrows=True)[0]
    engine = _engine("cpu", drafter, target, 3)
    prompts = [(3, 4, 5), (9, 8, 7, 6), (2,), (11, 12)]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    texts = {}
    for name in ("none", "device"):
        cost = CostModel({1: 1.0, 1024: 1.0001})
        engine.controller = AdaptiveController(cost, 60, 10, drafter.offer) if name == "device" else engine.controller
        forms = _forms_scored(target, monkeypatch)
        requests = [Request(prompt, params, drafter=name) for prompt in prompts]
        texts[name] = _write(engine, requests, random.Random(1))
    assert texts["device"] == texts["none"]
    drafted = [(form.nodes - 1, form.depth) for form in forms if isinstance(form, TreeForm)]
    others = [size for size in drafted if size not in {(form.nodes, form.depth) for form in FORMS}]
    assert len(drafted) > len(others)
    assert len(others) <= len(prompts), "only where all sequences are at their ends"


def test_a_composition_keeps_the_batch_on_the_device() -> None:
    """Also where one sequence is at its last token, and where n-gram has nothing to draft."""
    batch = Batch()
    batch.join(4, 30, 9, 6, 7)
    both = HybridDrafter(NgramDrafter(), batch.ours)
    budget = Budget(4, 4, source="costly")
    budgets = [budget, budget, Budget(0, 0, source="costly"), budget, budget]
    trees = both.propose(batch.seqs, budgets)
    assert trees.form is not None
    assert trees.sizes() == [5] * 5
    assert both.propose(batch.seqs, [Budget(0, 0, source="costly")] * 5).is_plain()
    assert both.propose(batch.seqs, [budget, NOTHING, NOTHING, NOTHING, NOTHING]).sizes() == [5, 1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_sampled_texts_are_drafted_for_on_the_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside greedy ones; with one seed a text is the same whatever was drafted, because drafts are chosen tokens."""
    need_cuda(device)
    target = make_target("llama", device, torch.float32 if device == "cpu" else torch.bfloat16)
    drafter = both_drafters(target, borrows=True)[0]
    engine = _engine(device, drafter, target, 3)
    warm = SamplingParams(max_tokens=25, temperature=0.6, seed=5, ignore_eos=True)
    greedy = SamplingParams(max_tokens=20, ignore_eos=True)
    texts = {}
    for name, form in (("none", None), ("device", FORMS[2]), ("device", FORMS[6])):
        engine.controller = RandomForms(1, [form])
        forms = _forms_scored(target, monkeypatch)
        requests = [
            Request((3, 4, 5), warm, drafter=name, verifier="exact"),
            Request((9, 8, 7, 6), greedy, drafter=name, verifier="exact"),
        ]
        texts[name, form] = _write(engine, requests, random.Random(3))
        assert any(form is not None for form in forms) == (name == "device")
    assert not drafter._failed
    assert texts["device", FORMS[2]] == texts["device", FORMS[6]] == texts["none", None]


@pytest.mark.slow
def test_a_form_that_a_batch_has_no_graph_of_is_replaced_and_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller may ask for a form of the menu that is too large for so many sequences; others are insisted on."""
    batch = Batch()
    batch.join(*[3] * 9)
    draft = batch.ours.draft
    monkeypatch.setattr(draft.replays, "capture", True)  # as on a GPU, but for the graphs themselves
    monkeypatch.setattr(draft.replays, "do", lambda name, work: work())
    rehearsed, rehearse = list[tuple[Form, int]](), draft._rehearse
    monkeypatch.setattr(
        draft, "_rehearse", lambda target, job: (rehearsed.append((job.form, job.bucket)), rehearse(target, job))
    )
    for form in (Form(3, 3, 1), Form(15, 6, 5)):
        rehearse(None, DraftJob(12, form, (100,)))
    draft.menu.complete_to = 12
    assert batch.ours.propose(batch.seqs, [Budget(15, 6, 5)] * 9).form is not None
    assert batch.ours.propose(batch.seqs, [Budget(59, 7, 10)] * 9).sizes() == [16] * 9
    few = batch.seqs[:3]
    grown = batch.ours.propose(few, [Budget(3, 3)] * 3)
    assert grown.form is not None
    assert grown.form.trees == 12, "a larger graph serves"
    assert not rehearsed
    assert batch.ours.propose(few, [Budget(7, 7)] * 3).sizes() == [8] * 3
    assert rehearsed == [(Form(7, 7, 1), 4)], "not on the menu"
    draft.menu.complete_to = 8  # the batch is larger than what was captured for
    assert batch.ours.propose(batch.seqs, [Budget(24, 5, 6)] * 9).sizes() == [25] * 9
    assert rehearsed[1:] == [(Form(24, 5, 6), 12)]


def test_plain_rounds_leave_nothing_behind_but_their_rows() -> None:
    """A batch too large for drafts has thousands of them: once each left all of its sequences in a list."""
    target = make_target("llama", "cpu", torch.float32)
    drafter, _ = both_drafters(target, borrows=True)
    engine = _engine("cpu", drafter, target, 4)
    engine.controller = RandomForms(1, [None])
    rng = random.Random(8)
    for _ in range(4):
        prompt = [rng.randrange(2, VOCAB) for _ in range(9)]
        engine.submit(Request(prompt, SamplingParams(max_tokens=3 * ROOM), drafter="device"))
    while engine.busy:
        engine.step()
        assert len(drafter.draft._joining) <= 4
    assert drafter.draft.rows.held == 0
