"""The default model on two ranks writes the texts of one rank, with any drafter; where not, two logits nearly tie."""

from collections.abc import Iterator

import pytest
import torch

from forerun import LLM, Completion
from forerun.core.types import Needs, PlainSeq, TreeBatch

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = ["Write a short note about rivers, and then write it again.", "List five colours.", "Why is the sky blue?"]
TOKENS = 16
NEAR = 1e-3  # logits of up to 35 as near as this may change places: ranks differed by 2.3e-4 at most


@pytest.fixture(scope="module")
def one(smollm2_path: str) -> LLM:
    return LLM(smollm2_path, dtype="float32", drafter="none")


@pytest.fixture(scope="module")
def two(smollm2_path: str) -> Iterator[LLM]:
    with LLM(smollm2_path, tensor_parallel_size=2, drafter="eagle3") as llm:
        yield llm


@pytest.fixture(scope="module")
def texts_of_one(one: LLM) -> list[Completion]:
    return one.chat(_chats(), max_tokens=TOKENS, temperature=0)


def _chats() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": prompt}] for prompt in PROMPTS]


def logits_after(llm: LLM, tokens: list[int]) -> torch.Tensor:
    seq, target = PlainSeq(-7, tokens), llm.engine.target
    target.prefill([seq], Needs())
    logits = target.score([seq], TreeBatch.chains([tokens[-1:]]), Needs()).required_logits[0].clone()
    target.release(seq)
    return logits


@pytest.mark.parametrize("drafter", ["none", "ngram", "eagle3"])
def test_texts_are_those_of_one_rank(one: LLM, two: LLM, texts_of_one: list[Completion], drafter: str) -> None:
    chats, wanted = _chats(), texts_of_one
    found = two.chat(chats, max_tokens=TOKENS, temperature=0, drafter=drafter, budget=3)  # paying or not
    for prompt, ours, theirs in zip(chats, wanted, found, strict=True):
        pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), None)
        if at is None:
            assert ours.text == theirs.text
            continue
        logits = logits_after(one, [*one.encode(prompt), *ours.token_ids[:at]])
        gap = float(logits[ours.token_ids[at]] - logits[theirs.token_ids[at]])
        assert 0 <= gap < NEAR, f"{ours.text!r} and {theirs.text!r} differ, and not by a near-tie"
    drafted = sum(text.drafted for text in found)
    assert (drafted > 0) == (drafter != "none")


def test_logits_are_near(one: LLM, two: LLM) -> None:
    tokens = list(one.encode("The sea is a vast and mysterious realm, teeming with"))
    ours, theirs = logits_after(one, tokens), logits_after(two, tokens)
    assert float((ours - theirs).abs().max()) < NEAR / 2
    # sums have another order: equal bits would mean that nothing was split
    assert not torch.equal(ours, theirs)


def test_runs_on_two_ranks_are_equal_in_every_bit(two: LLM) -> None:
    tokens = list(two.encode("Rivers run to the sea because"))
    assert torch.equal(logits_after(two, tokens), logits_after(two, tokens))
