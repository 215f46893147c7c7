"""Successors of single tokens: read from the target's laws, they fill trees with honest claims and change no text."""

from __future__ import annotations

import random

import pytest
import tokenizers
import torch
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from forerun.control.cost import CostModel
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Request, Scores, Verdict
from forerun.drafters.base import Parts
from forerun.drafters.heads.growth import grow
from forerun.drafters.lookup import suffix_table as successors
from forerun.drafters.lookup.suffix import SuffixDrafter
from forerun.drafters.lookup.suffix_table import AFTER_MISS, KEPT, MANY, STALE, TREE, Fill, Successors
from forerun.models.load.tokenizer import Tokenizer, opening_of, tokens_before_an_answer
from forerun.testing import FakeSeq, TableLM, check_drafter
from tests.control.simulate.follow import FollowHistory, FollowSimulation, Host
from tests.control.simulate.history import Text
from tests.drafters.rounds import as_lists
from tests.exactness.harness import SETTINGS, VERIFIERS, engine_for, run, table

VOCAB, OPENING = 16, (3, 1)
LARGE = CostModel({1: 3.88e-3, 8: 4.10e-3, 16: 4.18e-3, 24: 4.43e-3, 32: 4.49e-3, 64: 5.08e-3})  # 8B, H200
CPU = CostModel({1: 1.0e-3, 2: 1.25e-3, 4: 1.7e-3, 8: 2.6e-3, 16: 4.4e-3, 32: 8.0e-3, 64: 16e-3})
_TEMPLATE = (
    "{% for m in messages %}<turn> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<turn> answer{% endif %}"
)
PROMPTS = [(5, 6, 7, 8, 5, 6, 7), (1, 2, 3, 1, 2, 3, 1, 2), (9,), (4, 4, 4, 4)]


def table_of(rows: dict[int, dict[int, float]], vocab: int = 40) -> Successors:
    """Successors as given; every other token is followed by itself, never."""
    tokens, shares = torch.arange(vocab)[:, None].repeat(1, 2), torch.zeros(vocab, 2)
    for token, row in rows.items():
        for i, (after, share) in enumerate(row.items()):
            tokens[token, i], shares[token, i] = after, share
    return Successors(tokens, shares)


def own_successors() -> Successors:
    found = Successors.of(table(VOCAB), OPENING)
    assert found is not None
    return found


