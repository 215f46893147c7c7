"""Prompts that a head reads before the first draft behind them: what it drafts is what it drafts everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Prompts, Request, TreeBatch, Verdict
from forerun.drafters.device import features as unread_prompts
from forerun.drafters.device.features import NO_PAGES, ROOM, FeatureRows, RowState, UnreadPrompt
from forerun.drafters.device.protocol import Unread
from forerun.drafters.heads import base as heads
from forerun.engine.engine import Engine
from forerun.models.cuda.plan import MAX_ROWS
from forerun.testing import FakeSeq
from tests.drafters.rounds import as_lists
from tests.gpu.heads import both_drafters
from tests.gpu.test_draft_batch import NOTHING, Batch, read_passes
from tests.gpu.tiny import VOCAB, make_target

LAYERS = pytest.mark.parametrize("layers", [1, 2])


def idle(batch: Batch, rounds: int = 1) -> None:
    """Plain rounds."""
    for _ in range(rounds):
        batch.end_round(batch.ours.propose(batch.seqs, [NOTHING] * len(batch.seqs)))


def beside(batch: Batch, new: Sequence[FakeSeq], rows: int) -> None:
    """A plain round that also reads so many rows of these prompts, as the engine has it."""
    roots = TreeBatch.chains([seq.tokens[-1:] for seq in batch.seqs])
    scores = batch.target.score(batch.seqs, roots, batch.ours.needs, Prompts(new, rows))
    assert scores.read is not None
    chains, read = scores.read
    following = [seq.tokens[batch.target.cached_tokens(seq)] for seq in new]
    for drafter in batch.drafters:
        drafter.observe(new, chains, read, Verdict.whole_chain(chains, following))
    assert scores.logits is not None
    said = scores.logits.argmax(-1).tolist()
    verdict = Verdict.of([[] for _ in batch.seqs], said, "cpu")
    batch.target.commit(batch.seqs, roots, verdict)
    for drafter in batch.drafters:
        drafter.observe(batch.seqs, roots, scores, verdict)
    for seq, token in zip(batch.seqs, said, strict=True):
        seq.tokens.append(token)


@LAYERS
def test_prompts_are_read_together_before_the_first_draft(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(layers=layers)
    rows = batch.ours.draft.rows
    passes = read_passes(rows, monkeypatch)
    batch.join(300, 5, 180)
    batch.join(90)
    idle(batch, 3)
    assert not passes, "nobody drafts"
    assert [rows.prompts.rows_of(i) for i in range(4)] == [299, 0, 179, 89]
    batch.round(Budget(3, 3))
    assert passes[0] == 299 + 179 + 89
    assert rows.prompts.rows == 0
    count = len(passes)
    batch.round(Budget(3, 3))
    batch.join(2)
    batch.round(Budget(3, 3))
    assert len(passes) == count, "nothing is read again"


@LAYERS
def test_pieces_of_a_prompt_are_one_span(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long pieces and a short one in turn, in the passes of others: positions and features keep together."""
    batch = Batch(layers=layers)
    rows = batch.ours.draft.rows
    batch.join(30, 45)
    passes = read_passes(rows, monkeypatch)
    new = FakeSeq(7, [(11 * j) % VOCAB for j in range(120)], max_length=400)
    for some in (40, 25, 9, 30, 15):  # 9 and 15 rows have places; those that come behind 9 have them read
        beside(batch, [new], some)
    assert batch.target.cached_tokens(new) == 119
    assert passes == [65, 9]
    batch.seqs.append(new)
    for _ in range(2):
        batch.round(Budget(8, 3, 3))


