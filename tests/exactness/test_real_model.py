"""The real default model in fp32 against transformers' own generate, token for token.

What transformers writes is in transformers_texts.json, which takes it half a minute; a slow test writes it again. After
a change of the questions: python -m tests.exactness.test_real_model
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core import registry
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.engine.sequence import SequenceState
from forerun.heads import heads_in_the_box
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from tests.exactness.harness import run

pytestmark = pytest.mark.model

TOKENS = 20
RECORDED = Path(__file__).parent / "transformers_texts.json"
FAST = ("eagle3", "ngram", "prediction")  # the others are in the long tier
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about autumn.",
    "Count from one to ten, then from ten to one.",
    "def fibonacci(n):",
    "Repeat after me, three times: the early bird catches the worm.",
    "List five fruits as a JSON array.",
    "Translate to French: The weather is nice today.",
    "What is 12 times 13? Think step by step.",
    "Summarise: Rain fell all night. Rain fell all day. The river rose and the fields were flooded.",
    "Explain in one sentence why the sky is blue.",
    "Write a SQL query that selects all names from the table people.",
    "ABAB ABAB ABAB ABAB ABAB",
    "Grüße aus Köln! Was heißt das auf Englisch? 🙂",
]


@pytest.fixture(scope="module")
def prompts(checkpoint: Any) -> list[tuple[int, ...]]:
    return _prompts(checkpoint)


def _prompts(checkpoint: Any) -> list[tuple[int, ...]]:
    tokenizer = checkpoint.tokenizer()
    return [tuple(tokenizer.chat_ids([{"role": "user", "content": question}])) for question in QUESTIONS]


@pytest.fixture(scope="module")
def target(checkpoint: Any) -> Decoder:
    return _decoder(checkpoint, layers=None)


@pytest.fixture(scope="module")
def draft(checkpoint: Any) -> Decoder:
    """The default model without its upper layers: a poor drafter, so most of what it says must be rejected."""
    return _decoder(checkpoint, layers=8)


def _decoder(checkpoint: Any, layers: int | None) -> Decoder:
    config = DecoderConfig.from_hf(checkpoint.config)
    if layers is not None:
        cut = {name: getattr(config, name)[:layers] for name in ("layer_ropes", "windows", "sparse")}
        config = replace(config, layers=layers, **cut)
    return Decoder(config, checkpoint.weights, dtype=torch.float32, device="cpu", kv_slots=None)


@pytest.fixture(scope="module")
def oracle(prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """What transformers wrote."""
    recorded = json.loads(RECORDED.read_text())
    assert [one["prompt"] for one in recorded] == [list(prompt) for prompt in prompts]
    return [one["text"] for one in recorded]


def written_by_transformers(checkpoint: Any, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Greedily, from the same weights."""
    from forerun.measure.peers.transformers import load_transformers_model

    model = load_transformers_model(checkpoint, checkpoint.tokenizer().eos_ids, torch.float32)
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def head_for(drafter: str) -> str | None:
    """The folder of the head in the box that this drafter runs on the default model; None where there is none."""
    served = [head for head in heads_in_the_box() if "smollm2" in head.target.lower() and head.serves(drafter)]
    return str(served[0].path) if served else None


# heads that nobody trained for this model are covered on the TableLM, tokens that a grammar forces in tests/structure
DRAFTERS = [
    name
    for name in sorted({name for spec in registry.drafters.specs() for name in (spec.name, spec.best)})
    if name != "forced" and (registry.drafters.spec(name).needs != "head" or head_for(name) is not None)
]


BY_PASSES = [name for name in DRAFTERS if name == "layer_skip" or "draft_" in name]  # of the cut model


def prompts_of(drafter: str) -> slice:
    """All of them without drafts; else a third, or those three on which the cut model has drafts accepted."""
    if drafter == "none":
        return slice(None)
    if drafter in BY_PASSES:  # on most of the others too little is accepted to tell anything
        return slice(3, None, 4)
    others = [name for name in DRAFTERS if name not in ("none", *BY_PASSES)]
    return slice(others.index(drafter) % 3, None, 3)


