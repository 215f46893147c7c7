"""A request or a drafter that fails harms nobody else: errors end the request at fault, drafters are switched off."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from forerun.api.llm import LLM
from forerun.build.engine import make_engine
from forerun.core.errors import CannotSample, InvalidInput
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Draws, Request, TreeBatch
from forerun.engine.engine import Engine
from forerun.engine.routing import check_trees
from forerun.testing import FakeSeq, ScriptedDrafter, TableLM
from tests.exactness.harness import Letters, run
from tests.test_llm import make as make_llm

VOCAB = 12
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
SEEDED = replace(PARAMS, temperature=0.9, seed=5)
NOTHING = {token: float("-inf") for token in range(VOCAB)}
PROMPT = (1, 2, 3, 1, 2, 3)


def engine_with(drafter: object | None = None, controller: str = "fixed", **config: Any) -> Engine:
    speculative = SpeculativeConfig(drafter="ngram", controller=controller, budget=4)
    engine = make_engine(TableLM(vocab_size=VOCAB), frozenset(), speculative, EngineConfig(**config), Letters())
    if drafter is not None:
        engine.drafters.add("theirs", drafter)  # type: ignore[arg-type]
    return engine


@pytest.mark.parametrize("law", [{}, {"temperature": 0.8}, {"temperature": 0.8, "seed": 3}])
def test_what_cannot_be_sampled_ends_alone(law: dict[str, Any]) -> None:
    """Greedy, drawn and coupled alike; the neighbours' texts are those written alone."""
    engine = engine_with()
    alone, _ = run(engine, [Request(PROMPT, PARAMS), Request((4, 5), SEEDED)])
    bad = Request((7, 8), replace(PARAMS, logit_bias=NOTHING, **law))
    ids = [engine.submit(request) for request in (Request(PROMPT, PARAMS), bad, Request((4, 5), SEEDED))]
    seqs = [engine.find(seq_id) for seq_id in ids]
    while engine.busy:
        engine.step()
    first, failed, last = seqs
    assert first is not None
    assert failed is not None
    assert last is not None
    assert [first.tokens[6:], last.tokens[2:]] == alone
    assert isinstance(failed.error, CannotSample)
    assert failed.finished == "error"
    assert failed.events[-1].error is failed.error
    assert engine.target.used_slots == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_the_text_before_the_error_does_not_depend_on_the_drafter(drafter: str) -> None:
    """Everything may follow 3 but nothing may follow what follows it: bad words that begin with every token."""
    engine = engine_with()
    tokens, _ = run(engine, [Request(PROMPT, PARAMS)])
    turn = tokens[0][3]  # nothing may follow the fourth token
    banned = [(turn, token) for token in range(VOCAB)]
    seq = engine.find(engine.submit(Request(PROMPT, replace(PARAMS, bad_words=banned), drafter=drafter)))
    assert seq is not None
    while engine.busy:
        engine.step()
    assert seq.tokens[6:] == tokens[0][: tokens[0].index(turn) + 1]
    assert isinstance(seq.error, CannotSample)


def test_generate_raises_the_error_once_the_others_have_finished() -> None:
    llm = make_llm()
    fine = SamplingParams(max_tokens=8, ignore_eos=True)
    bad = replace(fine, logit_bias={token: float("-inf") for token in range(26)})
    with pytest.raises(CannotSample, match="no token can follow"):
        llm.generate(["abc", "def"], [bad, fine])
    assert not llm.engine.busy
    with pytest.raises(CannotSample):
        list(llm.stream("abc", bad))
    assert llm.generate("def", fine).tokens == 8


class Raises:
    """A drafter that fails where it is told to, and else says nothing."""

    def __init__(self, where: str, plain: Any) -> None:
        self.where, self._plain = where, plain

    def __getattr__(self, name: str) -> Any:
        if name == self.where:
            raise RuntimeError(f"{name} of theirs")
        return getattr(self._plain, name)