@pytest.mark.parametrize("vocab", [5, 16, 700])  # fewer than are kept | one pass | several
def test_they_are_the_likeliest_by_the_targets_own_law(vocab: int) -> None:
    target = TableLM(vocab_size=vocab, order=2)
    found = Successors.of(target, OPENING)
    assert found is not None
    for token in {0, vocab // 2, vocab - 1}:
        values, tokens = target.law([*OPENING, token]).topk(min(KEPT, vocab))
        assert [one for _, one in found.after(token)] == tokens.tolist()
        assert [share for share, _ in found.after(token)] == pytest.approx(values.tolist(), rel=1e-4)
    assert target.used_slots == 0


def test_a_target_without_room_has_none() -> None:
    assert Successors.of(TableLM(vocab_size=16, slots=8), OPENING) is None
    assert Successors.of(TableLM(vocab_size=16, max_length=8), OPENING) is None
    narrow = TableLM(vocab_size=100, slots=80)
    assert Successors.of(narrow, OPENING) is not None
    assert narrow.used_slots == 0


def test_a_failed_pass_leaves_the_target_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TableLM(vocab_size=16)
    monkeypatch.setattr(successors, "_pass", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Successors.of(target, OPENING)
    assert target.used_slots == 0

    def without_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(successors, "_pass", without_memory)
    assert Successors.of(target, OPENING) is None
    assert target.used_slots == 0


def test_only_a_known_opening_makes_the_drafter_read_them() -> None:
    """`build` gives one where rows are cheap: on a GPU."""
    target = TableLM(vocab_size=16)
    with_one = SuffixDrafter.build(Parts(target, None, SpeculativeConfig(), opening=OPENING))
    without = SuffixDrafter.build(Parts(target, None, SpeculativeConfig()))
    seq = FakeSeq(0, [7])
    assert not with_one.propose([seq], [Budget(4, 2, 4)]).is_plain()
    assert without.propose([seq], [Budget(4, 2, 4)]).is_plain()


@pytest.mark.parametrize(("template", "wanted"), [(_TEMPLATE, [2, 4]), (None, [1]), ("{{ nothing.at.all }}", [1])])
def test_the_opening_is_what_the_template_writes_before_an_answer(template: str | None, wanted: list[int]) -> None:
    words = {"<eos>": 0, "<bos>": 1, "<turn>": 2, "Hi": 3, "answer": 4}
    backend = tokenizers.Tokenizer(WordLevel(words, unk_token="<eos>"))
    backend.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = Tokenizer(backend, eos_ids=[0], bos_id=1, chat_template=template)
    assert list(tokens_before_an_answer(tokenizer)) == wanted
    assert opening_of(TableLM(vocab_size=5), tokenizer) == (), "a CPU is not asked"
    on_a_gpu = TableLM(vocab_size=5, device=torch.device("meta"))
    assert list(opening_of(on_a_gpu, tokenizer)) == wanted
    assert opening_of(on_a_gpu, None) == ()


def test_they_fill_what_matches_leave() -> None:
    drafter = SuffixDrafter(successors=table_of({2: {9: 0.3, 5: 0.2}, 9: {8: 0.5}}))
    tokens, parents = as_lists(drafter.propose([FakeSeq(0, [1, 2])], [Budget(3, 2, 4)]))[0]
    assert (tokens, parents) == ([2, 9, 5, 8], [-1, 0, 0, 1])  # by survivals: 0.3, 0.2, 0.15
    matching = [1, 2, 5, 6, 1, 2]  # 5 has matched: it is a branch of its own, and not a second time
    tokens, parents = as_lists(drafter.propose([FakeSeq(1, matching)], [Budget(8, 1, 4)]))[0]
    assert tokens == [2, 5, 9]
    assert len(as_lists(drafter.propose([FakeSeq(2, matching)], [Budget(8, 1, 1)]))[0][0]) == 2


def test_a_match_goes_on_behind_a_successor_that_the_text_holds() -> None:
    drafter = SuffixDrafter(successors=table_of({2: {9: 0.3}}))
    tokens, _ = as_lists(drafter.propose([FakeSeq(0, [9, 4, 6, 1, 2])], [Budget(3, 3, 2)]))[0]
    assert tokens == [2, 9, 4, 6]


def test_nothing_is_drafted_behind_the_end_of_a_text() -> None:
    drafter = SuffixDrafter(successors=table_of({2: {0: 0.6}, 0: {3: 0.9}}))
    seq = FakeSeq(0, [1, 2], stop_ids=frozenset({0}))
    assert as_lists(drafter.propose([seq], [Budget(4, 4, 2)]))[0][0] == [2, 0]


def test_survivals_never_grow_and_nodes_come_in_their_order() -> None:
    rng = random.Random(3)
    rows = {token: {(token * k + 1) % 40: share for k, share in ((3, 0.4), (5, 0.3))} for token in range(40)}
    fill = Fill(table_of(rows))
    grown = grow(7, ([], 1.0), lambda node: ([], 1.0), fill, (30, 6, 2), 0.001)
    assert grown.survivals == sorted(grown.survivals, reverse=True)
    assert all(parent < node for node, parent in enumerate(grown.parents))
    sums = grown.by_depth(len(grown.survivals))
    assert list(sums) == sorted(sums, reverse=True)
    assert sum(sums) == pytest.approx(sum(grown.survivals))
    count = rng.randrange(1, 20)
    assert sum(grown.by_depth(count)) == pytest.approx(sum(grown.survivals[:count]))


def test_the_contract() -> None:
    def make() -> SuffixDrafter:
        return SuffixDrafter(successors=Successors.of(TableLM(vocab_size=9), OPENING))

    check_drafter(make, vocab_size=9, rounds=24)


# greedy texts under every verifier; sampled ones are the same strings where noise is shared
_CASES = [(one, "greedy") for one in VERIFIERS] + [("coupled", one) for one in ("penalties", "top-p")]


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize(("verifier", "setting"), _CASES)
def test_no_text_changes(verifier: str, setting: str, shape: str) -> None:
    requests = [Request(prompt, SETTINGS[setting]) for prompt in PROMPTS]
    plain = run(engine_for("none", verifier, "chain", VOCAB), requests)
    engine = engine_for("suffix", verifier, shape, VOCAB)
    engine.drafters.add("suffix", drafter := SuffixDrafter(successors=own_successors()))
    accepted: list[int] = []
    observe = drafter.observe

    def counting(seqs, trees, scores, verdict) -> None:  # type: ignore[no-untyped-def]
        if scores.logits is not None:
            accepted.extend(map(len, verdict.to_host()[0]))
        observe(seqs, trees, scores, verdict)

    drafter.observe = counting  # type: ignore[method-assign]
    assert run(engine, requests) == plain
    assert sum(accepted) > 0 or setting != "greedy"


def test_more_is_accepted_with_them_than_without() -> None:
    """The control: texts of a TableLM hardly repeat themselves."""
    requests = [Request(prompt, SamplingParams(max_tokens=60)) for prompt in PROMPTS]

    def rounds(drafter: SuffixDrafter) -> int:
        engine, count = engine_for("suffix", "exact", "tree", VOCAB, frozenset()), 0
        engine.drafters.add("suffix", drafter)
        for request in requests:
            engine.submit(request)
        while engine.busy:
            engine.step()
            count += 1
        return count

    assert rounds(SuffixDrafter(successors=own_successors())) < rounds(SuffixDrafter())


def random_texts(seed: int, rows: dict[int, list[int]] | None = None) -> list[Text]:
    """Texts of random tokens, or of which two of three are in the row of the one before."""
    rng, texts = random.Random(seed), list[Text]()
    for _ in range(6):
        text = [rng.randrange(1000)]
        while len(text) < 300:
            follows = rows is not None and rng.random() < 0.68
            text.append(rng.choice(rows[text[-1]]) if rows and follows else rng.randrange(1000))
        texts.append((text[:20], text[20:]))
    return texts


ROWS = {token: [(7 * token + k) % 1000 for k in range(1, 5)] for token in range(1000)}


def simulated(cost: CostModel, texts: list[Text]) -> tuple[FollowHistory, FollowHistory]:
    """Rounds of the real controller with a table that promises 0.68 for four tokens; and plain decoding."""
    tokens = torch.tensor([ROWS[token] for token in range(1000)])
    known = Successors(tokens, torch.full(tokens.shape, 0.17))
    host = Host(3e-4, drafts=2e-4)
    both = FollowSimulation(cost, None, texts, host, lookup=SuffixDrafter(successors=known)).run(400)
    return both, FollowSimulation(cost, None, texts, host, looks_up=False).run(both.tokens[-1] + 1)


def test_where_rows_are_cheap_they_pay_in_texts_that_copy_nothing() -> None:
    both, plain = simulated(LARGE, random_texts(1, ROWS))
    assert both.kinds.count("look-up") > 0.9 * len(both.kinds), "from the first rounds on"
    assert both.speed(plain) > 1.15


@pytest.mark.parametrize("cost", [LARGE, CPU], ids=["8B on a GPU", "CPU"])
def test_a_table_that_is_wrong_costs_next_to_nothing(cost: CostModel) -> None:
    both, plain = simulated(cost, random_texts(2))
    assert both.least_speed(plain, 200) >= 0.97
    assert both.speed(plain) > 0.985


def test_on_a_cpu_the_price_list_leaves_them_out() -> None:
    both, plain = simulated(CPU, random_texts(3, ROWS))
    assert both.kinds.count("look-up") < 0.1 * len(both.kinds)
    assert both.least_speed(plain, 200) >= 0.97


def test_a_draft_that_was_cut_at_the_end_of_a_text_says_nothing_of_the_next() -> None:
    """Else offers are so short from then on that nothing is drafted, and no other size is ever asked for."""
    drafter = SuffixDrafter(successors=table_of({}))
    price = tuple([1.0 + 0.002 * n for n in range(61)])
    first, second = FakeSeq(0, [*range(20), *range(10)]), FakeSeq(1, [*range(20), *range(10)])
    whole = len(drafter.offer(second).free)
    drafter.propose([first], [Budget(60, 2, 8, price)])
    assert len(drafter.offer(second).free) >= whole > 4


def test_a_size_for_which_nothing_is_drafted_any_more_is_forgotten() -> None:
    fill = Fill(table_of({}))
    steep = Budget(60, 30, 8, tuple([5.0 + 0.5 * n for n in range(61)]))
    fill.note_budgets([steep])
    for _ in range(STALE):
        fill.note_offer(0.0, missed=False)
        assert fill.asked.price == steep.price
    fill.note_offer(0.0, missed=False)
    assert fill.asked is TREE
    fill.note_budgets([steep])
    fill.note_offer(0.0, missed=False)
    assert fill.asked.price == steep.price


def test_offers_say_what_comes_behind_a_token_that_was_not_expected() -> None:
    drafter = SuffixDrafter(successors=table_of({t: {(t + 1) % 40: 0.6} for t in range(40)}))
    assert drafter._fill is not None
    seq = FakeSeq(0, [0])
    assert drafter.offer(seq).otherwise == AFTER_MISS
    seq.tokens.append(1)  # as the table says
    assert drafter.offer(seq).otherwise == AFTER_MISS
    seq.tokens.append(30)  # not so; and behind it there is a successor all the same
    offer = drafter.offer(seq)
    assert offer.otherwise > AFTER_MISS
    assert drafter.offer(seq).otherwise == offer.otherwise, "asked twice, counted once"
    assert SuffixDrafter().offer(seq).otherwise == 0.0, "matches alone promise nothing behind a miss"


def test_rounds_wait_for_successors_whatever_this_one_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little sooner than for those that hold only if this round brings what they follow."""
    both, _ = simulated(LARGE, random_texts(1, ROWS))
    nothing = property(lambda fill: 0.0, lambda fill, value: None)
    monkeypatch.setattr(Fill, "after_miss", nothing, raising=False)
    without, _ = simulated(LARGE, random_texts(1, ROWS))
    assert both.kinds[:12].count("look-up") >= 8, "as soon as a plain round has shown what all else is compared with"
    assert both.kinds.index("look-up") < without.kinds.index("look-up")


def test_trust_in_the_table_follows_what_came() -> None:
    def claimed(right: bool) -> float:
        drafter, seq = (SuffixDrafter(successors=table_of({t: {t + 1: 0.5} for t in range(39)})), FakeSeq(0, [0]))
        for i in range(120):
            trees = drafter.propose([seq], [Budget(1, 1, 2)])
            token = seq.tokens[-1] + 1 if right else 39
            drafter.observe([seq], trees, Scores(None), Verdict.of([[]], [token], "cpu"))
            drafter.forget(seq)
            seq.tokens[:] = [i % 38]
        return drafter.offer(seq).free[0]

    assert claimed(True) == pytest.approx(0.5, abs=0.05)
    assert claimed(False) < 0.1


def test_many_sequences_get_matches_alone() -> None:
    """Their doubtful tokens would fill a pass that is not free any more."""
    table = table_of({t: {(t + 1) % 40: 0.6} for t in range(40)})
    drafter, few = SuffixDrafter(successors=table), [FakeSeq(i, [5, 20, 9]) for i in range(MANY)]
    many = [*few, FakeSeq(MANY, [7, 8, 30, 7])]
    assert not drafter.propose(few, [Budget(3, 3, 2)] * MANY).is_plain()
    last = as_lists(drafter.propose(many, [Budget(3, 3, 2)] * len(many)))
    assert [tokens for tokens, _ in last[:-1]] == [[9]] * MANY
    assert last[-1][0] == [7, 8, 30, 7]
    assert not drafter.offer(FakeSeq(99, [1, 2, 3])).free
    drafter.propose(few, [Budget(0, 0)] * MANY)
    assert drafter.offer(FakeSeq(100, [1, 2, 3])).free, "as soon as they are few again"