@LAYERS
def test_a_prompt_whose_start_the_cache_had(layers: int) -> None:
    batch = Batch(layers=layers)
    batch.join(20)
    first = FakeSeq(8, [(7 * j) % VOCAB for j in range(200)], max_length=400, cache_salt="")
    beside(batch, [first], 1000)
    same = FakeSeq(9, [*first.tokens[:170], 3, 1, 4, 1, 5, 9], max_length=400, cache_salt="")
    other = FakeSeq(10, [8] * 70, max_length=400)
    beside(batch, [same, other], 1000)
    assert batch.target.reused_tokens(same) > 0
    batch.seqs += [same, other]
    for _ in range(2):
        batch.round(Budget(5, 5))


@LAYERS
def test_rows_of_sequences_that_left_are_dropped(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborted, sent back or ended before a draft: whoever takes their pages keeps what is written there."""
    batch = Batch(layers=layers)
    rows, pool = batch.ours.draft.rows, batch.ours.draft.net.pool
    batch.join(150, 140)
    gone = batch.seqs[0]
    held = set(pool.held[gone.id])
    batch.leave(gone)
    assert rows.prompts.rows == 139
    batch.join(160)
    assert held & set(pool.held[batch.seqs[-1].id]), "its pages are another's now"
    passes = read_passes(rows, monkeypatch)
    again = FakeSeq(gone.id, [2] * 90, max_length=400)  # sent back: it comes again, with other rows
    trees, scores = batch.target.prefill([again], batch.ours.needs)
    for drafter in batch.drafters:
        drafter.observe([again], trees, scores, Verdict.whole_chain(trees, [2]))
    batch.seqs.append(again)
    batch.round(Budget(5, 5))
    assert passes[0] == 139 + 159 + 89
    batch.round(Budget(5, 5))


@LAYERS
def test_whoever_never_drafts_is_read_when_places_are_used_up(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(layers=layers)
    batch.join(60, 90)
    passes = read_passes(batch.ours.draft.rows, monkeypatch)
    idle(batch, ROOM + 2)
    assert passes[0] == 59 + 89
    batch.round(Budget(5, 5))


@LAYERS
def test_many_rows_are_read_at_once(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies take memory; and one prompt may need several passes."""
    monkeypatch.setattr(unread_prompts, "MOST_UNREAD", 300)
    batch = Batch(layers=layers)
    passes = read_passes(batch.ours.draft.rows, monkeypatch)
    batch.join(100, 150, longest=1400)
    assert not passes
    batch.join(80, MAX_ROWS + 30, longest=1400)
    assert sum(passes) == 99 + 149 + 79 + MAX_ROWS + 29
    batch.round(Budget(5, 5))


@LAYERS
@pytest.mark.parametrize("less", [0, 15])
def test_a_head_with_windows_reads_the_end_of_a_long_prompt(
    layers: int, less: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that came in pieces; with fewer rows yet drafts are others."""
    monkeypatch.setattr(heads, "SURPLUS", 1)
    batch = Batch(layers=layers, window=20, windowed=(True,) * layers)
    rows = batch.ours.draft.rows
    most = 1 + 19 * layers
    assert rows.prompts._depends_on == batch.plain._depends_on == most
    rows.prompts._depends_on = most - less
    passes = read_passes(rows, monkeypatch)
    batch.join(300, 5, 30)
    new = FakeSeq(7, [(11 * j) % VOCAB for j in range(150)], max_length=400)
    for some in (40, 25, 90):
        beside(batch, [new], some)
    assert rows.prompts.rows == sum(min(count, most - less) for count in (299, 29, 149))
    batch.seqs.append(new)
    ours, plain = batch.draft(Budget(8, 3, 3))
    assert passes[0] == sum(min(count, most - less) for count in (299, 29, 149))
    assert (as_lists(ours) == as_lists(plain)) == (not less)
    for _ in range(0 if less else 2):
        batch.end_round(ours)
        ours, plain = batch.draft(Budget(8, 3, 3))
        assert as_lists(ours) == as_lists(plain)


def test_the_end_of_a_long_prompt_does_not_hold_all_of_it() -> None:
    """Where many texts start alike, each prompt comes as the rows of a whole prefix."""
    found = [torch.zeros(9000, 4) for _ in range(3)]
    one = UnreadPrompt(RowState(1, 0, NO_PAGES), 0, [*range(9000)], [(found, 0, 9000)])
    one.keep_last(100)
    (layers, first, end) = one.parts[0]
    assert (one.first, len(one.after), end - first) == (8900, 100, 100)
    assert sum(layer.untyped_storage().nbytes() for layer in layers) == 3 * 100 * 4 * 4


def test_a_prompt_that_nobody_read_shows_in_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control for all of the above."""
    batch = Batch()
    batch.join(150)
    batch.ours.draft.net.kv.normal_()
    monkeypatch.setattr(batch.ours.draft.rows.prompts, "read", lambda states: None)
    ours, plain = batch.draft(Budget(8, 3, 3))
    assert as_lists(ours) != as_lists(plain)


@LAYERS
def test_a_draft_behind_an_unread_round_reads_the_prompts_of_all(layers: int) -> None:
    """Those that have joined, and any that had no draft in that round."""
    batch, budget = Batch(layers=layers), Budget(5, 5)
    batch.join(40, 60)
    draft = batch.ours.draft
    ours, _ = batch.draft(budget)
    batch.join(80)
    new = batch.seqs.pop()
    old = draft.rows.get(batch.seqs[0].id)
    assert old is not None
    features = torch.zeros(1, draft.feature_fusion.feature_width)
    draft.rows.prompts.add(old, 0, [4], ([features], 0, 1))  # as if there had been no room for its draft
    going = [(batch.seqs[0], 0), (batch.seqs[1], 1), (new, -1)]
    scores = batch.target.score(batch.seqs, ours, batch.ours.needs)
    assert draft.rows.prompts.rows_of(new.id) == 79
    assert draft.launch(going, None, Unread(ours, scores.hidden)) is not None
    assert draft.rows.prompts.rows == 0


def _engine(rows: list[FeatureRows], slots: int = 20_000) -> Engine:
    target = make_target("llama", "cpu", kv_slots=slots)
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=4))
    drafter = both_drafters(target, borrows=True)[0]
    engine.drafters.add("device", drafter)
    rows.append(drafter.draft.rows)
    return engine


