"""Cascades: what a level hands on has its draft model's law, whatever drafts below it; and the levels keep in step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch

from forerun.build.engine import build_drafter, make_engine
from forerun.build.load import draft_models
from forerun.core import registry
from forerun.core.errors import InvalidInput
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Request
from forerun.drafters.base import Drafter, Parts
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.drafters.model.draft_model import CascadeDrafter, ModelDrafter
from forerun.testing import FakeSeq, TableLM, check_drafter
from tests.exactness.harness import chi_square_p, joint_law, run, sample_texts, table

VOCAB = 6
PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)
WARM = SamplingParams(temperature=0.9, max_tokens=3)


def small() -> TableLM:
    return TableLM(VOCAB, seed=1, sharpness=1.0)


def medium() -> TableLM:
    return TableLM(VOCAB, seed=2, sharpness=1.3)


def lower(name: str) -> Drafter:
    return {
        "ngram": NgramDrafter,
        "suffix": lambda: registry.drafters.get("suffix")(),
        "recycling": lambda: registry.drafters.get("recycling")(),
        "lookahead": lambda: registry.drafters.get("lookahead")(),
        "small": lambda: ModelDrafter(small(), VOCAB),
        "ngram>small": lambda: CascadeDrafter(NgramDrafter(), ModelDrafter(small(), VOCAB)),
    }[name]()


LOWER = ["ngram", "suffix", "recycling", "lookahead", "small", "ngram>small"]


def cascade(name: str) -> CascadeDrafter:
    return CascadeDrafter(lower(name), ModelDrafter(medium(), VOCAB))


@pytest.mark.parametrize("name", LOWER)
def test_the_contract(name: str) -> None:
    check_drafter(lambda: cascade(name), vocab_size=VOCAB, rounds=12)


@pytest.mark.parametrize("name", LOWER)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_level_drafts_what_the_draft_model_alone_would(name: str, temperature: float) -> None:
    """Greedy, and under shared noise, tokens are fixed; so they must be those of the draft model on its own."""
    params = SamplingParams(temperature=temperature)
    fields = {"params": params, "seed": 5, "shares_noise": True}
    with_help, alone = cascade(name), ModelDrafter(medium(), VOCAB)
    tokens = list(PROMPT)
    for accepted in (2, 0, 4, 1, 3, 0):
        budgets = [Budget(4, 4)]
        drafts = [
            drafter.propose([FakeSeq(0, list(tokens), **fields)], budgets).tokens.tolist()  # type: ignore[arg-type]
            for drafter in (with_help, alone)
        ]
        assert drafts[0] == drafts[1]
        assert len(drafts[0]) == 5
        tokens += [*drafts[0][1 : 1 + accepted], accepted % VOCAB]


def law_of_drafts(name: str, count: int) -> Counter[tuple[int, ...]]:
    """Drafts of three tokens under different seeds; a cascade that drafted before must draft the same."""
    drafter = cascade(name)
    seqs = [FakeSeq(i, list(PROMPT), params=WARM, seed=1000 + i) for i in range(count)]
    drafter.propose(seqs, [Budget(3, 3)] * count)
    for seq in seqs:
        seq.tokens[-1:] = PROMPT[-1:]
        seq.tokens += [3, 1, 2]
    trees = drafter.propose(seqs, [Budget(3, 3)] * count)
    tokens = trees.to_host()[0]
    return Counter(tuple(tokens[4 * i + 1 : 4 * i + 4]) for i in range(count))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOWER)
def test_what_is_handed_on_has_the_law_that_goes_with_it(name: str) -> None:
    law = joint_law(medium(), (*PROMPT, 3, 1, 2), replace(WARM), 3)
    assert chi_square_p(law_of_drafts(name, 1500), law) > 1e-4


def test_the_laws_that_go_with_a_draft_are_the_draft_models() -> None:
    trees = cascade("small").propose([FakeSeq(0, list(PROMPT), params=WARM, seed=3)], [Budget(4, 4)])
    assert trees.drawn_from is not None
    tokens = trees.tokens.tolist()
    for depth in range(1, 5):
        wanted = (medium().logits([*PROMPT, *tokens[1:depth]]) / 0.9).softmax(-1)
        row = int(trees.drawn_from.rows[depth])
        assert torch.allclose(trees.drawn_from.laws[row], wanted, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["exact", "block"])
def test_three_levels_leave_the_targets_law_as_it_is(verifier: str) -> None:
    speculative = SpeculativeConfig(
        "ngram>draft_model>draft_model", draft_model="a,b", verifier=verifier, budget=4, controller="fixed"
    )
    engine = make_engine(
        table(VOCAB), frozenset(), speculative, EngineConfig(max_batch=64), draft_target=small(),
        more_drafts=(medium(),),
    )  # fmt: skip
    drafter = engine.drafters.get("ngram>draft_model>draft_model")
    assert isinstance(drafter, CascadeDrafter)
    assert isinstance(drafter.lower, CascadeDrafter)
    assert isinstance(drafter.lower.lower, NgramDrafter)
    assert [drafter.draft.seed, drafter.lower.draft.seed] == [2, 1]  # type: ignore[attr-defined]
    counts = sample_texts(engine, PROMPT, WARM, 1500)
    assert chi_square_p(counts, joint_law(table(VOCAB), PROMPT, WARM, 3)) > 1e-4


@pytest.mark.slow
def test_negative_control_a_level_that_reports_another_law_is_caught() -> None:
    """Were the law that goes with a draft the lower drafter's, the target's law would not come out."""

    class Wrong(CascadeDrafter):
        def propose(self, seqs: object, budgets: object) -> object:  # type: ignore[override]
            trees = super().propose(seqs, budgets)  # type: ignore[arg-type]
            if trees.drawn_from is not None:
                trees.drawn_from.laws.copy_(
                    trees.drawn_from.laws.square() / trees.drawn_from.laws.square().sum(-1, True)
                )
            return trees

    speculative = SpeculativeConfig("ngram>draft_model", verifier="exact", budget=4, controller="fixed")
    engine = make_engine(table(VOCAB), frozenset(), speculative, EngineConfig(max_batch=64), draft_target=medium())
    engine.drafters.add("ngram>draft_model", Wrong(NgramDrafter(), ModelDrafter(medium(), VOCAB)))  # type: ignore[arg-type]
    assert chi_square_p(sample_texts(engine, PROMPT, WARM, 1500), joint_law(table(VOCAB), PROMPT, WARM, 3)) < 1e-4


def test_fewer_passes_of_the_draft_model_where_the_lower_drafter_is_right() -> None:
    class Counted(TableLM):
        passes = 0

        def score(self, *given: object) -> object:  # type: ignore[override]
            Counted.passes += 1
            return super().score(*given)  # type: ignore[arg-type]

    class Repeats(Counted):
        def logits(self, tokens: object) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.tensor(tokens[-3]), VOCAB) * 20.0  # type: ignore[index]

    drafter = CascadeDrafter(NgramDrafter(), ModelDrafter(Repeats(VOCAB), VOCAB))
    tokens = drafter.propose([FakeSeq(0, [1, 2, 3] * 6)], [Budget(8, 8)]).tokens.tolist()
    assert tokens == [3, *[1, 2, 3] * 2, 1, 2]
    assert Counted.passes <= 3


def test_mixed_batches_draft_as_each_alone() -> None:
    together, fields = cascade("ngram>small"), [(0.0, False), (0.9, True), (0.9, False)]
    seqs = [
        FakeSeq(i, list(PROMPT[i:]), params=SamplingParams(temperature=heat), seed=i, shares_noise=noise)
        for i, (heat, noise) in enumerate(fields)
    ]
    trees = together.propose(seqs, [Budget(3, 3), Budget(5, 5), Budget(2, 2)])
    for b, seq in enumerate(seqs):
        alone = cascade("ngram>small").propose([seq], [Budget(trees.sizes()[b] - 1, trees.sizes()[b] - 1)])
        assert alone.tokens.tolist() == trees.select([b]).tokens.tolist()
    assert trees.sizes() == [4, 6, 3]


def test_tokens_that_are_banned_stop_the_draft_and_not_the_text() -> None:
    params = SamplingParams(temperature=0.8, max_tokens=8, bad_words=tuple((t,) for t in range(1, VOCAB)), seed=2)
    speculative = SpeculativeConfig("ngram>draft_model", budget=4, controller="fixed")
    engine = make_engine(table(VOCAB), frozenset(), speculative, EngineConfig(), draft_target=medium())
    assert run(engine, [Request(PROMPT, params)])[0] == [[0] * 8]


def test_what_can_stand_where() -> None:
    def built(name: str, draft: str | None = "a") -> Drafter:
        given = SpeculativeConfig(name, draft_model=draft)
        return build_drafter(registry.drafters.spec(name), Parts(table(VOCAB), small(), given))

    assert isinstance(built("suffix>draft_model"), CascadeDrafter)
    with pytest.raises(InvalidInput, match="must be a draft model"):
        built("draft_model>ngram")
    with pytest.raises(InvalidInput, match="needs a second checkpoint"):
        built("draft_model>draft_model")
    with pytest.raises(InvalidInput, match="cannot draft for itself"):
        CascadeDrafter.compose(ModelDrafter(one := small(), VOCAB), ModelDrafter(one, VOCAB))
    assert draft_models(SpeculativeConfig("ngram>draft_model", draft_model="a")) == ["a"]
    assert draft_models(SpeculativeConfig("draft_model>draft_model", draft_model="a, b")) == ["a", "b"]
    with pytest.raises(InvalidInput, match="runs 2 models; name them by comma"):
        draft_models(SpeculativeConfig("draft_model>draft_model", draft_model="a"))


@pytest.mark.parametrize(("kept", "added"), list(product((1, 3, 7), (0, 2))))
def test_prompt_lookup_forgets_what_is_taken_back(kept: int, added: int) -> None:
    drafter, text = NgramDrafter(), [1, 2, 3, 1, 2, 3, 4, 1, 2]
    drafter.propose([FakeSeq(0, text)], [Budget(1, 1)])
    again = [*text[:kept], *[2, 3][:added], 1]
    drafter.rewind(FakeSeq(0, again), kept)
    fresh = NgramDrafter()
    trees = [one.propose([FakeSeq(0, again)], [Budget(8, 8)]).to_host() for one in (drafter, fresh)]
    assert trees[0] == trees[1]
    texts = [one._sequences[0].text for one in (drafter, fresh)]
    assert texts[0].tokens == texts[1].tokens
    assert texts[0].tail == texts[1].tail