@pytest.mark.parametrize("controller", ["fixed", "adaptive"])
@pytest.mark.parametrize("where", ["propose", "observe", "forget", "needs", "offer"])
def test_a_drafter_that_raises_is_switched_off(where: str, controller: str, caplog: pytest.LogCaptureFixture) -> None:
    drafter = Raises(where, ScriptedDrafter.random(VOCAB))
    engine = engine_with(drafter, controller)
    expected, _ = run(engine, [Request(PROMPT, PARAMS), Request((4, 5), SEEDED), Request((6,), PARAMS)])
    requests = [
        Request(PROMPT, PARAMS, drafter="theirs"),
        Request((4, 5), SEEDED, drafter="ngram"),
        Request((6,), PARAMS, drafter="theirs"),
    ]
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            assert run(engine, requests)[0] == expected
    told = [record for record in caplog.records if "switched off" in record.message]
    assert len(told) == (where != "forget" and (where != "offer" or controller == "adaptive"))
    assert engine.target.used_slots == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("where", "named"), [("propose", "none"), ("needs", "none"), ("observe", "none"), ("", "theirs")]
)
def test_a_completion_names_what_drafted(where: str, named: str) -> None:
    llm = make_llm()
    llm.engine.drafters.add("theirs", Raises(where, ScriptedDrafter.random(26)))  # type: ignore[arg-type]
    done = llm.generate("abcabc", PARAMS, drafter="theirs")
    assert (done.drafter, done.drafted > 0) == (named, named == "theirs")
    assert done.text == llm.generate("abcabc", PARAMS, drafter="none").text


def test_a_drafter_that_fails_later_is_still_what_drafted() -> None:
    class FailsLater(Raises):
        def observe(self, seqs: Any, trees: TreeBatch, *rest: Any) -> None:
            if len(trees.tokens) > len(seqs):  # trees of its own
                raise RuntimeError("observe of theirs")

    llm = make_llm()
    llm.engine.drafters.add("theirs", FailsLater("", ScriptedDrafter.random(26)))  # type: ignore[arg-type]
    done = llm.generate("a", PARAMS, drafter="theirs")
    assert (done.drafter, done.drafted > 0, done.rounds > 2) == ("theirs", True, True)


def one(tokens: Sequence[int], parents: Sequence[int], starts: tuple[int, ...] | None = None) -> TreeBatch:
    return TreeBatch(list(tokens), list(parents), starts or (0, len(tokens)))