def _text(tokens: dict[int, list[int]], engine: Engine) -> None:
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            tokens.setdefault(event.seq_id, []).extend(event.tokens)


@pytest.mark.slow
def test_aborted_preempted_and_finished_requests_leave_nothing() -> None:
    """A pool that is too small sends requests back; one is aborted, one ends with its first token."""
    rows = list[FeatureRows]()
    engine = _engine(rows, slots=640)
    rng = torch.Generator().manual_seed(3)
    prompts = [tuple(torch.randint(2, VOCAB, (n,), generator=rng).tolist()) for n in (100, 120, 90, 110, 60)]
    lengths = (60, 70, 1, 80, 60)
    texts = dict[str, list[list[int]]]()
    for name, budget in (("none", None), ("device", Budget(4, 4)), ("device", Budget(0, 0))):
        found = dict[int, list[int]]()
        for prompt, length in zip(prompts, lengths, strict=True):
            params = SamplingParams(max_tokens=length, ignore_eos=True)
            engine.submit(Request(prompt, params, drafter=name, budget=budget))
        aborted = engine.submit(Request((5,) * 77, SamplingParams(max_tokens=50), drafter=name, budget=budget))
        for event in [*engine.step(), *engine.step()]:
            found.setdefault(event.seq_id, []).extend(event.tokens)
        engine.abort(aborted)
        _text(found, engine)
        found.pop(aborted, None)
        texts[f"{name} {budget}"] = [found[key] for key in sorted(found)]
        assert rows[0].prompts.rows == rows[0].held == engine.target.used_slots == 0
    assert engine.stats.preemptions > 0
    first, *others = texts.values()
    assert all(other == first for other in others)
