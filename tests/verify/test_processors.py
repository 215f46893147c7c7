"""Processors of the caller: called per node with its own path, as transformers' own would be; grammars share states."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.errors import CannotSample
from forerun.core.params import Prefix, SamplingParams
from forerun.core.types import Request, TreeBatch
from forerun.testing import FakeSeq
from forerun.verify import processors
from forerun.verify.processors import Allow, AllowByState, keep_allowed
from forerun.verify.warp import warp
from tests.exactness.harness import DRAFTERS, engine_for, run
from tests.verify.test_warp import V, batch_of

transformers = pytest.importorskip("transformers")
lib = transformers.generation.logits_process
THEIRS = {
    "no_repeat_ngram": lambda: lib.NoRepeatNGramLogitsProcessor(2),
    "sequence_bias": lambda: lib.SequenceBiasLogitsProcessor([[[1, 2], 4.0], [[3], -5.0]]),
    "min_length": lambda: lib.MinLengthLogitsProcessor(9, torch.tensor([3, 7])),
    "prefix_allowed": lambda: lib.PrefixConstrainedLogitsProcessor(
        lambda _, ids: [int(ids.sum()) % V, len(ids) % V], 1
    ),
    "repetition": lambda: lib.RepetitionPenaltyLogitsProcessor(1.4),
}


def as_ours(theirs: Any) -> Any:
    return lambda prefix, logits: theirs(torch.tensor([prefix.ids]), logits[None])[0]


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_node_gets_what_transformers_makes_of_its_path(name: str, temperature: float) -> None:
    rng = random.Random(3)
    for seed in range(5):
        settings: dict[str, Any] = {"temperature": temperature, "processors": [as_ours(THEIRS[name]())]}
        seqs, trees, contexts = batch_of(rng, [settings, {}, settings])
        logits = torch.randn(len(contexts), V, generator=torch.Generator().manual_seed(seed)) * 2
        laws = warp(logits, seqs, trees)
        owners = [seq for seq, size in zip(seqs, trees.sizes(), strict=True) for _ in range(size)]
        reached = reachable(laws.log_weights, trees)
        assert len(reached) > len(contexts) // 3
        for row in reached:
            wanted = logits[row].clone()
            if owners[row].params.processors:
                wanted = THEIRS[name]()(torch.tensor([contexts[row]]), wanted[None])[0]
            wanted = wanted / (owners[row].params.temperature or 1.0)
            torch.testing.assert_close(laws.log_weights[row], wanted, rtol=1e-6, atol=1e-6)


def reachable(log_weights: Tensor, trees: TreeBatch) -> list[int]:
    """Nodes whose path holds no token that its own parent rules out."""
    (tokens, parents), rows = trees.to_host(), list[int]()
    for first, end in zip(trees.starts, trees.starts[1:], strict=False):
        for i in range(first, end):
            above = first + parents[i]
            if parents[i] < 0 or (above in rows and log_weights[above, tokens[i]] > -math.inf):
                rows.append(i)
    return rows


def test_committed_text_and_path_come_apart() -> None:
    seen: list[Prefix] = []

    def watch(prefix: Prefix, logits: Tensor) -> Tensor:
        seen.append(prefix)
        return logits.fill_(-5.0)  # what it is given is its own

    seq = FakeSeq(0, [4, 5, 6], 2, SamplingParams(processors=[watch]))
    trees = TreeBatch.trees([([6, 1, 2, 3], [-1, 0, 0, 1])])
    logits = torch.zeros(4, V)
    laws = warp(logits, [seq], trees)
    assert [list(prefix.path) for prefix in seen] == [[], [1], [2], [1, 3]]
    assert all(prefix.committed == [4, 5, 6] and prefix.prompt_length == 2 for prefix in seen)
    assert (seen[3].ids, seen[3].output) == ([4, 5, 6, 1, 3], (6, 1, 3))
    assert torch.equal(logits, torch.zeros(4, V))
    assert laws.log_weights.eq(-5.0).all()


def test_what_was_ruled_out_is_not_asked_about() -> None:
    asked: list[tuple[int, ...]] = []

    def rule(prefix: Prefix) -> list[int]:
        asked.append(tuple(prefix.path))
        return [1]

    seq = FakeSeq(0, [0], params=SamplingParams(processors=[Allow(rule)]))
    warp(torch.zeros(5, V), [seq], TreeBatch.trees([([0, 1, 2, 2, 1], [-1, 0, 0, 1, 3])]))
    assert asked == [(), (1,)]


def digits(prefix: Prefix, logits: Tensor) -> Tensor:
    """The sum of the last two tokens, or one more, and never the same thrice."""
    ids = prefix.ids
    last = sum(ids[-2:])
    return keep_allowed(logits, [last % 9, (last + 1) % 9, (last + 4) % 9])


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_do_not_depend_on_the_drafter(drafter: str) -> None:
    heats: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}]
    requests = [
        Request((1, 2, 1, 2, 1), SamplingParams(max_tokens=20, ignore_eos=True, processors=[digits], **heat))
        for heat in heats
    ]
    wanted = run(engine_for("none", "auto", "chain", 9), requests)[0]
    plain = [Request(request.prompt, SamplingParams(max_tokens=20, ignore_eos=True)) for request in requests]
    assert run(engine_for("none", "auto", "chain", 9), plain)[0][0] != wanted[0]  # it does something
    for shape in ("chain", "tree"):
        assert run(engine_for(drafter, "auto", shape, 9), requests)[0] == wanted


class Brackets:
    """A grammar: 1 opens, 2 closes, 3 ends when all are closed; counts how often a state was made."""

    made = 0

    def __init__(self, depth: int = 0, ended: bool = False) -> None:
        self.depth, self.ended = depth, ended
        Brackets.made += 1

    def allowed(self) -> list[int]:
        return [4] if self.ended else [1, 2] if self.depth else [1, 3]

    def after(self, token: int) -> Brackets:
        assert token in self.allowed(), "a state is asked only about what it allows"
        return Brackets(self.depth + {1: 1, 2: -1}.get(token, 0), token == 3)


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model", "eagle3"])
def test_a_grammar_follows_texts_and_trees(drafter: str) -> None:
    Brackets.made = 0
    grammar = AllowByState(Brackets())
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True, processors=[grammar])
    engine = engine_for(drafter, "auto", "tree", 9)
    written = run(engine, [Request((5, 6), params)])[0][0]
    state = Brackets()
    for token in written:
        state = state.after(token)
    # one for the start, one per token but the last, one per token above, one before them
    if drafter == "none":
        assert Brackets.made == 1 + len(written) - 1 + len(written) + 1


def test_states_are_shared_along_a_tree() -> None:
    Brackets.made = 0
    grammar = AllowByState(Brackets())
    seq = FakeSeq(0, [9, 9], 2, SamplingParams(processors=[grammar]))
    trees = TreeBatch.trees([([9, 1, 1, 2, 2], [-1, 0, 1, 2, 1])])
    for _ in range(3):
        warp(torch.zeros(5, V), [seq], trees)
    assert Brackets.made == 5
    seq.tokens += [1, 1, 2]  # what was accepted is known; what follows is one step from it
    warp(torch.zeros(2, V), [seq], TreeBatch.chains([[2, 2]]))
    assert Brackets.made == 6


def test_old_states_are_dropped_and_made_again() -> None:
    grammar = AllowByState(Brackets(), keep=2)
    assert grammar.state(Prefix((1, 1, 2, 2), 0)).allowed() == [1, 3]
    assert len(grammar._states) == 2
    assert grammar.state(Prefix((1,), 0)).allowed() == [1, 2]


class Read(tuple[int, ...]):
    """A grammar whose state is all that it has read; anything may follow."""

    made = 0

    def allowed(self) -> None:
        return None

    def after(self, token: int) -> Read:
        Read.made += 1
        return Read((*self, token))


def test_states_of_long_outputs_are_those_of_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over texts that grow by rounds, lose their last rounds again, or are replaced; drafts come behind them."""
    monkeypatch.setattr(processors, "LAG", 6)
    numbers, grammar, committed = random.Random(0), AllowByState(Read(), keep=40), [7, 7, 7]
    for _ in range(400):
        for _ in range(3):
            path = tuple(numbers.choices((1, 2), k=numbers.randrange(4)))
            assert grammar.state(Prefix(committed, 3, path)) == (*committed[3:], *path)
        if numbers.random() < 0.1:  # rounds are undone, in place
            del committed[max(3, len(committed) - numbers.randrange(1, 20)) :]
        elif numbers.random() < 0.02:  # another text
            committed = [7, 7, 7, *numbers.choices((1, 2), k=numbers.randrange(60))]
        committed += numbers.choices((1, 2), k=numbers.randrange(1, 4))


