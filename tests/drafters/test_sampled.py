"""Chains drawn from a head's own law, tested against it: the text keeps the target's law."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.drafters.eagle.eagle3 import Eagle3Drafter
from forerun.drafters.heads import wants_sampling
from forerun.errors import InvalidInput
from forerun.params import SamplingParams, SpeculativeConfig
from forerun.testing import FakeSeq, TableLM
from forerun.types import Budget
from tests.drafters.rounds import observe_prompts
from tests.drafters.test_heads import make
from tests.exactness.harness import SETTINGS, chi_square_p, engine_for, joint_law, sample_texts, table


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["exact", "block"])
def test_the_law_of_the_text_is_the_targets(verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.drafters.eagle.drafter.wants_sampling", lambda speculative: True)
    vocab, length, prompt = 6, 3, (1, 2, 3, 1, 2, 3, 1, 2)
    params = replace(SETTINGS["T=0.8"], max_tokens=length)
    engine = engine_for("eagle3", verifier, "chain", vocab, frozenset())
    assert isinstance(engine.drafters.get("eagle3"), Eagle3Drafter)
    counts = sample_texts(engine, prompt, params, 1000)
    assert chi_square_p(counts, joint_law(table(vocab), prompt, params, length)) > 1e-4


def test_drawn_nodes_carry_the_law_they_came_from(tmp_path: Path) -> None:
    """In the target's ids, under the request's own temperature and truncation, nothing outside the draft vocabulary."""
    drafter = make("eagle3", tmp_path, how="sampled")
    assert isinstance(drafter, Eagle3Drafter)
    seq = FakeSeq(0, [1, 2, 3, 4], params=SamplingParams(temperature=0.7, top_k=5), seed=9)
    observe_prompts(drafter, TableLM(13), [seq])
    trees = drafter.propose([seq], [Budget(3, 3)])
    draws = trees.drawn_from
    assert draws is not None
    assert draws.rows.tolist() == [-1, 0, 1, 2]
    assert [int((law > 0).sum()) for law in draws.laws] == [5, 5, 5]
    known = set(drafter.head.vocabulary.ids.tolist())
    for law, token in zip(draws.laws, trees.tokens[1:].tolist(), strict=True):
        assert set(law.nonzero()[:, 0].tolist()) <= known
        assert float(law[token]) > 0
    torch.testing.assert_close(draws.laws.sum(-1), torch.ones(3))


def test_the_setting_is_vllms() -> None:
    assert not wants_sampling(SpeculativeConfig())

    class Other:
        draft_sample_method = "probabilistic"

    assert wants_sampling(Other())
    Other.draft_sample_method = "magic"
    with pytest.raises(InvalidInput, match="probabilistic"):
        wants_sampling(Other())
