"""Drafts on the device are the drafts of the same head run as everywhere; a text is the same with and without."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Form, Request, TreeBatch, TreeForm, Verdict
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.eagle import HeadDraft, on_device
from forerun.drafters.device.head import why_not
from forerun.drafters.device.plan import aligned, bucket_of, expected
from forerun.drafters.heads.eagle_head import write_head
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.pages import PAGE, TREE_MARGIN, pages_for
from forerun.testing import FakeSeq, path_to
from forerun.testing.conformance import check_trees
from tests.drafters.rounds import as_lists
from tests.gpu.heads import VARIANTS, agree, both_drafters, make_head, settled
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda

BUDGETS = [Budget(5, 5), Budget(7, 3, 2), Budget(14, 4, 3), Budget(1, 1), Budget(40, 3, 4)]


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("more", VARIANTS)
def test_trees_are_those_of_the_head_as_everywhere(
    more: dict[str, object], noisy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several rounds, texts of different lengths, one leaving, paths of any length accepted."""
    longest = 0
    target = make_target("llama", "cpu")
    device, plain = both_drafters(target, **more)
    rng = random.Random(2)
    seqs = [FakeSeq(b, [rng.randrange(VOCAB) for _ in range(n)], max_length=900) for b, n in enumerate((2, 9, 300))]
    for seq, heat in zip(seqs, (1.0, 0.7, 0.0) if noisy else (), strict=False):
        seq.params, seq.seed, seq.shares_noise = SamplingParams(temperature=heat), 5 + seq.id, heat > 0
    for seq in seqs:
        trees, scores = target.prefill([seq], device.needs)
        for drafter in (device, plain):
            drafter.observe([seq], trees, scores, Verdict.whole_chain(trees, [seq.tokens[-1]]))
    for turn in range(8):
        some = seqs if turn < 5 else seqs[1:]
        budgets = [BUDGETS[turn % len(BUDGETS)]] * len(some)
        grown, wanted = device.propose(some, budgets), plain.propose(some, budgets)
        assert as_lists(grown) == as_lists(wanted), f"round {turn}"
        check_trees(grown, some, budgets, VOCAB)
        agree(target, grown, rng, monkeypatch)
        scores = target.score(some, grown, device.needs)
        verdict = settled(scores)
        longest = max(longest, *verdict.accepted.tolist())
        if turn == 3:  # another verifier decides otherwise: rows come the ordinary way
            verdict = Verdict.of([[] for _ in some], [rng.randrange(VOCAB) for _ in some], "cpu")
        target.commit(some, grown, verdict)
        for drafter in (device, plain):
            drafter.observe(some, grown, scores, verdict)
        for seq, (tokens, _), path, bonus in zip(some, as_lists(wanted), *verdict.to_host(), strict=True):
            seq.tokens += [*(tokens[node] for node in path), bonus]
        if turn == 4:
            device.forget(seqs[0])
            plain.forget(seqs[0])
    assert longest > 2, "paths must be long enough to matter"
    for seq in seqs:
        device.forget(seq)
    assert device.draft.rows.held == 0
    assert device.draft.net.pool.used == pages_for(TREE_MARGIN), "padding's"