def test_a_token_of_a_long_output_costs_what_one_of_a_short_one_does() -> None:
    """A thought may have tens of thousands of tokens, and a state is asked for at every node."""
    Read.made, committed, grammar = 0, [9], AllowByState(Read())
    for i in range(2000):
        committed.append(i % 5)
        grammar.state(Prefix(committed, 1, (1, 2)))
    assert Read.made < 6 * 2000
    assert max(map(len, grammar._states)) <= 2 * processors.LAG + 2
    Read.made = 0
    assert len(grammar.state(Prefix([9, *range(5000)], 1))) == 5000  # type: ignore[arg-type]
    assert Read.made == 5000
    assert max(map(len, grammar._states)) <= 2 * processors.LAG, "nor does one that is read at once"


@pytest.mark.parametrize("size", [23, 32, 33, 70])
def test_what_is_allowed_may_be_said_in_every_form(size: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(0))
    allowed = [0, 5, 22, size - 1, size + 3]
    mask = torch.tensor([token in allowed for token in range(size + 10)])
    words = [0] * ((size + 31) // 32)
    for token in allowed[:-1]:
        words[token // 32] |= 1 << (token % 32)
    packed = torch.tensor([word - 2**32 if word >= 2**31 else word for word in words], dtype=torch.int32)
    wanted = torch.where(mask[:size], logits, -math.inf)
    forms: list[Any] = [allowed, torch.tensor(allowed), mask, mask[:size], packed]
    assert all(torch.equal(keep_allowed(logits.clone(), form), wanted) for form in forms)
    assert torch.equal(keep_allowed(logits.clone(), mask[:6])[6:], torch.full((size - 6,), -math.inf))
    assert keep_allowed(logits, None) is logits


@pytest.mark.parametrize("heat", [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.0}])
def test_a_processor_that_fails_is_said_where_the_text_arrives(heat: dict[str, Any]) -> None:
    """Drafts beside the text set it off too; they do not count."""

    def fussy(prefix: Prefix, logits: Tensor) -> Tensor:
        if 5 in prefix.path[:-1] or 5 in prefix.output[:-1]:
            raise KeyError("cannot see\n fives")
        return logits

    trees = TreeBatch.trees([([1, 5, 6, 6], [-1, 0, 0, 1])])
    params = SamplingParams(processors=[fussy], **heat)
    laws = warp(torch.zeros(4, V), [FakeSeq(0, [1], params=params)], trees)
    assert list(laws.impossible) == [3]
    engine = engine_for("ngram", "auto", "tree", 9)
    biased = SamplingParams(max_tokens=30, ignore_eos=True, logit_bias={5: 30.0}, processors=[fussy], **heat)
    engine.submit(Request((1, 5, 2), biased))
    errors = []
    while engine.busy:
        errors += [event.error for event in engine.step() if event.error is not None]
    assert [type(error) for error in errors] == [CannotSample]
    assert str(errors[0]).startswith("a processor failed (KeyError: ")
    assert "\n" not in str(errors[0])


@pytest.mark.parametrize(
    "wrong", [lambda p, x: None, lambda p, x: x[:3], lambda p, x: x * math.nan, lambda p, x: x + math.inf]
)
def test_what_is_no_law_is_said(wrong: Any) -> None:
    seq = FakeSeq(0, [1], params=SamplingParams(processors=[wrong]))
    laws = warp(torch.zeros(1, V), [seq], TreeBatch.chains([[1]]))
    assert "returned" in str(laws.impossible[0])
