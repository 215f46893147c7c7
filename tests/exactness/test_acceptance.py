"""Faults that cost only speed: how much of a draft stands, and how many rounds a text takes, where that is known.

Equal texts do not show that a drafter has lost its place or that a verifier gives up too soon. Here the rounds of a
text are worked out by definition: guess on with the draft model, one whole text at a time and without any cache, and
keep what the target would have written.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.noise import exponential
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Request, Round, Seq
from forerun.engine.engine import Engine
from forerun.testing import TableLM
from tests.exactness.harness import Alike, table

VOCAB, TOKENS = 16, 40
PROMPTS = [(5, 6, 7, 8, 5, 6, 7), (1, 2, 3, 1, 2, 3, 1, 2), (9,), (4, 4, 4, 4)]
GREEDY, HOT = SamplingParams(max_tokens=TOKENS), SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=3)


def alike() -> TableLM:
    return Alike(vocab_size=VOCAB, order=2, seed=1, sharpness=1.6)


def ranking(lm: TableLM, text: Sequence[int], params: SamplingParams) -> list[int]:
    """Tokens to follow a text, the first choice first; under the request's own noise if it is not greedy."""
    logits = lm.logits(text)
    if not params.is_greedy:
        assert params.seed is not None
        logits = logits / params.temperature - exponential(params.seed, len(text), VOCAB, logits.device).log()
    return torch.argsort(logits, descending=True).tolist()


def accepted_by_definition(
    draft: TableLM, prompt: Sequence[int], params: SamplingParams, budgets: Sequence[Budget]
) -> list[int]:
    """Accepted tokens of every round: `width` first guesses, each the head of a chain."""
    target, text, found = table(VOCAB), list(prompt), list[int]()
    while len(text) - len(prompt) < TOKENS:
        budget = budgets[len(found) % len(budgets)]
        room = TOKENS - (len(text) - len(prompt)) - 1  # the last token is the target's own
        deepest = min(budget.depth, room, budget.nodes // max(1, budget.width))
        stands = 0
        while stands < deepest:
            token = ranking(target, text, params)[0]
            if token not in ranking(draft, text, params)[: budget.width if stands == 0 else 1]:
                break
            text.append(token)
            stands += 1
        text.append(ranking(target, text, params)[0])
        found.append(stands)
    return found


class Cycle:
    """A controller that goes through a list of budgets, round by round."""

    def __init__(self, budgets: Sequence[Budget]) -> None:
        self.budgets, self.round = budgets, 0

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        self.round += 1
        return [self.budgets[(self.round - 1) % len(self.budgets)]] * len(seqs)

    def observe(self, outcome: Round) -> None:
        pass

    def forget(self, seq: Seq) -> None:
        pass


def make(drafter: str, target: TableLM, draft: TableLM | None, verifier: str = "auto", **more: int) -> Engine:
    speculative = SpeculativeConfig(drafter=drafter, verifier=verifier, controller="fixed", **more)  # type: ignore[arg-type]
    return make_engine(target, frozenset(), speculative, EngineConfig(max_batch=8), draft_target=draft)


def accepted(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Accepted tokens of every round of every text."""
    found: dict[int, list[int]] = {engine.submit(request): [] for request in requests}
    while engine.busy:
        for event in engine.step():
            found[event.seq_id].append(event.accepted)
    return list(found.values())


SHAPES = {"chain": [Budget(4, 4)], "wide": [Budget(6, 3, width=2)], "pauses": [Budget(3, 3), *[Budget(0, 0)] * 9]}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "coupled"])
def test_a_draft_model_has_accepted_what_the_definition_says(params: SamplingParams, shape: str) -> None:
    """Side by side, and where rounds without a draft leave the draft model far behind."""
    engine = make("draft_model", table(VOCAB), alike())
    engine.controller = Cycle(SHAPES[shape])
    found = accepted(engine, [Request(prompt, params) for prompt in PROMPTS])
    assert found == [accepted_by_definition(alike(), prompt, params, SHAPES[shape]) for prompt in PROMPTS]
    kept = sum(map(sum, found))
    assert 0 < kept < len(PROMPTS) * TOKENS  # neither all nor nothing stood


@pytest.mark.parametrize("verifier", ["exact", "block", "coupled", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_of_the_target_itself_stands_whole(verifier: str, temperature: float) -> None:
    sharp = [TableLM(vocab_size=VOCAB, sharpness=6.0) for _ in range(2)]  # typical wants likely tokens
    engine = make("draft_model", *sharp, verifier=verifier, budget=4)
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=1)
    (found,) = accepted(engine, [Request((1, 2, 3), params)])
    if verifier == "typical" and temperature:
        assert sum(found) > TOKENS / 2
    else:
        assert found == [4] * 8


@pytest.mark.parametrize("tokens", [1, 3, 5, 7])
def test_nothing_is_drafted_that_cannot_be_kept(tokens: int) -> None:
    """Every round writes a token of the target's own, so a perfect draft is as long as all the others."""
    engine = make("draft_model", TableLM(VOCAB), TableLM(VOCAB), budget=4)
    seq = engine.prepare(Request((1, 2, 3), SamplingParams(max_tokens=tokens)))
    engine.enqueue(seq)
    while engine.busy:
        engine.step()
    assert seq.stats.tokens == tokens
    assert seq.stats.drafted == tokens - seq.stats.rounds == seq.stats.accepted


class Rounds(TableLM):
    """It counts to seven, again and again."""

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor((tokens[-1] + 1) % 7), self.vocab_size) * 20.0


@pytest.mark.parametrize("drafter", ["ngram", "ngram+draft_model", "draft_model"])
def test_a_text_that_repeats_is_guessed_whole(drafter: str) -> None:
    """From the second time round on every guess of lookup is right: five tokens a round."""
    draft = TableLM(VOCAB) if drafter != "draft_model" else Rounds(VOCAB)
    engine = make(drafter, Rounds(VOCAB), None if drafter == "ngram" else draft, budget=4)
    (found,) = accepted(engine, [Request((*range(7), *range(7)), GREEDY)])
    assert found == [4] * 8