@pytest.mark.parametrize("seed", [None, 3])
def test_the_next_draft_starts_before_it_is_asked_for(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One draft a round as long as the form stays; another form, or a text that ended, is drafted for anew."""
    target = make_target("llama", "cpu", seed=seed)
    device, plain = both_drafters(target)
    launched: list[Form] = []
    launch = HeadDraft._start
    monkeypatch.setattr(
        HeadDraft, "_start", lambda self, going, form: (launched.append(form), launch(self, going, form))[1]
    )
    seq = FakeSeq(0, [3, 4, 5, 6], max_length=40)
    trees, scores = target.prefill([seq], device.needs)
    for drafter in (device, plain):
        drafter.observe([seq], trees, scores, Verdict.whole_chain(trees, [6]))
    for turn, budget in enumerate([Budget(6, 3, 2)] * 3 + [Budget(3, 3)] * 2 + [Budget(0, 0), Budget(3, 3)]):
        grown = device.propose([seq], [budget])
        assert as_lists(grown) == as_lists(plain.propose([seq], [budget])), f"round {turn}"
        scores = target.score([seq], grown, device.needs)
        verdict = Verdict.of([[]], [7 + turn], "cpu") if scores.greedy is None else settled(scores)
        target.commit([seq], grown, verdict)
        for drafter in (device, plain):
            drafter.observe([seq], grown, scores, verdict)
        (path,), (bonus,) = verdict.to_host()
        seq.tokens += [*(as_lists(grown)[0][0][node] for node in path), bonus]
    # asked once, then ahead of rounds 2 to 4; round 4 wants a chain; ahead of 5 and 6, which wants nothing; then 7
    assert [form.sizes for form in launched] == [(6, 3, 2)] * 4 + [(3, 3, 1)] * 3 + [(3, 3, 1)] * 2
    launched.clear()
    seq.max_length = len(seq.tokens) + 1
    grown = device.propose([seq], [Budget(3, 3)])
    scores = target.score([seq], grown, device.needs)
    verdict = settled(scores)
    target.commit([seq], grown, verdict)
    device.observe([seq], grown, scores, verdict)
    assert len(launched) <= 1, "nothing is drafted behind a text's end"


def test_texts_whose_drafts_are_drawn_or_without_a_budget_are_drafted_for_as_everywhere() -> None:
    target = make_target("llama", "cpu")
    device, plain = both_drafters(target)
    device = OnDevice(device.draft, lambda: plain, sampled=True)
    warm = SamplingParams(temperature=0.7)
    seqs = [FakeSeq(0, [3, 4, 5]), FakeSeq(1, [5, 6, 7, 8], params=warm), FakeSeq(2, [9, 9, 1])]
    trees, scores = target.prefill(seqs, device.needs)
    device.observe(seqs, trees, scores, Verdict.whole_chain(trees, [seq.tokens[-1] for seq in seqs]))
    budgets = [Budget(4, 4), Budget(3, 3), Budget(0, 0)]
    proposed = device.propose(seqs, budgets)
    check_trees(proposed, seqs, budgets, VOCAB)
    assert proposed.sizes() == [5, 4, 1]
    scores = target.score(seqs, proposed, device.needs)
    assert scores.greedy is None
    device.observe(seqs, proposed, scores, Verdict.of([[1], [], []], [1, 2, 3], "cpu"))


def test_trees_of_a_large_batch_fit_into_one_pass() -> None:
    target = make_target("llama", "cpu")
    device, _ = both_drafters(target)
    seqs = [FakeSeq(i, [3, 4, 5 + i], max_length=80) for i in range(20)]
    trees, scores = target.prefill(seqs, device.needs)
    device.observe(seqs, trees, scores, Verdict.whole_chain(trees, [seq.tokens[-1] for seq in seqs]))
    sizes = device.propose(seqs, [Budget(60, 5, 8)] * 20).sizes()
    assert set(sizes) == {MAX_ROWS // bucket_of(20)}


def test_a_head_is_drafted_with_beyond_the_length_that_it_was_trained_for() -> None:
    """It sees as far back as it knows; a target's longest text is the end."""
    target = make_target("llama", "cpu")
    device, _ = both_drafters(target, longest=6)
    assert [layer.window for layer in device.draft.net.model.layers] == [6]
    assert device.draft.net.model.max_length == target.max_length
    device.draft.net.model.max_length = 6
    seq = FakeSeq(0, [1, 2, 3, 4, 5, 6, 7])
    trees, scores = target.prefill([seq], device.needs)
    device.observe([seq], trees, scores, Verdict.whole_chain(trees, [7]))
    assert device.propose([seq], [Budget(3, 3)]).is_plain()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "kind", "more"),
    [
        ("smollm2", "plain", {}),
        ("smollm2", "plain", {"eagle": "eagle"}),
        ("smollm2", "plain", {"eagle": "mtp"}),
        ("large", "plain", {"eagle": "mtp", "norm_output": True, "qk_norm": True}),
        ("large", "int8", {"eagle": "mtp"}),
        ("smollm2", "plain", {"depth": 2}),
        ("large", "int8", {}),
        ("large", "int8", {"depth": 3}),
        ("smollm2", "plain", {"window": 64, "windowed": (True,)}),
        ("large", "int8", {"depth": 2, "window": 100, "windowed": (False, True), "longest": 150}),
    ],
)
def test_a_captured_draft_agrees_with_the_head_in_torch(name: str, kind: str, more: dict[str, Any]) -> None:
    """In 16 bits near-ties may fall either way: most chains agree in their first tokens, none is malformed."""
    need_cuda()
    target = make_target(name, "cuda", torch.bfloat16)
    device, plain = both_drafters(target, kind, **more)  # type: ignore[arg-type]
    rng = random.Random(4)
    agreed = []
    for text in range(12):
        seq = FakeSeq(text, [rng.randrange(VOCAB) for _ in range(20 + 30 * text)], max_length=600)
        trees, scores = target.prefill([seq], device.needs)
        for drafter in (device, plain):
            drafter.observe([seq], trees, scores, Verdict.whole_chain(trees, [seq.tokens[-1]]))
        for budget in (Budget(5, 5), Budget(20, 5, 4), Budget(20, 5, 4)):
            grown = device.propose([seq], [budget])
            check_trees(grown, [seq], [budget], VOCAB)
            wanted = plain.propose([seq], [budget])
            ours, theirs = as_lists(grown)[0], as_lists(wanted)[0]
            agreed.append(len(_paths(*ours) & _paths(*theirs)) / len(ours[0]))
            scores = target.score([seq], grown, device.needs)
            verdict = settled(scores)
            target.commit([seq], grown, verdict)
            for drafter in (device, plain):
                drafter.observe([seq], grown, scores, verdict)
            (path,), (bonus,) = verdict.to_host()
            seq.tokens += [*(ours[0][node] for node in path), bonus]
        target.release(seq)
    share = sum(agreed) / len(agreed)
    assert share > (0.7 if kind == "plain" else 0.5), f"only {share:.0%} of the nodes agree"