def test_every_prompt_has_several_drafters() -> None:
    counts = Counter(i for name in DRAFTERS for i in range(len(QUESTIONS))[prompts_of(name)])
    assert min(counts[i] for i in range(len(QUESTIONS))) >= 3  # none is one of them


@pytest.mark.slow
def test_what_was_recorded_is_what_transformers_writes(
    checkpoint: Any, prompts: list[tuple[int, ...]], oracle: list[list[int]]
) -> None:
    assert written_by_transformers(checkpoint, prompts) == oracle


@pytest.mark.parametrize(
    "drafter", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS]
)
def test_greedy_text_equals_transformers(
    drafter: str,
    target: Decoder,
    draft: Decoder,
    checkpoint: Any,
    prompts: list[tuple[int, ...]],
    oracle: list[list[int]],
) -> None:
    assert len(prompts) >= 12
    budget = 4 if drafter in BY_PASSES else 6  # a pass for each level
    speculative = SpeculativeConfig(
        drafter=drafter, draft_model=head_for(drafter), budget=budget, width=2, controller="fixed"
    )
    engine = make_engine(target, checkpoint.tokenizer().eos_ids, speculative, draft_target=draft)
    some = prompts_of(drafter)
    params, seqs = SamplingParams(max_tokens=TOKENS), list[SequenceState]()
    for prompt, text in zip(prompts[some], oracle[some], strict=True):
        predicted = (*text[:4], 0, *text[5:]) if drafter == "prediction" else ()  # one token is wrong
        seqs.append(engine.prepare(Request(prompt, params, prediction=predicted)))
    for seq in seqs:
        engine.enqueue(seq)
    while engine.busy:
        engine.step()
    assert [seq.tokens[seq.prompt_length :] for seq in seqs] == oracle[some]
    accepted = sum(seq.stats.accepted for seq in seqs)
    few = 0 if drafter == "draft_text" else len(seqs)  # a text must end with that draft's own tokens
    assert (accepted > few) is (drafter != "none"), accepted  # else equal texts would say little
    if drafter == "eagle3":  # a head read wrongly (another layer, an id off by one) would pass all else
        assert sum(map(len, oracle[some])) > 1.6 * sum(seq.stats.rounds for seq in seqs)
    assert target.used_slots == draft.used_slots == 0


def test_negative_control_the_draft_model_alone_writes_something_else(
    draft: Decoder, checkpoint: Any, prompts: list[tuple[int, ...]], oracle: list[list[int]]
) -> None:
    engine = make_engine(draft, checkpoint.tokenizer().eos_ids, SpeculativeConfig(drafter="none"))
    texts, _ = run(engine, [Request(prompts[0], SamplingParams(max_tokens=TOKENS))])
    assert texts[0] != oracle[0]


@pytest.mark.slow
def test_a_seed_fixes_the_text_on_the_real_model(
    target: Decoder, draft: Decoder, checkpoint: Any, prompts: list[tuple[int, ...]]
) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, seed=7)
    requests = [Request(prompt, params) for prompt in prompts[:2]]
    texts = []
    for drafter in ("none", "ngram", "draft_model", "eagle3"):
        speculative = SpeculativeConfig(drafter=drafter, draft_model=head_for(drafter), budget=4, controller="fixed")
        engine = make_engine(target, checkpoint.tokenizer().eos_ids, speculative, draft_target=draft)
        texts.append(run(engine, requests)[0])
    assert texts[0] == texts[1] == texts[2] == texts[3]


def record() -> None:
    from forerun.models.load.checkpoint import open_checkpoint

    checkpoint = open_checkpoint("smollm2")
    prompts = _prompts(checkpoint)
    texts = written_by_transformers(checkpoint, prompts)
    lines = [json.dumps({"prompt": prompt, "text": text}) for prompt, text in zip(prompts, texts, strict=True)]
    RECORDED.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    record()
