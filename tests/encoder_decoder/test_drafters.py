"""Drafters for encoder-decoders: a look into the source, and a second encoder-decoder."""

from __future__ import annotations

import pytest

from forerun.build.engine import make_engine
from forerun.core.errors import InvalidInput
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, PlainSeq
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.testing import TableLM
from tests.encoder_decoder.test_target import write
from tests.encoder_decoder.tiny_models import VOCAB, eos_of, make_target, reference, sources

BUDGET = Budget(nodes=4, depth=4)
END = frozenset({1})


def drafted(drafter: NgramDrafter, seq: PlainSeq) -> list[int]:
    return drafter.propose([seq], [BUDGET]).tokens.tolist()[1:]


def test_drafting_begins_with_the_source_and_goes_on_where_the_output_agrees_with_it() -> None:
    seq = PlainSeq(0, [0], source=(11, 12, 13, 14, 15, 16, 1), stop_ids=END)
    drafter = NgramDrafter()
    assert drafted(drafter, seq) == [11, 12, 13, 14]
    seq.tokens += [11, 40, 41]
    assert drafted(drafter, seq) == [], "nothing in the source follows 41"
    seq.tokens += [13]
    assert drafted(drafter, seq) == [14, 15, 16, 1], "up to the source's end, which ends the output too"


def test_a_decoder_without_a_source_drafts_as_before() -> None:
    assert drafted(NgramDrafter(), PlainSeq(0, [0], stop_ids=END)) == []
    assert drafted(NgramDrafter(), PlainSeq(0, [0, 5, 6, 5], stop_ids=END)) == [6, 5, 6, 5]


def test_rewinding_forgets_the_output_and_keeps_the_source() -> None:
    seq, drafter = PlainSeq(0, [0, 11, 12], source=(11, 12, 13, 1), stop_ids=END), NgramDrafter()
    assert drafted(drafter, seq) == [13, 1]
    drafter.rewind(seq, 1)
    del seq.tokens[1:]
    assert drafted(drafter, seq) == [11, 12, 13, 1]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["t5", "marian"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.05, "seed": 5}], ids=["greedy", "sampled"])
def test_a_second_encoder_decoder_drafts_and_the_text_stays_the_targets(name: str, params: dict[str, float]) -> None:
    prompts, sampling = sources(5, seed=8), SamplingParams.from_dict({"max_tokens": 16, **params})
    kinds = {"same": make_target(name), "other": make_target(name, seed=1)}
    texts, accepted = {}, {}
    for kind, draft in {"none": None, **kinds}.items():
        drafter = "none" if draft is None else "draft_model"
        speculative = SpeculativeConfig(drafter=drafter, controller="fixed", budget=4)
        engine = make_engine(
            make_target(name), frozenset({eos_of(name)}), speculative, EngineConfig(max_batch=3), draft_target=draft
        )
        texts[kind], accepted[kind] = write(engine, prompts, sampling), engine.stats.accepted
        assert draft is None or draft.used_slots == 0
    assert texts["same"] == texts["other"] == texts["none"]
    assert accepted["same"] > accepted["other"], "the target drafts better for itself than another model does"
    if not params:
        assert texts["none"] == [reference(name, prompt, 16) for prompt in prompts]


def test_a_decoder_cannot_draft_for_an_encoder_decoder() -> None:
    speculative = SpeculativeConfig(drafter="draft_model")
    for target, draft in ((make_target("t5"), TableLM(VOCAB)), (TableLM(VOCAB), make_target("t5"))):
        with pytest.raises(InvalidInput, match="encoder-decoder"):
            make_engine(target, END, speculative, draft_target=draft).drafters.get("draft_model")