def _paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """Of every node the tokens from the root down to it."""
    return {tuple(tokens[i] for i in path_to(parents, node)) for node in range(len(tokens))}


@pytest.mark.parametrize("device", DEVICES)
def test_rows_reach_the_head_however_a_round_is_observed(device: str) -> None:
    """A round read from the device, and the same round shown as an ordinary one, leave the same text behind."""
    need_cuda(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    target = make_target("llama", device, dtype)
    drafters = [both_drafters(target)[0] for _ in range(2)]
    seq = FakeSeq(0, list(range(20)), max_length=200)
    trees, scores = target.prefill([seq], drafters[0].needs)
    for drafter in drafters:
        drafter.observe([seq], trees, scores, Verdict.whole_chain(trees, [19]))
    for _ in range(4):
        grown = [drafter.propose([seq], [Budget(12, 4, 3)]) for drafter in drafters]
        assert as_lists(grown[0]) == as_lists(grown[1])
        scores = target.score([seq], grown[0], drafters[0].needs)
        verdict = settled(scores)
        target.commit([seq], grown[0], verdict)
        plain = TreeBatch.trees(as_lists(grown[0]), device=device)
        drafters[0].observe([seq], grown[0], scores, verdict)
        drafters[1].observe([seq], plain, scores, Verdict(verdict.paths, verdict.accepted, verdict.bonus))
        (path,), (bonus,) = verdict.to_host()
        seq.tokens += [*(as_lists(plain)[0][0][node] for node in path), bonus]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", [Budget(5, 5), Budget(24, 5, 4)])
def test_a_text_is_the_same_with_and_without_drafts(device: str, budget: Budget) -> None:
    """Engine, controller, verifier and all, alone and in a batch; bit-equal kernels make it exact in bf16 too."""
    need_cuda(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    target = make_target("llama", device, dtype)
    drafter = both_drafters(target, borrows=True)[0]
    engine = make_engine(target, frozenset({1}), SpeculativeConfig(drafter="none", controller="fixed"))
    engine.drafters.add("device", drafter)
    prompts = [(3, 4, 5), (7,), tuple(range(2, 150))]
    texts = {}
    for name in ("none", "device"):
        for batch in (1, 3):
            engine.max_batch = batch
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            ids = [engine.submit(Request(prompt, params, drafter=name, budget=budget)) for prompt in prompts]
            found: dict[int, list[int]] = {seq_id: [] for seq_id in ids}
            while engine.busy:
                for event in engine.step():
                    found[event.seq_id] += event.tokens
            texts[name, batch] = list(found.values())
    assert texts["device", 1] == texts["none", 1]
    assert texts["device", 3] == texts["none", 1]
    assert target.used_slots == drafter.draft.rows.held == 0


def test_a_text_that_joins_leaves_the_others_their_drafts() -> None:
    target = make_target("llama", "cpu")
    drafter = both_drafters(target, borrows=True)[0]
    engine = make_engine(target, frozenset(), SpeculativeConfig(drafter="none", controller="fixed"))
    engine.drafters.add("device", drafter)
    params, plain = SamplingParams(max_tokens=30, ignore_eos=True), {}
    for name in ("none", "device"):
        found: dict[int, list[int]] = {}
        for prompt in ((3, 4, 5, 6), (9, 8, 7)):
            found[engine.submit(Request(prompt, params, drafter=name, budget=Budget(6, 3, 2)))] = []
            for _ in range(3):
                for event in engine.step():
                    found[event.seq_id] += event.tokens
        while engine.busy:
            drafted = sum(seq.stats.drafted for seq in engine.running)
            for event in engine.step():
                found[event.seq_id] += event.tokens
        plain[name] = list(found.values())
    assert not drafter._failed
    assert drafted > 0
    assert plain["device"] == plain["none"]
    assert drafter.draft.rows.held == 0


def test_a_full_store_is_no_failure() -> None:
    target = make_target("llama", "cpu")
    drafter, _ = both_drafters(target)
    pool = drafter.draft.net.pool
    assert pool.take(99, pool.available)
    seq = FakeSeq(0, [3, 4, 5, 6], max_length=900)
    trees, scores = target.prefill([seq], drafter.needs)
    drafter.observe([seq], trees, scores, Verdict.whole_chain(trees, [6]))
    assert drafter.propose([seq], [Budget(3, 3)]).is_plain()
    assert not drafter._failed
    assert not drafter.draft.rows.held


def test_a_head_is_found_fit_for_the_device_or_not(tmp_path: Path) -> None:
    target = make_target("llama", "cpu")
    config, weights = make_head(target, borrows=True)
    write_head(tmp_path / "head", config, weights)
    assert isinstance(on_device(tmp_path / "head", target, lambda: pytest.fail("not needed")), OnDevice)
    odd = replace(config, head_dim=8)
    assert "head_dim=8" in why_not(odd, target)
    assert why_not(config, object())


def test_where_no_graph_fits_nothing_is_drafted_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("llama", "cpu")
    drafter, plain = both_drafters(target)
    seq = FakeSeq(0, [3, 4, 5, 6], max_length=90)
    trees, scores = target.prefill([seq], drafter.needs)
    for each in (drafter, plain):
        each.observe([seq], trees, scores, Verdict.whole_chain(trees, [6]))
    for refused in (True, False, True, False):
        with monkeypatch.context() as patch:
            if refused:
                patch.setattr(drafter.draft.menu, "fitting", lambda *_: None)
            grown = drafter.propose([seq], [Budget(3, 3)])
        assert grown.is_plain() == refused
        wanted = plain.propose([seq], [Budget(3, 3)])
        assert refused or as_lists(grown) == as_lists(wanted)
        scores = target.score([seq], grown, drafter.needs)
        verdict = Verdict.of([[]], [9], "cpu")
        target.commit([seq], grown, verdict)
        for each in (drafter, plain):
            each.observe([seq], grown, scores, verdict)
        seq.tokens.append(9)


def test_a_wide_and_deep_draft_stays_in_the_slots_of_its_text() -> None:
    target = make_target("llama", "cpu")
    drafter, _ = both_drafters(target)
    seqs = [FakeSeq(b, [3 + b, 4, 5], max_length=5) for b in range(2)]
    trees, scores = target.prefill(seqs, drafter.needs)
    drafter.observe(seqs, trees, scores, Verdict.whole_chain(trees, [5, 5]))
    budgets = [Budget(200, 12, 60)] * 2
    grown = drafter.propose(seqs, budgets)
    check_trees(grown, seqs, budgets, VOCAB)
    run = drafter.draft.ints.all[MAX_ROWS:]
    form = drafter.draft._last
    assert form is not None
    rows, width = form.level.rows, form.shape.width
    level = form.level_at(form.shape.depth - 2) + 2 * aligned(rows)
    slots = run[level : level + rows].tolist()
    for b in range(2):
        mine = slots[b * width : (b + 1) * width]
        assert {slot // PAGE for slot in mine} <= set(drafter.draft.net.pool.held[b])


def test_the_last_tokens_of_a_text_are_drafted_with_the_last_form() -> None:
    """A smaller form would have to be captured; the text is cut behind the draft."""
    target = make_target("llama", "cpu")
    drafter, _ = both_drafters(target)
    seq = FakeSeq(0, [3, 4, 5, 6], max_length=30)
    trees, scores = target.prefill([seq], drafter.needs)
    drafter.observe([seq], trees, scores, Verdict.whole_chain(trees, [6]))
    assert drafter.propose([seq], [Budget(8, 3, 3)]).sizes() == [9]
    seq.max_length = 7
    assert drafter.propose([seq], [Budget(8, 2, 3)]).form == TreeForm(1, 9, 3, 3)
    fewer, cut = (drafter.propose([seq], [budget]).form for budget in (Budget(6, 2, 3), Budget(15, 2, 5)))
    assert fewer == TreeForm(1, 7, 2, 3), "never more nodes than allowed"
    assert cut == TreeForm(1, 16, 6, 5), "what was asked for before the cut"


def test_what_a_form_brings() -> None:
    rates = ((0.6, 0.2), (0.5, 0.1))
    assert expected(rates, Form(1, 1, 1)) == pytest.approx(0.6)
    assert expected(rates, Form(2, 2, 1)) == pytest.approx(0.6 + 0.3)
    assert expected(rates, Form(3, 2, 2)) == pytest.approx(0.6 + 0.3 + 0.2)
    last = expected(rates, Form(4, 4, 1))
    assert last == pytest.approx(0.6 + 0.3 + 0.15 + 0.075), "the last level's rates hold on"