BROKEN: dict[str, Callable[[int], TreeBatch]] = {
    "one tree too many": lambda root: one([root, root], [-1, -1], (0, 1, 2)),
    "no tree": lambda root: one([], [], (0,)),
    "an empty tree": lambda root: one([], [], (0, 0)),
    "a wrong root": lambda root: one([(root + 1) % VOCAB, 1], [-1, 0]),
    "a root with a parent": lambda root: one([root, 1], [0, 0]),
    "a child before its parent": lambda root: one([root, 1, 2], [-1, 2, 0]),
    "its own parent": lambda root: one([root, 1], [-1, 1]),
    "a second root": lambda root: one([root, 1], [-1, -1]),
    "a token beyond the vocabulary": lambda root: one([root, VOCAB], [-1, 0]),
    "a negative token": lambda root: one([root, -1], [-1, 0]),
    "more nodes than allowed": lambda root: one([root, 1, 2, 3, 4, 5], [-1, 0, 0, 0, 0, 0]),
    "fewer nodes than said": lambda root: one([root], [-1], (0, 2)),
    "a float": lambda root: one([root, 1.0], [-1, 0]),  # type: ignore[list-item]
    "no tree at all": lambda root: None,  # type: ignore[arg-type, return-value]
    "rows without laws": lambda root: TreeBatch(
        [root, 1], [-1, 0], (0, 2), Draws(torch.full((1, VOCAB), 1 / VOCAB), torch.tensor([-1, 3]), True)
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_trees_reach_no_target(name: str) -> None:
    class Theirs(ScriptedDrafter):
        def propose(self, seqs: Any, budgets: Any) -> TreeBatch:
            return BROKEN[name](seqs[0].tokens[-1])

    engine = engine_with(Theirs(lambda seq, budget: ([], [])))
    expected, _ = run(engine, [Request(PROMPT, PARAMS), Request((4, 5), SEEDED)])
    requests = [Request(PROMPT, PARAMS, drafter="theirs"), Request((4, 5), SEEDED, drafter="ngram")]
    assert run(engine, requests)[0] == expected


def test_a_tree_deeper_than_allowed_is_malformed() -> None:
    seq, chain = FakeSeq(0, [1]), one([1, 2, 3], [-1, 0, 1])
    check_trees(chain, [seq], [Budget(4, 2)], VOCAB)
    with pytest.raises(InvalidInput, match="2 deep"):
        check_trees(chain, [seq], [Budget(4, 1)], VOCAB)


@pytest.mark.parametrize(
    "meddle",
    [
        lambda seq: seq.tokens.append(3),
        lambda seq: seq.tokens.pop(),
        lambda seq: seq.tokens.__setitem__(0, 9),
        lambda seq: seq.tokens.__iadd__([1]),
        lambda seq: seq.tokens.sort(),
        lambda seq: setattr(seq, "tokens", [1]),
        lambda seq: setattr(seq, "max_length", 7),
        lambda seq: setattr(seq, "seed", 1),
        lambda seq: setattr(seq, "finished", "stop"),
        lambda seq: setattr(seq, "anything", 1),
    ],
)
def test_drafters_cannot_change_a_sequence(meddle: Callable[[Any], None]) -> None:
    tried: list[bool] = []

    class Meddles(ScriptedDrafter):
        def propose(self, seqs: Any, budgets: Any) -> TreeBatch:
            for seq in seqs:
                tried.append(True)
                meddle(seq)
                tried.append(True)  # it was not refused
            return super().propose(seqs, budgets)

    engine = engine_with(Meddles.random(VOCAB))
    expected, _ = run(engine, [Request(PROMPT, SEEDED)])
    assert run(engine, [Request(PROMPT, SEEDED, drafter="theirs")])[0] == expected
    assert tried == [True]


class Poison(TableLM):
    """Fails in every pass over a certain prompt."""

    def score(self, seqs: Any, *rest: Any) -> Any:
        if any(seq.tokens[:1] == [9] for seq in seqs):
            raise torch.OutOfMemoryError("no room for 9")
        return super().score(seqs, *rest)


def test_a_request_that_fails_again_and_again_is_found_among_its_neighbours() -> None:
    target = Poison(vocab_size=VOCAB)
    speculative = SpeculativeConfig(drafter="none", controller="fixed", budget=4)
    engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=8))
    prompts = [(i % 8 + 1, 2, 3) for i in range(7)]
    expected, _ = run(engine, [Request(prompt, PARAMS) for prompt in prompts])
    ids = [engine.submit(Request(prompt, PARAMS)) for prompt in (*prompts[:3], (9, 1), *prompts[3:])]
    seqs = [seq for seq in map(engine.find, ids) if seq is not None]
    steps = 0
    while engine.busy and steps < 200:
        engine.step()
        steps += 1
    bad = seqs.pop(3)
    assert isinstance(bad.error, torch.OutOfMemoryError)
    assert [seq.tokens[seq.prompt_length :] for seq in seqs] == expected
    assert target.used_slots == 0


def test_what_fails_for_everybody_ends_everybody_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(max_batch=4)

    def broken(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(TableLM, "score", broken)
        with pytest.raises(RuntimeError, match="gone"):
            llm.generate(["abc"] * 5, SamplingParams(max_tokens=4))
    assert not llm.engine.busy
    assert isinstance(llm, LLM)
    assert llm.generate("abc", SamplingParams(max_tokens=4, ignore_eos=True)).tokens == 4
